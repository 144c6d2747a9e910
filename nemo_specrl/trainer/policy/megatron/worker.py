"""One rank of a Megatron policy: its part of the model, of the batches and of the optimizer.

All ranks are called at the same time, with the same method (:mod:`.policy` does that through Ray).
They communicate by Megatron's process groups. Nothing here depends on Ray.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy.typing as npt
import psutil
import torch
import torch.distributed

from nemo_specrl.errors import CheckpointError, last_line, may_pass
from nemo_specrl.monitoring import names as metric
from nemo_specrl.trainer.checkpoint import write_error
from nemo_specrl.trainer.divergence import first_not_finite
from nemo_specrl.trainer.policy.base import Float32Array, Sample, to_array
from nemo_specrl.trainer.policy.megatron.cpu import megatron_on_cpu
from nemo_specrl.trainer.policy.megatron.weights import Architecture, Layout
from nemo_specrl.trainer.policy.torch.model import MicroBatch
from nemo_specrl.trainer.policy_config import PolicyConfig
from nemo_specrl.trainer.recipe import LossConfig

__all__ = ["LOOPBACK", "MegatronRank"]

_distributed: Any = torch.distributed

COLLECTIVE_SECONDS = 600
"""How long a rank waits for the others before it gives up."""

LOOPBACK = "127.0.0.1"
"""Address by which the ranks of one node find each other; the network does not reach it."""


class MegatronRank:
    """A rank in its own process.

    Args:
        rank: index in the layout.
        layout: layout of all ranks.
        config: the ``policy:`` block.
        loss: the ``loss_fn:`` block.
    """

    def __init__(self, rank: int, layout: Layout, config: PolicyConfig, loss: LossConfig) -> None:
        self.rank, self.layout, self.config, self.loss = rank, layout, config, loss
        self.tp, self.stage, _ = layout.place(rank)
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self._on_cpu = contextlib.ExitStack()
        self._store: Any = None
        self.reference: torch.nn.Module | None = None

    @property
    def _reports(self) -> bool:
        """Whether this rank has the results of its data-parallel replica."""
        return self.stage == self.layout.pp - 1 and self.tp == 0

    def listen(self, host: str) -> int:
        """Open the store by which the ranks find each other, on the first rank.

        It listens only on ``host``. A store that opens its port itself listens on all addresses of
        the machine, without authentication.

        Returns:
            the port.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, 0), family=family)
        port = int(listening.getsockname()[1])
        self._store = _distributed.TCPStore(
            host,
            port,
            self.layout.size,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        return port

    def start(self, host: str, port: int) -> None:
        """Connect to the other ranks, and load the model.

        Raises:
            ConfigError: the model's weights cannot be read.
        """
        size = self.layout.size
        timeout = datetime.timedelta(seconds=COLLECTIVE_SECONDS)
        store = self._store or _distributed.TCPStore(host, port, size, is_master=False)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        interface = _interface_towards(host, port)
        if interface is not None:
            # Otherwise Gloo uses the address of the node's host name. On Debian that is a loopback
            # address, which ranks on other nodes cannot reach.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        torch.distributed.init_process_group(
            backend, store=store, rank=self.rank, world_size=size, timeout=timeout
        )
        self._on_cpu.enter_context(megatron_on_cpu())
        from megatron.core import parallel_state, tensor_parallel

        parallel_state.initialize_model_parallel(self.layout.tp, self.layout.pp)
        # Nothing here is random, but attention reads the states of the generators.
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        from nemo_specrl.trainer.policy.megatron import model

        self.megatron = model
        self.architecture = Architecture.read(self.config.model_name)
        self.module = self._build()
        self.model, self.optimizer = model.build_optimizer(self.module, self.config)
        self.parameters = model.local_parameters(
            self.module, self.architecture, self.layout, self.stage
        )
        if self.loss.reference_policy_kl_penalty > 0:
            self.reference = self._build().requires_grad_(False)

    def _build(self) -> torch.nn.Module:
        return self.megatron.build_model(self.architecture, self.layout).to(self.device)

    # --- log-probs and training ---------------------------------------------------------------

    def logprobs(self, samples: Sequence[Sample], reference: bool) -> list[Float32Array] | None:
        """Compute log-probs of this replica's samples.

        Args:
            samples: samples of the data-parallel replica, the same on each of its ranks.
            reference: whether to use the run's first weights instead of the current ones.

        Returns:
            float32 ``[n]`` for each sample, nats; None on ranks that do not have them.
        """
        model: torch.nn.Module = self.model
        if reference:
            model = self.reference or self._build()
        batches = MicroBatch.split(samples, self.config.train_micro_batch_size)
        found: dict[int, Float32Array] = {}
        for batch, values in zip(batches, self._forward(model, batches), strict=self._reports):
            rows = batch.gather(values.cpu())
            found |= {id(s): row for s, row in zip(batch.samples, rows, strict=True)}
        return [found[id(sample)] for sample in samples] if self._reports else None

    @torch.no_grad()
    def _forward(self, model: torch.nn.Module, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Log-probs of each micro-batch, ``[b, t]``; an empty list before the last stage."""

        def keep(index: int, logits: torch.Tensor, *, non_loss_data: bool) -> torch.Tensor:
            return self._token_logprobs(batches[index], logits)

        return self._run(model, batches, keep, forward_only=True)

    def train(self, samples: Sequence[Sample], weights: Sequence[float]) -> dict[str, float] | None:
        """Take an optimizer step together with the other ranks.

        Args:
            samples: samples of the data-parallel replica, the same on each of its ranks; may be
                empty.
            weights: weight of each sample's tokens in the step's loss.

        Returns:
            sums over the samples by name, and ``grad_norm`` of the whole step; None on ranks that
            do not have them.
        """
        sums = self.accumulate(samples, weights)
        _, grad_norm, _ = self.optimizer.step()
        return sums | {metric.GRAD_NORM: float(grad_norm)} if self._reports else None

    def accumulate(self, samples: Sequence[Sample], weights: Sequence[float]) -> dict[str, float]:
        """Compute the gradients of an optimizer step, summed over the replicas."""
        from megatron.core.distributed import finalize_model_grads

        weight = {id(s): w for s, w in zip(samples, weights, strict=True)}
        batches = MicroBatch.split(samples, self.config.train_micro_batch_size)
        references: list[torch.Tensor] = []
        if self.reference is not None:
            references = self._forward(self.reference, batches)

        def loss(index: int, logits: torch.Tensor) -> tuple[Any, ...]:
            batch = batches[index]
            logprobs = self._token_logprobs(batch, logits)
            reference = references[index] if references else None
            value, logged = batch.loss(logprobs, weight, self.loss, reference)
            # The 1 is a token count, which Megatron ignores: the weights are applied already.
            return value, torch.ones((), dtype=torch.int, device=self.device), logged

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        sums: dict[str, float] = {}
        for logged in self._run(self.model, batches, loss, forward_only=False):
            for name, value in logged.items():
                sums[name] = sums.get(name, 0.0) + value
        # Sums over replicas, over TP ranks for q and k norms, and over a tied embedding's copies.
        finalize_model_grads([self.model])
        return sums

    def _token_logprobs(self, batch: MicroBatch, logits: torch.Tensor) -> torch.Tensor:
        tokens = batch.tokens.to(self.device)
        temperature = self.config.generation.training_temperature
        return self.megatron.token_logprobs(logits, tokens, self.architecture, temperature)

    def _run(
        self,
        model: torch.nn.Module,
        batches: Sequence[MicroBatch],
        work: Callable[..., Any],
        *,
        forward_only: bool,
    ) -> list[Any]:
        """Run micro-batches through Megatron's schedule.

        Args:
            model: this rank's part.
            batches: the micro-batches, whose sequences may differ in length.
            work: called on the last stage with a micro-batch's index and logits.
            forward_only: whether to skip the backward pass.

        Returns:
            for each micro-batch, what ``work`` returned, or for a loss, its last item; empty on all
            stages but the last one.
        """
        if not batches:
            return []
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def step(indices: Iterator[int], model: torch.nn.Module) -> tuple[Any, Any]:
            index = next(indices)
            tokens = batches[index].tokens.to(self.device)
            length = tokens.shape[1]
            positions = torch.arange(length, device=self.device).expand_as(tokens)
            mask = self.megatron.causal_mask(length).to(self.device)
            return model(tokens, positions, mask), partial(work, index)

        returned: list[Any] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(range(len(batches))),
            model=[model],
            num_microbatches=len(batches),
            # Required, but without effect for sequences of variable lengths.
            seq_length=max(batch.tokens.shape[1] for batch in batches),
            micro_batch_size=self.config.train_micro_batch_size,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return returned

    # --- weights and files --------------------------------------------------------------------

    def not_finite(self) -> str | None:
        """Name of a parameter whose part on this rank is not finite; None if all are."""
        return first_not_finite((entry.tensors[0], tensor) for entry, tensor in self.parameters)

    def shard(self, index: int, dtype: torch.dtype) -> npt.NDArray[Any]:
        """Return this rank's part of one of its stage's parameters.

        Args:
            index: index in ``parameters``.
            dtype: data type to cast it to.

        Returns:
            the values, as :func:`~nemo_specrl.trainer.policy.base.to_array` returns them.
        """
        return to_array(self.parameters[index][1].detach().to(dtype).cpu())

    def offload(self) -> None:
        """Free the gradients."""
        self.model.offload_grad_buffers(empty_cache=self.device.type == "cuda")

    def reload(self) -> None:
        """Undo :meth:`offload`."""
        self.model.restore_grad_buffers()

    def save(self, folder: Path, updates: int) -> None:
        """Write this rank's part of a distributed checkpoint.

        Args:
            folder: exists, and is the same for all ranks.
            updates: number of optimizer steps made so far.

        Raises:
            CheckpointError: it cannot be written.
            RuntimeError: the same, because of a disk, a node or a link that failed.
        """
        from torch.distributed.checkpoint.api import CheckpointException

        extra = {"updates": updates}
        try:
            self.megatron.save_checkpoint(folder, self.module, self.optimizer, extra)
        # megatron and torch raise many kinds; CheckpointException is not an Exception.
        except (Exception, CheckpointException) as error:
            if _may_pass(error):
                raise RuntimeError(f"{folder}: cannot be written: {last_line(error)}") from None
            raise write_error(folder, error) from None

    def load(self, folder: Path) -> int:
        """Load a checkpoint, which may have another layout.

        Returns:
            the number of optimizer steps made before it.

        Raises:
            CheckpointError: it is damaged, or belongs to another model.
            RuntimeError: it cannot be read, because of a disk, a node or a link that failed.
        """
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            extra = self.megatron.load_checkpoint(folder, self.module, self.optimizer)
        # Damaged files raise many kinds; CheckpointException is not an Exception.
        except (Exception, CheckpointException) as error:
            if _may_pass(error):
                raise RuntimeError(f"{folder}: cannot be read: {last_line(error)}") from None
            raise CheckpointError(
                f"{folder}: not a checkpoint of this model: {last_line(error)}"
            ) from None
        return int(extra["updates"])


def _may_pass(error: BaseException) -> bool:
    """Whether a disk, a node or a link has failed, rather than the checkpoint.

    The driver then reports a failed rank, after which a batch script starts the run again.
    """
    of_ranks = getattr(error, "failures", {})  # of a CheckpointException, with their tracebacks
    errors = (error, *(each for each, _ in of_ranks.values()))
    return any(isinstance(e, torch.distributed.DistError) or may_pass(e) for e in errors)


def _interface_towards(host: str, port: int) -> str | None:
    """Name of the network interface by which this machine reaches ``host``; None if not known."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == own for address in addresses):
            return str(name)
    return None
