# Every target does all of its own set-up: on a fresh machine `make train` is enough.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: train test test-slow check lint types contracts clean

# What one step may take, all in all. Without help the default model takes 93.9 MiB; the least it can do with is 31 MiB.
BUDGET ?= 48MiB

train: $(READY)
	$(BIN)/elbowroom train --budget $(BUDGET)

# One thread a worker: two workers with spinning threads each take several times as long.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow"

test-slow: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

check: lint types contracts test

lint: $(READY)
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

contracts: $(READY)
	$(BIN)/lint-imports

$(READY): pyproject.toml constraints.txt
	@echo "setting up $(VENV): a minute or two, once"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt 'torch>=2.10'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
