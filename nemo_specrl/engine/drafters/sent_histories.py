"""Histories that are sent to an engine ahead of requests, by an RPC to its workers.

Requests of this package bring the history of their prompt themselves (``histories``). Others bring
nothing, such as those that come through vLLM's HTTP server: where their prompt begins with one
whose history was sent, they draft from it all the same (``roots``).

An engine that drafts in its V2 model runner takes them (``v2``).
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
    """Have prompts draft from earlier responses, in whatever way their requests come in.

    What the engine has already is passed over, so that histories may be sent again. They are kept
    within the engine's bound of memory: those of prompts that have not run for longest make room.

    Args:
        engine: a ``vllm.LLM`` or an ``AsyncLLM`` that was built with
            :func:`~nemo_specrl.engine_options`.
        histories: pairs of a prompt and the responses to it, oldest first, each a sequence of
            token ids. Behind a later turn's prompt, which begins with one that is known, they
            belong to that one.

    Returns:
        What the engine's ``collective_rpc`` does: of an ``LLM`` a list, of an ``AsyncLLM`` an
        awaitable of one. It has a dictionary from each worker: how many of the ``prompts`` have a
        place, and how many ``responses`` these prompts have.

    Raises:
        ConfigError: histories are not such pairs. Nothing was sent.
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
    """Histories as a worker takes them: by prompt, identities and int32 tokens of responses.

    A response is known by its tokens, so that it has the same identity whenever it is sent.

    Args:
        histories: as of :func:`send_histories`, or of JSON, which has lists of token ids.
        vocabulary: tokens of prompts are below it. Responses are looked at when they are written.

    Raises:
        ConfigError: histories are not such pairs.
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
    """Token ids as int32 ``[n]``.

    Args:
        value: a sequence of token ids, or their bytes as int32.
        place: of it, for the error.
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
