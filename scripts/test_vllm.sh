#!/usr/bin/env bash
# Run the engine's tests and a short training on a version of vLLM other than the default one, in an
# environment of its own, .venv-vllm-VERSION. docs/reference/versions.md has the results.
#
#   scripts/test_vllm.sh 0.25.1            # tests/engine, tests/speculation, three epochs
#   scripts/test_vllm.sh 0.25.1 FILE ...   # these tests alone, as continuous integration does
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=${1:?give a version of vLLM: 0.25.1}
shift
venv=$(scripts/setup.sh vllm "$version")
if (($#)); then
    exec "$venv/bin/python" -m pytest -n 2 --dist loadfile "$@"
fi
"$venv/bin/python" -m pytest -n 2 --dist loadfile tests/engine tests/speculation

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$venv/bin/nemo-specrl" train examples/configs/grpo_sort_cpu.yaml \
    policy.generation.spec_rl.preset=faithful \
    grpo.max_num_epochs=3 grpo.num_prompts_per_step=4 grpo.num_generations_per_prompt=4 \
    grpo.val_at_start=false grpo.val_at_end=false data.num_prompts=8 \
    policy.train_global_batch_size=16 policy.generation.vllm_cfg.precision=float32 \
    checkpointing.checkpoint_dir="$folder" logger.log_dir="$folder" logger.tensorboard_enabled=false
# Two steps an epoch. In the third, most tokens come from drafts, and no draft has been refused.
"$venv/bin/python" - "$folder/metrics.jsonl" <<'PYTHON'
import json
import sys

with open(sys.argv[1]) as file:
    steps = [json.loads(line) for line in file]
reused = [step["spec_rl/reused_token_fraction"] for step in steps]
failures = sum(step["spec_rl/refused_drafts"] + step["spec_rl/cache_errors"] for step in steps)
assert len(steps) == 6, f"{len(steps)} steps instead of 6"
assert min(reused[4:]) > 0.5, f"share of reused tokens: {reused}"
assert failures == 0, f"{failures} refused drafts and cache errors"
print("3 epochs of training: share of reused tokens " + ", ".join(f"{r:.0%}" for r in reused))
PYTHON
