# Two commands for a fresh clone: `make demo` and `make test`; each makes .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
.DEFAULT_GOAL := help
.PHONY: help demo test soak lint clean

help:
	@echo "make demo   five policies side by side, offline, under a minute"
	@echo "make test   lint, types and all tests"
	@echo "make soak   a million hostile replies; a quarter of an hour"
	@echo "make clean  remove .venv and caches"

# torch first and pinned: whatever asks for torch later is then content with what is there
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedcover needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: $(VENV)/.installed
	$(BIN)/fedcover demo

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest --numprocesses 2

soak: $(VENV)/.installed-dev
	mkdir -p benchmarks/results
	FEDCOVER_FUZZ=1000000 $(BIN)/python -m pytest -s tests/test_replies.py -k harmless | tee benchmarks/results/fuzz-replies.txt

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
