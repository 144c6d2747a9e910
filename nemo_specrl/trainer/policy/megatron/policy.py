"""The Megatron policy as the training loop sees it: its ranks are Ray actors.

The driver holds no part of the model and does not import megatron. It distributes samples over the
data-parallel replicas, calls all ranks at once, and assembles weights for a refit from the ranks'
parts, one parameter at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
import torch

from nemo_specrl.errors import CheckpointError, PolicyError
from nemo_specrl.monitoring import names as metric
from nemo_specrl.trainer.policy.base import Float32Array, Sample, to_tensor
from nemo_specrl.trainer.policy.megatron.ray_actors import Actors, connect, gpus
from nemo_specrl.trainer.policy.megatron.weights import (
    Architecture,
    CheckpointReader,
    Layout,
    assemble,
    parameters,
)
from nemo_specrl.trainer.policy.megatron.worker import LOOPBACK, MegatronRank
from nemo_specrl.trainer.policy.steps import SteppingPolicy
from nemo_specrl.trainer.policy_config import PolicyConfig
from nemo_specrl.trainer.recipe import LossConfig

__all__ = ["MegatronPolicy"]


class _Actor(MegatronRank):
    """A rank as a Ray actor."""

    def open(self, one_node: bool) -> tuple[str, int]:
        """Listen for the other ranks, which are on this node or others; returns host and port."""
        address: Any = ray.util.get_node_ip_address
        host = LOOPBACK if one_node else str(address())
        return host, self.listen(host)

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Call a method with arguments that the driver has stored once for several ranks."""
        return getattr(self, method)(*arguments)

    @ray.method(concurrency_group="health")
    def pid(self) -> int:
        """Process id; answers even during another call."""
        return os.getpid()


