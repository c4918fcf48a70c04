# SPDX-License-Identifier: Apache-2.0
# Two commands do everything on a fresh machine: `make bench` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
CORE := $(wildcard kvtier/_core/*.pyx kvtier/_core/*.pxd kvtier/_core/*.pxi kvtier/_core/*.h)
# Tests of code in Python alone: bounds checks in the compiled parts find nothing there.
PYTHON_ONLY := tests/tiers/obj tests/tiers/fs/test_pool.py tests/device/test_fake.py \
	$(patsubst %,tests/runtime/test_%.py,breaker tasks) \
	$(patsubst %,tests/test_%.py,benchmarks dependencies events faults house http imports metrics proxy) \
	$(patsubst %,tests/tiers/p2p/test_%.py,contract fuzz networks news options processes push push_processes recovery ahead sharing tcp tier)
BENCH_ARGS ?=
TEST_ARGS ?=
# Tests start hundreds of processes; each of them would compile kvtier's modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup test soak bench lint checks deps-ci clean benchmarks

help: ## this list
	@grep -hE '^[a-z-]+:.*##' Makefile | sed 's/:.*##/\t/' | expand -t 14

$(VENV)/.base: requirements/base.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -r requirements/base.txt
	touch $@

$(VENV)/.dev: $(VENV)/.base requirements/dev.txt
	$(PIP) -r requirements/dev.txt
	touch $@

$(VENV)/.vllm: $(VENV)/.dev requirements/vllm.txt
	$(PIP) --no-deps -r requirements/vllm.txt
	touch $@

build/.plain: $(VENV)/.base setup.py $(CORE)
	KVTIER_WERROR=1 $(BIN)/python setup.py --quiet build_ext --inplace --force
	touch $@

setup: build/.plain ## make .venv and build the extensions

bench: setup ## run the load generator on its default: host memory and a temporary directory
	$(BIN)/python -m kvtier.bench $(BENCH_ARGS)

test: $(VENV)/.vllm build/.plain ## run all tests that this machine allows
ifeq ($(strip $(TEST_ARGS)),)
	$(BIN)/python -m tests.run --timed tests/vllm tests/bench tests/test_packaging.py
else
	$(BIN)/python -m pytest $(TEST_ARGS)
endif

lint: $(VENV)/.dev ## ruff, mypy, cython-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PATH="$(CURDIR)/$(BIN):$$PATH" cython-lint kvtier/_core
	$(BIN)/mypy

checks: $(VENV)/.vllm ## the same tests on a build with bounds checks and invariant walks
	rm -rf build/checked-tree && mkdir -p build/checked-tree
	if git ls-files --error-unmatch setup.py >/dev/null 2>&1; then \
		git ls-files -z | xargs -0 cp --parents -t build/checked-tree; \
	else \
		tar -c --exclude=./build --exclude=./.venv --exclude=./.git --exclude=./bench-results \
			--exclude=__pycache__ --exclude='*.so' . | tar -x -C build/checked-tree; \
	fi
	cd build/checked-tree && KVTIER_CHECKS=1 KVTIER_WERROR=1 ../../$(BIN)/python setup.py --quiet build_ext --inplace --force
	export KVTIER_TRACES="$${KVTIER_TRACES:-$(CURDIR)/../shared/traces}"; \
		cd build/checked-tree && KVTIER_CHECKS=1 ../../$(BIN)/python -m $(if $(strip $(TEST_ARGS)),pytest,tests.run tests/engine tests/core --) \
		-m "not vllm and not timed" $(addprefix --ignore=,$(PYTHON_ONLY)) $(TEST_ARGS)
	@echo "left out of this build: the tests with vLLM and those of speeds (marked vllm, timed), and those of $(PYTHON_ONLY), which meet no compiled part; make test runs them"

soak: $(VENV)/.vllm build/.plain ## object stores and tiers that fail at random, peers that die at random
	KVTIER_SOAK_OPERATIONS=100000 $(BIN)/python -m pytest -s tests/tiers/obj/test_soak.py
	KVTIER_SOAK_SECONDS=120 $(BIN)/python -m pytest -s tests/tiers/p2p/test_processes.py \
		-k "random_moments or mesh"
	KVTIER_SOAK_SECONDS=60 $(BIN)/python -m pytest -s tests/vllm/test_soak.py

benchmarks: setup $(VENV)/.vllm ## all benchmarks, vLLM's own parts beside them, as one page
	$(BIN)/python -m benchmarks

deps-ci: ## Debian packages that the full test run needs (root)
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
		python3-dev python3-venv gcc git e2fsprogs mount fio iperf3 iproute2 openssl \
		python3-swift memcached

clean:
	rm -rf build bench-results
	find kvtier -name '*.so' -delete
