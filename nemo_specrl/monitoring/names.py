"""The names of a run's metrics, used by everything that writes or reads them.

A step's record in metrics.jsonl has values under these names; TensorBoard and NeMo-RL's logger have
them under ``train/``, and Prometheus under names made from these (``prometheus``). Names that end
in ``_s`` are seconds. The names of what the engine and the cache report begin with ``spec_rl/``.
"""

from __future__ import annotations

PREFIX = "spec_rl/"
"""Prefix of the engine's and the cache's metrics."""
AT_START = "_at_start"
"""Suffix of metrics that were evaluated before the first step."""

# --- the step -------------------------------------------------------------------------------------

STEP = "step"
"""Number of the step, from 1."""
TOTAL_STEPS = "total_steps"
"""Number of steps of the whole run."""
EPOCH = "epoch"
"""Pass over the data, from 0."""
POLICY_VERSION = "policy_version"
"""Version of the weights that made the rollouts."""
PROMPTS = "prompts"
"""Indices of the step's prompts, in order: a list."""
ROLLOUT_S = "rollout_s"
"""All rollouts of the step, seconds."""
TRAIN_S = "train_s"
"""Update and refit, seconds."""
STEP_S = "step_s"
"""The whole step without evaluation and checkpoint, seconds."""
EVAL_S = "eval_s"
"""Evaluation after the step, seconds."""
CHECKPOINT_S = "checkpoint_s"
"""Time that the run waited for the checkpoint before this step, seconds."""
DECODED_TOKENS = "decoded_tokens"
"""Tokens that the engine decoded."""
RESPONSE_TOKENS = "response_tokens"
"""Tokens of all responses."""

# --- rewards and losses ---------------------------------------------------------------------------

REWARD = "reward"
"""Mean over all rows."""
FRESH_REWARD = "fresh_reward"
"""Mean over rows that reused no prefix (``preset: reuse``)."""
REUSED_REWARD = "reused_reward"
"""Mean over rows that reused a prefix."""
REWARD_FAILURES = "reward_failures"
"""Rows whose reward raised an error or was not finite, and therefore counts as 0."""
TRUNCATED_FRACTION = "truncated_fraction"
"""Share of responses that were cut off at the maximum length."""
FRESH_ROWS = "fresh_rows"
"""Rows that reused no prefix (``preset: reuse``)."""
REWARD_STD_IN_GROUP = "reward_std_in_group"
"""Mean over groups of the rewards' standard deviation."""
GROUPS_WITHOUT_ADVANTAGE = "groups_without_advantage"
"""Share of groups whose rewards are all equal."""
DISTINCT_IN_GROUP = "distinct_in_group"
"""Mean over groups of the number of different responses."""
RESPONSE_LENGTH = "response_length"
"""Mean length of the responses, tokens."""
PUT_OFF_PROMPTS = "put_off_prompts"
"""Prompts that the step put off (partial rollouts)."""
PUT_OFF_TOKENS = "put_off_tokens"
"""Tokens of the rows of these prompts so far."""
LOSS = "loss"
"""The policy's loss."""
VALUE_LOSS = "value_loss"
"""The value model's loss (PPO)."""
KL = "kl"
"""Estimate of the divergence from the reference policy, nats per token."""
RATIO = "ratio"
"""Mean ratio of the policy's probabilities to those before the update."""
CLIP_FRACTION = "clip_fraction"
"""Share of tokens whose gradient is stopped by clipping."""
GRAD_NORM = "grad_norm"
"""Norm of the gradient before it is clipped."""

# --- held-out prompts, where evaluated ------------------------------------------------------------

HELDOUT_ACCURACY = "heldout_accuracy"
"""Mean reward of held-out responses."""
HELDOUT_LENGTH = "heldout_length"
"""Mean length of held-out responses, tokens."""
HELDOUT_ENTROPY = "heldout_entropy"
"""Entropy of the policy on held-out responses, nats per token."""
HELDOUT_KL_TO_START = "heldout_kl_to_start"
"""Divergence from the run's first weights, nats per token."""
HELDOUT_TOKENS = "heldout_tokens"
"""Tokens of held-out responses."""
HELDOUT_DECODE_S = "heldout_decode_s"
"""Plain decoding of held-out responses, seconds."""

# --- lossless drafting ----------------------------------------------------------------------------

TOKENS_PER_STEP = "spec_rl/tokens_per_step"
"""Mean number of tokens of a row per step of the engine; 1 without drafts."""
DRAFTED_TOKENS = "spec_rl/drafted_tokens"
"""Draft tokens that were verified."""
ACCEPTED_TOKENS = "spec_rl/accepted_tokens"
"""Draft tokens that were accepted."""
DRAFT_ACCEPTED_FRACTION = "spec_rl/draft_accepted_fraction"
"""Share of these that were accepted."""
DRAFT_LENGTH = "spec_rl/draft_length"
"""Draft tokens verified for a row in a step of the engine, mean."""
RUN_AHEAD_ROWS = "spec_rl/run_ahead_rows"
"""Rollouts of the next batch's prompts that run-ahead has begun."""
RUN_AHEAD_TOKENS = "spec_rl/run_ahead_tokens"
"""Tokens decoded by run-ahead."""
ENGINE_DECODED_TOKENS = "spec_rl/decoded_tokens"
"""``decoded_tokens`` in NeMo-RL."""
ENGINE_RESPONSE_TOKENS = "spec_rl/response_tokens"
"""``response_tokens`` in NeMo-RL."""

