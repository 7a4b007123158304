# `make` alone lists the targets.

BIN := bin

# The modules of this repository. bench/ compares the SDK with other libraries.
# deploy/ tests the manifests with the libraries of Kubernetes. examples/ limits
# requests to web frameworks. tools/ has the linter and benchstat. The module graph
# of users doesn't have the dependencies of these.
MODULES := $(patsubst %/go.mod,%,$(wildcard ./go.mod ./bench/go.mod ./deploy/go.mod ./deploy/apiserver/go.mod ./examples/go.mod ./tools/go.mod))

# Packages whose tests need no server and end within seconds.
UNIT_PKGS ?= $(addsuffix /...,$(wildcard ./policy ./internal/replay/accesslog ./internal/config))

# Packages that `make test` doesn't test: test-operate and test-languages do. `make test-all` tests the first one
# together with the other packages, because it waits most of the time.
APART := ./test/operate ./test/languages

# Packages whose goroutines share state. `make test` tests only these with the race detector, so that it ends within 15
# minutes on two cores of a fresh machine. `make race` tests all packages with the race detector.
# Package pool is not in the list: its tests are long simulations, in which the race detector itself sometimes crashes.
RACE_PKGS := ./election ./fetch ./refill

# The number of test programs that run at once. Each starts real servers and waits half of the time, so three programs
# keep a two-core machine busy.
TEST_PROCS ?= 3
# The timeout of a test program. On a busy machine, the longest one needs three times its usual time.
TEST_TIMEOUT ?= 20m

# All builds have the same flags as the image's build, so that each package is compiled only once. With -trimpath a
# program needs ZONEINFO to find Go's time zones. Without the debugger's tables, packages are compiled in four fifths of
# the time. Stack traces and profiles don't need these tables.
export CGO_ENABLED := 0
GOFLAGS_OF_ALL := -trimpath -gcflags=all=-dwarf=false
export GOFLAGS := $(filter-out $(GOFLAGS_OF_ALL),$(GOFLAGS)) $(GOFLAGS_OF_ALL)
export ZONEINFO ?= $(shell go env GOROOT)/lib/time/zoneinfo.zip

# run-test runs vet before the tests. With -w, the C compiler's debugger tables aren't linked either.
GO_TEST := go test -count=1 -shuffle=on -vet=off -ldflags=-w -p $(TEST_PROCS)

# The benchmarks of `make bench`: how often each runs, a pattern for their names, and their packages.
COUNT ?= 10
BENCH ?= .
BENCH_PKGS ?= ./...
# Flags of the comparison with other libraries in `make bench`. Without flags it takes a few minutes.
# `go -C bench run . -h` lists the flags.
COMPARE ?=

# N is the number of schedules in `make robustness`, `make conserve` and `make pools`. SEED is the seed of the first
# one; if it is empty, a random seed is drawn and printed. In `make robustness`, 48 schedules from a drawn seed on have
# every pair of values of a deployment.
N ?= 50
SEED ?=

# Schedules in `make simulate`: SCHEDULES of the election with the refill loop, and POOL_SCHEDULES of the pools.
SCHEDULES ?= 10000
POOL_SCHEDULES ?= 60

# How often `make failover` ends the active replica, in each mode.
KILLS ?= 100

# What `make scale` measures: see test/scale/README.md.
SCALE ?= -templates 1000,10000,100000,1000000

# The number of drained budgets that `make scale` measures.
BUDGETS ?= 1000000

# A regular expression for the names of the mutants that `make mutants` runs, such as ^shared/credit.
MUTANTS ?= .

# How long `make fuzz` runs each fuzz test.
FUZZTIME ?= 30s

.DEFAULT_GOAL := help

.PHONY: help
help: ## List the targets, and the variables that they use
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build
build: ## Build the programs into bin/
	go build -o $(BIN)/ ./cmd/...

# The targets that run tests. needs-<target> has the programs that a target needs, which are rows of
# scripts/require.sh. run-<target> has its steps.
TESTS := test test-operate test-deploy test-languages
needs-test := go redis cc faketime curl
needs-test-operate := go redis prometheus chromium
needs-test-deploy := go
needs-test-languages := go redis python node nginx caddy

