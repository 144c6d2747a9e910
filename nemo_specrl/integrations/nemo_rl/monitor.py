"""The drift monitor in NeMo-RL's loop: do reused rows still teach what fresh ones do?

GRPO's trainers hand the rows of each step, with their rewards, to their logger for
``train_data_step<N>.jsonl`` (``log_batched_dict_as_jsonl``: algorithms/grpo.py, grpo_sync.py).
PPO's do not all write them, but train on a batch that has the rewards (algorithms/ppo.py,
``policy.train``). These rows are compared here; the cache says which of them were fresh.
"""

from __future__ import annotations

import json
import logging
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nemo_specrl.cache.cluster.driver import ClusterCache
from nemo_specrl.config import SpecRLConfig
from nemo_specrl.integrations.nemo_rl.anchor import birth_spans, same_tokens
from nemo_specrl.rollout import Rollout, prompt_key
from nemo_specrl.speculation.drafts import Row, is_fresh
from nemo_specrl.speculation.drift import DriftMonitor

__all__ = ["Watch", "watch", "watch_training"]

STATE = "monitor.json"
"""In a checkpoint's folder of the cache."""

logger = logging.getLogger(__name__)


class Watch:
    """Compares the rows of each step of a run, and turns ``fresh_fraction`` where asked to.

    Args:
        cache: where the rollouts of the step are.
        config: the ``spec_rl:`` block.
        seed: of the run.
        steps_per_epoch: batches in a pass over the prompts.
        set_fresh_fraction: called with ``fresh_fraction`` when ``monitor.auto`` has changed it.
        state: folder where :meth:`save` left what to go on from, or None.
    """

    def __init__(
        self,
        cache: ClusterCache,
        config: SpecRLConfig,
        *,
        seed: int,
        steps_per_epoch: int,
        set_fresh_fraction: Callable[[float], None],
        state: Path | None = None,
    ) -> None:
        self.cache, self.seed, self.set_fresh_fraction = cache, seed, set_fresh_fraction
        self.monitor = DriftMonitor(
            config.monitor,
            fresh_fraction=config.effective_fresh_fraction,
            steps_per_epoch=steps_per_epoch,
        )
        if state is not None and (state / STATE).exists():
            self.monitor.restore(json.loads((state / STATE).read_text()))
            self.set_fresh_fraction(self.monitor.fresh_fraction)

    def save(self, folder: Path) -> None:
        """Write what a resumed run goes on from."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / STATE).write_text(json.dumps(self.monitor.state()))

    def update(self, rows: Mapping[str, Sequence[Any]]) -> dict[str, float]:
        """Count the rows of a step; the metrics of the comparison.

        Args:
            rows: what NeMo-RL logs of them: ``token_ids``, ``input_lengths``, ``token_loss_mask``,
                ``prev_logprobs``, and ``rewards`` (``filtered_rewards`` under dynamic sampling).
        """
        rewards = rows["filtered_rewards"] if "filtered_rewards" in rows else rows["rewards"]
        spans = [
            _first_response(ids, mask, length)
            for ids, mask, length in zip(
                rows["token_ids"], rows["token_loss_mask"], rows["input_lengths"], strict=True
            )
        ]
        left = {key: list(found) for key, found in self.cache.get({k for k, _ in spans}).items()}
        fraction = self.monitor.fresh_fraction
        groups: list[bytes] = []
        fresh: list[bool] = []
        values: dict[str, list[float]] = {"reward": [], "length": [], "logprob": []}
        stale: list[float] = []
        for i, (key, tokens) in enumerate(spans):
            rollout = same_tokens(left.get(key, []), tokens)
            if rollout is None:  # evicted, or its node is gone: of unknown kind
                continue
            left[key].remove(rollout)  # one of equal rollouts may be fresh and the other not
            mask = np.asarray(rows["token_loss_mask"][i]) > 0
            logprobs = np.asarray(rows["prev_logprobs"][i], dtype=np.float64)
            groups.append(key)
            fresh.append(_was_fresh(rollout, self.seed, fraction))
            values["reward"].append(float(rewards[i]))
            values["length"].append(float(mask.sum()))
            values["logprob"].append(float(logprobs[mask].mean()))
            if rollout.reused.any():
                lost = (rollout.birth_logprobs - rollout.logprobs)[rollout.reused]
                stale.append(float(lost.sum(dtype=np.float64)))
        if groups:
            self.monitor.update(
                groups,
                np.array(fresh),
                {name: np.array(v) for name, v in values.items()},
                np.array(stale),
            )
        if self.monitor.fresh_fraction != fraction:
            self.set_fresh_fraction(self.monitor.fresh_fraction)
        if groups and self.monitor.warning:
            logger.warning("%s (spec_rl.fresh_fraction is %.2f)", self.monitor.warning, fraction)
        return self.monitor.as_dict()


def watch(metrics_logger: Any, watching: Watch) -> None:
    """Have a logger of NeMo-RL pass on what it writes of each step; a failure costs no step.

    The metrics of the comparison go to the same logger, under ``train/spec_rl/``.
    """
    original = metrics_logger.log_batched_dict_as_jsonl

    def log_batched_dict_as_jsonl(to_log: Any, filename: str) -> Any:
        result = original(to_log, filename)
        step = re.fullmatch(r"train_data_step(\d+)\.jsonl", filename)
        if step is None or "token_ids" not in to_log:
            return result
        if compared := _compared(watching, lambda: to_log):
            metrics_logger.log_metrics(compared, int(step[1]), prefix="train")
        return result

    metrics_logger.log_batched_dict_as_jsonl = log_batched_dict_as_jsonl


def watch_training(policy: Any, metrics_logger: Any, watching: Watch) -> None:
    """Have a policy of PPO pass on what it is trained on; a failure costs no step.

    The metrics of the comparison go with those that the trainer logs of the step. A batch that is
    passed over several times (``ppo_epochs``) counts once.
    """
    original_train, original_log = policy.train, metrics_logger.log_metrics
    seen: weakref.ref[Any] | None = None
    to_log: dict[str, float] = {}

    def train(data: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        if seen is None or seen() is not data:
            seen = weakref.ref(data)
            to_log.update(_compared(watching, lambda: _rows(data)))
        return original_train(data, *args, **kwargs)

    def log_metrics(metrics: Any, step: int, prefix: str | None = "", **kwargs: Any) -> None:
        if prefix == "train":
            metrics = {**metrics, **to_log}
            to_log.clear()
        original_log(metrics, step, prefix, **kwargs)

    policy.train, metrics_logger.log_metrics = train, log_metrics


def _compared(watching: Watch, rows: Callable[[], Mapping[str, Sequence[Any]]]) -> dict[str, float]:
    """The metrics of the comparison; none where it failed."""
    try:
        return watching.update(rows())
    except Exception as error:  # what watches a run must not end it
        logger.warning("the drift monitor failed: %s: %s", type(error).__name__, error)
        return {}


def _rows(data: Any) -> dict[str, Sequence[Any]]:
    """A batch of PPO's under the names that NeMo-RL logs."""
    names = {"token_ids": "input_ids", "token_loss_mask": "token_mask"}
    same = ("input_lengths", "prev_logprobs", "rewards")
    return {name: data[names.get(name, name)].numpy() for name in (*names, *same)}


def _first_response(
    ids: Sequence[int], mask: Sequence[float], length: int
) -> tuple[bytes, np.ndarray]:
    """Key of a row's prompt and the tokens of its (first) response."""
    inside = np.asarray(mask[:length]) > 0
    tokens = np.asarray(ids[:length], dtype=np.int64)
    spans = birth_spans(inside)
    start, end = spans[0] if spans else (length, length)
    return prompt_key(tokens[:start]), tokens[start:end]


def _was_fresh(rollout: Rollout, seed: int, fresh_fraction: float) -> bool:
    """Whether the row was to be decoded plainly, whatever became of a draft.

    That no token was accepted would not do: a draft that fails at once is no sample of the policy.
    """
    if rollout.occurrence == 0:
        return True
    row = Row(rollout.key, rollout.sample_index)
    return is_fresh(row, rollout.occurrence, seed=seed, fresh_fraction=fresh_fraction)
