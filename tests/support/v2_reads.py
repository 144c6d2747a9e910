"""Fails where the host reads the value of a tensor that a GPU would have, which has to wait for it.

Launches of kernels are let through: Triton's interpreter, and the numpy reference in its place,
read the values that a GPU would.
"""

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

METHODS = (
    *("item", "tolist", "cpu", "numpy"),
    *("__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__"),
)
_watching = False


class NothingRead(TorchDispatchMode):
    """No operation of torch reads a value or copies it."""

    READS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert name.rstrip("2_") not in self.READS and name not in self.READS, name
        if name in ("_to_copy", "copy_", "to") and not _non_blocking(
            function, args, kwargs
        ):  # "to" as such in inference mode
            raise AssertionError(f"{name}: a copy that waits")
        if name in ("index", "index_put", "index_put_"):
            chosen = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            assert not chosen, f"{name}: how many are chosen is read"
        return function(*args, **(kwargs or {}))


def _non_blocking(function, args, kwargs):
    """Whether an operation copies without waiting, by whichever way it was told so."""
    names = (argument.name for argument in function._schema.arguments)
    return bool({**dict(zip(names, args, strict=False)), **(kwargs or {})}.get("non_blocking"))


def _forbidden(name, original):
    def method(*args, **kwargs):
        assert not _watching, f"Tensor.{name}: a value is read on the host"
        return original(*args, **kwargs)

    return method


@contextlib.contextmanager
def nothing_read(monkeypatch):
    """Neither an operation of torch nor a method of tensors reads a value."""
    global _watching
    with monkeypatch.context() as patched:
        for name in METHODS:
            patched.setattr(torch.Tensor, name, _forbidden(name, getattr(torch.Tensor, name)))
        _watching = True
        try:
            with NothingRead(), _nothing_awaited():
                yield
        finally:
            _watching = False


@contextlib.contextmanager
def _nothing_awaited():
    """On a GPU, torch itself fails where the host waits for it, launches of kernels included."""
    if not torch.cuda.is_available():
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextlib.contextmanager
def _let_through():
    global _watching
    before, _watching = _watching, False
    try:
        with _disable_current_modes():
            yield
    finally:
        _watching = before


class Launches:
    """Stands for the kernels of V2 drafting: launches them as they are, and notes their names."""

    def __init__(self, kernels):
        self._kernels, self.SCATTERED, self.launched = kernels, kernels.SCATTERED, []

    def __getattr__(self, name):
        return _Kernel(name, getattr(self._kernels, name), self.launched)


class _Kernel:
    def __init__(self, name, kernel, launched):
        self._name, self._kernel, self._launched = name, kernel, launched

    def __getitem__(self, grid):
        def launch(*args):
            self._launched.append(self._name)
            with _let_through():
                self._kernel[grid](*args)

        return launch
