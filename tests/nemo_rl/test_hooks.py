"""The hooks around NeMo-RL's policy, logger and checkpoint manager, and their order."""

import logging
import pickle
import resource
from pathlib import Path
from types import MethodType, SimpleNamespace

import numpy as np
import pytest
import torch
from ray import cloudpickle

from nemo_specrl.config import CACHE_FOLDER
from nemo_specrl.monitoring.metrics_file import MetricsFile, read_metrics
from nemo_specrl.nemo_rl import job_state
from nemo_specrl.nemo_rl.context import RunContext
from nemo_specrl.nemo_rl.hooks import Hooks, make_hooks
from nemo_specrl.nemo_rl.metrics_log import StepLog
from nemo_specrl.nemo_rl.rollout_metadata import MetadataTable
from tests.nemo_rl.test_context import recipe
from tests.support.nemo_rl.steps import GROUP, WIDTH, Batch, Workers, monitor_of, step


class Trainer:
    """NeMo-RL's side and the plug-in's parts, which write down in which order they are called."""

    def __init__(self, *, ppo=False, anchor=False, monitor=True, checkpointer=None, file=None):
        self.done, self.logged, self.trained = [], [], []
        self.workers = Workers(births=anchor)
        self.records = MetadataTable(self.workers.take)
        self.checkpointer = Main(self.done) if checkpointer is None else checkpointer
        self.monitor = monitor_of(self.records) if monitor else None
        if monitor:
            compare = self.monitor._compare
            self.monitor._compare = lambda rows: self.done.append("compare") or compare(rows)
            save = self.monitor.save
            self.monitor.save = lambda folder: self.done.append("save state") or save(folder)
        end_step = self.records.end_step
        self.records.end_step = lambda: self.done.append("end step") or end_step()
        self.hooks = Hooks(
            self,
            self.records,
            self.monitor,
            anchor_at_birth=anchor,
            rewards_in_batch=ppo,
            log=StepLog("run", file, total_steps=9),
        )
        self.hooks.install(policy=self, logger=self, checkpointer=self.checkpointer)

    def train(self, data, loss_fn, timer=None):
        self.done.append("train")
        self.trained.append((data["prev_logprobs"].clone(), loss_fn))
        return "results"

    def log_batched_dict_as_jsonl(self, to_log, filename):
        self.done.append(f"write {filename}")

    def log_metrics(self, metrics, step, prefix="", step_metric=None):
        self.done.append(f"log {prefix}")
        self.logged.append((step, prefix, metrics))

    def take_metrics(self):
        return {"spec_rl/rows": 8.0}, {"spec_rl_decoding": 1.0}

    def take_records(self):
        return self.workers.take()

    def set_fresh_fraction(self, fresh_fraction):
        self.done.append(f"set {fresh_fraction}")

    def save_cache(self, folder):
        self.done.append("save cache")
        folder.mkdir(parents=True)


class Policy:
    """NeMo-RL's, of which only this is wrapped."""

    def train(self, data):
        return f"trained on {data}"


class V070:
    """The checkpoint manager of v0.7.0."""

    def __init__(self, done):
        self.done = done

    def finalize_checkpoint(self, checkpoint_path):
        self.done.append("finalize")


class Main(V070):
    """The checkpoint manager of main."""

    def begin_finalization(self, checkpoint_path, wait_fn=None):
        self.done.append("begin")


def rows_of(trainer, prompts=(7,)):
    rows, rollouts = step(prompts, np.random.default_rng(0))
    trainer.workers.make(rows, rollouts)
    return rows, rollouts


def test_a_step_of_grpo():
    trainer = Trainer(anchor=True)
    rows, _ = rows_of(trainer)
    batch = Batch(rows)
    before = batch["prev_logprobs"].clone()
    assert trainer.train(batch, "loss", timer=None) == "results"
    trainer.log_batched_dict_as_jsonl(rows, "train_data_step4.jsonl")
    trainer.log_metrics({"loss": 1.0}, 4, prefix="train")
    trainer.log_metrics({"generation": 2.0}, 4, prefix="timing/train")
    assert trainer.done == [
        "train",
        "write train_data_step4.jsonl",
        "compare",
        "log train",
        "log train",
        "end step",
        "log train",
        "log timing/train",
    ]
    assert [(number, prefix) for number, prefix, _ in trainer.logged] == [
        *[(4, "train")] * 3,
        (4, "timing/train"),
    ]
    compared, own, counts, seconds = (metrics for *_, metrics in trainer.logged)
    assert compared["spec_rl/fresh_fraction"] == 0.2
    assert own == {"loss": 1.0} and counts == {"spec_rl/rows": 8.0}
    assert seconds == {"generation": 2.0, "spec_rl_decoding": 1.0}
    ((anchored, _),) = trainer.trained
    assert not torch.equal(anchored, before) and torch.equal(batch["prev_logprobs"], before)
    assert trainer.workers.asked == 1  # for anchor and monitor together


def test_a_policy_that_a_generation_is_sent_with_trains_as_nemo_rl_does(tmp_path):
    """As asynchronous GRPO sends it to its collector where ``refit_transport`` is set."""
    policy = Policy()
    generation = SimpleNamespace(weight_synchronizer=SimpleNamespace(_policy=policy))
    log = StepLog("run", MetricsFile(tmp_path, 0), total_steps=9)
    trainer = Trainer()
    hooks = Hooks(
        *(trainer, trainer.records, None),
        anchor_at_birth=True,
        rewards_in_batch=False,
        log=log,
    )
    hooks.install(policy=policy, logger=trainer, checkpointer=trainer.checkpointer)
    synchronizer = pickle.loads(cloudpickle.dumps(generation)).weight_synchronizer
    copied = synchronizer._policy
    assert copied.train == MethodType(Policy.train, copied)
    assert copied.train("batch") == "trained on batch" and not trainer.workers.asked
    assert pickle.loads(cloudpickle.dumps(policy.train)).__func__ is Policy.train
    rows, _ = rows_of(trainer)
    policy.train(Batch(rows))
    assert trainer.workers.asked == 1  # the driver's own is still wrapped


def test_the_recipe_says_which_log_probs_are_compared(tmp_path):
    """With ``force_on_policy_ratio`` NeMo-RL computes none, and logs zeros."""
    skipping = recipe(tmp_path, spec_rl__preset="faithful")
    skipping.loss_fn["force_on_policy_ratio"] = True
    trainer = Trainer(monitor=False)
    hooks = make_hooks(
        RunContext.of(skipping, "grpo"),
        trainer,
        loader_length=1,
        total_steps=9,
        rewards_in_batch=False,
    )
    hooks.install(policy=trainer, logger=trainer, checkpointer=trainer.checkpointer)
    rows, _ = rows_of(trainer)
    rows["generation_logprobs"] = rows["prev_logprobs"]
    rows["prev_logprobs"] = torch.zeros(len(rows["rewards"]), WIDTH).tolist()
    trainer.log_batched_dict_as_jsonl(rows, "train_data_step4.jsonl")
    [(number, prefix, compared)] = trainer.logged
    assert (number, prefix) == (4, "train") and compared["spec_rl/logprob_gap"] != 0


def test_a_batch_script_learns_where_the_checkpoints_are_and_that_steps_end(tmp_path, monkeypatch):
    run, state = tmp_path / "run", tmp_path / "state"
    (run / "step_7").mkdir(parents=True)
    state.mkdir()
    block = {"enabled": True, "checkpoint_dir": str(run)}
    job_state.started(block)  # outside of a job
    monkeypatch.setenv("SPECRL_STATE", str(state))
    job_state.started(block | {"enabled": False})
    assert list(state.iterdir()) == []
    job_state.started(block)
    assert (state / "training").read_text() == f"{run}\n7\n"
    trainer = Trainer(monitor=False)
    trainer.log_metrics({"loss": 1.0}, 8, prefix="train")
    assert not (state / "heartbeat").exists()
    trainer.log_metrics({"generation": 2.0}, 8, prefix="timing/train")
    assert (state / "heartbeat").exists()


def test_a_step_of_ppo_is_compared_and_anchored_once_however_often_it_is_trained_on():
    trainer = Trainer(ppo=True, anchor=True)
    rows, _ = rows_of(trainer)
    batch = Batch(rows)
    for _ in range(2):  # ppo_epochs
        trainer.train(batch, "loss")
    trainer.log_metrics({"loss": 1.0}, 4, prefix="train")
    trainer.log_batched_dict_as_jsonl(rows, "train_data_step4.jsonl")
    trainer.log_metrics({}, 4, prefix="timing/train")
    trainer.log_metrics({"loss": 2.0}, 5, prefix="train")
    assert trainer.done[:4] == ["compare", "train", "train", "log train"]
    assert trainer.done.count("compare") == trainer.workers.asked == 1
    first, last = trainer.logged[0][2], trainer.logged[-1][2]
    assert first["loss"] == 1.0 and first["spec_rl/logprob_gap"] != 0
    assert last == {"loss": 2.0}
    one, other = (logprobs for logprobs, _ in trainer.trained)
    assert torch.equal(one, other) and not torch.equal(one, batch["prev_logprobs"])


