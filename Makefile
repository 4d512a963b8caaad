# Set-up included: every target makes its own virtual environment first. PYTHON picks the interpreter.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The CPU build is enough for demo, tests and lint; TORCH= takes the torch that $(PYTHON) already has.
TORCH ?= torch==2.13.0

.PHONY: demo test bench lint test-gpu clean

demo: $(VENV)/.ready
	$(BIN)/tokenyard demo $(ARGS)

test: $(VENV)/.ready
	$(BIN)/python -m pytest -q $(ARGS)

bench: $(VENV)/.ready
	$(BIN)/tokenyard bench $(ARGS)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# On a machine with GPUs, in the environment at hand: the same test bodies over NCCL, and over gloo where ranks outnumber GPUs.
test-gpu:
	TOKENYARD_TEST_DEVICE=cuda PYTHONPATH=src $(PYTHON) -m pytest -q $(ARGS)

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(if $(TORCH),,--system-site-packages) $(VENV)
	$(if $(TORCH),$(BIN)/pip install -q $(TORCH))
	$(BIN)/pip install -q -e '.[test]'
	touch $@

$(VENV)/.lint: $(VENV)/.ready
	$(BIN)/pip install -q -e '.[lint]'
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis
