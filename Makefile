# Every target works from a fresh clone with nothing but Python 3.11 or later:
#   make demo          make PYTHON=python3.13 test          make test ARGS="-k planner"

PYTHON      ?= python3
WORKERS     ?= 2
ARGS        ?=
DEMO_MEMORY ?= 100MiB

BIN   := .venv/bin
STAMP := .venv/.installed
# A test that hangs is told, with the stacks of its threads, and its worker is replaced.
PYTEST = $(BIN)/pytest -n $(WORKERS) -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

.PHONY: help
help:  ## show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

# torch goes first: the other packages then find their pin satisfied and never replace its build.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "anybatch needs Python 3.11 or later, and '$(PYTHON)' is not: make PYTHON=python3.12 ..." >&2; \
	    exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $@

.PHONY: demo
demo: $(STAMP)  ## train a small language model with a batch that its memory budget does not hold in one piece
	@rm -rf runs/demo
	$(BIN)/anybatch train text --global-batch 64 --memory $(DEMO_MEMORY) -s context=128 -s limit=400kB --out runs/demo

.PHONY: test
test: $(STAMP)  ## run the tests that need no GPU and no more than seconds each
	$(PYTEST) -m "not gpu and not slow and not nightly" $(ARGS)

.PHONY: test-ci
test-ci: $(STAMP)  ## run the slow tests too: commands, machines, faults
	$(PYTEST) -m "not gpu and not nightly" $(ARGS)

.PHONY: test-all
test-all: $(STAMP)  ## run all tests that need no GPU: every command of the documents, campaigns
	$(PYTEST) -m "not gpu" $(ARGS)

.PHONY: check style types public-types
check: style public-types  ## style, types, import floors, completeness of the public types

style: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-logo

types: $(STAMP)
	$(BIN)/pyright

public-types: types  # not at the same time: the first pyright of an environment installs itself
	PATH="$(CURDIR)/$(BIN):$$PATH" pyright --verifytypes anybatch --ignoreexternal

.PHONY: bench
bench: $(STAMP)  ## rerun every benchmark
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[bench]"
	@set -e; for script in benchmarks/*/run.py; do \
	    test -e "$$script" || { echo "There are no benchmarks/*/run.py to run." >&2; exit 1; }; \
	    echo "== $$script"; \
	    $(BIN)/python "$$script"; \
	done

.PHONY: gpu-check
gpu-check: $(STAMP)  ## prove on this machine's GPUs what the tests prove on its CPU
	$(BIN)/python -m benchmarks.gpu_check

.PHONY: docs
docs: site  ## build the site, and run the examples of the documentation
	$(BIN)/pytest tests/docs $(ARGS)

.PHONY: site
site: export NO_MKDOCS_2_WARNING = 1
site: $(STAMP)  ## build the documentation in both languages into site/; a link that leads nowhere fails
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[docs]"
	$(BIN)/mkdocs build --quiet
	$(BIN)/mkdocs build --quiet --config-file mkdocs.zh.yml
	@echo "Open site/index.html"

.PHONY: clean
clean:  ## remove .venv, caches and build output; runs/ stays
	rm -rf .venv build dist site .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
