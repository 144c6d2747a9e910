"""The training and the held-out problems of a recipe."""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from typing import Protocol

import numpy as np
import xxhash

from nemo_specrl.errors import ConfigError
from nemo_specrl.trainer.data.rewards import Scorer, build_reward, last_number
from nemo_specrl.trainer.data.sources import Row, file_rows, gym_dataset, gym_rows
from nemo_specrl.trainer.data.text import Text, read_text_file
from nemo_specrl.trainer.data.toy_tasks import HELDOUT_SEED, heldout_problems, problems
from nemo_specrl.trainer.data_config import TOY_TASKS, DataConfig
from nemo_specrl.trainer.policy_config import PolicyConfig, read_model_config

__all__ = ["Dataset", "Problem", "open_dataset"]

GIVE_UP = 1000
"""A generated data set is refused after this many unusable rows in succession."""

logger = logging.getLogger(__name__)


class Problem(Protocol):
    """A prompt, and what a response to it is worth."""

    @property
    def prompt(self) -> list[int]:
        """Token ids."""

    def reward(self, tokens: list[int]) -> float:
        """The reward of a response, given as token ids."""


@dataclass(frozen=True, eq=False)
class TextProblem:
    """A problem in text.

    Args:
        row: the problem as its source has it.
        prompt: token ids of its prompt.
        text: the tokenizer.
        scorer: scores the responses.
    """

    row: Row
    prompt: list[int]
    text: Text
    scorer: Scorer

    def reward(self, tokens: list[int]) -> float:
        """See :class:`Problem`."""
        return self.scorer.score(self.text.response(tokens), self.row.values, self.row.where)


@dataclass
class Dataset:
    """The problems of a recipe.

    Args:
        training: an epoch is one pass over them.
        heldout: problems for evaluations, none of which is in ``training``; may be empty.
        scorer: counts the failures of the reward; None for the toy tasks, whose rewards cannot
            fail.
        day: the date that chat templates were given.
    """

    training: Sequence[Problem]
    heldout: Sequence[Problem]
    scorer: Scorer | None = None
    day: date | None = None

    def content_hash(self) -> str:
        """Hash of the training problems: their prompts and answers, in order."""
        digest = xxhash.xxh3_128()
        for problem in self.training:
            answer = problem.row.values.get("answer") if isinstance(problem, TextProblem) else ""
            digest.update(f"{problem.prompt} {answer}\n".encode())
        return digest.hexdigest()

    def take_reward_failures(self) -> int:
        """Number of responses since the last call for which the reward failed."""
        if self.scorer is None:
            return 0
        taken, self.scorer.failures = self.scorer.failures, 0
        return taken


def open_dataset(
    data: DataConfig, policy: PolicyConfig, heldout: int, day: date | None = None
) -> Dataset:
    """Read or generate the problems of a recipe.

    Args:
        data: the ``data:`` block.
        policy: the ``policy:`` block, for its tokenizer and its longest prompt.
        heldout: largest number of held-out problems.
        day: the date for chat templates; None: today's.

    Raises:
        ConfigError: a file or a package is missing, a row is not as it must be, or no prompt can
            be used.
    """
    longest = policy.generation.vllm_cfg.max_model_len - 1
    if data.dataset_name in TOY_TASKS:
        training = problems(data.dataset_name, data.prompts or 0, data.seed)
        rest = heldout_problems(training, data.dataset_name, heldout)
        if (most := max(len(p.prompt) for p in (*training, *rest))) > longest:
            raise ConfigError(
                f"policy.generation.vllm_cfg.max_model_len = {longest + 1}: must exceed the "
                f"longest prompt's {most} tokens"
            )
        return Dataset(training, rest)
    longest = min(longest, data.max_input_seq_length or longest)
    return _TextDataset(data, policy, longest, day or date.today()).open(heldout)


class _TextDataset:
    def __init__(self, data: DataConfig, policy: PolicyConfig, longest: int, day: date) -> None:
        self.data, self.longest, self.day = data, longest, day
        files = data.system_prompt_file, data.prompt_file
        system, template = (
            None if path is None else read_text_file(f"data.{key}", path)
            for key, path in zip(("system_prompt_file", "prompt_file"), files, strict=True)
        )
        if template is not None and template.count("{}") != 1:
            raise ConfigError(
                f"data.prompt_file = {str(data.prompt_file)!r}: must have {{}} once, for the "
                "problem"
            )
        noon = datetime.combine(day, time(12))
        self.text = Text(policy, system_prompt=system, template=template, date=noon)
        self.vocabulary = read_model_config(policy.model_name).get("vocab_size")
        gym = None
        if data.data_path is None:
            gym = gym_dataset(data.dataset_name, data.dataset_kwargs, data.seed, 1)
        name = data.env_name or ("math" if gym is None else "reasoning_gym")
        self.scorer = Scorer(name, build_reward(name, gym))
        self.seen: set[tuple[int, ...]] = set()
        self.left_out: dict[str, list[str]] = defaultdict(list)

    def open(self, heldout: int) -> Dataset:
        data, path = self.data, self.data.data_path
        if path is None:
            training = self._generated(data.seed, data.prompts or 0)
            rest = self._generated(HELDOUT_SEED, heldout)
        else:
            rows = list(file_rows(path, data))
            held = round(len(rows) * data.split_validation_size)
            if data.split_validation_size:
                held = max(1, held)
                order = np.random.default_rng(abs(data.seed)).permutation(len(rows))
                kept = sorted(order[held:])
                rows = [rows[i] for i in (*kept, *sorted(order[:held]))]
            first = len(rows) - held
            training = list(itertools.islice(self._usable(rows[:first]), data.num_prompts))
            later: Iterable[Row] = rows[first:]
            if (other := data.validation) is not None:
                later = file_rows(other.data_path, other)
            rest = list(itertools.islice(self._usable(later), heldout))
        self._report()
        if len(training) < (data.num_prompts or 1):
            raise ConfigError(
                f"data.num_prompts = {data.num_prompts}: {path or data.dataset_name} has only "
                f"{len(training)} prompts that can be used"
            )
        return Dataset(training, rest, self.scorer, self.day)

    def _generated(self, seed: int, count: int) -> list[TextProblem]:
        data = self.data
        rows = gym_rows(data.dataset_name, data.dataset_kwargs, seed)
        return list(itertools.islice(self._usable(rows, GIVE_UP), count))

    def _usable(self, rows: Iterable[Row], give_up: int | None = None) -> Iterator[TextProblem]:
        """Yield the problems whose prompts are neither empty, nor too long, nor duplicates."""
        unusable = 0
        for row in rows:
            prompt, reason = self._prompt(row)
            if reason is None:
                unusable = 0
                yield TextProblem(row, prompt, self.text, self.scorer)
                continue
            self.left_out[reason].append(row.where)
            unusable += 1
            if unusable == give_up:
                raise ConfigError(
                    f"data.dataset_name = {self.data.dataset_name!r}: {give_up} problems in "
                    f"succession cannot be used ({reason}); ask for fewer, or for longer prompts"
                )

    def _prompt(self, row: Row) -> tuple[list[int], str | None]:
        """Return a row's prompt, and why it cannot be used; None if it can."""
        if not row.messages[-1]["content"].strip():
            return [], "an empty prompt"
        if self.scorer.name == "numeric" and last_number(str(row.values.get("answer"))) is None:
            raise ConfigError(f"{row.where}: the answer has no number, as env_name: numeric needs")
        try:
            prompt = self.text.prompt(row.messages)
        except ConfigError as error:
            raise ConfigError(f"{row.where}: {error}") from None
        if isinstance(self.vocabulary, int) and max(prompt, default=0) >= self.vocabulary:
            word = self.text.tokenizer.convert_ids_to_tokens(max(prompt))
            raise ConfigError(
                f"{row.where}: its prompt has token {max(prompt)}, {word!r}, and the model's "
                f"vocabulary ends at {self.vocabulary - 1}; give a model that has the token"
            )
        if len(prompt) > self.longest:
            return prompt, f"a prompt of more than {self.longest} tokens"
        if tuple(prompt) in self.seen:
            return prompt, "the prompt of an earlier row"
        self.seen.add(tuple(prompt))
        return prompt, None

    def _report(self) -> None:
        """Log which rows were left out, and why."""
        for reason, places in self.left_out.items():
            more = f" and {len(places) - 3} more" if len(places) > 3 else ""
            rows = "row was" if len(places) == 1 else "rows were"
            logger.warning(
                "%d %s left out for %s: %s%s",
                len(places),
                rows,
                reason,
                ", ".join(places[:3]),
                more,
            )
