"""The loop that drives vLLM's engine: rows, turns of conversations, run-ahead, an early end.

A row is one request of the engine, or one for each turn of a conversation. What the engine drafts
from, verifies and keeps is its own concern: this loop adds requests, steps, and aborts.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from vllm import LLM, CompletionOutput, SamplingParams

__all__ = ["EndOfPhase", "Response", "RunAhead", "decode"]

EndOfPhase = Callable[[Collection[int]], bool]
"""Whether to give up the rows that have not ended, by the indices of those that have."""


class Environment(Protocol):
    """What answers the turns of a conversation. The same turn always has the same answer."""

    @property
    def max_turns(self) -> int:
        """The maximum number of turns of the model in a conversation."""

    def observe(self, turn: Sequence[int]) -> list[int] | None:
        """Return the tokens between a turn and the next one; None if the turn asks for nothing."""


@dataclass(eq=False)
class Response:
    """A response of the current policy.

    Args:
        tokens: response token ids, ``n`` of them.
        logprobs: log-prob of each token as the engine reports it, float32 ``[n]``, nats; 0 for
            tokens that the policy did not make.
        made: which tokens the policy made, bool ``[n]``. The others are the environment's.
        truncated: whether it was cut off at the maximum length.
        ended: False if it was given up before its end.
        fresh: False if an earlier response was verified for it (``preset: reuse``).
        accepted: number of its first tokens that come from that response.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    made: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    truncated: bool = False
    ended: bool = False
    fresh: bool = True
    accepted: int = 0

    @property
    def length(self) -> int:
        """Number of tokens that the policy made."""
        return int(self.made.sum())

    def take(self, completion: CompletionOutput) -> None:
        """Append the tokens of an output of the engine, and note how they ended."""
        logprobs: Any = completion.logprobs
        self._append(completion.token_ids, logprobs.logprobs, made=True)
        self.ended = completion.finish_reason in ("stop", "length")
        self.truncated = completion.finish_reason == "length"

    def observe(self, tokens: Sequence[int]) -> None:
        """Append tokens of the environment."""
        self._append(tokens, [0.0] * len(tokens), made=False)

    def _append(self, tokens: Sequence[int], logprobs: Sequence[float], *, made: bool) -> None:
        self.tokens += tokens
        self.logprobs = np.append(self.logprobs, np.asarray(logprobs[: len(tokens)], np.float32))
        self.made = np.append(self.made, np.full(len(tokens), made))


@dataclass(eq=False)
class _Row:
    """A row, and which of its turns is being decoded."""

    prompt: list[int]
    params: SamplingParams
    response: Response = field(default_factory=Response)
    turn: int = 0
    begin: int = 0  # of the turn, in tokens of the response

    def next_turn(self, environment: Environment, longest: int) -> bool:
        """Append the answer to the turn that has ended; False if the conversation ends with it."""
        self.turn += 1
        if self.response.truncated or self.turn >= environment.max_turns:
            return False
        answer = environment.observe(self.response.tokens[self.begin :])
        if answer is None:
            return False
        self.begin = len(self.response.tokens) + len(answer)
        if len(self.prompt) + self.begin >= longest:
            self.response.truncated = True  # there is no room for another turn
            return False
        self.response.observe(answer)
        self.params = copy.copy(self.params)
        if self.params.seed is not None:
            self.params.seed += 1
        return True


@dataclass
class RunAhead:
    """Rows for upcoming prompts, which are decoded in idle places and kept as history alone.

    Args:
        places: number of rows that the engine runs at once.
        waiting: prompt and sampling parameters of each row.

    Attributes:
        rows: number of rows that were begun.
        tokens: number of tokens that they have.
    """

    places: int
    waiting: deque[tuple[list[int], SamplingParams]]
    rows: int = 0
    tokens: int = 0


def decode(
    llm: LLM,
    prompts: Sequence[tuple[list[int], SamplingParams]],
    *,
    environment: Environment | None = None,
    run_ahead: RunAhead | None = None,
    end_of_phase: EndOfPhase | None = None,
) -> list[Response]:
    """Decode a response to each prompt.

    Args:
        llm: the engine, in this process.
        prompts: token ids and sampling parameters of each row. With ``output_kind`` FINAL_ONLY, a
            row that is given up has no tokens. A later turn has the seed plus 1.
        environment: answers the turns of a conversation; None: a response is one turn.
        run_ahead: rows of upcoming prompts.
        end_of_phase: asked before each step of the engine; None: all rows are awaited.

    Returns:
        the responses, in order; ``ended`` is False for those that were given up.
    """
    engine = llm.llm_engine
    longest = llm.model_config.max_model_len
    rows = [_Row(*prompt) for prompt in prompts]
    ended: set[int] = set()
    running: dict[str, int] = {}
    ahead: set[str] = set()

    def add(tokens: list[int], params: SamplingParams, priority: int = 0) -> str:
        name = str(next(llm.request_counter))
        engine.add_request(name, {"prompt_token_ids": tokens}, params, priority=priority)
        return name

    try:
        for index, row in enumerate(rows):
            running[add(row.prompt, row.params)] = index
        while running and engine.has_unfinished_requests():
            if end_of_phase is not None and end_of_phase(ended):
                break
            if run_ahead is not None:
                free = run_ahead.places - len(running) - len(ahead)
                for _ in range(min(free, len(run_ahead.waiting))):
                    ahead.add(add(*run_ahead.waiting.popleft(), priority=1))
                    run_ahead.rows += 1
            for output in engine.step():
                name, completion = output.request_id, output.outputs[0]
                if run_ahead is not None and name in ahead:
                    run_ahead.tokens += len(completion.token_ids)
                    if output.finished:
                        ahead.remove(name)
                    continue
                row = rows[running[name]]
                row.response.take(completion)
                if not output.finished:
                    continue
                index = running.pop(name)
                if environment is not None and row.next_turn(environment, longest):
                    running[add(row.prompt + row.response.tokens, row.params)] = index
                else:
                    ended.add(index)
    finally:
        engine.abort_request([*running, *ahead])
    return [row.response for row in rows]
