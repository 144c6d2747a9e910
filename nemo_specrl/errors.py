"""The exceptions of this package.

Everything that it raises on purpose is a :class:`SpecRLError`, except that a configuration class
that is called directly (``SpecRLConfig(...)``) raises ``pydantic.ValidationError``.

SpecRLError
├── ConfigError             an invalid recipe, option or argument
│   └── UnsupportedSampling sampling under which a draft cannot be verified
├── InvalidRollout          a rollout whose fields contradict each other
├── CacheError              the rollout cache
│   ├── StoreUnavailable    a folder that is unwritable, full, or has no locks; a file that fails
│   ├── ForeignStore        a copy or export of another vocabulary or release
│   └── CorruptRecord       a record whose checksum or structure is wrong
├── PolicyError             a rank of the policy died or failed
├── RefitError              an engine with mixed weights after a failed refit
├── Diverged                a training whose loss, gradients or weights are no longer finite
├── CheckpointError         a checkpoint that is damaged, or of another run
└── IncompatibleVersion     an installed package that this release cannot work with

Each message is one line that names what is wrong and what would be right. The command line prints
it as it is.
"""

from __future__ import annotations

import errno

__all__ = [
    "CacheError",
    "CheckpointError",
    "ConfigError",
    "CorruptRecord",
    "Diverged",
    "ForeignStore",
    "IncompatibleVersion",
    "InvalidRollout",
    "PolicyError",
    "RefitError",
    "SpecRLError",
    "StoreUnavailable",
    "UnsupportedSampling",
    "first_line",
    "in_one_line",
    "last_line",
    "may_pass",
]

_PASSING = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EINTR, errno.EAGAIN, errno.ENOMEM}
"""Operating system errors that may be gone after a restart."""


class SpecRLError(Exception):
    """Base class of everything that this package raises on purpose."""


class ConfigError(SpecRLError, ValueError):
    """An invalid recipe, option or argument."""


class UnsupportedSampling(ConfigError):
    """Sampling parameters under which a draft cannot be verified.

    vLLM's prompt log-probs are those of the raw distribution (temperature 1, nothing cut off), so a
    draft can be judged only if sampling is raw too.
    """


class InvalidRollout(SpecRLError, ValueError):
    """A rollout whose fields contradict each other, or are out of range."""


class CacheError(SpecRLError):
    """Base class of errors of the rollout cache."""


class StoreUnavailable(CacheError, OSError):
    """A folder that is unwritable, full, or without locks, or a file that cannot be read."""


class ForeignStore(CacheError):
    """A copy or an export of another vocabulary, or in the format of another release."""


class CorruptRecord(CacheError):
    """A record whose checksum or structure is wrong. A store counts these and continues."""


class PolicyError(SpecRLError):
    """A rank of the policy died or failed; the policy cannot be used afterwards."""


class RefitError(SpecRLError):
    """An engine that holds mixed weights after a failed refit."""


class Diverged(SpecRLError):
    """A training whose loss, gradients or weights are no longer finite."""


class CheckpointError(SpecRLError):
    """A checkpoint that is damaged, or that belongs to another run."""


class IncompatibleVersion(SpecRLError, ImportError):
    """An installed package that this release cannot work with."""


def last_line(error: BaseException) -> str:
    """Return the last line of an error's message, or its type; Ray puts tracebacks before it."""
    if "Weights only load failed" in str(error):  # the last line of torch's message is a link
        return "a pickle in it is damaged, or holds more than data"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].strip()


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type; transformers explains after it."""
    return (str(error) or type(error).__name__).splitlines()[0]


def in_one_line(error: BaseException) -> str:
    """Return an error's type and the last line of its message.

    For an error of this package, only the message, even if Ray has wrapped it or turned it into
    text.
    """
    cause = getattr(error, "cause", None) or error  # Ray's wrapper has the original as its cause
    if isinstance(cause, SpecRLError):
        return str(cause)
    name, line = type(error).__name__, last_line(error)
    _, on_purpose, rest = line.partition("nemo_specrl.errors.")
    if on_purpose and ": " in rest:  # Ray keeps only the text of an error in an actor's constructor
        return rest.partition(": ")[2]
    return name if line == name else f"{name}: {line}"


def may_pass(error: BaseException | None) -> bool:
    """Whether an error is, or was raised while handling, one that may be gone after a restart."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _PASSING:
            return True
        error = error.__context__
    return False
