# `make` alone prints the targets. Each one creates the environment it needs.
.DEFAULT_GOAL := help
.PHONY: help env system demo test lint types unit soak bench bench-guard flink spark-versions clean
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PYSPARK_PYTHON := $(CURDIR)/$(BIN)/python
WORKERS ?= 2
PACKAGES := statebackend checkpoint savepoint spark_integration api benchmarks
SPARKS ?= 4.1 4.2
SPARK_CORE ?= stateful_counts query_savepoints datasource aggregates spark_facts nexmark

help: ## print this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

env: $(VENV)/.installed ## create the environment in .venv from the locked versions

$(VENV)/.installed: pyproject.toml requirements.lock
	@echo "creating the environment in $(VENV) (a minute or two)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements.lock -e '.[dev]'
	$(BIN)/python -m compileall -q $(PACKAGES)  # also where PYTHONDONTWRITEBYTECODE is set: a process starts faster
	@touch $@

system: ## install what pip can't: a JRE where there is none, a browser for the page's tests
	@sh tools/system.sh

demo: env system ## run the main job, kill it, restore it at another parallelism, query its savepoint
	$(BIN)/python -m benchmarks.demo

test: env system lint types unit ## everything that CI checks: style, types, all tests

lint: env ## ruff
	$(BIN)/ruff check .

types: env ## mypy, strict
	$(BIN)/mypy

unit: env ## all tests, in parallel
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -q -m "not soak and not flink"

soak: env ## long simulations: 100,000 seeds
	$(BIN)/python -m pytest -n $(WORKERS) -q -m soak --timeout 36000

bench: env ## run the benchmark suite (no peers); results in bench-out/
	$(BIN)/holdfast bench run

bench-guard: env ## the quick ratios against bare limits, held against benchmarks/floors.toml
	$(BIN)/holdfast bench guard

flink: env ## Flink's own command line against our service (installs apache-flink in .venv-peers/pyflink)
	$(BIN)/holdfast bench peers pyflink
	$(BIN)/python -m pytest -q -m flink

spark-versions: env ## the core of the Spark tests with older Sparks, each in .venv-sparkN, all else from .venv
	@set -e; for version in $(SPARKS); do \
	  own=$(CURDIR)/.venv-spark$$version; \
	  if [ ! -x $$own/bin/python ]; then $(BIN)/python -m venv $$own; fi; \
	  $$own/bin/python -m pip install --quiet --disable-pip-version-check --no-deps "pyspark==$$version.*"; \
	  site=$$($$own/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	  $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$site/rest.pth; \
	  PYTHONPATH=$(CURDIR) PYSPARK_PYTHON=$$own/bin/python $$own/bin/python -m pytest -q -W default \
	    $(SPARK_CORE:%=tests/spark_integration/test_%.py); \
	done

clean: ## remove the environment and everything that was generated
	rm -rf $(VENV) .venv-spark* build dist *.egg-info demo-out bench-out .mypy_cache .ruff_cache .pytest_cache .hypothesis
