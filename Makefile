# Every target first does what set-up is missing.
#
#   make serve   the built-in model on two CPU replicas, with a trainer, at http://127.0.0.1:8000;
#                CONFIG=app/layouts/ipc.yaml and the like: on GPUs, with the packages for them
#   make rl      trains the model of the running fleet (in a second terminal)
#   make test    the test suite         make test-fast  the tests without engines, for the daily loop
#   make test-all      with searches, other ones each time, and every variant, before a release
#   make test-clients  other people's clients from PyPI, each in an environment of its own (.venv-clients)
#   make chaos   every real fault       make check      format, lint, types, import rules
#   make bench   the benchmarks         make clean      removes caches and state, keeps the environment
#   make lock    resolves requirements-*.txt again, after a change to pyproject.toml
#   make docs    the documents as a site, in site/
#   make hosts   three hosts with a Ray cluster on this machine, of Linux namespaces (needs root)
#
# Variables: CONFIG=serve_config.yaml  ARGS="passed on to the program"  PYTHON=python3.12  VENV=.venv

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup machine serve test test-fast test-all test-clients chaos rl check bench docs hosts clean format

VENV ?= .venv
CONFIG ?= serve_config.yaml
ARGS ?=
# Where torch's CPU build is found when the configured indexes have none: only then is it asked.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PYTHON ?= $(shell python3.11 -c pass 2>/dev/null && echo python3.11 || echo python3)

# Where it is set, pytest rewrites all tests at every start.
unexport PYTHONDONTWRITEBYTECODE

PY := $(VENV)/bin/python
STAMP := $(VENV)/.stamp
# cpu or gpu: the packages that the environment has, or those that CONFIG needs.
BUILD := $(or $(shell $(PYTHON) app/command/machine.py choose $(VENV) $(CONFIG)),cpu)
# uv from the machine or else from PyPI, with the indexes that pip is configured with; pip, where uv fails.
UV := $(or $(shell command -v uv),$(VENV)/bin/uv)
UV_ENV = eval "$$($(PY) app/command/machine.py uv)"
UV_PIP = $(UV) pip install --python $(PY) --no-deps --index-strategy unsafe-best-match
PIP := $(PY) -m pip --disable-pip-version-check install --no-deps --no-input --progress-bar off
MORE := $(if $(filter cpu,$(BUILD)),--extra-index-url $(TORCH_INDEX))
PROGRESS := -e '/^\(Resolved\|Prepared\|Installed\)/s/^/      /p' -e 's/^ *\(Downloading .*[0-9] *Mi*B\)/      \1/p'

# uv does not compile modules, and pip compiles all, which takes minutes. Engines would each compile what they import,
# and each look at their model's class in a process of its own, which takes 11 s: vLLM keeps what it found.
COMPILED = echo "[3/3] importing what an engine imports once, which compiles it: half a minute"; $(PY) -uc 'import importlib; \
  from deployments.host.fork_server import server; \
  [(print("     ", name), importlib.import_module(name)) for name in ("ray.serve", *server._modules())]; \
  from vllm.model_executor.models import ModelRegistry; ModelRegistry.models["LlamaForCausalLM"].inspect_model_cls()' \
  2>>$(VENV)/install.log || true

help:
	@sed -n '3,15s/^# \{0,1\}//p' Makefile

setup: $(STAMP)

$(STAMP): requirements-$(BUILD).txt pyproject.toml
	@$(PYTHON) app/command/machine.py check $(BUILD)
	@test -x $(PY) || { echo "[1/3] creating $(VENV) with $(PYTHON): some seconds"; $(PYTHON) -m venv $(VENV); }
	@$(PY) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v < (3, 14) else \
	  "Slipstream needs Python 3.11 to 3.13, but $(VENV) has %d.%d: make PYTHON=python3.11, after rm -r $(VENV)" % v[:2])'
	@echo $(BUILD) >$(VENV)/.build
	@test -x $(UV) || $(PIP) -qq 'uv>=0.9.8' || echo "      there is no uv here: pip installs, which takes longer"
	@echo "[2/3] installing the $$(grep -c == requirements-$(BUILD).txt) packages of requirements-$(BUILD).txt and this folder: 1 to 5 minutes"
	@: >$(VENV)/install.log
	@$(UV_ENV); for install in "$(UV_PIP)" "$(UV_PIP) $(MORE)" "$(PIP)" "$(PIP) $(MORE)"; do \
	  echo "$$install" >>$(VENV)/install.log; \
	  if $$install -r requirements-$(BUILD).txt 2>&1 | tee -a $(VENV)/install.log | sed -nu $(PROGRESS) && \
	    $$install --no-build-isolation -e . >>$(VENV)/install.log 2>&1; then $(COMPILED); touch $@; exit 0; fi; \
	done; tail -n 20 $(VENV)/install.log; echo "The packages could not be installed: see $(VENV)/install.log" >&2; exit 1

# Resolves with the machine's indexes. vLLM for GPUs asks for all that it wants, see [tool.uv].
COMPILE = $(UV) pip compile -q --python-version 3.11 --no-sources --index-strategy unsafe-best-match --no-annotate \
  --custom-compile-command "make lock" --extra rl --extra dev pyproject.toml
lock: $(STAMP)
	@$(UV_ENV); $(COMPILE) --extra cpu -o requirements-cpu.txt
	@$(UV_ENV); $(COMPILE) --extra gpu -o requirements-gpu.txt --no-config --excludes <(printf 'llm\nllama-cpp-python\n')

machine:
	@$(PYTHON) app/command/machine.py check $(BUILD) $(CONFIG)

serve: machine $(STAMP)
	@exec $(PY) -m app.command.cli serve --config $(CONFIG) $(ARGS)

rl: $(STAMP)
	@exec $(PY) -m app.command.cli rl $(ARGS)

# Three processes, two of which have fleets (see tests/conftest.py). One that dies ends the run: what killed it would
# kill the next one too. They and the replicas of their fleets are forks of one server, which imports vLLM once.
TEST := -IS deployments/host/fork_server/client.py auto -m pytest -n 3 --dist loadscope --no-loadscope-reorder --max-worker-restart 0

test: $(STAMP)
	@exec $(PY) $(TEST) --durations=20 $(ARGS)

# Two forks of each of two processes: a third of what tests take is waiting. In the folders that are left out
# all tests have an engine or Ray.
test-fast: $(STAMP)
	@exec $(PY) -m pytest -p tests.forks --forks 2 -m "not serve and not chaos and not gpu and not long and not slow" \
	  $(addprefix --ignore tests/,fleet clients deployments/on_ray) $(ARGS)

test-all: $(STAMP)
	@exec $(PY) $(TEST) --durations=20 --timeout 1800 --hypothesis-profile search \
	  -m "not gpu and not (chaos and long)" $(ARGS)

test-clients: $(STAMP)
	@exec $(PY) -m pytest -m clients $(ARGS)

chaos: $(STAMP)
	@exec $(PY) -m pytest -m chaos $(ARGS)

check: $(STAMP)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: $(STAMP)
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

docs: $(STAMP)
	@$(PY) -c 'import material' 2>/dev/null || $(PIP) -q -r requirements-docs.txt
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict $(ARGS)

bench: $(STAMP)
	@exec $(PY) -m benchmarks $(ARGS)

hosts: $(STAMP)
	@exec $(PY) -m benchmarks.hosts $(ARGS)

clean:
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .slipstream build dist
	find app deployments trainers tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
