# make demo       shows what the project does on this machine: a table, with timings where there is a Hopper GPU
# make test       runs every test that this machine can run
# make sanitize   compute-sanitizer on the kernels, where there is a Hopper GPU
# make lint       formatting, lint and types
# make dist       builds and checks the sdist and the wheel
#
# Everything runs in $(VENV), which is made once and updated when pyproject.toml changes.
# PYTHON picks the interpreter; PIP_CONSTRAINT (pip's own variable) pins versions, e.g. a CPU build of torch.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip -qq --disable-pip-version-check install

.DELETE_ON_ERROR:
.PHONY: demo test sanitize lint dist clean

demo: $(VENV)/.installed
	@$(BIN)/cute-dash demo

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -rs --durations=10

sanitize: $(VENV)/.installed-dev
	$(BIN)/python -m tests.sanitize

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

dist: $(VENV)/.installed-dev
	rm -rf build dist
	$(BIN)/python -m build --quiet
	$(BIN)/twine check --strict dist/*

clean:
	rm -rf $(VENV) build dist *.egg-info

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit(f"Python >= 3.10 is needed, this is {sys.version}; set PYTHON=...")'
	@echo "== creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: pyproject.toml | $(VENV)/.created
	@echo "== installing cute-dash and what it needs into $(VENV) (torch and the CuTe DSL are large: this takes minutes)"
	@$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "== installing the test and lint tools into $(VENV)"
	@$(PIP_INSTALL) --editable '.[dev]'
	@touch $@
