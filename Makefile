# Every target sets up what it needs by itself (scripts/setup: idempotent, offline once done).
VENV ?= .venv
PYTHON := $(VENV)/bin/python
# scripts/setup compiles nothing, so what is imported has to leave its bytecode: without it every process of an engine
# compiles vLLM anew (18.7 instead of 8.6 s of CPU for its core on 2 cores, Python 3.11).
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup s3-packages azurite s3-server demo serve test test-versions test-next check check-style format bench bench-rivals simulate prove gpu-proof \
	gpu-e2e mutate soak clean

help:  ## this list
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## */\1\t/' | expand -t 14

setup:  ## make .venv: torch, vLLM's CPU build, tiered_kv, test tools (minutes the first time, nothing later)
	@VENV=$(VENV) scripts/setup

# For the tests that need an S3 server. One that was named, or a Docker engine, makes the packages unnecessary; where there
# is none of these, such tests are skipped, and fail under CI.
s3-packages: setup
	@[ -n "$$TIERED_KV_TEST_S3_ENDPOINT" ] || docker info >/dev/null 2>&1 \
		|| VENV=$(VENV) scripts/s3-server install || [ $$? -eq 3 ]

# For the tests of az://, a program for Node.js. Where there is neither and none can be had, they are skipped, and fail
# under CI.
azurite: setup
	@scripts/azurite install || [ $$? -eq 3 ]

s3-server: s3-packages  ## a real S3 server on 127.0.0.1, in .cache/s3; end it with scripts/s3-server wipe
	@VENV=$(VENV) scripts/s3-server start

demo: setup  ## a real vLLM answers a prompt cold, from host memory, after a restart from disk, and from a bucket
	$(PYTHON) demo/run.py

serve: setup  ## vLLM's OpenAI-compatible server on CPU behind the cache, on 127.0.0.1:8000, with a small model
	$(PYTHON) demo/serve.py

test: setup s3-packages azurite  ## every test, the ones on real vLLM engines and on a real S3 server included
	@VENV=$(VENV) scripts/test

test-versions: setup s3-packages  ## the end-to-end tests on vLLM 0.30 to 0.33, one after the other; 15 minutes each
	@VENV=$(VENV) scripts/test-versions

test-next: setup  ## the newest vLLM, release candidates too: are its names and signatures those in use? and the connector suite
	@VENV=$(VENV) scripts/test-next

check: check-style s3-packages azurite  ## style, types, layers and the tests that need no engine: before every commit
	$(PYTHON) -m pytest -q -n 4 --dist loadfile --no-loadscope-reorder -m "not vllm"

check-style: setup  ## formatting, lint, types, layers
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	$(VENV)/bin/lint-imports --cache-dir .cache/import_linter

format: setup  ## put the code in the one format
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

WITH_CHARTS = $(PYTHON) -c "import matplotlib" 2>/dev/null \
	|| $(PYTHON) -m pip install --quiet --constraint requirements/constraints.txt matplotlib

bench: s3-packages  ## the benchmarks of docs/performance.md, about 15 minutes; SECTIONS="host_path lookup" for some; KEEP=1
	@$(WITH_CHARTS)
	$(PYTHON) scripts/bench.py $(if $(KEEP),--keep) $(SECTIONS)

bench-rivals: s3-packages  ## ours beside LMCache (fetches 1 GB, once), vLLM's OffloadingConnector and ExampleConnector, and plain vLLM, in turns; ARGS="--repeats 5 --keep"
	@VENV=$(VENV) scripts/rivals
	$(PYTHON) benchmarks/rivals.py $(ARGS)
ifneq (,$(findstring --keep,$(ARGS)))
	@$(WITH_CHARTS)
	$(PYTHON) benchmarks/charts.py rivals_e
endif

simulate: setup  ## the cache's engine in virtual time under faults drawn from seeds: SEEDS=10000 FIRST=0
	$(PYTHON) scripts/simulate.py --seeds $(or $(SEEDS),1000) --first $(or $(FIRST),0)

prove: setup  ## the tests at full counts, hours; resumable; results with commit, seed and machine in docs/proofs/
	$(PYTHON) scripts/prove.py

# Without `setup`: on a machine with a GPU the Python that has torch is another one, and .venv would be vLLM's CPU build.
GPU_PYTHON ?= python3

gpu-proof:  ## on a machine with an NVIDIA GPU, torch and numpy: what only a GPU can show; resumable; SECTIONS=hazards ARGS=--quick
	@PYTHONPATH=$(CURDIR):$(PYTHONPATH) $(GPU_PYTHON) -m tools.gpu_proof $(ARGS) $(SECTIONS)

gpu-e2e:  ## a real vLLM behind the cache in every mode of this machine, right or wrong; MODES=graphs; on a CPU: GPU_PYTHON=.venv/bin/python
	@PYTHONPATH=$(CURDIR):$(PYTHONPATH) $(GPU_PYTHON) -m tools.gpu_e2e $(ARGS) $(MODES)

mutate: setup  ## change the code in thousands of small ways: does a test notice? hours; resumable; SECTIONS=keys SHARE=0.1
	@$(PYTHON) -c "import mutmut" 2>/dev/null \
		|| $(PYTHON) -m pip install --quiet --constraint requirements/constraints.txt "mutmut>=3.8,<4"
	$(PYTHON) scripts/mutate.py $(if $(SHARE),--share $(SHARE)) $(SECTIONS)

MINUTES ?= 20
soak: s3-packages  ## random traffic, kills and faults for MINUTES=20; flat memory, nothing left; build/soak.json
	$(PYTHON) scripts/soak.py --minutes $(MINUTES)

clean:  ## remove what tests and demo built; .venv and downloads stay
	@VENV=$(VENV) scripts/s3-server wipe --all
	rm -rf build .cache/pytest .cache/mypy .cache/import_linter .hypothesis .ruff_cache
