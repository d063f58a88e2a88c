# `make demo` and `make test` do everything on a fresh machine, set-up included. `make help` lists the rest.
PYTHON ?=
python := .venv/bin/python
PYTEST := $(python) -m pytest
QUICK := not slow and not gpu and not fuzz and not models and not ecosystem

# torch hands names of temporary files to the C++ compiler without quotes.
ifneq ($(word 2,$(TMPDIR)),)
export TMPDIR := /tmp
endif

# A GPU machine may have no network and lack what the tests here need: its own Python, and no set-up.
gpu_python = PYTHONPATH=. "$(or $(PYTHON),$(wildcard $(python)),python3)"
RESULTS ?= build/gpu

.PHONY: help demo test test-thorough test-versions slow fuzz test-models test-ecosystem test-gpu gpu gpu-cache gpu-results results docs site package lint types hooks bench recall recall-published evidence regret clean
.DEFAULT_GOAL := help

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 15
	@echo "PYTHON=/path/to/python chooses the interpreter; a torch that it has is used. ARGS=... goes to the program."

.venv/ready-%: pyproject.toml tools/setup.sh
	@PYTHON="$(PYTHON)" tools/setup.sh $*

demo: .venv/ready-demo ## train a hand-written GPT four ways, side by side: loss, time, memory, samples
	$(python) examples/nanogpt/train.py $(ARGS)

# A process for each core, one thread in each: ARGS="-n 0" runs all tests in one. A test that hangs ends its process
# and fails, by its name; the others go on.
in_parallel = -n auto --maxprocesses 8 --dist worksteal --timeout 600 --timeout-method thread
test: .venv/ready-dev ## the everyday tests, 8 to 11 minutes on 2 cores
	OMP_NUM_THREADS=1 $(PYTEST) -m "not thorough and $(QUICK)" $(in_parallel) $(ARGS)

test-thorough: .venv/ready-dev ## what CI runs beside them: every kernel on the grid, every spelling's numbers, the fuzzer's first programs
	OMP_NUM_THREADS=1 $(PYTEST) -m "thorough and $(QUICK)" $(in_parallel) $(ARGS)

test-versions: .venv/ready-dev ## the everyday tests under other versions of torch; ARGS="--python /path/to/python" takes the torch of that one
	$(python) benchmarks/versions.py $(ARGS)

slow: .venv/ready-dev ## the slow tests
	$(PYTEST) -m "slow and not gpu and not fuzz and not models and not ecosystem" $(ARGS)

fuzz: .venv/ready-dev ## random attention programs for FUZZ_SECONDS=900; it prints the FUZZ_SEED that repeats the run
	$(PYTEST) -m "fuzz and not models and not ecosystem" $(ARGS)

test-models: .venv/ready-dev .venv/ready-models ## the tests with the models of transformers, which it installs into .venv
	$(PYTEST) -m models $(ARGS)

test-ecosystem: .venv/ready-dev .venv/ready-ecosystem ## Trainer, accelerate, Lightning, diffusers, generate, ONNX and more, with attn_fuse; the results are stored
	OMP_NUM_THREADS=1 .venv/ecosystem/bin/python benchmarks/ecosystem.py $(ARGS)

gpu: ## measure on CUDA in six calls of 9 minutes together, CALL=correct, compile, sweep, speed, evidence or models one; into RESULTS=build/gpu; ARGS=--plan: the seconds of each section
	$(gpu_python) benchmarks/gpu.py $(or $(CALL),all) --results $(RESULTS) $(ARGS)

gpu-cache: ## compile what `make gpu` will need, without a GPU; PYTHON=... of the GPU machine's version, with its torch and Triton
	$(gpu_python) benchmarks/gpu_cache.py $(ARGS)

gpu-results: ## what `make gpu` brought back in RESULTS=build/gpu, into the evidence that ships and benchmarks/README.md
	$(gpu_python) benchmarks/gpu_results.py $(RESULTS) $(ARGS)

test-gpu: ## the GPU tests, the whole grid among them, which takes hours; ARGS=-k test_kernel: some
	@$(gpu_python) -c "import torch; raise SystemExit(not torch.cuda.is_available() and 'make test-gpu: torch sees no CUDA device')"
	$(gpu_python) -m pytest tests/gpu $(ARGS)

results: .venv/ready-dev ## the tables of the documents anew, from benchmarks/results; it names the results that are older than the code
	$(python) benchmarks/results_page.py

docs: .venv/ready-dev ## docs/api.md anew, from the docstrings, and docs/masks.md, from its programs
	PYTHONPATH=. $(python) tools/api.py
	PYTHONPATH=. $(python) tools/gallery.py

site: .venv/ready-docs ## the documents as a site in build/site; a broken link or a page that the menu lacks fails
	NO_MKDOCS_2_WARNING=1 $(python) -m mkdocs build --strict
	@echo "site: $(python) -m http.server --directory build/site"

package: .venv/ready-package ## build the wheel and the sdist into dist/, check them, try each in an empty environment
	tools/package.sh

lint: .venv/ready-dev ## ruff
	$(python) -m ruff check .
	$(python) -m ruff format --check .

types: .venv/ready-dev ## mypy
	$(python) -m mypy

hooks: .venv/ready-dev ## let git run lint and types before each commit, and check its message
	$(python) -m pre_commit install

bench: .venv/ready-dev ## the benchmarks on the CPU that have no line here; results go to benchmarks/results
	$(python) benchmarks/blocks.py
	$(python) benchmarks/compile_time.py
	$(python) benchmarks/features.py
	$(python) benchmarks/busy.py
	$(python) benchmarks/guard.py
	$(python) benchmarks/left_out.py
	$(python) benchmarks/common_part.py
	$(python) benchmarks/bench_outputs.py
	$(python) benchmarks/crossings.py

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
