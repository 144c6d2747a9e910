"""What is wrapped in vLLM's engine core."""

from __future__ import annotations

from typing import Any

from nemo_specrl.engine import patches
from nemo_specrl.engine.counts import METHOD
from nemo_specrl.engine.patches import Patch
from nemo_specrl.monitoring.names import DRAFTING

__all__ = ["PATCHES", "install"]


def _preprocess(original: Any, self: Any, request: Any) -> Any:
    """Requests pass here on their way in: in the input thread, or in the caller's thread where the
    core is in the caller's process."""
    resident = getattr(self.scheduler, "resident", None)
    if resident is None:
        return original(self, request)
    resident.arrive(request)
    try:
        return original(self, request)
    except BaseException:
        resident.leave(request)
        raise


def _counts(self: Any) -> dict[str, float]:
    resident = getattr(self.scheduler, "resident", None)
    return {DRAFTING: 0.0} if resident is None else dict(resident.counts())


def install() -> None:
    """Wrap what :data:`PATCHES` names, and give the engine core a method for its clients to call.

    Raises:
        IncompatibleVersion: this vLLM has no such functions.
    """
    from vllm.v1.engine.core import EngineCore

    patches.install(PATCHES)
    setattr(EngineCore, METHOD, _counts)


PATCHES = (
    Patch(
        "vllm.v1.engine.core:EngineCore",
        "preprocess_add_request",
        _preprocess,
        "A request gets its history before the scheduler knows it, outside the step loop.",
    ),
)
