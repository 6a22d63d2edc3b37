# Needs nothing but Python >= 3.11; a C++ compiler adds the native engine.
# Every target sets up .venv first (once), with the versions of constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLIENTS := .venv-clients
STAMP := $(VENV)/.installed
WORKERS ?= auto
MODEL ?=
BENCH ?=
ENGINE ?=

NATIVE := $(VENV)/.native
NATIVE_SOURCES := src/skipstone/engines/native/build.py \
	$(wildcard src/skipstone/engines/native/csrc/*.h src/skipstone/engines/native/csrc/*.cpp)

.PHONY: demo serve quick test test-full test-all test-native test-clients test-browser test-ray soak lint format bench clean

$(STAMP): pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

$(NATIVE): $(NATIVE_SOURCES) | $(STAMP)  ## without a compiler it says so, the target goes on, and the next one tries again
	@if $(BIN)/python -m skipstone.engines.native.build --if-stale; then touch $@; fi

demo: $(STAMP) $(NATIVE)  ## MODEL=path or hub id: the same text twice, plainly and with LayerSkip, side by side
	@$(BIN)/skipstone demo $(MODEL)

serve: $(STAMP) $(NATIVE)  ## MODEL=path or hub id: an OpenAI-compatible server on port 8000
	@$(BIN)/skipstone serve $(MODEL)

PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
QUICK := $(patsubst %,tests/decoding/test_%.py,decode enumeration noise record sampling trees verify) \
	$(patsubst %,tests/engines/test_%.py,partial_forward kv_cache model_runner) tests/models/test_masks.py tests/hf/test_options.py \
	tests/methods/test_spelling.py
quick: $(STAMP) $(NATIVE)  ## the inner loop, under a minute: the loop, its rules and its law, the layers and their store
	$(PYTEST) -m "not slow" $(QUICK)

test: $(STAMP) $(NATIVE)  ## the fast tests, under four minutes on two cores; prints the ten slowest
	$(PYTEST) -m "not slow and not soak and not clients and not browser and not ray" --durations=10

test-full: $(STAMP) $(NATIVE)  ## with `make test` every law once; ENGINE=eager: on the reference engine, else native where that runs
	SKIPSTONE_ENGINE=$(ENGINE) $(PYTEST) -m "slow and not product" --durations=10

test-all: $(STAMP) $(NATIVE)  ## every method x every family x every setting, for releases; takes most of an hour
	$(PYTEST)

test-native: $(STAMP)  ## the native engine under the address, undefined-behaviour and thread sanitizers
	$(BIN)/python tests/native/run.py

$(VENV)/.%: $(STAMP)  ## an extra of pyproject.toml, once
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[$*]"
	touch $@

soak: $(STAMP) $(NATIVE) $(VENV)/.soak  ## the server under load and abuse; SKIPSTONE_SOAK_SECONDS=300 of load
	$(BIN)/python -m pytest -m soak -s tests/soak

$(CLIENTS)/.installed: tests/clients/requirements.txt constraints.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --requirement $<
	touch $@

test-clients: $(STAMP) $(NATIVE) $(CLIENTS)/.installed  ## programs of others that speak OpenAI's API, against the server
	$(BIN)/python -m pytest -m clients tests/clients

test-browser: $(STAMP) $(NATIVE) $(VENV)/.browser  ## the playground in a Chromium that is there; SKIPSTONE_PICTURES=docs/figures: its pictures
	$(BIN)/python -m pytest -m browser tests/browser

test-ray: $(STAMP) $(NATIVE) $(VENV)/.ray  ## batches and replicas on Ray, in clusters of this machine; under three minutes on two cores
	$(BIN)/python -m pytest -n 2 --dist loadfile -m ray --durations=5 tests/serving/ray

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Compared with the run before, which is kept where a method has certainly lost more than 10 % against transformers.
bench: $(STAMP) $(NATIVE)  ## MODEL=path or hub id, BENCH="more flags": see `skipstone bench run --help`
	$(BIN)/skipstone bench run $(MODEL) $(BENCH) --out bench-new.jsonl
	@if [ -e bench.jsonl ]; then $(BIN)/skipstone bench compare bench.jsonl bench-new.jsonl --tolerance 0.1; fi
	@mv bench-new.jsonl bench.jsonl

clean:
	rm -rf $(VENV) build dist src/*.egg-info src/skipstone/engines/native/*.so .pytest_cache .ruff_cache .hypothesis
