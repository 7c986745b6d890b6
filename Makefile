# Everything a newcomer types. `make run` and `make test` need only Python (>= 3.11), make and the package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN := $(VENV)/.run
STAMP := $(VENV)/.dev
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock --editable

.PHONY: help run test test-all lint docs unit rest faults golden other-cpu deploy-demo deploy-matrix deploy-faults mutants bench bench-quick bench-device bench-record same-as reproduce-tiny versions clean

help:            ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(RUN): pyproject.toml requirements.lock  # what a run needs
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) .
	@touch $(RUN)

$(STAMP): $(RUN)  # and what only tests, lint and the site need: Ray, Flower, MLflow, transformers ...
	$(INSTALL) '.[dev]'
	@touch $(STAMP)

run: $(RUN)      ## the quickstart: three architectures, averaging against FedDF, on embedded data
	$(BIN)/solera quickstart

test: $(STAMP) lint unit   ## style, layers, types, then all that a change can break

test-all: test rest        ## and what needs the machine for itself (four to six minutes more)

lint: $(STAMP)   ## ruff, import-linter, mypy
	$(BIN)/ruff check src tests examples scripts benchmarks
	$(BIN)/ruff format --check src tests examples scripts benchmarks
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy

docs: $(STAMP)   ## the site, into site/; what is wrong with it is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

unit: $(STAMP)   ## the tests of `make test`, on all cores
	$(BIN)/pytest -n auto --dist worksteal -m "not slow and not rest"

rest: $(STAMP)   ## Ray, a real network, the report in a browser, the site, the simulated device: one after another
	$(BIN)/pytest -m "rest and not slow"

faults: $(STAMP) ## the slow ones: many kills, long fuzzing
	$(BIN)/pytest -m slow --ignore tests/deploy

deploy-demo: $(STAMP) ## a real deployment on this machine, from images to a report: a server and three sites, TLS (some minutes)
	$(BIN)/python examples/deploy/demo.py --out build/deploy-demo --simulate

deploy-matrix: $(STAMP) ## six methods over a real network with TLS and node keys: the digests of the simulation (some ten minutes)
	SOLERA_MATRIX=benchmarks/results/flower-matrix.json $(BIN)/pytest -m slow tests/deploy/test_matrix.py

deploy-faults: $(STAMP) ## a real network whose parts raise, die, hang, leave, return; who is refused (half an hour or more)
	SOLERA_FAULTS=benchmarks/results/flower-faults.json $(BIN)/pytest -m slow tests/deploy/test_faults.py tests/deploy/test_refusals.py

# Another processor, as far as a library can be told to compute as if it were on one.
OTHER_CPU = MKL_CBWR=COMPATIBLE ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2
golden: $(STAMP) ## record the final states of all methods on this machine, and as another processor computes them
	SOLERA_RECORD_GOLDEN=1 $(BIN)/pytest -q tests/golden -k test_record
	SOLERA_RECORD_GOLDEN=1 $(OTHER_CPU) $(BIN)/pytest -q tests/golden -k test_record

other-cpu: $(STAMP) ## the tests of `make test`, with the bits of another processor
	$(OTHER_CPU) $(BIN)/pytest -n auto --dist worksteal -m "not slow and not rest"

mutants: $(STAMP) ## change the source at random and see whether the tests notice (two hours); fails on an open survivor
	$(BIN)/python scripts/mutants.py $(MUTANTS)

bench: $(STAMP)  ## every workload, with other frameworks beside us (an hour); the tables go into docs/performance.md
	mkdir -p build
	PYTHONPATH=benchmarks $(BIN)/python -m bench --peers all --peers-dir build/peers --out build/bench.json --write docs/performance.md

bench-quick: $(STAMP) ## the regression guard: about two minutes; fails when a ratio fell by more than a fifth
	PYTHONPATH=benchmarks $(BIN)/python -m bench --quick --against benchmarks/recorded.json

bench-device: $(STAMP) ## on a machine with a GPU: several ways of a round in turn, into docs/howto/gpu.md
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/device.py --peers flower --write docs/howto/gpu.md

bench-record: $(STAMP) ## measure this machine for the guard
	PYTHONPATH=benchmarks $(BIN)/python -m bench --quick --record benchmarks/recorded.json

same-as: $(STAMP) ## compare all that runs and commands give with what a commit gave: make same-as REV=main (ten minutes each)
	$(BIN)/python scripts/same_as.py $(REV) $(SAME_AS)

reproduce-tiny: $(STAMP) ## every table and figure of the four papers on embedded data (less than an hour); stopped, it continues
	$(BIN)/solera reproduce all --scale tiny --workers 0 --out build/reproduce --summary benchmarks/results/reproduce-tiny.json

versions: $(STAMP) ## the core tests with the oldest and the newest packages that are allowed, deployments with each flwr (long)
	$(BIN)/python scripts/versions.py $(VERSIONS)

clean:           ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build site src/*.egg-info
