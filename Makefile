# lowmem: `make` alone says what there is.
#
# Everything happens in .venv, which the first target that needs it makes. Paths are
# relative on purpose, so that a clone in a folder with spaces in its name works.

PYTHON ?=
VENV   := .venv
PY     := $(VENV)/bin/python
READY  := $(VENV)/.ready
TESTS  := $(VENV)/.ready-for-tests
SHELL  := /bin/sh

# `make demo ARGS="--rows 1e6 --seconds 30"` hands ARGS on.
ARGS ?=

# The stamp holds the folder that was installed: a clone that moved installs again.
ifneq "$(shell cat $(READY) 2>/dev/null)" "$(shell pwd)"
.PHONY: $(READY)
endif

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow lint notebooks notebooks-smoke bench clean

help:
	@echo "lowmem: train with Adam where Adam's states do not fit."
	@echo
	@echo "  make demo       ten million entities, trained on this machine in three minutes"
	@echo "  make test       the tests, and the four notebooks in their smallest form"
	@echo
	@echo "  make notebooks  the notebooks at full size (10 GB of disk, 16 GB of RAM, an hour)"
	@echo "  make bench      side-by-side benchmarks on this machine"
	@echo "  make lint       ruff and mypy"
	@echo "  make test-slow  the tests that take minutes each"
	@echo "  make clean      remove .venv and what runs leave behind"
	@echo
	@echo "The first run makes .venv and installs into it; that takes minutes, later runs do not."
	@echo 'Options go in ARGS:  make demo ARGS="--rows 1e6 --seconds 30"'
	@echo "Another Python:      make test PYTHON=python3.12"

demo: $(READY)
	$(PY) -m lowmem demo $(ARGS)

# Both halves run even if the first one fails; the tests come last, so that their
# closing line is the last thing on the screen.
test: $(TESTS)
	@status=0; \
	$(MAKE) --no-print-directory notebooks-smoke || status=1; \
	$(PY) -m pytest -m "not slow" $(ARGS) || status=1; \
	exit $$status

test-slow: $(TESTS)
	$(PY) -m pytest -m slow $(ARGS)

notebooks-smoke: $(TESTS)
	@if ls notebooks/*.ipynb >/dev/null 2>&1; then set -x; \
	LOWMEM_SMOKE=1 $(PY) -m pytest --nbval-lax --nbval-current-env --nbval-cell-timeout=300 -x notebooks/; \
	else echo "no notebooks yet"; fi

notebooks: $(TESTS)
	$(PY) -m pytest --nbval-lax --nbval-current-env --nbval-cell-timeout=3600 -x notebooks/ $(ARGS)

bench: $(READY)
	$(PY) -m lowmem bench all $(ARGS)

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

clean:
	rm -rf $(VENV) build dist demo_out snr_data lowmem-scratch-*
	rm -rf notebooks/lowmem-scratch-* notebooks/lowmem_01.json
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(READY): pyproject.toml requirements.txt
	@set -e; \
	if ! $(PY) -c "import sys, pip; sys.exit(sys.version_info < (3, 11))" 2>/dev/null; then \
	  found=""; \
	  for python in $(if $(PYTHON),"$(PYTHON)",python3 python3.14 python3.13 python3.12 python3.11 python); do \
	    if "$$python" -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null; then \
	      found="$$python"; break; \
	    fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo "lowmem needs Python 3.11 or newer; here is: $$("$(or $(PYTHON),python3)" --version 2>&1)." >&2; \
	    echo "Install a newer one, then say where it is:  make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; \
	    exit 1; \
	  fi; \
	  rm -rf $(VENV); \
	  echo "making $(VENV) with $$("$$found" --version)"; \
	  if ! "$$found" -m venv $(VENV); then \
	    rm -rf $(VENV); \
	    echo "This Python cannot make a virtual environment. On Debian, Ubuntu and Colab:" >&2; \
	    echo "  apt-get install python3-venv" >&2; \
	    exit 1; \
	  fi; \
	fi
	$(PY) -m pip install -r requirements.txt
	@pwd > $(READY)

# JupyterLab and Playwright are for the browser tests alone, so `make demo` does without.
$(TESTS): $(READY)
	$(PY) -m pip install -e ".[browser]"
	@touch $(TESTS)