class MegatronPolicy(SteppingPolicy):
    """A :class:`~nemo_specrl.trainer.policy.Policy` of Megatron-Core ranks in float32.

    The Ray cluster that this process is connected to, or that ``RAY_ADDRESS`` names, is used;
    otherwise Ray is started on this machine, and ended by :meth:`shutdown`. If Ray has enough GPUs,
    each rank gets one.

    Args:
        config: the ``policy:`` block.
        loss: the ``loss_fn:`` block.
        seed: decides which samples share an optimizer step.
        layout: layout of the ranks.
        nodes: largest number of Ray nodes over which the ranks are spread, this process's own
            first. Each node has consecutive ranks.

    Raises:
        ConfigError: the model cannot be loaded, or the layout does not divide it.
        PolicyError: a rank failed.
    """

    def __init__(
        self, config: PolicyConfig, loss: LossConfig, seed: int, layout: Layout, nodes: int
    ) -> None:
        super().__init__(config, loss, seed)
        self.layout = layout
        self.architecture = Architecture.read(config.model_name)
        layout.check(self.architecture)
        CheckpointReader(self.architecture.folder)
        self._ranks: Actors | None = None
        self._offloaded = False
        self._own_ray = connect()
        try:
            self._start(nodes)
        except BaseException:
            self.shutdown()
            raise

    def _start(self, nodes: int) -> None:
        # Other nodes have a different working directory.
        model = str(self.architecture.folder.absolute())
        config = self.config.model_copy(update={"model_name": model})
        size = self.layout.size
        self._ranks = ranks = Actors(
            _Actor,
            [(rank, self.layout, config, self.loss) for rank in range(size)],
            nodes=nodes,
            gpu=gpus() >= size,
            name=lambda rank: f"{self.layout.describe(rank)} of the Megatron policy",
            error=PolicyError,
            on_failure=self._end_ranks,
        )
        ranks.ready()
        host, port = ranks.wait({ranks[0].open.remote(ranks.nodes == 1): 0})[0]
        ranks.all("start", host, port)

    @property
    def ranks(self) -> Actors:
        """The actors of the ranks."""
        assert self._ranks is not None
        return self._ranks

    # --- Policy -------------------------------------------------------------------------------

    def logprobs(self, samples: Sequence[Sample]) -> list[Float32Array]:
        """Log-probs of the response tokens; see :meth:`Policy.logprobs`."""
        return self._logprobs(samples, reference=False)

    def reference_logprobs(self, samples: Sequence[Sample]) -> list[Float32Array]:
        """Log-probs under the run's first weights; see :meth:`Policy.reference_logprobs`.

        Without a KL penalty, the first weights are read from disk at each call.
        """
        return self._logprobs(samples, reference=True)

    def _logprobs(self, samples: Sequence[Sample], *, reference: bool) -> list[Float32Array]:
        dealt = self._deal(samples)
        returned = self._each("logprobs", lambda dp: ([samples[i] for i in dealt[dp]], reference))
        found: dict[int, Float32Array] = {}
        for dp, rows in self._reports(returned):
            found |= dict(zip(dealt[dp], rows, strict=True))
        return [found[i] for i in range(len(samples))]

    def optimizer_step(self, samples: list[Sample], weights: list[float]) -> dict[str, float]:
        """Take an optimizer step; see :meth:`SteppingPolicy.optimizer_step`."""
        sums = {
            metric.LOSS: 0.0,
            metric.CLIP_FRACTION: 0.0,
            metric.RATIO: 0.0,
            metric.GRAD_NORM: 0.0,
        }
        if samples:
            dealt = self._deal(samples)
            returned = self._each(
                "train",
                lambda dp: ([samples[i] for i in dealt[dp]], [weights[i] for i in dealt[dp]]),
            )
            for _, metrics in self._reports(returned):
                sums[metric.GRAD_NORM] = metrics.pop(metric.GRAD_NORM)
                for name, value in metrics.items():
                    sums[name] = sums.get(name, 0.0) + value
        return sums

    def not_finite(self) -> str | None:
        """Name of a parameter that is not finite; see :meth:`Policy.not_finite`."""
        return next((name for name in self.ranks.all("not_finite") if name is not None), None)

    def stream_weights(
        self, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights, each gathered when it is requested; see :meth:`Policy.stream_weights`.

        In addition to the ranks' parts, one parameter is in memory at a time, at most a layer's
        queries, keys and values, or its gate and up projections: its parts, in Ray's shared memory,
        and the tensors that are assembled from them.
        """
        dtype = dtype or torch.float32
        layout = self.layout
        for stage in range(layout.pp):
            for index, entry in enumerate(parameters(self.architecture, layout, stage)):
                if entry.copy:
                    continue
                needed = [layout.rank(tp=i, pp=stage) for i in range(layout.tp)]
                if entry.split == "all":
                    del needed[1:]
                refs = {self.ranks[rank].shard.remote(index, dtype): rank for rank in needed}
                parts = self.ranks.wait(refs)
                shards = [to_tensor(parts[rank], dtype) for rank in needed]
                tensors = assemble(entry, shards, self.architecture)
                del refs, parts, shards
                yield from zip(entry.tensors, tensors, strict=True)

    def offload(self) -> None:
        """Free the gradients."""
        if not self._offloaded:
            self.ranks.all("offload")
            self._offloaded = True

    def reload(self) -> None:
        """Undo :meth:`offload`."""
        if self._offloaded:
            self.ranks.all("reload")
            self._offloaded = False

    def save(self, folder: Path) -> None:
        """Write a distributed checkpoint of Megatron; see :meth:`Policy.save`.

        It holds weights, optimizer state and the count of updates, and can be loaded in any layout.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.ranks.all("save", folder.absolute(), self.updates)

    def load(self, folder: Path) -> None:
        """Restore what :meth:`save` wrote, in this or another layout.

        Raises:
            CheckpointError: it is damaged, or belongs to another model or to the torch policy.
        """
        if not (folder / "metadata.json").is_file():
            raise CheckpointError(
                f"{folder}: no checkpoint of a Megatron policy; resume with the "
                "policy.megatron_cfg.enabled with which the run began"
            )
        self.updates = self.ranks.all("load", folder.absolute())[0]

    def shutdown(self) -> None:
        """End the ranks, and Ray if this policy started it; see :meth:`Policy.shutdown`."""
        self._end_ranks()
        if self._own_ray:
            ray.shutdown()

    def _end_ranks(self) -> None:
        # Ray is left running: if a rank fails in the saving thread, other threads still use Ray.
        if self._ranks is not None:
            self._ranks.end()

    # --- the ranks ----------------------------------------------------------------------------

    def pids(self) -> list[int]:
        """Process id of each rank on its node."""
        return list(self.ranks.pids)

    def _deal(self, samples: Sequence[Sample]) -> list[list[int]]:
        """Distribute samples of similar lengths over the replicas; returns indices by replica."""
        lengths = [len(sample.prompt) + len(sample.response) for sample in samples]
        ordered = sorted(range(len(samples)), key=lengths.__getitem__)
        return [ordered[dp :: self.layout.dp] for dp in range(self.layout.dp)]

    def _reports(self, returned: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """The index of each replica, and what its reporting rank returned."""
        for dp in range(self.layout.dp):
            yield dp, returned[self.layout.rank(pp=self.layout.pp - 1, dp=dp)]

    def _each(self, method: str, arguments: Callable[[int], tuple[Any, ...]]) -> list[Any]:
        """Call a method of all ranks, with arguments by replica; returns answers by rank."""
        stored = [ray.put(arguments(dp)) for dp in range(self.layout.dp)]
        refs = {}
        for rank in range(self.layout.size):
            _, _, dp = self.layout.place(rank)
            refs[self.ranks[rank].call.remote(method, stored[dp])] = rank
        found = self.ranks.wait(refs)
        return [found[rank] for rank in range(self.layout.size)]
