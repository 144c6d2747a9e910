"""Rows of prompts and answers: from JSON Lines, Parquet, and the generators of reasoning-gym."""

from __future__ import annotations

import itertools
import json
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from nemo_specrl.errors import ConfigError, last_line
from nemo_specrl.trainer.data.text import Message
from nemo_specrl.trainer.data_config import REASONING_GYM, Columns

__all__ = ["Row", "file_rows", "gym_dataset", "gym_rows"]

LOT, SEEDS_APART = 1000, 1_000_003
"""``LOT`` problems of reasoning-gym are drawn with one seed, and the next lot with a seed that is
``SEEDS_APART`` larger: some data sets draw all their problems when they are created."""
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, eq=False)
class Row:
    """A problem as its source has it.

    Args:
        where: its place, for messages: ``train.jsonl:17``.
        messages: the conversation that the model continues; the last message is the user's.
        values: everything that the source says about it, with the right answer under ``answer``.
    """

    where: str
    messages: list[Message]
    values: Mapping[str, Any]


def file_rows(path: Path, columns: Columns) -> Iterator[Row]:
    """Yield the rows of a file of JSON Lines or Parquet, in order.

    A row has the user's message under ``input_key``, or a conversation under ``messages``, whose
    last message may be the right answer by the assistant, as in NeMo-RL; and the right answer
    under ``output_key``.

    Raises:
        ConfigError: names the file, the line, and what is wrong with it.
    """
    read = _parquet_lines if path.suffix == ".parquet" else _json_lines
    for number, values in read(path):
        where = f"{path}:{number}"
        if not isinstance(values, dict):
            raise ConfigError(f"{where}: holds no JSON object; each line must be one")
        yield _row(where, values, columns.input_key, columns.output_key)


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if text.strip():
                    yield number, _json(f"{path}:{number}", text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None


def _json(where: str, line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = last_line(error)
        raise ConfigError(f"{where}: is no JSON ({reason}); give one object a line") from None


def _parquet_lines(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ConfigError(
            f"{path}: Parquet needs pyarrow; pip install pyarrow, or give .jsonl"
        ) from None
    try:
        with ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches() for row in batch.to_pylist())
            yield from enumerate(rows, 1)
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise ConfigError(f"{path}: cannot be read as Parquet ({last_line(error)})") from None


def _row(where: str, values: dict[str, Any], input_key: str, output_key: str) -> Row:
    if "messages" in values and input_key not in values:
        messages = _conversation(where, values["messages"])
        if messages[-1]["role"] == "assistant" and output_key not in values:
            values = {**values, output_key: messages.pop()["content"]}
    elif input_key in values:
        messages = [{"role": "user", "content": _text(where, input_key, values[input_key])}]
    else:
        raise ConfigError(
            f"{where}: has neither {input_key!r} nor 'messages', but {_names(values)}; set "
            "data.input_key to the column with the prompt"
        )
    if output_key not in values:
        raise ConfigError(
            f"{where}: has no {output_key!r}, but {_names(values)}; set data.output_key to the "
            "column with the answer"
        )
    if not messages or messages[-1]["role"] != "user":
        raise ConfigError(f"{where}: the last of 'messages' before the answer must be the user's")
    answer = values[output_key]
    if not isinstance(answer, (str, int, float, Decimal)) or isinstance(answer, bool):
        raise ConfigError(f"{where}: {output_key!r} must be text or a number")
    if not isinstance(answer, str):
        answer = _written(where, output_key, answer)
    return Row(where, messages, {**values, "answer": _text(where, output_key, answer)})


def _written(where: str, key: str, number: float | Decimal) -> str:
    """A number as one writes it: 0.00001 where Python has 1e-05, and 2 where pandas has 2.0."""
    if not math.isfinite(number):
        raise ConfigError(f"{where}: {key!r} is {number}, which is no answer")
    exact = Decimal(str(number))
    return str(int(exact)) if exact == exact.to_integral_value() else format(exact, "f")


def _conversation(where: str, value: Any) -> list[Message]:
    right = "must be a list of objects with a role and a content"
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where}: 'messages' {right}")
    for message in value:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ConfigError(f"{where}: 'messages' {right}; roles are {', '.join(ROLES)}")
    return [
        {"role": m["role"], "content": _text(where, "messages", m.get("content"))} for m in value
    ]


def _text(where: str, key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {key!r} must hold text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"{where}: {key!r} holds half of a surrogate pair, which is no text; write the file "
            "as UTF-8 anew"
        ) from None
    return value


def _names(values: Mapping[str, Any]) -> str:
    return ", ".join(repr(name) for name in list(values)[:8]) or "nothing"


# --- reasoning-gym ----------------------------------------------------------------------------


def gym_dataset(name: str, kwargs: Mapping[str, Any], seed: int, size: int) -> Any:
    """Create a data set of reasoning-gym.

    Args:
        name: ``reasoning_gym:NAME``.
        kwargs: its own parameters.
        seed: decides which problems it has.
        size: number of its problems.

    Raises:
        ConfigError: it is not installed, has no such data set, or refuses a parameter.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # from a package that it imports
            import reasoning_gym
    except ImportError as error:
        raise ConfigError(
            f"data.dataset_name = {name!r}: reasoning-gym cannot be imported ({last_line(error)}); "
            "pip install reasoning-gym"
        ) from None
    try:
        return reasoning_gym.create_dataset(
            name.removeprefix(REASONING_GYM), seed=seed, size=size, **kwargs
        )
    except Exception as error:  # its data sets check their parameters by assert
        raise ConfigError(
            f"data.dataset_name = {name!r}: reasoning-gym refuses it: {last_line(error)}"
        ) from None


def gym_rows(name: str, kwargs: Mapping[str, Any], seed: int) -> Iterator[Row]:
    """Yield problems of a data set of reasoning-gym, without end.

    Raises:
        ConfigError: see :func:`gym_dataset`.
    """
    for lot in itertools.count():
        lot_seed = seed + lot * SEEDS_APART
        dataset = gym_dataset(name, kwargs, lot_seed, LOT)
        for index in range(LOT):
            entry = dataset[index]
            where = f"{name.removeprefix(REASONING_GYM)} {index} of seed {lot_seed}"
            yield Row(where, [{"role": "user", "content": str(entry["question"])}], entry)
