# Every target does its own set-up: a machine with Python 3.11 (or newer) and pip is enough.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-all lint types check clean

demo: $(READY)
	$(BIN)/alignmixup demo --out demo

# One thread a worker: two workers on two cores beat one worker with two threads, and nothing oversubscribes.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# Everything a change can break.
test: $(READY)
	$(PYTEST)

# Exhaustive grids and long trainings as well; a markexpr of the command line replaces the default.
test-all: $(READY)
	$(PYTEST) -m "slow or not slow"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

check: lint types test

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache demo

# The constraints pin the whole development environment, torch first: without the pin pip takes the newest build.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(READY)
