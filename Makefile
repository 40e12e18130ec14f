# make train      installs what the main job needs and trains the quickstart, from a bare machine
# make test       runs the test suite
# make types      checks the types with mypy; make test does it too
# make newest     runs a slim part of the suite on the newest JAX, in a separate environment; needs Python 3.12 or later
# make long       runs slow tests, including randomized ones
# make parity     compares our variants with PyTorch libraries, in a separate environment
# make gpu        asks one GPU about this checkout, at most 4 minutes, with the packages that $(PYTHON) has; writes gpu.json
# make mutations  puts faults into copies of the code, one at a time, and checks that a test fails; about an hour on 2 cores
# make eval       installs lm_eval, for python -m xfresearch.evaluate --tasks, and runs the tests that need it
# make wheel      builds dist/*.whl, checks its metadata, and runs its commands in an empty environment and directory
# make trackers   installs wandb and mlflow, and runs their tests
# make lock       writes requirements/lock.txt, the exact versions for every supported Python
# make libtpu     installs the TPU compiler for python -m xfresearch.plan; it runs without a TPU
# make plans      compiles the named plans for TPUs; hours on two cores, continues after an interruption
# make studies    runs what is missing of the studies of docs/questions; from nothing 34 hours on two cores, continues after an interruption
# make docs       regenerates the generated parts of docs/ from the code and docs/data/
# make notebooks  executes the notebooks of docs/notebooks and keeps their outputs
# make site       writes the generated parts of docs/, and builds a static site, site/html, with search and the reference of the Python API
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PARITY := .venv-parity
NEWEST := .venv-newest
DOCS := .venv-docs
NEWEST_PYTHON ?= $(shell .ci/newest-python)
# Kernels, a contract of every variant, training, resuming and sharding, what reads the texts and lists of Python, JAX and
# XLA, and a study from end to end, whose tiny models have other numbers on another JAX.
NEWEST_TESTS := tests/kernels tests/contracts/test_reference.py tests/contracts/test_behaviour.py \
	tests/training/test_stopping.py tests/training/test_sharding.py tests/models/test_dispatch.py \
	tests/planning/test_collectives.py tests/planning/test_plan.py tests/planning/test_work.py \
	tests/runtime/test_hardware.py tests/studies/test_study.py tests/studies/test_preregistration.py tests/test_errors.py

.PHONY: train test types newest long gpu mutations parity eval trackers wheel lock libtpu plans studies docs notebooks site clean

train: $(VENV)/.ready
	$(BIN)/python -m xfresearch.train --config configs/quickstart.py --workdir runs/quickstart

test: $(VENV)/.ready-test
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

newest: $(NEWEST)/.ready
	@$(NEWEST)/bin/python -c "import platform, jax; print('newest JAX:', jax.__version__, 'on Python', platform.python_version())"
	$(NEWEST)/bin/python -m pytest -n auto --dist loadfile $(NEWEST_TESTS)

types: $(VENV)/.ready-test
	$(BIN)/mypy

long: $(VENV)/.ready-long
	$(BIN)/python -m pytest -n auto --dist loadgroup -m long

gpu:
	$(PYTHON) -m xfresearch.bench gpu --json gpu.json

mutations: $(VENV)/.ready-test
	$(BIN)/python -m tests.mutations

parity: $(PARITY)/.ready
	$(PARITY)/bin/python -m pytest -m parity tests/parity

wheel: $(VENV)/.ready-wheel
	rm -rf dist
	$(BIN)/python -c "from xfresearch.run_config import config, known_keys as k; k.write(config.Config(), k.OF_WHEEL)"
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(BIN)/python -m pytest -m "" tests/test_wheel.py

trackers: $(VENV)/.ready-test
	$(BIN)/python -m pip install --quiet -r requirements/trackers.txt
	$(BIN)/python -m pytest tests/training/test_trackers.py tests/studies/test_tracking.py

eval: $(VENV)/.ready-eval
	$(BIN)/python -m pytest tests/harness tests/evaluation/test_decoded.py

lock: $(BIN)/python
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --no-header --output-file requirements/lock.txt \
		requirements.txt requirements/cloud.txt requirements/eval.txt

libtpu: $(VENV)/.ready-plan

plans: $(VENV)/.ready-plan
	$(BIN)/python -m pytest -m long tests/planning/test_tpu.py
	$(BIN)/python -m pytest tests/kernels/test_attention_tpu.py tests/kernels/test_grouped_matmul_tpu.py
	$(BIN)/python -m xfresearch.planning.named --json docs/data/scale.json
	$(BIN)/python -m pytest -m long tests/planning/test_named.py
	$(BIN)/python -m docs.write

studies: $(VENV)/.ready
	$(BIN)/python -m docs.studies
	$(BIN)/python -m docs.write

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# --no-compile: Python compiles the modules that it imports; pip would compile all, which takes a third of its time.
$(VENV)/.ready: requirements.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-compile -r requirements.txt
	touch $@

$(VENV)/.ready-test: requirements.txt requirements/test.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-compile -r requirements/test.txt
	touch $@ $(VENV)/.ready

$(VENV)/.ready-plan: requirements/tpu.txt $(VENV)/.ready-test
	$(BIN)/python -m pip install --quiet -r requirements/tpu.txt
	touch $@

$(VENV)/.ready-wheel: requirements/test.txt $(VENV)/.ready-test
	$(BIN)/python -m pip install --quiet "twine>=6,<7"
	touch $@

$(VENV)/.ready-long: requirements/docs.txt requirements/notebook.txt $(VENV)/.ready-test
	$(BIN)/python -m pip install --quiet --no-compile -r requirements/docs.txt -r requirements/notebook.txt
	touch $@

$(VENV)/.ready-eval: requirements/eval.txt $(VENV)/.ready-test
	$(BIN)/python -m pip install --quiet -r requirements/eval.txt
	touch $@

$(NEWEST)/.ready: requirements.txt requirements/test.txt
	@test -n "$(NEWEST_PYTHON)" || { echo "make newest needs Python 3.12 or later, which is not installed here" >&2; exit 1; }
	$(NEWEST_PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --no-compile -r requirements/test.txt || \
		{ echo "newest JAX: NOT TESTED, because it cannot be installed" >&2; exit 1; }
	touch $@

$(PARITY)/.ready: requirements.txt requirements/test.txt requirements/parity.txt
	$(PYTHON) -m venv $(PARITY)
	$(PARITY)/bin/python -m pip install --quiet -r requirements/parity.txt
	touch $@

$(DOCS)/.ready: requirements/docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet -r requirements/docs.txt
	touch $@

clean:
	rm -rf $(VENV) $(PARITY) $(NEWEST) $(DOCS) runs site dist

docs: $(VENV)/.ready
	$(BIN)/python -m docs.write

site: $(DOCS)/.ready $(VENV)/.ready
	$(BIN)/python -m docs.write
	$(DOCS)/bin/python -m docs.site
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --quiet --strict --config-file site/mkdocs.yml
	@echo "site/html/index.html (with search: $(DOCS)/bin/python -m http.server -d site/html)"

notebooks: $(VENV)/.ready-long
	$(BIN)/python -m docs.notebooks
