"""Run-ahead: rollouts for upcoming prompts, in slots that are idle at the end of a batch.

Their tokens go into the trees of their prompts, inside the engine, and draft for the rows of these
prompts when their batch comes (BubbleSpec, arXiv 2605.08862). They are neither returned to a caller
nor cached. The caller says which prompts come next; ``sync_engine`` drives the engine.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from nemo_specrl.engine.limits import EngineLimits
from nemo_specrl.engine.metrics import EngineMetrics
from nemo_specrl.engine.requests import RolloutRequest, build_requests
from nemo_specrl.engine.vllm.compat import interrupts_deferred, tokens_so_far, unknown_requests
from nemo_specrl.errors import ConfigError
from nemo_specrl.speculation.acceptance import derived_seed
from nemo_specrl.speculation.draft_selection import RUN_AHEAD_INDEX

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

__all__ = ["RunAhead", "decode_ahead", "run_ahead_requests"]

logger = logging.getLogger(__name__)


def run_ahead_requests(
    limits: EngineLimits,
    prompts: Sequence[Any],
    requests: Iterable[RolloutRequest],
    params: SamplingParams | None = None,
    *,
    seed: int,
    policy_version: int,
) -> list[RolloutRequest]:
    """Build one request for each upcoming prompt, with the sampling parameters of a batch.

    Prompts of the batch itself are left out, since its own rows draft for each other, and so are
    prompts that cannot be decoded: the call that requests one refuses it.

    Args:
        limits: limits of the engine.
        prompts: as ``vllm.LLM.generate`` takes them, the next ones first.
        requests: requests of the batch. The parameters are those of the first one that may be
            drafted for.
        params: parameters to use instead if there is no batch.
        seed: seed of the run.
        policy_version: policy version of the weights that decode.
    """
    requests = list(requests)
    present = {request.row.key for request in requests}
    lender = next((request for request in requests if request.draftable), None)
    if lender is not None:
        params = lender.user_params
    if params is None or not prompts:
        return []
    params = copy.copy(params)
    params.n = 1
    made: dict[bytes, RolloutRequest] = {}
    for prompt in prompts:
        try:
            [request] = build_requests(
                limits, [prompt], params, [RUN_AHEAD_INDEX], trees_alone=True
            )
        except ConfigError as error:
            logger.debug("an upcoming prompt is not run ahead: %s", error)
            continue
        key = request.row.key
        if key not in present:
            if params.seed is not None:
                request.engine_params.seed = derived_seed("run-ahead", seed, policy_version, key, 0)
            made.setdefault(key, request)
    return list(made.values())


class RunAhead:
    """The run-ahead rows of one call of ``generate``.

    Args:
        engine: vLLM's ``LLMEngine``.
        places: number of rows that the engine decodes at once.
        requests: requests of the upcoming prompts, in the order in which they begin.
        metrics: metrics of the call.
    """

    def __init__(
        self,
        engine: Any,
        places: int,
        requests: Iterable[RolloutRequest],
        metrics: EngineMetrics,
    ) -> None:
        self._engine, self._places = engine, places
        self._waiting = deque(requests)
        self._metrics = metrics
        self.rows: dict[str, RolloutRequest] = {}
        """Those in the engine, by their id there, in the order in which they began."""

    def fill(self, primary: int) -> Iterator[RolloutRequest]:
        """End the newest rows if there are too many; yield those that begin in free places.

        The caller notes each of them in ``rows`` and sends it to the engine.

        Args:
            primary: number of the caller's rows that the engine has, running or waiting.
        """
        free = self._places - primary - len(self.rows)
        if free < 0:
            self._abort(list(self.rows)[free:])
        for _ in range(min(free, len(self._waiting))):
            yield self._waiting.popleft()
            self._metrics.run_ahead_rows += 1

    def read_output(self, output: RequestOutput) -> bool:
        """Whether an output of the engine belongs to a run-ahead row; ended rows are counted."""
        if output.request_id not in self.rows:
            return False
        if output.finished:
            del self.rows[output.request_id]
            self._metrics.run_ahead_tokens += len(output.outputs[0].token_ids)
        return True

    def forget_aborted(self) -> None:
        """Forget rows that the engine no longer has, though it has not reported their end."""
        for name in unknown_requests(self._engine, self.rows):
            del self.rows[name]

    def end(self) -> None:
        """End all rows; what they have decoded is in the trees."""
        self._waiting.clear()
        self._abort(list(self.rows))

    def _abort(self, names: list[str]) -> None:
        try:
            for name in names:
                with contextlib.suppress(Exception):  # an engine that failed has no counts
                    self._metrics.run_ahead_tokens += len(tokens_so_far(self._engine, name)[0])
        finally:
            if names:
                self._engine.abort_request(names)
        for name in names:
            del self.rows[name]


def decode_ahead(
    llm: LLM,
    places: int,
    requests: Iterable[RolloutRequest],
    next_request: Callable[[RolloutRequest], tuple[dict[str, Any], SamplingParams]],
    until: Callable[[], bool],
) -> EngineMetrics:
    """Decode rows of upcoming prompts while the engine has nothing else to do.

    Args:
        llm: the ``LLM`` whose engine decodes.
        places: number of rows that it decodes at once.
        requests: requests of the upcoming prompts, in the order in which they begin.
        next_request: prompt and sampling parameters of a request, as the engine takes them.
        until: returns whether to stop; called before each step of the engine.

    Returns:
        The rows and tokens that were run ahead. The time is charged to no call.
    """
    metrics, engine = EngineMetrics(), llm.llm_engine
    ahead = RunAhead(engine, places, requests, metrics)
    try:
        while not until():
            for request in ahead.fill(0):
                name = str(next(llm.request_counter))
                ahead.rows[name] = request
                engine.add_request(name, *next_request(request))
            if not ahead.rows:
                break
            with interrupts_deferred(engine):
                outputs = engine.step()
            for output in outputs:
                ahead.read_output(output)
            ahead.forget_aborted()
    finally:
        ahead.end()
    return metrics
