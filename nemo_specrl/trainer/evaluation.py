"""Evaluation on held-out prompts: accuracy, length, entropy, and the distance from the start."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nemo_specrl.monitoring import heartbeat
from nemo_specrl.monitoring import names as metric
from nemo_specrl.trainer.data.dataset import Problem
from nemo_specrl.trainer.generation import Engine
from nemo_specrl.trainer.policy import Policy, Sample
from nemo_specrl.trainer.recipe import Recipe

__all__ = ["evaluate"]


@heartbeat.section("evaluation")
def evaluate(
    recipe: Recipe,
    problems: Sequence[Problem],
    generation: Engine,
    policy: Policy,
) -> dict[str, float]:
    """Sample responses to held-out problems as in training, and measure them.

    Entropy and KL divergence are Monte Carlo estimates over these responses, nats per token.

    Returns:
        metrics by name (docs/reference/metrics.md).
    """
    algorithm = recipe.algorithm
    groups = generation.heldout(
        [problem.prompt for problem in problems], algorithm.val_num_generations_per_prompt
    )
    pairs = [
        (problem, response)
        for problem, group in zip(problems, groups, strict=True)
        for response in group
    ]
    tokens = sum(r.length for _, r in pairs)
    metrics = {
        metric.HELDOUT_ACCURACY: float(np.mean([p.reward(r.tokens) for p, r in pairs])),
        metric.HELDOUT_LENGTH: tokens / len(pairs),
        metric.HELDOUT_ENTROPY: -float(sum(r.logprobs.sum() for _, r in pairs)) / tokens,
        metric.HELDOUT_TOKENS: tokens,
        metric.HELDOUT_DECODE_S: generation.heldout_s,
    }
    if algorithm.val_kl_to_start:
        samples = [Sample.to_score(p.prompt, r.tokens) for p, r in pairs]
        policy.reload()
        now = np.concatenate(policy.logprobs(samples))
        start = np.concatenate(policy.reference_logprobs(samples))
        policy.offload()
        made = np.concatenate([r.made for _, r in pairs])
        metrics[metric.HELDOUT_KL_TO_START] = float((now - start)[made].mean())
    return metrics
