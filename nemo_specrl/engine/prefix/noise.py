"""Rounding noise between prefill and decoding, which ends accepted prefixes for no reason."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nemo_specrl.engine.prefix.verification import (
    matching_logprobs,
    sampled_values,
    verification_params,
)
from nemo_specrl.engine.requests import RolloutRequest

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

    from nemo_specrl.engine.metrics import EngineMetrics

__all__ = ["PrefillNoise"]

logger = logging.getLogger(__name__)


class PrefillNoise:
    """How far prefill and decoding disagree about the same tokens under the same weights.

    In bfloat16 they round differently, which looks to verification as if the policy had changed: at
    lenience 1, a token is rejected with probability ``max(0, 1 - p_prefill / p_decoded)`` although
    nothing has changed. The noise is measured on the first rows that the engine decodes without a
    draft, and on drafts made by the very weights that judge them, which occur after a resume.

    Args:
        dtype_bytes: of the engine's activations. In float32 no rows are prefilled for this
            measurement: the noise is too small to end a prefix.
        max_model_len: the engine's limit for prompt and response together, tokens.
    """

    ROWS = 8
    """Number of rows that are measured."""

    def __init__(self, dtype_bytes: int, max_model_len: int) -> None:
        self.rows_left = self.ROWS if dtype_bytes < 4 else 0
        """Number of rows still to be prefilled for the measurement."""
        self._max_model_len = max_model_len
        self._rows = self._tokens = 0
        self._rejected = 0.0

    def can_measure(self, request: RolloutRequest) -> bool:
        """Whether a response that has ended is valid, decoded in one piece and fits a prompt."""
        whole = len(request.rules.prompt) + len(request.tokens)
        return (
            self.rows_left > 0
            and request.draftable
            and not request.response.defect
            and request.draft is None
            and request.rounds is None
            and request.replayed is None
            and len(request.tokens) > 0
            and whole < self._max_model_len
        )

    def prefill(
        self, llm: LLM, requests: list[RolloutRequest], metrics: EngineMetrics, lora_request: Any
    ) -> None:
        """Prefill responses that were just decoded, as many as are still to be measured.

        Args:
            llm: the engine that decoded them.
            requests: the responses' requests.
            metrics: metrics of their call.
            lora_request: as in vLLM.
        """
        chosen = requests[: self.rows_left]
        started = time.perf_counter()
        self.rows_left -= len(chosen)
        outputs = llm.generate(
            [{"prompt_token_ids": r.rules.prompt + r.tokens} for r in chosen],
            [verification_params(r) for r in chosen],
            use_tqdm=False,
            lora_request=lora_request,
        )
        for request, output in zip(chosen, outputs, strict=True):
            self.add_prefill(request, output, metrics)
        metrics.verify_s += time.perf_counter() - started

    def add_prefill(
        self, request: RolloutRequest, output: RequestOutput, metrics: EngineMetrics
    ) -> None:
        """Add the prefill of a response that these weights have just decoded."""
        logprobs: Any = output.prompt_logprobs
        prefilled = None if logprobs is None else matching_logprobs(logprobs, request.tokens)
        if prefilled is not None and request.logprobs is not None:
            self.add(sampled_values(prefilled), sampled_values(request.logprobs), metrics)

    def add(
        self,
        prefilled: npt.NDArray[np.float32],
        decoded: npt.NDArray[np.float32],
        metrics: EngineMetrics,
    ) -> None:
        """Add the log-probs of a row's tokens, float32 ``[n]`` each, nats; log the noise once."""
        rejected = -np.expm1(np.minimum(prefilled.astype(np.float64) - decoded, 0)).sum()
        metrics.noise_tokens += len(decoded)
        metrics.noise_rejected += float(rejected)
        self._rows += 1
        self._tokens += len(decoded)
        self._rejected += float(rejected)
        if self._rows == self.ROWS:
            logger.warning(
                "prefill and decoding of unchanged weights differ: at lenience 1, rounding alone "
                "ends an accepted prefix after about %.3g tokens (mean over %d tokens)",
                self._tokens / max(self._rejected, 1e-9),
                self._tokens,
            )
