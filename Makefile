# make demo   set up, then GRPO on one CPU machine, with and without speculation, side by side
# make demo-language   the same on word problems with SmolLM2-135M, in less than 45 minutes
# make test   set up, then the test suite
# make test-slow   set up, then the tests that take minutes each
# make test-vllm VERSION=0.25.1   the engine's tests and a short training on another vLLM
# make test-v2   set up, then the tests of drafting in vLLM's V2 model runner, by Triton's interpreter
# make test-nemo NEMO_RL_HOME=DIR   the tests that run a checkout of NeMo-RL, on its vLLM (or VERSION=0.29.0)
# make test-language   PPO, DAPO and a Megatron policy on the model of `make demo-language`, a step each
# make lint   set up, then style, types, layers, shell scripts and Dockerfiles
# make audit  set up, then known vulnerabilities of the locked packages, where the index tells them

## Where Python may not write bytecode, as in many containers, each process would compile what it imports.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help setup demo language-model demo-language test-language test test-slow test-vllm test-v2 test-nemo lint audit clean

help:
	@sed -n 's/^# //p' Makefile

setup:
	@scripts/setup.sh

demo: setup
	.venv/bin/nemo-specrl compare examples/configs/grpo_sort_cpu.yaml --out results/demo

language-model: setup
	.venv/bin/python scripts/smollm2.py results/models/smollm2-gsm --adapter examples/models/smollm2-gsm-lora

demo-language: language-model
	.venv/bin/nemo-specrl compare examples/configs/grpo_gsm_smollm2_cpu.yaml --out results/demo-language

test: setup
	.venv/bin/python -m pytest -n 2 --dist loadfile -m "not slow"

test-slow: setup
	.venv/bin/python -m pytest -m slow

test-language: language-model
	SPECRL_LANGUAGE_MODEL=$(CURDIR)/results/models/smollm2-gsm .venv/bin/python -m pytest tests/trainer/test_language.py

test-vllm:
	scripts/test_vllm.sh $(VERSION)

test-v2:
	scripts/test_v2.sh

test-nemo:
	venv=$$(scripts/setup.sh nemo "$(abspath $(NEMO_RL_HOME))" $(VERSION)) && \
	$$venv/bin/python -m pip install --quiet --no-deps nvidia-resiliency-ext==0.4.1 defusedxml==0.7.1 && \
	NEMO_RL_HOME=$(abspath $(NEMO_RL_HOME)) $$venv/bin/python -m pytest tests/nemo_rl tests/slurm

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	.venv/bin/shellcheck -x $$(git ls-files '*.sh' '*.sub' '*.sbatch' .ci/run requirements/lock)
	.venv/bin/hadolint docker/*Dockerfile

audit: setup
	.venv/bin/uv tool run pip-audit --strict --no-deps --disable-pip -r requirements/cpu.lock

clean:
	rm -rf .venv .venv-vllm-* .venv-nemo-* results
