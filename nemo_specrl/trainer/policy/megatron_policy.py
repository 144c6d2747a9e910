"""The Megatron policy as the training loop sees it: its ranks are Ray actors.

The driver holds no part of the model and does not import megatron. It deals samples to
data-parallel replicas, asks all ranks the same thing at once, and assembles weights for a refit
from the ranks' parts, one parameter at a time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_specrl.errors import (
    CheckpointError,
    ConfigError,
    PolicyError,
    SpecRLError,
    last_line,
)
from nemo_specrl.trainer.losses import token_weights
from nemo_specrl.trainer.policy.base import Float32Array, Sample
from nemo_specrl.trainer.policy.megatron_weights import (
    Architecture,
    CheckpointReader,
    Layout,
    assemble,
    parameters,
)
from nemo_specrl.trainer.policy.megatron_worker import MegatronRank
from nemo_specrl.trainer.policy.torch_model import train_in_steps
from nemo_specrl.trainer.recipe import LossConfig, PolicyConfig

__all__ = ["MegatronPolicy"]

GRACE_SECONDS = 5.0
"""How long to wait, once a rank has failed, for the reason why: the first to fail may be one that
lost its connection to another that died."""

SILENT_SECONDS = 20.0
"""How long the process of a rank may leave a ping unanswered. It answers pings while it computes,
and while it waits for other ranks."""


def _start_ray() -> None:
    address = os.environ.get("RAY_ADDRESS")
    local: dict[str, Any] = {} if address else {"include_dashboard": False}
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR, **local)
    except ConnectionError:
        raise ConfigError(
            f"RAY_ADDRESS = {address!r}: no Ray answers there; start one, or unset it"
        ) from None
    except OSError as error:  # the paths of its sockets may have 107 bytes
        raise ConfigError(
            f"Ray cannot start: {last_line(error)}; set RAY_TMPDIR to a folder with a shorter path"
        ) from None
    if threading.current_thread() is threading.main_thread():
        # Ray's own would end this process at once; the training loop ends with the step.
        signal.signal(signal.SIGTERM, before)


def _nodes() -> list[str]:
    """Ray's ids of the nodes that are alive, this process's own first."""
    own, nodes = ray.get_runtime_context().get_node_id(), ray.nodes()  # type: ignore[no-untyped-call]
    alive = [node["NodeID"] for node in nodes if node["Alive"]]
    return sorted(alive, key=lambda node: (node != own, node))


class _Actor(MegatronRank):
    """A rank as a Ray actor."""

    def open(self) -> tuple[str, int]:
        """Listen on this node's address; returns host and port."""
        address: Any = ray.util.get_node_ip_address
        host = str(address())
        return host, self.listen(host)

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Call a method with arguments that the driver has stored once for several ranks."""
        return getattr(self, method)(*arguments)

    @ray.method(concurrency_group="health")
    def pid(self) -> int:
        """Process id, also in the middle of another call."""
        return os.getpid()


def _tensor(part: npt.NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the memory of an array from Ray, which must not be written to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(part).view(dtype)


class _Watch:
    """Pings to ranks while their answers are waited for.

    Args:
        ranks: the actors; all of them, as any of them may be what the others wait for.
    """

    def __init__(self, ranks: Sequence[Any]) -> None:
        self._ranks = ranks
        self._pings: dict[Any, int] = {}
        self._since = time.monotonic()

    def silent(self) -> int | None:
        """The first rank that has left a ping unanswered for too long."""
        now = time.monotonic()
        if self._pings:
            # A ping that failed has an answer too: the rank's own call fails as well.
            _, open_ = ray.wait(list(self._pings), num_returns=len(self._pings), timeout=0)
            self._pings = {ping: self._pings[ping] for ping in open_}
            if self._pings and now - self._since > SILENT_SECONDS:
                return min(self._pings.values())
        if not self._pings and now - self._since > SILENT_SECONDS / 4:
            self._pings = {actor.pid.remote(): rank for rank, actor in enumerate(self._ranks)}
            self._since = now
        return None


class MegatronPolicy:
    """A :class:`~nemo_specrl.trainer.policy.Policy` of Megatron-Core ranks in float32.

    A Ray that this process is connected to, or that ``RAY_ADDRESS`` names, is used; otherwise one
    is started on this machine, and ended by :meth:`shutdown`. Where Ray has GPUs each rank gets
    one.

    Args:
        config: the ``policy:`` block.
        loss: the ``loss_fn:`` block.
        seed: decides which samples share an optimizer step.
        layout: of the ranks.
        nodes: of Ray, over which they are spread: this process's own, and as many others as there
            are up to this number. Each has consecutive ranks.

    Raises:
        ConfigError: the model cannot be loaded, or the layout does not divide it.
        PolicyError: a rank failed.
    """

    def __init__(
        self, config: PolicyConfig, loss: LossConfig, seed: int, layout: Layout, nodes: int
    ) -> None:
        self.config, self.loss, self.seed, self.layout = config, loss, seed, layout
        self.updates = 0
        self.architecture = Architecture.read(config.model_name)
        layout.check(self.architecture)
        CheckpointReader(self.architecture.folder)
        self._ranks: list[Any] = []
        self._pids: list[int] = []
        self._offloaded = False
        self._own_ray = not ray.is_initialized()
        if self._own_ray:
            _start_ray()
        try:
            self._start(nodes)
        except BaseException:
            self.shutdown()
            raise

    def _start(self, nodes: int) -> None:
        resources: Any = ray.cluster_resources
        gpus = 1 if resources().get("GPU", 0) >= self.layout.size else 0
        # Calls run one at a time in a thread, pings in another.
        remote: Any = ray.remote
        actor = remote(concurrency_groups={"health": 1}, num_cpus=0, num_gpus=gpus)(_Actor)
        # A folder that is given relative to this process's own.
        model = str(self.architecture.folder.absolute())
        config = self.config.model_copy(update={"model_name": model})
        size, places = self.layout.size, _nodes()[:nodes]
        self._ranks = [
            actor.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(
                    places[rank * len(places) // size], soft=False
                )
            ).remote(rank, self.layout, config, self.loss)
            for rank in range(size)
        ]
        self._pids = self._all("pid")  # they run, and have to answer from now on
        host, port = self._wait({self._ranks[0].open.remote(): 0})[0]
        self._all("start", host, port)

    # --- Policy -------------------------------------------------------------------------------

    def logprobs(self, samples: Sequence[Sample]) -> list[Float32Array]:
        """Log-probs of the response tokens; see :meth:`Policy.logprobs`."""
        return self._logprobs(samples, reference=False)

    def reference_logprobs(self, samples: Sequence[Sample]) -> list[Float32Array]:
        """Log-probs under the run's first weights; see :meth:`Policy.reference_logprobs`.

        Without a KL penalty the first weights are read from disk at each call.
        """
        return self._logprobs(samples, reference=True)

    def _logprobs(self, samples: Sequence[Sample], *, reference: bool) -> list[Float32Array]:
        dealt = self._deal(range(len(samples)), samples)
        returned = self._each("logprobs", lambda dp: ([samples[i] for i in dealt[dp]], reference))
        found: dict[int, Float32Array] = {}
        for dp, rows in self._reports(returned):
            found |= dict(zip(dealt[dp], rows, strict=True))
        return [found[i] for i in range(len(samples))]

    def train(self, samples: Sequence[Sample], *, epochs: int) -> dict[str, float]:
        """Train on a step's samples; see :meth:`Policy.train`.

        An optimizer step takes ``train_global_batch_size`` samples.
        """
        return train_in_steps(
            samples,
            epochs=epochs,
            size=self.config.train_global_batch_size,
            key=(self.seed, self.updates),
            logprobs=self.logprobs,
            step=self._optimizer_step,
        )

    def _optimizer_step(self, samples: list[Sample]) -> dict[str, float]:
        weights = token_weights(
            [len(s.response) for s in samples], token_level=self.loss.token_level_loss
        )
        # A response without advantage has no gradient: it only counts in the means.
        penalty = self.loss.reference_policy_kl_penalty > 0
        live = [i for i, s in enumerate(samples) if penalty or np.any(s.advantages)]
        sums = {"loss": 0.0, "clip_fraction": 0.0, "ratio": 0.0, "grad_norm": 0.0}
        if live:
            dealt = self._deal(live, samples)
            returned = self._each(
                "train",
                lambda dp: ([samples[i] for i in dealt[dp]], [weights[i] for i in dealt[dp]]),
            )
            for _, metrics in self._reports(returned):
                sums["grad_norm"] = metrics.pop("grad_norm")
                for name, value in metrics.items():
                    sums[name] = sums.get(name, 0.0) + value
        self.updates += 1
        return sums

    def stream_weights(
        self, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights, each gathered when it is asked for; see :meth:`Policy.stream_weights`.

        What is in memory beside the ranks' parts is one parameter, at most a layer's queries, keys
        and values, or its gate and up projections: its parts, in Ray's shared memory, and the
        tensors that they are assembled to.
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
                refs = {self._rank(rank).shard.remote(index, dtype): rank for rank in needed}
                parts = self._wait(refs)
                shards = [_tensor(parts[rank], dtype) for rank in needed]
                tensors = assemble(entry, shards, self.architecture)
                del refs, parts, shards
                yield from zip(entry.tensors, tensors, strict=True)

    def offload(self) -> None:
        """Free the gradients."""
        if not self._offloaded:
            self._all("offload")
            self._offloaded = True

    def reload(self) -> None:
        """Undo :meth:`offload`."""
        if self._offloaded:
            self._all("reload")
            self._offloaded = False

    def save(self, folder: Path) -> None:
        """Write a distributed checkpoint of Megatron; see :meth:`Policy.save`.

        It holds weights, optimizer state and the count of updates, and can be loaded in any layout.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._all("save", folder.absolute(), self.updates)

    def load(self, folder: Path) -> None:
        """Restore what :meth:`save` wrote, in this or another layout.

        Raises:
            CheckpointError: it is damaged, of another model, or of the torch policy.
        """
        if not (folder / "metadata.json").is_file():
            raise CheckpointError(
                f"{folder}: no checkpoint of a Megatron policy; resume with the "
                "policy.megatron_cfg.enabled with which the run began"
            )
        self.updates = self._all("load", folder.absolute())[0]

    def shutdown(self) -> None:
        """End the ranks, and Ray if this policy started it; see :meth:`Policy.shutdown`."""
        ranks, self._ranks = self._ranks, []
        if not ray.is_initialized():
            return
        for rank in ranks:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(rank)
        if self._own_ray:
            ray.shutdown()

    # --- the ranks ----------------------------------------------------------------------------

    def pids(self) -> list[int]:
        """Process ids of the ranks, each on its node."""
        return list(self._pids)

    def _deal(self, indices: Sequence[int], samples: Sequence[Sample]) -> list[list[int]]:
        """Deal samples to the replicas, of similar length each."""
        ordered = sorted(indices, key=lambda i: len(samples[i].prompt) + len(samples[i].response))
        return [ordered[dp :: self.layout.dp] for dp in range(self.layout.dp)]

    def _reports(self, returned: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Each replica's index and what its reporting rank returned."""
        for dp in range(self.layout.dp):
            yield dp, returned[self.layout.rank(pp=self.layout.pp - 1, dp=dp)]

    def _each(self, method: str, arguments: Callable[[int], tuple[Any, ...]]) -> list[Any]:
        """Call a method of all ranks with arguments for each replica; returns by rank."""
        stored = [ray.put(arguments(dp)) for dp in range(self.layout.dp)]
        refs = {}
        for rank in range(self.layout.size):
            _, _, dp = self.layout.place(rank)
            refs[self._rank(rank).call.remote(method, stored[dp])] = rank
        found = self._wait(refs)
        return [found[rank] for rank in range(self.layout.size)]

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all ranks; returns by rank."""
        refs = {
            getattr(self._rank(rank), method).remote(*arguments): rank
            for rank in range(self.layout.size)
        }
        found = self._wait(refs)
        return [found[rank] for rank in range(self.layout.size)]

    def _rank(self, rank: int) -> Any:
        if not self._ranks:
            raise PolicyError("the policy has been shut down, or one of its ranks has failed")
        return self._ranks[rank]

    def _wait(self, refs: dict[Any, int]) -> dict[int, Any]:
        """Wait for all answers; a rank that fails ends the policy.

        Args:
            refs: what is waited for, and of which rank.

        Returns:
            the answers by rank.

        Raises:
            SpecRLError: which a rank raised.
            PolicyError: a rank died, does not answer pings, or raised another error. It names the
                rank.
        """
        found: dict[int, Any] = {}
        errors: dict[int, Exception] = {}
        left = dict(refs)
        until = float("inf")
        watch = _Watch(self._ranks if self._pids else [])
        try:
            while left and time.monotonic() < until:
                done, _ = ray.wait(list(left), timeout=1.0)
                if not errors and (silent := watch.silent()) is not None:
                    raise PolicyError(
                        f"{self.layout.describe(silent)} of the Megatron policy has not answered "
                        f"for {SILENT_SECONDS:.0f} s; the run can be resumed from its last "
                        "checkpoint"
                    )
                for ref in done:
                    rank = left.pop(ref)
                    try:
                        found[rank] = ray.get(ref)
                    except ray.exceptions.RayError as error:
                        errors[rank] = error
                        until = min(until, time.monotonic() + GRACE_SECONDS)
                        if isinstance(error, ray.exceptions.RayActorError):
                            until = 0.0
        finally:
            if errors or left:
                self.shutdown()
        if errors:
            raise self._reason(errors) from None
        return found

    def _reason(self, errors: dict[int, Exception]) -> Exception:
        """Which of the ranks' errors is the reason of the others."""
        for rank, error in errors.items():
            if isinstance(error, ray.exceptions.RayActorError):
                return PolicyError(
                    f"{self.layout.describe(rank)} of the Megatron policy died; the run can be "
                    "resumed from its last checkpoint"
                )
        for error in errors.values():
            cause = getattr(error, "cause", None)
            if isinstance(cause, SpecRLError):
                return cause
        rank, error = next(iter(errors.items()))
        return PolicyError(
            f"{self.layout.describe(rank)} of the Megatron policy failed: {last_line(error)}"
        )
