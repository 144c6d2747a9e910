"""Conversations that were led by HTTP, on their way into the cache; needs no NeMo-RL."""

import logging

import numpy as np
import torch

from nemo_specrl import prompt_key
from nemo_specrl.engine.policy_version import TokenVersions
from nemo_specrl.engine.served_requests import ServedTurn
from nemo_specrl.nemo_rl.conversations import conversations
from nemo_specrl.nemo_rl.hooks import Hooks
from nemo_specrl.nemo_rl.metrics_log import StepLog
from nemo_specrl.nemo_rl.rollout_metadata import MetadataLog, MetadataTable
from tests.support.nemo_rl.steps import outputs_of, step

ROOT, FIRST, SAID, SECOND = [1, 5, 6], [7, 8, 2], [1, 9], [10, 2]
OTHER = [1, 5]  # a beginning of the other root
LENGTH = 12


def versions_of(*runs):
    versions = TokenVersions()
    for start, version in runs:
        versions.begin(start, version)
    return versions


def turn(prompt, tokens, versions):
    return ServedTurn(prompt, tokens, versions, prompt_key(prompt))


def batch_of(*rows):
    """A batch of NeMo-RL's: each row is a list of what others have said, and what the policy."""
    ids, masks, lengths = [], [], []
    for parts in rows:
        tokens = [token for part in parts for token in part]
        mask = [i % 2 for i, part in enumerate(parts) for _ in part]
        padding = [0] * (LENGTH - len(tokens))
        ids.append(tokens + padding)
        masks.append(mask + padding)
        lengths.append(len(tokens))
    ids, masks, lengths = map(torch.tensor, (ids, masks, lengths))
    logprobs = -masks.float() / 2
    return {
        "input_ids": ids,
        "token_mask": masks,
        "input_lengths": lengths,
        "generation_logprobs": logprobs,
    }


def test_a_conversation_is_a_response_to_its_root():
    log = MetadataLog(births=False)
    later = [*ROOT, *FIRST, *SAID]
    for _ in range(2):  # rows of a group may be equal
        log.note_turn(turn(ROOT, FIRST, versions_of((0, 3), (1, 4))))
        log.note_turn(turn(later, SECOND, versions_of((0, 5))))
    log.note_turn(turn(OTHER, SECOND, versions_of((0, 4))))
    log.note_turn(turn(ROOT, SECOND, versions_of((0, 4))))  # never trained on
    batch = batch_of([ROOT, FIRST, SAID, SECOND], [OTHER, SECOND], [ROOT, FIRST, SAID, SECOND])
    one, other, same = conversations(batch, MetadataTable(log.take))
    assert one.key == same.key == prompt_key(ROOT) and other.key == prompt_key(OTHER)
    assert (one.sample_index, other.sample_index, same.sample_index) == (0, 0, 1)
    assert one.tokens.tolist() == [*FIRST, *SAID, *SECOND] and other.tokens.tolist() == SECOND
    assert (one.policy_version, other.policy_version) == (5, 4)
    assert one.birth_versions.tolist() == [3, 4, 4, 5, 5, 5, 5]
    assert one.logprobs.tolist() == [-0.5] * 3 + [0] * 2 + [-0.5] * 2
    assert not one.raw  # nothing but a tree may draft from it


def test_what_is_not_known_is_left_out():
    log = MetadataLog(births=False)
    log.note_turn(turn(ROOT, FIRST, versions_of((0, 3))))
    log.note_turn(turn(OTHER, SECOND, versions_of((0, 3))))
    rows, rollouts = step([7], np.random.default_rng(0))  # the engine has put these itself
    log.note(outputs_of(rows, rollouts))
    batch = batch_of(
        [ROOT, FIRST, SAID, SECOND],  # another engine has made the last turn
        [ROOT[:2], FIRST],  # as a prompt that nobody was asked for
        [[*OTHER, 3]],  # nothing of the policy's
        [OTHER, SECOND],
        [ids := rows["token_ids"][0][:3], rollouts[0].tokens.tolist()],
    )
    assert ids == rows["token_ids"][0][:3]
    [known] = conversations(batch, MetadataTable(log.take))
    assert known.key == prompt_key(OTHER)


def test_a_root_with_images_has_the_key_that_its_worker_knows():
    """Its tokens are those of other images, too."""
    log = MetadataLog(births=False)
    log.note_turn(ServedTurn(ROOT, FIRST, versions_of((0, 3)), b"k" * 16))
    [known] = conversations(batch_of([ROOT, FIRST]), MetadataTable(log.take))
    assert known.key == b"k" * 16


class Trainer:
    """NeMo-RL's policy and logger, and the plug-in's generation."""

    def __init__(self, broken=False):
        self.stored, self.trained, self.broken = [], 0, broken
        self.logged = []
        self.log = MetadataLog(births=False)
        records = MetadataTable(self.log.take)
        log = StepLog("run", None, total_steps=9)
        hooks = Hooks(
            self, records, None, anchor_at_birth=False, rewards_in_batch=False, log=log, served=True
        )
        hooks.install(policy=self, logger=self, checkpointer=None)

    def train(self, batch):
        self.trained += 1

    def log_metrics(self, metrics, step, prefix="", **kwargs):
        if prefix == "train":
            self.logged.append((step, metrics))

    def take_metrics(self):
        return {"spec_rl/rows": 2.0}, {}

    def store(self, rollouts):
        if self.broken:
            raise OSError("no shard")
        self.stored.append(rollouts)


class Batch(dict):
    """A dictionary that can be referred to weakly, as NeMo-RL's batches can."""


def test_a_batch_is_put_into_the_cache_once():
    trainer = Trainer()
    for version in (1, 2):
        trainer.log.note_turn(turn(ROOT, FIRST, versions_of((0, version))))
        batch = Batch(batch_of([ROOT, FIRST]))
        for _ in range(3):  # passes of an optimizer
            trainer.train(batch)
        trainer.log_metrics({}, version, prefix="timing/train")
    assert trainer.trained == 6
    assert [[r.policy_version for r in rollouts] for rollouts in trainer.stored] == [[1], [2]]


def test_conversations_that_are_left_out_are_counted():
    trainer = Trainer()
    for number, unknown in ((1, 2), (2, 0)):
        trainer.log.note_turn(turn(ROOT, FIRST, versions_of((0, number))))
        batch = Batch(batch_of([ROOT, FIRST], *[[OTHER, SECOND]] * unknown))
        for _ in range(3):
            trainer.train(batch)
        trainer.log_metrics({}, number, prefix="timing/train")
    assert trainer.logged == [
        (number, {"spec_rl/rows": 2.0, "spec_rl/uncached_conversations": unknown})
        for number, unknown in ((1, 2), (2, 0))
    ]


def test_a_cache_that_fails_costs_the_step_nothing(caplog):
    trainer = Trainer(broken=True)
    with caplog.at_level(logging.WARNING):
        trainer.train(Batch(batch_of([ROOT, FIRST])))
    assert trainer.trained == 1
    assert "conversations are not in the rollout cache: no shard" in caplog.text
