# Everything a person does with this repository. `make help` lists it.
#
# Needs Python 3.11 or newer, a C++20 compiler and make; the rest is set up in $(VENV) on first use.
#   PYTHON=...   the interpreter to build the environment with (default: the newest on PATH that will do)
#   VENV=...     where the environment lives (default: .venv)
#   JOBS=...     parallel compiler jobs (default: one per core)
#   WORKERS=...  processes that run Python tests, each file in one of them (default: one per core; 0: none but pytest's)

VENV ?= .venv
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
WORKERS ?= $(JOBS)
PYTEST_ARGS ?=

override VENV := $(abspath $(VENV))
export VIRTUAL_ENV := $(VENV)
export PATH := $(VENV)/bin:$(PATH)
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
export CTEST_PARALLEL_LEVEL ?= $(JOBS)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Room by room, native tests are compiled in less than half of the time. OFF: file by file.
export PATHWAYS_UNITY ?= ON

# What the native parts are made of: a change here, and only here, means to build them again. The Python files are
# installed editable and need no step, unless there is a new folder of them.
NATIVE := $(shell find csrc pathways -name '*.h' -o -name '*.cc' -o -name '*.pyx' -o -name '*.px[di]' \
    -o -name CMakeLists.txt -o -path 'pathways/*/__init__.py') CMakeLists.txt pyproject.toml
DEPS := $(VENV)/.deps
BUILT := $(VENV)/.built
DEV := $(VENV)/.deps-dev
BENCH := $(VENV)/.deps-bench
SITE := $(VENV)/.deps-docs
# A worker that the watchdog ended ends the run: another in its place would wait for ever for the rest of its file.
PYTEST := python -m pytest -n $(WORKERS) --dist loadfile --max-worker-restart 0
CXX_FILES := $(shell find csrc tests -name '*.h' -o -name '*.cc')

# Clang compiles code under AddressSanitizer sooner than GCC compiles it without. Models run without a sanitizer.
HAS_CLANG := $(shell echo 'int main() {}' | clang++ -fsanitize=address -x c++ -o /dev/null - 2>/dev/null && echo yes)
NATIVE_TESTS := $(if $(HAS_CLANG),cpp-asan model,cpp-dev)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help native setup setup-dev demo test test-all test-cpp test-python test-contract quick lint format asan tsan fuzz fuzz-guided fuzz-ports asan-ports model campaigns thorough stress stress-sample contract-machines soak networks network-cuts bench wheel docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "  Variables: PYTHON=interpreter VENV=folder JOBS=n PYTEST_ARGS='-k name'"

demo: $(BUILT) ## train a two-stage pipeline on two islands of host processes, and compare with plain JAX
	@python examples/digits_pipeline.py

test: export PATHWAYS_SHARE ?= 0.05
test: test-cpp test-python ## native tests, under AddressSanitizer with Clang; each contract and a drawn share of other tests
test-all: test-cpp test-python ## every test but tests/stress

quick: $(BUILT) ## all tests but the slow ones, which start clusters or train
	@$(PYTEST) -q -m "not slow" --durations=0 --durations-min=1 $(PYTEST_ARGS)

test-cpp: $(NATIVE_TESTS) ## the native tests; under AddressSanitizer where Clang is installed
native: cpp-dev ## the native tests without a sanitizer
test-python: $(BUILT) ## the Python tests
	@$(PYTEST) $(PYTEST_ARGS)

# ThreadSanitizer cannot map its shadow where the kernel spreads addresses widely.
tsan: NO_ASLR := $(shell setarch -R true 2>/dev/null && echo setarch -R)

cpp-asan cpp-tsan: export CXX = $(if $(HAS_CLANG),clang++,c++)

asan: cpp-asan ## the native tests under AddressSanitizer and UndefinedBehaviorSanitizer
tsan: cpp-tsan ## the native tests under ThreadSanitizer

# FUZZ_SECONDS: in all; PATHWAYS_TEST_SEED and PATHWAYS_SEED repeat the native and the Python half of a run.
FUZZ_SECONDS ?= 60
fuzz: $(BUILT) ## a minute of mutations of all that crosses between processes, natively under AddressSanitizer
	@PATHWAYS_FUZZ_SECONDS=$$(($(FUZZ_SECONDS) * 3 / 4)) $(MAKE) --no-print-directory cpp-asan \
	    CTEST_ARGS="-R fuzz --verbose"
	@PATHWAYS_FUZZ_SECONDS=$$(($(FUZZ_SECONDS) / 4)) python -m pytest -q -s tests/stress/test_fuzz.py

