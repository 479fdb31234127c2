# `make pretrain` and `make test` are all a fresh machine needs; both make the environment first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

.PHONY: all pretrain test lint clean

all: $(STAMP)

# The interpreter is part of the environment: another PYTHON makes it anew.
$(VENV)/python-is-$(subst /,_,$(PYTHON)):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	  || { echo "make: PYTHON=$(PYTHON) does not run, or is older than 3.11" >&2; exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(STAMP): setup.cfg pyproject.toml constraints.txt $(VENV)/python-is-$(subst /,_,$(PYTHON))
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[dev]'
	@touch $@

# Pre-trains experiments/tiny.py on the sample text; run again, it goes on where it stopped.
pretrain: $(STAMP)
	$(BIN)/bert-jax pretrain experiments/tiny.py

test: lint
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

clean:
	rm -rf $(VENV) build *.egg-info