def test_parts_of_a_batch_are_anchored_one_by_one_and_compared_together():
    whole, streamed = (Trainer(ppo=True, anchor=True) for _ in range(2))
    rows, rollouts = rows_of(whole, prompts=(7, 8, 9))
    whole.train(Batch(rows), "loss")
    anchored = []
    for i in range(0, 3 * GROUP, GROUP):  # each part is made while the one before is trained on
        part = {name: column[i : i + GROUP] for name, column in rows.items()}
        streamed.workers.make(part, rollouts[i : i + GROUP])
        anchored.append(streamed.hooks.take_part(Batch(part)))
    ((expected, _),) = whole.trained
    assert torch.equal(torch.cat(anchored), expected)
    streamed.hooks.end_batch()
    for trainer, asked in ((whole, 1), (streamed, 3)):
        trainer.log_metrics({"loss": 1.0}, 4, prefix="train")
        trainer.log_metrics({}, 4, prefix="timing/train")
        assert trainer.done.count("compare") == 1 and trainer.workers.asked == asked
    assert whole.logged == streamed.logged
    assert streamed.logged[0][2]["spec_rl/logprob_gap"] != 0
    streamed.hooks.end_batch()  # a step that has no rows
    assert streamed.done.count("compare") == 1


def test_steps_are_written_under_the_names_of_the_embedded_trainer(tmp_path):
    trainer = Trainer(monitor=False, file=MetricsFile(tmp_path, 0))
    trainer.log_metrics({"accuracy": 0.25, "avg_length": 9.0}, 0, prefix="validation")
    for number in (1, 2):
        if number == 2:
            trainer.log_metrics({"accuracy": 0.5}, 2, prefix="validation")
        trainer.log_metrics({"reward": 0.75, "loss": -0.1, "lr": 1e-6}, number, prefix="train")
        seconds = {"total_step_time": 4.0, "policy_training": 1.0, "spec_rl_rollout": 2.0}
        trainer.log_metrics(seconds, number, prefix="timing/train")
    both = {
        "total_steps": 9,
        "reward": 0.75,
        "loss": -0.1,
        "step_s": 4.0,
        "train_s": 1.0,
        "rollout_s": 2.0,
        "spec_rl/decode_s": 1.0,
        "spec_rl/rows": 8.0,
    }
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        both | {"step": 1, "heldout_accuracy_at_start": 0.25},
        both | {"step": 2, "heldout_accuracy": 0.5},
    ]


def test_a_disk_that_takes_no_line_costs_no_step_and_leaves_no_part_of_one(tmp_path, caplog):
    trainer = Trainer(monitor=False, file=MetricsFile(tmp_path, 0))
    file = tmp_path / "metrics.jsonl"
    trainer.log_metrics({}, 1, prefix="timing/train")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 20, limits[1]))
    try:
        for number in (2, 3):
            trainer.log_metrics({}, number, prefix="timing/train")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    trainer.log_metrics({}, 4, prefix="timing/train")
    assert [record["step"] for record in read_metrics(file)] == [1, 4]
    assert caplog.text.count("metrics.jsonl: a step is left out ([Errno 27] File too large)") == 1
    assert trainer.done.count("log timing/train") == 4


def test_files_of_validation_are_not_compared():
    trainer = Trainer()
    rows, _ = rows_of(trainer)
    trainer.log_batched_dict_as_jsonl(rows, "val_data_step4.jsonl")
    assert trainer.done == ["write val_data_step4.jsonl"]


@pytest.mark.parametrize(
    ("kind", "name", "own"),
    [
        (V070, "finalize_checkpoint", "finalize"),
        (Main, "begin_finalization", "begin"),
        (Main, "finalize_checkpoint", "finalize"),
    ],
)
def test_the_cache_and_then_the_state_are_written_before_the_checkpoint_is_renamed(
    tmp_path, kind, name, own
):
    done = []
    trainer = Trainer(checkpointer=kind(done))
    trainer.done = done
    getattr(trainer.checkpointer, name)(str(tmp_path / "tmp_step_2"))
    assert done == ["save cache", "save state", own]
    assert (tmp_path / "tmp_step_2" / CACHE_FOLDER / "monitor.json").is_file()


def test_what_cannot_be_written_costs_the_checkpoint_nothing(tmp_path, caplog):
    trainer = Trainer()
    Path(tmp_path / CACHE_FOLDER).write_text("in the way")
    with caplog.at_level(logging.WARNING):
        trainer.checkpointer.begin_finalization(tmp_path)
    assert trainer.done == ["save cache", "begin"]
    assert "resuming from it starts cold" in caplog.text


def test_without_anchor_and_monitor_nothing_of_the_policy_is_wrapped():
    trainer = Trainer(monitor=False)
    rows, _ = rows_of(trainer)
    assert trainer.train(Batch(rows), "loss") == "results"
    trainer.log_batched_dict_as_jsonl(rows, "train_data_step4.jsonl")
    assert trainer.done == ["train", "write train_data_step4.jsonl"] and not trainer.workers.asked
