# Every target sets up what it needs in .venv, once, from Python (3.11 or newer) and pip alone.
# PYTHON=python3.12 picks another interpreter; PIP_EXTRA_INDEX_URL is read by pip as always.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt
RUN := $(VENV)/.run-ready
DEV := $(VENV)/.dev-ready
SEED ?= $(shell date +%Y%m%d)
PYTEST := $(PY) -m pytest --hypothesis-seed=$(SEED)
CLEAN_VENV := build/clean-venv

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast lint bench prove dist clean

help:
	@echo 'make demo       trains a small model on 4 local processes (minutes)'
	@echo 'make test       the whole suite: fast tier, then slow tier (at most 40 minutes on 2 cores)'
	@echo 'make test-fast  the fast tier alone'
	@echo 'make lint       ruff and mypy'
	@echo 'make bench      the benchmarks: ratios measured side by side'
	@echo 'make prove      the suite with full counts; writes docs/proof.md'
	@echo 'make dist       builds wheel and sdist, installs both in a clean environment'
	@echo 'make clean      removes .venv and everything built'

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'rankmesh needs Python 3.11 or newer; try: make PYTHON=python3.12'; exit 1; }
	@echo 'setting up $(VENV) (once)'
	$(PYTHON) -m venv $(VENV)

$(RUN): pyproject.toml constraints.txt | $(PY)
	$(INSTALL) -e '.[tokenizers]'
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(PY)
	$(INSTALL) -e '.[test]'
	@touch $@ $(RUN)

demo: $(RUN)
	$(PY) -m rankmesh demo

test: $(DEV)
	$(PYTEST) --budgets

test-fast: $(DEV)
	$(PYTEST) -m 'not slow and not gpu'

lint: $(DEV)
	$(PY) -m ruff check .
	$(PY) -m mypy

# `make bench QUICK=1` tries the step benchmarks with a small model: does every side run?
bench: $(DEV)
	$(PY) -m benchmarks.groups
	$(PY) -m benchmarks.group_setup
	$(PY) -m benchmarks.step $(if $(QUICK),--quick)
	$(PY) -m benchmarks.buckets $(if $(QUICK),--quick)
	$(PY) -m benchmarks.pipeline $(if $(QUICK),--quick)

prove: $(DEV)
	$(PY) -m tests.prove --seed $(SEED)

dist: $(DEV)
	rm -rf dist $(CLEAN_VENV)
	$(PY) -m build --outdir dist .
	$(PYTHON) -m venv $(CLEAN_VENV)
	$(CLEAN_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	cd build && clean-venv/bin/rankmesh --version
	cd build && clean-venv/bin/rankmesh map --world-size 4 --tp 2
	$(CLEAN_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall dist/*.tar.gz
	cd build && clean-venv/bin/rankmesh --version

clean:
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
