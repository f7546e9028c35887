# Two commands: `make quickstart` shows all steps on this machine, `make test` proves it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKSPACE ?= workspace
# HolisticTraceAnalysis, the reference of `collect trace --like-hta`, brings some hundred packages: it gets an environment of its own.
HTA := .venv-hta
# The program that writes the documentation site: in $(VENV) it would change the packages of runs that wait, which are then held.
DOCS := .venv-docs
OS_RELEASE ?= /etc/os-release
# What tests use of the system, as COMMAND:PACKAGE of Debian; COMMAND/COMMAND: any of these commands will do.
TOOLS := chromium/google-chrome:chromium systemd-nspawn:systemd-container debootstrap:debootstrap ch-run:charliecloud-runtime ip:iproute2
TOOLS += ssh-keygen:openssh-client rsync:rsync pdflatex:texlive-latex-recommended pdftotext:poppler-utils zsh:zsh fish:fish tcsh:tcsh ksh:ksh g++:g++
TOOLS += sshd:openssh-server
# The number of workers, and which tests share one: tests/support/support_lanes.py.
SIDE_BY_SIDE = --numprocesses auto --dist loadscope --no-loadscope-reorder $(if $(SHUFFLE),--shuffle=$(SHUFFLE))
# The seed of the random order of tests: `new` draws one and prints it, `make test SHUFFLE=` runs tests in the order of their files.
SHUFFLE = new

