# Every target makes .venv and installs what it needs; a second run installs nothing.
SHELL := /bin/bash
PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 8000
CONFIG ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet

.PHONY: help serve test venv check bench docs mutants clean

help:
	@echo "make serve   the gateway on port $(PORT) with the embedded engine and SQLite (HOST, PORT, CONFIG)"
	@echo "make test    lint, types, import rules and every test"
	@echo "make check   lint, types and import rules only"
	@echo "make bench   the measurements behind the figures in the docs (BENCH=name for one of them)"
	@echo "make mutants break the scheduler in named ways; every one must be caught"
	@echo "make docs    regenerate the generated reference pages"
	@echo "make venv    the virtual environment with everything for development"

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-serve: pyproject.toml | $(VENV)/bin/python
	@echo "installing inferry with the embedded engine into $(VENV) (a minute or two, once)"
	$(PIP) install --editable '.[engine]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/.installed-serve
	@echo "installing the development tools into $(VENV)"
	$(PIP) install --editable '.[engine,dev]'
	@touch $@

venv: $(VENV)/.installed-dev

serve: $(VENV)/.installed-serve
	@exec $(BIN)/inferry serve --host $(HOST) --port $(PORT) $(if $(CONFIG),--config $(CONFIG))

check: $(VENV)/.installed-dev
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy
	$(BIN)/pytest -q tests/test_import_rules.py tests/test_repository.py

test: check
	$(BIN)/pytest -q

bench: $(VENV)/.installed-dev
	$(BIN)/python -m inferry.bench $(BENCH)

mutants: $(VENV)/.installed-dev
	$(BIN)/python tests/mutants/run.py

docs: $(VENV)/.installed-dev
	$(BIN)/python -m inferry.docs

clean:
	rm -rf build $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis src/*.egg-info
