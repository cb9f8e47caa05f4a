# SPDX-License-Identifier: BSD-3-Clause
#
#   make demo     the main job on real input       make build    set-up and build only
#   make test     every test                       make bench    the side-by-side benchmark
#   make lint     all checkers                     make format   rewrites the sources as lint wants them
#   make examples real models beside their own attention: parity, time, memory (packages of 0.6 GB)
#   make clean    removes what was built           make sanitize address and undefined-behaviour sanitizers
#
# Each does its own set-up on a fresh Debian or Ubuntu machine, and only once. Variables:
#   VENV      folder of the Python environment to make or use (6 GB with torch); default .venv
#   TORCH     requirement of torch to install, such as torch==2.12.*
#   MAX_JOBS  compilers to run at once; default: one per core, and one per 3 GB of memory
#   FORCE_CUDA  1 compiles the CUDA kernels without a GPU too, 0 never does; default: where nvcc and a GPU are
#   TORCH_CUDA_ARCH_LIST  what GPUs to compile them for, such as 8.0;9.0+PTX (docs/cuda.md)
VENV ?= .venv
TORCH ?= torch>=2.11,<2.16
MAX_JOBS ?= $(shell awk -v cores=$$(nproc) '/MemTotal/ { jobs = int($$2 / 3e6); if (jobs > cores) jobs = cores; \
	print jobs < 1 ? 1 : jobs }' /proc/meminfo)
export MAX_JOBS
export FORCE_CUDA TORCH_CUDA_ARCH_LIST

VENV_FOLDER := $(abspath $(VENV))
PYTHON := $(VENV_FOLDER)/bin/python
PIP := $(PYTHON) -m pip --disable-pip-version-check
export PATH := $(VENV_FOLDER)/bin:$(PATH)

# What is compiled for GPUs without being asked stays apart, so that neither build undoes the other.
PRESET := $(if $(filter 1,$(FORCE_CUDA)),cuda,release)
BUILD := build/$(PRESET)
STAMPS := $(VENV_FOLDER)/.fused_mha
PACKAGE_SOURCES := CMakeLists.txt setup.py pyproject.toml \
	$(shell find cmake csrc python/fused_mha -type f \( -name '*.h' -o -name '*.inc' -o -name '*.cpp' -o -name '*.cu' \
	-o -name '*.txt' -o -name '*.cmake' -o -name '*.in' -o -name '*.py' -o -name '*.pyi' -o -name py.typed \) \
	-not -path '*/fused_mha/share/*' -not -path 'python/fused_mha/include/*')
CPP_FILES := $(shell find csrc tests benchmarks examples -name '*.h' -o -name '*.inc' -o -name '*.cpp' -o -name '*.cu')

.PHONY: demo examples test test-python test-cpp test-package build bench lint format sanitize clean FORCE
.DEFAULT_GOAL := build

build: $(STAMPS)/installed

demo: build $(STAMPS)/demo
	$(PYTHON) examples/text_classifier.py

examples: build $(STAMPS)/examples
	$(PYTHON) examples/text_classifier.py
	$(PYTHON) examples/real_models.py --output real_models.png
	$(PYTHON) examples/sentence_search.py
	$(PYTHON) examples/atom_maps.py
	$(PYTHON) examples/alignment.py
	$(PYTHON) examples/cpp_serving/run.py

bench: build $(STAMPS)/demo
	$(PYTHON) benchmarks/bench.py

test: test-cpp test-python test-package

# Where a package of the examples is not to be had, the tests that need it are skipped.
test-python: build $(STAMPS)/test
	-@$(MAKE) --no-print-directory $(STAMPS)/examples
	$(PYTHON) -m pytest -q tests/python

test-cpp: build $(STAMPS)/catch2
	cmake --preset $(PRESET) -DPython_EXECUTABLE=$(PYTHON)
	cmake --build --preset $(PRESET) -j $(MAX_JOBS)
	ctest --preset $(PRESET)

test-package: build $(STAMPS)/test
	$(PYTHON) -m pytest -q tests/package

lint: build $(STAMPS)/lint
	scripts/check_layers.sh
	@echo clang-format; clang-format --dry-run -Werror $(CPP_FILES)
	ruff check .
	ruff format --check .
	mypy
	scripts/clang_tidy.sh $(BUILD) $(MAX_JOBS)

format: $(STAMPS)/lint
	clang-format -i $(CPP_FILES)
	ruff check --fix .
	ruff format .

sanitize: build $(STAMPS)/test $(STAMPS)/catch2
	scripts/sanitize.sh asan $(PYTHON)
	scripts/sanitize.sh ubsan $(PYTHON)

clean:
	rm -rf build python/*.egg-info
	rm -f $(STAMPS)/installed

# Set-up. A stamp lies in the environment that it describes, so that two checkouts can share one.
$(STAMPS)/env: pyproject.toml scripts/system_packages.sh
	scripts/system_packages.sh build
	test -x $(PYTHON) || python3 -m venv $(VENV_FOLDER)
	$(PIP) install --quiet --upgrade 'pip>=25.1'
	$(PIP) install --quiet --group build '$(TORCH)'
	mkdir -p $(@D) && touch $@

$(STAMPS)/demo $(STAMPS)/test: $(STAMPS)/env
	$(PIP) install --quiet --group $(@F)
	touch $@

$(STAMPS)/examples: $(STAMPS)/env
	$(PIP) install --quiet --group examples '$(TORCH)'
	$(PIP) install --quiet --no-deps --group examples-alone
	touch $@

$(STAMPS)/lint: $(STAMPS)/env
	scripts/system_packages.sh lint
	$(PIP) install --quiet --group lint
	touch $@

$(STAMPS)/catch2: $(STAMPS)/env
	scripts/system_packages.sh test
	touch $@

# The stamp names the checkout whose package the environment holds, and what was asked of CUDA.
INSTALLED := $(CURDIR) $(PRESET) $(FORCE_CUDA) $(TORCH_CUDA_ARCH_LIST)
ifneq ($(strip $(shell cat $(STAMPS)/installed 2>/dev/null)),$(strip $(INSTALLED)))
$(STAMPS)/installed: FORCE
endif
$(STAMPS)/installed: $(STAMPS)/env $(PACKAGE_SOURCES)
	rm -rf build/lib.* build/bdist.*
	FUSED_MHA_BUILD_DIR=$(BUILD) $(PIP) install --quiet --no-build-isolation --no-deps --force-reinstall .
	echo '$(INSTALLED)' >$@
