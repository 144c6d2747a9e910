"""The driver's side of generation: identities of rows, load balance, policy version, metrics.

``SpecVllmGeneration`` gives each row its prompt key and sample index, by which an engine finds the
row's draft. NeMo-RL sends copies of it to other actors (the data plane's rollout actor, the
asynchronous collector), so state that all copies share is kept by the workers or in the cache.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import ray
import torch

from nemo_specrl.cache.metrics import store_metrics
from nemo_specrl.engine.load_balance import balanced_order, row_costs
from nemo_specrl.engine.metrics import EngineMetrics
from nemo_specrl.errors import CacheError, EngineError
from nemo_specrl.monitoring import names as metric
from nemo_specrl.nemo_rl import compat, prompts
from nemo_specrl.nemo_rl.context import (
    ENDED,
    GROUPS,
    PHASE,
    PROMPT_KEYS,
    SAMPLE_INDICES,
    UPCOMING,
    RunContext,
    current_run,
)
from nemo_specrl.nemo_rl.engine_calls import EngineCalls, seconds_left, step_end
from nemo_specrl.nemo_rl.metrics import counts, evaluation_summary, times
from nemo_specrl.nemo_rl.partial_rollouts import PartialRollouts
from nemo_specrl.nemo_rl.recipe_checks import check_elsewhere
from nemo_specrl.nemo_rl.rollout_metadata import RolloutMetadata, SequenceKey
from nemo_specrl.nemo_rl.single_rows import SingleRows
from nemo_specrl.rollout import Rollout
from nemo_specrl.speculation.draft_selection import assign_sample_indices

__all__ = ["SpecVllmGeneration", "completed", "validating"]

PACKAGE = "nemo_specrl.nemo_rl"
ATTACH_SECONDS = 600.0
"""Time for a worker whose engine has just started to open its part of the cache."""
STANDING_STEPS = 3
"""Number of steps under one policy version after which a warning is logged."""

logger = logging.getLogger(__name__)

_generations: weakref.WeakSet[SpecVllmGeneration] = weakref.WeakSet()


class SpecVllmGeneration(SingleRows):
    """``VllmGeneration`` that reuses rollouts, if the run that is being set up enables it.

    Attributes:
        worker_classes: full name of each stock worker class, and of the class that replaces it.
        cache: client of the rollout cache; None if reuse is off, if no node could open its part,
            and after a shutdown.
        fresh_fraction: share of rows decoded without a draft although there is one.
        partial_rollouts: the loader of a run with partial rollouts, or None.
    """

    worker_classes: ClassVar[dict[str, str]] = {
        compat.STOCK_WORKER: f"{PACKAGE}.sync_worker.SpecVllmGenerationWorker",
        compat.STOCK_ASYNC_WORKER: f"{PACKAGE}.async_worker.SpecVllmAsyncGenerationWorker",
        compat.STOCK_QUANT_WORKER: f"{PACKAGE}.quantized_workers.SpecVllmQuantGenerationWorker",
        compat.STOCK_QUANT_ASYNC_WORKER: (
            f"{PACKAGE}.quantized_workers.SpecVllmQuantAsyncGenerationWorker"
        ),
    }
    partial_rollouts: PartialRollouts | None = None
    _lacks_cache = False  # although the recipe asks for one
    _upcoming: Sequence[list[int]] = ()
    _last_version, _standing = -1, 0

    def __init__(self, cluster: Any, config: Any, **kwargs: Any) -> None:
        run = current_run()
        if run is None:
            check_elsewhere(config)
            super().__init__(cluster, config, **kwargs)
            return
        self._run = run
        self._start_counting()
        self.fresh_fraction = run.spec_rl.effective_fresh_fraction
        # This comes before the engines, which take minutes to start.
        self.cache, self._first_version = run.open_cache()
        self._lacks_cache = self.cache is None
        try:
            with compat.substituted_workers(self.worker_classes, config):
                super().__init__(cluster, config, **kwargs)
            self._engines = EngineCalls(self.worker_group)
            if not kwargs.get("defer_model_load"):
                self._attach()
        except BaseException:
            self._close_cache()
            raise
        _generations.add(self)

    @property
    def run(self) -> RunContext | None:
        """The run whose rollouts are reused; None if reuse is off."""
        return getattr(self, "_run", None)

    def load_and_start(self) -> None:
        """Start the engines of a generation that was made without them, as with NeMo-Gym."""
        super().load_and_start()
        self._attach()

    def _attach(self) -> None:
        """Make all engines draft from the cache, if there is one."""
        cache = self.cache
        if cache is None:
            return
        nodes = self._engines.tell(
            "spec_rl_attach",
            within_s=ATTACH_SECONDS,
            cache=cache,
            run=self._run,
            policy_version=self._first_version,
        )
        self._choose_engines()
        # If engines have their own nodes, drafts are kept there and not with the trainer.
        try:
            cache.set_preferred_nodes(set(nodes))
        except CacheError as error:  # it serves as it is
            logger.warning("rollout cache: %s; its partitions stay where they are", error)
        # Use print, as NeMo-RL's own driver does, since its loggers show only warnings.
        print(f"nemo_specrl: {self._run.summary(self.cfg)}", flush=True)

    def generate(self, data: Any, greedy: bool = False) -> Any:
        """Generate a response to each row, in the order given.

        Rows are distributed over the engines so that all of them finish at about the same time,
        each row with its prompt key and sample index.
        """
        if self.cache is None or self._validating or greedy or not len(data["input_ids"]):
            started = time.perf_counter()
            output = super().generate(data, greedy=greedy)
            if self._validating and not greedy:
                self._heldout_s += time.perf_counter() - started
                self._heldout_tokens += int(output["generation_lengths"].sum())
            return output
        started = time.perf_counter()
        keys = prompts.prompt_keys(data)
        sample_indices = assign_sample_indices(keys)
        order = balanced_order(self._costs(keys, sample_indices), self.dp_size)
        data = data.select_indices(order)
        data[SAMPLE_INDICES] = torch.tensor(sample_indices)[order]
        data[PROMPT_KEYS] = [keys[i] for i in order]
        if self._upcoming:
            data[UPCOMING] = self._deal_out_upcoming(len(keys))
        partial = self.partial_rollouts
        phase = None if partial is None else partial.begin(len(keys))
        if phase is not None:
            data[GROUPS] = torch.tensor(order) // self._run.group
            data[PHASE] = [phase] * len(keys)
        with self._idle_engines_running_ahead():
            output = super().generate(data, greedy=greedy)
        output = output.select_indices(np.argsort(order).tolist())
        if partial is not None and phase is not None:
            partial.settle(output.pop(ENDED), output["generation_lengths"])
        self._rollout_s += time.perf_counter() - started
        return output

    def generate_text(self, data: Any, greedy: bool = False) -> Any:
        """Generate a text for each prompt of an evaluation, with drafts if they are enabled."""
        if self.cache is not None and self._run.evaluates:
            data = data.slice(0, data.size)  # the caller's batch is not changed
            data[SAMPLE_INDICES] = torch.tensor(prompts.text_indices(data["prompts"]))
        return super().generate_text(data, greedy=greedy)

    def set_upcoming(self, upcoming: list[list[int]]) -> None:
        """Set the prompts for which engines may decode from now on when they would be idle.

        Args:
            upcoming: prompts of the next batch, token ids.
        """
        self._upcoming = upcoming

    def take_metrics(self) -> tuple[dict[str, float], dict[str, float]] | None:
        """Return the engines' counts and seconds since the last call; None after a shutdown.

        Late answers of engines come with a later step; for the cache, the last known state is used.
        """
        if self.cache is None:
            return ({metric.CACHE_NODES: 0.0}, {}) if self._lacks_cache else None
        until = step_end()
        taken = [m for m in self._engines.ask("spec_rl_take_metrics", until) if m is not None]
        total = sum(taken, EngineMetrics())
        total.cache_errors += self.cache.take_failures()
        # Engines run concurrently; so do the rows of asynchronous ones.
        timed = times(total, total.rows if self.cfg["vllm_cfg"]["async_engine"] else len(taken))
        timed["spec_rl_lookup"] += self._lookup_s
        counted = counts(total.of_engines(max(1, len(taken))))
        if self._rollout_s:
            timed["spec_rl_rollout"] = self._rollout_s
        if self._heldout_s:
            timed["spec_rl_heldout_decoding"] = self._heldout_s
            counted[metric.ENGINE_HELDOUT_TOKENS] = float(self._heldout_tokens)
        if self.partial_rollouts is not None:
            prompts, tokens = self.partial_rollouts.take_counts()
            counted[metric.ENGINE_PUT_OFF_PROMPTS] = float(prompts)
            counted[metric.ENGINE_PUT_OFF_TOKENS] = float(tokens)
        self._start_counting()
        versions = self._engines.ask("spec_rl_policy_version", until)
        if versions:  # otherwise all engines are late, and the step continues
            # An engine that is late, or that NeMo-RL keeps from rows and refits, may have an older
            # version.
            self._note_version(max(versions))
        with contextlib.suppress(CacheError):  # what is not known is not logged
            health = self.cache.health(seconds_left(until))
            counted[metric.CACHE_NODES] = float(health.nodes)
            counted[metric.CACHE_MISSING_COPIES] = float(health.missing)
        stores = self.cache.stats(seconds_left(until)).values()
        return counted | store_metrics(stores), timed

    def _start_counting(self) -> None:
        """Restart the driver's own counts, in seconds. Copies in other actors keep theirs."""
        self._lookup_s = self._rollout_s = self._heldout_s = 0.0
        self._heldout_tokens = 0

    def _note_version(self, policy_version: int) -> None:
        """Warn if the policy version stays the same from step to step; once each time it does."""
        self._standing = self._standing + 1 if policy_version == self._last_version else 0
        self._last_version = policy_version
        if self._standing == STANDING_STEPS:
            logger.warning(
                "the policy version has stayed at %d for %d steps. Unless training is paused (for "
                "example during critic warm-up), the engines receive new weights through a refit "
                "path that the plug-in does not track (policy.generation.refit_transport), and "
                "rollouts of these steps cannot be used as drafts",
                policy_version,
                STANDING_STEPS,
            )

    def take_records(self) -> list[tuple[SequenceKey, RolloutMetadata]]:
        """Collect from the workers the records of the rollouts made since the last call."""
        taken = self._engines.ask("spec_rl_take_records")
        return [record for records in taken for record in records]

    def store(self, rollouts: list[Rollout]) -> None:
        """Put rollouts into the cache that no engine has put there; do nothing after a shutdown."""
        if self.cache is not None:
            self.cache.put(rollouts)
            self.cache.deliver()

    def save_cache(self, folder: Path) -> None:
        """Write the cache, and the prompts that are put off, next to a checkpoint's weights.

        Nothing is written after a shutdown.

        Raises:
            StoreUnavailable: it cannot be written.
        """
        if self.cache is None:
            return
        if self.partial_rollouts is not None:
            self.partial_rollouts.save(folder)
        self.cache.snapshot(folder, self.policy_version)

    def set_fresh_fraction(self, fresh_fraction: float) -> None:
        """Change the share of rows decoded without a draft, from the next batch on."""
        self.fresh_fraction = max(fresh_fraction, self._run.spec_rl.effective_fresh_fraction)
        self._engines.ask("spec_rl_set_fresh_fraction", fresh_fraction=fresh_fraction)

    @property
    def policy_version(self) -> int:
        """Policy version of the engines' weights: number of refits since the run first started."""
        versions = self._engines.ask("spec_rl_policy_version")
        if not versions:
            raise EngineError("the policy version is not known: no engine answers")
        return int(max(versions))

    def shutdown(self) -> bool:
        """Shut down the workers and close the cache.

        ``__del__`` of NeMo-RL's class calls this too: after a failed constructor, and at the end of
        the process, when Ray has already ended. A question to a worker would then restart Ray, or
        wait forever for a cluster that is gone (``ray/_private/auto_init_hook.py``).
        """
        if not hasattr(self, "worker_group") or not ray.is_initialized():
            _generations.discard(self)
            return True
        if self in _generations:  # a copy leaves the cache open
            _generations.discard(self)
            if self._run.evaluates and (taken := self.take_metrics()) is not None:
                print(evaluation_summary(taken[0]), flush=True)  # besides NeMo-RL's own result
            self._close_cache()
        self.cache, self._lacks_cache = None, False
        return bool(super().shutdown())

    def _close_cache(self) -> None:
        cache, self.cache = self.cache, None
        if cache is None:
            return
        try:
            cache.close()
        except Exception as error:  # the run is over in any case
            logger.warning("closing the rollout cache: %s", error)

    def _costs(self, keys: list[bytes], sample_indices: list[int]) -> list[float]:
        """Estimate the number of tokens that each row will decode.

        This is the mean length of the earlier responses to its prompt or, if the row will verify
        one of them, the part of it that past experience says is left.
        """
        assert self.cache is not None
        if self.dp_size < 2:
            return [1.0] * len(keys)
        started = time.perf_counter()
        cached = self.cache.outlines(keys)
        drafts, left = None, 1.0
        if self.fresh_fraction < 1 and cached:
            drafts = prompts.drafts_of(
                keys, sample_indices, cached, self._run.seed, self.fresh_fraction
            )
            # The engines are asked, since another copy may have generated the batch before.
            last = sum(self._engines.ask("spec_rl_last_metrics"), EngineMetrics())
            left = 1 - last.accepted_tokens / max(1, last.draft_tokens)
        costs = row_costs(keys, cached, drafts, left)
        self._lookup_s += time.perf_counter() - started
        return costs

    @contextmanager
    def _idle_engines_running_ahead(self) -> Iterator[None]:
        """Make engines that have finished their rows decode for upcoming prompts until all have."""
        if not self._upcoming or self.dp_size < 2:
            yield
            return

        def queue(batch: list[Any]) -> None:
            self._engines.call("spec_rl_run_ahead", batch=batch)

        with compat.queued_behind(self.worker_group, queue):
            yield

    def _deal_out_upcoming(self, rows: int) -> list[list[list[int]]]:
        """Return upcoming prompts for each of the batch's rows (``dealt_out``)."""
        keys = prompts.upcoming_rows(self._upcoming, self._run.group)
        order = balanced_order(self._costs(keys, assign_sample_indices(keys)), self.dp_size)
        return prompts.dealt_out(self._upcoming, order, self._run.group, rows, self.dp_size)


def completed(batch: Any, *columns: torch.Tensor) -> tuple[Any, ...]:
    """Return the rows of a generation whose groups are complete (``partial_rollouts``).

    Args:
        batch: the rows of a generation.
        columns: tensors with an entry for each of them.
    """
    for generation in _generations:
        if generation.partial_rollouts is not None:
            return generation.partial_rollouts.completed(batch, *columns)
    return batch, *columns


@contextmanager
def validating(everywhere: bool) -> Iterator[None]:
    """Keep the rollouts made inside this context from reading and writing the cache.

    Args:
        everywhere: whether copies in other processes make the rollouts, so that the workers must be
            told.
    """
    generations = [g for g in _generations if g.cache is not None]
    for generation in generations:
        generation._validating = True
        if everywhere or generation._run.served:
            generation._engines.tell("spec_rl_pause", paused=True)
    try:
        yield
    finally:
        for generation in generations:
            generation._validating = False
            if everywhere or generation._run.served:
                generation._engines.tell("spec_rl_pause", paused=False)
