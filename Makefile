# make demo      set up everything, then run the main job
# make test      set up everything (torch too, for tests that execute plans), then run all tests: first those that run side
#                by side, then those that measure this machine, which want it for themselves
# make check     linter and type checker
# make accuracy  compare predictions with published runs; fails where they got worse
# make setup     only set up

.PHONY: demo test check accuracy setup clean
.DEFAULT_GOAL := demo

# Tests start processes of their own; without bytecode on disk each compiles every module anew.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input -c constraints.txt
CANDIDATES := python3 python3.13 python3.12 python3.11 python3.14 python

demo: $(VENV)/.core
	$(BIN)/windtunnel compare --model gpt3-1.3b --cluster v100-32g-dgx1:1x4 --global-batch 1024 \
	  --searchers megatron-grid,ddp,megatron-tp,gpipe,fsdp,deepspeed-3d -o out/demo

test: $(VENV)/.test
	$(BIN)/python -m pytest -q -n auto --dist worksteal
	$(BIN)/python -m pytest -q -m measured

accuracy: $(VENV)/.core
	$(BIN)/windtunnel accuracy --check

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/mypy

setup: $(VENV)/.dev

clean:
	rm -rf $(VENV) out build *.egg-info

# A stamp per set of dependencies: nothing is installed twice unless the list of packages changed.
$(VENV)/bin/python:
	@for p in $(CANDIDATES); do \
	  if $$p -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    echo "creating $(VENV) with $$($$p --version)"; exec $$p -m venv $(VENV); \
	  fi; \
	done; \
	echo "windtunnel needs Python 3.11 or newer with venv (on Debian: apt install python3-venv)"; exit 1

$(VENV)/.core: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e .
	@touch $@

$(VENV)/.test: $(VENV)/.core
	$(PIP) -e '.[test,validation,distributed,megatron]'
	@touch $@

$(VENV)/.dev: $(VENV)/.test
	$(PIP) -e '.[dev]'
	@touch $@