.PHONY: $(TESTS)
test: ## Vet, the tests on real servers (concurrent packages with -race), the simulations
test-operate: ## Reloads, rolling restarts, alert rules, dashboards, the status page: with Prometheus and Chromium
test-deploy: ## The manifests of deploy/, with the libraries of Kubernetes
test-languages: ## The examples in Python and Node, and the sidecar behind nginx and Caddy
$(TESTS):
	@scripts/require.sh $(needs-$@)
	@scripts/slowest.sh $(MAKE) --no-print-directory run-$@
	@echo "make $@: passed"

.PHONY: test-all
test-all: ## Everything that CI runs: test, and every test-… target except test-apiserver
	@scripts/require.sh $(sort $(foreach t,$(TESTS),$(needs-$t)))
	@scripts/slowest.sh $(MAKE) --no-print-directory APART=./test/languages $(addprefix run-,$(filter-out test-operate,$(TESTS)))
	@echo "make test-all: passed"

# test-apiserver is not in TESTS, because the first build of the API server takes many minutes.
.PHONY: test-apiserver
test-apiserver: $(BIN)/kube-apiserver ## Applies manifests, chart and tutorial to a real API server of Kubernetes, strictly
	go build -o $(BIN)/etcd go.etcd.io/etcd/server/v3
	go -C deploy/apiserver test -count=1 -timeout $(TEST_TIMEOUT) ./...

.PHONY: vulncheck
vulncheck: $(BIN)/govulncheck ## Known vulnerabilities that the code reaches, of vuln.go.dev or the mirror $GOVULNDB
	$(BIN)/govulncheck $(if $(GOVULNDB),-db $(GOVULNDB)) ./...

.PHONY: race
race: ## Run every test of the module with the race detector
	@scripts/require.sh $(sort $(needs-test) $(needs-test-operate) $(needs-test-languages))
	@$(MAKE) --no-print-directory $(BIN)/node/node_modules/redis
	CGO_ENABLED=1 $(GO_TEST) -race -timeout 20m ./...

.PHONY: simulate
simulate: ## SCHEDULES random fault schedules of election and refill loop, POOL_SCHEDULES of the pools, in simulated time, without the race detector
	REFILLER_SEED=$(SEED) REFILLER_SCHEDULES=$(SCHEDULES) GOGC=400 $(GO_TEST) -timeout 0 -run TestElectionAndRefillLoopTogether -v ./election
	REFILLER_SEED=$(SEED) REFILLER_SCHEDULES=$(POOL_SCHEDULES) $(GO_TEST) -timeout 0 -run TestNothingIsExceededUnderRandomFaults -v ./pool

.PHONY: unit
unit: ## Tests of the packages that need no server (UNIT_PKGS); needs only Go, takes seconds
	go test -count=1 -shuffle=on -timeout 1m $(UNIT_PKGS)

.PHONY: lint
lint: vet $(BIN)/golangci-lint $(BIN)/deadcode ## Vet, golangci-lint, unreachable functions and the dependency rule of fetch
	$(BIN)/golangci-lint run ./...
	scripts/deadcode.sh
	scripts/check-fetch-deps.sh

.PHONY: bench
bench: ## Side by side with other libraries (COMPARE), then benchmarks (COUNT, BENCH, BENCH_PKGS) against the run before
	@scripts/require.sh go redis
	@$(MAKE) --no-print-directory $(BIN)/benchstat
	go -C bench run . $(COMPARE)
	scripts/bench.sh $(COUNT) '$(BENCH)' $(BENCH_PKGS)

.PHONY: robustness
robustness: ## N random deployments and fault schedules against real servers; SEED=… replays one
	@scripts/require.sh go redis faketime
	go test -count=1 -timeout 0 -parallel 64 -v -run TestSchedules ./test/robustness -args -n $(N) $(if $(SEED),-seed $(SEED))

.PHONY: conserve
conserve: ## N random schedules of consumers that do everything at once, and faults, with -race; SEED=… replays one
	@scripts/require.sh go redis cc
	CGO_ENABLED=1 REFILLER_SEED=$(SEED) REFILLER_SCHEDULES=$(N) go test -race -ldflags=-w -count=1 -timeout 0 -v -run TestEverythingAtOnceConservesTokens ./fetch

.PHONY: pools
pools: ## N random fault schedules of a pool over three regions on real servers; SEED=… replays one, LONG=true for long faults
	@scripts/require.sh go redis faketime
	go test -count=1 -timeout 0 -parallel 4 -v -run TestSchedules ./test/pools -args -n $(N) $(if $(SEED),-seed $(SEED)) $(if $(LONG),-long)

