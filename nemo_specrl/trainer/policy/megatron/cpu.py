"""Megatron-Core on a machine without CUDA.

Megatron-Core calls CUDA in places where gloo and the CPU would do as well. :func:`megatron_on_cpu`
replaces these calls in torch; in megatron itself, only its two functions for the state of the
random number generator are replaced. Each patch says which line needs it (as of megatron-core
0.16.1, unless it names another version), and has a test that fails when megatron no longer needs
it. :data:`SINCE` names those that only later versions need.

It is meant for processes that only run a rank, because a patched torch claims to have a current
CUDA device. If CUDA is available, nothing is patched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["PATCHES", "SINCE", "megatron_on_cpu"]

_CPU = torch.device("cpu")


class _CudaMeansCpu(TorchFunctionMode):
    """Makes tensors on the CPU that are requested on ``device="cuda"``."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        return func(*args, **kwargs)


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, whatever the arguments."""


def _current_device() -> contextlib.AbstractContextManager[None]:
    """The device of new buffers, in the rotary embedding (rotary_pos_embedding.py:162), attention
    (dot_product_attention.py:123), collectives (mappings.py:91) and pipelines (p2p:190)."""
    return _replaced(torch.cuda, "current_device", lambda: _CPU)


def _literals() -> contextlib.AbstractContextManager[Any]:
    """``device="cuda"`` in the schedules (schedules.py:596, 2138), the optimizer
    (optimizer.py:481), gradient clipping (clip_grads.py:89) and the checkpoint's plan
    (state_dict_saver.py:204)."""
    return _CudaMeansCpu()


def _synchronize() -> contextlib.AbstractContextManager[None]:
    """Waiting for the device after a pipeline's messages (p2p_communication.py:242, 398) and when
    gradient buffers are freed (distributed_data_parallel.py:588)."""
    return _replaced(torch.cuda, "synchronize", _nothing)


def _current_stream() -> contextlib.AbstractContextManager[None]:
    """The stream that waits for CUDA graphs before gradients are reduced
    (param_and_grad_buffer.py:632 of 0.19.2). Without graphs it is requested, but not used."""
    return _replaced(torch.cuda, "current_stream", _nothing)


def _tensor_cuda() -> contextlib.AbstractContextManager[None]:
    """Moving a tied output layer to the device (language_module.py:244)."""
    return _replaced(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)


@contextlib.contextmanager
def _tensor_type() -> Iterator[None]:
    """The optimizer tells dtypes by names such as ``torch.cuda.FloatTensor``
    (distrib_optimizer.py:420, clip_grads.py:167)."""
    original = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        if isinstance(answer, str) and not answer.startswith("torch.cuda."):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    with _replaced(torch.Tensor, "type", type_):
        yield


@contextlib.contextmanager
def _random_state() -> Iterator[None]:
    """The states that attention dropout forks, also at a rate of 0
    (tensor_parallel/random.py:41, 72, 235)."""
    from megatron.core.tensor_parallel import random

    def read(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def write(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(state)

    with (
        _replaced(torch.cuda, "get_rng_state", read),
        _replaced(random, "_get_cuda_rng_state", read),
        _replaced(random, "_set_cuda_rng_state", write),
    ):
        yield


PATCHES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "current_device": _current_device,
    "literals": _literals,
    "synchronize": _synchronize,
    "current_stream": _current_stream,
    "tensor_cuda": _tensor_cuda,
    "tensor_type": _tensor_type,
    "random_state": _random_state,
}
"""Each patch by name; its docstring says what needs it."""

SINCE = {"current_stream": (0, 19)}
"""The first version of megatron-core that needs a patch, if that is not 0.16. Older versions also
run with the patch, so it is always applied."""


@contextlib.contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Run Megatron-Core on the CPU in this context; do nothing if CUDA is available."""
    with contextlib.ExitStack() as stack:
        if not torch.cuda.is_available():
            for patch in PATCHES.values():
                stack.enter_context(patch())
        yield
