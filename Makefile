# `make test` runs everything: pure tests, real Slurm, real vLLM (its CPU build). What is missing is installed
# when root, and named otherwise.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help venv demo lint test unit sandbox ssh engine cluster rows soak benchmarks device-libs docs pins clean

help:
	@echo "make venv | demo | lint | test (unit, sandbox, ssh, engine, cluster) | rows | soak | benchmarks | device-libs | docs | pins | clean"

venv: $(VENV)/.complete

$(VENV)/.complete: requirements/dev.txt pyproject.toml
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# The published ladder on this machine, simulated: three rungs, one after another, and their table.
demo: venv
	$(BIN)/isambard-serve submit tp4 dp4 dp4-humming --site sandbox --wait
	$(BIN)/isambard-serve collect --ladder latest --site sandbox

lint: venv
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.support.modules

# All five suites, with the coverage of every process that they start.
test: venv
	$(BIN)/coverage erase
	for suite in unit sandbox ssh engine cluster; do $(BIN)/coverage run -m pytest tests/$$suite || exit 1; done
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-covered

unit: venv
	$(BIN)/pytest tests/unit

sandbox: venv
	$(BIN)/pytest tests/sandbox

ssh: venv
	$(BIN)/pytest tests/ssh

engine: venv
	$(BIN)/pytest tests/engine

cluster: venv
	$(BIN)/pytest tests/cluster

# Real rows: the recipe tiny through real Slurm and real vLLM (its CPU build), on this machine.
rows: venv
	$(BIN)/python -m tests.cluster.rows

# The random trials, more of them than in `make test`.
soak: venv
	ISAMBARD_SERVE_TRIALS=10 $(BIN)/pytest tests/cluster/test_claim.py
	ISAMBARD_SERVE_TRIALS=20 $(BIN)/pytest tests/cluster/test_podman.py -k random_moment
	ISAMBARD_SERVE_TRIALS=30 $(BIN)/pytest tests/ssh/test_transfer.py

benchmarks: venv
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python -m benchmarks.between_points

# What a bare GPU machine lacks, for tests/gpu/README.md.
device-libs: venv
	$(BIN)/python -m tests.gpu.libraries

docs: venv
	$(BIN)/python docs/reference.py

# The pinned requirements, again from the newest releases. No index's address goes into them.
pins:
	uv pip compile pyproject.toml --generate-hashes --universal --python-version 3.11 --upgrade --quiet \
	  --no-emit-index-url --no-header --no-annotate -o requirements/package.txt
	uv pip compile pyproject.toml requirements/dev.in --extra plot --generate-hashes --universal --python-version 3.11 --upgrade \
	  --quiet --no-emit-index-url --no-header --no-annotate -o requirements/dev.txt

clean:
	rm -rf $(VENV) device-libs device-libs-humming-* .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
