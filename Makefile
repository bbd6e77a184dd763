# From a checkpoint to verified engines. `make` lists the targets.

PRESET     ?= base
CHECKPOINT ?= checkpoints/$(PRESET)
PRECISION  ?= fp32,fp16
TARGET     ?= rtx
SM         ?= all
ARTIFACTS  ?= artifacts/$(notdir $(patsubst %/,%,$(CHECKPOINT)))
RUNTIME    ?= ort
STEPS      ?= 64
SEED       ?= 0
PYTHON     ?= python3
MUTANTS    ?=

comma := ,
FIRST_PRECISION := $(firstword $(subst $(comma), ,$(PRECISION)))

DEMO := examples/grammar/checkpoint

VENV := .venv
BIN  := $(VENV)/bin
LDLM := $(BIN)/ldlm

.DEFAULT_GOAL := help
.PHONY: help install demo engines sample parity bench test test-base test-long test-gpu mutants lint check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  CHECKPOINT=$(CHECKPOINT) PRESET=$(PRESET) PRECISION=$(PRECISION) TARGET=$(TARGET) SM=$(SM)"
	@echo "  ARTIFACTS=$(ARTIFACTS) RUNTIME=$(RUNTIME) STEPS=$(STEPS) SEED=$(SEED) PYTHON=$(PYTHON)"

install: $(VENV)/.installed ## set up .venv with everything

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: Python 3.11 or newer is needed; give one with PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --editable '.[build,rtx]' --group dev
	@touch $@

demo: $(VENV)/.installed ## a small trained model: export, proof, engines, and sentences from it
	$(LDLM) engines $(DEMO) --out artifacts/grammar --precision fp32 --sm '$(SM)'
	$(LDLM) sample artifacts/grammar --solver ddpm -n 10 --batch-size 10 --seed $(SEED)

# Seeded weights, only for the default place: a CHECKPOINT of one's own is never made up.
checkpoints/$(PRESET)/config.json: | $(VENV)/.installed
	$(LDLM) init checkpoints/$(PRESET) --preset $(PRESET)

ifeq ($(CHECKPOINT),checkpoints/$(PRESET))
SEEDED := checkpoints/$(PRESET)/config.json
endif

engines: $(VENV)/.installed $(SEEDED) ## export, verify and build what has changed of CHECKPOINT
	@$(LDLM) engines $(CHECKPOINT) --out $(ARTIFACTS) --precision $(PRECISION) \
	  --target $(TARGET) --sm '$(SM)'

$(ARTIFACTS)/manifest.json:
	$(MAKE) engines

sample: $(VENV)/.installed $(ARTIFACTS)/manifest.json ## text from RUNTIME, in the first PRECISION
	$(LDLM) sample $(ARTIFACTS) --runtime $(RUNTIME) --precision $(FIRST_PRECISION) \
	  --steps $(STEPS) --seed $(SEED) --checkpoint $(CHECKPOINT)

parity: $(VENV)/.installed $(ARTIFACTS)/manifest.json ## the whole proof: stressed weights, sampler, damaged graphs
	$(LDLM) verify $(ARTIFACTS) --checkpoint $(CHECKPOINT) --stress --self-test --sampler-steps 64

bench: $(VENV)/.installed $(ARTIFACTS)/manifest.json ## speed, beside PyTorch: tens of minutes at the full size
	$(LDLM) bench $(ARTIFACTS) --checkpoint $(CHECKPOINT) --batch 1,8

test: $(VENV)/.installed ## every quick test, in minutes
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not base and not long and not gpu'

test-base: $(VENV)/.installed ## the whole job at the published size
	$(BIN)/python -m pytest -m base -s

test-long: $(VENV)/.installed ## what takes long and seldom fails
	$(BIN)/python -m pytest -n 2 --dist worksteal -m long

test-gpu: $(VENV)/.installed ## what needs an NVIDIA GPU, with a table of what was measured
	$(BIN)/python -m pytest -m gpu -s

mutants: $(VENV)/.installed ## seeded faults, one at a time, MUTANTS=part of a name or file
	$(BIN)/python tests/mutants/run.py --only '$(MUTANTS)'

lint: $(VENV)/.installed ## style, types and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy examples/grammar
	$(BIN)/lint-imports --no-logo

check: lint test test-base ## lint, and what CI runs of the tests

clean: ## remove the environment and caches; checkpoints and artifacts stay
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info build dist
	find ldlm export engines tests -name __pycache__ -prune -exec rm -rf {} +
