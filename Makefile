# Needs Python >= 3.11 with pip, and make. Each target sets up what it needs in .venv, once.
#   make demo                 watch one policy heal a run in torch and in JAX
#   make test                 the tests            (ARGS="-k zclip" for some of them)
#   make test-slow            those that take longer
#   make test-lowest          a selection, with the lowest versions that pyproject.toml allows
#   make test-originals       OLMo-core's own optimizer beside our port of it
#   make test-deepspeed       DeepSpeed and ArcticTraining; needs a C++ compiler
#   make test-ray             Ray's group of workers
#   make gpu                  what needs a GPU, within nine minutes; on a CPU a small form of it
#   make lint                 ruff and pyright
#   make docs                 site/index.html, with the API reference from the docstrings
#   make lock                 new pins, after a change of dependencies (ARGS=--keep: only that)
#   make release-check        what a release uploads, installed with each extra
#   make demo PYTHON=python3.12
# Every package is installed by its hash (requirements/hashed), torch by its version: which of its
# files is meant depends on the machine.
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu     torch alone from another index
#   make demo HASHES=no       by versions alone, on systems whose files have no hash there

PYTHON ?= python3
HASHES ?= yes
TORCH_INDEX ?=
JOBS   ?= 3
ARGS   ?=

VENV := .venv
BIN  := $(VENV)/bin
LOCK := requirements/lock.txt
PIP  := $(BIN)/python -m pip --disable-pip-version-check -qq
BY_HASH := --require-hashes --no-deps -r requirements/hashed/

# Named, because a comma would end an argument of `call`.
DEMO := -e '.[jax,torch,report]'
TEST := -e '.[jax,torch,report,dev]'
# $(call installed,SET,WHAT): a file of requirements/hashed; without hashes what pip makes of WHAT.
ifeq ($(HASHES),no)
installed = $(PIP) install -c $(LOCK) --no-build-isolation $(2)
else
installed = $(PIP) install $(BY_HASH)$(1).txt
endif
# One package from one index: with two indexes pip would take any package from either.
TORCH := $(PIP) install -c $(LOCK) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX) --no-deps,) torch
# Without isolation: it would download a setuptools that nothing pins.
HEALCORE := $(PIP) install --no-deps --no-build-isolation -e .

TARGETS := setup demo test test-slow test-lowest test-originals test-deepspeed test-ray lint bench gpu docs release-check lock clean
.PHONY: help $(TARGETS)
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   //p' Makefile
	@echo "targets: $(TARGETS)"

# --- environment: a stamp says what is already installed, and is stale when its inputs change ------

# Some systems ship Python with pip but without ensurepip; there the venv borrows that pip.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "healcore needs Python 3.11 or newer, and '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 2; }
	@echo "setting up $(VENV) (once; a few minutes, most of it downloads)"
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	  $(PYTHON) -m pip --quiet --python $(BIN)/python install $(BY_HASH)base.txt; }
	@touch $@

$(VENV)/.base: $(VENV)/.made $(LOCK)
	@$(call installed,base,pip setuptools wheel)
	@touch $@

$(VENV)/.demo: $(VENV)/.base pyproject.toml
	@$(call installed,demo,$(DEMO))
	@$(TORCH)
	@$(HEALCORE)
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	@$(call installed,test,$(TEST))
	@touch $@

$(VENV)/.lint: $(VENV)/.test requirements/lint.txt
	@$(call installed,lint,-r requirements/lint.txt)
	@touch $@

$(VENV)/.bench: $(VENV)/.demo requirements/bench.txt
	@$(call installed,bench,-r requirements/bench.txt)
	@touch $@

$(VENV)/.docs: $(VENV)/.base requirements/docs.txt
	@$(call installed,docs,-r requirements/docs.txt)
	@touch $@

$(VENV)/.release: $(VENV)/.test requirements/release.txt
	@$(call installed,release,-r requirements/release.txt)
	@touch $@

# An environment of its own, some 6 GB with PyPI's torch: all at the lowest versions. The hashes are
# for Python 3.11 on Linux (x86_64); elsewhere HASHES=no.
LOWEST     := .venv-lowest
LOWEST_PIP := $(PIP) --python $(LOWEST)/bin/python install
OLD_TORCH  := $(shell sed -n 's/^\# \(torch==.*\)/\1/p' requirements/lowest.txt)
$(LOWEST)/.made: $(VENV)/.made requirements/lowest.txt
	@echo "setting up $(LOWEST)"
	@$(BIN)/python -m venv --clear --without-pip $(LOWEST)