fuzz-guided: export PATHWAYS_FUZZ_EACH = $(shell echo $$(($(FUZZ_SECONDS) / 13 + 1)))
fuzz-guided: ## a minute in which coverage chooses the mutations (libFuzzer; Clang), under AddressSanitizer
	@CXX=clang++ $(MAKE) --no-print-directory cpp-guided CTEST_ARGS="--timeout 36000 --verbose"

# PORT_SECONDS: for each port, and for each native target. PATHWAYS_TEST_SEED and PATHWAYS_SEED repeat a run.
PORT_SECONDS ?= 60
PORT_TESTS := tests/python/machines/test_machine_fuzz.py tests/python/machines/test_machine_records.py
fuzz-ports: export PATHWAYS_FUZZ_EACH = $(PORT_SECONDS)
fuzz-ports: $(BUILT) ## a minute of mutated bytes at each port of a cluster of machines, and of each peer; natively under AddressSanitizer
	@$(MAKE) --no-print-directory cpp-asan TARGET="test_fuzz_links test_fuzz_encodings" \
	    CTEST_ARGS="-R 'fuzz_(links|encodings)' --timeout 3600 --verbose"
	@python -m pytest -q -s $(PORT_TESTS)

# In a checkout of its own, as an installation of ours builds in its own tree. gcc's library goes into every process,
# and the C++ library with it, or it would not see what other extensions throw.
ASAN_TREE := build/asan-tree
ASAN_LIBRARIES = $(foreach library,libasan.so libstdc++.so,$(realpath $(shell g++ -print-file-name=$(library))))
asan-ports: ## the same, and of a client here, with all processes under AddressSanitizer: what is committed, built with g++
	@rm -rf $(ASAN_TREE) && git clone --quiet . $(ASAN_TREE)
	@CXX=g++ SKBUILD_CMAKE_DEFINE=PATHWAYS_SANITIZE=address $(MAKE) --no-print-directory -C $(ASAN_TREE) VENV=.venv setup
	@cd $(ASAN_TREE) && PATHWAYS_FUZZ_EACH=$(PORT_SECONDS) LD_PRELOAD="$(ASAN_LIBRARIES)" \
	    ASAN_OPTIONS=detect_leaks=0,halt_on_error=1,abort_on_error=1,handle_segv=0 \
	    PATHWAYS_FUZZ_SECONDS=$(PORT_SECONDS) .venv/bin/python -m pytest -q -s -n 0 $(PORT_TESTS) tests/stress/test_fuzz.py

# Configure, build and test a preset of CMakePresets.json, quietly unless something fails.
cpp-%: $(DEPS)
	@echo "[native] preset $*: configure and build"
	@mkdir -p build && cmake --preset $* -DCMAKE_MAKE_PROGRAM=$(VENV)/bin/ninja > build/$*.log 2>&1 || (tail -n 60 build/$*.log; exit 1)
	@sed -n 's/^-- \(GoogleTest: .*\)/[native] \1/p' build/$*.log
	@cmake --build --preset $* $(if $(TARGET),--target $(TARGET)) >> build/$*.log 2>&1 || (tail -n 60 build/$*.log; exit 1)
	@echo "[native] preset $*: test"
	@$(NO_ASLR) ctest --preset $* $(CTEST_ARGS)

model: ## the model tests: every interleaving of small cases
	@$(MAKE) --no-print-directory cpp-dev TARGET=models CTEST_ARGS="-R '^model'"

STRESS := tests/stress --ignore tests/stress/test_fuzz.py
THOROUGH := $(addprefix tests/python/,compiler/test_compiler_programs.py compiler/test_control_flow.py \
    arrays/test_array_functions.py arrays/test_array_indexing.py arrays/test_array_operators.py \
    hosts/test_callback_faults.py repository/test_examples.py schedule contract)
