# Needs make and Python 3.11 or newer; everything else goes into a virtual environment.
#   make demo     train examples/gpt.py on 8 simulated devices, planned by autoplan
#   make test     run the tests
#   make clean    remove the environment and what was built
# Variables: PYTHON (the interpreter), VENV (where the environment goes), ARGS (for demo or pytest), WORKERS (for
# pytest), EXTRAS (what is installed beside autoplan).

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
WORKERS ?= auto
EXTRAS ?= test,test-libraries

BIN = $(VENV)/bin
STAMP = $(VENV)/installed

.PHONY: demo test clean
.DELETE_ON_ERROR:

demo: $(STAMP)
	$(BIN)/python examples/gpt.py $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist loadgroup $(ARGS)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "autoplan needs Python 3.11 or newer, and \"$(PYTHON)\" is: $$($(PYTHON) --version 2>&1)."; \
	  echo "Name a newer one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; } >&2
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "\"$(PYTHON) -m venv\" failed; on Debian and Ubuntu, install the package python3-venv first."; exit 1; } >&2
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$(EXTRAS)]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