# --- histories and responses, in the engine core --------------------------------------------------

DRAFTING = "spec_rl/drafting"
"""1 where engines draft from history, 0 where this vLLM is not known or cannot."""
HISTORIES_FOUND = "spec_rl/histories_found"
"""Look-ups that found a history: one for the requests of a prompt that run at once."""
HISTORIES_LATE = "spec_rl/histories_late"
"""Look-ups that did not answer within ``cache.deadline_ms``."""
HISTORIES_REFUSED = "spec_rl/histories_refused"
"""Look-ups that were not made since too many waited, and responses with unknown tokens."""
HISTORY_BYTES = "spec_rl/history_bytes"
"""Earlier responses that were handed to workers, bytes."""
RESPONSES_KEPT = "spec_rl/responses_kept"
"""Responses that the cache took."""
RESPONSES_DROPPED = "spec_rl/responses_dropped"
"""Responses that the cache did not take, or that did not fit into the writer's queue."""

ENGINE_FAILURES = "spec_rl/engine_failures"
"""Requests whose history or response was lost to an error."""
REFITS_WITHOUT_ACCEPTANCE = "spec_rl/refits_without_acceptance"
"""Times that drafts were verified before each of two refits and none was accepted."""

# --- prefix reuse ---------------------------------------------------------------------------------

REUSE_COVERAGE = "spec_rl/reuse_coverage"
"""Share of rows for which there was an earlier response to verify."""
REUSE_ACCEPTED_FRACTION = "spec_rl/reuse_accepted_fraction"
"""Share of these responses' tokens that were accepted."""
REUSED_WHOLE_FRACTION = "spec_rl/reused_whole_fraction"
"""Share of these responses that were accepted to their end."""
REUSED_TOKEN_FRACTION = "spec_rl/reused_token_fraction"
"""Share of response tokens that come from earlier responses."""
VERIFIED_FRACTION = "spec_rl/verified_fraction"
"""Share of draft tokens that were verified; the rest came behind a rejection."""
PREFILLED_TOKENS = "spec_rl/prefilled_tokens"
"""Tokens that verification prefilled, prompts included."""
RECOMPUTED_TOKENS = "spec_rl/recomputed_tokens"
"""Accepted tokens that a continuation did not find in the prefix cache."""
REFUSED_DRAFTS = "spec_rl/refused_drafts"
"""Earlier responses that could not be verified; their rows were decoded plainly."""
NOISE_PREFIX_TOKENS = "spec_rl/noise_prefix_tokens"
"""Accepted prefix that rounding alone allows, tokens."""
REWARD_GAP = "spec_rl/reward_gap"
"""Mean reward of fresh rows minus that of reused ones."""
REWARD_GAP_Z = "spec_rl/reward_gap_z"
"""That difference in standard errors."""
DRIFTS = "spec_rl/drifts"
"""1 if the difference is more than chance, else 0."""

# --- the cache ------------------------------------------------------------------------------------

CACHE_ERRORS = "spec_rl/cache_errors"
"""Calls to the cache that failed or were given up."""
CACHE_PROMPTS = "spec_rl/cache_prompts"
"""Prompts in the store."""
CACHE_RESPONSES = "spec_rl/cache_responses"
"""Responses in the store."""
CACHE_BYTES = "spec_rl/cache_bytes"
"""Bytes in use on disk."""
CACHE_MAX_BYTES = "spec_rl/cache_max_bytes"
"""The cap of ``cache_bytes``."""
CACHE_EVICTED_PROMPTS = "spec_rl/cache_evicted_prompts"
"""Prompts removed to make room since the run (re)started."""
CACHE_DAMAGED_RECORDS = "spec_rl/cache_damaged_records"
"""Damaged records that were skipped since the run (re)started."""
DISK_USED_FRACTION = "spec_rl/disk_used_fraction"
"""Used share of the store's disk, whoever uses it."""
CACHE_NODES = "spec_rl/cache_nodes"
"""Nodes that hold parts of the cache (Ray)."""

ENGINE_COUNTS = (
    HISTORIES_FOUND,
    HISTORIES_LATE,
    HISTORIES_REFUSED,
    HISTORY_BYTES,
    RESPONSES_KEPT,
    RESPONSES_DROPPED,
    ENGINE_FAILURES,
    REFITS_WITHOUT_ACCEPTANCE,
    ENGINE_RESPONSE_TOKENS,
    DRAFTED_TOKENS,
    ACCEPTED_TOKENS,
)
"""What an engine counts from its start on."""

COUNTS = frozenset(
    {
        DECODED_TOKENS,
        RESPONSE_TOKENS,
        HELDOUT_TOKENS,
        ENGINE_DECODED_TOKENS,
        ENGINE_RESPONSE_TOKENS,
        RECOMPUTED_TOKENS,
        REFUSED_DRAFTS,
        PUT_OFF_PROMPTS,
        PUT_OFF_TOKENS,
        HISTORIES_FOUND,
        HISTORIES_LATE,
        HISTORIES_REFUSED,
        HISTORY_BYTES,
        RESPONSES_KEPT,
        RESPONSES_DROPPED,
        ENGINE_FAILURES,
        ACCEPTED_TOKENS,
        CACHE_ERRORS,
        DRAFTED_TOKENS,
        RUN_AHEAD_ROWS,
        RUN_AHEAD_TOKENS,
    }
)
"""Metrics, besides durations, that add up over steps; all others are states or shares."""
