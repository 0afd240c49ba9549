PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SERVE_STAMP := $(VENV)/.installed-serve

# CI installs with uv, which is several times as fast. setuptools warns that folders of the working directory may hide an
# editable package of the same name: ours are the package.
INSTALL ?= PYTHONWARNINGS='ignore:Editable installation' $(BIN)/pip install --quiet

# The driver says which CUDA it speaks: "CUDA Version: 13.0" in nvidia-smi's header.
CUDA_MAJOR := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p')
comma := ,
CUDA_EXTRA := $(if $(CUDA_MAJOR),$(comma)cuda$(if $(filter 12,$(CUDA_MAJOR)),12,13))

# Tests start hundreds of processes, which would compile our modules anew if the first could not keep the result.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install test quick lint types compile unit docs dist serve clean

# The checks share the cores; the tests need all of them.
test:
	$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint types docs compile
	$(MAKE) --no-print-directory unit

# The heart of every room, in about a minute: the files of tests that have the mark `quick`.
quick: lint
	$(BIN)/pytest --quiet -n auto --dist loadgroup -m quick $$(grep -rl --include='test_*.py' 'mark\.quick' tests)

# Installing is skipped while pyproject.toml is unchanged, so `make test` stays quick on a warm checkout.
install: $(STAMP)
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable '.[dev]'
	touch $(STAMP)

# Without the tools for development; on a machine with an NVIDIA GPU also what talks to it. One that `make test` has
# set up has everything but that.
$(SERVE_STAMP): pyproject.toml
	@echo "installing into $(VENV) (once) …"
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable '.[language$(CUDA_EXTRA)]'
	touch $(SERVE_STAMP)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: $(STAMP)
	MYPY_NUM_WORKERS=auto $(BIN)/mypy

# What every engine runs, and the demo models: otherwise each of the first processes of the tests would compile them.
compile: $(STAMP)
	$(BIN)/python -c "import paellapy as pp; from paellapy import demo; \
	    engine = pp.Engine('virtual:h200'); [engine.load(demo.load(name)) for name in demo.names()]"

unit: $(STAMP)
	$(BIN)/pytest -n auto --dist loadgroup

# The site, into docs/_build/html. Warnings are errors, links between pages and to files of the repository included.
docs: $(STAMP)
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -b html docs docs/_build/html

# Wheel and source distribution, into dist/; each is installed into an environment of its own and tried.
dist: $(STAMP)
	$(BIN)/python .ci/dist.py

# The demo models on the GPU if there is one, else on the virtual GPU. ARGS="--port 9000" and the like are passed on.
serve: $(SERVE_STAMP)
	$(BIN)/paellapy serve $(ARGS)

clean:
	rm -rf $(VENV)