.PHONY: flows
flows: ## Measure how real replicas divide a bucket among the flows of real clients
	@scripts/require.sh go redis
	go test -count=1 -timeout 0 -v ./test/flows -args -rows

.PHONY: doors
doors: ## Measure the sidecar: bursts of 10,000 calls directly and behind proxies, latencies at 1,000 calls a second
	@scripts/require.sh go redis nginx caddy
	go test -count=1 -timeout 0 -v -run TestBursts -bench Latency -benchtime 1x ./test/languages -args -measure

.PHONY: failover
failover: ## End the active replica KILLS times in each mode, and the master of a Cluster, and print the gaps
	@scripts/require.sh go redis
	go test -count=1 -timeout 0 -v -run 'TestFailover|TestMasterFailover' ./test/robustness -args -kills $(KILLS)

.PHONY: scale
scale: ## Measure the cost of very many buckets and budgets (SCALE, BUDGETS, see test/scale/README.md): a table, bin/scale.json, bin/scale.svg
	@scripts/require.sh go redis
	@mkdir -p $(BIN)
	go test -v -count=1 -timeout 0 -run TestScale ./test/scale -args -json $(CURDIR)/$(BIN)/scale.json $(SCALE)
	go test -v -count=1 -timeout 0 -run TestBudgets ./test/scale -args -budgets $(BUDGETS) -period 3m
	go -C bench run ./scalechart $(CURDIR)/$(BIN)/scale.json $(CURDIR)/$(BIN)/scale.svg

.PHONY: fuzz
fuzz: ## Run every fuzz test for FUZZTIME
	@scripts/require.sh go redis
	scripts/fuzz.sh $(FUZZTIME)

.PHONY: mutants
mutants: ## Run the tests of the Lua scripts with each change of a statement (MUTANTS), and list the changes that no test detects
	@scripts/require.sh go redis faketime
	GOGC=400 go test -count=1 -ldflags=-w -timeout 0 -v -run TestEveryMutantIsNoticed ./lua -args -mutants '$(MUTANTS)'

.PHONY: config-docs
config-docs: ## Write docs/configuration.md and the JSON Schemas from the structs that a configuration is decoded into
	go test -count=1 -run TestReferenceAndSchemaAreThoseOfTheStructs ./internal/config -args -write
	go -C deploy test -count=1 -run 'TestTheSchemaOfValuesHoldsThatOfTheConfiguration|TestTheComponentsRulesAreThoseOfMonitoring' ./k8s -args -write

.PHONY: proto
proto: ## Generate the Go code of api/
	@scripts/require.sh go protoc
	@$(MAKE) --no-print-directory $(BIN)/protoc-gen-go $(BIN)/protoc-gen-go-grpc
	PATH="$(CURDIR)/$(BIN):$$PATH" protoc -I api --go_out=api --go_opt=paths=source_relative \
		--go-grpc_out=api --go-grpc_opt=paths=source_relative refiller/v1/buckets.proto refiller/v1/limits.proto

.PHONY: verify
verify: ## Check that modules are tidy, gofmt, vet, lint, the examples and bench/; changes nothing
	@scripts/require.sh go redis
	@$(MAKE) --no-print-directory lint
	@set -e; for m in $(MODULES); do echo "go mod tidy -diff ($$m)"; go -C $$m mod tidy -diff; done
	go -C examples vet ./...
	go -C examples test -count=1 -timeout $(TEST_TIMEOUT) ./...
	go -C bench vet ./...
	go -C bench test -count=1 -timeout $(TEST_TIMEOUT) ./...
	@bad=$$(gofmt -s -l .); [ -z "$$bad" ] || { echo "not gofmt -s clean:"; echo "$$bad"; exit 1; } >&2
	@echo "make verify: passed"

.PHONY: tidy
tidy: ## Tidy every module and format the code
	@set -e; for m in $(MODULES); do echo "go mod tidy ($$m)"; go -C $$m mod tidy; done
	gofmt -s -w .

# GoReleaser needs bin/sbom, which writes the bills of materials, in the PATH.
GORELEASER := PATH="$(CURDIR)/$(BIN):$$PATH" goreleaser

