# make demo        a budget planned, then `dpgrad train` on digits at ε = 3: about two minutes on two cores
# make test        everything: checks, tests, doctests, the built wheel in a clean environment
# make test-fast   the tests without the slow ones
# make test-exhaustive many more seeds and cases of some tests (hours)
# make test-portable the tests as an old processor, other thread counts, locales and time zones, and a loaded machine run them
# make test-gpu    the tests of the engines on a CUDA device, results committed (no installation; some minutes)
# make browser     find Chromium for the tests of the report page, or install it where root and apt-get are
# make check       ruff, ruff format, strict mypy
# make bench       speed of the accountants against their peers
# make bench-engines time of one private step beside Opacus, one thread, results committed (about half an hour)
# make bench-gpu   time, memory and set-up of one private step on a CUDA device (about half an hour; ARGS="--only mnist-cnn bert")
# make bench-ways  time and memory of the three ways to the clipped sum (some minutes; ARGS="--device cuda")
# make table-convex every convex solver on every dataset: the missing trials, then the tables (hours; PEER=python to compare)
# make stale       which committed results were made with other code than there is now
# make soak        100 SIGKILLs of private runs at random moments (some minutes)
# make docs        the site, in build/docs; warnings are errors, no network
# make docs-browser the site in Chromium: two screens, a phone, light and dark; pictures in build/pictures
# make notebooks   docs/notebooks from three guides
# make coverage    branch coverage of src by file, all tests without real datasets; writes what `make test` then asks for
# make api-names   tests/public_names.txt, after a public name was added or changed
# make release-check builds twice and compares, installs the wheel, writes the SBOM, audits dependencies (OFFLINE=1)
# make mutants-listed faults chosen by hand, each of which the tests must notice (about half an hour)
# make mutants     small faults in the privacy-critical files that a test must notice (hours; FILES=..., SAMPLE=N, SEED=S)
# make bench-audit planted faults against the audits, and their false alarms, results committed (some ten minutes)
# make conformance certified intervals against the high-precision oracle, 300 settings (some minutes)

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
DEMO := demo-out

BIN := $(VENV)/bin
# Where torch may have been installed for its device by other means.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
CONSTRAINTS := constraints.txt
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
STAMP := $(VENV)/.installed
# Each test process computes on one thread: the processes are the parallelism. Each begins with its own stretch of files,
# so that what the tests of a file share is made once. Bytecode is kept whatever the environment says: the processes
# that tests start would compile the sources anew.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 NUMEXPR_NUM_THREADS=1
PARALLEL := -n $(WORKERS) --dist worksteal
PYTEST := PYTHONDONTWRITEBYTECODE= $(ONE_THREAD) $(BIN)/python -m pytest $(PARALLEL) --durations=10
MEASURED := PYTHONDONTWRITEBYTECODE= $(ONE_THREAD) $(BIN)/python tests/covered.py $(PARALLEL)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo browser test test-fast test-exhaustive test-portable test-gpu check format pytest wheel-test bench bench-engines bench-gpu bench-ways table-convex docs docs-browser notebooks coverage measured api-names release-check mutants mutants-listed bench-audit conformance soak stale clean

help:
	@sed -n 's/^# make/make/p' Makefile

install: $(STAMP)

# Rebuilt only when the requirements change; the package itself is installed in place.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c $(CONSTRAINTS) pip setuptools
	$(PIP) install --quiet -c $(CONSTRAINTS) --no-build-isolation --editable '.[dev]'
	touch $@

demo: install
	mkdir -p $(DEMO)
	$(BIN)/dpgrad --version
	$(BIN)/dpgrad calibrate --epsilon 2 --delta 1e-5 --sampling-rate 0.01 --steps 10000
	$(BIN)/dpgrad epsilon --sampling-rate 0.01 --noise-multiplier 4 --steps 10000 --delta 1e-5 --plot $(DEMO)/epsilon.svg
	@test -s $(DEMO)/epsilon.svg && echo "wrote $(DEMO)/epsilon.svg"
	rm -rf $(DEMO)/digits
	$(BIN)/dpgrad train --out $(DEMO)/digits

