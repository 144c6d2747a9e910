"""The ``spec_rl:`` block of a recipe, validated once; knows nothing of what the options do.

Every recipe, local or on a cluster, holds the same block under ``policy.generation``.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from nemo_specrl.errors import ConfigError

__all__ = [
    "PRESETS",
    "QUANTITIES",
    "Block",
    "ByteSize",
    "CacheConfig",
    "MonitorConfig",
    "SpecRLConfig",
    "validated",
]

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def _parse_bytes(value: Any) -> Any:
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError('must be a number of bytes, such as 1073741824 or "64GiB"')
        return int(float(match[1]) * _UNITS[match[2].lower()])
    return value


ByteSize = Annotated[int, BeforeValidator(_parse_bytes)]


class Block(BaseModel):
    """A block of a recipe: immutable, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class CacheConfig(Block):
    """Where rollouts are kept between epochs."""

    dir: Path | None = None
    """Node-local folder. None: the local trainer keeps the cache in its run folder."""
    max_bytes_per_node: ByteSize = Field(default=64 * 2**30, ge=2**20)
    """Hard cap of the store on disk, bytes; the prompts unused for longest go first."""
    replicas: int = Field(default=2, ge=1)
    """Copies of each partition on distinct nodes of a cluster; one machine holds one."""
    partitions: int = Field(default=64, ge=1, le=65536)
    """Hash ranges of prompt keys, the unit that a cluster places and moves."""
    groups_per_prompt: int = Field(default=1, ge=1, le=64)
    """Rollouts kept for each sample index of a prompt, newest first."""
    deadline_ms: int = Field(default=200, ge=1)
    """A cluster look-up that takes longer answers "no draft", milliseconds."""


class TreeConfig(Block):
    """Lossless drafting from a per-prompt tree (arXiv 2601.09083)."""

    enabled: bool = False
    max_draft_tokens: int = Field(default=24, ge=1)

    @model_validator(mode="after")
    def _is_to_come(self) -> TreeConfig:
        if self.enabled:
            raise ValueError("tree drafting is not in this release; set tree.enabled: false")
        return self


class RunAheadConfig(Block):
    """Rollouts of coming prompts in idle slots of the engine."""

    enabled: bool = False

    @model_validator(mode="after")
    def _is_to_come(self) -> RunAheadConfig:
        if self.enabled:
            raise ValueError("running ahead is not in this release; set run_ahead.enabled: false")
        return self


QUANTITIES = ("reward", "length", "logprob")
"""In which the drift monitor compares fresh rows with reused ones."""


class MonitorConfig(Block):
    """Watching whether reused rows still are what fresh ones are (docs/fidelity.md)."""

    enabled: bool = True
    reward_tolerance: float = Field(default=0.05, ge=0)
    """Gap between fresh and reused rows that is of no concern, in units of reward."""
    length_tolerance: float = Field(default=0.05, ge=0)
    """The same for response lengths, as a share of the mean length."""
    logprob_tolerance: float = Field(default=0.02, ge=0)
    """The same for mean log-probs under the current policy, nats per token."""
    staleness_tolerance: float = Field(default=0.1, ge=0)
    """By how much less likely a row's reused tokens may have become since birth, nats per row."""
    error_rate: float = Field(default=1e-3, gt=0, lt=1)
    """Chance of a false alarm in a window."""
    window_epochs: int = Field(default=10, ge=1)
    """After so many epochs the comparison begins anew."""
    auto: bool = False
    """Double ``fresh_fraction`` at an alarm, and halve it back after a window without one."""

    @property
    def tolerance(self) -> dict[str, float]:
        """By quantity."""
        return {name: getattr(self, f"{name}_tolerance") for name in QUANTITIES}


PRESETS: dict[str, dict[str, Any]] = {
    "faithful": {"lenience": 1.0, "clip_anchor": "current", "fresh_fraction": 0.2},
    "fast": {"lenience": math.exp(0.5), "clip_anchor": "current", "fresh_fraction": 0.05},
}
"""What ``preset`` sets where a recipe does not say otherwise: docs/fidelity.md has the reasons."""
_DEFAULTS = PRESETS["faithful"]


class SpecRLConfig(Block):
    """The ``spec_rl:`` block: how rollouts are drafted, verified and reported."""

    enabled: bool = False
    preset: Literal["lossless", "faithful", "fast"] = "faithful"
    """The dial: sets the keys below that a recipe leaves out (``PRESETS``)."""
    lenience: float = Field(default=_DEFAULTS["lenience"], gt=0, allow_inf_nan=False)
    """l: a token is accepted when u <= min(1, l * p_new / p_old). 1 is strict."""
    reported_logprobs: Literal["policy", "behaviour"] = "policy"
    """What an accepted token carries: the current policy's log-prob, or that of its production."""
    acceptance_reference: Literal["last", "birth"] = "last"
    """p_old: of the policy that judged the token last, or of the one that sampled it."""
    clip_anchor: Literal["birth", "current"] = _DEFAULTS["clip_anchor"]
    """Where the loss's clipped ratio starts from."""
    fresh_fraction: float = Field(default=_DEFAULTS["fresh_fraction"], ge=0, le=1)
    """Share of rows that are decoded plainly although a draft is there. Rows take turns, so that
    no token is trained on more than ``ceil(1 / fresh_fraction)`` times."""
    max_age: int | None = Field(default=None, ge=1)
    """Epochs that a reused token may survive: the same bound, said the other way round. The
    stricter of the two holds; None: ``fresh_fraction`` says it all."""
    monitor: MonitorConfig = MonitorConfig()
    cache: CacheConfig = CacheConfig()
    tree: TreeConfig = TreeConfig()
    run_ahead: RunAheadConfig = RunAheadConfig()

    @property
    def effective_fresh_fraction(self) -> float:
        """The stricter of ``fresh_fraction`` and what ``max_age`` asks for."""
        return max(self.fresh_fraction, 0 if self.max_age is None else 1 / (1 + self.max_age))

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        """The preset's values for the keys that are not there."""
        if not isinstance(values, dict):
            return values
        return {**PRESETS.get(str(values.get("preset")), {}), **values}

    @field_validator("preset")
    @classmethod
    def _is_here(cls, preset: str) -> str:
        if preset == "lossless":
            raise ValueError(
                "needs drafting inside the engine, which is not in this release; "
                "set preset: faithful"
            )
        return preset


_Model = TypeVar("_Model", bound=BaseModel)


def validated(model: type[_Model], values: Any, where: str = "") -> _Model:
    """``values`` as a ``model``.

    Args:
        model: a pydantic model.
        values: a mapping, as YAML gives it.
        where: dotted path of the mapping in its recipe, for the message.

    Raises:
        ConfigError: one line that names the first wrong key, its value and what would be right.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"{where or 'the recipe'}: must be a mapping of keys, got {values!r}")
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
        else:
            text = first["msg"].removeprefix("Value error, ").replace("Input should", "must")
            message = f"{path} = {first['input']!r}: {text}"
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ConfigError(" ".join(message.split()) + more) from None


def _known_keys(model: type[BaseModel], location: tuple[int | str, ...]) -> str:
    """The keys that the block at ``location`` has, for the message about one it has not."""
    block: type[BaseModel] = model
    for part in location[:-1]:
        field = block.model_fields.get(str(part))
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())] if field else []
        models = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not models:
            return "see the recipe's documentation"
        block = models[0]
    return "known are " + ", ".join(block.model_fields)
