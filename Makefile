# `make` alone lists the targets. Environments: .venv for the engine, .venv-vllm for the local LLM server; to
# measure beside other memory systems, .venv-peers; for locks, bills of materials and audits, .venv-tools.
PYTHON ?= python3
VENV := .venv
VLLM_VENV := .venv-vllm
PEERS_VENV := .venv-peers
TOOLS_VENV := .venv-tools
MODEL := .models/qwen2.5-coder-1.5b-instruct-int8
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c

# bytecode is left to the first import: most modules of torch and vLLM are never imported
PIP_FLAGS := --progress-bar off --no-compile
# a lock is whole: pip adds nothing to it, and refuses a file with another hash
LOCKED := $(PIP_FLAGS) --no-deps --require-hashes
# PyPI has torch for CUDA alone, which takes 17 packages more; its build for CPUs comes first, if it is in reach
torch_for_cpus = $(1)/bin/pip install $(LOCKED) --requirement locks/torch-cpu.txt | $(PROGRESS) \
	|| echo "    no build of torch for CPUs in reach (docs/install.md): PyPI's, for CUDA, takes its place"
cuda_libraries = $(1)/bin/python -c 'import sys, importlib.metadata as m; sys.exit("+cpu" not in m.version("torch"))' \
	|| $(1)/bin/pip install $(LOCKED) --requirement locks/cuda.txt | $(PROGRESS) || $(call hint,$(NO_INSTALL))
# of pip's output, what shows that it moves: large downloads and the start of the last step
PROGRESS := awk '/Downloading .* [MG]B\)/ {print "    " $$2, $$3, $$4; fflush()} \
	/^Installing collected/ {print "    unpacking " NF - 3 " packages"; fflush()}'
NO_INSTALL := pip says why, above. What is already fetched is kept, so just run make again.
NO_VENV := The venv module is missing: on Debian, apt-get install python3-venv

SETUP := $(VENV)/.stamp
SETUP_VLLM := $(VLLM_VENV)/.stamp
SETUP_GPU := $(VENV)/.stamp-gpu
SETUP_PEERS := $(PEERS_VENV)/.stamp
SETUP_TOOLS := $(TOOLS_VENV)/.stamp
# what `make sbom` and `make audit` look at, where they are there
ENVIRONMENTS = $(wildcard $(VENV) $(VLLM_VENV) $(PEERS_VENV))
# what tests run under Node.js; without it those tests are skipped, but on CI
NODE_PACKAGES := serving/client/typescript tests/service/inspector
SETUP_NODE := $(NODE_PACKAGES:%=%/node_modules/.stamp)
# another Python that has everything: then nothing is installed
GPU_PYTHON ?=
GPU_RUN := $(or $(GPU_PYTHON),$(VENV)/bin/python) -m
GPU_SETUP := $(if $(GPU_PYTHON),,$(SETUP_GPU))
GPU_TESTS = $(shell grep -rlE "mark\.gpu|gate_worlds" tests --include=test_*.py)
GPU_LOGS := build/gpu
# of pytest-xdist: half of the tests' time is waiting, for Ray, for vLLM, for processes to be killed
TEST_WORKERS ?= 3
# for soak: which proofs to go on with, and for how long each
PROOF ?=
SECONDS ?= 7200
# more for the benchmark, such as --quick
GPU_BENCH ?=
# -o in place of --timeout: pytest-timeout may be missing
GPU_PYTEST := $(GPU_RUN) pytest --require-gpu --continue-on-collection-errors --color=no
SANITIZE_TOOLS ?= memcheck racecheck synccheck initcheck
# of a block, at least 16 warps x 3 stages: with the default number the kernel ended in a launch failure
SANITIZE_BARRIERS := 64
# for each tool: the four stay below ten minutes
SANITIZE_SECONDS ?= 140
SANITIZE_TESTS := tests/kernels/test_gate.py tests/kernels/test_gate_gpu.py::test_hard_cases_read_as_the_reference_does
# torch's cache hides accesses beyond an allocation; libraries probe the driver by calls that fail
SANITIZE := PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout -k 10 $(SANITIZE_SECONDS) compute-sanitizer \
	--target-processes all --launch-timeout 0 --report-api-errors no --error-exitcode 99
