# Every target works on a machine that has python3, make and git: it makes .venv itself.
PYTHON ?= python3
VENV   := .venv
# Nothing is written outside of this folder: no caches in the home, no byte code beside the sources.
export UV_CACHE_DIR := $(CURDIR)/$(VENV)/.cache/uv
export PIP_CACHE_DIR := $(CURDIR)/$(VENV)/.cache/pip
export PYTHONPYCACHEPREFIX := $(CURDIR)/$(VENV)/.cache/pycache
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TORCH  := $(VENV)/.torch

.PHONY: install demo check test soak bench matrix build clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --editable '.[dev,examples]'
	touch $@

# By pip: it finds a CPU build where the machine offers one, which uv does not. For one example.
$(TORCH): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	touch $@

demo: $(STAMP)                 ## train a classifier on an embedded Ray
	$(BIN)/python examples/quickstart.py

check: $(STAMP)                ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Side by side, each process with a Ray of its own. Several hosts on this one machine do not go beside
# another Ray, where a head that is started again may never get an agent: what needs no Ray does.
# Torch is for two nodes only: where it is NeMo-Run imports it, and a client takes twice as long to start.
test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --no-loadscope-reorder tests/ray tests/examples
	$(MAKE) $(TORCH)
	$(BIN)/python -m pytest -n 2 --no-loadscope-reorder $(addprefix tests/,hosts cloud patches unit)

soak: $(STAMP) $(TORCH)                 ## long loops; SEED=… repeats one
	$(BIN)/python -m pytest -m soak --timeout 7200 -s

bench: $(STAMP)
	$(BIN)/python -m benchmarks

matrix: $(STAMP)               ## unit tests with the lowest and the highest versions declared
	BIN=$(BIN) sh tests/matrix.sh

build: $(STAMP)
	$(BIN)/python -m build --outdir dist .

clean:
	rm -rf $(VENV) .venv-* dist build *.egg-info
