# Everything the project does, from a clean clone. Needs Python 3.11 or 3.12 and pip; nothing else.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
# The first interpreter that runs and is 3.11 or 3.12; override with PYTHON=/path/to/python.
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	"$$p" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null \
	&& { echo "$$p"; break; }; done)
# The environment is rebuilt when the content of these files changes, and only then.
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | sha256sum | cut -c1-16)
PY := $(VENV)/bin/python
# Waiting OpenMP threads sleep instead of spinning: on few or shared cores that is several times less processor time
# (the demo on 2 busy cores: 91 s instead of 285 s).
export OMP_WAIT_POLICY ?= PASSIVE
TEST_ARGS ?=
DEMO_ARGS ?=

.PHONY: help venv test fidelity lint format demo bench-cpu wheel wheel-test constraints clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | while IFS=$$'\t' read -r name text; do \
		printf '  make %-12s %s\n' "$$name" "$$text"; done

venv: $(STAMP) ## Create .venv with everything pinned (about 9 GB, most of it PyTorch and CUDA)

$(STAMP):
	@[ -n "$(PYTHON)" ] || { echo "make: no Python 3.11 or 3.12 with venv and pip found; install one or set PYTHON=" >&2; exit 2; }
	@[ -x "$(PY)" ] || { echo "creating $(VENV) with $(PYTHON)"; "$(PYTHON)" -m venv --without-pip "$(VENV)"; }
	@"$(PY)" -m pip --version >/dev/null 2>&1 || "$(PY)" -m ensurepip >/dev/null 2>&1 \
		|| "$(PYTHON)" -m pip --python "$(PY)" install -q pip # Debian splits ensurepip off into python3-venv
	@echo "installing aspire-sglang and its dependencies (several minutes the first time; log: $(VENV)/pip.log)"
	@"$(PY)" -m pip install --progress-bar off -c constraints.txt -e '.[dev]' 2>"$(VENV)/pip-errors.log" \
		| tee "$(VENV)/pip.log" | sed -un 's/^ *\(Collecting\|Building wheel\|Installing collected\|Successfully installed\) \([^ ]*\).*/  \1 \2/p' \
		|| { tail -n 20 "$(VENV)/pip-errors.log" >&2; echo "make: pip failed; full logs in $(VENV)/pip*.log" >&2; exit 1; }
	@rm -f "$(VENV)"/.installed-*
	@touch "$@"

test: $(STAMP) ## Run the full test suite (under 20 minutes on 2 cores)
	"$(PY)" -m pytest -n auto --maxprocesses 4 --dist loadfile --durations=25 $(TEST_ARGS)

fidelity: $(STAMP) ## Compare acceptance with the reference study (long)
	"$(PY)" -m pytest -m fidelity -s --durations=25 $(TEST_ARGS)

lint: $(STAMP) ## ruff, ruff format and mypy
	"$(PY)" -m ruff check .
	"$(PY)" -m ruff format --check .
	"$(PY)" tools/typecheck.py

format: $(STAMP) ## Let ruff format and fix the code
	"$(PY)" -m ruff check --fix .
	"$(PY)" -m ruff format .

demo: $(STAMP) ## Ask a real server two questions, with and without ASPIRE, and compare
	"$(PY)" -m aspire_sglang.demo $(DEMO_ARGS)

bench-cpu: $(STAMP) ## Measure steps on the CPU
	"$(PY)" benchmarks/cpu.py

wheel: $(STAMP) ## Build the wheel into dist/
	rm -rf build/lib build/bdist.*
	"$(PY)" -m build --wheel --no-isolation

wheel-test: wheel ## Install the wheel into a new environment and serve from it (another 9 GB under build/)
	tools/wheel_test.sh "$(PYTHON)"

constraints: $(STAMP) ## Write the versions of .venv to constraints.txt
	@{ sed -n '/^#/p' constraints.txt; \
		"$(PY)" -m pip freeze --all --exclude aspire-sglang --exclude pip | sort -f; } > constraints.txt.new
	@mv constraints.txt.new constraints.txt

clean: ## Remove environment, build output and caches (the model in the user's cache stays)
	rm -rf "$(VENV)" build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
