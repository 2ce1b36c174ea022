# Two commands on a bare machine: `make demo` and `make test`. Both make their own virtual environment.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: help demo check test test-oldest docs results lint format clean
help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

# torch first and alone: the pinned version is the one the rest is resolved against.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -q -c constraints.txt torch
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -q -c constraints.txt -e '.[dev]'
	touch $@

demo: $(VENV)/installed  ## train a teacher, compress it, recover its quality: five to ten minutes on two cores
	$(BIN)/lightformers demo demo-output

check: lint  ## style, imports, types, and the tests that most mistakes fail: a minute
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m quick tests

test: lint  ## every test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal tests

# On Linux the package index has torch with CUDA alone, several gigabytes: without a GPU, let PIP_EXTRA_INDEX_URL name
# the index of its CPU builds, https://download.pytorch.org/whl/cpu.
.venv-oldest/installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --disable-pip-version-check --progress-bar off -q -c constraints-oldest.txt \
		-e '.[export]' pytest pytest-xdist hypothesis
	touch $@

test-oldest: .venv-oldest/installed  ## tests of models, conversion, recovery and export with the oldest versions allowed
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest -n 2 tests/models tests/conversion tests/recovery tests/engines \
		tests/test_text.py tests/test_loading.py tests/test_files.py

docs: $(VENV)/installed  ## the documentation, as a site in site/
	$(BIN)/mkdocs build

results: $(VENV)/installed  ## the pages of results, from their figures
	$(BIN)/python training/reproduce.py --pages

lint: $(VENV)/installed  ## style, format, imports and types, unchanged files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

format: $(VENV)/installed  ## format the files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the virtual environment, the demo's output, the site
	rm -rf $(VENV) .venv-oldest demo-output site notebooks/cache
