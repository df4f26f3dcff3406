# Two commands do everything: `make demo` and `make test`. Both set up what they need.
PYTHON ?= python3
# cuda installs for GPUs
DEVICE ?= cpu
BIN := .venv/bin
# whole files, so that each fixture of a module is made once
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile
STAMP := .venv/.installed$(filter-out -cpu,-$(DEVICE))

.PHONY: setup demo test test-sglang test-live test-all check bench docs clean

setup: $(STAMP)

# reinstalls when a pin or the metadata changes
$(STAMP): pyproject.toml requirements/$(DEVICE).lock requirements/reasoning-gym.lock requirements/setup.sh
	@PYTHON=$(PYTHON) DEVICE=$(DEVICE) bash requirements/setup.sh
	@touch $@

demo: setup
	@$(BIN)/tlt demo

# all but SGLang and what is marked live; one smoke test starts a session
test: setup
	@$(PYTEST) -m "not live and not sglang"

# SGLang takes over the process that imports it, so its tests are an invocation of their own
test-sglang: setup
	@$(PYTEST) -m "sglang and not live"

# sessions have both cores to themselves
test-live: setup
	@$(BIN)/python -m pytest -m live

# runs all three, whichever fails
test-all: setup
	@$(MAKE) --no-print-directory --keep-going test test-sglang test-live

check: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright --project pyproject.toml
	@$(BIN)/lint-imports
	@$(BIN)/hadolint Dockerfile
	@$(BIN)/python -m tests.sglang_contract
	@$(BIN)/python docs/check_prose.py
	@$(BIN)/python docs/check_structure.py
	@$(BIN)/python docs/generate.py --check

bench: setup
	@for name in $$($(BIN)/python -m benchmarks.catalogue); do \
		$(BIN)/python -m benchmarks.$$name --out benchmarks/results/$$name.json || exit 1; \
	done
	@$(BIN)/python docs/generate.py benchmarks

docs: setup
	@$(BIN)/python docs/generate.py

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis .import_linter_cache build *.egg-info
