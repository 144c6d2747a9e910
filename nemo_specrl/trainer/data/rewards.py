"""Scores of text responses."""

from __future__ import annotations

import functools
import importlib
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from nemo_specrl.errors import ConfigError, in_one_line

__all__ = ["WARNINGS", "Scorer", "build_reward", "last_number"]

Reward = Callable[[str, Mapping[str, Any]], float]
"""Scores the text of a response to a row, which has the right answer under ``answer``."""

WARNINGS = 5
"""Number of failures of a reward that are logged one by one."""

logger = logging.getLogger(__name__)

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
_FRAC = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
_DECIMAL = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
_NUMBER = re.compile(rf"([-\u2212]?)({_DECIMAL})(?:\s*/\s*({_DECIMAL}))?")
_HUGE = re.compile(r"[eE][-+]?\d{5}")  # as a fraction it would have 10,000 digits and more


class Scorer:
    """Scores responses by a reward, and counts the rows for which it fails.

    Args:
        name: ``data.env_name``, for messages.
        reward: the reward.

    Attributes:
        failures: number of rows for which the reward raised an error or gave no finite number. They
            count as 0, so that a single row never ends a run.
    """

    def __init__(self, name: str, reward: Reward) -> None:
        self.name, self.failures, self._warnings = name, 0, 0
        self._reward = reward

    def score(self, response: str, row: Mapping[str, Any], where: str) -> float:
        """Return the reward of a response; 0 if there is none."""
        try:
            value = float(self._reward(response, row))
            if math.isfinite(value):
                return value
            cause = f"gave {value}"
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # math-verify's time-out derives from BaseException
            if isinstance(error, (SystemExit, GeneratorExit, MemoryError)):
                raise
            cause = f"raised {in_one_line(error)}"
        self.failures += 1
        if self._warnings < WARNINGS:
            self._warnings += 1
            last = "; further ones are only counted" if self._warnings == WARNINGS else ""
            logger.warning("reward %s %s for %s, counted as 0%s", self.name, cause, where, last)
        return 0.0


def build_reward(name: str, dataset: Any) -> Reward:
    """Build the reward that ``data.env_name`` names.

    Args:
        name: one of ``TEXT_REWARDS``, or ``module:function``.
        dataset: the data set of reasoning-gym, if ``name`` is ``reasoning_gym``.

    Raises:
        ConfigError: a package or the function is missing.
    """
    if name == "exact":
        return lambda response, row: float(final_answer(response) == str(row["answer"]).strip())
    if name == "numeric":
        return numeric
    if name == "math":
        return _math_verify()
    if name == "reasoning_gym":
        return lambda response, row: dataset.score_answer(tagged_answer(response), row)
    return _imported(name)


def tagged_answer(response: str) -> str | None:
    """Return the last text between ``<answer>`` and ``</answer>``; None if there is none."""
    found = _TAGGED.findall(response)
    return found[-1].strip() if found else None


def final_answer(response: str) -> str:
    r"""A response's answer: in ``<answer>``, in ``\boxed{}``, after ``####``, or its last line."""
    if (tagged := tagged_answer(response)) is not None:
        return tagged
    if boxed := _BOXED.findall(response):
        return str(boxed[-1]).strip()
    if "####" in response:
        return response.rpartition("####")[2].strip()
    lines = response.strip().splitlines()
    return lines[-1].strip() if lines else ""


def numeric(response: str, row: Mapping[str, Any]) -> float:
    """Return 1 if the last number of the response's answer is that of the right answer, else 0."""
    given, right = last_number(final_answer(response)), last_number(str(row["answer"]))
    return float(given is not None and given == right)


def last_number(text: str) -> Fraction | None:
    """Return the last number of a text, exactly: a decimal, an exponent, or a fraction as 1/2.

    None if there is none, or if it cannot be computed: 1/0, 1e10000, thousands of digits.
    """
    found = _NUMBER.findall(_FRAC.sub(r"\1/\2", text))
    if not found or _HUGE.search("".join(found[-1])):
        return None
    sign, above, below = (part.replace(",", "") for part in found[-1])
    try:
        number = Fraction(above) / Fraction(below or 1)
    except (ValueError, ZeroDivisionError):
        return None
    return -number if sign else number


def _math_verify() -> Reward:
    """math-verify, as NeMo-RL calls it (nemo_rl/environments/math_environment.py)."""
    try:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    except ImportError:
        raise ConfigError(
            "data.env_name = 'math': math-verify is not installed; pip install math-verify, or set "
            "env_name: numeric"
        ) from None
    targets = (ExprExtractionConfig(), LatexExtractionConfig())

    @functools.lru_cache(maxsize=100_000)
    def gold(answer: str) -> Any:
        return parse(rf"\boxed{{{answer}}}", extraction_config=(LatexExtractionConfig(),))

    return lambda response, row: float(
        verify(gold(str(row["answer"])), parse(response, extraction_config=targets))
    )


def _imported(name: str) -> Reward:
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:  # the command's own folder is there instead
        sys.path.insert(0, os.getcwd())
    try:
        found: Reward = getattr(importlib.import_module(module), function)
    except Exception as error:  # whatever the user's module raises
        raise ConfigError(
            f"data.env_name = {name!r}: {in_one_line(error)}; give module:function, importable "
            "from the working folder"
        ) from None
    if not callable(found):
        raise ConfigError(f"data.env_name = {name!r}: is no function")
    return found
