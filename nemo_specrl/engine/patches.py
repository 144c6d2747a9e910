"""What is replaced in vLLM while it runs, and why. vLLM's files are not changed.

One table: ``plugin.all_patches``. Each patch says what it wraps and for what reason, and names the
sources that it was written for: with any other source :func:`install` raises, and the plug-in
leaves the engine as it is, without drafts, with one warning and a count.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import xxhash

from nemo_specrl.errors import IncompatibleVersion

__all__ = ["Patch", "check", "install", "vllm_version"]

OLDEST = (0, 25, 1)
"""The oldest vLLM that drafts from history."""
MARK = "of_nemo_specrl"


@dataclass(frozen=True)
class Patch:
    """A function of vLLM that is wrapped.

    Args:
        owner: module, or ``module:Class``.
        name: the function's name there.
        function: what is called in its place: with vLLM's function, and then with its arguments.
        reason: why.
        sources: XXH3 of each source that it may have, and the versions that have it. Empty: its
            arguments alone are relied on, which the tests of each version run.
        since: the first version that needs it.
        before: the first version that does not; None: all later ones do.
    """

    owner: str
    name: str
    function: Callable[..., Any]
    reason: str
    sources: Mapping[str, str] = field(default_factory=dict)
    since: tuple[int, ...] = OLDEST
    before: tuple[int, ...] | None = None

    def needed(self) -> bool:
        """Whether the installed vLLM needs it."""
        version = vllm_version()
        return version >= self.since and (self.before is None or version < self.before)

    def target(self) -> tuple[type[Any] | ModuleType, Callable[..., Any]]:
        """The owner and the function, as vLLM has it or wrapped.

        Raises:
            IncompatibleVersion: this vLLM has no such function, or not from a known source.
        """
        module, _, of_class = self.owner.partition(":")
        try:
            owner: Any = importlib.import_module(module)
            owner = getattr(owner, of_class) if of_class else owner
            found: Callable[..., Any] = getattr(owner, self.name)
        except (ImportError, AttributeError) as error:
            raise IncompatibleVersion(
                f"this vLLM has no {self.owner}.{self.name}: {error}"
            ) from None
        source = inspect.unwrap(found)
        if self.sources and self._hash(source) not in self.sources:
            raise IncompatibleVersion(
                f"this vLLM's {self.owner}.{self.name} has a source ({self._hash(source)}) other "
                f"than those of {', '.join(self.sources.values())}"
            )
        return owner, found

    def _hash(self, source: Callable[..., Any]) -> str:
        return str(xxhash.xxh3_64_hexdigest(inspect.getsource(source).encode()))


@functools.cache
def vllm_version() -> tuple[int, ...]:
    """The numbers of the installed vLLM, ``(0, 25, 1)`` for ``0.25.1+cu129``.

    Builds from source do not say which release they contain: they count as the newest, and the
    sources of what is wrapped decide.

    Raises:
        IncompatibleVersion: vLLM is older than :data:`OLDEST`.
    """
    import vllm

    match = re.match(r"(\d+)\.(\d+)\.(\d+)", str(vllm.__version__))
    version = tuple(map(int, match.groups())) if match else (0, 0, 0)
    if version < (0, 2):
        return (999,)
    if version < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise IncompatibleVersion(f"vLLM {vllm.__version__}: nemo_specrl needs {oldest} or later")
    return version


def install(patches: Iterable[Patch]) -> None:
    """Wrap functions of vLLM, all or none. Those that are already wrapped are left as they are.

    Raises:
        IncompatibleVersion: a function is missing, or is not a known one.
    """
    found = [(patch, *patch.target()) for patch in patches if patch.needed()]
    for patch, owner, original in found:
        if not hasattr(original, MARK):
            setattr(owner, patch.name, _wrapped(original, patch.function))


def _wrapped(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    setattr(wrapper, MARK, True)
    return wrapper


def check(patches: Iterable[Patch]) -> None:
    """Make sure that functions of vLLM could be wrapped.

    Raises:
        IncompatibleVersion: why not.
    """
    for patch in patches:
        if patch.needed():
            patch.target()
