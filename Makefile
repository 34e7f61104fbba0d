# Every verb sets up .venv first if pyproject.toml, constraints.txt or the set-up script changed since.
# A fresh machine needs Python 3.11 or later with venv, make and a C compiler.

PYTHON ?= python3
BIN := .venv/bin
ENV := .venv/.installed
# Tests that mostly wait for compilers, on one core each: two side by side. The others use all cores by themselves.
COMPILED := tests/kernels/test_layouts.py $(wildcard tests/kernels/test_*compile.py)

.DEFAULT_GOAL := help
.PHONY: help rungs test check lint format wheel clean

help:  ## list these verbs
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile

rungs: $(ENV)  ## run the main job: parity, then time and bandwidth at every length (ARGS="..." adds options)
	$(BIN)/splitkv rungs $(ARGS)

test: check  ## what CI runs: the same as check

check: lint  ## ruff, mypy, the GPU kernels in Triton's interpreter, the tests and the README's commands
	$(BIN)/python tools/results_tables.py --check
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 tests/interpreter tests/cases
	$(BIN)/python -m pytest -n 2 $(COMPILED)
	$(BIN)/python -m pytest $(COMPILED:%=--ignore=%)

lint: $(ENV)  ## ruff and mypy alone
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

format: $(ENV)  ## let ruff format the code and fix what it can
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

wheel: $(ENV)  ## build dist/splitkv-*.whl
	rm -rf build dist
	$(BIN)/python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist .

clean:  ## remove build products and caches (.venv stays; remove it by hand to start over)
	rm -rf build dist src/splitkv.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

$(ENV): pyproject.toml constraints.txt tools/setup_env.py
	$(PYTHON) tools/setup_env.py .venv
	touch $@
