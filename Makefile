# `make demo` and `make test` need nothing but Python 3.11 or 3.12: the environment is made on first use.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Real data sets for some tests; those that need them skip where the folder is absent.
export HYBRIDTRAINER_TEST_DATA ?= $(abspath $(wildcard ../shared/data))

.PHONY: demo test test-fast test-slow lint bench clean

$(READY): pyproject.toml constraints.txt
	@echo "Making the environment in $(VENV) (a minute or two, once) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,demo,bpe,hf,lightning,kernels]"
	@touch $(READY)

demo: $(READY)  ## train the built-in GPT plain and hybrid, about four minutes
	@$(BIN)/python examples/demo.py

test: lint  ## lint, types and tests
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-slow: lint  ## everything, the long checks too
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "slow or not slow"

lint: $(READY)  ## ruff and mypy
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary

bench: $(READY)  ## timings, side by side, into benchmarks/results
	@$(BIN)/python -m benchmarks.overhead

clean:  ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
