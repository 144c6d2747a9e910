"""The drift monitor over what NeMo-RL's trainers log of a step; needs no NeMo-RL."""

import logging
from collections import UserDict

import numpy as np
import pytest
import torch

from nemo_specrl import Finish, Rollout, SpecRLConfig, prompt_key
from nemo_specrl.integrations.nemo_rl.anchor import anchor_at_birth
from nemo_specrl.integrations.nemo_rl.monitor import Watch, watch, watch_training
from nemo_specrl.speculation.drafts import Row, is_fresh
from tests.conftest import DictCache

SEED, GROUP, WIDTH = 3, 8, 12


def step(prompts, occurrence, rng, *, remembered=0.0):
    """Rows of a step as NeMo-RL logs them, and the rollouts that the cache has of them.

    Reused rows are right with probability 0.4 + ``remembered``, fresh ones with 0.4.
    """
    names = ("token_ids", "token_loss_mask", "input_lengths", "rewards", "prev_logprobs")
    rows = {name: [] for name in names}
    rollouts, fresh = [], []
    for prompt in prompts:
        start = [1, prompt, 2]
        for sample_index in range(GROUP):
            tokens = rng.integers(5, 5000, rng.integers(3, WIDTH - 3)).tolist()
            key = prompt_key(start)
            fresh.append(occurrence == 0 or is_fresh(Row(key, sample_index), occurrence, seed=SEED,
                                                fresh_fraction=0.2))  # fmt: skip
            length = len(start) + len(tokens)
            padding = WIDTH - length
            right = rng.random() < 0.4 + (0 if fresh[-1] else remembered)
            logprobs = [0.0] * len(start) + [-1.0 - sample_index] * len(tokens) + [0.0] * padding
            rows["token_ids"].append([*start, *tokens, *[0] * padding])
            rows["token_loss_mask"].append([0] * 3 + [1] * len(tokens) + [0] * padding)
            rows["input_lengths"].append(length)
            rows["rewards"].append(float(right))
            rows["prev_logprobs"].append(logprobs)
            rollouts.append(
                Rollout(
                    key,
                    sample_index,
                    tokens,
                    np.zeros(len(tokens)),
                    Finish.STOP,
                    occurrence,
                    occurrence=occurrence,
                )
            )
    return rows, rollouts, np.array(fresh)


def watching(cache, turned=None, **options):
    state = options.pop("state", None)
    config = SpecRLConfig(enabled=True, **options)
    turn = (turned if turned is not None else []).append
    return Watch(cache, config, seed=SEED, steps_per_epoch=1, set_fresh_fraction=turn, state=state)


def test_it_compares_fresh_with_reused_rows_of_a_prompt():
    rng = np.random.default_rng(0)
    rows, rollouts, fresh = step([7], 3, rng)
    got = watching(DictCache(rollouts)).update(rows)
    assert 0 < fresh.sum() < GROUP
    for name, values in (
        ("reward", np.array(rows["rewards"])),
        ("logprob", -1.0 - np.arange(GROUP)),
    ):
        expected = values[fresh].mean() - values[~fresh].mean()
        assert got[f"spec_rl/{name}_gap"] == pytest.approx(expected)


def test_a_cold_epoch_and_rows_that_the_cache_has_lost_compare_nothing():
    rng = np.random.default_rng(0)
    cold, rollouts, _ = step([7, 8], 0, rng)
    assert watching(DictCache(rollouts)).update(cold)["spec_rl/reward_gap"] == 0
    warm, _, _ = step([7, 8], 1, rng)
    assert watching(DictCache()).update(warm)["spec_rl/reward_gap"] == 0


def test_equal_rollouts_of_which_one_is_fresh_are_told_apart():
    rng = np.random.default_rng(0)
    rows, rollouts, fresh = step([7], 3, rng)
    for name in ("token_ids", "token_loss_mask", "input_lengths", "prev_logprobs"):
        rows[name] = [rows[name][0]] * GROUP
    tokens = rollouts[0].tokens
    same = [Rollout(r.key, r.sample_index, tokens, np.zeros(len(tokens)), Finish.STOP, 3,
    occurrence=3)
            for r in rollouts]  # fmt: skip
    made = watching(DictCache(same))
    made.update(rows)
    f = fresh.sum()
    assert made.monitor.gaps["length"].information == pytest.approx(f * (GROUP - f) / GROUP)


def test_under_dynamic_sampling_the_rewards_are_those_of_the_rows_kept():
    rng = np.random.default_rng(1)
    rows, rollouts, _ = step([7, 8], 3, rng)
    expected = watching(DictCache(rollouts)).update(rows)
    filtered = rows | {"filtered_rewards": rows["rewards"], "rewards": [1.0] * 99}
    assert watching(DictCache(rollouts)).update(filtered) == expected


def test_remembered_rows_raise_a_warning_and_turn_the_dial(caplog):
    turned = []
    cache = DictCache()
    made = watching(cache, turned, monitor={"auto": True})
    rng = np.random.default_rng(2)
    with caplog.at_level(logging.WARNING):
        for occurrence in range(1, 9):
            rows, rollouts, _ = step(range(10, 60), occurrence, rng, remembered=0.4)
            cache.put(rollouts)
            made.update(rows)
            if turned:
                break
    assert turned == [0.4]
    assert (
        "reuse drifts, reused rows are not what the policy would write (reward -0." in caplog.text
    )


def test_a_run_that_is_resumed_goes_on_from_what_was_seen(tmp_path):
    rng = np.random.default_rng(3)
    rows, rollouts, _ = step(range(10, 20), 3, rng)
    first = watching(DictCache(rollouts))
    first.update(rows)
    first.save(tmp_path)
    turned = []
    again = watching(DictCache(rollouts), turned, state=tmp_path)
    assert again.monitor.state() == first.monitor.state()
    assert turned == [0.2]
    assert watching(DictCache(rollouts), state=tmp_path / "none").monitor.steps == 0


class Logger:
    def __init__(self):
        self.files, self.metrics = [], []

    def log_batched_dict_as_jsonl(self, to_log, filename):
        self.files.append(filename)

    def log_metrics(self, metrics, step, prefix=""):
        self.metrics.append((step, prefix, metrics))


def test_the_trainers_logger_passes_its_rows_on(caplog):
    rows, rollouts, _ = step([7], 3, np.random.default_rng(0))
    log = Logger()
    watch(log, watching(DictCache(rollouts)))
    log.log_batched_dict_as_jsonl(rows, "train_data_step4.jsonl")
    log.log_batched_dict_as_jsonl(rows, "val_data_step4.jsonl")
    assert log.files == ["train_data_step4.jsonl", "val_data_step4.jsonl"]
    ((number, prefix, metrics),) = log.metrics
    assert (number, prefix) == (4, "train")
    assert metrics["spec_rl/fresh_fraction"] == 0.2
    with caplog.at_level(logging.WARNING):  # what it does not understand costs no step
        log.log_batched_dict_as_jsonl({"token_ids": [[1]]}, "train_data_step5.jsonl")
    assert "the drift monitor failed: KeyError" in caplog.text


class Batch(UserDict):
    """What PPO trains on has the rows under other names, as tensors."""

    def __init__(self, rows):
        names = {"token_ids": "input_ids", "token_loss_mask": "token_mask"}
        super().__init__({names.get(k, k): torch.tensor(v) for k, v in rows.items()})


class Policy:
    def __init__(self):
        self.trained = []

    def train(self, data, loss_fn):
        self.trained.append((data["prev_logprobs"].clone(), loss_fn))


def test_ppos_policy_passes_on_what_it_is_trained_on_once(caplog):
    rows, rollouts, _ = step([7], 3, np.random.default_rng(0))
    expected = watching(DictCache(rollouts)).update(rows)
    log, policy, made = Logger(), Policy(), watching(DictCache(rollouts))
    watch_training(policy, log, made)
    batch = Batch(rows)
    for _ in range(2):  # ppo_epochs
        policy.train(batch, "loss")
    assert made.monitor.steps == 1 and [loss for _, loss in policy.trained] == ["loss"] * 2
    log.log_metrics({"loss": 1.0}, 4, prefix="train")
    log.log_metrics({"loss": 2.0}, 5, prefix="train")
    log.log_metrics({"seconds": 1.0}, 5, prefix="timing/train")
    assert log.metrics[0] == (4, "train", {"loss": 1.0, **expected})
    assert [metrics for *_, metrics in log.metrics[1:]] == [{"loss": 2.0}, {"seconds": 1.0}]
    with caplog.at_level(logging.WARNING):
        policy.train(Batch({"prev_logprobs": rows["prev_logprobs"]}), "loss")
    assert "the drift monitor failed: " in caplog.text and len(policy.trained) == 3


def test_the_anchor_is_what_is_trained_from_and_nothing_else():
    """Reused tokens start at birth; whoever holds the batch still has the policy's log-probs."""
    rows, rollouts, _ = step([7], 3, np.random.default_rng(0))
    born = [
        Rollout(
            *(r.key, r.sample_index, r.tokens, r.logprobs, r.finish, 3),
            birth_logprobs=np.full(len(r), -9.0),
            birth_versions=np.where(np.arange(len(r)) < 2, 1, 3),
            occurrence=3,
        )
        for r in rollouts
    ]
    batch, policy = Batch(rows), Policy()
    before = batch["prev_logprobs"].clone()
    anchor_at_birth(policy, DictCache(born[:-1]))  # the last row's rollout is lost
    policy.train(batch, "loss")
    ((anchored, _),) = policy.trained
    assert torch.equal(batch["prev_logprobs"], before)
    expected = before.clone()
    expected[:-1, 3:5] = -9.0
    assert torch.equal(anchored, expected)
