# Two commands on a bare machine: `make demo` and `make test`. Both make their own virtual environment.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: help demo test docs lint format clean
help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

# torch first and alone: the pinned version is the one the rest is resolved against.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -q -c constraints.txt torch
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -q -c constraints.txt -e '.[dev]'
	touch $@

demo: $(VENV)/installed  ## train a teacher, compress it, win its quality back: about five minutes on two cores
	$(BIN)/lightformers demo --output demo-output

test: $(VENV)/installed lint  ## every test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests

docs: $(VENV)/installed  ## the documentation, as a site in site/
	$(BIN)/mkdocs build

lint: $(VENV)/installed  ## style and format, unchanged files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/installed  ## rewrite files in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the virtual environment, the demo's output, the site
	rm -rf $(VENV) demo-output site notebooks/cache
