# Two commands: `make quickstart` shows the whole line on this machine, `make test` proves it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m pip --disable-pip-version-check
WORKSPACE ?= workspace

.PHONY: quickstart test check clean

quickstart: $(VENV)/installed
	$(BIN)/provision examples/local.yaml --workspace "$(WORKSPACE)"
	$(BIN)/jobs submit --matrix quickstart --wait --workspace "$(WORKSPACE)"
	$(BIN)/collect fetch --workspace "$(WORKSPACE)"
	$(BIN)/collect summarize --workspace "$(WORKSPACE)"

test: check
	$(BIN)/pytest

check: $(VENV)/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("shardlab needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --editable '.[trainers,report]'
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) install --quiet --editable '.[trainers,report,dev]'
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache dist
