# kubelet-authenticator. `make help` lists the targets; each installs what it needs on Debian and
# Ubuntu when run as root.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VERSION ?= v0.0.0-devel
COMMIT ?= $(shell git describe --always --exclude='*' --abbrev=12 --dirty 2>/dev/null || echo unknown)
# No build ID: it would be made of the folder's content as it happens to be.
LDFLAGS = -s -w -buildid= -X main.version=$(VERSION) -X main.commit=$(COMMIT) -X main.commitTime=$(SOURCE_DATE_EPOCH)
FUZZTIME ?= 10s

DIST ?= dist
ARCHES ?= amd64 arm64
FORMATS ?= deb rpm tar sysext
SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null)

# One set of flags for all that is built without the race detector: a package that is compiled with
# other flags is compiled once more. test/compile has the same flags.
export GOFLAGS := -trimpath -buildvcs=false -gcflags=all=-dwarf=false
export CGO_ENABLED := 0
# Tools are pinned in a module of their own, separate from the product's dependencies.
TOOL := go tool -modfile=$(CURDIR)/tools/go.mod
GOTESTSUM := $(TOOL) gotestsum --format=pkgname --format-hide-empty-pkg

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-17s %s\n", $$1, $$2 }'

# By the environment, so that no shell reads what is in them.
build packages operator-packages chart-package image components release: export VERSION := $(VERSION)
build packages operator-packages image release: export LDFLAGS := $(LDFLAGS)
packages operator-packages chart-package image: export SOURCE_DATE_EPOCH := $(SOURCE_DATE_EPOCH)
packages operator-packages image: export ARCHES := $(ARCHES)
packages: export FORMATS := $(FORMATS)
packages operator-packages chart-package image components release: export DIST := $(DIST)
image: export COMMIT := $(COMMIT)
image: export BASE_IMAGE := $(BASE_IMAGE)
image components release: export IMAGE_REPO := $(IMAGE_REPO)

.PHONY: build
build: ## build the plugin, the controller and kubectl-attest into bin/
	go build -ldflags "$$LDFLAGS" -o bin/ ./cmd/kubelet-authenticator ./cmd/node-attestation-controller ./cmd/kubectl-attest
	@install cmd/kubectl-attest/kubectl_complete-attest bin/

# Modules of their own, so that the product does not depend on the clients of these platforms.
PLATFORMS := platforms platforms/vsphere

.PHONY: platforms
platforms: export LDFLAGS := $(LDFLAGS)
platforms: ## build the controllers for vSphere, EC2 and Compute Engine into bin/ (docs/platforms.md)
	@mkdir -p bin
	for module in $(PLATFORMS); do go -C "$$module" build -ldflags "$$LDFLAGS" -o "$(CURDIR)/bin/" ./...; done

# The plugin's: it is what machine images need. Reproducible: the same commit, VERSION and Go
# release make the same bytes.
.PHONY: packages
packages: ## make deb, rpm, tarball and sysext image of the plugin, with SBOMs and SHA256SUMS, in DIST (also: VERSION, ARCHES, FORMATS)
	@scripts/need mksquashfs
	@PROGRAMS=kubelet-authenticator SYSTEMS=linux packaging/build "$$DIST"

# The controller is for its offline commands, such as those on inventories.
.PHONY: operator-packages
operator-packages: ## make deb, rpm and archives for Linux and macOS of kubectl-attest and node-attestation-controller, and krew's manifest, in DIST (also: VERSION, ARCHES)
	@PROGRAMS='kubectl-attest node-attestation-controller' FORMATS='deb rpm tar' SYSTEMS='linux darwin' packaging/build "$$DIST"

.PHONY: chart-package
chart-package: ## make the Helm chart's archive in DIST (also: VERSION)
	@packaging/helm/build "$$DIST"

