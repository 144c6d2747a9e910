"""Starts Ray and places a policy's actors on its nodes, and waits for their answers.

A run needs all of its actors. If one dies, fails or hangs, waiting ends within seconds with an
error that names it. The actors themselves are in ``policy.py``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_specrl.errors import ConfigError, SpecRLError, last_line

__all__ = ["Actors", "connect", "gpus"]

GRACE_SECONDS = 5.0
"""How long to wait for further errors once an actor has failed: the first one may only have lost
its connection to another that died."""

SILENT_SECONDS = 20.0
"""How long an actor may leave a ping unanswered. It answers pings even while it computes or waits
for other actors."""

CONNECT_SECONDS = 10.0
"""How long to wait for an answer from ``RAY_ADDRESS``. Ray itself would try for two minutes."""


def connect() -> bool:
    """Connect this process to Ray unless it is connected already.

    The Ray cluster that ``RAY_ADDRESS`` names is used; without the variable, one is started on this
    machine.

    Returns:
        whether this call connected, so that the caller must shut down Ray.

    Raises:
        ConfigError: Ray does not answer at that address, or cannot start.
    """
    if ray.is_initialized():
        return False
    address = os.environ.get("RAY_ADDRESS")
    local: dict[str, Any] = {} if address else {"include_dashboard": False}
    if not address and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        # Ray's ports are open to the network. From 2.60 on, a Ray that is started here requires a
        # token. One that Ray makes itself is in a file that others can read, ~/.ray/auth_token.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    before = signal.getsignal(signal.SIGTERM)
    try:
        if address and not _answers(address):
            raise ConnectionError
        ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR, **local)
    except ConnectionError:
        raise ConfigError(
            f"RAY_ADDRESS = {address!r}: no Ray answers there; start one, or unset it"
        ) from None
    except (ValueError, RuntimeError) as error:
        if not address:
            raise
        raise ConfigError(
            f"RAY_ADDRESS = {address!r}: {last_line(error)}; give HOST:PORT, or unset it"
        ) from None
    except OSError as error:  # such as a socket path of more than 107 bytes
        raise ConfigError(
            f"Ray cannot start: {last_line(error)}; set RAY_TMPDIR to a folder with a shorter path"
        ) from None
    if threading.current_thread() is threading.main_thread():
        # Ray's handler would end this process at once; the training loop finishes its step first.
        signal.signal(signal.SIGTERM, before)
    return True


def _answers(address: str) -> bool:
    """Whether something listens at HOST:PORT; True for other addresses, which Ray itself checks."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not (host and port.isdecimal()):
        return True
    if int(port) >= 2**16:  # the C library's look-up of a name would cut it to 16 bits
        return False
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def gpus() -> int:
    """Number of GPUs of the Ray cluster."""
    resources: Any = ray.cluster_resources
    return int(resources().get("GPU", 0))


