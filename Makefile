# make train   the main job, end to end, on a bare machine
# make test    the test suite
# make long    tests that take long, by chance drawn ones among them
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: train test long docs clean

train: $(VENV)/.ready
	$(BIN)/python -m xfresearch.train --config configs/quickstart.py --workdir runs/quickstart

test: $(VENV)/.ready-test
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -n auto --dist loadfile

long: $(VENV)/.ready-test
	$(BIN)/python -m pytest -n auto -m long

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready: requirements.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -r requirements.txt
	touch $@

$(VENV)/.ready-test: requirements.txt requirements-test.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -r requirements-test.txt
	touch $@ $(VENV)/.ready

clean:
	rm -rf $(VENV) runs

docs: $(VENV)/.ready
	$(BIN)/python -m docs.write
