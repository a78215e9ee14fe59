# One command each; every target makes what it needs first (tools/setup.sh says what that is).
SEEDS ?= 20
PY := .venv/bin/python
PYTEST := .venv/bin/pytest
CUDA := import sys, torch; sys.exit(not torch.cuda.is_available())

.DEFAULT_GOAL := setup
.PHONY: setup redis model vllm demo test check sim bench gpu

setup: .venv/stamp redis ## a virtual environment with everything, and redis-server
.venv/stamp: pyproject.toml tools/setup.sh ; @tools/setup.sh venv && touch $@
redis: ; @tools/setup.sh redis
model: .venv/stamp ; @tools/setup.sh model
vllm: ; @tools/setup.sh vllm

demo: setup model $(filter vllm,$(ENGINE)) ## on a small real model; JSON=1: only JSON; ENGINE=vllm; PROFILE=kvtc@8x
	@.venv/bin/tierkv demo $(if $(filter 1,$(JSON)),--json) $(if $(PROFILE),--profile $(PROFILE)) $(if $(ENGINE), \
	  --engine $(ENGINE) --engine-python "$$(tools/setup.sh vllm-python)")

test: setup model ## every test that can run here, those of vLLM last: it is installed meanwhile; what is skipped says why
	@tools/setup.sh vllm & $(PYTEST) -ra

check: .venv/stamp ## format, lint, types, and the tidy rules
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	$(PYTEST) -q tests/unit/test_tidy.py

sim: .venv/stamp ## simulate SEEDS seeds, or replay one: make sim SEED=7
	$(PY) -m tierkv.simulation $(if $(SEED),--seed $(SEED),--seeds $(SEEDS))

bench: setup ## the short benchmarks
	$(PY) -m bench.tiers --quick
	$(PY) -m bench.catalog

gpu: .venv/stamp ## the tests that need a CUDA device
	@if $(PY) -c '$(CUDA)'; then $(PY) -m pip install -qq --editable '.[cuda]' && $(PYTEST) -ra tests/gpu; else echo 'no GPU here: torch sees no CUDA device, so tests/gpu was not run'; fi
