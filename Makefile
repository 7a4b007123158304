# `make` alone lists the targets.

BIN := bin

# The modules of this repository: bench/ compares with other libraries, deploy/
# tests the manifests with the libraries of Kubernetes, examples/ puts limits in
# front of web frameworks, tools/ holds the linter and benchstat. None of these is
# in the module graph of users.
MODULES := $(patsubst %/go.mod,%,$(wildcard ./go.mod ./bench/go.mod ./deploy/go.mod ./examples/go.mod ./tools/go.mod))

# Packages whose tests need no server and end in seconds.
UNIT_PKGS ?= $(addsuffix /...,$(wildcard ./policy ./internal/accesslog ./internal/config))

# Packages whose goroutines share state: `make test` tests these with the race detector and the others without, so that it
# ends within 15 minutes on two cores of a fresh machine. `make race` tests everything with it.
# Package pool is not among these: its tests are long simulations, in which the race detector itself crashes now and then.
RACE_PKGS := ./election ./fetch ./refill

# At most this many test programs run at once: each starts real servers, and two
# keep a two-core machine busy without starving the servers under test.
TEST_PROCS ?= 2
# Per test program. The whole of `make test` stays under 15 minutes on two cores.
TEST_TIMEOUT ?= 8m

# Runs in `make bench`: how often, which benchmarks, which packages.
COUNT ?= 10
BENCH ?= .
BENCH_PKGS ?= ./...
# Flags of the comparison with other libraries in `make bench`: none is the short
# form of a few minutes, `go -C bench run . -h` lists them.
COMPARE ?=

# Schedules in `make robustness` and `make conserve`, and the seed to replay (empty: a new one, printed).
N ?= 50
SEED ?=

# Schedules in `make simulate`: of election and refill loop together, and of the pools.
SCHEDULES ?= 10000
POOL_SCHEDULES ?= 60

# How often `make failover` ends the active replica, in each mode.
KILLS ?= 100

# What `make scale` measures: see test/scale/README.md.
SCALE ?= -templates 1000,10000,100000,1000000

# How long `make fuzz` gives each fuzz test.
FUZZTIME ?= 30s

.DEFAULT_GOAL := help

.PHONY: help
help: ## List the targets and the variables they take
	@awk 'BEGIN { FS = ":.*## " } /^[a-z]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build
build: ## Build the programs into bin/
	go build -trimpath -o $(BIN)/ ./cmd/...

.PHONY: test
test: ensure-redis ensure-faketime ensure-cc ## Everything but the linter: set-up, vet, all tests on real servers (concurrent packages with -race), the simulations
	go vet ./...
	scripts/check-fetch-deps.sh
	go test -count=1 -shuffle=on -timeout $(TEST_TIMEOUT) -p $(TEST_PROCS) $$(go list ./... | grep -vxF "$$(go list $(RACE_PKGS))")
	CGO_ENABLED=1 go test -race -ldflags=-w -count=1 -shuffle=on -timeout $(TEST_TIMEOUT) -p $(TEST_PROCS) $(RACE_PKGS)
	@$(MAKE) --no-print-directory simulate SCHEDULES=2000 POOL_SCHEDULES=20
	go -C deploy vet ./...
	go -C deploy test -count=1 -timeout $(TEST_TIMEOUT) ./...
	@echo "make test: passed (vet, every test, the simulations)"

.PHONY: race
race: ensure-redis ensure-faketime ensure-cc ## Every test of the module with the race detector
	CGO_ENABLED=1 go test -race -ldflags=-w -count=1 -shuffle=on -timeout 20m -p $(TEST_PROCS) ./...

.PHONY: simulate
simulate: ## SCHEDULES random fault schedules of election and refill loop, POOL_SCHEDULES of the pools, in simulated time, without the race detector
	REFILLER_SEED=$(SEED) REFILLER_SCHEDULES=$(SCHEDULES) GOGC=400 go test -count=1 -timeout 0 -run TestElectionAndRefillLoopTogether -v ./election
	REFILLER_SEED=$(SEED) REFILLER_SCHEDULES=$(POOL_SCHEDULES) go test -count=1 -timeout 0 -run TestNothingIsExceededUnderRandomFaults -v ./pool

.PHONY: unit
unit: ## Tests of the packages that need no server (UNIT_PKGS); needs only Go, takes seconds
	go test -count=1 -shuffle=on -timeout 1m $(UNIT_PKGS)

