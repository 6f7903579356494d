# The whole interface: `make demo`, `make test`, `make check`. A fresh machine needs only Python 3.11 and make.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# A CPU build of this exact release is what the project is tested with; a range would fetch gigabytes.
TORCH := torch==2.13.0

.PHONY: demo test check format clean help

help: ## say what each target does
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(TORCH)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

install: $(STAMP) ## make the environment in .venv

demo: $(STAMP) ## the main job on real input: probe, sweep, fit, plan, export, run
	$(BIN)/python -m examples.demo

test: $(STAMP) ## all tests
	$(BIN)/python -m pytest

check: $(STAMP) ## format, lint, types, imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## rewrite the code in the house style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove the environment and every cache
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist demo-run
