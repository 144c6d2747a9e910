"""The ``spec_rl:`` block of a recipe and its validation.

Every recipe, on one machine or on a cluster, holds the same block under ``policy.generation``.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from nemo_specrl.errors import ConfigError

__all__ = [
    "CACHE_FOLDER",
    "MAX_COUNT",
    "Block",
    "ByteSize",
    "CacheConfig",
    "Count",
    "DraftConfig",
    "PartialRolloutsConfig",
    "ReuseConfig",
    "SpecRLConfig",
    "UserPath",
    "WrongKey",
    "clipped",
    "first_problem",
    "knows",
    "parse_path",
    "validated",
]

CACHE_FOLDER = "rollout_cache"
"""Name of the cache's folder, in a run and in a checkpoint."""

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


_MAX_PATH = 4000
"""The most bytes of a path, below Linux's 4,096: files in such a folder have longer ones."""


def _parse_bytes(value: Any) -> Any:
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
        if match is None or match[2].lower() not in _UNITS or len(match[1]) > 20:
            raise ValueError('must be a number of bytes, such as 1073741824 or "64GiB"')
        return int(float(match[1]) * _UNITS[match[2].lower()])
    return value


def parse_path(value: Any) -> Path:
    """Parse a path that a user wrote, with ``~`` and ``~user`` as home folders.

    It is made absolute here, once: processes of a cluster have other working folders.

    Raises:
        ValueError: it cannot be a path: it is not text, is empty, is ``None`` or ``null`` as text,
            is in the home of a user who does not exist, or is longer than Linux allows. If
            accepted, it would become a folder in the working directory, or fail when it is first
            used.
    """
    text = str(value) if isinstance(value, (str, Path)) else ""
    if text.strip().lower() in ("", "none", "null"):
        raise ValueError("must be a path; where none is meant, null without quotes")
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise ValueError(f"there is no home folder for {text.partition('/')[0]}")
    if not expanded.isprintable():
        raise ValueError("must be a path of printable characters")
    try:
        path = Path(expanded).absolute()
    except FileNotFoundError:
        raise ValueError("is relative to the working folder, which was removed") from None
    if len(os.fsencode(path)) > _MAX_PATH or any(len(os.fsencode(n)) > 255 for n in path.parts):
        raise ValueError("must be a path of names of at most 255 bytes, and of 4,000 in all")
    return path


ByteSize = Annotated[int, Field(ge=2**20, le=2**46), BeforeValidator(_parse_bytes)]
"""A number of bytes, from 1 MiB to 64 TiB, which is what a process can map."""

UserPath = Annotated[Path, BeforeValidator(parse_path)]
"""A path as a user writes it (:func:`parse_path`)."""

MAX_COUNT = 2**31 - 1
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
"""An integer of at least 1 that other packages can hold in 32 bits."""


class WrongKey(ValueError):
    """Refusal of one key by a validator that sees its whole block.

    Without it, pydantic would report the block, and the message would contain all of it.

    Args:
        key: dotted path below the block.
        value: value of the key.
        problem: what is wrong and what would be right.
    """

    def __init__(self, key: str, value: Any, problem: str) -> None:
        super().__init__(f"{key} = {value!r}: {problem}")


class Block(BaseModel):
    """A block of a recipe: immutable; unknown keys and numbers that are not finite are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )


class CacheConfig(Block):
    """Where earlier responses are kept."""

    dir: UserPath | None = None
    """Folder on each node's own disk. None: responses are kept in the engine's memory alone; the
    embedded trainer keeps them in its run folder."""
    max_bytes_per_node: ByteSize = 64 * 2**30
    """Hard cap of the store on disk, bytes. The least recently used prompts are evicted first."""
    responses_per_prompt: int = Field(default=64, ge=1, le=4096)
    """The newest responses that are kept for each prompt."""
    replicas: int = Field(default=2, ge=1, le=8)
    """Nodes of a Ray cluster that keep each prompt's responses. A single machine is one."""
    deadline_ms: Count = 200
    """The longest that a request waits for its prompt's history, milliseconds. What is late comes
    with the prompt's next request, and the row decodes without it."""
    vocabulary: str | None = Field(default=None, pattern=r"[0-9a-f]{32}")
    """Hash of the tokenizer's vocabulary, which names the store
    (:func:`nemo_specrl.rollout.vocabulary_hash`). None: the engine computes it."""


