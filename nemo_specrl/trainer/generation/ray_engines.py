"""Several engines of the embedded trainer, each a Ray actor, on one node or several.

The prompts of a batch are distributed so that all engines finish at about the same time. The
rollout cache is a cluster's, with shards on the engines' nodes. Weights reach the engines through
shared memory, tensor by tensor.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import ray

from nemo_specrl.cache.cluster.cluster_cache import ClusterCache
from nemo_specrl.cache.cluster.run_cache import open_run_cache
from nemo_specrl.cache.metrics import StoreStats
from nemo_specrl.engine.load_balance import balanced_order, row_costs
from nemo_specrl.engine.vllm.environment import local_cpu_environment
from nemo_specrl.errors import CacheError, EngineError
from nemo_specrl.rollout import prompt_key
from nemo_specrl.trainer.generation.engine import (
    Engine,
    Response,
    RolloutTimes,
    cache_folder,
    tokenizer_identity,
)
from nemo_specrl.trainer.policy.base import to_array, to_tensor
from nemo_specrl.trainer.policy_config import model_folder
from nemo_specrl.trainer.ray_actors import Actors, connect, gpus
from nemo_specrl.trainer.recipe import Recipe

if TYPE_CHECKING:
    import torch

__all__ = ["RayEngines"]

logger = logging.getLogger(__name__)

BUCKET_BYTES = 4 * 2**20
"""Small tensors are sent to the engines together, once they have this many bytes."""

Tensors = list[tuple[str, npt.NDArray[Any]]]


class EngineActor:
    """An engine as a Ray actor."""

    def __init__(self) -> None:
        self._tensors: queue.Queue[Tensors | None] = queue.Queue(1)
        self._refitting = False

    def start(self, recipe: Recipe, cache: ClusterCache | None) -> str:
        """Build the engine; returns the id of this actor's node in Ray."""
        local_cpu_environment()
        self.engine = Engine(recipe, cache)
        return str(ray.get_runtime_context().get_node_id())

    def rollouts(
        self, prompts: list[list[int]], attempt: int, upcoming: list[list[int]]
    ) -> tuple[list[list[Response]], RolloutTimes]:
        """Roll out a group of responses for each prompt; returns them and their times."""
        groups = self.engine.rollouts(prompts, attempt, upcoming) if prompts else []
        return groups, self.engine.take_times()

    def heldout(self, prompts: list[list[int]], samples: int) -> list[list[Response]]:
        """Decode responses for an evaluation, without the cache."""
        return self.engine.heldout(prompts, samples) if prompts else []

    def set_fresh_fraction(self, fresh_fraction: float) -> None:
        """Set the share of rows that are decoded without a draft."""
        self.engine.speculative.fresh_fraction = fresh_fraction

    def expect_weights(self) -> None:
        """Prepare for :meth:`feed`, which may come before :meth:`refit`."""
        self._refitting = True

    def refit(self, policy_version: int) -> None:
        """Load the weights that :meth:`feed` receives."""
        try:
            self.engine.refit(self._fed(), policy_version)
        finally:
            self._refitting = False

    def _fed(self) -> Iterator[tuple[str, torch.Tensor]]:
        while tensors := self._tensors.get():
            for name, array in tensors:
                yield name, to_tensor(array, self.engine.recipe.dtype)
        if tensors is None:
            raise EngineError("the stream of weights ended early")

    @ray.method(concurrency_group="weights")
    def feed(self, tensors: Tensors | None) -> None:
        """Pass tensors on to :meth:`refit`; return when it has begun to load the previous ones.

        Args:
            tensors: names and values. Empty: there are no more. None: the stream ended early.
        """
        while self._refitting:
            with contextlib.suppress(queue.Full):
                self._tensors.put(tensors, timeout=0.5)
                return

    @ray.method(concurrency_group="health")
    def pid(self) -> int:
        """Process id; answers even during another call."""
        return os.getpid()


