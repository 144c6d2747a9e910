"""The driver's side of generation: the recipe's block for the engines, and balance over them.

``SpecVllmGeneration`` is NeMo-RL's ``VllmGeneration`` with its stock workers; only prefix reuse has
workers of its own. NeMo-RL sends copies of it to other actors (the data plane's rollout actor, the
asynchronous collector), and each copy balances the rows that it gets.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import ray
import torch
from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration

from nemo_specrl.config import CACHE_FOLDER
from nemo_specrl.errors import ConfigError
from nemo_specrl.nemo_rl.balance import PromptPlaces, ResponseLengths, balanced_order
from nemo_specrl.nemo_rl.compat import with_worker
from nemo_specrl.nemo_rl.metrics import (
    SLOW_STEPS,
    SLOWER,
    Stragglers,
    engine_metrics,
    reuse_metrics,
    summed,
)
from nemo_specrl.nemo_rl.recipe import (
    OWN,
    REUSED,
    Run,
    current_run,
    give_to_engines,
    read_block,
)
from nemo_specrl.rollout import prompt_key

__all__ = ["SpecVllmGeneration", "validating"]

ANSWER_SECONDS = 10.0
"""How long a step waits for the engines' counters, without which it continues."""

_engine: ContextVar[int | None] = ContextVar("engine", default=None)
"""Engine of the row that the current task is about to send; None: NeMo-RL chooses it."""
_validating = False