# The tests of the report page look at it in Chromium.
browser:
	@sh tests/browser.sh install

# One after another, so that a failed check stops before the long tests.
test: install browser
	$(MAKE) check
	$(MAKE) measured
	$(MAKE) wheel-test

pytest: install browser
	$(PYTEST) $(ARGS)

test-fast: install browser
	$(PYTEST) -m "not slow"

# ARGS are for pytest, such as a folder; ONLY names one variation.
test-portable: install
	$(BIN)/python tests/portable.py $(if $(ONLY),--only $(ONLY)) -- -n $(WORKERS) $(ARGS)

test-exhaustive: install
	$(PYTEST) --exhaustive

test-gpu:
	PYTHONPATH=src:$(PYTHONPATH) $(GPU_PYTHON) -m benchmarks.gpu_tests --write

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel-test: install
	sh tests/smoke_wheel.sh $(BIN)/python $(CONSTRAINTS) $(VENV)-wheel

bench: install
	$(ONE_THREAD) $(BIN)/python -m benchmarks.accounting

bench-engines: install
	$(BIN)/python -m benchmarks.steps --device cpu --write $(ARGS)

bench-gpu:
	PYTHONPATH=src:$(PYTHONPATH) $(GPU_PYTHON) -m benchmarks.steps --device cuda --write $(ARGS)

bench-ways: install
	$(BIN)/python -m benchmarks.ways --write $(ARGS)

table-convex: install
	$(BIN)/python -m benchmarks.convex run $(if $(PEER),--peer $(PEER))
	$(BIN)/python -m benchmarks.convex report

stale: install
	$(BIN)/python -m benchmarks.stale

soak: install
	$(ONE_THREAD) $(BIN)/python tests/soak.py

# What is done is kept: a run that was stopped goes on where it was.
mutants: install
	$(BIN)/python -m benchmarks.mutants --workers $(WORKERS) $(FILES) $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(SEED),--seed $(SEED))

# Needs what is in the extra docs.
docs: install $(VENV)/.docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -c docs -d build/doctrees . build/docs
	@echo "open build/docs/index.html"

$(VENV)/.docs: $(STAMP)
	$(PIP) install --quiet -c $(CONSTRAINTS) --no-build-isolation --editable '.[docs]'
	touch $@

docs-browser: docs browser
	$(BIN)/python tests/site_browser.py --pictures build/pictures

notebooks: install
	$(BIN)/python docs/notebooks/make.py

api-names: install
	$(BIN)/python tests/public_names.py --write

# All tests and the coverage of src, which must not fall below the figures in tests/covered.toml.
measured: install browser
	$(MEASURED) --durations=10 $(ARGS)

coverage: install browser
	$(MEASURED) --files --write $(ARGS)

$(VENV)/.release: $(STAMP)
	$(PIP) install --quiet -c $(CONSTRAINTS) --no-build-isolation --editable '.[release]'
	touch $@

release-check: install $(VENV)/.release
	rm -rf dist
	$(BIN)/python release/build.py --out dist --twice
	sh tests/smoke_wheel.sh $(BIN)/python $(CONSTRAINTS) $(VENV)-wheel
	$(BIN)/python -m cyclonedx_py environment --output-reproducible --of JSON -o dist/dpgrad.cdx.json $(VENV)-wheel/bin/python
	$(BIN)/python release/audit.py $(VENV)-wheel/bin/python $(if $(OFFLINE),--offline)

mutants-listed: install
	$(BIN)/python -m benchmarks.mutants_listed

bench-audit: install
	$(ONE_THREAD) $(BIN)/python -m benchmarks.audit

conformance: install
	$(ONE_THREAD) $(BIN)/python -m benchmarks.conformance

clean:
	rm -rf $(VENV)-wheel build dist $(DEMO) .pytest_cache .mypy_cache .ruff_cache .hypothesis src/dpgrad.egg-info
