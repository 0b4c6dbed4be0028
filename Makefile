# make env, make quickstart and make test need Python 3.12 and make only.
PYTHON := .venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help env quickstart recipes study bench test faults check

help:
	@echo "make env         build .venv from requirements.lock"
	@echo "make quickstart  train the same small hybrid in FP8 and in NVFP4 on this machine and compare the two"
	@echo "make recipes     train it in every recipe and write the table of gaps and step times (about an hour on two cores)"
	@echo "make study       train the next runs of the study at nano size on this machine's GPUs, for MINUTES=9, and write its page"
	@echo "make bench       quantizers, linears, a block of each letter at 12B size and whole training steps with their"
	@echo "                 three largest costs on this GPU, as tables of ratios"
	@echo "make test        formatting, types and all CPU tests"
	@echo "make faults      50 runs, killed and stopped at random moments, end bit for bit as one that was not (about 15 minutes)"
	@echo "make check       formatting and types alone"

env: .venv/.ready

.venv/.ready: requirements.lock pyproject.toml launch/env.sh
	@bash launch/env.sh

quickstart: env
	@$(PYTHON) -m launch.quickstart

recipes: env
	@$(PYTHON) -m tests.benchmarks.recipes

study: env
	@$(PYTHON) -m tests.benchmarks.study run $(if $(MINUTES),--minutes $(MINUTES))

bench: env
	@$(PYTHON) -m tests.benchmarks.gpu_linear
	@$(PYTHON) -m tests.benchmarks.gpu_blocks
	@$(PYTHON) -m tests.benchmarks.gpu_step

faults: env
	@$(PYTHON) -W ignore -m tests.faults.run --runs 50 --real 4

check: env
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

# One thread a worker: two workers on two cores, without fighting over them.
test: check
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(PYTHON) -m pytest -q -n 2 --dist loadfile
