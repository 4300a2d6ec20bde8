# Two commands on a fresh machine: `make compare` and `make test`. Needs Python 3.10 or newer with
# venv, g++ and make; `make needs` checks for them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BACKENDS ?= torch jittor
REPORT ?= xmem-report
READY := $(VENV)/.xmem-ready
export OMP_NUM_THREADS ?= 2

.PHONY: compare test test-jittor test-torch check soak gpu-check benchmarks record needs clean

needs:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "xmem needs Python 3.10 or newer; '$(PYTHON)' is: $$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "'$(PYTHON)' has no venv module. Debian, Ubuntu: apt-get install python3-venv"; exit 1; }
	@$(PYTHON) -c 'import pathlib, sys, sysconfig; sys.exit(not (pathlib.Path(sysconfig.get_path("include")) / "Python.h").exists())' || \
	  { echo "Jittor compiles against Python's headers, and Python.h is not there. Debian, Ubuntu: apt-get install python3-dev"; exit 1; }
	@command -v $${CXX:-g++} >/dev/null || \
	  { echo "xmem needs a C++ compiler: Jittor compiles its kernels, xmem its meters. Debian, Ubuntu: apt-get install g++"; exit 1; }

$(READY): pyproject.toml constraints.txt | needs
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing xmem with PyTorch and Jittor into $(VENV) (about 1.5 GB, a minute or two)..."
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[all,test,dev]'
	@touch $(READY)

# The main job: five models on both frameworks, plain, checkpointed and in half precision.
compare: $(READY)
	@$(BIN)/xmem compare $(foreach b,$(BACKENDS),--backend $(b)) -o $(REPORT)

# Each framework in a process of its own, so that a crash names its part; these two side by side.
# Jittor 1.3.11 compiles on threads that read the stack of a call which may have returned; on one
# thread it does not.
test: export use_parallel_op_compiler ?= 1
test: export OMP_WAIT_POLICY ?= passive
test: $(READY)
	@$(MAKE) --no-print-directory --output-sync=target -j2 test-jittor test-torch
	@$(BIN)/python -m pytest tests -m 'not soak' --ignore=tests/on_jittor --ignore=tests/on_torch
	@$(BIN)/python tools/outlive.py $(BIN)/xmem conformance $(foreach b,$(BACKENDS),--backend $(b)) -- --no-gaps --retries 1 -q

test-jittor: $(READY)
	@$(BIN)/python tools/outlive.py $(BIN)/python -m pytest tests/on_jittor -m 'not soak'

test-torch: $(READY)
	@$(BIN)/python -m pytest tests/on_torch -m 'not soak'

check: $(READY)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python tools/readme_table.py --check
	@$(BIN)/python tools/check_wheel.py

# Long campaigns: fuzzing, faults, repeats.
soak: $(READY)
	@XMEM_EXPLORE=1 $(BIN)/python -m pytest tests -m soak
	@XMEM_EXPLORE=1 $(BIN)/python -m pytest tests/test_codec.py tests/test_planner_*.py -m 'not soak'

benchmarks: $(READY)
	@$(BIN)/python benchmarks/chain.py benchmarks/results
	@$(BIN)/python benchmarks/checkpoint_overhead.py benchmarks/results
	@$(BIN)/python benchmarks/meter_overhead.py benchmarks/results
	@$(BIN)/python benchmarks/planner.py benchmarks/results
	@$(BIN)/python benchmarks/plans.py benchmarks/results $(BACKENDS)
	@$(BIN)/python benchmarks/codec.py benchmarks/results
	@$(BIN)/python benchmarks/compress.py benchmarks/results $(BACKENDS)
	@$(BIN)/python benchmarks/offload.py benchmarks/results $(BACKENDS)
	@$(BIN)/python benchmarks/plans_offload.py benchmarks/results $(BACKENDS)
	@$(BIN)/python benchmarks/optimizers.py benchmarks/results $(BACKENDS)
	@$(BIN)/python benchmarks/weights.py benchmarks/results
	@$(BIN)/python benchmarks/pool.py benchmarks/results
	@$(BIN)/python benchmarks/all_reduce.py benchmarks/results
	@$(BIN)/python benchmarks/distributed.py benchmarks/results $(BACKENDS)
	@$(BIN)/python benchmarks/scale.py benchmarks/results $(BACKENDS)

# The main job once more, kept under benchmarks/results/ and in the README's tables; and long
# trainings with their loss curves.
record: $(READY)
	@$(BIN)/xmem compare $(foreach b,$(BACKENDS),--backend $(b)) -o $(REPORT)
	@cp $(REPORT)/report.json benchmarks/results/cpu-quick.json
	@cp $(REPORT)/report.md benchmarks/results/cpu-quick.md
	@$(BIN)/python tools/readme_table.py
	@$(BIN)/xmem compare $(foreach b,$(BACKENDS),--backend $(b)) --steps 300 --workload gpt2-text \
	  --workload resnet18-patterns --technique baseline --technique autocast -o $(REPORT)-training
	@cp $(REPORT)-training/report.json benchmarks/results/cpu-training.json
	@cp $(REPORT)-training/report.md benchmarks/results/cpu-training.md
	@$(BIN)/xmem compare $(foreach b,$(BACKENDS),--backend $(b)) --steps 300 --workload gpt2-text \
	  --workload resnet18-patterns --workload unet3d --technique baseline --technique compress \
	  -o $(REPORT)-compressed
	@cp $(REPORT)-compressed/report.json benchmarks/results/compress_training.json
	@cp $(REPORT)-compressed/report.md benchmarks/results/compress_training.md

# On a machine with an NVIDIA GPU and the frameworks installed; elsewhere it says so and ends well.
gpu-check:
	@PATH="$(CURDIR)/$(BIN):$$PATH" PYTHONPATH="$(CURDIR):$(CURDIR)/backends:$$PYTHONPATH" $(PYTHON) tools/gpu_check.py

clean:
	rm -rf $(VENV) dist build $(REPORT) $(REPORT)-training $(REPORT)-compressed
