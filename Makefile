# `make help` lists the targets. Needed on the machine: Python 3.11 with its headers, make,
# git and a C compiler (one dependency of reasoning-gym has no wheel).
#
# PYTHON     interpreter that .venv is made from: make test PYTHON=/opt/python3.11/bin/python3
# PIP_EXTRA  more options for pip install. The pinned torch exists on PyPI as a CUDA build of several GB;
#            on a Linux machine without a GPU take the CPU build from PyTorch's own index:
#            make test PIP_EXTRA='--extra-index-url https://download.pytorch.org/whl/cpu'
# PROCESSES  processes that make test deals the tests to, 2 by default; 0: the tests run in pytest's own
# ARGS       what follows the command line: make ppo ARGS='steps=5', make test ARGS='-m "not slow"'

PYTHON    ?= $(shell command -v python3.11 || command -v python3 || echo python3.11)
PIP_EXTRA ?=
ARGS      ?=
PROCESSES ?= 2

BIN   := .venv/bin
STAMP := .venv/installed
CODE  := $(wildcard roll tests examples benchmarks docs)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help .venv ppo ppo-pp2 grpo sft sft-text test check format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[.a-z0-9-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

.venv: $(STAMP) ## create .venv and install the pinned dependencies

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"roll needs Python 3.11, {sys.executable} is {sys.version}")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --no-input $(PIP_EXTRA) -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

ppo: $(STAMP) ## PPO on a small task from the model of make sft, which runs first if need be; actor at tensor parallel 2
	$(BIN)/python examples/run_ppo.py --config examples/ppo_cpu.yaml $(ARGS)

ppo-pp2: $(STAMP) ## the same run at pipeline parallel 2
	$(BIN)/python examples/run_ppo.py --config examples/ppo_cpu_pp2.yaml $(ARGS)

grpo: $(STAMP) ## GRPO on the same task, from the same model
	$(BIN)/python examples/run_ppo.py --config examples/grpo_cpu.yaml $(ARGS)

sft: $(STAMP) ## supervised training of a small model from random weights; make ppo and make grpo start from its model
	$(BIN)/python examples/run_sft.py --config examples/sft_cpu.yaml $(ARGS)

sft-text: $(STAMP) ## the same on the text of this repository
	$(BIN)/python examples/run_sft.py --config examples/sft_text_cpu.yaml $(ARGS)

test: $(STAMP) ## the whole test suite
	@# Once: the tests start some hundred processes.
	$(BIN)/python -m compileall -q $(CODE)
	$(BIN)/python -m pytest -n $(PROCESSES) --max-worker-restart 0 $(ARGS)

check: $(STAMP) ## format, lint, types, layers
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(STAMP) ## rewrite files to the format, with the fixes that are safe
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean: ## remove .venv and caches; runs/ stays
	rm -rf .venv .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
