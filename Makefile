# Two commands to remember: `make demo` and `make test`. Both make a virtual environment on first use.
PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
MINUTES ?= 30
BIN := $(VENV)/bin
# Tests of real processes wait for much of their time, so there is a worker more than there are processors.
PYTEST = OMP_NUM_THREADS=1 PYTEST_XDIST_AUTO_NUM_WORKERS=`$(BIN)/python -c "import joblib; print(joblib.cpu_count() + 1)"` \
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal
export FLWR_TELEMETRY_ENABLED = 0
# Tests start hundreds of processes, which should find what Python has compiled. `pip` would compile 27,000 files, in two
# minutes, of which programs and tests use a fifth.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test lint check versions siege soak docs clean help

help:  ## list the commands
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

demo: $(VENV)/.installed  ## train six clients over gRPC on this machine, in one to three minutes
	$(BIN)/flower-server --config examples/demo.yaml --insecure --port 0 --local-clients 6 --web 0

test: $(VENV)/.installed  ## run the tests, in five to ten minutes; `make check` runs the slow ones too
	$(PYTEST) -m "not slow"

lint: $(VENV)/.installed  ## format, lint, types, and the release as `twine` sees it
	scripts/lint $(BIN)

check: lint  ## lint, types and all tests, the slow ones too
	$(PYTEST)

versions: $(VENV)/.installed  ## run tests with the oldest and the newest libraries and Python, in .versions/
	scripts/versions $(BIN)

siege: $(VENV)/.installed  ## for MINUTES (30) kill and cut off real processes, attack them with strangers, members and a lying server, and feed nonsense
	OMP_NUM_THREADS=1 $(BIN)/python -m siege --minutes $(MINUTES)

soak: $(VENV)/.installed  ## play 1,000 rounds over gRPC and see that nothing grows
	OMP_NUM_THREADS=1 $(BIN)/python -m siege.soak --rounds 1000

docs: $(VENV)/.installed  ## build the pages into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "Hyperbloom needs Python 3.11, 3.12 or 3.13; name one: make PYTHON=python3.12 ..."; exit 1; }
	@echo "Installing into $(VENV), once: some minutes, and 7 GB with CUDA (README.md says how to do without)."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --no-compile $(PIP_FLAGS) --editable '.[dev,export,simulation]'
	@touch $@

clean:  ## remove the virtual environment and caches; run folders stay
	rm -rf $(VENV) .versions build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