.PHONY: release-docs
release-docs: ## Change the pages of the documentation for the first release; once, in the commit of the release
	scripts/release-docs.sh

.PHONY: release release-snapshot
release-snapshot: $(BIN)/goreleaser $(BIN)/sbom ## A release in dist/: archives, checksums, SBOMs, image, chart; nothing is signed
	$(GORELEASER) check
	$(GORELEASER) release --snapshot --clean --skip=sign,publish
	scripts/finish-snapshot.sh

release: $(BIN)/goreleaser $(BIN)/sbom ## Publish a release of the commit's tag; the workflow runs it
	$(GORELEASER) release --clean

# Steps of the targets above.

.PHONY: $(addprefix run-,$(TESTS))
run-test:
	go vet ./...
	scripts/check-fetch-deps.sh
	@$(MAKE) --no-print-directory -j2 run-test-plain run-test-race
	@$(MAKE) --no-print-directory simulate SCHEDULES=1000 POOL_SCHEDULES=20

# Both run at the same time, because both wait for half of the time.
.PHONY: run-test-plain run-test-race
run-test-plain:
	$(GO_TEST) -timeout $(TEST_TIMEOUT) $$(go list ./... | grep -vxF "$$(go list $(RACE_PKGS) $(APART))")

run-test-race:
	CGO_ENABLED=1 $(GO_TEST) -p 2 -race -timeout $(TEST_TIMEOUT) $(RACE_PKGS)

run-test-operate:
	$(GO_TEST) -timeout $(TEST_TIMEOUT) ./test/operate

# The programs are compiled first, with the flags of the Dockerfile. Otherwise several tests would compile the same
# packages at the same time, within their timeouts.
run-test-deploy:
	go build -tags production ./cmd/...
	go -C deploy vet ./...
	go -C deploy test -count=1 -vet=off -timeout $(TEST_TIMEOUT) ./...

run-test-languages: $(BIN)/node/node_modules/redis
	$(GO_TEST) -timeout $(TEST_TIMEOUT) ./test/languages

$(BIN)/node/node_modules/redis: examples/node/package.json
	npm install --silent --no-audit --no-fund --package-lock=false --prefix $(BIN)/node redis@5
	@touch $@

.PHONY: vet
vet:
	go vet ./...

# These are compiled from source once, at the versions in tools/go.mod. That takes a minute or two.
$(BIN)/golangci-lint: tools/go.mod tools/go.sum
	go build -C tools -o ../$(BIN)/ github.com/golangci/golangci-lint/v2/cmd/golangci-lint

$(BIN)/deadcode: tools/go.mod tools/go.sum
	go build -C tools -o ../$(BIN)/ golang.org/x/tools/cmd/deadcode

$(BIN)/benchstat: tools/go.mod tools/go.sum
	go build -C tools -o ../$(BIN)/ golang.org/x/perf/cmd/benchstat

$(BIN)/govulncheck: Makefile
	GOBIN="$(CURDIR)/$(BIN)" go install golang.org/x/vuln/cmd/govulncheck@v1.9.0

# This also builds kubectl and helm. The chart asks the API server for its version, which a server that is built from
# modules doesn't know. So the version is set here.
APISERVER_VERSION = $(shell go list -C deploy/apiserver -m -f '{{.Version}}' k8s.io/kubernetes)
$(BIN)/kube-apiserver: deploy/apiserver/go.mod
	go build -C deploy/apiserver -ldflags='-s -w -X k8s.io/component-base/version.gitVersion=$(APISERVER_VERSION)' \
		-o ../../$(BIN)/ helm.sh/helm/v4/cmd/helm k8s.io/kubernetes/cmd/kubectl k8s.io/kubernetes/cmd/kube-apiserver

# This is compiled from source once. That takes some minutes.
$(BIN)/goreleaser: Makefile
	GOBIN="$(CURDIR)/$(BIN)" go install github.com/goreleaser/goreleaser/v2@v2.13.3

.PHONY: $(BIN)/sbom
$(BIN)/sbom:
	go build -C deploy -o ../$(BIN)/ ./cmd/sbom

# The code that these programs generate contains their versions.
$(BIN)/protoc-gen-go:
	GOBIN="$(CURDIR)/$(BIN)" go install google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.11

$(BIN)/protoc-gen-go-grpc:
	GOBIN="$(CURDIR)/$(BIN)" go install google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.6.2
