# Two commands: `make quickstart` shows the whole line on this machine, `make test` proves it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m pip --disable-pip-version-check
WORKSPACE ?= workspace
# HolisticTraceAnalysis, the reference of `collect trace --like-hta`, brings some hundred packages: it gets an environment of its own.
HTA := .venv-hta
NEEDS := chromium systemd-nspawn debootstrap ch-run ip ssh-keygen rsync pdflatex pdftotext zsh fish g++
SYSTEM := chromium systemd-container debootstrap charliecloud-runtime iproute2 openssh-client rsync texlive-latex-recommended poppler-utils zsh fish g++
# One worker a core and one for the tests on practice nodes, which mostly wait (tests/support_lanes.py).
SIDE_BY_SIDE := --numprocesses auto --dist loadscope --no-loadscope-reorder

.PHONY: help quickstart test test-long prepare check golden docs pictures mutants gpu-proof system clean

# The first target: what `make` alone says.
help:
	@echo "make quickstart   install into $(VENV), train 24 small models on this machine, write the report"
	@echo "make test         install what the tests need, check the code, run the tests"
	@echo "make test-long    the same with the long forms of proofs"
	@echo "make check        ruff, mypy and import-linter"
	@echo "make golden       write golden files, schemas and generated pages anew"
	@echo "make docs         write the documentation site to site/"
	@echo "make pictures     make the pictures of the documentation from runs on this machine; up to an hour"
	@echo "make gpu-proof    test shardlab on the GPUs of this machine, results to docs/results/"
	@echo "make mutants      change lines of the product and count which changes the tests notice"
	@echo "make clean        remove environments and caches"

quickstart: $(VENV)/installed
	$(BIN)/provision examples/local.yaml --workspace "$(WORKSPACE)"
	$(BIN)/jobs submit --matrix quickstart --wait --workspace "$(WORKSPACE)"
	$(BIN)/collect fetch --workspace "$(WORKSPACE)"
	$(BIN)/collect summarize --workspace "$(WORKSPACE)"

test: prepare
	SHARDLAB_HTA=$(CURDIR)/$(HTA)/bin/python $(BIN)/pytest $(SIDE_BY_SIDE) --durations=40

# The same with the long forms of proofs, such as 200 interrupted fetches where `make test` has 20.
test-long: export SHARDLAB_TESTS = long
test-long: test

# What the tests need, made side by side: the environment and its checks, an environment for HTA, and Debian's packages.
prepare:
	$(MAKE) --jobs --output-sync check $(HTA)/installed system

check: $(VENV)/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# Writes all golden files and JSON schemas anew. Read the diff before you commit it. The help texts are written by Python 3.11 only.
golden: $(VENV)/installed-dev
	$(BIN)/python -m shardlab.json_schema
	SHARDLAB_GOLDEN=write $(BIN)/pytest --quiet $$(grep -l same_as_golden tests/test_*.py)
	git status --short tests/golden shardlab/schemas docs/menus.md

# Writes the documentation site to site/, and fails at dead links.
docs: $(VENV)/installed-dev
	$(BIN)/zensical build --clean --strict --config-file mkdocs.yml
	@echo "open site/index.html; its search needs a server: $(BIN)/python -m http.server --bind 127.0.0.1 --directory site"

# Makes docs/images from a quickstart and a rehearsal of study 1, which it keeps in .cache/pictures. Look at each picture.
pictures: $(VENV)/installed-dev
	$(BIN)/python tests/record_pictures.py

# Tests shardlab on the GPUs of this machine; results go to docs/results. More arguments of prove.py: PROOF='--only A'
gpu-proof:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) benchmarks/gpu/prove.py --out docs/results $(PROOF)

# Breaks lines of the product and says whether tests notice; docs/design/mutants.md. More words for it: MUTANTS='--seed 15'
mutants: $(VENV)/installed-mutants
	$(BIN)/python tests/mutants $(MUTANTS)

$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("shardlab needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --editable '.[trainers,report]'
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) install --quiet --editable '.[trainers,report,dev]'
	@touch $@

$(VENV)/installed-mutants: $(VENV)/installed-dev
	$(PIP) install --quiet --editable '.[trainers,report,dev,mutants]'
	@touch $@

$(HTA)/installed:
	test -x $(HTA)/bin/python || $(PYTHON) -m venv $(HTA)
	$(HTA)/bin/python -m pip --disable-pip-version-check install --quiet HolisticTraceAnalysis==0.5.0
	@touch $@

# What tests use of the system: a browser that opens the report, LaTeX, and what practice nodes are made and reached with. Root on Debian gets it
# from Debian; everyone else brings it, or has those tests skipped.
system:
	@missing=$$(for need in $(NEEDS); do command -v $$need >/dev/null || echo $$need; done); test -z "$$missing" \
	|| { test "$$(id -u)" = 0 && grep -qs '^ID=debian' /etc/os-release && apt-get -qq update \
	&& DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends $(SYSTEM) >/dev/null; } \
	|| echo "not here, so that the tests that need them are skipped:" $$missing

clean:
	rm -rf $(VENV) $(HTA) site .cache .mutants .mypy_cache .ruff_cache .pytest_cache .import_linter_cache dist
