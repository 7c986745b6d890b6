# Everything a newcomer types. `make run` and `make test` need only Python (>= 3.11), make and the package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help run test lint unit faults clean

help:            ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(STAMP): pyproject.toml requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock --editable '.[dev]'
	@touch $(STAMP)

run: $(STAMP)    ## the quickstart: three architectures, averaging against FedDF, on embedded data
	$(BIN)/solera quickstart

test: $(STAMP) lint unit   ## style, layers, types, then every test

lint: $(STAMP)   ## ruff, import-linter, mypy
	$(BIN)/ruff check src tests examples scripts benchmarks
	$(BIN)/ruff format --check src tests examples scripts benchmarks
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy

unit: $(STAMP)   ## all fast tests, on all cores
	$(BIN)/pytest -n auto --dist loadfile -m "not slow"

faults: $(STAMP) ## the slow ones: many kills, long fuzzing
	$(BIN)/pytest -m slow

clean:           ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build src/*.egg-info
