"""Reads Megatron's distributed checkpoints as data, so that nothing in one is executed.

By default, megatron-core (0.16.1, and 0.19.2 by its source) and torch's distributed checkpoints
(2.13) read two kinds of pickles that can call any function: the file ``.metadata``
(``FileSystemReader.read_metadata``), and the objects next to the tensors in ``*.distcp``
(``DefaultLoadPlanner.load_bytes``, by ``torch.load(..., weights_only=False)``). ``common.pt`` is
read with torch.load's safe default.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.checkpoint.filesystem

from nemo_specrl.errors import IncompatibleVersion

__all__ = ["as_data"]

_filesystem: Any = torch.distributed.checkpoint.filesystem

_METADATA = {
    "torch": {"Size"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    "torch.serialization": {"_get_layout"},
}
"""The classes in a ``.metadata``, besides data types of tensors; they only hold values."""

_FORCE, _FORCE_NOT = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


class _Metadata(pickle.Unpickler):
    """Reads a ``.metadata``; see "Restricting Globals" in the documentation of pickle."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _METADATA.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f".metadata names {module}.{name}, which it must not have")


@contextlib.contextmanager
def as_data() -> Iterator[None]:
    """Within this context, reading a distributed checkpoint cannot execute anything.

    A file that tries to raises pickle.UnpicklingError, by itself or within torch's
    CheckpointException.

    Raises:
        IncompatibleVersion: this torch reads ``.metadata`` in another way.
    """
    if _filesystem.pickle is not pickle:  # also under python -O, which drops assertions
        raise IncompatibleVersion(
            f"torch {torch.__version__}: reads the .metadata of a distributed checkpoint in a way "
            "that this package does not know how to make safe; take an earlier torch"
        )
    before = {name: os.environ.pop(name, None) for name in (_FORCE, _FORCE_NOT)}
    os.environ[_FORCE] = "1"
    _filesystem.pickle = SimpleNamespace(load=lambda file: _Metadata(file).load())
    try:
        yield
    finally:
        _filesystem.pickle = pickle
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
