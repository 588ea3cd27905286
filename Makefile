.PHONY: help check test fix quickstart

help: ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

check: ## ruff, types and tests: exactly what CI runs
	./scripts/test

test: ## only the tests
	./scripts/test --fast

fix: ## let ruff format and repair what it can (after one of the above made .venv)
	.venv/bin/python -m ruff format . && .venv/bin/python -m ruff check --fix .

quickstart: ## the main job on the embedded target
	./scripts/quickstart
