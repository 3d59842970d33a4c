# Two commands for a newcomer: `make demo` and `make test`. Each makes .venv itself.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# pip's own progress and notices are noise in a log.
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
.DEFAULT_GOAL := help

.PHONY: help demo test test-gpu check unit protos format bench-frontend bench-batching clean

help:  ## What can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

demo: $(VENV)/.demo  ## Serve a real model, drive it, show what batching does
	$(BIN)/python -m demo

test: check unit  ## Everything that CI runs

check: $(VENV)/.dev  ## Linters, types, import rules, freshness of the protos
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python protos/generate.py --check

unit: $(VENV)/.dev  ## The test suite, against the installed package
	$(BIN)/python -m pytest --cov --cov-report=term:skip-covered

test-gpu: $(VENV)/.dev  ## The tests that need a GPU (and fail without one)
	BATCHER_TEST_GPU=1 $(BIN)/python -m pytest tests/gpu tests/cli/test_build.py

protos: $(VENV)/.dev  ## Write what is generated from protos/
	$(BIN)/python protos/generate.py

format: $(VENV)/.dev  ## Format, and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench-frontend: $(VENV)/.dev  ## Requests/s of the front end, against peers
	$(BIN)/python benchmarks/frontend.py

bench-batching: $(VENV)/.dev  ## Batching end to end, against peers
	$(BIN)/python benchmarks/batching.py

clean:  ## Remove what was made here
	rm -rf $(VENV) build dist .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed; set PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	@echo "installing into $(VENV) (a minute or two the first time) ..."
	$(PIP) install -e '.[demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	@echo "installing into $(VENV) (a minute or two the first time) ..."
	$(PIP) install -e '.[test,dev]'
	@touch $@
