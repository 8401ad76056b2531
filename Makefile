# Every target works on a machine that has python3, make and git: it makes .venv itself.
PYTHON ?= python3
VENV   := .venv
# Nothing is written outside of this folder: no caches in the home, no byte code beside the sources.
# They are not in .venv, which Ray copies for every runtime environment with packages.
CACHE  := $(CURDIR)/.cache
export UV_CACHE_DIR := $(CACHE)/uv
export PIP_CACHE_DIR := $(CACHE)/pip
export PYTHONPYCACHEPREFIX := $(CACHE)/pycache
# Images of containers often set it. Then each process would compile what is not in the cache yet,
# the standard library among it: nearly half of what `import ray` takes.
unexport PYTHONDONTWRITEBYTECODE
# uv takes the certificates that the machine trusts, as pip is told to where it must.
export UV_SYSTEM_CERTS := true
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TORCH  := .venv-torch/.installed

.PHONY: install demo check docs test soak bench matrix build clean

install: $(STAMP)

# Compiled at once: the first Ray would have all its processes do it at the same time.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --constraint constraints.txt --editable '.[dev,examples]'
	touch $@

# For one example, in an environment of its own over the other one: NeMo-Run imports torch where it is,
# and a client takes twice as long to start. By pip: it finds a CPU build where the machine offers one,
# which uv does not.
$(TORCH): $(STAMP)
	$(PYTHON) -m venv $(@D)
	$(BIN)/python tests/over.py $(@D)
	$(@D)/bin/python -m pip install --quiet --constraint constraints.txt torch
	touch $@

demo: $(STAMP)                 ## train a classifier on an embedded Ray
	$(BIN)/python examples/quickstart.py

check: $(STAMP)                ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(STAMP)                 ## the site, in site/; a dead link or anchor fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# Side by side, each process with a Ray of its own. The folders that one process runs alone come first:
# hosts and Slurm wait more than they work.
test: $(STAMP)
	$(BIN)/python -m pytest -n 4 --no-loadscope-reorder --durations 30 $(addprefix tests/,hosts slurm examples ray cloud patches unit)

soak: $(STAMP) $(TORCH)        ## long loops and second ways; SEED=… repeats one
	$(BIN)/python -m pytest -m soak --timeout 7200 -s

bench: $(STAMP)
	$(BIN)/python -m benchmarks

matrix: $(STAMP)               ## unit tests with the lowest and the highest versions declared
	BIN=$(BIN) sh tests/matrix.sh

build: $(STAMP)
	$(BIN)/python -m build --outdir dist .

clean:
	rm -rf $(VENV) .venv-* $(CACHE) dist build site *.egg-info