def _places(count: int, nodes: int) -> list[NodeAffinitySchedulingStrategy]:
    """Return the node of each actor."""
    own, known = ray.get_runtime_context().get_node_id(), ray.nodes()  # type: ignore[no-untyped-call]
    alive = [node["NodeID"] for node in known if node["Alive"]]
    places = sorted(alive, key=lambda node: (node != own, node))[:nodes]
    return [
        NodeAffinitySchedulingStrategy(places[index * len(places) // count], soft=False)
        for index in range(count)
    ]


_DIED = (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError)
"""What Ray raises for an actor whose process has ended."""


class _Watch:
    """Pings actors while the driver waits for their answers.

    Args:
        handles: handles of all actors, since an answer may depend on any of them.
    """

    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = handles
        self._pings: dict[Any, int] = {}
        self._since = time.monotonic()

    def silent(self) -> int | None:
        """Index of the first actor that has left a ping unanswered for too long, or None."""
        now = time.monotonic()
        if self._pings:
            # A failed ping counts as answered: the call that is waited for fails as well.
            _, open_ = ray.wait(list(self._pings), num_returns=len(self._pings), timeout=0)
            self._pings = {ping: self._pings[ping] for ping in open_}
            if self._pings and now - self._since > SILENT_SECONDS:
                return min(self._pings.values())
        if not self._pings and now - self._since > SILENT_SECONDS / 4:
            self._pings = {handle.pid.remote(): index for index, handle in enumerate(self._handles)}
            self._since = now
        return None


class Actors:
    """Actors of one kind. They reserve no CPUs in Ray, and share those of their nodes.

    Args:
        kind: the actors' class. It has a method ``pid`` in the concurrency group ``health``, which
            returns the process id even during another call.
        arguments: arguments of each actor's constructor.
        nodes: largest number of nodes over which they are spread, this process's own first. Each
            node has consecutive actors.
        gpu: whether each actor gets a GPU.
        name: returns an actor's name in messages by its index.
        error: class of the error that is raised if an actor dies, hangs or fails.
        on_failure: called before ``error`` is raised; it must end the actors.

    Attributes:
        nodes: number of nodes on which they run.
        pids: process id of each actor on its node; empty until :meth:`ready`.
    """

    def __init__(
        self,
        kind: type,
        arguments: Sequence[tuple[Any, ...]],
        *,
        nodes: int,
        gpu: bool,
        name: Callable[[int], str],
        error: type[SpecRLError],
        on_failure: Callable[[], None],
    ) -> None:
        self._name, self._error, self._on_failure = name, error, on_failure
        self._count = len(arguments)
        self.pids: list[int] = []
        # Calls run one at a time in a thread, pings in another.
        remote: Any = ray.remote
        threads = {"health": 1}
        actor = remote(concurrency_groups=threads, num_cpus=0, num_gpus=int(gpu))(kind)
        places = _places(len(arguments), nodes)
        self.nodes = len({place.node_id for place in places})
        self._handles: list[Any] = [
            actor.options(scheduling_strategy=place).remote(*values)
            for place, values in zip(places, arguments, strict=True)
        ]

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        """Return the handle of an actor.

        Raises:
            SpecRLError: ``error``; the actors have ended.
        """
        if not self._handles:
            name = self._name(index)
            raise self._error(f"{name} has ended: by a shutdown, or because another one failed")
        return self._handles[index]

    def ready(self) -> None:
        """Wait until all actors are constructed. From then on they must answer pings."""
        self.pids = self.all("pid")

    def all(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all actors; returns the answers by index."""
        refs = {
            getattr(self[index], method).remote(*arguments): index for index in range(len(self))
        }
        found = self.wait(refs)
        return [found[index] for index in range(len(self))]

    def wait(self, refs: dict[Any, int]) -> dict[int, Any]:
        """Wait for all answers; if an actor fails, all are ended.

        Args:
            refs: Ray's references, with the index of the actor that answers.

        Returns:
            the answers by index.

        Raises:
            SpecRLError: the one that an actor raised; otherwise ``error``, which names the actor
                that died, does not answer pings, or raised another exception.
        """
        found: dict[int, Any] = {}
        errors: dict[int, Exception] = {}
        left = dict(refs)
        until = float("inf")
        watch = _Watch(self._handles if self.pids else [])
        try:
            while left and time.monotonic() < until:
                done, _ = ray.wait(list(left), timeout=1.0)
                if not errors and (silent := watch.silent()) is not None:
                    raise self._error(
                        f"{self._name(silent)} has not answered for {SILENT_SECONDS:.0f} s; the "
                        "run can be resumed from its last checkpoint"
                    )
                for ref in done:
                    index = left.pop(ref)
                    try:
                        found[index] = ray.get(ref)
                    except ray.exceptions.RayError as error:
                        errors[index] = error
                        until = min(until, time.monotonic() + GRACE_SECONDS)
                        if isinstance(error, _DIED):
                            until = 0.0
        finally:
            if errors or left:
                self._on_failure()
        if errors:
            raise self._reason(errors) from None
        return found

    def _reason(self, errors: dict[int, Exception]) -> Exception:
        """Return the error to raise: the one among the actors' errors that caused the others."""
        for index, error in errors.items():
            if isinstance(error, ray.exceptions.OutOfMemoryError):
                return self._error(
                    f"{self._name(index)} was killed by Ray because the memory of its node was "
                    "nearly full; run less on the node, or raise RAY_memory_usage_threshold. The "
                    "run can be resumed from its last checkpoint"
                )
            if isinstance(error, ray.exceptions.RayActorError):
                return self._error(
                    f"{self._name(index)} died; the run can be resumed from its last checkpoint"
                )
        for error in errors.values():
            cause = getattr(error, "cause", None)
            if isinstance(cause, SpecRLError):
                return cause
        index, error = next(iter(errors.items()))
        return self._error(f"{self._name(index)} failed: {last_line(error)}")

    def end(self) -> None:
        """End the actors' processes."""
        handles, self._handles = self._handles, []
        if ray.is_initialized():
            for handle in handles:
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.kill(handle)