# The base is fetched by its digest: BASE_IMAGE, or the one of .ko.yaml.
.PHONY: image
image: ## make the controller's image in DIST, with SBOMs, on BASE_IMAGE (NAME@sha256:...), and push it to IMAGE_REPO if that is set (also: VERSION, ARCHES)
	@packaging/image/build "$$DIST"

.PHONY: components
components: ## make components.yaml and metadata.yaml for clusterctl, and workload.yaml, in DIST, with the image of "make image" in IMAGE_REPO (also: VERSION)
	@packaging/cluster-api/build "$$DIST"

.PHONY: release
release: ## make what a release of VERSION has, in DIST, signed with the cosign key COSIGN_KEY (and COSIGN_PASSWORD), and push the image to IMAGE_REPO if that is set
	@scripts/release check "$$VERSION" "$$DIST"
	@$(MAKE) --no-print-directory packages ARCHES='amd64 arm64' FORMATS='deb rpm tar sysext' \
		COMMIT="$$(git rev-parse --short=12 HEAD)" SOURCE_DATE_EPOCH="$$(git log -1 --format=%ct)"
	@$(MAKE) --no-print-directory image ARCHES='amd64 arm64' COMMIT="$$(git rev-parse --short=12 HEAD)" SOURCE_DATE_EPOCH="$$(git log -1 --format=%ct)"
	@$(MAKE) --no-print-directory operator-packages ARCHES='amd64 arm64' \
		COMMIT="$$(git rev-parse --short=12 HEAD)" SOURCE_DATE_EPOCH="$$(git log -1 --format=%ct)"
	@$(MAKE) --no-print-directory components
	@$(MAKE) --no-print-directory chart-package SOURCE_DATE_EPOCH="$$(git log -1 --format=%ct)"
	@scripts/release sign "$$DIST/SHA256SUMS" cosign.pub
	@[ -z "$$IMAGE_REPO" ] || scripts/release sign-image \
		"$$IMAGE_REPO/node-attestation-controller@$$(cat "$$DIST/node-attestation-controller-$${VERSION#v}.digest")" cosign.pub

.PHONY: demo
# By job control (bash -m) Ctrl-C reaches the demo alone: make would end with an error.
demo: ## start a real control plane and have a node prove which machine it is (KEEP=1: leave it running, to try things)
	@echo "make demo: a control plane, software TPMs, plugin and controller; the first time it compiles them, for minutes" >&2
	@mkdir -p bin
	@scripts/need swtpm
	cd test && go run ./prebuild demo && bash -mc '../bin/demo $(if $(KEEP),-keep); exit $$?'

# Tests that have to have run: without a TPM, or the independent implementation, nothing is shown.
TPM_UNIT := $(addprefix TestProveWithEachEK/,ecc-p256 ecc-p384-high rsa-2048) TestVectorsAreGenerated
TPM_E2E := $(addprefix TestProtocolAgainstSwtpm/,ecc-p256 ecc-p384-high rsa-2048) TestProtocolAgainstTheSimulator \
	$(addprefix TestProtocolAgainstModel/,ecc-p256 ecc-p384-high rsa-2048) TestModelAnswersAsSwtpm TestModelActivatesAsSwtpm TestModelRefusesAsSwtpm \
	$(addprefix TestTPMEnrolmentAndRenewal/,ecc-p256 ecc-p384-high rsa-2048 swtpm_setup) TestMove TestManyClustersAndABlackHole
# On a machine that is itself a node these are skipped, since its name is not derived. CI is none.
HOST_UNIT := TestHostOfAnotherName TestForeignCertificateNamesNoNode
# Without a real kubelet and kubeadm, which need root, it is not shown that a node joins. The same
# holds for limits on memory and for power cuts.
ROOT := $(filter 0,$(shell id -u))
NODE_E2E := TestNodeBecomesReady TestRotatedKubelet TestStolenKeyOfKubelet TestStolenKeyReadsNothing TestInstanceBecomesReady TestNodeOutlivesItsAuthorizer TestOpenWatchesEndWithTheirConnections $(addprefix TestKubeadm/,package sysext baked-image drop-in drop-in/first-boot drop-in/restart not-in-inventory denied bootstrap-by-exec \
	bootstrapped-around rotated-around) $(addprefix TestKubeadmWithoutController/,join reboot) \
	$(addprefix TestIPv6/,ipv6 dual-stack) TestNoWayOut TestMemoryLimit TestHostileNeighbours TestPowerIsCutBeforeEachCall TestPowerIsCutInPrepare TestPowerIsCutInReset TestMachineDeployment TestReproducible TestRunsAlone TestRunsInACluster TestQuickstart TestAdopting TestInstallAndPurge $(addprefix TestKubeadmWithoutPolicy/,stock package drop-in-not-enabled bootstrapped-around rotated-around)

# How many suites are run at once: most of the time they wait.
E2E_SUITES ?= $(shell echo $$(($$(nproc) * 3 / 2)))
# Beside one suite with the race detector.
E2E_REST_SUITES := $(shell echo $$(($(E2E_SUITES) > 1 ? $(E2E_SUITES) - 1 : 1)))
# The suites that take longest begin first, so that none of them is left over at the end.
E2E_LONGEST := ./node ./e2e ./clusterapi ./clusterapi/stories ./replicas ./policies
# In these suites the product runs in the test's process, and the race detector sees it. In others
# it would see the tests alone, for a third of their processor time.
E2E_RACED := ./controller ./protocol ./fleet ./metal/simulated ./testbed
# Run by other targets: they need a tag, or a commit.
E2E_APART := ./chart ./upgrade
E2E_REST := $(E2E_LONGEST) $(filter-out $(E2E_LONGEST) $(E2E_RACED) $(E2E_APART),$(patsubst test/%/,./%,$(sort $(dir $(wildcard test/*/*_test.go test/*/*/*_test.go test/*/*/*/*_test.go)))))
# Unit tests wait, too, for timeouts and for software TPMs. The race detector makes them wait less.
UNIT_PACKAGES := $(shell echo $$(($$(nproc) * 2)))
RACE_PACKAGES := $(shell echo $$(($$(nproc) * 3 / 2)))
RACE := CGO_ENABLED=1
RACE_FLAGS := -race -vet=off -tags simulator
SPACE := $(subst ,, )
# What "make test" runs of the suites.
SHORT_TESTS := $(shell awk '!/^\#/ && NF { print $$2 }' test/short.txt)
SHORT_SUITES := $(shell awk '!/^\#/ && NF && !seen[$$1]++ { print "./" $$1 }' test/short.txt)

UNIT_NEEDS := gcc openssl python3 swtpm swtpm_setup tpm2_checkquote /usr/include/openssl/ssl.h
E2E_NEEDS := $(UNIT_NEEDS) strace mount ip systemd-nspawn mksquashfs rpm rpm2archive lintian mandoc ansible-playbook

# No result comes from the cache.
COUNT := -count=1
# A package that a change cannot alter is not tested again.
.PHONY: check
check: COUNT :=
check: lint unit ## run what each commit has to pass: lint, and the unit tests of what has changed

UNIT_TESTS = $(GOTESTSUM) --packages ./... --jsonfile bin/unit.json

# Without the race detector, which doubles the time and is part of "make test-all".
.PHONY: unit
unit: ## run all unit tests, without the race detector
	@scripts/need $(UNIT_NEEDS)
	@mkdir -p bin
	$(UNIT_TESTS) -- -vet=off -p $(UNIT_PACKAGES) $(COUNT)

.PHONY: e2e
e2e: export SUITE := $(SUITE)
e2e: export RUN := $(RUN)
e2e: ## run one suite of test/, or one test of it (SUITE=controller, RUN=TestStolenToken)
	@scripts/need $(E2E_NEEDS)
	@ls test/"$$SUITE"/*_test.go >/dev/null 2>&1 || { echo "set SUITE to one of:" $$(cd test && find * -name '*_test.go' -printf '%h\n' | sort -u); exit 1; } >&2
	@mkdir -p bin
	cd test && $(if $(filter ./$(SUITE),$(E2E_RACED)),$(RACE)) $(TOOL) gotestsum --format=testname --jsonfile "../bin/e2e-$${SUITE//\//-}.json" -- \
		$(if $(filter ./$(SUITE),$(E2E_RACED)),$(RACE_FLAGS),-vet=off) -timeout 40m -count=1 $${RUN:+-run "$$RUN"} "./$$SUITE"

# Not vetted here: lint does that, and from a cold cache it takes minutes.
.PHONY: test
test: ## run the unit tests, and the end-to-end tests of test/short.txt: a real control plane, a real kubelet, software TPMs (minutes)
	@scripts/need $(UNIT_NEEDS) mount ip
	@mkdir -p bin
	@cd test && go run ./prebuild test
	$(UNIT_TESTS) -- -vet=off -p $(UNIT_PACKAGES) $(COUNT)
	@scripts/ran bin/unit.json $(TPM_UNIT)
	cd test && $(GOTESTSUM) --packages '$(SHORT_SUITES)' --jsonfile ../bin/short.json -- -short -vet=off -timeout 40m -count=1 -p $(E2E_SUITES) -run '^($(subst $(SPACE),|,$(SHORT_TESTS)))$$'
	@scripts/ran bin/short.json $(if $(ROOT),$(SHORT_TESTS),$(filter-out $(NODE_E2E),$(SHORT_TESTS)))
	$(if $(ROOT),,@echo "*** the tests of a real kubelet were skipped: they need root ***")

# RERUN=1, as in CI, runs failed tests once more, unless more than three failed or a data race was
# found: they share few processors with real components. The output still lists each failure.
RERUN ?= 0
RERUN_FLAGS := $(if $(filter-out 0,$(RERUN)),--rerun-fails=$(RERUN) --rerun-fails-max-failures=3 --rerun-fails-abort-on-data-race --rerun-fails-run-root-test --rerun-fails-report=$(CURDIR)/bin/reruns.txt)

.PHONY: test-all
test-all: ## run all tests: the unit tests with the race detector, all end-to-end tests, the Helm chart, upgrades (as root, for most of an hour)
	@scripts/need $(E2E_NEEDS)
	@mkdir -p bin
	@cd test && go run ./prebuild test-all
	$(RACE) $(UNIT_TESTS) $(RERUN_FLAGS) -- -race -vet=off -p $(RACE_PACKAGES) $(COUNT)
	$(RACE) go -C tools test -race -vet=off ./...
	$(RACE) go -C perf test -race -vet=off ./...
	$(RACE) go -C platforms test -race -vet=off -short ./...
	go -C platforms/vsphere test -vet=off -short ./... # govmomi takes ten minutes with the race detector
	@scripts/ran bin/unit.json $(TPM_UNIT) $(HOST_UNIT)
	$(MAKE) --no-print-directory -j2 e2e-raced e2e-rest
	cat bin/e2e-raced.json bin/e2e-rest.json >bin/e2e.json
	@scripts/ran bin/e2e.json $(TPM_E2E) $(if $(ROOT),$(NODE_E2E))
	$(if $(ROOT),,@echo "*** the tests of real kubelets, of kubeadm and of packages that are installed were skipped: they need root ***")
	$(MAKE) --no-print-directory chart
	if git cat-file -e '$(UPGRADE_FROM)^{commit}' 2>/dev/null; then $(MAKE) --no-print-directory test-upgrade; \
	else echo "*** upgrades were skipped: this clone does not have the commit $(UPGRADE_FROM) ***"; fi

# Beside each other.
.PHONY: e2e-raced e2e-rest
e2e-raced:
	cd test && $(RACE) $(GOTESTSUM) $(RERUN_FLAGS) --packages '$(E2E_RACED)' --jsonfile ../bin/e2e-raced.json -- $(RACE_FLAGS) -timeout 40m -count=1 -p 1
e2e-rest:
	cd test && $(GOTESTSUM) $(RERUN_FLAGS) --packages '$(E2E_REST)' --jsonfile ../bin/e2e-rest.json -- -vet=off -timeout 40m -count=1 -p $(E2E_REST_SUITES)

# -timeout includes the builds.
.PHONY: test-skew
test-skew: ## run kubelets and API servers of older releases of Kubernetes, and those of its own (as root; the first time it compiles each release, for 10 minutes)
	@scripts/need swtpm mount ip mksquashfs
	cd test && KUBELET_AUTHENTICATOR_TEST_RELEASES='v1.33 v1.34 v1.35 v1.36' go test -count=1 -timeout 120m -run 'TestNodeBecomesReady|TestOlderAPIServer' -v ./node

# On another machine than arm64 they run in an emulator. The kernel starts it in a namespace of the
# test alone (Linux 6.7 or later).
.PHONY: test-arm64
test-arm64: ## run plugin and controller for arm64 until a node is ready, elsewhere in an emulator (as root, on Linux 6.7 or later; the first time builds for minutes)
	@scripts/need swtpm mount ip mksquashfs unshare qemu-aarch64-static
	cd test && KUBELET_AUTHENTICATOR_TEST_ARM64=1 go test -count=1 -timeout 60m -run TestARM64 -v ./node

# The earliest commit that upgrades are tested from. UPGRADE_FROM=v1.2.3 selects another one. The
# test builds it from the repository's history, which a tarball does not have.
UPGRADE_FROM ?= e670793
.PHONY: test-upgrade
test-upgrade: export KUBELET_AUTHENTICATOR_TEST_UPGRADE_FROM := $(UPGRADE_FROM)
test-upgrade: ## upgrade plugin and controller from the commit UPGRADE_FROM in each order, and go back (as root, in a clone with that commit; builds it first)
	@scripts/need swtpm mount
	cd test && go test -count=1 -timeout 30m -run TestUpgrade -v ./upgrade ./clusterapi

.PHONY: test-cert-manager
test-cert-manager: ## run the real cert-manager, too, before the policies for it and after (builds for some minutes the first time)
	@scripts/need swtpm
	cd test && go test -count=1 -tags certmanager -run TestRealCertManager -v ./policies

# -timeout includes what the tests build: managers, kubelet and kubeadm take minutes on two
# processors.
.PHONY: test-clusterapi
test-clusterapi: ## run all stories with Cluster API's real managers, and machines that join with cloud-init and kubeadm (as root, for many minutes)
	@scripts/need $(E2E_NEEDS)
	cd test && KUBELET_AUTHENTICATOR_TEST_CLUSTERAPI=full go test -count=1 -timeout 90m -tags simulator -v ./testbed ./metal/... ./clusterapi/stories

.PHONY: test-memory
test-memory: ## run the controller within the memory that its manifest gives it, beside thousands of the largest requests (as root, for some minutes, with 16 GiB)
	@scripts/need swtpm
	cd test && KUBELET_AUTHENTICATOR_TEST_MEMORY=full go test -count=1 -timeout 60m -tags simulator -run TestMemoryLimit -v ./memory

.PHONY: rotate-1000
rotate-1000: ## rotate a thousand simulated nodes and a real kubelet while they renew their Leases (as root, for some minutes)
	@scripts/need swtpm mount ip
	cd test && KUBELET_AUTHENTICATOR_TEST_ROTATE=full go test -count=1 -timeout 20m -tags simulator -run TestThousand -v ./revocation/kubelet

# Each of them is bounded; all of them take some three hours. docs/reliability.md says what each
# shows.
.PHONY: soak
soak: ## run the long tests of docs/reliability.md, or those of ONLY, such as rotations,signer-outage (as root)
	@scripts/need $(E2E_NEEDS)
	cd test && KUBELET_AUTHENTICATOR_TEST_SOAK='$(or $(ONLY),all)' go test -count=1 -p 1 -timeout 4h -tags simulator -v ./reliability/...
	cd test && KUBELET_AUTHENTICATOR_TEST_SOAK='$(or $(ONLY),all)' go test -count=1 -p 1 -timeout 4h -tags simulator -run '^(TestHostileNeighbours|TestNodeOutlivesItsAuthorizer)$$' -v ./clusterapi ./authorizer

.PHONY: fuzz
fuzz: ## fuzz each parser for FUZZTIME, or those of FUZZED
	@scripts/fuzz $(FUZZTIME) $(FUZZED)

.PHONY: generate
generate: ## make deep copies, CRDs and docs/reference from the Go types, and the PrometheusRule from rules.yaml
	scripts/generate

.PHONY: lint
lint: ## run golangci-lint over all modules, and what reads shell scripts, man pages and the Ansible role
	@scripts/need shellcheck mandoc ansible-lint
	shellcheck .ci/run cmd/kubectl-attest/kubectl_complete-attest packaging/build packaging/cluster-api/build packaging/daemon-reload packaging/helm/build packaging/image/build packaging/krew packaging/sums packaging/tree scripts/*
	scripts/lint-man
	scripts/lint-comments
	scripts/generate --check
	cd image-builder/ansible && ansible-lint --offline --profile production
	$(TOOL) golangci-lint run --allow-parallel-runners ./...
	cd test && $(TOOL) golangci-lint run --allow-parallel-runners --build-tags simulator,certmanager,helm --config ../.golangci.yml ./...
	cd perf && $(TOOL) golangci-lint run --allow-parallel-runners --config ../.golangci.yml ./...
	cd tools && go tool golangci-lint run --allow-parallel-runners --config ../.golangci.yml ./...
	for module in $(PLATFORMS); do (cd "$$module" && $(TOOL) golangci-lint run --allow-parallel-runners --build-tags simulator --config $(CURDIR)/.golangci.yml ./...); done

# promtool is in a module of its own, and without its clients of clouds: else it takes minutes more
# to build.
PROMTOOL := GOFLAGS='$(GOFLAGS) -tags=remove_all_sd' go tool -modfile=$(CURDIR)/tools/promtool/go.mod promtool

.PHONY: monitoring
monitoring: ## check and test the alert rules of packaging/monitoring (builds promtool the first time)
	$(PROMTOOL) check rules --lint=all --lint-fatal packaging/monitoring/rules.yaml
	$(PROMTOOL) test rules packaging/monitoring/rules_test.yaml

HELM := go tool -modfile=$(CURDIR)/tools/helm/go.mod helm
CHART := packaging/helm/node-attestation-controller

.PHONY: chart
chart: ## check the Helm chart, compare it with the kustomizations, and install it on a real API server (builds helm the first time)
	@scripts/need swtpm
	for values in $(CHART)/ci/*.yaml; do $(HELM) lint --strict --quiet --namespace=node-attestation-system --values="$$values" $(CHART); done
	cd test && go test -vet=off -tags simulator,helm -count=1 -timeout 20m ./chart

.PHONY: vuln
vuln: ## look for known vulnerabilities, where the database can be reached
	@scripts/vuln $(TOOL) govulncheck ./...

.PHONY: bench
bench: ## measure the plugin: valid path, TPM, first certificate, stalls with the signer dead, jitter, overload, each beside something else (ONLY: some of them)
	@scripts/need swtpm
	cd perf && go run ./bench -plots ../docs/plots -only '$(ONLY)'

.PHONY: bench-scale
bench-scale: ## measure a thousand enrolments at once, what each costs beside kube-controller-manager's, and how that grows (ONLY: some of them)
	@scripts/need swtpm
	cd perf && go run ./scale -plots ../docs/plots -only '$(ONLY)'
