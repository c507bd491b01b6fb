# Each target makes the virtual environment that it needs; pyproject.toml decides when to renew it.

BIN := .venv/bin
export MAKECMDGOALS

.PHONY: help demo real test test-fast test-e2e test-quiet test-slow soak fuzz gpu-kernels gpu-e2e coverage tables screenshots lint format clean

help: ## Shows the targets.
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 12

demo: .venv/engine ## Completes code with and without the tree, and draws a tree.
	@$(BIN)/dyntree demo $(ARGS) && echo 'The same question to two published models: make real'

real: .venv/engine ## Compares answers of published models with and without trees; downloads the models.
	@$(BIN)/python -m benchmarks.real $(ARGS)

# The test files with one of these marks, unless ARGS may name some: others take long to collect.
marked = $(if $(ARGS),,$(shell grep -rlE "mark\.($(1))\b" tests --include="test_*.py"))

FAST := not e2e and not gpu and not monitoring and not slow

test: .venv/installed ## Checks style and types and runs the tests, but for those marked slow.
	@failed=; said=$$(mktemp); $(MAKE) --no-print-directory lint >$$said 2>&1 & lint=$$!; \
	trap 'kill $$lint; rm -f $$said; exit 130' INT TERM; \
	$(MAKE) --no-print-directory test-fast || failed=" test-fast"; \
	wait $$lint || failed="$$failed lint"; cat $$said; rm $$said; \
	for group in test-e2e test-quiet; do \
		$(MAKE) --no-print-directory $$group || failed="$$failed $$group"; \
	done; \
	if [ -n "$$failed" ]; then echo "failed:$$failed" >&2; exit 1; fi

test-fast: .venv/installed ## Runs the tests that start no engine.
	$(BIN)/pytest -m "$(FAST)" -n auto --maxprocesses 4 $(ARGS)

test-e2e: .venv/installed ## Runs the tests that start engines, but for those marked slow.
	$(BIN)/pytest $(call marked,e2e|gpu|monitoring) -n 2 --dist loadfile \
		-m "(e2e or gpu or monitoring) and not quiet and not slow" $(ARGS)

test-quiet: .venv/installed ## Runs the tests that measure time, which need the machine for themselves.
	$(BIN)/pytest $(call marked,quiet) -m quiet $(ARGS)

test-slow: .venv/installed ## Runs the tests marked slow.
	$(BIN)/pytest -m slow -n 2 --dist loadfile $(ARGS)

coverage: .venv/installed ## Says which lines the tests that start no engine run.
	$(BIN)/pytest -m "$(FAST)" -n auto --maxprocesses 4 --cov --cov-report=term:skip-covered $(ARGS)

soak: .venv/installed ## Has many clients at one server and repeats their answers; MINUTES=10, CLIENTS=64.
	PYTHONPATH=.:tests $(BIN)/python tests/e2e/soak.py $(if $(MINUTES),--minutes $(MINUTES)) \
		$(if $(CLIENTS),--clients $(CLIENTS)) $(ARGS)

fuzz: .venv/installed ## Compares random requests on random engines with none; CASES=10000, ARGS=--help.
	PYTHONPATH=.:tests $(BIN)/python tests/e2e/fuzz.py $(if $(CASES),--cases $(CASES)) $(ARGS)

gpu-kernels: ## Checks and measures the kernels on this machine's GPU; OUT=... says where results go.
	@scripts/gpu_kernels.sh

gpu-e2e: ## Checks or measures the engine on a GPU: PART=first on a new machine, then others; OUT=...
	@scripts/gpu_e2e.sh

tables: .venv/installed ## Writes the generated tables into the pages.
	PYTHONPATH=. $(BIN)/python scripts/write_tables.py

screenshots: .venv/installed ## Makes the README's pictures.
	$(BIN)/python scripts/show_screenshot.py
	PYTHONPATH=.:tests $(BIN)/python tests/monitoring/screenshots.py docs/images

lint: .venv/installed ## Checks style, types and the direction of imports.
	$(BIN)/shellcheck scripts/*.sh .ci/run
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/mypy

format: .venv/installed ## Formats the code.
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## Removes the virtual environment and every cache.
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info

.venv/engine: pyproject.toml scripts/install.sh
	@scripts/install.sh
	@touch $@

.venv/installed: .venv/engine
	@scripts/install.sh tools
	@touch $@
