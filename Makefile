# Every target sets up what it needs by itself (scripts/setup: idempotent, offline once done).
VENV ?= .venv
PYTHON := $(VENV)/bin/python

.DEFAULT_GOAL := help
.PHONY: help setup demo test check check-style format bench prove clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1\t/' | expand -t 14

setup:  ## make .venv: torch, vLLM's CPU build, tiered_kv, test tools (minutes the first time, nothing later)
	@VENV=$(VENV) scripts/setup

demo: setup  ## a real vLLM answers a prompt cold, from host memory, and after a restart from disk
	$(PYTHON) demo/run.py

test: setup  ## every test, the ones on real vLLM engines included
	@VENV=$(VENV) scripts/overlay 0.30.0
	$(PYTHON) -m pytest

check: check-style  ## style, types, layers and the tests that need no engine: before every commit
	$(PYTHON) -m pytest -q -m "not vllm"

check-style: setup  ## formatting, lint, types, layers
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	$(VENV)/bin/lint-imports --cache-dir .cache/import_linter

format: setup  ## put the code in the one format
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

bench: setup  ## every script in benchmarks/, one after the other
	@set -e; for script in benchmarks/*.py; do \
		[ -e "$$script" ] || { echo "there is no benchmark in benchmarks/ yet"; exit 1; }; \
		echo "== $$script"; $(PYTHON) "$$script"; done

prove: setup  ## the tests at full counts, hours; resumable; results with commit, seed and machine in docs/proofs/
	$(PYTHON) scripts/prove.py

clean:  ## remove what tests and demo built; .venv and downloads stay
	rm -rf build .cache/pytest .cache/mypy .cache/import_linter .hypothesis .ruff_cache