FULL_SIZE := PATHWAYS_KILLS=all PATHWAYS_LEAVING=all PATHWAYS_FAULT_PAIRS=60 PATHWAYS_CANCELS=10000 \
    PATHWAYS_LATE_READS=100 PATHWAYS_SLICE_PROGRAMS=30 PATHWAYS_CALLS=35000 PATHWAYS_HOSTILE_SECONDS=600 \
    PATHWAYS_TENANTS_SECONDS=5 PATHWAYS_ELASTIC_RUNS=20 PATHWAYS_THOROUGHNESS=4
campaigns: $(BUILT) ## the stress tests at full size: kills, leaves, cancels, hostile tenants, networks
	@$(FULL_SIZE) $(PYTEST) $(STRESS) $(PYTEST_ARGS)
thorough: $(BUILT) ## the contracts, and what draws its examples by chance, with four times as many
	@$(FULL_SIZE) $(PYTEST) $(THOROUGH) $(PYTEST_ARGS)
stress: campaigns thorough ## both, the native stress tests, and ten minutes of fuzzing
	@$(MAKE) --no-print-directory cpp-dev CTEST_ARGS="-R stress --repeat until-fail:5"
	@$(MAKE) --no-print-directory fuzz FUZZ_SECONDS=600

stress-sample: $(BUILT) ## a sample of the stress tests, drawn by chance, in a few minutes; the seeds are printed
	@$(PYTEST) -raP $(STRESS) $(PYTEST_ARGS)

test-contract: $(BUILT) ## the contract tests; PATHWAYS_KIND=agents or far plays them on that kind of cluster
	@$(PYTEST) tests/python/contract $(PYTEST_ARGS)

contract-machines: $(BUILT) ## the contract tests over four machines: namespaces; without root, loopback addresses
	@PATHWAYS_KIND=namespaces $(PYTEST) tests/python/contract $(PYTEST_ARGS)

soak: $(BUILT) ## ten minutes of random programs against NumPy, under small budgets, while hosts are killed
	@python tests/stress/soak.py $(SOAK_ARGS)

networks: $(BUILT) ## machines and far clients behind slow, long and lossy lines, for an hour; needs root
	@python tests/stress/networks.py $(NETWORK_ARGS)
network-cuts: $(BUILT) ## the same behind lines that are cut, in ten minutes
	@python tests/stress/network_cuts.py $(NETWORK_ARGS)

lint: $(DEV) $(BUILT) ## ruff, mypy, cython-lint, clang-format, and clang-tidy where it is installed
	@python scripts/lint.py

format: $(DEV) ## rewrite Python and C++ in the house's format
	@ruff check --quiet --fix-only . && ruff format .
	@clang-format -i $(CXX_FILES)

bench: $(BENCH) $(BUILT) ## the benchmarks with their rivals; tables on the terminal
	@pathways bench micro
	@pathways bench transfer
	@for each in dispatch scale tenants mpmd; do python -m benchmarks.$$each || exit 1; done

wheel: $(DEV) ## build a wheel into dist/ and check it in a clean environment
	@python scripts/check_wheel.py

docs: $(SITE) $(BUILT) ## build the site in build/docs: links are checked, notebooks run; and run the pages' examples
	@sphinx-build -q --fail-on-warning --keep-going -c docs/site -d build/doctrees . build/docs
	@python -m pytest -q $(addprefix tests/python/repository/test_,docs.py reference.py)
	@echo "build/docs/index.html"

setup: $(BUILT) ## only set up the environment and build
setup-dev: $(DEV) ## set up what `make lint` and `make wheel` need, too

clean: ## remove the environment and everything that was built
	@rm -rf $(VENV) build dist wheelhouse

$(VENV)/.made:
	@scripts/bootstrap venv $(VENV)
	@touch $@

$(DEPS): $(VENV)/.made pyproject.toml
	@scripts/bootstrap deps $(VENV) cmake test demo
	@touch $@

$(DEV): $(DEPS)
	@scripts/bootstrap deps $(VENV) cmake test demo dev
	@touch $@

$(SITE): $(DEPS)
	@scripts/bootstrap deps $(VENV) cmake test demo docs
	@touch $@

$(BENCH): $(DEPS)
	@scripts/bootstrap deps $(VENV) cmake test demo bench
	@touch $@

$(BUILT): $(DEPS) $(NATIVE)
	@scripts/bootstrap build $(VENV)
	@touch $@
