# Common tasks; `make help` lists them. Everything runs from the clone, in .venv, with relative paths only.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# Variables to set on the command line:
#   PYTHON=python3.12              interpreter for .venv
#   TORCH='torch==2.11.0'          replaces the pinned torch (see docs/dependencies.md)
#   WORKERS=4                      pytest processes; the Slurm tests mostly wait, so more than cores is right
#   PYTEST_ARGS='-k requeue -x'    more arguments for pytest
PYTHON ?= python3
TORCH ?=
WORKERS ?= 4
PYTEST_ARGS ?=
export PYTHON TORCH

# One thread per process: the tests and the demo run several processes per core.
export OMP_NUM_THREADS ?= 1

PY := .venv/bin/python
STAMP := .venv/.installed
PYTEST := $(PY) -m pytest -n $(WORKERS) --dist loadgroup

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' Makefile

# The stamp makes a second call free; asking for another torch always installs.
$(STAMP): pyproject.toml requirements/constraints.txt tools/venv.sh $(if $(TORCH),always)
	@tools/venv.sh
	@touch $@

.PHONY: always
always:

# mypy resolves the name 'stoker' through this link: the root of the repository is the package.
.dev/stoker:
	@mkdir -p .dev && ln -sfn .. $@

.PHONY: venv install
venv: $(STAMP) .dev/stoker ## make .venv with the package and all development dependencies
install: venv slurm ## the same, and the Slurm packages

.PHONY: slurm slurm-base
slurm: ## install missing Slurm and MariaDB packages, where this user may
	@tools/slurm_packages.sh --accounting
slurm-base:
	@tools/slurm_packages.sh

.PHONY: demo
demo: $(STAMP) slurm-base ## train on a private 4-node Slurm, kill a node, watch the run finish
	@$(PY) -m stoker.launcher.rehearsal.demo

.PHONY: rehearse
rehearse: $(STAMP) slurm ## one drill per kind of stop: steps lost, seconds to the next new step
	@$(PY) -m stoker.launcher.rehearsal.rehearse

.PHONY: test test-quick test-all
test: venv slurm ## the test suite, on real private Slurm clusters
	@$(PYTEST) -m "not full" $(PYTEST_ARGS)
test-quick: venv ## only what needs no Slurm
	@$(PYTEST) -m "not full and not slurm" $(PYTEST_ARGS)
test-all: venv slurm ## the suite, the large samples and the slow watches
	@$(PYTEST) $(PYTEST_ARGS)

.PHONY: lint types docs check
lint: $(STAMP) ## format, lint and the import contract
	@.venv/bin/ruff format --check .
	@.venv/bin/ruff check .
	@.venv/bin/lint-imports --no-logo
types: $(STAMP) .dev/stoker ## mypy
	@.venv/bin/mypy
docs: $(STAMP) ## links, paths, commands and config keys in the documentation
	@$(PY) tools/check_docs.py
check: lint types docs ## the three above

.PHONY: format
format: $(STAMP) ## reformat, and fix what ruff can fix
	@.venv/bin/ruff format .
	@.venv/bin/ruff check --fix .

.PHONY: bench
bench: $(STAMP) ## run the benchmarks that need no GPU, and no other trainers (those: benchmarks/peers.py, checkpoint.py)
	@for script in $(filter-out benchmarks/peers.py benchmarks/checkpoint.py,$(wildcard benchmarks/*.py)); do \
		if [ -e "$$script" ]; then echo "== $$script"; $(PY) "$$script"; fi; \
	done

.PHONY: clean
clean: ## remove what builds, tests and checks leave in the clone (.venv and runs/ stay)
	@rm -rf .dev build dist ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
