# Two commands are enough on a new machine with Python 3.11 or newer, make and a C compiler: `make demo`, `make test`.
# A target that needs tools creates .venv first, from requirements.lock alone; while that is up to date nothing touches the network.

VENV ?= .venv
PYTHON := $(VENV)/bin/python
# The interpreter of a new environment, if not the first suitable one in PATH: make test VENV=.venv-3.13 INTERPRETER=python3.13
INTERPRETER ?=
# Further arguments for demo, test, e2e, lab and bench: make test ARGS='-k ledger'
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help venv libraries demo test e2e lab bench bench-pods bench-docs bench-placement hardware check lint format types imports proto proto-check docs prose sbom supply-check audit chart lock wheel image clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# -- see it, prove it ------------------------------------------------------------------------------------------------------

demo: venv ## the agent on a simulated node, before your eyes (ARGS=--once: end by itself)
	@$(VENV)/bin/gpumgr demo $(ARGS)

test: venv ## unit, property, component and agent tests on all cores: no root, no network, no GPU
	@$(PYTHON) -m pytest -n auto --dist worksteal $(ARGS)

e2e: venv ## pods on a real kubelet; needs root, installs Debian packages, builds Kubernetes and containerd with Go
	@test "$$(id -u)" = 0 || { echo "make e2e: it starts containerd and a kubelet, so it must run as root" >&2; exit 1; }
	@$(PYTHON) -m tests.e2e.build
	@$(PYTHON) -m pytest tests/e2e --numprocesses=2 -rfEs $(ARGS)

lab: venv ## real enforcement libraries and MPS programs in containers over a fake GPU; needs root, runc and GPUMGR_LAB (ARGS='SCENARIO...')
	@$(PYTHON) -m tests.lab $(ARGS)

bench: venv ## measure; writes build/bench.json and prints its table (about 6 minutes, on a quiet machine)
	@$(PYTHON) -m tests.bench $(ARGS)

bench-pods: venv ## measure, with pods on a real kubelet and at a real kube-scheduler besides (root, as for e2e; about an hour more)
	@$(PYTHON) -m tests.bench --pods $(ARGS)

bench-placement: venv ## compare placement policies on traces (TRACES=folder), into docs/benchmarks.md (about half an hour)
	@$(PYTHON) -m tests.bench.bench_placement $(TRACES) --document docs/benchmarks.md $(ARGS)

bench-docs: venv ## put the table of build/bench.json into docs/benchmarks.md
	@$(PYTHON) -m tests.bench --document docs/benchmarks.md

hardware: venv ## measure the limits on this machine's NVIDIA GPU (root, 12 minutes; results in build/hardware)
	@$(PYTHON) -m tests.hardware $(ARGS)
	@$(PYTHON) -m tests.hardware.suspend

# -- keep it right ---------------------------------------------------------------------------------------------------------

check: lint types imports proto-check test ## everything that needs no root

lint: venv ## ruff: rules and format
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .

format: venv ## let ruff rewrite what it can
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/ruff format .

types: venv ## mypy, strict
	@$(VENV)/bin/mypy

imports: venv ## the arrows between the modules
	@$(VENV)/bin/lint-imports

# Generated protobuf code: committed, never edited by hand.
# Folder below proto/ = folder below gpumgr/_pb; the rest of the path is the package's name.
PROTO_APIS := deviceplugin/v1beta1=deviceplugin/ runtime/v1= display= dra/v1= drahealth/v1=drahealth/ pluginregistration/v1=
PROTO_OUT ?= gpumgr/_pb

