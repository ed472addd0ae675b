# Two commands for a fresh clone: `make demo` and `make test`; each makes .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SHELL := bash
.SHELLFLAGS := -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test test-system architectures soak chaos lint docs clean

help:
	@echo "make demo   five policies side by side, offline, under a minute"
	@echo "make test   lint, types and all tests"
	@echo "make test-system  real Flower processes: same bits, faults, hostile nodes, deployment; minutes"
	@echo "make architectures  trace the families of timm, torchvision and transformers; half an hour"
	@echo "make soak   200,000 hostile replies, and 64 clients over 4 SuperNodes; half an hour"
	@echo "make chaos  nodes, servers and SuperLinks of a federation are killed 18 times; a quarter of an hour"
	@echo "make docs   build the documentation into site/"
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

$(VENV)/.installed-flower: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,flower]"
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	touch $@

# timm asks for torchvision, of which its models need nothing: it comes without what it asks for
$(VENV)/.installed-architectures: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --constraint constraints.txt huggingface_hub pyyaml tokenizers regex tqdm
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps timm transformers
	touch $@

demo: $(VENV)/.installed
	$(BIN)/fedcover demo

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest --numprocesses 2

test-system: $(VENV)/.installed-flower
	$(BIN)/python -m pytest -m system --numprocesses 3 --dist loadfile --durations 20 tests

architectures: $(VENV)/.installed-architectures
	$(BIN)/python -m benchmarks.architectures
	$(BIN)/python -m benchmarks.architectures --docs

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

soak: $(VENV)/.installed-flower
	mkdir -p benchmarks/results
	FEDCOVER_FUZZ=200000 $(BIN)/python -m pytest -s tests/server/test_reply_fuzz.py -k harmless | tee benchmarks/results/fuzz-replies.txt
	$(BIN)/python benchmarks/flower_wire.py | tee benchmarks/results/flower-wire.json
	$(BIN)/python -m benchmarks.flower_soak | tee benchmarks/results/flower-soak.json

chaos: $(VENV)/.installed-flower
	mkdir -p benchmarks/results
	$(BIN)/python -m benchmarks.flower_chaos | tee benchmarks/results/flower-chaos.json

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis
