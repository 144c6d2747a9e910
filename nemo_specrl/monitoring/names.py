"""The names of a run's metrics, used by everything that writes or reads them.

A step's record in metrics.jsonl has values under these names; TensorBoard and NeMo-RL's logger have
them under ``train/``, and Prometheus under names made from these (``prometheus``). Names that end
in ``_s`` are seconds. The names of what the engine, the cache and the drift monitor report begin
with ``spec_rl/``.
"""

from __future__ import annotations

PREFIX = "spec_rl/"
"""Prefix of the engine's, the cache's and the drift monitor's metrics."""
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
"""Look-up, verification, decoding and assembly, seconds."""
VERIFY_S = "verify_s"
"""Verification, a part of ``rollout_s``, seconds."""
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
"""Mean over rows decoded without a draft."""
REUSED_REWARD = "reused_reward"
"""Mean over rows with a draft."""
REWARD_FAILURES = "reward_failures"
"""Rows whose reward raised an error or was not finite, and therefore counts as 0."""
TRUNCATED_FRACTION = "truncated_fraction"
"""Share of responses that were cut off at the maximum length."""
FRESH_ROWS = "fresh_rows"
"""Rows decoded without a draft."""
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
"""Mean ratio of the policy's probabilities to those of the clip anchor."""
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

# --- prefix reuse ---------------------------------------------------------------------------------

DRAFT_COVERAGE = "spec_rl/draft_coverage"
"""Share of rows with a draft."""
FULL_REUSE_RATIO = "spec_rl/full_reuse_ratio"
"""Share of drafts accepted to their end."""
ACCEPTED_TOKENS_MEAN = "spec_rl/accepted_tokens_mean"
"""Accepted tokens of a draft, mean."""
ACCEPTED_FRACTION = "spec_rl/accepted_fraction"
"""Share of draft tokens that were accepted."""
REUSED_TOKEN_FRACTION = "spec_rl/reused_token_fraction"
"""Share of response tokens that come from drafts."""
ENGINE_DECODED_TOKENS = "spec_rl/decoded_tokens"
"""``decoded_tokens`` as the engine counts them."""
ENGINE_RESPONSE_TOKENS = "spec_rl/response_tokens"
"""``response_tokens`` as the engine counts them."""
ENGINE_HELDOUT_TOKENS = "spec_rl/heldout_tokens"
"""``heldout_tokens`` in NeMo-RL."""
ENGINE_PUT_OFF_PROMPTS = "spec_rl/put_off_prompts"
"""``put_off_prompts`` in NeMo-RL."""
ENGINE_PUT_OFF_TOKENS = "spec_rl/put_off_tokens"
"""``put_off_tokens`` in NeMo-RL."""
RECOMPUTED_TOKENS = "spec_rl/recomputed_tokens"
"""Prefix tokens that a continuation did not find in the prefix cache."""
REFUSED_DRAFTS = "spec_rl/refused_drafts"
"""Drafts that could not be verified; their rows were decoded plainly."""
UNCACHED_ROWS = "spec_rl/uncached_rows"
"""Rows kept out of the cache because their tokens or log-probs are invalid."""
UNCACHED_CONVERSATIONS = "spec_rl/uncached_conversations"
"""Conversations kept out of the cache because no worker knows one of their turns (NeMo-Gym)."""
REPLAYED_ROWS = "spec_rl/replayed_rows"
"""Rows taken from the journal of a process that died."""
NOISE_PREFIX_TOKENS = "spec_rl/noise_prefix_tokens"
"""Accepted prefix that rounding alone allows, tokens."""
LOOKUP_S = "spec_rl/lookup_s"
"""Look-up of drafts, seconds."""
ENGINE_VERIFY_S = "spec_rl/verify_s"
"""Verification, seconds."""
DECODE_S = "spec_rl/decode_s"
"""Decoding, seconds."""
ASSEMBLY_S = "spec_rl/assembly_s"
"""Judging, assembling outputs and caching them, seconds."""

# --- trees ----------------------------------------------------------------------------------------

