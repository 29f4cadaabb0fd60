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
build: ## build the plugin and the controller into bin/
	CGO_ENABLED=0 go build -trimpath -ldflags '$(LDFLAGS)' -o bin/ ./cmd/kubelet-authenticator ./cmd/node-attestation-controller

.PHONY: demo
demo: ## start a real control plane and have a node prove which machine it is
	@scripts/need swtpm
	cd test && go run ./demo

# Tests that have to have run: without a TPM, or the independent implementation, nothing is shown.
TPM_UNIT := $(addprefix TestProveWithEachEK/,ecc-p256 ecc-p384-high rsa-2048) TestVectorsAreGenerated
TPM_E2E := $(addprefix TestProtocolAgainstSwtpm/,ecc-p256 ecc-p384-high rsa-2048) TestProtocolAgainstTheSimulator \
	$(addprefix TestTPMEnrolmentAndRenewal/,ecc-p256 ecc-p384-high rsa-2048 swtpm_setup)
# Without a real kubelet and kubeadm, which need root, it is not shown that a node joins.
ROOT := $(filter 0,$(shell id -u))
NODE_E2E := TestNodeBecomesReady $(addprefix TestKubeadm/,drop-in drop-in/first-boot drop-in/restart not-in-inventory denied bootstrap-by-exec \
	bootstrapped-around rotated-around) $(addprefix TestKubeadmWithoutController/,join reboot) \
	$(addprefix TestKubeadmWithoutPolicy/,stock drop-in-not-enabled bootstrapped-around rotated-around)

.PHONY: test
test: ## run everything, unit and end to end against a real control plane and software TPMs
	@scripts/need gcc strace mount ip systemd-nspawn openssl python3 swtpm swtpm_setup tpm2_checkquote /usr/include/openssl/ssl.h
	@mkdir -p bin
	$(GOTESTSUM) --jsonfile bin/unit.json -- -race ./...
	@scripts/ran bin/unit.json $(TPM_UNIT)
	cd test && $(GOTESTSUM) --jsonfile ../bin/e2e.json -- -race -tags simulator -timeout 20m ./...
	@scripts/ran bin/e2e.json $(TPM_E2E) $(if $(ROOT),$(NODE_E2E))
	$(if $(ROOT),,@echo "*** the tests of real kubelets and of kubeadm were skipped: they need root ***")

.PHONY: test-skew
test-skew: ## run a kubelet of Kubernetes 1.34, too, against the control plane (as root; builds for some minutes the first time)
	@scripts/need swtpm mount ip
	cd test && KUBELET_AUTHENTICATOR_TEST_KUBELETS=v1.34 go test -count=1 -run TestNodeBecomesReady -v ./node

.PHONY: fuzz
fuzz: ## fuzz each parser for FUZZTIME
	@scripts/fuzz $(FUZZTIME)

.PHONY: lint
lint: ## run golangci-lint over all modules
	$(TOOL) golangci-lint run --allow-parallel-runners ./...
	cd test && $(TOOL) golangci-lint run --allow-parallel-runners --build-tags simulator --config ../.golangci.yml ./...

.PHONY: vuln
vuln: ## look for known vulnerabilities, where the database can be reached
	@scripts/vuln $(TOOL) govulncheck ./...

.PHONY: bench
bench: ## compare the valid path with a program that only reads and prints the file, and the kinds of EK
	@scripts/need swtpm
	cd test && go run ./bench