# What torch's environment takes, in GB: $(VENV), and the downloads, which pip unpacks for a while. README names the same figures.
VENV_GB := $(if $(filter cpu,$(TORCH)),2,6)
DOWNLOAD_GB := $(if $(filter cpu,$(TORCH)),1,3)
FREE_GB = df -Pk $(1) | awk 'END {print int($$4 / 1000000)}'
# Where pip unpacks: in TMPDIR if it is set and has room. /tmp may be small, for example half of the memory on Debian 13.
UNPACK := $(or $(shell test -d "$$TMPDIR" && test $$($(call FREE_GB,"$$TMPDIR")) -ge $(DOWNLOAD_GB) && echo "$$TMPDIR"),$(CURDIR)/.cache/tmp)
# An interrupted pip leaves packages that it takes for installed later, without their commands: those that do not name their INSTALLER.
PIP = for info in $(1)/lib/python3*/site-packages/*.dist-info; do test -e "$$info/INSTALLER" || rm -rf "$$info"; done; \
	mkdir -p "$(UNPACK)" && TMPDIR="$(UNPACK)" PIP_CONSTRAINT=$(2) $(1)/bin/python -m pip --disable-pip-version-check
VENV_PIP = $(call PIP,$(VENV),constraints.txt)

.PHONY: FORCE help quickstart test test-all test-long check golden wheel docs pictures mutants gpu-proof system clean

# The first target: what `make` alone says.
help:
	@echo "make quickstart   install into $(VENV), train 24 small models on this machine, write the report"
	@echo "                  (with the CPU build of torch: make quickstart TORCH=cpu)"
	@echo "make test         install what the quick tests need, check the code, run the quick tests: 8 minutes on 2 cores"
	@echo "make test-all     install what the other tests need, also system packages, and run the other tests"
	@echo "make test-long    both, with the long forms of proofs"
	@echo "make check        ruff, mypy and import-linter"
	@echo "make golden       write golden files, schemas and generated pages anew"
	@echo "make wheel        build the wheel and the source archive into dist/"
	@echo "make docs         write the documentation site to site/"
	@echo "make pictures     make the pictures of the documentation from runs on this machine; up to an hour"
	@echo "make system       install, or name, the system packages that the tests use"
	@echo "make gpu-proof    test shardlab on the GPUs of this machine, results to docs/results/; for several GPUs:"
	@echo "                  make gpu-proof GPUS=8, or for two nodes of a cluster: make gpu-proof CLUSTER=cluster.yaml NODES=2"
	@echo "make mutants      change lines of the product and count which changes the tests notice"
	@echo "make clean        remove environments and caches"

quickstart: $(VENV)/installed
	$(BIN)/provision examples/local.yaml --workspace "$(WORKSPACE)"
	$(BIN)/jobs submit --matrix quickstart --wait --workspace "$(WORKSPACE)"
	$(BIN)/collect fetch --workspace "$(WORKSPACE)"
	$(BIN)/collect summarize --workspace "$(WORKSPACE)"

# Which tests are quick and which are slow: tests/support/support_tiers.py. No test is in both tiers.
test: check
	$(BIN)/pytest --tier quick $(SIDE_BY_SIDE) --durations=20

# First the environment, with the progress of pip; then, side by side, HTA's environment and system packages; then the slow tests.
test-all: $(VENV)/installed-dev
	$(MAKE) --jobs --output-sync $(HTA)/installed system
	SHARDLAB_HTA="$(CURDIR)/$(HTA)/bin/python" $(BIN)/pytest --tier slow $(SIDE_BY_SIDE) --durations=40

# Both tiers with the long forms of proofs, such as 200 interrupted fetches where `make test` has 20.
test-long: export SHARDLAB_TESTS = long
test-long: test
	$(MAKE) test-all

check: $(VENV)/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# The files of a release. The source archive comes first, and the wheel is built from the same files.
wheel: $(VENV)/installed-dev
	$(BIN)/python -m hatchling build -d dist

# Writes all golden files and JSON schemas anew. Read the diff before you commit it.
golden: $(VENV)/installed-dev
	$(BIN)/python -m shardlab.json_schema
	$(BIN)/python tools/record_studies.py
	SHARDLAB_GOLDEN=write $(BIN)/pytest --quiet $$(grep -rl --include="test_*.py" same_as_golden tests)
	git status --short tests/golden shardlab/schemas docs/menus.md docs/reference docs/papers.md

# Writes the documentation site to site/, and fails at dead links.
docs: $(DOCS)/installed
	$(DOCS)/bin/zensical build --clean --strict --config-file mkdocs.yml
	@echo "open site/index.html; its search needs a server: $(DOCS)/bin/python -m http.server --bind 127.0.0.1 --directory site"

# Makes docs/images from the matrix of README.md, a quickstart and a rehearsal of study 1, which it keeps in .pictures. Look at each picture.
pictures: $(VENV)/installed-dev
	PYTHONPATH=tests/support $(BIN)/python tools/record_pictures.py

# Tests shardlab on the GPUs of this machine; results go to docs/results. More arguments of prove.py: PROOF='--only A'
# With GPUS=N or CLUSTER=FILE: a rank on each of several GPUs, with several.py (docs/several-gpus.md).
ON_SEVERAL := $(if $(GPUS),--gpus $(GPUS)) $(if $(CLUSTER),--cluster "$(CLUSTER)" --nodes $(or $(NODES),2))
gpu-proof: $(if $(strip $(ON_SEVERAL)),$(VENV)/installed)
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) benchmarks/gpu/$(if $(strip $(ON_SEVERAL)),several.py $(ON_SEVERAL),prove.py) \
		--out docs/results $(PROOF)

# Breaks lines of the product and says whether tests notice; docs/design/mutants.md. More words for it: MUTANTS='--seed 15'
mutants: $(VENV)/installed-mutants
	$(BIN)/python tools/mutants $(MUTANTS)

# Makes an environment anew unless it works here: its pip starts, and pip's command is of this path. One that is half made, was moved,
# or is of a Python that is gone does not. A link, and packages that make did not install, are never removed.
WORKS := import pip, sys; sys.exit(sys.prefix == sys.base_prefix or sys.prefix + "/bin/python" not in open(sys.prefix + "/bin/pip").read())
define CAN_MAKE
import sys, importlib.util
version = "python%d.%d" % sys.version_info[:2]
if sys.version_info < (3, 11):
    sys.exit("error: shardlab needs Python 3.11 or newer, and $(PYTHON) is %s; name a newer one: make PYTHON=/path/to/python3 ..." % version)
if not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
    sys.exit("error: $(PYTHON) cannot make environments; on Debian or Ubuntu, install its package first: sudo apt install %s-venv" % version)
endef
export CAN_MAKE
IS_FOREIGN = test -L $* || { ! ls $*/installed* >/dev/null 2>&1 && ls $*/lib/python3*/site-packages 2>/dev/null \
	| grep -qEv '^(pip|setuptools|wheel|pkg_resources|_distutils_hack|distutils-precedence|__pycache__)'; }
$(VENV)/pyvenv.cfg $(HTA)/pyvenv.cfg $(DOCS)/pyvenv.cfg: %/pyvenv.cfg: FORCE
	@$*/bin/python -c '$(WORKS)' 2>/dev/null || { ! { $(IS_FOREIGN); } || { \
		echo "error: $* does not work here as an environment with pip, and make did not make it; remove it: rm -r $*" >&2; exit 2; }; \
		$(PYTHON) -c "$$CAN_MAKE" && echo "making $* with $(PYTHON)" && $(PYTHON) -m venv --clear $*; }

