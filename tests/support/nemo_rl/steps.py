"""Rows of a step as NeMo-RL's trainers log them, and the records of their rollouts."""

from collections import UserDict

import numpy as np
import torch
from vllm import CompletionOutput, RequestOutput

from nemo_specrl import Finish, Rollout, SpecRLConfig, prompt_key
from nemo_specrl.engine.outputs import RolloutInfo
from nemo_specrl.nemo_rl.drift_monitor import StepMonitor
from nemo_specrl.nemo_rl.rollout_metadata import MetadataLog, MetadataTable

GROUP, WIDTH = 8, 12


def step(prompts, rng, *, version=3, fresh_fraction=0.2, remembered=0.0):
    """Columns of a step's rows, and their rollouts, of which the first tokens are reused.

    Reused rows are right with probability 0.4 + ``remembered``, fresh ones with 0.4.
    """
    names = ("token_ids", "token_loss_mask", "input_lengths", "rewards", "prev_logprobs")
    rows = {name: [] for name in names}
    rollouts = []
    for prompt in prompts:
        start = [1, prompt, 2]
        for sample_index in range(GROUP):
            tokens = rng.integers(5, 5000, rng.integers(3, WIDTH - 3)).tolist()
            fresh = bool(rng.random() < fresh_fraction)
            padding = WIDTH - len(start) - len(tokens)
            right = rng.random() < 0.4 + (0 if fresh else remembered)
            logprobs = [0.0] * len(start) + [-1.0 - sample_index] * len(tokens) + [0.0] * padding
            rows["token_ids"].append([*start, *tokens, *[0] * padding])
            rows["token_loss_mask"].append([0] * 3 + [1] * len(tokens) + [0] * padding)
            rows["input_lengths"].append(len(start) + len(tokens))
            rows["rewards"].append(float(right))
            rows["prev_logprobs"].append(logprobs)
            born = np.arange(len(tokens)) >= (0 if fresh else 2)
            rollouts.append(
                Rollout(
                    *(prompt_key(start), sample_index, tokens, np.zeros(len(tokens))),
                    *(Finish.STOP, version),
                    birth_logprobs=np.where(born, 0.0, -9.0),
                    birth_versions=np.where(born, version, version - 1),
                    fresh=fresh,
                )
            )
    return rows, rollouts


def outputs_of(rows, rollouts):
    """Request outputs of an engine that made these rollouts; a rollout may be None, for a loss."""
    outputs = []
    for ids, length, rollout in zip(
        rows["token_ids"], rows["input_lengths"], rollouts, strict=True
    ):
        if rollout is None:
            continue
        completion = CompletionOutput(0, "", rollout.tokens.tolist(), None, None)
        accepted = int((rollout.birth_versions < rollout.policy_version).sum())
        completion.spec_rl = RolloutInfo(rollout, accepted, accepted)
        prompt = ids[: length - len(rollout)]
        outputs.append(RequestOutput("", None, prompt, None, [completion], True))
    return outputs


class Workers:
    """Two workers' logs, and how often the driver has asked for their records."""

    def __init__(self, births=False):
        self.logs = [MetadataLog(births=births), MetadataLog(births=births)]
        self.asked = 0

    def make(self, rows, rollouts):
        outputs = outputs_of(rows, rollouts)
        half = len(outputs) // 2
        self.logs[0].note(outputs[:half])
        self.logs[1].note(outputs[half:])

    def take(self):
        self.asked += 1
        return [record for log in self.logs for record in log.take()]


def table_of(rows, rollouts, births=False, later=False):
    workers = Workers(births)
    workers.make(rows, rollouts)
    return MetadataTable(workers.take, later=later)


def monitor_of(
    records, changed=None, *, state=None, logprobs="prev_logprobs", loader_length=1, **options
):
    """A monitor with one step an epoch; ``changed`` gets what it sets ``fresh_fraction`` to."""
    set_fresh_fraction = (changed if changed is not None else []).append
    config = SpecRLConfig(enabled=True, **{"preset": "faithful", **options})
    return StepMonitor(
        records,
        config,
        loader_length=loader_length,
        logprobs=logprobs,
        set_fresh_fraction=set_fresh_fraction,
        state=state,
    )


class Batch(UserDict):
    """The batch that PPO trains on has the rows under other names, as tensors."""

    def __init__(self, rows):
        names = {"token_ids": "input_ids", "token_loss_mask": "token_mask"}
        super().__init__({names.get(k, k): torch.tensor(v) for k, v in rows.items()})
