# `make demo` and `make test` do everything on a fresh machine, set-up included. `make help` lists the rest.
PYTHON ?=
python := .venv/bin/python
PYTEST := $(python) -m pytest
BESIDE := tests/triton tests/cpu/test_fuzz.py tests/cpu/test_grid.py tests/cpu/test_attacks_memory.py \
	tests/cpu/test_attacks_sites.py tests/cpu/test_common_part.py
QUICK := -m "not slow and not gpu and not fuzz and not models"

.PHONY: help demo test slow fuzz test-models test-gpu gpu lint types bench recall recall-published evidence regret clean
.DEFAULT_GOAL := help

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 13
	@echo "PYTHON=/path/to/python chooses the interpreter; a torch that it has is used. ARGS=... goes to the program."

.venv/ready-%: pyproject.toml tools/setup.sh
	@PYTHON="$(PYTHON)" tools/setup.sh $*

demo: .venv/ready-demo ## train a hand-written GPT four ways, side by side: loss, time, memory, samples
	$(python) examples/nanogpt/train.py $(ARGS)

# Triton's tests and some long ones run beside the others. 5: none was selected.
test: .venv/ready-dev ## all tests but the slow, GPU, fuzz and transformers ones
	@export OMP_NUM_THREADS=1; \
	$(PYTEST) $(QUICK) $(BESIDE) $(ARGS) >.venv/beside.log 2>&1 & beside=$$!; \
	$(PYTEST) $(QUICK) $(BESIDE:%=--ignore=%) $(ARGS); rest=$$?; \
	wait $$beside; beside=$$?; cat .venv/beside.log; \
	for rc in $$rest $$beside; do [ $$rc -eq 0 ] || [ $$rc -eq 5 ] || exit $$rc; done; [ $$rest$$beside -ne 55 ]

slow: .venv/ready-dev ## the slow tests
	$(PYTEST) -m "slow and not gpu and not fuzz and not models" $(ARGS)

fuzz: .venv/ready-dev ## random attention programs for FUZZ_SECONDS=900; it prints the FUZZ_SEED that repeats the run
	$(PYTEST) -m "fuzz and not models" $(ARGS)

test-models: .venv/ready-dev .venv/ready-models ## the tests with the models of transformers, which it installs into .venv
	$(PYTEST) -m models $(ARGS)

gpu: .venv/ready-dev ## measure everything on CUDA in 8 minutes; results go to benchmarks/results
	$(python) benchmarks/gpu.py $(ARGS)

test-gpu: .venv/ready-dev ## the GPU tests
	@$(python) -c "import torch; raise SystemExit(not torch.cuda.is_available() and 'make test-gpu: torch sees no CUDA device')"
	$(PYTEST) -m gpu $(ARGS)

lint: .venv/ready-dev ## ruff
	$(python) -m ruff check .
	$(python) -m ruff format --check .

types: .venv/ready-dev ## mypy
	$(python) -m mypy

bench: .venv/ready-dev ## the benchmarks on the CPU that have no line here; results go to benchmarks/results
	$(python) benchmarks/nanogpt.py
	$(python) benchmarks/compile_time.py
	$(python) benchmarks/features.py
	$(python) benchmarks/guard.py
	$(python) benchmarks/left_out.py
	$(python) benchmarks/common_part.py

recall: .venv/ready-dev ## how many spellings of attention are fused, beside Inductor's own
	$(python) benchmarks/recall.py $(ARGS)

recall-published: .venv/ready-dev .venv/ready-published ## how much attention of published models is fused, and whether it computes the same
	.venv/published/bin/python benchmarks/published.py $(ARGS)

evidence: .venv/ready-dev ## measure anew the evidence that ships for the kernel picker, on a quiet machine
	$(python) benchmarks/crossover.py $(ARGS)

regret: .venv/ready-dev ## what the picker's choices take over the best there is, on 60 attentions; ARGS=--quick: 6
	$(python) benchmarks/regret.py $(ARGS)

clean: ## remove .venv and everything built
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
