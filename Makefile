# Two commands on a fresh machine with Python 3.11+ and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# set-up happens once: for running, and on top of it for developing
RUN := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test verify lint bench docs pictures clean

$(RUN): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("dale needs Python 3.11 or newer, this is " + sys.version) if sys.version_info < (3, 11) else None'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (once; torch is a large download) ..."
	@$(PIP) -e .
	@touch $@

$(DEV): $(RUN)
	@echo "Installing the tools of the tests ..."
	@$(PIP) -e '.[dev]'
	@touch $@

demo: $(RUN)
	$(BIN)/dale train --compare erm pgd

lint: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal

verify: $(DEV)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m verify --timeout 1500

bench: $(DEV)
	$(BIN)/python benchmarks/run.py

docs: $(DEV)
	$(BIN)/python -m sphinx -b html -W --keep-going -q docs site
	@echo "The site is site/index.html"

pictures: $(DEV)
	$(BIN)/python docs/pictures.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis site
