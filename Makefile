# What a person does with Draftsmith in a fresh clone. Every target sets up what it needs first; a second set-up costs
# nothing. `make PYTHON=python3.12 demo` chooses the interpreter.
PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup setup-test demo smoke test faults families cluster identity chaos soak bench-stream scale gpu docs lint format clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## .venv with everything a run needs (CPU or CUDA builds, by looking at the machine)
	@PYTHON="$(PYTHON)" bash launch/setup.sh run

setup-test: setup  ## the same, with what the tests need
	@PYTHON="$(PYTHON)" bash launch/setup.sh test

demo: setup  ## the main job on a real small model, into outputs/demo
	@$(BIN)/draftsmith run demo

smoke: setup-test  ## the whole pipeline on a tiny target, once for every drafter: a minute each
	@$(BIN)/python -m pytest -m smoke -v -rA tests/launch/test_smoke.py

test: setup-test  ## all tests, three files at a time: many of them wait for processes
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

faults: setup-test  ## processes killed, frozen, cut off, out of disk: nothing is lost, the weights are the same
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m faults tests

families: setup-test  ## every family of transformers, tiny: exact, or refused in words (4 minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m families tests/families

cluster: setup-test  ## several machines on this one: two nodes in network namespaces, and a real Slurm (as root, else skipped)
	@$(BIN)/python -m pytest -m cluster -v -rA tests/launch/nodes tests/launch/slurm

chaos: setup-test  ## a run under 40 random kills, hangs and corruptions against an undisturbed one (SEED=1 FAULTS=40)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos $(if $(SEED),--seed $(SEED)) --faults $(or $(FAULTS),40)

identity: setup-test  ## one recipe run in many ways (producers, sources, kills) gives the same weights
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.benchmarks.identity

soak: setup-test  ## many small packs through a real stream: does anything grow, is anything left? (PACKS=20000, 13 minutes)
	@$(BIN)/python -m tests.benchmarks.soak --packs $(or $(PACKS),20000)

bench-stream: setup-test  ## the stream's bytes and CPU seconds beside memcpy, TCP and the store alone
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.benchmarks.stream

scale: setup-test  ## every parallel mode on 1, 2 and 4 ranks: the same run? what does a rank hold? (5 minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.benchmarks.scale

gpu: setup-test  ## on a machine with a GPU: the 8B recipes' drafters (tokens/s, MFU, memory), then the demo (under 10 minutes)
	@$(BIN)/python -m tests.benchmarks.gpu

docs: setup-test  ## the documentation as a site, in build/docs; a link that leads nowhere stops it
	@$(BIN)/python -m sphinx -W --keep-going -q docs build/docs && echo build/docs/index.html

lint: setup-test  ## ruff: rules and formatting
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

format: setup-test  ## let ruff put the formatting right
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

clean:  ## remove .venv and what tools leave behind (outputs/ stays)
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