proto: venv ## regenerate gpumgr/_pb from proto/
	@rm -rf $(PROTO_OUT) && mkdir -p $(PROTO_OUT)
	@for api in $(PROTO_APIS); do \
	  out=$(PROTO_OUT)/$${api#*=}; mkdir -p $$out; \
	  output=$$(PATH="$(abspath $(VENV)/bin):$$PATH" $(PYTHON) -m grpc_tools.protoc --proto_path=proto \
	    --python_betterproto_out=$$out proto/$${api%%=*}/api.proto 2>&1) || { echo "$$output" >&2; exit 1; }; \
	done
	@echo '"""Generated from proto/ by `make proto`; never edited by hand."""' > $(PROTO_OUT)/__init__.py

proto-check: venv ## prove that gpumgr/_pb is what proto/ says
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && \
	$(MAKE) --no-print-directory proto PROTO_OUT=$$fresh/_pb && \
	diff -r -x __pycache__ $$fresh/_pb gpumgr/_pb && echo "proto-check: gpumgr/_pb matches proto/"

docs: venv ## the tables of docs/*.md, from the code (a test fails while they are stale)
	@$(PYTHON) -m tools.docs

chart: venv ## config/kustomize/base and the values' schema, from the chart and the code (a test fails while they are stale)
	@$(PYTHON) -m tools.chart

prose: venv ## list every word in comments, docstrings and Markdown that the style bans (a test fails for them)
	@$(PYTHON) -m tools.prose

sbom: venv ## what runs on nodes besides us: build/sbom.cdx.json (CycloneDX) and build/licenses.txt
	@$(PYTHON) -m tools.sbom

supply-check: venv ## prove that the installed packages are the locked ones, unaltered and under accepted licences
	@$(PYTHON) -m tools.supply

audit: venv ## known vulnerabilities of what runs on nodes (network; pip-audit is fetched, and is not part of check)
	@$(VENV)/bin/uv tool run pip-audit@2.10.1 --strict --disable-pip --require-hashes --requirement config/image/requirements.lock || \
	  { echo "make audit: something was found, or could not be asked: see above (it needs the network, and an index that tells vulnerabilities)" >&2; exit 1; }

lock: venv ## resolve the dependencies anew into requirements.lock (network)
	@$(VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 --extra dev --generate-hashes \
	  --no-emit-index-url --no-header pyproject.toml -o requirements.lock
	@$(VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-header --no-annotate pyproject.toml -c requirements.lock -o config/image/requirements.lock

libraries: $(VENV)/.locked ## compile the limiter's libraries into the tree (`venv` does it, too, if a compiler is there)
	@$(PYTHON) -m tools.limiter

wheel: venv ## build the wheel into dist/, the only one there
	@rm -f dist/gpumgr-*.whl
	@$(VENV)/bin/hatchling build -t wheel

image: wheel ## build the image with Docker
	@version=$$($(VENV)/bin/hatchling version) && docker build -f config/image/Dockerfile --build-arg VERSION=$$version -t gpumgr:$$version .

clean: ## remove what was made here: the environment, caches, builds
	@rm -rf .venv .venv-* build dist gpumgr/enforcement/limiter/lib .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# -- the environment -------------------------------------------------------------------------------------------------------

venv: $(VENV)/.installed

# What the lock says, nothing else: a changed lock makes a new environment.
$(VENV)/.locked: requirements.lock
	@for python in $(INTERPRETER) python3 python3.11 python3.12 python3.13 python3.14; do \
	  "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; \
	  python=; \
	done; \
	test -n "$$python" || { echo "make: no Python 3.11 or newer in PATH; install one (Debian: apt-get install python3 python3-venv)" >&2; exit 1; }; \
	"$$python" -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "make: $$python lacks its venv module (Debian: apt-get install python3-venv)" >&2; exit 1; }; \
	echo "make: $(VENV) from requirements.lock, with $$("$$python" --version)"; \
	"$$python" -m venv --clear $(VENV)
	@$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-input --require-hashes -r requirements.lock
	@touch $@

# The package itself, editable, with the limiter's libraries; needs no network.
$(VENV)/.installed: $(VENV)/.locked pyproject.toml $(wildcard tools/limiter.py gpumgr/enforcement/limiter/*.[chS])
	@$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-input --no-index --no-deps --no-build-isolation --editable .
	@touch $@