class RayEngines:
    """Several engines of a run, each a Ray actor, with the interface of :class:`.InProcessEngine`.

    The Ray cluster that this process is connected to, or that ``RAY_ADDRESS`` names, is used;
    otherwise Ray is started on this machine, and ended by :meth:`shutdown`. If Ray has GPUs for all
    ranks and engines, each engine gets one.

    Args:
        recipe: the whole recipe.
        resume_from: checkpoint of the run, with the cache; None at the start of a run.

    Attributes:
        heldout_s: duration of the last plain decoding of held-out prompts, seconds.

    Raises:
        ConfigError: vLLM refuses the model or an argument.
        CacheError: a node's cache is in use, belongs to another tokenizer, or cannot be written.
        EngineError: an engine died.
    """

    def __init__(self, recipe: Recipe, resume_from: Path | None) -> None:
        assert recipe.engines is not None
        count, nodes = recipe.engines
        model = str(model_folder(recipe.policy.model_name).absolute())
        recipe = recipe.model_copy(
            update={"policy": recipe.policy.model_copy(update={"model_name": model})}
        )
        self.policy_version = 0
        self.heldout_s = 0.0
        self.cache: ClusterCache | None = None
        self._times = RolloutTimes()
        self._engines: Actors | None = None
        self._own_ray = connect()
        try:
            if recipe.spec_rl.enabled:
                self.cache = _open_cache(recipe, resume_from)
            tp, pp, dp = recipe.parallelism
            ranks = tp * pp * dp if recipe.policy.megatron_cfg.enabled else 0
            self._engines = Actors(
                EngineActor,
                [()] * count,
                groups=("weights",),
                nodes=nodes,
                gpu=gpus() >= ranks + count,
                name=lambda index: f"engine {index}",
                error=EngineError,
                on_failure=self._end_engines,
            )
            self._engines.ready()
            used = self._engines.all("start", recipe, self.cache)
            if self.cache is not None:
                self.cache.set_preferred_nodes(set(used))
        except BaseException:
            self.shutdown()
            raise

    @property
    def engines(self) -> Actors:
        """The actors of the engines."""
        assert self._engines is not None
        return self._engines

    def fingerprint_initial_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Do nothing: only a journal needs it, which the cache of a cluster does not have."""

    def refit(self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        """Stream new weights into all engines, tensor by tensor.

        A tensor, or several small ones together, is written to shared memory once for all engines
        of a node, while they load the previous one.

        Args:
            weights: :meth:`Policy.stream_weights`, in the engines' data type.
            policy_version: version of these weights.

        Raises:
            EngineError: an engine died or failed; all of them are ended.
            Exception: whatever ``weights`` raised. The engines then refuse further requests.
        """
        engines = self.engines
        engines.all("expect_weights")
        loading = {engines[i].refit.remote(policy_version): i for i in range(len(engines))}
        some: Tensors = []
        try:
            for name, tensor in weights:
                if tensor.nbytes >= BUCKET_BYTES:
                    self._feed([(name, to_array(tensor.cpu().contiguous()))])
                    continue
                # A copy: the tensor is valid only until the next one is requested.
                some.append((name, to_array(tensor.to("cpu", copy=True).contiguous())))
                if sum(array.nbytes for _, array in some) >= BUCKET_BYTES:
                    self._feed(some)
                    some = []
            if some:
                self._feed(some)
            self._feed([])
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to be raised
                self._feed(None)
            raise
        engines.wait(loading)
        self.policy_version = policy_version

    def _feed(self, tensors: Tensors | None) -> None:
        engines, stored = self.engines, ray.put(tensors)
        engines.wait({engines[i].feed.remote(stored): i for i in range(len(engines))})

    def rollouts(
        self, prompts: list[list[int]], attempt: int = 0, upcoming: list[list[int]] | None = None
    ) -> list[list[Response]]:
        """Roll out a group of responses for each prompt.

        All rollouts of a group are made by the same engine, so that they draft for each other.

        Args:
            prompts: token ids.
            attempt: index of this batch in its step.
            upcoming: prompts of the next batch, for ``run_ahead``.
        """
        started = time.perf_counter()
        count = len(self.engines)
        order = balanced_order(self._costs(prompts), count)
        shares = self._call(
            "rollouts",
            prompts,
            order,
            lambda engine: (attempt, list(upcoming or ())[engine::count]),
        )
        sums = sum((times.engine for _, times in shares), self._times.engine)
        self._times.rollout_s += time.perf_counter() - started
        self._times.decoded_tokens += sum(times.decoded_tokens for _, times in shares)
        self._times.response_tokens += sum(times.response_tokens for _, times in shares)
        self._times.engine = sums
        return _in_order(order, [groups for groups, _ in shares])

    def _costs(self, prompts: list[list[int]]) -> list[float]:
        """Expected cost of each prompt: the mean length of its earlier responses, tokens."""
        if self.cache is None:
            return [1.0] * len(prompts)
        keys = [prompt_key(prompt) for prompt in prompts]
        return row_costs(keys, self.cache.outlines(keys))

    def heldout(self, prompts: list[list[int]], samples: int) -> list[list[Response]]:
        """Decode responses for an evaluation, without the cache."""
        order = list(range(len(prompts)))
        started = time.perf_counter()
        shares = self._call("heldout", prompts, order, lambda _: (samples,))
        self.heldout_s = time.perf_counter() - started
        return _in_order(order, shares)

    def _call(
        self,
        method: str,
        prompts: Sequence[list[int]],
        order: list[int],
        arguments: Callable[[int], tuple[Any, ...]],
    ) -> list[Any]:
        """Call a method of each engine with its share of the prompts; returns answers by engine."""
        engines, size = self.engines, -(-len(prompts) // len(self.engines))
        refs = {}
        for i in range(len(engines)):
            share = [prompts[k] for k in order[i * size : (i + 1) * size]]
            refs[getattr(engines[i], method).remote(share, *arguments(i))] = i
        found = engines.wait(refs)
        return [found[i] for i in range(len(engines))]

    def take_times(self) -> RolloutTimes:
        """Return the times since the last call. Seconds are means over the engines."""
        times, self._times = self._times, RolloutTimes()
        times.engine = times.engine.of_engines(len(self.engines))
        if self.cache is not None:
            times.engine.cache_errors += self.cache.take_failures()
        return times

    def set_fresh_fraction(self, fresh_fraction: float) -> None:
        """Set the share of rows that are decoded without a draft from the next batch on."""
        self.engines.all("set_fresh_fraction", fresh_fraction)

    def save(self, folder: Path) -> None:
        """Write the cache into a checkpoint. Call it between two steps; it may take minutes."""
        if self.cache is None:
            return
        try:
            self.cache.snapshot(folder, self.policy_version)
        except CacheError as error:  # a checkpoint without the cache costs only speed
            logger.warning("rollout cache: %s; the checkpoint is without it", error)

    def on_checkpoint_complete(self) -> None:
        """Do nothing: the cache of a cluster has no journal."""

    def stores(self) -> list[StoreStats]:
        """The statistics of the stores on all nodes that answer; empty if there is no cache."""
        return [] if self.cache is None else list(self.cache.stats().values())

    def shutdown(self) -> None:
        """End the engines and close the cache; also ends Ray if it was started for them."""
        self._end_engines()
        cache, self.cache = self.cache, None
        if cache is not None and ray.is_initialized():
            try:
                cache.close()
            except Exception as error:  # any error, including Ray's: at worst, drafts are lost
                logger.warning("closing the rollout cache: %s", error)
        if self._own_ray:
            ray.shutdown()

    def _end_engines(self) -> None:
        # Ray is left running: another thread may be writing a checkpoint with it.
        if self._engines is not None:
            self._engines.end()


def _in_order(order: list[int], shares: list[list[Any]]) -> list[Any]:
    """Put results by engine into the order of the prompts."""
    results: list[Any] = [None] * len(order)
    for index, result in zip(order, (r for share in shares for r in share), strict=True):
        results[index] = result
    return results


def _open_cache(recipe: Recipe, resume_from: Path | None) -> ClusterCache:
    """Open a run's cache: the checkpoint's content, and what the nodes' disks have since then."""
    cache, _ = open_run_cache(
        cache_folder(recipe),
        recipe.spec_rl.cache,
        tokenizer_id=tokenizer_identity(recipe.policy.model_name),
        checkpoint=resume_from,
    )
    return cache
