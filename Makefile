# Each target does all the set-up that it needs. PYTHON may name another interpreter (3.10 or later).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Compiled kernels are kept by Numba beside nothing that an edit in another module would refresh, so the folder
# carries a digest of their sources.
KERNELS_DIGEST := $(shell cat src/gradwire/kernels/*.py | cksum | cut -d' ' -f1)
export NUMBA_CACHE_DIR := $(CURDIR)/.cache/numba-$(KERNELS_DIGEST)

.PHONY: help venv demo test lint types unit wheel-test clean

help:
	@echo "make venv   set up $(VENV)"
	@echo "make demo   train digits on 4 workers, float32 beside TernGrad, and print where the report is"
	@echo "make test   lint, types, all tests, and the tests against the installed wheel"

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/gradwire compare digits --workers 4

test: lint types unit wheel-test

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(STAMP)
	$(BIN)/mypy

# Many tests start up to four processes themselves, so two runners keep two cores busy.
unit: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile

wheel-test: $(STAMP)
	./scripts/test_wheel.sh $(BIN)/python

clean:
	rm -rf .cache build dist .pytest_cache .mypy_cache .ruff_cache
