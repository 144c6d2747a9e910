"""What a request carries about its drafts, in ``SamplingParams.extra_args``.

Hosts may set :data:`REQUEST`; the engine core sets :data:`ROW`, which travels to all workers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from nemo_specrl.config import SpecRLConfig, validated
from nemo_specrl.errors import ConfigError

__all__ = ["REQUEST", "ROW", "Row", "block_of", "config_of", "row_of"]

REQUEST = "spec_rl"
"""What a host wants, also the key of the block in ``additional_config``. Absent: the request is
drafted for, and its response kept. False: neither. A dict: ``prompt_length`` (the first n tokens of
the prompt are the prompt, the others begin the response), ``keep`` (False: the response is not
kept), ``ahead`` (True: it is not counted)."""
ROW = "spec_rl_row"
"""What the engine core tells workers: the fields of a :class:`Row`, as a list."""


class Row(NamedTuple):
    """How a request is drafted for.

    Args:
        key: key of the root, 16 bytes: the index that it drafts from and adds to.
        identity: names the request's response in that index.
        history: earlier responses as identity and int32 tokens, oldest first; those that the index
            has are skipped.
        start: length of the root, in tokens of the prompt; what follows begins the response.
        counted: whether it counts in the engine's metrics.
    """

    key: bytes
    identity: int
    history: Sequence[tuple[int, bytes]]
    start: int
    counted: bool


def row_of(request: Any) -> Row | None:
    """The row of a request, as the scheduler or a model runner knows it; None: no drafts."""
    params = request.sampling_params
    fields = ((params.extra_args if params is not None else None) or {}).get(ROW)
    return None if fields is None else Row(*fields)


def block_of(additional_config: Any) -> Any:
    """The ``spec_rl`` block in vLLM's ``additional_config``; None: there is none.

    Raises:
        ConfigError: its key is spelled in another way, and the engine would not draft.
    """
    if not isinstance(additional_config, dict):
        return None
    for key in additional_config:
        letters = re.sub("[^a-z]", "", str(key).lower())
        if letters in ("specrl", "nemospecrl") and key != REQUEST:
            raise ConfigError(f"additional_config.{key}: the key is {REQUEST}")
    return additional_config.get(REQUEST)


def config_of(vllm_config: Any) -> SpecRLConfig:
    """The configuration of an engine that drafts from history."""
    block = block_of(vllm_config.additional_config) or {}
    return validated(SpecRLConfig, block, f"additional_config.{REQUEST}")
