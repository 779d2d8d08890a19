# One verb per job. `make check` is what CI runs; `make run` is all a newcomer needs.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3 || true)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.stepwire-installed
BUF := node_modules/.bin/buf
# On a machine without a GPU: the torch to install, and where from when the default index has no CPU build.
TORCH ?= torch==2.13.0
TORCH_INDEX_URL ?= https://download.pytorch.org/whl/cpu
# Flags of python -m launcher, e.g. make run ARGS="--model Qwen/Qwen3-0.6B"
ARGS ?=
# What `make bench` and `make bench-peers` run; empty = all.
BENCH ?=
PYTEST ?= $(BIN)/pytest
# Test files that run at the same time; much of a test is waiting for processes to start.
TEST_JOBS ?= 2
# In the order of tests/file_order.py.
PARALLEL := --numprocesses=$(TEST_JOBS) --dist=loadfile --no-loadscope-reorder --durations=25
# All fuzzers together; FUZZ_ARGS="-k http --fuzz-seed=7" repeats what one of them did.
FUZZ_SECONDS ?= 1200
FUZZ_ARGS ?=
# What `make images` builds, and how it is called; BASE_IMAGE and PIP_CONF replace Debian's Python and pip's index, and
# BUILD_FLAGS are the builder's own, e.g. --isolation chroot. BUILDER=docker where docker or kind are to find the images: empty
# takes buildah first, whose images they do not see.
IMAGES ?= frontend embedded
IMAGE_PREFIX ?= stepwire
VERSION ?= 0.1.0
BASE_IMAGE ?=
PIP_CONF ?=
BUILD_FLAGS ?=
BUILDER ?=
# Of `make test-cluster`: what is applied, the tag of its images (empty = the overlay's), a program through which manifests
# are piped, one that brings images into the cluster (their names are its arguments), and KEEP=1 for a namespace that stays.
OVERLAY ?= k8s/overlays/test
IMAGE_TAG ?=
RENDER ?=
IMAGE_LOAD ?=
KEEP ?=
# Where docs/ is published, for the links of alerts in what `make gen-rules` writes; empty = paths in the repository.
RUNBOOK_BASE ?=

.PHONY: help install run observe demo test test-images test-cluster test-fast test-property fuzz golden-update metrics-doc api-doc dashboards gen-rules images lock-images dev-certs check check-protos protos clients fmt lint types bench bench-peers system-deps clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

install: $(INSTALLED) ## Make .venv and install everything into it

# The stamp is why a second `make run` starts at once: pip is not even asked.
$(INSTALLED): pyproject.toml scripts/install
	@PYTHON="$(PYTHON)" TORCH="$(TORCH)" TORCH_INDEX_URL="$(TORCH_INDEX_URL)" scripts/install $(VENV)
	@touch $@

run: $(INSTALLED) ## Start both services, show a sample answer, stay up (ARGS="--model ...")
	@$(BIN)/python -m launcher $(ARGS)

observe: $(INSTALLED) ## Start Prometheus with the alert rules beside a running `make run` (Debian: prometheus)
	@$(BIN)/python -m launcher.observe $(ARGS)

demo: $(INSTALLED) ## The same, but end after the sample answer
	@$(BIN)/python -m launcher --demo $(ARGS)

test: $(INSTALLED) ## Run all tests but those of `make test-images`
	@$(PYTEST) $(PARALLEL) -m "not containers"

test-images: $(INSTALLED) ## Build images on a base of Debian packages and test them as containers (root; podman, buildah)
	@$(BIN)/python scripts/test-images
	@$(PYTEST) -m containers

test-fast: $(INSTALLED) ## Run the tests that need neither the model nor real processes
	@$(PYTEST) $(PARALLEL) -m "not slow and not gpu and not containers"

test-cluster: $(INSTALLED) ## Test the manifests in the cluster of KUBECONFIG (IMAGE_TAG=... IMAGE_LOAD="kind load docker-image" KEEP=1)
	@mkdir -p build
	@OVERLAY="$(OVERLAY)" IMAGE_PREFIX="$(IMAGE_PREFIX)" IMAGE_TAG="$(IMAGE_TAG)" RENDER="$(RENDER)" IMAGE_LOAD="$(IMAGE_LOAD)" KEEP="$(KEEP)" \
		$(PYTEST) tests/cluster --junitxml=build/test-cluster.xml

