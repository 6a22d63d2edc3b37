# Needs nothing but Python >= 3.11. Every target sets up .venv first (once), with the versions of constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= auto
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
QUICK := not (test_methods or test_families or test_layers or test_peft or test_patches or test_planted) or llama
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

quick: $(STAMP)  ## the inner loop: decoding, its laws, every method on a Llama; under a minute
	$(PYTEST) -m "not slow" -k "$(QUICK)" tests/decoding tests/models tests/methods/test_methods.py tests/api

test: $(STAMP)  ## what a change must pass: pairs of method, family and setting; under four minutes on two cores
	$(PYTEST) -m "not slow" --durations=10

test-rest: $(STAMP)  ## what `make test` leaves out: the full product, and what is proved a second time
	$(PYTEST) -m slow --durations=10

test-all: $(STAMP)  ## every method x every family x every setting, and all the rest
	$(PYTEST) --durations=10

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