.PHONY: lint
lint: vet $(BIN)/golangci-lint ## Vet, golangci-lint and the dependency rule of fetch
	$(BIN)/golangci-lint run ./...
	scripts/check-fetch-deps.sh

.PHONY: bench
bench: ensure-redis $(BIN)/benchstat ## Side by side with other libraries (COMPARE), then benchmarks (COUNT, BENCH, BENCH_PKGS) against the run before
	go -C bench run . $(COMPARE)
	scripts/bench.sh $(COUNT) '$(BENCH)' $(BENCH_PKGS)

.PHONY: robustness
robustness: ensure-redis ensure-faketime ## N random fault schedules against real servers; SEED=… replays one
	go test -count=1 -timeout 0 -parallel 64 -v -run TestSchedules ./test/robustness -args -n $(N) $(if $(SEED),-seed $(SEED))

.PHONY: conserve
conserve: ensure-redis ensure-cc ## N random schedules of consumers that do everything at once, and faults, with -race; SEED=… replays one
	CGO_ENABLED=1 REFILLER_SEED=$(SEED) REFILLER_SCHEDULES=$(N) go test -race -ldflags=-w -count=1 -timeout 0 -v -run TestEverythingAtOnceConservesTokens ./fetch

.PHONY: pools
pools: ensure-redis ## N random fault schedules of a pool over three regions on real servers; SEED=… replays one, LONG=true for long faults
	go test -count=1 -timeout 0 -parallel 4 -v -run TestSchedules ./test/pools -args -n $(N) $(if $(SEED),-seed $(SEED)) $(if $(LONG),-long)

.PHONY: failover
failover: ensure-redis ## Ends the active replica KILLS times in each mode and prints the gaps between refills
	go test -count=1 -timeout 0 -v -run TestFailover ./test/robustness -args -kills $(KILLS)

.PHONY: scale
scale: ensure-redis ## What very many buckets cost (SCALE, see test/scale/README.md): a table, bin/scale.json, bin/scale.svg
	@mkdir -p $(BIN)
	go test -v -count=1 -timeout 0 -run TestScale ./test/scale -args -json $(CURDIR)/$(BIN)/scale.json $(SCALE)
	go -C bench run ./scalechart $(CURDIR)/$(BIN)/scale.json $(CURDIR)/$(BIN)/scale.svg

.PHONY: fuzz
fuzz: ensure-redis ## Every fuzz test for FUZZTIME
	scripts/fuzz.sh $(FUZZTIME)

.PHONY: config-docs
config-docs: ## docs/configuration.md and the JSON Schema, from the structs that a configuration is decoded into
	go test -count=1 -run TestReferenceAndSchemaAreThoseOfTheStructs ./internal/config -args -write

.PHONY: proto
proto: $(BIN)/protoc-gen-go $(BIN)/protoc-gen-go-grpc ## Generate the Go code of api/ (needs protoc: apt install protobuf-compiler)
	PATH="$(CURDIR)/$(BIN):$$PATH" protoc -I api --go_out=api --go_opt=paths=source_relative \
		--go-grpc_out=api --go-grpc_opt=paths=source_relative refiller/v1/buckets.proto

.PHONY: verify
verify: lint ensure-redis ## What a review would complain about: tidy modules, gofmt, vet, lint, broken examples or comparison; changes nothing
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

# Steps of the targets above.

.PHONY: vet ensure-redis ensure-faketime ensure-cc
vet:
	go vet ./...

ensure-redis:
	@scripts/ensure-redis.sh

ensure-faketime:
	@scripts/ensure-faketime.sh

ensure-prometheus:
	@scripts/ensure-prometheus.sh

ensure-chromium:
	@scripts/ensure-chromium.sh

ensure-cc:
	@scripts/ensure-cc.sh

ensure-curl:
	@scripts/ensure-curl.sh

# Compiled from source at the versions of tools/go.mod, once, in a minute or two.
$(BIN)/golangci-lint: tools/go.mod tools/go.sum
	go build -C tools -o ../$(BIN)/ github.com/golangci/golangci-lint/v2/cmd/golangci-lint

$(BIN)/benchstat: tools/go.mod tools/go.sum
	go build -C tools -o ../$(BIN)/ golang.org/x/perf/cmd/benchstat

# Their versions are in the code that they generate.
$(BIN)/protoc-gen-go:
	GOBIN="$(CURDIR)/$(BIN)" go install google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.11

$(BIN)/protoc-gen-go-grpc:
	GOBIN="$(CURDIR)/$(BIN)" go install google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.6.2