comma := ,
# Says what the first installation takes, before minutes without a question; refuses if the disk has no room for it.
define SAY_SIZE
@test -d $(VENV)/lib/python3*/site-packages/torch || { free=$$($(call FREE_GB,.)); \
echo "Installing torch and some 90 packages into $(VENV): $(VENV_GB) GB, and $(DOWNLOAD_GB) GB of downloads, unpacked in $(UNPACK); several minutes."; \
$(if $(TORCH),,echo "These are the figures of the CUDA build of torch. The CPU build takes 2 GB: make $(MAKECMDGOALS) TORCH=cpu";) \
test $$free -ge $$(($(VENV_GB) + $(DOWNLOAD_GB))) || { \
echo "error: $(CURDIR) is on a disk with $$free GB free, and the installation takes $$(($(VENV_GB) + $(DOWNLOAD_GB))) GB while it runs;" \
"free some$(if $(filter cpu,$(TORCH)),,$(comma) or take the CPU build: make $(MAKECMDGOALS) TORCH=cpu)" >&2; exit 2; }; }
endef

# TORCH=cpu (or cu126, ...): this build of torch, from PyTorch's own index, whose address uv knows.
$(VENV)/torch-$(TORCH): constraints.txt $(VENV)/pyvenv.cfg
	$(SAY_SIZE)
	@$(VENV_PIP) install uv
	$(BIN)/uv pip install --python $(BIN)/python --torch-backend $(TORCH) --constraint constraints.txt \
		--reinstall-package torch --reinstall-package torchvision torch torchvision
	@touch $@

$(VENV)/installed: pyproject.toml constraints.txt $(VENV)/pyvenv.cfg $(if $(TORCH),$(VENV)/torch-$(TORCH))
	$(SAY_SIZE)
	@$(VENV_PIP) install --editable '.[trainers,report]'
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	@$(VENV_PIP) install --editable '.[trainers,report,dev]'
	@touch $@

$(VENV)/installed-mutants: $(VENV)/installed-dev
	@$(VENV_PIP) install --editable '.[trainers,report,dev,mutants]'
	@touch $@

$(HTA)/installed: tests/hta-constraints.txt $(HTA)/pyvenv.cfg
	@$(call PIP,$(HTA),tests/hta-constraints.txt) install --quiet HolisticTraceAnalysis
	@touch $@

$(DOCS)/installed: constraints.txt $(DOCS)/pyvenv.cfg
	@$(call PIP,$(DOCS),constraints.txt) install --quiet zensical
	@touch $@

# What tests use of the system: a browser that opens the report, LaTeX, and what practice nodes are made and reached with. Root on Debian or
# Ubuntu gets it from there; everyone else is told the packages, or has those tests skipped. Ubuntu's package of Chromium only fetches a snap.
system:
	@system=" $$(. $(OS_RELEASE) 2>/dev/null && echo $$ID $$ID_LIKE) "; PATH=$$PATH:/usr/sbin:/sbin; \
	missing=$$(for tool in $(TOOLS); do for name in $$(echo $${tool%:*} | tr / ' '); do \
		command -v $$name >/dev/null && continue 2; done; printf ' %s' $${tool#*:}; done); \
	case "$$system$$missing" in " ubuntu "*" chromium"*) missing=$$(echo "$$missing" | sed 's/ chromium//'); \
		echo "no chromium or google-chrome: Ubuntu has it only as a snap, so the tests that open the report in a browser are skipped";; esac; \
	test -n "$$missing" || exit 0; \
	case "$$system" in *" debian "*) ;; *) echo "missing, so that the tests that need them are skipped (Debian's names):$$missing"; exit 0;; esac; \
	test "$$(id -u)" = 0 || { echo "for the tests that are skipped otherwise: sudo apt install --no-install-recommends$$missing"; exit 0; }; \
	echo "installing for the tests:$$missing"; apt-get -qq update \
	&& DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends $$missing >/dev/null \
	|| echo "they cannot be installed, so the tests that need them are skipped"

clean:
	rm -rf $(VENV) $(HTA) $(DOCS) site .cache .pictures .mutants .mypy_cache .ruff_cache .pytest_cache .import_linter_cache dist
