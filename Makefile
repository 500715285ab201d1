# `make test` runs everything: pure tests, real Slurm, real vLLM (its CPU build). What is missing is installed
# when root, and named otherwise.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help venv lint test unit cluster engine benchmarks pins clean

help:
	@echo "make venv | lint | test (unit, engine, cluster) | benchmarks | pins | clean"

venv: $(VENV)/.complete

$(VENV)/.complete: requirements/dev.txt pyproject.toml
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

lint: venv
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.support.modules

test: unit engine cluster

unit: venv
	$(BIN)/pytest tests/unit

engine: venv
	$(BIN)/pytest tests/engine

cluster: venv
	$(BIN)/pytest tests/cluster

benchmarks: venv
	$(BIN)/python benchmarks/startup.py

# The pinned requirements, again from the newest releases. No index's address goes into them.
pins:
	uv pip compile pyproject.toml --generate-hashes --universal --python-version 3.11 --upgrade --quiet \
	  --no-emit-index-url --no-header --no-annotate -o requirements/package.txt
	uv pip compile pyproject.toml requirements/dev.in --generate-hashes --universal --python-version 3.11 --upgrade \
	  --quiet --no-emit-index-url --no-header --no-annotate -o requirements/dev.txt

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
