# Each target sets up all it needs, once; setting up is repeated when pyproject.toml or constraints.txt change.
# PYTHON=/path/to/python chooses the interpreter that .venv is made with.

VENV := .venv
BIN  := $(VENV)/bin
PYTHON ?=

# A virtual environment made with the interpreter asked for; any, when none was.
MADE := $(if $(PYTHON),$(VENV)/.made-with-$(subst /,_,$(PYTHON)),$(or $(firstword $(wildcard $(VENV)/.made-with-*)),$(VENV)/.made-with-any))
PIP  := PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet

# An environment whose interpreter is gone is made again.
ifneq ($(wildcard $(VENV)),)
ifeq ($(shell $(BIN)/python -m pip --version >/dev/null 2>&1 && echo ok),)
.PHONY: $(MADE)
endif
endif

.DEFAULT_GOAL := help
.PHONY: help demo test
.NOTPARALLEL:

help:
	@echo "make demo   train on a small made problem, print each group's gap before and after"
	@echo "make test   lint, check the formatting and the types, run the tests"
	@echo "Both set up what they need in $(VENV). PYTHON=/path/to/python chooses the interpreter (3.11 or newer)."

demo: $(VENV)/.demo
	@$(BIN)/python -W 'ignore:Failed to initialize NumPy' examples/planted.py

test: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

$(VENV)/.demo: pyproject.toml constraints.txt $(MADE)
	@echo "Installing fairmt in $(VENV) ..."
	@$(PIP) -e .
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt $(MADE)
	@echo "Installing fairmt and what its tests need in $(VENV) ..."
	@$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.demo

$(MADE):
	@found=; \
	for python in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11 python); do \
		if "$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			found=$$python; break; \
		fi; \
	done; \
	if [ -z "$$found" ]; then \
		echo "fairmt needs Python 3.11 or newer with its venv module (on Debian and Ubuntu the package" >&2; \
		echo "python3-venv). Tried: $(or $(PYTHON),python3, python3.11 to python3.14, python)." >&2; \
		echo "Name one with: make $(or $(firstword $(MAKECMDGOALS)),test) PYTHON=/path/to/python" >&2; \
		exit 1; \
	fi; \
	echo "Making $(VENV) with $$("$$found" --version) ..."; \
	"$$found" -m venv --clear $(VENV)
	@touch $@
