# make demo   set up, then GRPO on one CPU machine, with and without speculation, side by side
# make test   set up, then the whole test suite
# make lint   set up, then style, types, layers and shell scripts
.PHONY: help setup demo test lint clean

help:
	@sed -n 's/^# //p' Makefile

setup:
	@scripts/setup.sh

demo: setup
	.venv/bin/nemo-specrl compare examples/configs/grpo_arith_cpu.yaml --out results/demo

test: setup
	.venv/bin/python -m pytest

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	.venv/bin/shellcheck $$(git ls-files '*.sh' .ci/run requirements/lock)

clean:
	rm -rf .venv results
