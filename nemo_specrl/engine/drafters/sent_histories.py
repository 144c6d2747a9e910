"""Histories that are sent to an engine ahead of requests, by an RPC to its workers.

Requests of this package bring the history of their prompt themselves (``histories``). Others bring
none, such as those that come through vLLM's HTTP server: if their prompt begins with one whose
history was sent, they draft from it all the same (``roots``).

Engines that draft in the V2 model runner (``v2``) accept them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from nemo_specrl.engine.vllm.v2_patches import ADD_HISTORIES
from nemo_specrl.errors import ConfigError

__all__ = ["received", "send_histories"]

Int32 = npt.NDArray[np.int32]


def send_histories(engine: Any, histories: Iterable[tuple[Any, Iterable[Any]]]) -> Any:
    """Send earlier responses to an engine, so that any request for their prompts drafts from them.

    Needed only for requests that do not pass through this package, such as those of vLLM's HTTP
    server. Responses that the engine already has are skipped, so histories may be sent again, for
    example after every refit. Memory stays within the engine's bound: the prompts that have been
    idle longest are evicted first.

    Args:
        engine: a ``vllm.LLM`` or ``AsyncLLM`` with the V2 drafter (``tree.method: v2``), built with
            :func:`~nemo_specrl.engine_options`. No other engine has a method for this call.
        histories: pairs ``(prompt, responses)``; the prompt and each response are one-dimensional
            sequences of int token ids, responses oldest first. If a prompt starts with one that the
            engine knows (a later turn), its responses are added to that one.

    Returns:
        For an ``LLM`` a list, for an ``AsyncLLM`` an awaitable of one, with a dict per worker:
        ``prompts``, how many of them were stored, and ``responses``, how many responses they have.

    Raises:
        ConfigError: ``histories`` is not of this form (nothing was sent). Token ids outside the
            vocabulary are refused in the worker, as an error of vLLM's RPC.
    """
    sent = [
        (
            _tokens(prompt, f"histories[{i}], prompt").tobytes(),
            [
                _tokens(response, f"histories[{i}], response {j}").tobytes()
                for j, response in enumerate(responses)
            ],
        )
        for i, (prompt, responses) in enumerate(map(_pair, histories))
    ]
    return engine.collective_rpc(ADD_HISTORIES, args=(sent,))


def received(histories: Any, vocabulary: int) -> list[tuple[Int32, list[tuple[int, bytes]]]]:
    """Convert histories to the worker's form: by prompt, identities and int32 tokens of responses.

    A response's identity is derived from its tokens, so that it is the same whenever it is sent.

    Args:
        histories: as for :func:`send_histories`, or from JSON, as lists of token ids.
        vocabulary: tokens of prompts must be below it. Responses are checked when they are written.

    Raises:
        ConfigError: ``histories`` is not such pairs.
    """
    if not isinstance(histories, Sequence):
        raise ConfigError("histories: must be a list of pairs of a prompt and its responses")
    found = []
    for i, (prompt, responses) in enumerate(map(_pair, histories)):
        tokens = _tokens(prompt, f"histories[{i}], prompt")
        if not len(tokens) or tokens.min() < 0 or tokens.max() >= vocabulary:
            raise ConfigError(
                f"histories[{i}], prompt: must have token ids of 0 to {vocabulary - 1}, at least "
                "one"
            )
        of_prompt = []
        for j, response in enumerate(responses):
            data = _tokens(response, f"histories[{i}], response {j}").tobytes()
            of_prompt.append((xxhash.xxh3_64_intdigest(data) >> 1, data))
        found.append((tokens, of_prompt))
    return found


def _pair(pair: Any) -> tuple[Any, Any]:
    try:
        prompt, responses = pair
        iter(responses)
    except (TypeError, ValueError):
        raise ConfigError("histories: must be pairs of a prompt and its responses") from None
    return prompt, responses


def _tokens(value: Any, place: str) -> Int32:
    """Convert token ids to int32 ``[n]``.

    Args:
        value: a sequence of token ids, or their bytes as int32.
        place: where the value is, for the error.
    """
    if isinstance(value, bytes) and len(value) % 4 == 0:
        return np.frombuffer(value, np.int32)
    try:
        tokens = np.asarray(value)
        right = tokens.ndim == 1 and (not tokens.size or tokens.dtype.kind in "iu")
        if right and not (tokens.size and abs(tokens).max() >= 2**31):
            return tokens.astype(np.int32)
    except (TypeError, ValueError):
        pass
    raise ConfigError(f"{place}: must be a sequence of token ids")
