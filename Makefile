# Everything a fresh machine with Python 3.11+ needs: `make train`, then `make test`.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Modules are compiled as they are imported, which of most packages are few: an install takes half as long.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile

.PHONY: train test test-slow chaos smoke lint format docs clean

# Trains the quickstart: a small GPT on 8 simulated devices, or on the accelerators there are.
train: $(VENV)/installed
	$(BIN)/jaxtrain train

# The test suite. Its tests start Python some hundred times: compiled modules are kept between them.
# What `smoke` trains other tests train too. One process more than cores: many tests wait for others.
test: $(VENV)/installed-dev
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $$(($$(nproc 2>/dev/null || sysctl -n hw.ncpu) + 1)) --dist loadfile --no-loadscope-reorder --ignore tests/test_smoke.py

# The long proofs.
test-slow: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m slow

# Runs of several processes, killed at random for minutes, and mishaps; prints their goodput.
chaos: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m chaos

# What runs on every supported Python and JAX, without PyTorch.
smoke: $(VENV)/installed-smoke
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n auto -m "not slow and not chaos" tests/test_smoke.py tests/test_config.py tests/test_mesh.py tests/test_sharding.py tests/test_checkpoint.py tests/test_architecture.py

# Lint, format check and types.
lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

format: $(VENV)/installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The page of every binding, out of the settings' docstrings; the chain of packages, out of imports.
docs: $(VENV)/installed
	$(BIN)/python docs/chain.py > docs/chain.svg.new
	mv docs/chain.svg.new docs/chain.svg
	$(BIN)/python docs/schedules.py > docs/schedules.svg.new
	mv docs/schedules.svg.new docs/schedules.svg
	$(BIN)/python -m jaxtrain.analysis.bindings > docs/bindings.md.new
	mv docs/bindings.md.new docs/bindings.md

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "jaxtrain needs Python 3.11 or newer; this is " + sys.version.split()[0] + ": run make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(VENV)/bin/python pyproject.toml
	$(INSTALL) --editable .
	touch $@

$(VENV)/installed-smoke: $(VENV)/installed
	$(INSTALL) pytest pytest-xdist hypothesis
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(INSTALL) --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .venv-smoke .pytest_cache .ruff_cache