# pytest ends with 0 too if everything was skipped
some_passed = grep -qE '(^|[ ,])[1-9][0-9]* passed' $(1)
# racecheck counts hazards and the others errors; without a summary nothing was checked
nothing_found = grep -qE 'SUMMARY: 0 (errors|hazards)' $(1) && ! grep -qE 'SUMMARY: [1-9]' $(1)

# steps are announced with `say`; `|| $(call hint,...)` says what to do when one fails
say = @echo "==> $(1)"
hint = { echo "==> FAILED. $(1)" >&2; exit 1; }

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHONUNBUFFERED := 1
# images of containers often set it; each of the tests' many processes would compile anew all that it imports
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help setup setup-vllm setup-node setup-gpu setup-peers kernels model demo test lint bench gpu gpu-tests gpu-sanitize gpu-bench client docs lock sbom audit dist soak clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(SETUP) ## make .venv, the engine's environment

setup-vllm: $(SETUP_VLLM) ## make .venv-vllm, the local LLM server's environment

setup-node: $(SETUP_NODE) ## fetch the npm packages that tests run

setup-gpu: $(SETUP_GPU) ## add the packages for a GPU to .venv; faiss-gpu takes the place of faiss-cpu

setup-peers: $(SETUP_PEERS) ## make .venv-peers, the environment of mem0ai and langmem (docs/peers.md)

model: $(MODEL)/config.json ## make the small instruct model (1.1 GB to download, 2.3 GB on disk)

kernels: $(SETUP) ## compile the kernels for this CPU, if they are not in the cache
	$(call say,kernels)
	@$(VENV)/bin/python -m compileall -q engine kernels serving prompts bench
	@$(VENV)/bin/python -m undertow.engine.step.warm_up

demo: kernels $(if $(UNDERTOW_LLM_URL),,$(SETUP_VLLM) $(MODEL)/config.json) ## run the demo; UNDERTOW_LLM_URL names a server to use
	$(call say,demo)
	@$(VENV)/bin/undertow demo

test: kernels $(SETUP_VLLM) $(SETUP_NODE) ## set up, then run all tests but the soak
	$(call say,tests)
	@$(VENV)/bin/pytest -m "not soak" -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

lint: $(SETUP) ## ruff and mypy
	$(call say,ruff)
	@$(VENV)/bin/ruff check . || $(call hint,Many findings go away with: $(VENV)/bin/ruff check --fix .)
	@$(VENV)/bin/ruff format --check . || $(call hint,Run: $(VENV)/bin/ruff format .)
	$(call say,mypy)
	@$(VENV)/bin/mypy || $(call hint,The lines above name the places.)

bench: $(SETUP) ## run the benchmarks (minutes; the machine should be idle)
	$(call say,bench: gate)
	@$(VENV)/bin/python -m undertow.bench.micro.gate
	$(call say,bench: encoder)
	@$(VENV)/bin/python -m undertow.bench.micro.encoder
	$(call say,bench: ingest)
	@$(VENV)/bin/python -m undertow.bench.system.ingest

# All go on after a failure: a session on a card is dear, and each has something to say.
gpu: ## where there is a card: gpu-tests, gpu-sanitize and gpu-bench
	@$(MAKE) --no-print-directory --keep-going -j1 gpu-tests gpu-sanitize gpu-bench \
		|| $(call hint,The lines above name what failed. docs/gpu.md says how to read each.)

gpu-tests: $(GPU_SETUP) ## the tests that need a card, and gate.cu's machine code
	@failed=; mkdir -p $(GPU_LOGS); export PYTHONPATH="src:$$PYTHONPATH"; \
	echo "==> GPU tests"; \
	$(GPU_PYTEST) -m gpu $(GPU_TESTS) | tee $(GPU_LOGS)/tests.log \
		&& $(call some_passed,$(GPU_LOGS)/tests.log) || failed="$$failed tests"; \
	echo "==> gate.cu's machine code"; \
	$(GPU_PYTEST) tests/kernels/test_gate_compile.py | tee $(GPU_LOGS)/compile.log \
		&& $(call some_passed,$(GPU_LOGS)/compile.log) || failed="$$failed compile"; \
	test -z "$$failed" || $(call hint,What failed:$$failed. The output is in $(GPU_LOGS).)

