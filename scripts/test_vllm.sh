#!/usr/bin/env bash
# Run the engine's tests and a short training on a version of vLLM other than the default one, in an
# environment of its own, .venv-vllm-VERSION. docs/reference/versions.md has the results.
#
#   scripts/test_vllm.sh 0.25.1            # tests/engine, tests/drafting, tests/reuse, three epochs
#   scripts/test_vllm.sh 0.25.1 FILE ...   # these tests alone, as continuous integration does
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=${1:?give a version of vLLM: 0.25.1}
shift
venv=$(scripts/setup.sh vllm "$version")
if (($#)); then
    exec "$venv/bin/python" -m pytest -n 2 --dist loadfile "$@"
fi
"$venv/bin/python" -m pytest -n 2 --dist loadfile tests/engine tests/drafting tests/reuse

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$venv/bin/nemo-specrl" train examples/configs/grpo_sort_cpu.yaml \
    grpo.max_num_epochs=3 grpo.num_prompts_per_step=4 grpo.num_generations_per_prompt=4 \
    grpo.val_at_start=false grpo.val_at_end=false data.num_prompts=8 \
    policy.train_global_batch_size=16 policy.generation.vllm_cfg.precision=float32 \
    checkpointing.checkpoint_dir="$folder" logger.log_dir="$folder" logger.tensorboard_enabled=false
# Two steps an epoch. Later epochs draft from the earlier ones.
"$venv/bin/python" - "$folder/metrics.jsonl" <<'PYTHON'
import json
import sys

with open(sys.argv[1]) as file:
    steps = [json.loads(line) for line in file]
gained = [step["spec_rl/tokens_per_step"] for step in steps]
assert len(steps) == 6, f"{len(steps)} steps instead of 6"
assert min(gained[4:]) > max(1.5, max(gained[:2])), f"tokens of a row per engine step: {gained}"
print("3 epochs of training: tokens of a row per engine step " + ", ".join(f"{g:.1f}" for g in gained))
PYTHON
