# Everything a developer or CI does. `make help` lists it.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export BENTOML_DO_NOT_TRACK := True
# Third-party code on the tests' path looks a hub up unless told not to; nothing here needs one.
TEST_ENV := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

.PHONY: help install serve test check format bench docs build clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

install: $(STAMP)  ## Make .venv and install the package with everything for development

# torch first and alone: its pinned build decides which of its own dependencies are needed.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,dev]'
	@touch $(STAMP)

serve: install  ## Serve the default model on port 3000 (options: make serve ARGS="--model-id ...")
	$(BIN)/infinity-bento serve $(ARGS)

test: install  ## Run the tests (options: make test ARGS="tests/api -k embed")
	$(TEST_ENV) $(BIN)/python -m pytest -q $(ARGS)

check: install  ## Lint, format check, strict types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install  ## Rewrite the code in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install  ## Engine against sentence-transformers, in process
	$(TEST_ENV) $(BIN)/python -m benchmarks.inprocess $(ARGS)

docs: install  ## Regenerate the pages that are made from code (measures parity: about a minute)
	$(TEST_ENV) $(BIN)/python -m tests.parity.report
	$(BIN)/infinity-bento options --markdown > docs/configuration.md
	$(BIN)/infinity-bento models --markdown > docs/models.md

build: install  ## Build the CPU Bento
	$(BIN)/bentoml build

clean:  ## Remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build dist