gpu-sanitize: $(GPU_SETUP) ## the gate's tests under compute-sanitizer
	@command -v compute-sanitizer >/dev/null \
		|| $(call hint,compute-sanitizer is not on the PATH. It comes with the CUDA toolkit.)
	@failed=; mkdir -p $(GPU_LOGS); export PYTHONPATH="src:$$PYTHONPATH"; \
	for tool in $(SANITIZE_TOOLS); do \
		echo "==> compute-sanitizer: $$tool"; log=$(GPU_LOGS)/$$tool.log; more=; \
		test $$tool != synccheck || more="--num-cuda-barriers $(SANITIZE_BARRIERS)"; \
		$(SANITIZE) --tool $$tool $$more $(GPU_PYTEST) -q -m gpu -o timeout=0 $(SANITIZE_TESTS) 2>&1 | tee $$log \
			&& $(call some_passed,$$log) && $(call nothing_found,$$log) || failed="$$failed $$tool"; \
	done; \
	test -z "$$failed" || $(call hint,What failed:$$failed. The output is in $(GPU_LOGS).)

gpu-bench: $(GPU_SETUP) ## the GPU benchmark into docs/results; GPU_BENCH=--quick repeats less
	$(call say,bench: gpu)
	@mkdir -p docs/results; PYTHONPATH="src:$$PYTHONPATH" \
		$(GPU_RUN) undertow.bench.gpu.run --out docs/results $(GPU_BENCH)

client: $(SETUP) ## make the sync client of the async one
	@$(VENV)/bin/python -P serving/client/generate.py

docs: $(SETUP) ## make the manual in build/docs; a broken link is an error
	$(call say,docs)
	@$(VENV)/bin/sphinx-build -q -E -W --keep-going -b html docs build/docs \
		|| $(call hint,The lines above name the pages.)

lock: $(SETUP_TOOLS) ## make the lock files anew from constraints.txt and pyproject.toml
	$(call say,locks)
	@$(TOOLS_VENV)/bin/python -P locks/make.py || $(call hint,The lines above say which versions do not fit together.)