class DraftConfig(Block):
    """Lossless drafting from a prompt's history (SRT, arXiv 2601.09083)."""

    max_tokens: int = Field(default=24, ge=1, le=128)
    """The most tokens proposed for a row in a step. On GPUs at most 24 while ``adaptive``."""
    max_bytes: ByteSize = 512 * 2**20
    """Memory of the histories in each engine, bytes, on the device where vLLM runs V2; the least
    recently used prompts are evicted first."""
    adaptive: bool = True
    """Draft only tokens that are worth the time of their verification; false: ``max_tokens`` in
    every row on GPUs, and on CPUs as many as are likely enough."""
    adaptive_verification: bool = False
    """From vLLM 0.32 on: every row drafts ``max_tokens`` (11 at most), and vLLM verifies those of
    all rows that are worth their time."""


class ReuseConfig(Block):
    """Prefix reuse (SPEC-RL, arXiv 2509.23232), for ``preset: reuse`` alone."""

    lenience: float = Field(default=math.exp(0.5), gt=0)
    """l: a token is accepted when u <= min(1, l * p_new / p_old). 1 is the strict test; the default
    is the paper's for GRPO."""
    fresh_fraction: float = Field(default=0.05, ge=0, le=1)
    """Share of rows that are decoded without a reused prefix although there is one; 0 is the
    paper's."""
    reported_logprobs: Literal["policy", "behaviour"] = "policy"
    """Log-prob reported for an accepted token: the current policy's, or that of the probability
    with which reuse produced the token."""


class PartialRolloutsConfig(Block):
    """The ``grpo.partial_rollouts:`` block, next to ``spec_rl:``.

    Active partial rollouts (APRIL): rollouts that end with enough complete groups and put off the
    rest, whose tokens become history.
    """

    enabled: bool = False
    over_provision: float = Field(default=1.25, gt=1, le=2)
    """Number of groups requested for each one that is completed."""
    max_put_off: Count = 1
    """How often a prompt may be put off; after that, it is awaited."""


class RunAheadConfig(Block):
    """Rollouts of upcoming prompts as drafts while an engine is idle (arXiv 2605.08862)."""

    enabled: bool = False
    """Decode for the prompts of the next batch while fewer rows run than ``max_num_seqs``."""


MOVED = {
    "tree": "draft",
    "lenience": "reuse.lenience",
    "fresh_fraction": "reuse.fresh_fraction",
    "reported_logprobs": "reuse.reported_logprobs",
    "acceptance_reference": None,
    "clip_anchor": None,
    "max_age": None,
    "monitor": None,
}
"""Keys of earlier versions, and the key that took the place of each; None: nothing did."""


class SpecRLConfig(Block):
    """The ``spec_rl:`` block: how rollouts are drafted, kept and, with ``reuse``, verified.

    Raises:
        pydantic.ValidationError: an unknown key, or a value out of range. :func:`validated` raises
            a one-line ConfigError instead.
    """

    enabled: bool = False
    preset: Literal["lossless", "reuse"] = "lossless"
    """``lossless``: drafts that vLLM's rejection sampler verifies, exact. ``reuse``: the accepted
    prefix of the previous response as well, which is not exact (docs/guide/reuse.md)."""
    cache: CacheConfig = CacheConfig()
    draft: DraftConfig = DraftConfig()
    reuse: ReuseConfig | None = None
    """None with ``preset: lossless``."""
    run_ahead: RunAheadConfig = RunAheadConfig()

    @model_validator(mode="before")
    @classmethod
    def _with_present_keys(cls, values: Any) -> Any:
        """Refuse keys of earlier versions by name, and fill in ``reuse``."""
        if not isinstance(values, dict):
            return values
        for old, new in MOVED.items():
            if old in values:
                now = f"the key is now {new}" if new else "the key is gone; leave it out"
                raise WrongKey(old, values[old], now)
        if values.get("preset") in ("faithful", "fast"):
            raise WrongKey(
                "preset", values["preset"], "the preset is now reuse (with reuse.lenience)"
            )
        if values.get("preset") == "reuse":
            return {**values, "reuse": values.get("reuse") or {}}
        return values

    @model_validator(mode="after")
    def _consistent(self) -> SpecRLConfig:
        if self.preset == "lossless" and self.reuse is not None:
            raise WrongKey("reuse", "...", "is for preset: reuse; leave it out, or set the preset")
        return self


_Model = TypeVar("_Model", bound=BaseModel)


def validated(model: type[_Model], values: Any, where: str = "") -> _Model:
    """Validate ``values`` and return them as a ``model``.

    Args:
        model: a pydantic model.
        values: a mapping, as YAML gives it.
        where: dotted path of the mapping in its recipe, for the message.

    Raises:
        ConfigError: one line that names the first wrong key, its value and what would be right.
    """
    if not isinstance(values, dict):
        raise ConfigError(
            f"{where or 'the recipe'}: must be a mapping of keys, got {clipped(values)}"
        )
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        first = problems[0]
        path = ".".join([*([where] if where else []), *(str(part) for part in first["loc"])])
        if first["type"] == "extra_forbidden":
            message = f"{path}: unknown key; {_known_keys(model, first['loc'])}"
        elif first["type"] == "missing":
            message = f"{path}: missing; the recipe must set it"
        elif first["type"] == "value_error":
            refusal: Exception = first["ctx"]["error"]
            if isinstance(refusal, WrongKey):
                message = f"{path}.{refusal}" if path else str(refusal)
            elif isinstance(first["input"], dict):  # several keys do not go together
                message = f"{path or 'the recipe'}: {refusal}"
            else:
                message = f"{path} = {clipped(first['input'])}: {refusal}"
        else:
            text = first["msg"].replace("Input should", "must")
            message = f"{path} = {clipped(first['input'])}: {text}"
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ConfigError(" ".join(message.split()) + more) from None


def first_problem(error: ValidationError) -> str:
    """Return the first thing that pydantic found wrong, in one line: key, value and reason.

    For models of other packages, such as vLLM's: pydantic's own text takes several lines.
    """
    first = error.errors(include_url=False)[0]
    key, reason = ".".join(str(part) for part in first["loc"]), first["msg"]
    reason = reason.removeprefix("Value error, ").removeprefix("Assertion failed, ")
    reason = " ".join(reason.replace("Input should", "must").split())
    return f"{key} = {clipped(first['input'])}: {reason}" if key else reason


def clipped(value: Any) -> str:
    """Return the ``repr`` of a value for a message, cut to 100 characters."""
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


def _known_keys(model: type[BaseModel], location: tuple[int | str, ...]) -> str:
    """List the keys of the block at ``location``, for the message about an unknown one."""
    block: type[BaseModel] | None = model
    for part in location[:-1]:
        block = _inner(block, str(part)) if block else None
    return "known are " + ", ".join(block.model_fields) if block else "see the documentation"


def _inner(block: type[BaseModel], key: str) -> type[BaseModel] | None:
    """Return the block under a key of another block; None if there is none."""
    field = block.model_fields.get(key)
    candidates = [field.annotation, *getattr(field.annotation, "__args__", ())] if field else []
    models = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
    return models[0] if models else None


def knows(model: type[BaseModel], key: str) -> bool:
    """Whether a recipe may have a dotted key: one of a block, or any below one that takes any."""
    block = model
    for part in key.split("."):
        if part not in block.model_fields:
            return False
        inner = _inner(block, part)
        if inner is None:
            return True
        block = inner
    return True
