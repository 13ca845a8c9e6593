# One command each; .ci/run calls check and test.
.DEFAULT_GOAL := help
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PROTOS = $(sort $(wildcard protos/dualmap/v1/*.proto))
PIP_COMPILE = $(BIN)/pip-compile --quiet --generate-hashes --allow-unsafe --strip-extras \
	--no-header --no-emit-index-url --no-emit-find-links --no-emit-trusted-host
PROTOC = $(BIN)/python -m grpc_tools.protoc -I protos --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
	--plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc

.PHONY: settings help demo up test test-slow check proto proto-check metrics compose-test bench chaos lock clean

help:
	@echo "make demo    see DualMap work, in one terminal"
	@echo "make up      start every service here and keep them running"
	@echo "make test    run the tests, a few minutes"
	@echo "make test-slow  run those that take whole clusters through faults"
	@echo "make check   lint, format, types, import rules, protos"
	@echo "make proto   regenerate dualmap/v1 from protos/"
	@echo "make metrics regenerate docs/metrics.md from the code"
	@echo "make compose-test  bring docker-compose.yml up, load it, break it, take it down"
	@echo "make bench   measure and compare"
	@echo "make chaos   kill and pause every part at random under load; within 12 minutes"
	@echo "make lock    pin every dependency anew"
	@echo "make clean   remove the virtual environment and all caches"

$(STAMP): pyproject.toml requirements.lock requirements-dev.lock
	@python=; for candidate in python3.11 python3.12 python3.13 python3 python; do \
		if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
		then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then echo "DualMap needs Python 3.11 or newer; none was found on PATH." >&2; exit 1; fi; \
	echo "[1/3] $(VENV) with $$($$python --version)"; \
	$$python -m venv $(VENV)
	@echo "[2/3] installing $$(grep -c '^[a-zA-Z].*==' requirements-dev.lock) pinned packages (about a minute)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --require-hashes -r requirements-dev.lock
	@echo "[3/3] installing dualmap itself, editable"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

.venv: $(STAMP)

demo: $(STAMP)
	@$(BIN)/dualmap demo

up: $(STAMP)
	@$(BIN)/dualmap up

test: $(STAMP)
	$(BIN)/pytest -m "not slow" $(PYTEST_ARGS)

test-slow: $(STAMP)
	$(BIN)/pytest -m slow $(PYTEST_ARGS)

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	@$(MAKE) --no-print-directory proto-check

proto: $(STAMP)
	@rm -f dualmap/v1/*_pb2*.py dualmap/v1/*_pb2*.pyi
	$(PROTOC) --python_out . --grpc_python_out . --mypy_out . --mypy_grpc_out . $(PROTOS)

proto-check: $(STAMP)
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && \
	$(PROTOC) --python_out $$fresh --grpc_python_out $$fresh --mypy_out $$fresh --mypy_grpc_out $$fresh $(PROTOS) 2>/dev/null && \
	if diff -r -q -x __init__.py -x __pycache__ $$fresh/dualmap/v1 dualmap/v1; \
	then echo "dualmap/v1 is what protos/ generate."; \
	else echo "dualmap/v1 differs from protos/: run 'make proto' and commit." >&2; exit 1; fi

metrics: $(STAMP)
	$(BIN)/python -m tests.deploy.metrics_page

settings: $(STAMP)
	$(BIN)/python -m tests.deploy.settings_page

# Needs a Docker engine with Compose; ends within 8 minutes.
compose-test: $(STAMP)
	@$(BIN)/python -m tests.compose

bench: $(STAMP)
	$(BIN)/dualmap bench

chaos: $(STAMP)
	@$(BIN)/dualmap chaos

lock: $(STAMP)
	$(PIP_COMPILE) --extra dev --output-file requirements-dev.lock pyproject.toml
	$(PIP_COMPILE) --constraint requirements-dev.lock --output-file requirements.lock pyproject.toml

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
