# Two commands for people: `make demo` shows the main job end to end, `make test` runs everything a plain machine can.
# `make test-system` builds the package and proves it on Debian machines that it boots: as root, with mmdebstrap.
# Both make .venv on first use, with any Python from 3.11 on: make PYTHON=python3.13 test

PYTHON ?= python3
# The version that the suite is run with. pip prefers a CPU build (2.13.0+cpu) where an index that it knows has one.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin

CHAOS_SECONDS ?= 600
CHAOS_SEED ?= 1

.PHONY: demo test test-chaos test-system lint bench man clean

demo: $(VENV)/ready
	$(BIN)/python tests/demo/demo.py

test: $(VENV)/ready
	$(BIN)/python -m pytest $(ARGS)

# Random drops, kills, stops and reloads for so long: make test-chaos CHAOS_SECONDS=60 CHAOS_SEED=2
test-chaos: $(VENV)/ready
	CHAOS_SECONDS=$(CHAOS_SECONDS) CHAOS_SEED=$(CHAOS_SEED) $(BIN)/python -m pytest -s tests/chaos/test_random_kills.py $(ARGS)

test-system: $(VENV)/ready
	$(BIN)/python -m pytest tests/system $(ARGS)

lint: $(VENV)/ready
	$(BIN)/python -m pytest tests/unit/test_linters.py

bench: $(VENV)/ready
	$(BIN)/python benchmarks/train_speed.py
	$(BIN)/python benchmarks/score_speed.py
	$(BIN)/python benchmarks/read_speed.py
	$(BIN)/python benchmarks/drop_to_publish.py

man: $(VENV)/ready
	$(BIN)/python docs/man/generate.py build/man

$(VENV)/ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "retraind needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(call torch)
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@

# Without an NVIDIA device on the PCI bus the CPU build is asked for by name first; not every index has it.
define torch
$(if $(wildcard /proc/driver/nvidia/version),'$(TORCH)','$(TORCH)+cpu' || $(BIN)/python -m pip install --quiet '$(TORCH)')
endef

clean:
	rm -rf $(VENV) demo build dist .pytest_cache .mypy_cache .ruff_cache daemon/*.egg-info
