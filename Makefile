# Each target does all the set-up that it needs. PYTHON may name another interpreter (3.10 or later).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO := $(VENV)/.installed-for-the-demo
export NUMBA_CACHE_DIR := $(CURDIR)/.cache/numba

# Rounds of "make soak", each with examples of its own.
ROUNDS ?= 10

# The row of the ledger that "make claim" measures again; benchmarks/claims/ledger.py lists them.
NAME ?=

# Runners of tests. Many tests start up to four processes themselves: two runners keep two cores busy. With three on two
# cores the tests took 7 % less time, and two of 14,000 failed that count what a busy machine drops or hangs up first.
RUNNERS ?= 2
# Parts of names or files of the faults that "make mutants" tries; by default all.
ONLY ?=

.PHONY: help venv demo docs test lint types unit wheel-test soak mutants trials claim claims digests clean

help:
	@echo "make venv   set up $(VENV)"
	@echo "make demo   train digits on 4 workers, float32 beside TernGrad, and print where the report is"
	@echo "make docs   build the site into site/"
	@echo "make test   lint, types, all tests, and the tests against the installed wheel"
	@echo "make soak   the property tests, ROUNDS=$(ROUNDS) times, on examples drawn anew each time"
	@echo "make mutants   put known faults into a copy of the package and check that the tests catch them; ONLY=\"words\""
	@echo "make trials   kill workers, damage messages, inject spikes, and write docs/trials.md"
	@echo "make claim NAME=...   measure one claim of the ledger again; make claims: all that take ten minutes or less"
	@echo "make digests   after edits of kernels: let Numba compile anew what they were compiled into"

venv: $(STAMP)

# Pip would compile modules one after the other, on one core. What has templates in place of modules does not compile.
define install
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[$(1)]'
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
endef

$(STAMP): pyproject.toml constraints.txt
	$(call install,dev)
	touch $@ $(DEMO)

$(DEMO): pyproject.toml constraints.txt
	$(call install,cli)
	touch $@

# Needs the command line alone, a tenth of what the tests install.
demo: $(DEMO)
	$(BIN)/gradwire compare digits --workers 4

# The tests build it, too, and fail where this does.
docs: $(STAMP)
	$(BIN)/python scripts/site_pages.py
	@echo "open site/index.html"

test: lint types unit

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP)
	$(BIN)/python -m pytest -n $(RUNNERS) --dist loadfile --max-worker-restart 2

wheel-test: $(STAMP)
	$(BIN)/python -m pytest tests/test_wheel.py

soak: $(STAMP)
	for round in $$(seq $(ROUNDS)); do \
		$(BIN)/python -m pytest -n 2 -q -m hypothesis --hypothesis-profile=others || exit 1; \
	done

# Resumes where it was stopped, as long as neither the package nor the tests have changed.
mutants: $(STAMP)
	$(BIN)/python tests/mutants/run_mutants.py --only $(ONLY)

claim: $(STAMP)
	$(BIN)/python benchmarks/claims/ledger.py run $(NAME) $(if $(FOLDER),--folder $(FOLDER))

claims: $(STAMP)
	$(BIN)/python benchmarks/claims/ledger.py all --minutes 10

# benchmarks/trials/images.py, which needs CIFAR-10 and half an hour a seed, is run by hand.
trials: $(STAMP)
	$(BIN)/python benchmarks/trials/kills.py --json benchmarks/results/trials/trials_kills.json
	$(BIN)/python benchmarks/trials/messages.py --json benchmarks/results/trials/trials_messages.json
	$(BIN)/python benchmarks/trials/spikes.py --json benchmarks/results/trials/trials_spikes.json
	$(BIN)/python benchmarks/pages/summarise.py

# Numba keeps compiled kernels while their own file stays as it is: its digest of their sources makes it change.
digests: $(STAMP)
	$(BIN)/python tests/kernels/compiled_sources.py

clean:
	rm -rf .cache build dist site .pytest_cache .mypy_cache .ruff_cache
