#!/usr/bin/env bash
# Ten steps of GRPO with Qwen3-0.6B on Megatron, over one node of 8 GPUs, and a check of the metrics that
# NeMo-RL logged of them. From the root of a NeMo-RL checkout, in its container:
#   $SPECRL/examples/check_megatron_node.sh [KEY=VALUE ...]
# The exit code is 0 if the run came to its end and every line of the table at the end has passed.
set -euo pipefail
SPECRL=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export SPECRL
logs=$PWD/logs/specrl_check_$(date +%Y%m%d_%H%M%S)

python -m nemo_specrl run examples/run_grpo.py \
    --config "$SPECRL/examples/configs/nemo_rl/grpo_qwen3_0.6b_megatron_tp2_pp2.yaml" \
    logger.log_dir="$logs" "$@"

# NeMo-RL's own scripts. The second one fails when a check does.
python tests/json_dump_tb_logs.py "$logs" --output_path "$logs/metrics.json"
checks=(
    'len(data["train/loss"]) == 10'
    # vLLM and Megatron give the same tokens the same log-probs: each refit has arrived whole.
    'max(data["train/token_mult_prob_error"]) < 1.05'
    # The policy learns from some groups, so that refits have something to bring.
    'max(data["train/grad_norm"]) > 0'
    # Siblings draft for each other from the first step on, earlier responses in the second epoch.
    'min(data["train/spec_rl/tokens_per_step"]) > 1'
    'mean(data["train/spec_rl/tokens_per_step"], 6) > mean(data["train/spec_rl/tokens_per_step"], 1, 6)'
    'min(data["train/spec_rl/drafting"]) == 1'
)
python tests/check_metrics.py "$logs/metrics.json" "${checks[@]}"
