# kubelet-authenticator. `make help` lists the targets; each installs what it needs on Debian and Ubuntu when run as root.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VERSION ?= devel
COMMIT ?= $(shell git rev-parse --short HEAD 2>/dev/null || echo unknown)
LDFLAGS := -s -w -X main.version=$(VERSION) -X main.commit=$(COMMIT)
FUZZTIME ?= 10s

export GOFLAGS := -buildvcs=false
# Tools are pinned in a module of their own, apart from the product's dependencies.
TOOL := go tool -modfile=$(CURDIR)/tools/go.mod
GOTESTSUM := $(TOOL) gotestsum --format=pkgname --format-hide-empty-pkg

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-12s %s\n", $$1, $$2 }'

.PHONY: build
build: ## build the plugin into bin/
	CGO_ENABLED=0 go build -trimpath -ldflags '$(LDFLAGS)' -o bin/ ./cmd/kubelet-authenticator

.PHONY: demo
demo: ## start a real control plane and have a node get its certificate
	cd test && go run ./demo

.PHONY: test
test: ## run everything, unit and end to end against a real control plane
	@scripts/need gcc strace mount
	$(GOTESTSUM) -- -race ./...
	cd test && $(GOTESTSUM) -- -race -timeout 20m ./...

.PHONY: fuzz
fuzz: ## fuzz each parser for FUZZTIME
	@scripts/fuzz $(FUZZTIME)

.PHONY: lint
lint: ## run golangci-lint over all modules
	$(TOOL) golangci-lint run --allow-parallel-runners ./...
	cd test && $(TOOL) golangci-lint run --allow-parallel-runners --config ../.golangci.yml ./...

.PHONY: vuln
vuln: ## look for known vulnerabilities, where the database can be reached
	@scripts/vuln $(TOOL) govulncheck ./...

.PHONY: bench
bench: ## compare the valid path with a program that only reads and prints the file
	cd test && go run ./bench