sbom: $(SETUP_TOOLS) ## a CycloneDX bill of materials of each environment that is there, in build/sbom
	$(call say,bills of materials)
	@mkdir -p build/sbom; for venv in $(ENVIRONMENTS); do \
		$(TOOLS_VENV)/bin/cyclonedx-py environment --validate --output-reproducible --pyproject pyproject.toml \
			--output-file build/sbom/$${venv#.}.json $$venv || exit; done

# --strict: a package that the service does not know, or a service out of reach, is an error
audit: $(SETUP_TOOLS) ## ask PyPI for known weaknesses of what the locks pin; one is an error
	$(call say,known weaknesses)
	@failed=; for lock in $(filter-out locks/torch-cpu.txt,$(wildcard locks/*.txt)); do echo "$$lock"; \
		$(TOOLS_VENV)/bin/pip-audit --strict --disable-pip --require-hashes --progress-spinner off --requirement $$lock \
			|| failed="$$failed $$lock"; done; test -z "$$failed" || $(call hint,What failed:$$failed)

dist: $(SETUP) ## the wheel of the last commit in dist/: the same bytes each time
	$(call say,wheel)
	@rm -rf build/wheel && mkdir -p build/wheel && git archive HEAD | tar -x -C build/wheel
	@SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(VENV)/bin/pip wheel --quiet --no-deps --no-build-isolation \
		--wheel-dir dist ./build/wheel && sha256sum dist/*.whl

soak: $(SETUP) ## the long proofs: PROOF=NAME goes on with one (several in quotes) from its file in docs/results, for SECONDS=7200 each; else they are listed
	$(call say,soak)
	@$(VENV)/bin/python -m tests.support.soak.proofs $(PROOF) --seconds $(SECONDS)

clean: ## remove environments, caches and the model
	rm -rf $(VENV) $(VLLM_VENV) $(PEERS_VENV) $(TOOLS_VENV) $(NODE_PACKAGES:%=%/node_modules) .models .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist docs/reference

$(SETUP): pyproject.toml locks/engine.txt locks/cuda.txt
	$(call say,engine environment in $(VENV))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| $(call hint,Python 3.11 or newer is needed; name one with: make PYTHON=python3.11 setup)
	@$(PYTHON) -m venv $(VENV) || $(call hint,$(NO_VENV))
	$(call say,installing packages: 2 GB on disk)
	@# mem0ai asks for protobuf<7, google-adk for OpenTelemetry up to 1.44, which what is tested does without
	@$(call torch_for_cpus,$(VENV))
	@$(VENV)/bin/pip install $(LOCKED) --requirement locks/engine.txt | $(PROGRESS) || $(call hint,$(NO_INSTALL))
	@$(call cuda_libraries,$(VENV))
	@$(VENV)/bin/pip install $(PIP_FLAGS) --no-deps --no-build-isolation --editable . | $(PROGRESS) || $(call hint,$(NO_INSTALL))
	$(call say,compiling them on all cores: a process starts in half the time)
	@$(VENV)/bin/python -m compileall -q -j 0 -x '/tests?/' $(VENV)/lib >/dev/null 2>&1 || true
	@touch $@

%/node_modules/.stamp: %/package-lock.json
	$(call say,npm packages of $*)
	@npm ci --prefix $* --ignore-scripts --no-audit --no-fund --loglevel=error && touch $@ || test -z "$$CI" \
		|| $(call hint,Node.js 20 or newer is needed for the tests.)

# faiss-cpu and faiss-gpu are the same module: side by side they overwrite each other's files
$(SETUP_GPU): $(SETUP) locks/gpu.txt
	$(call say,installing packages for CUDA 13 and faiss-gpu in the place of faiss-cpu)
	@$(VENV)/bin/pip uninstall --yes --quiet faiss-cpu faiss-gpu
	@$(VENV)/bin/pip install $(LOCKED) --requirement locks/gpu.txt --requirement locks/cuda.txt | $(PROGRESS) \
		|| $(call hint,$(NO_INSTALL))
	@$(VENV)/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)' \
		|| $(call hint,This torch is a build for CPUs; docs/gpu.md says how to get one for CUDA.)
	@touch $@

$(SETUP_VLLM): locks/vllm.txt
	$(call say,LLM server environment in $(VLLM_VENV))
	@$(PYTHON) -m venv $(VLLM_VENV) || $(call hint,$(NO_VENV))
	$(call say,installing torch and vLLM: 2 GB on disk)
	@$(call torch_for_cpus,$(VLLM_VENV))
	@$(VLLM_VENV)/bin/pip install $(LOCKED) --requirement locks/vllm.txt | $(PROGRESS) || $(call hint,$(NO_INSTALL))
	@$(VLLM_VENV)/bin/python -P -c 'import sys, torch; sys.exit(torch.version.cuda is not None)' \
		|| $(call hint,The server needs a CPU build of torch; docs/install.md says how to choose one. Then: make clean setup-vllm)
	@touch $@

$(SETUP_PEERS): locks/peers.txt locks/cuda.txt
	$(call say,other memory systems' environment in $(PEERS_VENV))
	@$(PYTHON) -m venv $(PEERS_VENV) || $(call hint,$(NO_VENV))
	$(call say,installing torch, mem0ai and langmem: 1.4 GB on disk)
	@$(call torch_for_cpus,$(PEERS_VENV))
	@$(PEERS_VENV)/bin/pip install $(LOCKED) --requirement locks/peers.txt | $(PROGRESS) || $(call hint,$(NO_INSTALL))
	@$(call cuda_libraries,$(PEERS_VENV))
	@touch $@

$(SETUP_TOOLS): locks/tools.txt
	$(call say,environment of tools in $(TOOLS_VENV))
	@$(PYTHON) -m venv $(TOOLS_VENV) || $(call hint,$(NO_VENV))
	@$(TOOLS_VENV)/bin/pip install $(LOCKED) --requirement locks/tools.txt | $(PROGRESS) || $(call hint,$(NO_INSTALL))
	@touch $@

$(MODEL)/config.json: | $(SETUP_VLLM)
	$(call say,small instruct model in $(MODEL))
	@$(VLLM_VENV)/bin/python -P serving/vllm/offline_model.py --out $(MODEL) \
		|| $(call hint,The download resumes where it stopped: run make model again.)
