"""The state that a row verified in rounds keeps between two requests."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from vllm.logprobs import FlatLogprobs

    from nemo_specrl.speculation.suffix_tree import TreeRow

__all__ = ["RowInRounds"]


@dataclasses.dataclass(eq=False)
class RowInRounds:
    """The state of a row that is decoded in rounds.

    Args:
        tree: what it drafts from.
        stream: distinguishes the randomness of this row from that of other attempts at the same
            row.
        uniforms: uniforms of acceptance; none is used twice.
        salt: salt for the prefix cache. Blocks are shared only by the row's own requests, since the
            part of a draft that another row computed would come without log-probs.
        requests: number of requests made so far.
        policy_version: version of the weights when the present request was made.
        draft: the present request's, until it is judged.
        rejected: the candidates at the position of a rejected token, none of which took its place;
            the present request draws from the rest.
        skip_draft: the last draft could not be judged, so the next request has none.
        opening: the present request has not brought an output yet.
        needs_request: the row needs another request.
    """

    tree: TreeRow
    stream: str
    uniforms: np.random.Generator
    salt: str
    requests: int = 0
    policy_version: int = 0
    draft: list[int] = dataclasses.field(default_factory=list)
    rejected: FlatLogprobs | None = None
    skip_draft: bool = False
    opening: bool = False
    needs_request: bool = False
