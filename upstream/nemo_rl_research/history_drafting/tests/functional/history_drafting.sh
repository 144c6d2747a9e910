#!/bin/bash
# Four steps of GRPO on one GPU: siblings' drafts are accepted, and log-probs agree.
set -eou pipefail

SCRIPT_DIR=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)
NEMO_RL=$(realpath "$SCRIPT_DIR/../../../..")
EXP_DIR=$SCRIPT_DIR/history_drafting
rm -rf "$EXP_DIR"
mkdir -p "$EXP_DIR"
cd "$NEMO_RL"

uv run examples/run_grpo.py \
    --config research/history_drafting/configs/grpo_math_1B.yaml \
    policy.model_name=Qwen/Qwen3-0.6B \
    grpo.num_prompts_per_step=4 \
    grpo.num_generations_per_prompt=4 \
    grpo.max_num_steps=4 \
    grpo.val_period=0 \
    grpo.val_at_start=false \
    policy.train_global_batch_size=16 \
    policy.train_micro_batch_size=1 \
    policy.generation.vllm_kwargs.additional_config.spec_rl.cache.dir="$EXP_DIR/cache" \
    cluster.gpus_per_node=1 \
    logger.log_dir="$EXP_DIR/logs" \
    logger.tensorboard_enabled=true \
    logger.wandb_enabled=false \
    checkpointing.enabled=false \
    "$@" 2>&1 | tee "$EXP_DIR/run.log"

uv run tests/json_dump_tb_logs.py "$EXP_DIR/logs" --output_path "$EXP_DIR/metrics.json"
uv run tests/check_metrics.py "$EXP_DIR/metrics.json" \
    'max(data["train/token_mult_prob_error"]) < 1.1' \
    'max(data["train/vllm/spec_acceptance_length"]) > 1'
