"""The training loop of the embedded trainer: rollouts, rewards, update, refit.

Rollouts are in ``generation``, gradients in ``policy``, formulas in ``losses``, files in
``checkpoint``. A run that is killed at any moment and started again continues from its last
checkpoint. Plain training repeats the steps after it exactly; with drafts from history they are
other samples of the same distribution.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_specrl.errors import CheckpointError, ConfigError, PolicyError, last_line
from nemo_specrl.files import step_folders
from nemo_specrl.monitoring import heartbeat
from nemo_specrl.monitoring import names as metric
from nemo_specrl.monitoring.metrics_file import MetricsLog
from nemo_specrl.reuse.drift import DriftMonitor
from nemo_specrl.trainer import checkpoint, partial_rollouts
from nemo_specrl.trainer.batch import Batch, Group
from nemo_specrl.trainer.data.dataset import Dataset, open_dataset
from nemo_specrl.trainer.divergence import check_finite
from nemo_specrl.trainer.evaluation import evaluate
from nemo_specrl.trainer.generation import Engine
from nemo_specrl.trainer.policy import Sample, build_policy, build_value_model
from nemo_specrl.trainer.recipe import Recipe

__all__ = ["Trainer"]

# More threads do not help models of this size.
TRAINING_THREADS = min(2, len(os.sched_getaffinity(0)))


class Trainer:
    """A run of a recipe, from its last checkpoint or from the start.

    Args:
        recipe: the whole recipe.
        data: its problems, if they have already been opened.

    Attributes:
        progress: progress of the run.
        stop: set to True to save a checkpoint and end after the current step.
        warning: what the last step showed about reused rows, one line, or empty.

    Raises:
        CheckpointError: the checkpoint is damaged or belongs to another recipe.
    """

    def __init__(self, recipe: Recipe, data: Dataset | None = None) -> None:
        self.recipe = recipe
        self.stop = False
        self.warning = ""
        self._built = False
        self.folder = recipe.checkpointing.checkpoint_dir
        heldout = recipe.algorithm.max_val_samples
        self.data = data or open_dataset(
            recipe.data, recipe.policy, heldout, checkpoint.run_date(recipe)
        )
        if recipe.data.prompts is None:
            self.recipe = recipe = recipe.with_prompts(len(self.data.training))
        self.progress = checkpoint.Progress(
            recipe=checkpoint.resume_identity(recipe),
            data=self.data.content_hash(),
            model=checkpoint.base_model(recipe),
            date=self.data.day.isoformat() if self.data.day else "",
        )
        self._resumed_from: Path | None = None
        keep = recipe.checkpointing.keep_top_k
        self._checkpoints = checkpoint.CheckpointWriter(self.folder, keep=keep)
        found = checkpoint.latest(self.folder) if recipe.checkpointing.enabled else None
        if found is not None:
            checkpoint.check_same_recipe(found[0], found[1].recipe, recipe)
            if found[1].data not in ("", self.progress.data):
                raise CheckpointError(
                    f"{found[0]}: was made with other prompts or answers than "
                    f"{recipe.data.data_path or recipe.data.dataset_name} has now; put them back, "
                    "or choose another checkpointing.checkpoint_dir"
                )
            if found[1].model not in ("", self.progress.model):
                raise CheckpointError(
                    f"{found[0]}: was made with other weights than {recipe.policy.model_name} has "
                    "now, which adapters or the KL penalty need; put them back, or choose another "
                    "checkpointing.checkpoint_dir"
                )
            self._resumed_from, self.progress = found

    def build(self) -> None:
        """Load the models, the engine and the cache, as the checkpoint has them.

        A finished run needs none of them. :meth:`run` calls this if it has not been called before.

        Raises:
            ConfigError: a model, folder or engine option that cannot be used.
            CheckpointError: the checkpoint is damaged.
        """
        recipe, found = self.recipe, self._resumed_from
        torch.manual_seed(recipe.algorithm.seed)
        self.policy = build_policy(recipe)
        if weight := self.policy.not_finite():
            self.policy.shutdown()
            name = recipe.policy.model_name
            raise ConfigError(f"policy.model_name = {name!r}: its {weight} is not finite")
        generation: Engine | None = None
        try:
            self.value = build_value_model(recipe) if recipe.ppo else None
            self.generation = generation = Engine(recipe, found)
            reuse = recipe.spec_rl.enabled and recipe.spec_rl.preset == "reuse"
            self.monitor = DriftMonitor() if reuse else None
            if found is not None:
                self._load(found)
            self.log = MetricsLog(
                recipe.logger.log_dir,
                self.progress.step,
                tensorboard=recipe.logger.tensorboard_enabled,
                prometheus=recipe.logger.prometheus_textfile,
            )
            self._offload()
            self._built = True
        except BaseException:
            if generation is not None:
                generation.shutdown()
            self.policy.shutdown()
            raise

    @property
    def total_steps(self) -> int:
        """Steps of the whole run. With dynamic sampling the data may run out earlier."""
        algorithm = self.recipe.algorithm
        return min(algorithm.max_num_steps, algorithm.max_num_epochs * self.recipe.steps_per_epoch)

    @property
    def done(self) -> bool:
        """Whether all steps are done or all prompts have been drawn."""
        return self._drawn_all or self.progress.step >= self.recipe.algorithm.max_num_steps

    @property
    def _drawn_all(self) -> bool:
        batches = self.recipe.algorithm.max_num_epochs * self.recipe.steps_per_epoch
        return self.progress.position >= batches

    def run(self) -> Iterator[dict[str, Any]]:
        """Train to the end, and yield the record of each step once it is in the log.

        Records are described in docs/reference/metrics.md. The run's files are closed when the
        iterator ends::

            trainer = Trainer(load_recipe(Path("examples/configs/grpo_sort_cpu.yaml")))
            for record in trainer.run():
                print(record["step"], record["reward"])

        Raises:
            SpecRLError: see :meth:`build`; also if a checkpoint cannot be written, a rank of the
                policy died, or the training has diverged.
        """
        algorithm = self.recipe.algorithm
        if self.done:
            return
        if not self._built:
            self.build()
        try:
            saved = True
            at_start: dict[str, Any] = {}
            if algorithm.val_at_start and self.progress.step == 0:
                found = self._evaluate()
                at_start = {name + metric.AT_START: value for name, value in found.items()}
            while not self.done and not self.stop:
                record = self._step() | at_start
                at_start = {}
                step, period = self.progress.step, algorithm.val_period
                if (period and step % period == 0) or (self.done and algorithm.val_at_end):
                    started = time.perf_counter()
                    record |= self._evaluate()
                    record[metric.EVAL_S] = time.perf_counter() - started
                self.log.write(record)
                saved = self.done or step % self.recipe.checkpointing.save_period == 0
                if saved:
                    self._save()
                yield record
            if not saved:  # stopped by a signal
                self._save()
            self._checkpoints.finish()
            self.log.finish()
        finally:
            self._checkpoints.wait()
            with contextlib.ExitStack() as ending:  # each is closed, even if another one fails
                if self.value is not None:
                    ending.callback(self.value.shutdown)
                ending.callback(self.policy.shutdown)
                ending.callback(self.generation.shutdown)
                self.log.close()

    def _evaluate(self) -> dict[str, float]:
        if not self.data.heldout:
            return {}
        return evaluate(self.recipe, self.data.heldout, self.generation, self.policy)

    # --- one step -----------------------------------------------------------------------------

    def _step(self) -> dict[str, Any]:
        started = time.perf_counter()
        batch = self._collect()
        rollout_times = self.generation.take_times()
        rolled_out = time.perf_counter()
        self._checkpoints.finish()
        training = time.perf_counter()
        samples = batch.samples(self.recipe)
        self._reload()
        if self.value is not None:
            with heartbeat.section("training"):
                self.value.predict(samples)
            batch.set_gae_advantages(samples, self.recipe.algorithm.adv_estimator)
        threads = torch.get_num_threads()
        torch.set_num_threads(TRAINING_THREADS)
        metrics = self._train(samples)
        torch.set_num_threads(threads)
        weights = {"policy": self.policy.not_finite()}
        if self.value is not None:
            weights["value model"] = self.value.not_finite()
        made = step_folders(self.folder) if self.recipe.checkpointing.enabled else []
        check_finite(self.progress.step + 1, metrics, weights, made[-1] if made else None)
        self.progress.step += 1
        self._refit()
        self._offload()
        ended = time.perf_counter()

        record: dict[str, Any] = {
            metric.STEP: self.progress.step,
            metric.TOTAL_STEPS: self.total_steps,
            metric.EPOCH: batch.epoch,
            metric.POLICY_VERSION: self.progress.step - 1,
            metric.PROMPTS: batch.drawn,
            **batch.metrics(),
            metric.REWARD_FAILURES: self.data.take_reward_failures(),
            metric.ROLLOUT_S: rollout_times.rollout_s,
            metric.TRAIN_S: ended - training,
            metric.STEP_S: ended - training + rolled_out - started,
            metric.CHECKPOINT_S: self._checkpoints.take_waited_s(),
            metric.DECODED_TOKENS: rollout_times.decoded_tokens,
            metric.RESPONSE_TOKENS: rollout_times.response_tokens,
            **metrics,
        }
        record |= rollout_times.metrics
        if self.monitor is not None:
            groups = [i for i, group in enumerate(batch.groups) for _ in group.generated]
            self.warning = self.monitor.update(groups, batch.fresh, batch.rewards.ravel())
            record |= self.monitor.as_dict()
        return record

    @heartbeat.section("rollout")
    def _collect(self) -> Batch:
        """Roll out the next prompts; with dynamic sampling, until enough groups have a gradient."""
        algorithm = self.recipe.algorithm
        if algorithm.partial_rollouts.enabled:
            return self._collect_enough()
        wanted = algorithm.num_prompts_per_step
        batch = Batch(epoch=self.progress.position // self.recipe.steps_per_epoch)
        kept: list[Group] = []
        idle: list[Group] = []
        attempts = (
            algorithm.dynamic_sampling_max_gen_batches if algorithm.use_dynamic_sampling else 1
        )
        for attempt in range(attempts):
            indices = self._indices(self.progress.position)
            self.progress.position += 1
            chosen = [self.data.training[i] for i in indices]
            generated = self.generation.rollouts(
                [p.prompt for p in chosen], attempt, self._upcoming()
            )
            batch.drawn += indices
            for problem, group in zip(chosen, generated, strict=True):
                rewards = np.array([problem.reward(g.tokens) for g in group])
                useful = not algorithm.use_dynamic_sampling or np.ptp(rewards) > 0
                (kept if useful else idle).append(Group(problem, group, rewards))
            if len(kept) >= wanted or self.done:
                break
        # Groups without an advantage have no gradient. They only fill a batch up to its size.
        batch.groups = (kept + idle)[:wanted]
        return batch

    def _collect_enough(self) -> Batch:
        """Roll out more prompts than the step needs, until enough groups are complete."""
        progress = self.progress
        epoch, step = divmod(progress.position, self.recipe.steps_per_epoch)
        place = epoch, step, self._order(epoch)
        batch, progress.put_off = partial_rollouts.collect(
            self.recipe.algorithm, self.data.training, place, progress.put_off, self.generation
        )
        progress.position += 1
        return batch

    def _upcoming(self) -> list[list[int]]:
        """Prompts of the batch that is drawn next; none after the last one.

        Looking ahead does not change ``progress``, so a resumed run sees the same prompts.
        """
        algorithm = self.recipe.algorithm
        last = self.progress.step + 1 >= algorithm.max_num_steps
        if self._drawn_all or (last and not algorithm.use_dynamic_sampling):
            return []
        return [self.data.training[i].prompt for i in self._indices(self.progress.position)]

    def _indices(self, position: int) -> list[int]:
        """Indices of a batch's prompts."""
        per_step = self.recipe.algorithm.num_prompts_per_step
        epoch, index = divmod(position, self.recipe.steps_per_epoch)
        return self._order(epoch)[index * per_step : (index + 1) * per_step]

    def _order(self, epoch: int) -> list[int]:
        """Indices of an epoch's prompts. Their order depends only on seed and epoch."""
        order = np.arange(len(self.data.training))
        if self.recipe.data.shuffle:
            philox = np.random.Philox(key=[self.recipe.algorithm.seed, epoch])
            order = np.random.Generator(philox).permutation(len(self.data.training))
        whole_steps = self.recipe.steps_per_epoch * self.recipe.algorithm.num_prompts_per_step
        return [int(i) for i in order[:whole_steps]]

    @heartbeat.section("training")
    def _train(self, samples: list[Sample]) -> dict[str, float]:
        epochs = self.recipe.algorithm.ppo_epochs
        metrics: dict[str, float] = {}
        if self.value is not None:
            for _ in range(epochs):
                metrics |= self.value.train(samples)
        return metrics | self.policy.train(samples, epochs=epochs)

    @heartbeat.section("training")
    def _refit(self) -> None:
        weights = self.policy.stream_weights(self.recipe.dtype)
        self.generation.refit(weights, self.progress.step)

    def _offload(self) -> None:
        """Leave the device's memory to the engine."""
        self.policy.offload()
        if self.value is not None:
            self.value.offload()

    def _reload(self) -> None:
        """Prepare the models for training."""
        self.policy.reload()
        if self.value is not None:
            self.value.reload()

    # --- the disk -----------------------------------------------------------------------------

    def _save(self) -> None:
        if self.recipe.checkpointing.enabled:
            self._checkpoints.start(
                self.progress,
                copy_cache=self.generation.save,
                save_models=self._save_models,
            )

    def _save_models(self, folder: Path) -> None:
        self.policy.save(folder / "policy")
        if self.value is not None:
            self.value.save(folder / "value")

    def _load(self, folder: Path) -> None:
        try:
            self.policy.load(folder / "policy")
            if self.value is not None:
                self.value.load(folder / "value")
        except PolicyError:  # a rank that died says nothing about the checkpoint
            raise
        except Exception as error:  # torch and safetensors raise many kinds
            raise checkpoint.damaged(folder, last_line(error)) from None
        for model in (self.policy, self.value):
            if model is not None and (weight := model.not_finite()):
                raise checkpoint.damaged(folder, f"{weight} is not finite")
        self._refit()
