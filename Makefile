# Every target does its own set-up: a machine with Python 3.11 (or newer) and pip is enough.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_DOCS := $(VENV)/.ready-docs
READY_DEMO := $(VENV)/.ready-demo
RELEASE := build/release

.PHONY: browser demo test test-all faults lint types check docs release-check clean

# The package alone, without the tools of the tests; what a later target needs is added to it.
demo: $(if $(wildcard $(READY)),$(READY),$(READY_DEMO))
	$(BIN)/alignmixup demo --out demo

$(READY_DEMO): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $(READY_DEMO)

# One thread a worker: two workers on two cores beat one worker with two threads, and nothing oversubscribes.
# A file stays with one worker, which makes its fixtures once.
# Bytecode is kept: the processes that tests start would compile the package again.
# Freed memory is kept, too: clearing the pages of every larger tensor anew is 3 % of the time.
KEEP_MEMORY := MALLOC_TRIM_THRESHOLD_=1000000000 MALLOC_MMAP_THRESHOLD_=33554432
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(KEEP_MEMORY) $(BIN)/python -m pytest -n 2 --dist loadfile

# Everything a change can break. Tests in a browser run where there is a Chromium (Debian: apt-get install chromium);
# ALIGNMIXUP_REQUIRE_BROWSER=1 fails where there is none.
test: $(READY)
	$(PYTEST)

# Exhaustive grids and long trainings as well; a markexpr of the command line replaces the default.
test-all: $(READY)
	$(PYTEST) -m "slow or not slow"

# Kills, full disks, damaged files: the quick part is in `make test`, this is all of it (docs/reliability.md).
faults: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "slow or not slow" tests/faults

# The browser of the tests, from Debian's packages.
browser:
	command -v chromium || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium; }

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

check: lint types test

# The site is written to build/site; a broken link, an unknown name or a docstring that does not parse is an error.
# Not --quiet: that hides warnings from --strict, too.
docs: $(READY_DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "site: build/site/index.html"

# What a user gets: the built wheel without extras, in a new environment, called from outside the checkout.
release-check:
	rm -rf $(RELEASE)
	mkdir -p $(RELEASE)
	$(PYTHON) -m venv $(RELEASE)/venv
	$(RELEASE)/venv/bin/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir $(RELEASE) .
	$(RELEASE)/venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt $(RELEASE)/*.whl
	$(RELEASE)/venv/bin/pip check
	cd $(RELEASE) && venv/bin/python -c "import alignmixup; assert 'site-packages' in alignmixup.__file__, alignmixup.__file__"
	cd $(RELEASE) && test "alignmixup-$$(venv/bin/alignmixup --version)-py3-none-any.whl" = "$$(echo *.whl)"
	cd $(RELEASE) && OMP_NUM_THREADS=1 venv/bin/alignmixup demo --out demo --epochs 1
	test -s $(RELEASE)/demo/report.html
	@echo "release-check: $(RELEASE)/*.whl installs, imports and runs the demo"

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache build demo

# The constraints pin the whole development environment, torch first: without the pin pip takes the newest build.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(READY)

# Only the targets that build the site install its tools.
$(READY_DOCS): $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $(READY_DOCS)
