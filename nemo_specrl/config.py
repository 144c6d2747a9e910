"""The ``spec_rl:`` block of a recipe and its validation.

Every recipe, on one machine or on a cluster, holds the same block under ``policy.generation``.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

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
    "PRESETS",
    "QUANTITIES",
    "Block",
    "ByteSize",
    "CacheConfig",
    "Count",
    "MonitorConfig",
    "PartialRolloutsConfig",
    "SpecRLConfig",
    "TreeConfig",
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
    path = Path(expanded)
    if len(os.fsencode(expanded)) > _MAX_PATH or any(len(os.fsencode(n)) > 255 for n in path.parts):
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
    """Where rollouts are kept between epochs."""

    dir: UserPath | None = None
    """Node-local folder. None: the embedded trainer keeps the cache in its run folder."""
    max_bytes_per_node: ByteSize = 64 * 2**30
    """Hard cap of the store on disk, bytes. The least recently used prompts are evicted first."""
    replicas: Count = 2
    """Copies of each partition, on distinct nodes of a cluster. A single machine holds one."""
    partitions: int = Field(default=64, ge=1, le=65536)
    """Hash ranges of prompt keys: the unit that a cluster places and moves."""
    groups_per_prompt: int = Field(default=1, ge=1, le=64)
    """Number of rollouts kept for each sample index of a prompt, newest first."""
    deadline_ms: Count = 200
    """Time that an engine waits for each prompt in a cluster's cache, milliseconds. For all prompts
    together it is at most 10 s, or this value if it is larger. What is late yields no draft."""


class TreeConfig(Block):
    """Lossless drafting from a per-prompt tree (arXiv 2601.09083)."""

    enabled: bool = False
    method: Literal["auto", "v2", "proposer", "rounds"] = "auto"
    """How drafts reach the engine: made on the device by vLLM's V2 model runner (v2), by a proposer
    in its V1 runner, or in requests of their own (rounds). auto: v2 wherever vLLM would run V2, the
    proposer on CPUs; otherwise a refusal that says what is possible
    (``engine.drafters.method.auto_method``)."""
    max_draft_tokens: int = Field(default=24, ge=1, le=128)
    """The most tokens proposed for a row in a step; vLLM's rejection sampler accepts up to 128. v2
    uses at most 11 while ``adaptive``."""
    adaptive: bool = True
    """Draft only tokens that are worth the time of their verification, instead of up to a fixed
    chance of being accepted (v2: ``max_draft_tokens`` in every row). The proposer measures the time
    of steps, so a run repeats to the token only with false; v2 computes it. Rounds use the fixed
    chance in any case."""
    adaptive_verification: bool = False
    """v2, from vLLM 0.32 on: every row drafts ``max_draft_tokens`` (11 at most), and vLLM verifies
    those of all rows that are worth their time, by their chances and by the times of steps that it
    measured when the engine started."""
    max_bytes: ByteSize = 4 * 2**30
    """Memory of the trees in each engine, bytes; the least recently used prompts are evicted first.
    v2 uses at most 512 MiB of it, on the device."""


class RunAheadConfig(Block):
    """Rollouts of upcoming prompts as drafts while an engine is idle (arXiv 2605.08862)."""

    enabled: bool = False
    """Decode for the prompts of the next batch while fewer rows run than ``max_num_seqs``."""


QUANTITIES = ("reward", "length", "logprob")
"""The quantities in which the drift monitor compares fresh rows with reused ones."""


class MonitorConfig(Block):
    """The drift monitor, which compares reused rows with fresh ones (docs/guide/presets.md)."""

    enabled: bool = True
    reward_tolerance: float = Field(default=0.05, ge=0)
    """Largest acceptable gap between fresh and reused rows, in units of reward."""
    length_tolerance: float = Field(default=0.05, ge=0)
    """The same for response lengths, as a share of the mean length."""
    logprob_tolerance: float = Field(default=0.02, ge=0)
    """The same for mean log-probs under the current policy, nats per token."""
    staleness_tolerance: float = Field(default=0.1, ge=0)
    """How much less likely a row's reused tokens may have become since birth, nats per row."""
    error_rate: float = Field(default=1e-3, gt=0, lt=1)
    """Probability of a false alarm in a window."""
    window_epochs: Count = 10
    """Epochs after which the comparison starts again."""
    auto: bool = False
    """Double ``fresh_fraction`` at an alarm, and halve it again after a window without one."""

    @property
    def tolerance(self) -> dict[str, float]:
        """Tolerance by quantity."""
        return {name: getattr(self, f"{name}_tolerance") for name in QUANTITIES}


PRESETS: dict[str, dict[str, Any]] = {
    "lossless": {
        "lenience": 1.0,
        "clip_anchor": "current",
        "fresh_fraction": 1.0,
        "tree": {"enabled": True},
    },
    "faithful": {"lenience": 1.0, "clip_anchor": "current", "fresh_fraction": 0.2},
    "fast": {"lenience": math.exp(0.5), "clip_anchor": "current", "fresh_fraction": 0.05},
}
"""Values that each preset gives to keys that a recipe leaves out (why: docs/guide/presets.md)."""
_DEFAULT_PRESET: Final = "lossless"


class PartialRolloutsConfig(Block):
    """The ``grpo.partial_rollouts:`` block, next to ``spec_rl:``.

    Active partial rollouts: rollouts that end with enough complete groups and put off the rest.
    """

    enabled: bool = False
    over_provision: float = Field(default=1.25, gt=1, le=2)
    """Number of groups requested for each one that is completed."""
    max_put_off: Count = 1
    """How often a prompt may be put off; after that, it is awaited."""


class SpecRLConfig(Block):
    """The ``spec_rl:`` block: how rollouts are drafted, verified and reported.

    Immutable. Keys that are left out take the values of ``preset`` (``PRESETS``).

    Raises:
        pydantic.ValidationError: an unknown key, or a value out of range. :func:`validated` raises
            a one-line ConfigError instead.
    """

    enabled: bool = False
    preset: Literal["lossless", "faithful", "fast"] = _DEFAULT_PRESET
    """Sets the keys below that a recipe leaves out (``PRESETS``)."""
    lenience: float = Field(default=PRESETS[_DEFAULT_PRESET]["lenience"], gt=0)
    """l: a token is accepted when u <= min(1, l * p_new / p_old). 1 is the strict test."""
    reported_logprobs: Literal["policy", "behaviour"] = "policy"
    """Log-prob reported for an accepted token: the current policy's, or the probability with
    which reuse produced the token."""
    acceptance_reference: Literal["last", "birth"] = "last"
    """p_old: under the policy that judged the token last, or the one that sampled it."""
    clip_anchor: Literal["birth", "current"] = PRESETS[_DEFAULT_PRESET]["clip_anchor"]
    """Start of the loss's clipped ratio: the current policy, or the one that sampled a token."""
    fresh_fraction: float = Field(default=PRESETS[_DEFAULT_PRESET]["fresh_fraction"], ge=0, le=1)
    """Share of rows that are decoded without a draft although there is one. Rows take turns, so no
    token is trained on more than ``ceil(1 / fresh_fraction)`` times."""
    max_age: Count | None = None
    """Epochs for which a token may be reused. Bounds the same thing as ``fresh_fraction``, and the
    stricter of the two applies; None: only ``fresh_fraction``."""
    monitor: MonitorConfig = MonitorConfig()
    cache: CacheConfig = CacheConfig()
    tree: TreeConfig = TreeConfig(**PRESETS[_DEFAULT_PRESET]["tree"])
    run_ahead: RunAheadConfig = RunAheadConfig()

    @property
    def effective_fresh_fraction(self) -> float:
        """Share of fresh rows that satisfies both ``fresh_fraction`` and ``max_age``."""
        return max(self.fresh_fraction, 0 if self.max_age is None else 1 / (1 + self.max_age))

    @property
    def monitors_drift(self) -> bool:
        """Whether the drift monitor runs: it is enabled, and there are reused rows to compare."""
        return self.monitor.enabled and self.effective_fresh_fraction < 1

    @model_validator(mode="after")
    def _consistent(self) -> SpecRLConfig:
        if self.run_ahead.enabled and not self.tree.enabled:
            raise WrongKey(
                "run_ahead.enabled",
                True,
                "what is decoded ahead is drafted by trees; set tree.enabled: true or "
                "preset: lossless, or set it to false",
            )
        if self.preset == "lossless" and self.lenience != 1 and self.effective_fresh_fraction >= 1:
            raise WrongKey(
                "lenience",
                self.lenience,
                "preset: lossless reuses no prefix, which lenience is about; leave it out, or set "
                "preset: faithful or fast",
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        """Fill in the preset's values for the keys that are missing."""
        if not isinstance(values, dict):
            return values
        preset = {"tree": {}, **PRESETS.get(str(values.get("preset", _DEFAULT_PRESET)), {})}
        filled = {**preset, **values}
        if isinstance(values.get("tree"), dict):
            filled["tree"] = {**preset["tree"], **values["tree"]}
        return filled


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
