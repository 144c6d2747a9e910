"""Conversations: responses of several turns of the model, with an environment's answers between
them.

A turn is decoded like a response, after the prompt and everything said before it. All that has been
said in the end is one response to the first prompt, the conversation's root: it is cached,
journaled and drafted from as such. Every turn therefore drafts from whole earlier conversations.

Runs no engine and handles no requests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from nemo_specrl.engine.response import Response, flat_logprobs
from nemo_specrl.engine.sampling_rules import ResponseEnd, StopRules
from nemo_specrl.rollout import Finish

if TYPE_CHECKING:
    from vllm.logprobs import FlatLogprobs

__all__ = ["Environment", "Turns"]


class Environment(Protocol):
    """What answers the model's turns. The same turn always has the same answer."""

    @property
    def max_turns(self) -> int:
        """The maximum number of turns of the model in a conversation."""

    def observe(self, turn: Sequence[int]) -> list[int] | None:
        """The tokens between a turn and the next one; None if the turn asks for nothing.

        Args:
            turn: token ids of a turn that has ended by a stop token or a stop string.
        """


@dataclasses.dataclass(eq=False)
class Turns:
    """The state of a conversation.

    Args:
        environment: answers the turns.
        root: rules that end the first turn; their prompt is the conversation's root. ``max_tokens``
            bounds each turn, and the model's limit bounds the conversation.
        said: the turns and the observations before the present turn.
        observed: where observations begin and end in the conversation, in tokens after the root.
        ended: number of the model's turns that have ended.
    """

    environment: Environment
    root: StopRules
    said: Response = dataclasses.field(default_factory=Response)
    observed: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    ended: int = 0

    @property
    def rules(self) -> StopRules:
        """The rules that end the present turn."""
        return dataclasses.replace(self.root, prompt=self.root.prompt + self.said.tokens)

    @property
    def observed_tokens(self) -> int:
        """Number of tokens that came from the environment."""
        return sum(end - begin for begin, end in self.observed)

    def made(self, length: int) -> npt.NDArray[np.bool_]:
        """Which tokens of the conversation are the model's.

        Args:
            length: length of the conversation, tokens after the root.

        Returns:
            bool ``[length]``.
        """
        mask = np.ones(length, dtype=np.bool_)
        for begin, end in self.observed:
            mask[begin:end] = False
        return mask

    def follow(self, turn: Response, end: ResponseEnd) -> ResponseEnd | None:
        """Take a turn that has ended, and let the environment answer it.

        Args:
            turn: the turn.
            end: how it ended.

        Returns:
            How the conversation ended with it; None if it continues, in which case the turn is in
            ``said``, followed by the environment's observation.
        """
        self.ended += 1
        whole = end.finish in (Finish.STOP, Finish.STOP_STRING) and not turn.defect
        if not whole or self.ended >= self.environment.max_turns:
            return end
        observation = self.environment.observe(turn.tokens)
        if observation is None:
            return end
        begin = len(self.said.tokens) + len(turn.tokens)
        end_of_observation = begin + len(observation)
        if len(self.root.prompt) + end_of_observation >= self.root.max_model_len:
            return ResponseEnd(end.length, Finish.LENGTH)  # there is no room for another turn
        self._say(turn.tokens, turn.logprobs)
        # An observation is given and not drawn: its tokens have probability 1.
        self._say(observation, flat_logprobs(observation, [0.0] * len(observation)))
        self.observed.append((begin, end_of_observation))
        return None

    def join(self, turn: Response) -> Response:
        """Join all that was said with the last turn; ``said`` is empty afterwards."""
        if not self.said.tokens:
            return turn
        self._say(turn.tokens, turn.logprobs)
        said, self.said = self.said, Response()
        said.defect = turn.defect
        return said

    def forget(self) -> None:
        """Start the conversation again from its root."""
        self.said, self.observed, self.ended = Response(), [], 0

    def _say(self, tokens: list[int], logprobs: FlatLogprobs | None) -> None:
        if logprobs is not None:
            self.said.append(tokens, logprobs, stop_terminated=False)
