# make train   the main job, end to end, on a bare machine
# make test    the test suite
# make long    tests that take long, by chance drawn ones among them
# make parity  our variants against PyTorch libraries, in an environment of its own
# make mutations   faults put into copies of the code, one by one: does a test see each? about an hour
# make eval    lm_eval, for python -m xfresearch.evaluate --tasks, and the tests that need it
# make libtpu  the compiler for TPUs, which python -m xfresearch.plan needs; it runs without one
# make plans   named plans, compiled for TPUs that are not here: hours on two cores, goes on where it stopped
# make docs    the generated parts of docs/, as the code and the figures beside them have them
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PARITY := .venv-parity

.PHONY: train test long mutations parity eval libtpu plans docs clean

train: $(VENV)/.ready
	$(BIN)/python -m xfresearch.train --config configs/quickstart.py --workdir runs/quickstart

test: $(VENV)/.ready-test
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -n auto --dist loadfile

long: $(VENV)/.ready-test
	$(BIN)/python -m pytest -n auto -m long

mutations: $(VENV)/.ready-test
	$(BIN)/python -m tests.mutations

parity: $(PARITY)/.ready
	$(PARITY)/bin/python -m pytest -m parity tests/parity

eval: $(VENV)/.ready-eval
	$(BIN)/python -m pytest tests/harness

libtpu: $(VENV)/.ready-plan

plans: $(VENV)/.ready-plan
	$(BIN)/python -m pytest -m long tests/planning/test_tpu.py
	$(BIN)/python -m pytest tests/kernels/test_attention_tpu.py tests/kernels/test_grouped_matmul_tpu.py
	$(BIN)/python -m xfresearch.planning.named --json docs/data/scale.json
	$(BIN)/python -m pytest -m long tests/planning/test_named.py
	$(BIN)/python -m docs.write

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready: requirements.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -r requirements.txt
	touch $@

$(VENV)/.ready-test: requirements.txt requirements-test.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -r requirements-test.txt
	touch $@ $(VENV)/.ready

$(VENV)/.ready-plan: requirements-plan.txt $(VENV)/.ready-test
	$(BIN)/python -m pip install --quiet -r requirements-plan.txt
	touch $@

$(VENV)/.ready-eval: requirements-eval.txt $(VENV)/.ready-test
	$(BIN)/python -m pip install --quiet -r requirements-eval.txt
	touch $@

$(PARITY)/.ready: requirements.txt requirements-test.txt requirements-parity.txt
	$(PYTHON) -m venv $(PARITY)
	$(PARITY)/bin/python -m pip install --quiet -r requirements-parity.txt
	touch $@

clean:
	rm -rf $(VENV) $(PARITY) runs

docs: $(VENV)/.ready
	$(BIN)/python -m docs.write
