# Everything runs in .venv; nothing is assumed but Python 3.11+ and make.
PYTHON ?= python3
BIN := .venv/bin
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt
DEMO ?= demo

.PHONY: setup test tests demo reference docs lint clean

setup: .venv/installed

# pip works on one core. So the four packages with most files are unpacked beside torch, and what is
# there is compiled beside the rest: a quarter less time on two cores. The compiler leaves out large
# packages of which little is imported. It fails on files that are templates, or for another version
# of Python.
COMPILE = $(BIN)/python -m compileall -q -x '/(ray|scipy|plotly|onnx|transformers/models)/' .venv/lib

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
	  || { echo "onerank needs Python 3.11 to 3.13; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv .venv
	@echo "installing into .venv (torch is the large one; minutes on a slow line)"
	$(PIP_INSTALL) --no-deps onnx ray transformers zensical & $(PIP_INSTALL) torch && wait $$!
	$(COMPILE) > .venv/compile.log & $(PIP_INSTALL) -e '.[capture,dev]' && { wait $$! || true; }
	@$(COMPILE) -j 0 > .venv/compile.log || true
	@touch $@

test: lint tests docs

# One thread each, so that the tests of two cores do not fight over them. A file runs in one worker,
# which makes its module's fixtures once: 692 s instead of 791 s on two cores. `tests/conftest.py`
# orders the files.
# Images of Python often forbid bytecode files; each command that a test starts would compile onerank
# anew, a fifth of the second that `annotate` takes.
# Each process would rewrite the assertions of all tests, for 9 s of CPU, to explain those that fail.
# So they are plain, and tests that failed run again with explanations.
PYTEST = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= \
  $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder
tests: setup
	$(PYTEST) --assert=plain \
	  || { $(PYTEST) --last-failed --last-failed-no-failures none; exit 1; }

# The generated pages of docs/reference: commands, JSON output, trace attributes.
reference: setup
	$(BIN)/python tools/generate_reference.py

# The documentation site, in build/site. A broken link or anchor fails the build.
docs: setup
	$(BIN)/zensical build --strict

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports

# A small Llama as rank 0 of four, on this machine's CPU, re-costed for an H100, exported.
demo: setup
	@mkdir -p $(DEMO)
	$(BIN)/capture run examples/train_llama.py --tp 4 -o $(DEMO)/trace.et
	$(BIN)/annotate --target H100 $(DEMO)/trace.et
	$(BIN)/onerank export astra-sim $(DEMO)/trace.H100.et -o $(DEMO)/workload
	$(BIN)/onerank check $(DEMO)/workload
	@echo
	@echo "$(DEMO)/trace.et        the step as captured here, rank 0 of 4"
	@echo "$(DEMO)/trace.H100.et   the same step on an H100"
	@echo "$(DEMO)/workload/       4 ranks for ASTRA-sim; start it with run.sh"

clean:
	rm -rf .venv build $(DEMO)