TREE_TOKENS_PER_STEP = "spec_rl/tree_tokens_per_step"
"""Mean number of tokens of a row per step of the engine."""
TREE_DRAFTED_TOKENS = "spec_rl/tree_drafted_tokens"
"""Draft tokens from trees that were verified."""
TREE_ACCEPTED_FRACTION = "spec_rl/tree_accepted_fraction"
"""Share of these verified tokens that were accepted."""
TREE_DRAFT_LENGTH = "spec_rl/tree_draft_length"
"""Draft tokens verified for a row in a step of the engine, mean."""
TREE_LEAST_CHANCE = "spec_rl/tree_least_chance"
"""Chance of being accepted at which drafts end, 1 if no token was drafted."""
TREE_REQUESTS_PER_ROW = "spec_rl/tree_requests_per_row"
"""Requests to the engine for a row, in rounds."""
TREE_S = "spec_rl/tree_s"
"""Time of the proposer, a part of ``decode_s``, seconds."""
RUN_AHEAD_ROWS = "spec_rl/run_ahead_rows"
"""Rollouts of the next batch's prompts that run-ahead has begun."""
RUN_AHEAD_TOKENS = "spec_rl/run_ahead_tokens"
"""Tokens decoded by run-ahead."""

# --- the cache ------------------------------------------------------------------------------------

CACHE_ERRORS = "spec_rl/cache_errors"
"""Calls to the cache that failed or were given up."""
CACHE_PROMPTS = "spec_rl/cache_prompts"
"""Prompts in the store."""
CACHE_ROLLOUTS = "spec_rl/cache_rollouts"
"""Rollouts in the store."""
CACHE_BYTES = "spec_rl/cache_bytes"
"""Bytes in use."""
CACHE_MEMORY_BYTES = "spec_rl/cache_memory_bytes"
"""The part of ``cache_bytes`` that is in memory, because the folder is on a tmpfs."""
CACHE_MAX_BYTES = "spec_rl/cache_max_bytes"
"""The cap of ``cache_bytes``."""
CACHE_HIT_FRACTION = "spec_rl/cache_hit_fraction"
"""Share of prompts that were found since the run (re)started."""
CACHE_EVICTED_PROMPTS = "spec_rl/cache_evicted_prompts"
"""Prompts removed to make room since the run (re)started."""
CORRUPT_RECORDS = "spec_rl/corrupt_records"
"""Damaged records that were skipped since the run (re)started."""
DISK_USED_FRACTION = "spec_rl/disk_used_fraction"
"""Used share of the store's disk, whoever uses it."""
CACHE_NODES = "spec_rl/cache_nodes"
"""Nodes that hold parts of the cache (NeMo-RL)."""
CACHE_MISSING_COPIES = "spec_rl/cache_missing_copies"
"""Copies of partitions below ``replicas`` (NeMo-RL)."""

# --- the drift monitor ----------------------------------------------------------------------------

GAPS = ("reward", "length", "logprob")
"""Quantities in which fresh and reused rows are compared: ``config.QUANTITIES``, not imported from
there, since the command line would then wait for pydantic before its first line."""
STALENESS = "staleness"
"""Mean loss of log-prob of a row's reused tokens since birth, nats."""
DRIFT_QUANTITIES = (*GAPS, STALENESS)
FRESH_FRACTION = "spec_rl/fresh_fraction"
"""Share of fresh rows in the next step."""


def drift(quantity: str) -> str:
    """Name of the difference of fresh and reused rows in one of ``DRIFT_QUANTITIES``."""
    return f"spec_rl/{quantity}" if quantity == STALENESS else f"spec_rl/{quantity}_gap"


def drift_z(quantity: str) -> str:
    """Name of that difference in standard errors."""
    return f"{drift(quantity)}_z"


def drifts(quantity: str) -> str:
    """Name of the flag that is 1 if the difference exceeds both tolerance and chance, else 0."""
    return f"spec_rl/{quantity}_drifts"


COUNTS = frozenset(
    {
        DECODED_TOKENS,
        RESPONSE_TOKENS,
        HELDOUT_TOKENS,
        ENGINE_DECODED_TOKENS,
        ENGINE_RESPONSE_TOKENS,
        ENGINE_HELDOUT_TOKENS,
        RECOMPUTED_TOKENS,
        REFUSED_DRAFTS,
        UNCACHED_ROWS,
        UNCACHED_CONVERSATIONS,
        REPLAYED_ROWS,
        PUT_OFF_PROMPTS,
        PUT_OFF_TOKENS,
        ENGINE_PUT_OFF_PROMPTS,
        ENGINE_PUT_OFF_TOKENS,
        CACHE_ERRORS,
        TREE_DRAFTED_TOKENS,
        RUN_AHEAD_ROWS,
        RUN_AHEAD_TOKENS,
    }
)
"""Metrics, besides durations, that add up over steps; all others are states or shares."""
