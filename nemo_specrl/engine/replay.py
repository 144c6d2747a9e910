"""Rollouts that a process which died had made for the present step, put back into their requests.

What the journal is and whose weights are the same is the cache's and the caller's to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from nemo_specrl.engine.assembly import text_of
from nemo_specrl.engine.requests import Request
from nemo_specrl.engine.sampling import Ending
from nemo_specrl.rollout import Rollout

if TYPE_CHECKING:
    from vllm import RequestOutput

__all__ = ["Journal", "put_back", "stand_in"]


@runtime_checkable
class Journal(Protocol):
    """A cache that keeps the rollouts of lost steps; :class:`~nemo_specrl.cache.JournaledStore`."""

    def take(
        self, rows: Sequence[tuple[bytes, int]], policy_version: int, fingerprint: int
    ) -> list[Rollout | None]:
        """The rollout of each row that was made for this step before; each once."""
        ...


def put_back(request: Request, rollout: Rollout) -> Ending | None:
    """Bring a request to where it was when its rollout ended; how that was.

    Returns:
        None where the request is another one, or has another draft than it had then.
    """
    from vllm.logprobs import FlatLogprobs

    ending = request.rules.ending(rollout.tokens)
    if (ending.length, ending.finish) != (len(rollout), rollout.finish):
        return None
    # What the present weights did not decode came from a draft.
    accepted = int(np.count_nonzero(rollout.reused))
    if accepted:
        draft = request.draft
        if draft is None or not (
            np.array_equal(draft.tokens[:accepted], rollout.tokens[:accepted])
            and np.array_equal(draft.birth_logprobs[:accepted], rollout.birth_logprobs[:accepted])
        ):
            return None
    request.accepted = accepted
    request.tokens = rollout.tokens.tolist()
    n = len(rollout)
    request.logprobs = FlatLogprobs(
        start_indices=list(range(n)),
        end_indices=list(range(1, n + 1)),
        token_ids=list(request.tokens),
        logprobs=rollout.logprobs.tolist(),
        ranks=[None] * n,
        decoded_tokens=[None] * n,
    )
    return ending


def stand_in(request: Request, ending: Ending) -> RequestOutput:
    """What stands for the engine's output of a request that the engine never saw."""
    from vllm import CompletionOutput, RequestOutput

    completion = CompletionOutput(
        index=0,
        text=text_of(request, ending),
        token_ids=[],
        cumulative_logprob=None,
        logprobs=None,
    )
    return RequestOutput(
        request_id="journal",
        prompt=request.text,
        prompt_token_ids=list(request.rules.prompt),
        prompt_logprobs=None,
        outputs=[completion],
        finished=True,
        num_cached_tokens=len(request.rules.prompt) + len(request.tokens),
    )
