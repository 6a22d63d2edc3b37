# Needs nothing but Python >= 3.11. Every target sets up .venv first (once), with the versions of constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= auto
MODEL ?=
BENCH ?=

.PHONY: demo quick test test-rest test-all lint format bench clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: $(STAMP)  ## MODEL=path or hub id: the same text twice, plainly and with LayerSkip, side by side
	@$(BIN)/skipstone demo $(MODEL)

PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
QUICK := $(patsubst %,tests/decoding/test_%.py,decode enumeration noise sampling stats trees verify walk) \
	$(patsubst %,tests/models/test_%.py,frontier kvstore layers masks) tests/hf/test_options.py tests/methods/test_spelling.py
quick: $(STAMP)  ## the inner loop, under a minute: the loop, its rules and its law, the layers and their store
	$(PYTEST) -m "not slow" $(QUICK)

test: $(STAMP)  ## the suite without the full product, under four minutes on two cores; prints its ten slowest
	$(PYTEST) -m "not slow" --durations=10

test-rest: $(STAMP)  ## what `make test` leaves out
	$(PYTEST) -m slow --durations=10

test-all: $(STAMP)  ## every method x every family x every setting
	$(PYTEST)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## MODEL=path or hub id, BENCH="more flags": see `skipstone bench run --help`
	$(BIN)/skipstone bench run $(MODEL) $(BENCH)

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis
