# make demo, make test and make test-gpu do all the set-up themselves, in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo study test test-gpu soak lint clean

demo: $(VENV)/demo.installed
	$(BIN)/prism demo

# Budgets x sizes of PRISM and Gated DeltaNet on the demo's text, a fit, and a page with plots: one to two hours of two cores.
# What is finished is not done again.
STUDY := studies/scaling-tiny
study: $(VENV)/scaling.installed runs/demo/data/manifest.json
	$(BIN)/prism scaling plan configs/scaling/tiny.yaml
	$(BIN)/prism sweep $(STUDY)
	$(BIN)/prism scaling fit $(STUDY)
	$(BIN)/prism scaling report $(STUDY)

runs/demo/data/manifest.json: | $(VENV)/demo.installed
	$(BIN)/prism demo

# In three parts, all of which must pass: tests that need no machine of their own, four at a time, since many wait; those
# that measure seconds, with one neighbour; those of a SLURM cluster, one after another, and beside them the README's.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --dist loadscope --no-loadscope-reorder
LONG := tests/slurm tests/test_readme.py
test: lint
	@failed=0; \
	$(PYTEST) $(LONG:%=--ignore %) -n 4 -m "not gpu and not alone" || failed=1; \
	$(PYTEST) $(LONG:%=--ignore %) -n 2 -m "alone and not gpu" || failed=1; \
	$(PYTEST) $(LONG) -n 2 || failed=1; \
	exit $$failed

# On a machine whose own Python holds torch for its GPU: make test-gpu BIN=$$(dirname $$(command -v python3))
test-gpu: $(if $(filter $(VENV)/bin,$(BIN)),$(VENV)/dev.installed)
	$(BIN)/python -m pytest -m gpu --override-ini addopts="--import-mode=importlib -q"

# Runs that are killed at 200 moments and resumed; some 11 minutes.
soak: $(VENV)/dev.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak --kills 200 --seed 0

lint: $(VENV)/dev.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

clean:
	rm -rf $(VENV) runs build .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# pip compiles one file after another, compileall with every core; a few files of some packages are for other Pythons.
$(VENV)/%.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing prism-lm[$*] into $(VENV): a few minutes the first time"
	@$(PIP) --no-compile --editable ".[$*]"
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@

$(VENV)/bin/python:
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) must be on PATH; apt-get install python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "error: $(PYTHON) must be 3.11, 3.12 or 3.13; for example make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
	  { echo "error: $(PYTHON) must have venv; apt-get install python3-venv"; exit 1; }
	@command -v c++ >/dev/null || { echo "error: a C++ compiler must be on PATH; apt-get install g++"; exit 1; }
	@$(PYTHON) -m venv $(VENV)
