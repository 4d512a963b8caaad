# Set-up included: every target makes its own virtual environment first. PYTHON picks the interpreter.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The CPU build is enough for demo, tests and lint; TORCH= takes the torch that $(PYTHON) already has.
TORCH ?= torch==2.13.0

.PHONY: demo test test-portable bench lint test-gpu test-virtual soak clean

demo: $(VENV)/.ready
	$(BIN)/tokenyard demo $(ARGS)

# So many workers: tests wait for each other, so five keep two cores busy; 0 runs all tests in one process (for --pdb and the like). Tests start many programs, so their bytecode is kept.
WORKERS ?= 5
test: $(VENV)/.frameworks
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

# Of each kind of truth a little (marker "portable"), for other versions of Python: PYTHON=python3.13 VENV=.venv313
test-portable: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m portable $(ARGS)

# A sweep; with SUITE= the project's own measurements, such as make bench SUITE=nvlink ARGS="--ranks 2".
bench: $(VENV)/.ready
	$(if $(SUITE),$(BIN)/python -m benchmarks $(SUITE),$(BIN)/tokenyard bench) $(ARGS)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# On a machine with GPUs, in the environment at hand: the same test bodies over NCCL, and over gloo where ranks outnumber GPUs.
test-gpu:
	TOKENYARD_TEST_DEVICE=cuda PYTHONPATH=src $(PYTHON) -m pytest -q $(ARGS)

# Many ranks on one GPU: threads of one process, engines with kernels. Not test_compile.py: torch compiles for one thread at a time, and a
# process in which several did may end in a segmentation fault.
VIRTUAL := $(addprefix tests/ranks/test_,dispatch_combine.py gradients.py async.py) \
	$(addprefix tests/gpu/test_,nvlink.py low_latency_gpu.py low_latency_nodes.py twolevel_gpu.py)
test-virtual:
	TOKENYARD_TEST_DEVICE=virtual CUDA_DEVICE_MAX_CONNECTIONS=32 CUDA_MODULE_LOADING=EAGER PYTHONPATH=src $(PYTHON) -m pytest -q \
		$(VIRTUAL) $(ARGS)

# What `make test` leaves out to stay short (tests/README.md lists it), and SEEDS times as many
# schedules of the simulator: the tests whose files name SOAK (tests/nvlink_pool.py).
SEEDS ?= 10
soak: $(VENV)/.frameworks
	TOKENYARD_SOAK_SEEDS=$(SEEDS) $(BIN)/python -m pytest -q --timeout=0 $$(grep -lw SOAK tests/*/test_*.py) $(ARGS)

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(if $(TORCH),,--system-site-packages) $(VENV)
	$(if $(TORCH),$(BIN)/pip install -q $(TORCH))
	$(BIN)/pip install -q -e '.[test]'
	touch $@

# Each in a folder of its own and without what it needs: two versions of one stand beside each other.
FRAMEWORKS := tests/dropin/frameworks.txt
$(VENV)/.frameworks: $(VENV)/.ready $(FRAMEWORKS)
	grep -v '^#' $(FRAMEWORKS) | while read folder packages; do $(BIN)/pip install -q --upgrade --no-deps --no-build-isolation \
		--target $(VENV)/frameworks/$$folder $$packages || exit 1; done
	touch $@

$(VENV)/.lint: $(VENV)/.ready
	$(BIN)/pip install -q -e '.[lint]'
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis
