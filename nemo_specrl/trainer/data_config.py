"""The recipe's ``data:`` block: where prompts come from and what scores the responses to them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from nemo_specrl.config import MAX_COUNT, Block, Count, UserPath, WrongKey

__all__ = [
    "REASONING_GYM",
    "TOY_TASKS",
    "Columns",
    "DataConfig",
    "Prompts",
]

Prompts = Annotated[int, Field(ge=1, le=1_000_000)]
"""A number of prompts, which are held in memory."""

TOY_TASKS = ("arithmetic", "sorting")
FILES = "ResponseDataset"
REASONING_GYM = "reasoning_gym:"
GENERATED_PROMPTS = 48
"""Number of prompts of a generated data set if the recipe gives no number."""

TEXT_REWARDS = ("exact", "numeric", "math", "reasoning_gym")
"""Names that ``env_name`` may have besides ``module:function``."""


class Columns(Block):
    """The columns of a file's rows. The keys are those of NeMo-RL's ``ResponseDataset``."""

    input_key: str = Field(default="prompt", min_length=1)
    """Column with the user's message; without it, ``messages`` has a whole conversation."""
    output_key: str = Field(default="answer", min_length=1)
    """Column with the right answer."""


class FileConfig(Columns):
    """A file of prompts and answers."""

    data_path: UserPath
    """JSON Lines (``.jsonl``), or Parquet (``.parquet``)."""


class DataConfig(Columns):
    """The ``data:`` block."""

    dataset_name: str = "arithmetic"
    """``arithmetic`` or ``sorting``; ``reasoning_gym:NAME``; or ``ResponseDataset``, a file."""
    dataset_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further parameters of a data set of reasoning-gym."""
    data_path: UserPath | None = None
    """File of a ``ResponseDataset``: JSON Lines or Parquet."""
    validation: FileConfig | None = None
    """Held-out prompts from another file."""
    split_validation_size: float = Field(default=0.0, ge=0, lt=1)
    """Share of the rows of ``data_path`` that are held out."""
    prompt_file: UserPath | None = None
    """Template of the user's message; ``{}`` in it stands for the problem."""
    system_prompt_file: UserPath | None = None
    """The system message."""
    max_input_seq_length: Count | None = None
    """Longest prompt, tokens; longer ones are left out. None: what leaves room for a token."""
    env_name: str | None = None
    """What scores a response: ``exact``, ``numeric``, ``math`` (math-verify), ``reasoning_gym``
    (the data set's own score), or ``module:function``. None: ``reasoning_gym`` for its data sets,
    ``math`` for files."""
    num_prompts: Prompts | None = None
    """Training prompts; an epoch is one pass over them. None: all rows of a file, or 48."""
    seed: int = Field(default=1, ge=-MAX_COUNT, le=MAX_COUNT)
    shuffle: bool = True

    @property
    def prompts(self) -> int | None:
        """``num_prompts``, or its default; None for all rows of a file."""
        default = GENERATED_PROMPTS if self.data_path is None else None
        return self.num_prompts or default

    @model_validator(mode="after")
    def _consistent(self) -> DataConfig:
        name, gym = self.dataset_name, self.dataset_name.startswith(REASONING_GYM)
        if not (name in (*TOY_TASKS, FILES) or (gym and name != REASONING_GYM)):
            raise WrongKey(
                "dataset_name",
                name,
                f"must be {', '.join(TOY_TASKS)}, {REASONING_GYM}NAME, or {FILES} with a data_path",
            )
        if (name == FILES) != (self.data_path is not None):
            raise WrongKey(
                "data_path",
                None if self.data_path is None else str(self.data_path),
                f"goes with dataset_name: {FILES}, which needs it; here it is {name!r}",
            )
        if self.dataset_kwargs and not gym:
            raise WrongKey("dataset_kwargs", self.dataset_kwargs, "are for reasoning_gym: alone")
        if name != FILES and (self.validation is not None or self.split_validation_size):
            key = "validation" if self.validation is not None else "split_validation_size"
            raise WrongKey(key, getattr(self, key), f"is for dataset_name: {FILES} alone")
        if self.validation is not None and self.split_validation_size:
            raise WrongKey(
                "split_validation_size",
                self.split_validation_size,
                "must be 0 where validation has a file of its own",
            )
        for path in (self.data_path, self.validation and self.validation.data_path):
            if path and path.suffix not in (".jsonl", ".parquet"):
                raise WrongKey("data_path", str(path), "must end in .jsonl or .parquet")
        if name in TOY_TASKS:
            for key in ("prompt_file", "system_prompt_file", "env_name"):
                if getattr(self, key) is not None:
                    raise WrongKey(key, str(getattr(self, key)), f"does not apply to {name}")
        reward = self.env_name
        if reward is not None and reward not in TEXT_REWARDS and ":" not in reward.strip(":"):
            raise WrongKey(
                "env_name", reward, f"must be {', '.join(TEXT_REWARDS)}, or module:function"
            )
        if reward == "reasoning_gym" and not gym:
            raise WrongKey("env_name", reward, f"needs dataset_name: {REASONING_GYM}NAME")
        return self
