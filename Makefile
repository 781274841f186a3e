PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: help venv train lint test test-all docs benchmarks clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# The stamps make an unchanged environment cost nothing; `dev` contains `recipes`.
$(VENV)/.recipes: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --editable '.[recipes]'
	touch $@

$(VENV)/.dev: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --editable '.[dev]'
	touch $@ $(VENV)/.recipes

$(VENV)/.docs: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --editable '.[docs]'
	touch $@

venv: $(VENV)/.recipes  ## make .venv with the package and what the recipes need

train: venv  ## train the digits classifier with 2 ranks
	$(BIN)/ringstrategy run digits

lint: $(VENV)/.dev  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint  ## lint, types, and the suite without the long matrices
	$(BIN)/python -m pytest -m 'not slow' -n 2 --dist loadfile

test-all: lint  ## everything, with the fault and launch matrices
	$(BIN)/python -m pytest

docs: $(VENV)/.docs  ## build the pages into docs/_build; a warning is an error
	$(BIN)/sphinx-build -W -b html docs docs/_build

benchmarks: $(VENV)/.dev  ## measure anew, and write docs/benchmarks.md and the README's tables; keep the machine idle
	$(BIN)/python docs/benchmarks.py measure
	$(BIN)/python docs/benchmarks.py write

clean:  ## remove what the other targets made
	rm -rf $(VENV) build dist docs/_build .mypy_cache .pytest_cache .ruff_cache
