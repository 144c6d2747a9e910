"""Exports: rollouts as safetensors files, for other programs and other runs.

An export is a folder of ``rollouts-00000.safetensors``, ...: flat columns, with one entry per
rollout (``keys`` uint8 ``[r, 16]``, ``sample_indices``, ``occurrences``, ``finishes``, ``fresh``,
``incarnations``, ``policy_versions``, ``lengths``) or per token (``tokens``, ``logprobs``,
``birth_logprobs``, ``birth_versions``), the rollouts of a sample index oldest first. 128 is added
to the finish of a rollout that was not drawn from the raw distribution. The metadata has the
tokenizer's identity and a checksum.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from nemo_specrl.cache.storage.system_errors import as_cache_errors
from nemo_specrl.errors import ForeignStore, InvalidRollout, StoreUnavailable
from nemo_specrl.files import FOLDER_MODE, replacing
from nemo_specrl.rollout import KEY_BYTES, Finish, Rollout

__all__ = ["EXPORTS", "read_export", "reset_provenance", "write_export"]

EXPORTS = "rollouts-*.safetensors"
FORMAT = "nemo_specrl rollouts 3"
NOT_RAW = 128
"""Added to the finish of a rollout that was not drawn from the raw distribution."""
FILE_TOKENS = 2**24
"""Approximate number of tokens of a file: 0.3 GB."""

_COLUMNS = {
    "keys": np.uint8,
    "sample_indices": np.int32,
    "occurrences": np.int64,
    "finishes": np.uint8,
    "fresh": np.bool_,
    "incarnations": np.uint64,
    "policy_versions": np.int64,
    "lengths": np.int64,
    "tokens": np.int32,
    "logprobs": np.float32,
    "birth_logprobs": np.float32,
    "birth_versions": np.int64,
}

Columns = dict[str, npt.NDArray[Any]]


def write_export(folder: Path, rollouts: Iterable[Rollout], tokenizer_id: str) -> int:
    """Write rollouts into an empty or new folder, and return their number.

    Args:
        folder: folder of the export.
        rollouts: newest first within a sample index.
        tokenizer_id: tokenizer of their tokens.

    Raises:
        StoreUnavailable: the folder cannot be written, or already has an export.
    """
    from safetensors.numpy import save

    with as_cache_errors("write the export", folder):
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        if next(folder.glob(EXPORTS), None) is not None:
            raise StoreUnavailable(f"{folder} has an export; name another folder")
        count = 0
        for number, some in enumerate(_parts(rollouts)):
            columns = _columns(some)
            metadata = {
                "format": FORMAT,
                "tokenizer": tokenizer_id,
                "xxh3": _checksum(columns),
            }
            file = folder / f"rollouts-{number:05d}.safetensors"
            with replacing(file, file.with_suffix(".tmp")) as new:
                new.write(save(columns, metadata))
            count += len(some)
        return count


def _parts(rollouts: Iterable[Rollout]) -> Iterator[list[Rollout]]:
    """Split rollouts into files, at least one, with the oldest of a prompt's rollouts first."""
    part: list[Rollout] = []
    tokens = 0
    for _, group in itertools.groupby(rollouts, lambda rollout: rollout.key):
        whole = list(group)[::-1]
        part += whole
        tokens += sum(map(len, whole))
        if tokens >= FILE_TOKENS:
            yield part
            part, tokens = [], 0
    yield part