test-property: $(INSTALLED) ## Look for new counterexamples with the property tests, longer than `make test`
	@$(PYTEST) -m hypothesis --hypothesis-profile=long --timeout=3600

fuzz: $(INSTALLED) ## Mistreat a whole stack with random input for FUZZ_SECONDS (20 minutes)
	@$(PYTEST) -m fuzz --fuzz-seconds=$(FUZZ_SECONDS) --timeout=$$(($(FUZZ_SECONDS) + 300)) $(FUZZ_ARGS)

golden-update: $(INSTALLED) ## Rewrite the golden files of tests/golden; review the diff
	@$(PYTEST) tests/golden --golden-update

check: lint types check-protos clients test test-images ## Everything CI runs

lint: $(INSTALLED) ## Formatting, ruff and the import contracts
	@$(BIN)/ruff format --check --quiet
	@$(BIN)/ruff check --quiet
	@$(BIN)/lint-imports --no-logo

types: $(INSTALLED) ## mypy --strict
	@$(BIN)/mypy

fmt: $(INSTALLED) ## Format the code and the protos
	@$(BIN)/ruff format
	@$(BIN)/ruff check --fix --quiet
	@if [ -x $(BUF) ]; then $(BUF) format --write; fi

metrics-doc: $(INSTALLED) ## Make the tables of docs/metrics.md and their golden file from the code; review the diff
	@$(PYTEST) -q tests/golden/test_golden_metrics.py --golden-update

api-doc: $(INSTALLED) ## Write docs/api.md and docs/engine-api.md from protos/ and their comments
	@$(BIN)/python scripts/api_doc.py

protos: $(INSTALLED) ## Regenerate the committed stubs from protos/
	@PATH="$(CURDIR)/$(BIN):$$PATH" scripts/generate-stubs shared

check-protos: $(INSTALLED) ## The stubs match protos/; buf lint, format and breaking changes
	@PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check-protos

clients: $(INSTALLED) ## Build the Go and C++ clients into build/clients
	@PATH="$(CURDIR)/$(BIN):$$PATH" scripts/build-clients

dashboards: $(INSTALLED) ## Write deploy/grafana/*.json from the panels of stepwire_client.monitor
	@$(BIN)/python deploy/grafana/build.py

gen-rules: $(INSTALLED) ## Write deploy/prometheus/prometheus-rule.yaml from rules.yaml (RUNBOOK_BASE=https://...)
	@RUNBOOK_BASE="$(RUNBOOK_BASE)" $(BIN)/python scripts/gen-rules

images: ## Build container images with buildah or docker (IMAGES="frontend embedded cpu cuda")
	@IMAGES="$(IMAGES)" IMAGE_PREFIX="$(IMAGE_PREFIX)" VERSION="$(VERSION)" BASE_IMAGE="$(BASE_IMAGE)" PIP_CONF="$(PIP_CONF)" \
		BUILD_FLAGS="$(BUILD_FLAGS)" BUILDER="$(BUILDER)" scripts/build-images

lock-images: $(INSTALLED) ## Write the images' lock files from pyproject.toml and the versions in .venv (needs uv)
	@scripts/lock-images

dev-certs: ## Print Secrets with fresh certificates for k8s/components/mtls (| kubectl apply -f -)
	@scripts/dev-certs

bench: $(INSTALLED) ## Measure everything that needs no other engine, < 10 minutes (BENCH="model_step ..." = only these)
	@$(BIN)/python -m bench.run $(BENCH)

bench-peers: $(INSTALLED) ## Compare with vLLM and llama.cpp, which bench/README.md says how to install
	@$(BIN)/python -m bench.peers.run $(BENCH)

system-deps: ## Programs of Debian and npm that some tests need (Debian packages: as root)
	@scripts/system-deps

clean: ## Remove build outputs and caches; keeps .venv and models/
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find services shared clients tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
