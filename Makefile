# Every target does its own set-up: only Python 3.11 and make are needed. Names a person needs: demo, test, quick, lint, bench.

PYTHON ?= python3.11
PYTEST_FLAGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

# Two cores: more OpenMP threads only disturb each other, and one thread adds floats in one order.
export OMP_NUM_THREADS := 1
# Nothing here may ask a model hub for anything.
export HF_HUB_OFFLINE := 1

# Azure's emulator, for the tests; where there is no npm they are skipped.
AZURITE := $(VENV)/node/node_modules/.bin/azurite-blob

PYTEST := $(BIN)/python -m pytest $(PYTEST_FLAGS)

.PHONY: help setup demo test quick test-all lint format coverage bench clean

help:
	@echo "make demo      train, be killed in the middle of a save, resume; compare the loss curves (< 2 min after set-up)"
	@echo "make test      all tests but the long ones            make quick     the quick part (< 2 min)"
	@echo "make lint      format, rules, types, imports, words   make test-all  all tests"
	@echo "make bench     the figures                            make format    let ruff format the code"
	@echo "make coverage  tests with a coverage report           make clean     remove .venv and all caches"

setup: $(STAMP)

# constraints.txt pins every version. torch comes first and alone: installed as a mere dependency of something else, an
# unpinned release with gigabytes of CUDA libraries could come instead.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[torch,demo,object-store,fsspec,dev]'
	touch $@

$(AZURITE): | $(STAMP)
	if command -v npm >/dev/null; then npm install --silent --no-audit --no-fund --prefix $(VENV)/node azurite@3.35.0; fi

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: $(STAMP) $(AZURITE)
	$(PYTEST) -m "not long"

quick: $(STAMP)
	$(PYTEST) -m "not long and not slow"

test-all: $(STAMP) $(AZURITE)
	$(PYTEST)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/codespell

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix-only .

coverage: $(STAMP) $(AZURITE)
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(PYTEST_FLAGS) -m "not long"
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

bench: $(STAMP)
	$(BIN)/python scripts/import_time.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/save_load.py
	$(BIN)/python benchmarks/ranks_memory.py
	$(BIN)/python benchmarks/ranks.py
	$(BIN)/python benchmarks/async_save.py
	$(BIN)/python benchmarks/async_ranks.py
	$(BIN)/python benchmarks/lazy.py
	$(BIN)/python benchmarks/many_tensors.py
	$(BIN)/python benchmarks/async_memory.py

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis .coverage .coverage.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