def _columns(rollouts: list[Rollout]) -> Columns:
    def flat(name: str) -> npt.NDArray[Any]:
        arrays = [getattr(rollout, name) for rollout in rollouts]
        return np.concatenate([np.empty(0, _COLUMNS[name]), *arrays])

    keys = b"".join(rollout.key for rollout in rollouts)
    columns = {
        "keys": np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES),
        "sample_indices": np.array([rollout.sample_index for rollout in rollouts]),
        "occurrences": np.array([rollout.occurrence for rollout in rollouts]),
        "finishes": np.array([r.finish | (0 if r.raw else NOT_RAW) for r in rollouts]),
        "fresh": np.array([rollout.fresh for rollout in rollouts]),
        "incarnations": np.array([rollout.incarnation for rollout in rollouts], np.uint64),
        "policy_versions": np.array([rollout.policy_version for rollout in rollouts]),
        "lengths": np.array([len(rollout) for rollout in rollouts]),
    } | {name: flat(name) for name in ("tokens", "logprobs", "birth_logprobs", "birth_versions")}
    return {name: columns[name].astype(dtype) for name, dtype in _COLUMNS.items()}


def _checksum(columns: Columns) -> str:
    hasher = xxhash.xxh3_64()
    for name in _COLUMNS:
        hasher.update(np.ascontiguousarray(columns[name]).tobytes())
    return hasher.hexdigest()


def read_export(folder: Path) -> tuple[str, Iterator[Rollout | StoreUnavailable]]:
    """Return the tokenizer of an export and its rollouts, with an error in place of a damaged file.

    Raises:
        StoreUnavailable: the first file cannot be read.
        ForeignStore: it is not an export of this release's format, or its files belong to two
            tokenizers.
    """
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob(EXPORTS))
    tokenizers = set()
    for file in files:
        try:
            with safe_open(file, framework="np") as opened:
                metadata = opened.metadata() or {}
        except (SafetensorError, OSError) as error:
            raise StoreUnavailable(f"{file}: damaged: {error}") from None
        if metadata.get("format") != FORMAT:
            raise ForeignStore(
                f"{file} is no export that this release reads ({metadata.get('format')!r}, not "
                f"{FORMAT!r})"
            )
        tokenizers.add(metadata.get("tokenizer", ""))
    if len(tokenizers) != 1:
        raise ForeignStore(f"{folder} has exports of several tokenizers: {sorted(tokenizers)}")

    def rollouts() -> Iterator[Rollout | StoreUnavailable]:
        for file in files:
            try:
                yield from _read_file(file)
            except (SafetensorError, OSError, ValueError, KeyError, IndexError) as error:
                yield StoreUnavailable(f"{file}: damaged: {error}")

    return tokenizers.pop(), rollouts()


def _read_file(file: Path) -> list[Rollout]:
    """Read all rollouts of a file.

    Raises:
        InvalidRollout: its checksum does not match.
    """
    from safetensors import safe_open

    with safe_open(file, framework="np") as opened:
        columns: Columns = {name: opened.get_tensor(name) for name in _COLUMNS}
        expected = opened.metadata()["xxh3"]
    if _checksum(columns) != expected:
        raise InvalidRollout("its checksum is not the one that it names")
    ends = np.cumsum(columns["lengths"]).tolist()
    rollouts = []
    for i, (a, b) in enumerate(itertools.pairwise([0, *ends])):
        rollouts.append(
            Rollout(
                columns["keys"][i].tobytes(),
                int(columns["sample_indices"][i]),
                columns["tokens"][a:b],
                columns["logprobs"][a:b],
                Finish(int(columns["finishes"][i]) & ~NOT_RAW),
                int(columns["policy_versions"][i]),
                columns["birth_logprobs"][a:b],
                columns["birth_versions"][a:b],
                int(columns["occurrences"][i]),
                fresh=bool(columns["fresh"][i]),
                incarnation=int(columns["incarnations"][i]),
                raw=not columns["finishes"][i] & NOT_RAW,
            )
        )
    return rollouts


def reset_provenance(rollout: Rollout) -> Rollout:
    """Prepare a rollout for a run whose policy versions are not those of the run that made it.

    It counts as made before the first step: policy version 0, no incarnation, unknown weights.
    """
    births = np.zeros(len(rollout), np.int64)
    return rollout.changed(policy_version=0, birth_versions=births, fingerprint=0, incarnation=0)
