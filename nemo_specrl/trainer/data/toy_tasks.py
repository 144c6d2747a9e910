"""The toy tasks of the embedded trainer: sums of many terms, and letters to be put in order.

Responses work the problem out step by step and give the answer after ``#``, with one token per
character:

- ``arithmetic``: ``"23+45-17+...=?"`` with 11 to 16 two-digit terms; a response writes down every
  intermediate total: ``"23+45=68;68-17=51;...#51"``, 100 to 180 tokens.
- ``sorting``: ``"cabm...=?"`` with 8 to 12 letters; a response inserts one letter after another:
  ``"c;ac;abc;abcm;...#abcm..."``, 50 to 105 tokens.

Answers are checked exactly, so rewards need no judge. Nothing here needs torch or vLLM.
"""

from __future__ import annotations

import bisect
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache

__all__ = [
    "BOS",
    "EOS",
    "HELDOUT_SEED",
    "PAD",
    "TASKS",
    "VOCABULARY",
    "Sorting",
    "Sum",
    "ToyProblem",
    "decode",
    "encode",
    "heldout_problems",
    "problems",
    "solution",
]

HELDOUT_SEED = 977

PAD, BOS, EOS = 0, 1, 2
LETTERS = "abcdefghijklm"
VOCABULARY: tuple[str, ...] = ("<pad>", "<bos>", "<eos>", *"0123456789+-=;#?", *LETTERS)
_IDS = {symbol: i for i, symbol in enumerate(VOCABULARY)}

MIN_TERMS, MAX_TERMS = 11, 16
MAX_TOTAL = 999
MIN_LETTERS, MAX_LETTERS = 8, 12


class ToyProblem(ABC):
    """A problem of a task. Hashable; two problems are equal if their questions are."""

    @property
    @abstractmethod
    def question(self) -> str:
        """The problem as text, with ``=?`` at its end."""

    @property
    @abstractmethod
    def answer(self) -> str:
        """The text expected after the response's last ``#``."""

    @abstractmethod
    def steps(self, rng: random.Random, error_rate: float) -> list[str]:
        """The worked steps and the answer; a step is wrong with probability ``error_rate``."""

    @property
    def prompt(self) -> list[int]:
        """Token ids of the question, starting with beginning-of-sequence."""
        return [BOS, *encode(self.question)]

    def reward(self, tokens: list[int]) -> float:
        """1.0 if the response ended with end-of-sequence and its answer is right, else 0.0."""
        if not tokens or tokens[-1] != EOS:
            return 0.0
        _, mark, answer = decode(tokens).rpartition("#")
        return float(mark == "#" and answer == self.answer)


@dataclass(frozen=True)
class Sum(ToyProblem):
    """A sum of signed terms."""

    terms: tuple[int, ...]

    @classmethod
    def sample(cls, rng: random.Random) -> Sum:
        """A random sum whose running total stays within 0..999."""
        terms = [rng.randint(10, 99)]
        total = terms[0]
        for _ in range(rng.randint(MIN_TERMS, MAX_TERMS) - 1):
            term = rng.randint(10, 99)
            if total - term < 0 or (total + term <= MAX_TOTAL and rng.random() < 0.6):
                terms.append(term)
            else:
                terms.append(-term)
            total += terms[-1]
        return cls(tuple(terms))

    @property
    def question(self) -> str:
        """The sum as text."""
        first, *rest = self.terms
        return f"{first}" + "".join(f"{t:+d}" for t in rest) + "=?"

    @property
    def answer(self) -> str:
        """The total."""
        return str(sum(self.terms))

    def steps(self, rng: random.Random, error_rate: float) -> list[str]:
        """The intermediate totals; a wrong one is off by 1 or 10."""
        total, steps = self.terms[0], []
        for term in self.terms[1:]:
            result = total + term
            if rng.random() < error_rate:
                result = abs(result + rng.choice((-10, -1, 1, 10)))
            steps.append(f"{total}{term:+d}={result}")
            total = result
        return [*steps, str(total)]


@dataclass(frozen=True)
class Sorting(ToyProblem):
    """Letters to be put in alphabetical order."""

    letters: str

    @classmethod
    def sample(cls, rng: random.Random) -> Sorting:
        """8 to 12 random letters, which may repeat."""
        return cls("".join(rng.choices(LETTERS, k=rng.randint(MIN_LETTERS, MAX_LETTERS))))

    @property
    def question(self) -> str:
        """See :class:`ToyProblem`."""
        return f"{self.letters}=?"

    @property
    def answer(self) -> str:
        """The letters in order."""
        return "".join(sorted(self.letters))

    def steps(self, rng: random.Random, error_rate: float) -> list[str]:
        """The letters sorted so far, one more in each step; a wrong one is one place off."""
        placed: list[str] = []
        steps = []
        for letter in self.letters:
            place = bisect.bisect_left(placed, letter)
            if rng.random() < error_rate:
                place = max(0, place - 1) if place == len(placed) else place + 1
            placed.insert(place, letter)
            steps.append("".join(placed))
        return [*steps, "".join(placed)]


TASKS: dict[str, type[Sum] | type[Sorting]] = {"arithmetic": Sum, "sorting": Sorting}
"""Tasks by ``data.dataset_name``."""


def encode(text: str) -> list[int]:
    """Token ids of ``text``, one for each character.

    Raises:
        KeyError: a character is not in the tasks' vocabulary.
    """
    return [_IDS[character] for character in text]


def decode(tokens: list[int]) -> str:
    """The text of ``tokens``; special and unknown ids are left out."""
    return "".join(VOCABULARY[t] for t in tokens if EOS < t < len(VOCABULARY))


@cache
def problems(task: str, count: int, seed: int) -> tuple[ToyProblem, ...]:
    """Draw ``count`` distinct problems of a task; the same seed gives the same problems."""
    rng = random.Random(seed)
    found: dict[ToyProblem, None] = {}
    while len(found) < count:
        found.setdefault(TASKS[task].sample(rng))
    return tuple(found)


def heldout_problems(training: tuple[ToyProblem, ...], task: str, count: int) -> list[ToyProblem]:
    """Problems that are not in the training set; the same for every run of a recipe."""
    seen = set(training)
    candidates = problems(task, count + len(seen), HELDOUT_SEED)
    return [problem for problem in candidates if problem not in seen][:count]


def solution(problem: ToyProblem, rng: random.Random | None = None, error_rate: float = 0.0) -> str:
    """A worked solution in which each step is wrong with probability ``error_rate``.

    Later steps build on a wrong one, as they would after a model's own mistake. The shipped models
    were trained on such solutions, which leaves room for reinforcement learning.
    """
    *steps, answer = problem.steps(rng or random.Random(0), error_rate)
    return "".join(f"{step};" for step in steps) + f"#{answer}"
