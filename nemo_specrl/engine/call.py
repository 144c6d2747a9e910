"""One call of ``SpeculativeLLM.generate``: its requests, and its state."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from nemo_specrl.engine.early_end import EndOfCall
from nemo_specrl.engine.limits import EngineLimits
from nemo_specrl.engine.request_checks import check_params
from nemo_specrl.engine.requests import RolloutRequest, build_requests
from nemo_specrl.engine.run_ahead import RunAhead
from nemo_specrl.engine.turns import Environment, Turns
from nemo_specrl.errors import ConfigError, UnsupportedSampling
from nemo_specrl.rollout import Rollout

if TYPE_CHECKING:
    from vllm import LLM, CompletionOutput, RequestOutput, SamplingParams

__all__ = ["Call", "checked_requests", "logged", "progress_bar"]

logger = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class Call:
    """The state of one call of ``generate``.

    Args:
        ahead: run-ahead rows of upcoming prompts.
        lora_request: as in vLLM.
        progress: a progress bar, or None.
        early_end: decides when the call ends before all of its rows have; None: never.
        waiting: requests that have not been sent to the engine yet.
        inflight: requests in the engine, by their id there.
        results: the engine's last output and the completion of each row that has ended, by the
            request's index in the call.
        unstored: rollouts that are not in the cache yet.
        stored_at: when rollouts were last put into the cache.
    """

    ahead: RunAhead
    lora_request: Any
    progress: Any
    early_end: EndOfCall | None = None
    waiting: deque[RolloutRequest] = dataclasses.field(default_factory=deque)
    inflight: dict[str, RolloutRequest] = dataclasses.field(default_factory=dict)
    results: dict[int, tuple[RequestOutput, CompletionOutput]] = dataclasses.field(
        default_factory=dict
    )
    unstored: list[Rollout] = dataclasses.field(default_factory=list)
    stored_at: float = dataclasses.field(default_factory=time.perf_counter)

    def take_unstored(self) -> list[Rollout]:
        """Remove and return the rollouts that are not in the cache yet."""
        unstored, self.unstored = self.unstored, []
        return unstored

    def add_result(
        self,
        request: RolloutRequest,
        output: RequestOutput,
        completion: CompletionOutput,
        rollouts: list[Rollout],
    ) -> None:
        """Note that a row has ended.

        Args:
            request: the row's request.
            output: the engine's last output for it.
            completion: completion for the caller.
            rollouts: the rollouts to cache.
        """
        self.results[request.index] = output, completion
        self.unstored += rollouts
        if self.progress is not None:
            self.progress.update(1)


def progress_bar(use_tqdm: bool | Callable[..., Any], total: int) -> Any:
    """Return a progress bar over rows, or None.

    Args:
        use_tqdm: whether to show one, or a function that makes it.
        total: number of rows.
    """
    if not use_tqdm:
        return None
    from tqdm import tqdm

    make = use_tqdm if callable(use_tqdm) else tqdm
    return make(total=total, desc="Processed prompts", dynamic_ncols=True)


def checked_requests(
    llm: LLM,
    limits: EngineLimits,
    asked: tuple[
        Any,
        SamplingParams | Sequence[SamplingParams] | None,
        Sequence[int] | None,
        Sequence[bytes] | None,
    ],
    *,
    trees_alone: bool,
    greedy: bool,
    environment: Environment | None = None,
) -> list[RolloutRequest]:
    """Build the requests of a call, and check all of them before the first one begins.

    Args:
        llm: the ``LLM`` whose default sampling parameters replace None.
        limits: limits of its engine.
        asked: prompts, sampling parameters, sample indices and prompt keys, as the caller of
            ``generate`` gave them.
        environment: makes each row a conversation; None: each is a single response.
        trees_alone: see :func:`~nemo_specrl.engine.requests.build_requests`.
        greedy: likewise.

    Raises:
        UnsupportedSampling: drafts cannot be verified under these parameters.
        ConfigError: a prompt or parameters cannot be decoded, or conversations cannot be drafted
            for.
    """
    if environment is not None and not trees_alone:
        raise ConfigError(
            "environment: only vLLM's rejection sampler verifies drafts of conversations; set "
            "preset: lossless, with tree.method: proposer or v2, or spec_rl.enabled: false"
        )
    prompts, sampling_params, sample_indices, prompt_keys = asked
    default = sampling_params is None
    params = llm.get_default_sampling_params() if sampling_params is None else sampling_params
    try:
        requests = build_requests(
            limits,
            *(prompts, params, sample_indices, prompt_keys),
            trees_alone=trees_alone,
            greedy=greedy,
        )
    except UnsupportedSampling as error:
        if not default:
            raise
        raise UnsupportedSampling(
            "the engine's default sampling parameters (the model's generation_config.json, or "
            f"override_generation_config): {error}"
        ) from None
    if environment is not None:
        _lead_conversations(requests, environment)
    first_rows = [request for request in requests if not request.index_in_prompt]
    check_params(llm.llm_engine, ((r.rules.prompt, r.user_params) for r in first_rows))
    return requests


def _lead_conversations(requests: list[RolloutRequest], environment: Environment) -> None:
    """Make each request the first turn of a conversation."""
    if any(request.media is not None for request in requests):
        raise ConfigError(
            "environment: leads conversations by tokens, and a prompt has images, sounds or "
            "videos; leave one of them out"
        )
    for request in requests:
        request.turns = Turns(environment, request.rules)


@contextlib.contextmanager
def logged(what: str) -> Iterator[None]:
    """Log an exception instead of raising it, because another one is already propagating."""
    try:
        yield
    except Exception as error:  # the first exception says what went wrong, not this one
        logger.warning("%s failed: %r", what, error)
