"""Lossless drafting from the side of the engine's client: histories of prompts on their way to it.

The engine's own part is ``proposer``. Here earlier rollouts are attached to requests, once for each
prompt and batch, and the options are made with which an engine has to be built.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from nemo_specrl.config import SpecRLConfig
from nemo_specrl.engine.compat import check_custom_proposers
from nemo_specrl.engine.requests import TREE_PROPOSER, Request
from nemo_specrl.errors import IncompatibleVersion
from nemo_specrl.rollout import Rollout
from nemo_specrl.speculation.drafts import response_id

if TYPE_CHECKING:
    from vllm import SamplingParams

__all__ = ["EXTRA_ARG", "Histories", "engine_options"]

EXTRA_ARG = "spec_rl"
"""Key in ``SamplingParams.extra_args``."""


def engine_options(config: SpecRLConfig) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` that an engine for this configuration needs; none without trees.

    Raises:
        IncompatibleVersion: this vLLM has no custom proposers, or the package was not compiled.
    """
    if not (config.enabled and config.tree.enabled):
        return {}
    check_custom_proposers()
    try:
        importlib.import_module("nemo_specrl.speculation._suffix")
    except ImportError as error:
        raise IncompatibleVersion(
            f"spec_rl.tree.enabled = true: the compiled part of nemo_specrl is missing ({error}); "
            "install a wheel (pip wheel --no-deps .), or set it to false"
        ) from None
    return {
        "speculative_config": {
            "method": "custom_class",
            "model": TREE_PROPOSER,
            "num_speculative_tokens": config.tree.max_draft_tokens,
        },
        "additional_config": {EXTRA_ARG: {"max_bytes": config.tree.max_bytes}},
    }


class Histories:
    """Earlier responses of prompts, until the first request of each prompt takes them along."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, list[tuple[int, bytes]]] = {}

    def add(self, cached: Mapping[bytes, Iterable[Rollout]]) -> None:
        """Have the rollouts of a look-up sent with the next request of their prompt."""
        for key, rollouts in cached.items():
            oldest_first = sorted(rollouts, key=lambda rollout: rollout.policy_version)
            self._waiting[key] = [_response(rollout) for rollout in oldest_first]

    def append(self, rollout: Rollout) -> None:
        """Have one rollout more sent with the next request of its prompt."""
        self._waiting.setdefault(rollout.key, []).append(_response(rollout))

    def attached(
        self, request: Request, params: SamplingParams, policy_version: int
    ) -> SamplingParams:
        """Sampling parameters with what the proposer needs to draft for a request."""
        key = request.row.key
        params = copy.copy(params)
        params.extra_args = {
            **(params.extra_args or {}),
            EXTRA_ARG: [
                key,
                response_id(request.row.sample_index, policy_version),
                self._waiting.pop(key, []),
                len(request.rules.prompt),
            ],
        }
        return params


def _response(rollout: Rollout) -> tuple[int, bytes]:
    """Identity and tokens of a rollout, as the proposer takes them."""
    return response_id(rollout.sample_index, rollout.policy_version), rollout.tokens.tobytes()
