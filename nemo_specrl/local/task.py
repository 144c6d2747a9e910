"""The task of the embedded trainer: sums of many terms, worked step by step.

A prompt is ``"23+45-17+...=?"`` with 11 to 16 two-digit terms; a response writes down every
intermediate total and then the answer behind ``#``: ``"23+45=68;68-17=51;...#51"``, 100 to
180 tokens, one token a character. The answer is verified exactly, so the reward needs no judge.

This module knows characters and numbers; it knows nothing of torch, vLLM or the trainer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

__all__ = ["VOCABULARY", "Problem", "arithmetic_problems", "decode", "encode", "reward", "solution"]

PAD, BOS, EOS = 0, 1, 2
VOCABULARY: tuple[str, ...] = ("<pad>", "<bos>", "<eos>", *"0123456789+-=;#?")
_IDS = {symbol: i for i, symbol in enumerate(VOCABULARY)}

MIN_TERMS, MAX_TERMS = 11, 16
MAX_TOTAL = 999


@dataclass(frozen=True)
class Problem:
    """One sum: its first term, the signed terms that follow, and the total they make."""

    terms: tuple[int, ...]

    @property
    def question(self) -> str:
        """The sum as text, with ``=?`` at its end."""
        first, *rest = self.terms
        return f"{first}" + "".join(f"{t:+d}" for t in rest) + "=?"

    @property
    def answer(self) -> int:
        """The total."""
        return sum(self.terms)

    @property
    def prompt(self) -> list[int]:
        """Token ids, beginning-of-sequence first."""
        return [BOS, *encode(self.question)]


def encode(text: str) -> list[int]:
    """Token ids of ``text``, one a character.

    Raises:
        KeyError: a character that the task's vocabulary lacks.
    """
    return [_IDS[character] for character in text]


def decode(tokens: list[int]) -> str:
    """The characters of ``tokens``; special and unknown ids are left out."""
    return "".join(VOCABULARY[t] for t in tokens if EOS < t < len(VOCABULARY))


def sample_problem(rng: random.Random) -> Problem:
    """A random problem whose running total stays within 0..999."""
    terms = [rng.randint(10, 99)]
    total = terms[0]
    for _ in range(rng.randint(MIN_TERMS, MAX_TERMS) - 1):
        term = rng.randint(10, 99)
        if total - term < 0 or (total + term <= MAX_TOTAL and rng.random() < 0.6):
            terms.append(term)
        else:
            terms.append(-term)
        total += terms[-1]
    return Problem(tuple(terms))


@cache
def arithmetic_problems(count: int, seed: int) -> tuple[Problem, ...]:
    """``count`` distinct problems, always the same ones for a seed."""
    rng = random.Random(seed)
    problems: dict[Problem, None] = {}
    while len(problems) < count:
        problems.setdefault(sample_problem(rng))
    return tuple(problems)


def solution(problem: Problem, rng: random.Random | None = None, error_rate: float = 0.0) -> str:
    """A worked solution; with ``error_rate`` each step's result is wrong with that probability.

    A wrong step is carried on, as a model's own slip would be. Solutions with slips are what the
    shipped model was trained on: they leave the accuracy that reinforcement learning then gains.
    """
    total, steps = problem.terms[0], []
    for term in problem.terms[1:]:
        result = total + term
        if rng is not None and rng.random() < error_rate:
            result = abs(result + rng.choice((-10, -1, 1, 10)))
        steps.append(f"{total}{term:+d}={result};")
        total = result
    return "".join(steps) + f"#{total}"


def reward(problem: Problem, tokens: list[int]) -> float:
    """1.0 if the response ended by itself and the answer follows its last ``#``, else 0.0."""
    if not tokens or tokens[-1] != EOS:
        return 0.0
    _, mark, answer = decode(tokens).rpartition("#")
    return float(mark == "#" and answer == str(problem.answer))