class SpecVllmGeneration(VllmGeneration):
    """``VllmGeneration`` whose engines draft, if the recipe says so.

    Attributes:
        workers: the reuse workers, full names of a synchronous and an asynchronous class.
        run: the training, None in an evaluation and where ``spec_rl`` is not enabled.
        lengths: what is known about the lengths of responses.
    """

    workers: ClassVar[tuple[str, str]] = (
        "nemo_specrl.nemo_rl.reuse_worker.ReuseWorker",
        "nemo_specrl.nemo_rl.reuse_worker.AsyncReuseWorker",
    )
    run: Run | None = None
    _places: PromptPlaces | None = None

    def __init__(self, cluster: Any, config: Any, **kwargs: Any) -> None:
        run = current_run()
        spec_rl = read_block(config, "generation.spec_rl") if run is None else run.spec_rl
        worker: Any = contextlib.nullcontext()
        if spec_rl is not None:
            if spec_rl.preset == "reuse":
                if run is None:
                    raise ConfigError(
                        "generation.spec_rl.preset = 'reuse': a reused prefix is no sample of the "
                        "checkpoint that is evaluated; set lossless"
                    )
                config[OWN] = {"first_version": run.first_version}
                worker = with_worker(self.workers[config["vllm_cfg"]["async_engine"]], config)
            give_to_engines(config, spec_rl)
        with worker:
            super().__init__(cluster, config, **kwargs)
        self.lengths = ResponseLengths()
        self._stragglers = Stragglers()
        self._counters: dict[str, float] = {}
        if run is None:
            return
        self.run = run
        if run.checkpoint is not None:
            self.lengths.restore(run.checkpoint / CACHE_FOLDER)
        if self.dp_size > 1 and config["vllm_cfg"]["async_engine"]:
            # With fewer prompts than engines, each engine gets some rows of one.
            share = -(-run.group * run.prompts // self.dp_size)
            self._places = PromptPlaces(self.dp_size, min(run.group, share))

    def generate(self, data: Any, greedy: bool = False) -> Any:
        """Generate a response to each row, in the order given, on engines with equal shares."""
        if self.run is None or greedy or not len(data["input_ids"]):
            return super().generate(data, greedy=greedy)
        lengths = data["input_lengths"].tolist()
        keys = [
            prompt_key(ids[:length].numpy())
            for ids, length in zip(data["input_ids"], lengths, strict=True)
        ]
        order = balanced_order(keys, self.lengths.expected(keys), lengths, self.dp_size)
        with self._timed():
            output = super().generate(self._marked(data.select_indices(order)), greedy=greedy)
        output = output.select_indices(np.argsort(order).tolist())
        self.lengths.note(keys, output["generation_lengths"].tolist())
        return output

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Name engines whose results come late step after step."""
        results, begun = self.worker_group.get_all_worker_results, time.monotonic()

        def timed(calls: Any, *args: Any, **options: Any) -> Any:
            waiting = list(calls.futures)
            seconds: dict[Any, float] = {}
            while waiting:
                done, waiting = ray.wait(waiting, fetch_local=False)
                seconds |= dict.fromkeys(done, time.monotonic() - begun)
            for engine in self._stragglers.look_at([seconds[call] for call in calls.futures]):
                worker = self.worker_group.workers[calls.called_workers[engine]]
                print(
                    f"nemo_specrl: engine {engine} on {_node_of(worker)} took {SLOWER} times as "
                    f"long as the others in {SLOW_STEPS} steps",
                    flush=True,
                )
            return results(calls, *args, **options)

        self.worker_group.get_all_worker_results = timed
        try:
            yield
        finally:
            del self.worker_group.get_all_worker_results

    async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[Any]:
        """Generate a response to a row, on the engine that has its siblings."""
        if self.run is not None and data.size and not greedy:
            data = self._marked(data.slice(0, data.size))  # the caller's batch is not changed
        rows = super().generate_async(data, greedy=greedy)
        if self._places is None or self.fleet_selector is not None or not data.size:
            async for result in rows:
                yield result
            return
        prompt = data["input_ids"][0, : data["input_lengths"][0]].numpy()
        engine = self._places.enter(prompt_key(prompt))
        _engine.set(engine)
        try:
            async for result in rows:
                yield result
        finally:
            self._places.leave(engine)

    def attach_fleet_health(self, *args: Any, **kwargs: Any) -> None:
        """Leave the choice of engines to NeMo-RL from now on, which watches their health."""
        super().attach_fleet_health(*args, **kwargs)
        if self._places is not None:
            print("nemo_specrl: NeMo-RL's fleet health chooses engines, row by row", flush=True)

    def _next_dp_shard_idx(self) -> int:
        """Return the engine of the next row, before anything else runs in its task."""
        engine = _engine.get()
        _engine.set(None)
        return super()._next_dp_shard_idx() if engine is None else engine

    def _marked(self, data: Any) -> Any:
        assert self.run is not None
        if self.run.spec_rl.preset == "reuse" and not _validating:
            data[REUSED] = torch.ones(data.size, dtype=torch.bool)
        return data

    def take_metrics(self) -> dict[str, float]:
        """Return what the engines did since the last call; empty if one of them does not answer.

        vLLM's counters only grow, so the next call makes up for it.
        """
        assert self.run is not None
        answers = self._ask("_get_raw_spec_counters")
        counters = summed(answers)
        grown = {name: value - self._counters.get(name, 0.0) for name, value in counters.items()}
        metrics = engine_metrics(grown)
        if answers:
            self._counters = counters
        if self.run.spec_rl.preset == "reuse":
            taken = self._ask("spec_rl_take_counts")
            metrics |= reuse_metrics([counts for calls in taken for counts in calls])
        return metrics

    def _ask(self, method: str) -> list[Any]:
        """Call a method of each engine's worker; nothing if one is late, or dead."""
        calls = self.worker_group.run_all_workers_single_data(
            method, run_rank_0_only_axes=["tensor_parallel", "pipeline_parallel"]
        )
        try:
            return list(ray.get(calls, timeout=ANSWER_SECONDS))
        except ray.exceptions.RayError:  # NeMo-RL notices that itself
            return []

    def save_lengths(self, folder: Path) -> None:
        """Write what is known about lengths into a checkpoint."""
        self.lengths.save(folder)


def _node_of(worker: Any) -> str:
    """The address of an actor's node."""
    try:
        here: Any = ray.util.get_node_ip_address
        asked = worker.__ray_call__.remote(lambda _: here())
        return str(ray.get(asked, timeout=ANSWER_SECONDS))
    except ray.exceptions.RayError:
        return "a node that does not answer"


@contextmanager
def validating() -> Iterator[None]:
    """Reuse no prefixes in rows that are made inside this context."""
    global _validating
    _validating = True
    try:
        yield
    finally:
        _validating = False
