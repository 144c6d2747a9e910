"""Earlier responses to a prompt, which its next request carries to the tree proposer."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from nemo_specrl.engine.requests import RolloutRequest
from nemo_specrl.engine.vllm.compat import EXTRA_ARG
from nemo_specrl.rollout import Rollout
from nemo_specrl.speculation.draft_selection import response_id

if TYPE_CHECKING:
    from vllm import SamplingParams

__all__ = ["PendingHistories"]


class PendingHistories:
    """Earlier responses to prompts, sent to the engine once per prompt and policy version.

    The engine's tree of a prompt may have them already, or may have been dropped since they were
    sent. The client cannot know. Sent once an epoch, they cost next to nothing compared with
    decoding the prompt's rows, so they are sent then, and lost drafts come back with the next
    epoch.
    """

    def __init__(self) -> None:
        self._waiting: dict[bytes, list[tuple[int, bytes]]] = {}
        self._sent: set[bytes] = set()
        self._sent_at = -1  # the policy version

    def add(self, cached: Mapping[bytes, Iterable[Rollout]], policy_version: int) -> None:
        """Queue the rollouts of a look-up for the next request of their prompt."""
        if policy_version != self._sent_at:
            self._sent, self._sent_at = set(), policy_version
            # These belong to prompts whose rows were given up before they began, and may never
            # recur.
            self._waiting.clear()
        for key, rollouts in cached.items():
            if key in self._sent:
                continue
            oldest_first = sorted(rollouts, key=lambda rollout: rollout.policy_version)
            self._waiting[key] = [_response(rollout) for rollout in oldest_first]

    def append(self, rollout: Rollout) -> None:
        """Queue one more rollout for the next request of its prompt."""
        self._waiting.setdefault(rollout.key, []).append(_response(rollout))

    def take(self, key: bytes) -> list[tuple[int, bytes]]:
        """Remove and return a prompt's responses: identity and int32 tokens, oldest first."""
        history = self._waiting.pop(key, [])
        if history:
            self._sent.add(key)
        return history

    def with_history(
        self, request: RolloutRequest, params: SamplingParams, policy_version: int
    ) -> SamplingParams:
        """Return sampling parameters with what the proposer needs to draft for a request."""
        identity = response_id(request.row.sample_index, policy_version)
        return self.with_identity(request, params, identity)

    def with_identity(
        self, request: RolloutRequest, params: SamplingParams, identity: int
    ) -> SamplingParams:
        """Do the same for a response with any identity, ``0 .. 2**64 - 1``."""
        key = request.row.key
        params = copy.copy(params)
        params.extra_args = {
            **(params.extra_args or {}),
            EXTRA_ARG: [
                key,
                identity,
                self.take(key),
                None if request.media is not None else len(request.prompt_tokens),
            ],
        }
        return params


def _response(rollout: Rollout) -> tuple[int, bytes]:
    """Identity and tokens of a rollout, as the proposer expects them."""
    return response_id(rollout.sample_index, rollout.policy_version), rollout.tokens.tobytes()
