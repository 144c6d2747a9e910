"""The schedulers of engines that draft from history, and what is wrapped in vLLM's engine core.

vLLM takes a scheduler by its name (``scheduler_cls``). These learn how requests end, and choose the
length of drafts for the V2 model runner (``v2_lengths``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from nemo_specrl.engine import core_patches
from nemo_specrl.engine.patches import vllm_version
from nemo_specrl.engine.resident import Resident
from nemo_specrl.engine.row import row_of
from nemo_specrl.engine.v2_config import has_drafter
from nemo_specrl.engine.v2_lengths import LengthsOfSteps
from nemo_specrl.errors import IncompatibleVersion
from nemo_specrl.rollout import Finish

__all__: list[str] = []

FINISHES: Mapping[RequestStatus, Finish] = {
    RequestStatus.FINISHED_STOPPED: Finish.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: Finish.LENGTH,
    # Where a stop string ends a response, the front end finds it in the text and aborts the
    # request, behind tokens that are not part of the response.
    RequestStatus.FINISHED_ABORTED: Finish.PARTIAL,
    RequestStatus.FINISHED_REPETITION: Finish.PARTIAL,
}
"""How the response of a request ended; of errors, nothing is kept."""
FIRST_THAT_RESETS = (0, 29)
"""The oldest vLLM that may reset the KV cache under rows whose drafts are in flight."""
REFITS_WITHOUT = 2
"""After so many refits without an accepted token, there is a warning."""


class _History:
    """Mixin of vLLM's schedulers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        core_patches.install()
        config = self.vllm_config  # type: ignore[attr-defined]
        self.resident = Resident(config)
        # Beside a drafter of the user's own, its number of tokens stands.
        self.lengths = None if has_drafter(config) else LengthsOfSteps.of(self)
        self._drafted = self._accepted = self._refits_without = 0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self.lengths is not None:
            self.lengths.before_step(self.running)  # type: ignore[attr-defined]
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def add_request(self, request: Any) -> None:
        if self.lengths is not None and not self.requests:  # type: ignore[attr-defined]
            self.lengths.begin_batch()
        super().add_request(request)  # type: ignore[misc]

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        if self.lengths is not None:
            self.lengths.cut(draft_token_ids.draft_token_ids)
        super().update_draft_token_ids(draft_token_ids)  # type: ignore[misc]

    def make_spec_decoding_stats(self, *args: Any, **kwargs: Any) -> Any:
        row = row_of(self.requests[kwargs["request_id"]])  # type: ignore[attr-defined]
        drafted, accepted = kwargs["num_draft_tokens"], kwargs["num_accepted_tokens"]
        if row is not None and drafted:
            if self.lengths is not None:
                self.lengths.observe(drafted, accepted)
            if row.counted:
                self._drafted += drafted
                self._accepted += accepted
                self.resident.add(DRAFTED_TOKENS=drafted, ACCEPTED_TOKENS=accepted)
        return super().make_spec_decoding_stats(*args, **kwargs)  # type: ignore[misc]

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        """A refit: what was accepted before says less about the new weights.

        Raises:
            IncompatibleVersion: this vLLM would lose tokens of the rows that run. It discards as
                many outputs as tokens are expected, which with drafts are more than outputs.
        """
        if reset_running_requests and vllm_version() < FIRST_THAT_RESETS:
            running = self.running  # type: ignore[attr-defined]
            in_flight = sum(row.num_output_placeholders > 1 for row in running)
            if in_flight:
                raise IncompatibleVersion(
                    f"reset_prefix_cache(reset_running_requests=True): drafts of {in_flight} rows "
                    "are in flight, of which vLLM before 0.29 would lose tokens; pause generation "
                    "first, or use vLLM 0.29 or later"
                )
        if self.lengths is not None:
            self.lengths.begin_batch()
        if self._drafted:
            self._refits_without = 0 if self._accepted else self._refits_without + 1
            self._drafted = self._accepted = 0
            if self._refits_without == REFITS_WITHOUT:
                self.resident.without_acceptance()
        return super().reset_prefix_cache(  # type: ignore[misc]
            reset_running_requests, *args, **kwargs
        )

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """All requests that end pass here; those that are preempted do not."""
        self.resident.end(request, FINISHES.get(request.status))
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def shutdown(self) -> None:
        for request in list(self.requests.values()):  # type: ignore[attr-defined]
            if not request.is_finished():
                self.resident.end(request, Finish.PARTIAL)
        self.resident.close()
        super().shutdown()  # type: ignore[misc]


class HistoryScheduler(_History, Scheduler):  # type: ignore[misc]
    """vLLM's scheduler, where requests arrive with a history and leave a response."""


class AsyncHistoryScheduler(_History, AsyncScheduler):  # type: ignore[misc]
    """The same for asynchronous scheduling."""
