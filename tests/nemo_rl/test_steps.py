"""The plug-in's part in a step: in which order it acts, and that its failures harm nothing.

The cluster's cache is the real one without a cluster, so that every call of it fails. With one it
is in the jobs of test_jobs.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from nemo_specrl.monitoring import names as metric
from nemo_specrl.monitoring.metrics_file import METRICS, read_metrics
from nemo_specrl.nemo_rl import compat
from nemo_specrl.nemo_rl.recipe import run_of
from nemo_specrl.nemo_rl.steps import FROM_ENGINES, StepHooks
from tests.nemo_rl.test_recipe import TOKENIZER, recipe


class Trainer:
    """NeMo-RL's logger, checkpoint manager and generation, which note how they are called.

    Args:
        logs: folder of the plug-in's log.
        broken: whether the generation fails.
        in_thread: as for ``StepHooks``.
        install: whether the hooks are installed, without a data loader.
    """

    def __init__(
        self, logs: Path, broken: bool = False, in_thread: bool = False, install: bool = True
    ) -> None:
        self.done, self.logged, self.broken = [], [], broken
        run = run_of(recipe({"cache": {"dir": str(logs)}}, logger__log_dir=str(logs)), TOKENIZER)
        self.hooks = StepHooks(run, self, in_thread=in_thread)
        if install:
            self.hooks.install_logger(self)
            self.hooks.install_checkpointer(self)

    def log_metrics(self, metrics, step, prefix="", step_metric=None):
        self.logged.append((step, prefix, metrics))

    def begin_finalization(self, checkpoint_path, wait_fn=None):
        def finalize():
            wait_fn()
            self.done.append("rename")

        thread = threading.Thread(target=finalize)
        thread.start()
        thread.join()

    def take_metrics(self):
        if self.broken:
            raise RuntimeError("an engine has died")
        return {"spec_rl/tokens_per_step": 2.0}

    def save_lengths(self, folder):
        if self.broken:
            raise OSError("no space left")
        (folder / "lengths").write_text("")
        self.done.append("save lengths")


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("nemo_specrl.cache.cluster.checkpoint.join_cluster", _refuse)


def _refuse():
    raise ConnectionError("there is no cluster here")


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_steps_metrics_are_logged_under_train_and_written(tmp_path, in_thread):
    trainer = Trainer(tmp_path, in_thread=in_thread)
    trainer.log_metrics({"reward": 0.5}, 1, prefix="train")
    trainer.log_metrics({"total_step_time": 3.0}, 1, prefix="timing/train")
    if in_thread:
        trainer.hooks._thread.shutdown()
    assert {prefix for _, prefix, _ in trainer.logged} == {"train", "timing/train"}
    [own] = [metrics for _, _, metrics in trainer.logged if "spec_rl/cache_nodes" in metrics]
    assert own == {
        "spec_rl/tokens_per_step": 2.0,
        "spec_rl/cache_nodes": 0.0,
        **dict.fromkeys(FROM_ENGINES, 0.0),  # logged in every step: a table's columns stay
    }
    [row] = read_metrics(tmp_path / METRICS)
    assert row.items() >= {"step": 1, "reward": 0.5, "step_s": 3.0, **own}.items()


def test_engines_that_do_not_answer_cost_a_steps_metrics_alone(tmp_path, caplog):
    trainer = Trainer(tmp_path, broken=True)
    for step in (1, 2):
        trainer.log_metrics({"total_step_time": 3.0}, step, prefix="timing/train")
    assert [prefix for _, prefix, _ in trainer.logged] == ["timing/train"] * 2
    assert "the metrics of step 1 are missing: an engine has died" in caplog.text


@pytest.mark.parametrize("broken", [False, True])
def test_the_cache_is_written_before_the_checkpoint_gets_its_name(tmp_path, broken, caplog):
    trainer = Trainer(tmp_path / "logs", broken)
    wait = lambda: trainer.done.append("policy is written")  # noqa: E731
    trainer.begin_finalization(tmp_path / "tmp_step_2", wait_fn=wait)
    saved = [] if broken else ["save lengths"]
    assert trainer.done == [*saved, "policy is written", "rename"]
    assert (tmp_path / "tmp_step_2" / "rollout_cache" / "lengths").exists() is not broken
    assert ("starts cold" in caplog.text) is broken
    trainer.begin_finalization(tmp_path / "tmp_step_4")  # a checkpoint that was written at once
    assert trainer.done[-1] == "rename"


class Loader(list):
    """A data loader, as far as its number of prompts goes."""

    @property
    def dataset(self):
        return self

    def state_dict(self):
        return {}


@pytest.mark.parametrize(("prompts", "once"), [(3200, True), (3199, False)])
def test_data_that_comes_once_is_said_and_its_cache_is_saved_once_it_has_helped(
    tmp_path, monkeypatch, capsys, prompts, once
):
    """The recipe's 100 steps of 32 prompts."""
    monkeypatch.setattr(compat, "first_of", lambda parts, place: parts[-1])
    trainer = Trainer(tmp_path, install=False)
    trainer.hooks.install([Loader(range(prompts)), trainer])
    assert ("checkpoints get the cache from when" in capsys.readouterr().out) is once
    cache = trainer.hooks._cache
    saved = []
    monkeypatch.setattr(cache, "save", lambda folder, prompts: saved.append(prompts))
    trainer.begin_finalization(tmp_path / "step_2")
    assert saved == ([] if once else [prompts])
    monkeypatch.setattr(cache, "engine_counts", lambda: {metric.HISTORIES_FOUND: 1.0})
    trainer.log_metrics({"total_step_time": 3.0}, 3, prefix="timing/train")
    trainer.begin_finalization(tmp_path / "step_4")
    assert saved[-1:] == [prompts]