ifeq ($(HASHES),no)
	@grep -o '^[a-z][^ ]*==[^ ]*' requirements/lowest.txt >$(LOWEST)/versions.txt
	@$(LOWEST_PIP) -r $(LOWEST)/versions.txt
else
	@$(LOWEST_PIP) --require-hashes --no-deps -r requirements/lowest.txt
endif
	@$(LOWEST_PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX) --no-deps,) $(OLD_TORCH)
	@touch $@

# Packages that only a few tests need. Each set has a folder of its own, so that it cannot change a
# version in .venv. DeepSpeed is a source distribution, which compiles an operator on first use.
$(VENV)/packages/%/.made: .ci/%.txt $(VENV)/.test
	@rm -rf $(@D)
	@DS_BUILD_OPS=0 $(PIP) install --no-deps --require-hashes --no-build-isolation --target $(@D) -r $<
	@touch $@

# --- targets --------------------------------------------------------------------------------------

setup: $(VENV)/.test

demo: $(VENV)/.demo
	@rm -rf healcore-demo
	@$(BIN)/healcore demo $(ARGS)

# One thread per worker: pytest workers with a thread pool each would fight over the cores. There is
# one worker more than cores on a small machine, because many tests wait for other processes.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

test: $(VENV)/.test
	@$(PYTEST) $(ARGS)

test-slow: $(VENV)/.test
	@$(PYTEST) -m '(slow or hypothesis) and not stress' --hypothesis-profile='many cases' $(ARGS)

# Tests that need no package of `dev`, then the smoke test of each extra.
AT_LOWEST := tests/policy tests/jax/test_surface.py tests/jax/test_flax.py \
  tests/jax/driver/test_live_state.py \
  tests/torch/test_losses.py tests/torch/test_grad_scaler.py tests/torch/test_battery.py \
  tests/torch/store/test_state.py tests/torch/driver/test_rollback.py \
  tests/runtime/store/test_memory.py tests/healer/test_loss_fn.py tests/tools/traces \
  tests/tools/report tests/parity/test_fuzz.py
test-lowest: $(LOWEST)/.made
	@OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -n $(JOBS) --dist loadfile -q $(AT_LOWEST) $(ARGS)
	@PYTHONPATH=$(CURDIR) $(LOWEST)/bin/python .ci/smoke_extra.py all

# $(call with,SET): pytest with the packages of a set.
with = PYTHONPATH=$(CURDIR)/$(VENV)/packages/$(1) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q
test-originals: $(VENV)/packages/originals/.made
	@$(call with,originals) -m slow tests/catalogue/skip/test_olmo.py $(ARGS)

test-deepspeed: $(VENV)/packages/deepspeed/.made
	@$(call with,deepspeed) tests/torch/trainers/test_deepspeed.py \
	  tests/torch/trainers/test_arctic.py tests/examples/test_deepspeed_engine.py $(ARGS)

test-ray: $(VENV)/packages/ray/.made
	@$(call with,ray) tests/examples/test_ray_train.py $(ARGS)

lint: $(VENV)/.lint
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright

bench: $(VENV)/.bench
	@$(BIN)/python benchmarks/step_overhead.py $(ARGS)

# JAX's CUDA build is installed by its version, like torch, and apart from the CUDA of torch.
$(VENV)/.gpu: $(VENV)/.test
	@! nvidia-smi >/dev/null 2>&1 || $(PIP) install -c $(LOCK) 'jax[cuda12]' || \
	  echo "jax[cuda12] cannot be installed: the checks of JAX will be skipped" >&2
	@touch $@

gpu: $(VENV)/.gpu
	@$(BIN)/python -m benchmarks.gpu_kit $(ARGS)

docs: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict >$(VENV)/docs.log 2>&1 || \
	  { grep -v '^INFO' $(VENV)/docs.log >&2; exit 1; } # --quiet would hide the warnings
	@echo "site/index.html"

# sdist, wheel, metadata, each extra in a clean environment. ARGS=--quick: the core and one extra.
release-check: $(VENV)/.release
	@TORCH_INDEX=$(TORCH_INDEX) $(BIN)/python .ci/release_check.py $(ARGS)

# Resolves everything anew and writes the pins and the hashes. Torch stays where the file has it.
# ARGS=--keep: the present pins stay, for a package more or less.
lock: $(VENV)/.release
	@$(BIN)/python requirements/make_lock.py $(ARGS)
	@$(BIN)/python requirements/make_lowest.py $(BIN)/uv

clean:
	rm -rf $(VENV) $(LOWEST) site build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
