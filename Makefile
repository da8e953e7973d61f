# make demo        install into .venv, profile an example training, apply what helps, print where the report is and what was gained
# make test        install into .venv, run the tests that need no GPU, but for those marked long: others go the same ways
# make test-long   those, of parameters' products all cases, and what measures this machine
# make test-load   make test's ten times over, in random order, beside two busy processes
#                  (a part of it: LOAD="--runs 1 --seed 3 --part 2/4")
# make test-pythons  advisor with torch under every other Python from 3.10 on that is installed here
# make lint        ruff, mypy, import-linter, rules, generated pages
# make docs        build the docs as a site into build/site; a dead link or anchor fails
# make reliability run the fault suite and write docs/reliability.md
# make sanitize    memcheck, racecheck and initcheck of every kernel, with the CUDA toolkit's compute-sanitizer
#                  (a part of it: SANITIZE="--tool initcheck pooling")
# make reliability-gpu  its part that needs a GPU, with the python that has torch and CuPy for it (PYTHON=…)
# make test-gpu    the tests that need a GPU, with the python that has torch and CuPy for it (PYTHON=…)

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# With an NVIDIA driver: torch's CUDA build and CuPy of the driver's CUDA major. Without: one pinned torch for the CPU.
CUDA_MAJOR := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: \([0-9]*\)\..*/\1/p')
ifeq ($(CUDA_MAJOR),)
TORCH := torch==2.13.0
VISION := torchvision==0.28.0 timm
EXTRA :=
else
TORCH := torch
VISION := torchvision timm
EXTRA := cuda$(if $(filter 12,$(CUDA_MAJOR)),12,13)
endif

PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
DEMO_RUNS := advisor-runs
# On two cores, also beside other processes, a training in which one change gains more than they hide: Adam, tensor by tensor, over
# wide linear layers takes two thirds of the step.
ifeq ($(CUDA_MAJOR),)
DEMO := docs/examples/alexnet.py --width 16 --hidden 2048 --batch-size 32 --train-size 12800 --test-size 500
DEMO_TIME := 150s
# Threads that wait for each other give their core away: beside other processes a step of two threads takes four times as long without.
DEMO_ENV := OMP_WAIT_POLICY=PASSIVE
else
DEMO := docs/examples/cifar.py --epochs 200
DEMO_TIME := 3m
endif

.PHONY: demo test test-long test-load test-pythons lint docs reliability reliability-gpu sanitize test-gpu clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "installing into $(VENV)"
	$(PIP_INSTALL) "$(TORCH)"
	$(PIP_INSTALL) --editable ".$(if $(EXTRA),[$(EXTRA)])"
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP_INSTALL) --editable ".[test]" $(VISION)
	@touch $@

demo: $(VENV)/.installed
	$(DEMO_ENV) $(BIN)/advisor profile $(DEMO)
	@echo $(DEMO_ENV) $(BIN)/advisor apply --auto --max-time $(DEMO_TIME) $(DEMO)
	@code=0; $(DEMO_ENV) $(BIN)/advisor apply --auto --max-time $(DEMO_TIME) $(DEMO) || code=$$?; $(BIN)/python .ci/gained.py $$code $(DEMO_RUNS)

test: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --ignore-glob "*_gpu.py" -m "not gpu and not long" --durations 10

test-long: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "long" --durations 10

test-load: $(VENV)/.installed-test
	$(BIN)/python tests/under_load.py $(LOAD)

test-pythons:
	.ci/pythons

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/advisor rules lint
	$(BIN)/advisor rules test

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP_INSTALL) --editable ".[docs]"
	@touch $@

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html (its search needs a server: python3 -m http.server -d build/site)"

reliability: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python tests/faults/page.py --run cpu

reliability-gpu:
	$(PYTHON) tests/faults/page.py --run gpu

test-gpu:
	$(PYTHON) -m pytest -m gpu -p no:cacheprovider tests

sanitize:
	$(PYTHON) tests/kernels/sanitize.py $(SANITIZE)

clean:
	rm -rf $(VENV) build dist *.egg-info advisor-runs
