"""Carries what is known about each rollout from the engines to the trainer's process.

NeMo-RL's trainers keep a response's tokens and log-probs and drop every other column of what a
generation returns (experience/rollouts.py). Therefore each worker notes a record of every rollout
it has made, under a hash of the rollout's tokens, and the driver collects them from the workers
once a step. This works whichever process requested the rollout, and without asking the cache or
hashing prompts again. Rows are matched to records by the hash of their tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from nemo_specrl.engine.policy_version import TokenVersions
from nemo_specrl.rollout import Rollout

if TYPE_CHECKING:  # the driver has no vLLM
    from nemo_specrl.engine.served_requests import ServedTurn

__all__ = [
    "MAX_RECORDS",
    "MetadataLog",
    "MetadataTable",
    "ResponseSpan",
    "RolloutMetadata",
    "SequenceKey",
    "response_spans",
]

MAX_RECORDS = 2**17
"""Limit for what a worker notes between two collections, and for what the driver keeps from one
step to the next. The oldest are dropped first: records of turns that are in no batch, such as those
of validation, judges and agents' helpers, and of rows that were dropped."""

MAX_BYTES = 2**32
"""Limit for the birth log-probs that the driver keeps from one step to the next, which is 2**30
tokens: more than the rows of several large steps have."""

SequenceKey = tuple[bytes, int]
"""Hash of a prompt with its response, and the length of the response in tokens."""


@dataclass(frozen=True, eq=False)
class RolloutMetadata:
    """The properties of a rollout that the drift monitor and the birth anchor use.

    Args:
        key: key of the prompt.
        sample_index: sample index of the rollout in its group.
        fresh: whether the rollout was decoded without a draft (:attr:`Rollout.fresh`).
        staleness: sum over its reused tokens of log p_birth - log p_now, nats; None if no token was
            reused, as in a fresh rollout.
        births: birth log-probs of the reused tokens, which are the first ``r`` of the response,
            float32 ``[r]``, nats; None if the run does not need them.
        versions: which weights made a turn that was requested over HTTP and is not in the cache;
            None: it is not such a turn.
    """

    key: bytes
    sample_index: int
    fresh: bool
    staleness: float | None
    births: npt.NDArray[np.float32] | None = None
    versions: TokenVersions | None = None

    @classmethod
    def of(cls, rollout: Rollout, accepted: int, *, births: bool) -> RolloutMetadata:
        """Make the record of a rollout.

        Args:
            rollout: as the cache keeps it.
            accepted: number of its tokens that come from a draft. Its versions do not tell which
                these are: a row that continues through a refit has decoded tokens of several
                versions, and after a resume another policy may have had the same number.
            births: whether to include ``births``.
        """
        # What the same weights began is not reused: such a rollout is fresh.
        reused = slice(0 if rollout.fresh else accepted)
        born = rollout.birth_logprobs[reused].copy()  # a view would keep all of them in memory
        lost = float((born - rollout.logprobs[reused]).sum(dtype=np.float64))
        return cls(
            rollout.key,
            rollout.sample_index,
            rollout.fresh,
            lost if len(born) else None,
            born if births else None,
        )


class MetadataLog:
    """The records that a worker has noted since the driver last took them.

    Args:
        births: whether to note the birth log-probs of reused tokens, too.
    """

    def __init__(self, births: bool) -> None:
        self.births = births
        self._noted: deque[tuple[SequenceKey, RolloutMetadata]] = deque(maxlen=MAX_RECORDS)

    def note(self, outputs: Iterable[Any]) -> None:
        """Note the rollouts in request outputs of a speculative engine."""
        for output in outputs:
            for completion in output.outputs:
                reuse = getattr(completion, "spec_rl", None)
                if reuse is None:  # decoded without the cache: its sample index is not known
                    continue
                record = RolloutMetadata.of(reuse.rollout, reuse.accepted, births=self.births)
                self._note(output.prompt_token_ids, completion.token_ids, record)

    def note_turn(self, turn: ServedTurn) -> None:
        """Note a turn of a conversation that is led over HTTP."""
        record = RolloutMetadata(turn.key, 0, fresh=True, staleness=None, versions=turn.versions)
        self._note(turn.prompt, turn.tokens, record)

    def _note(self, prompt: Any, tokens: Any, record: RolloutMetadata) -> None:
        hasher = xxhash.xxh3_128(_bytes(prompt))
        hasher.update(_bytes(tokens))
        self._noted.append(((hasher.digest(), len(tokens)), record))

    def take(self) -> list[tuple[SequenceKey, RolloutMetadata]]:
        """Return the records and forget them."""
        noted = list(self._noted)
        self._noted.clear()
        return noted


class ResponseSpan(NamedTuple):
    """A response in a row, from ``start`` up to ``end``, and its record if there is one."""

    start: int
    end: int
    record: RolloutMetadata | None


class MetadataTable:
    """The driver's side: records of the rollouts that have not been trained on yet.

    Args:
        take: collects what the workers have noted.
        later: whether rows may be trained on in a later step than the one they were made in.
    """

    def __init__(
        self,
        take: Callable[[], list[tuple[SequenceKey, RolloutMetadata]]],
        *,
        later: bool = False,
    ) -> None:
        self._take = take
        self._later = later
        self._taken = False
        self._records: dict[SequenceKey, deque[RolloutMetadata]] = {}
        self._used: dict[SequenceKey, int] = {}

    def collect(self) -> None:
        """Collect the workers' records of all rollouts made so far.

        Call this if rows of a step are looked up before the last of them are made.
        """
        self._taken = True
        for sequence, record in self._take():
            self._records.setdefault(sequence, deque()).append(record)

    def find(
        self, token_ids: Sequence[Any], token_mask: Sequence[Any], lengths: Sequence[int]
    ) -> list[list[ResponseSpan]]:
        """Return the responses in each row of a step, in order; a multi-turn row has several.

        The first call in a step collects the workers' records (:meth:`collect`). Equal rows, one of
        which may be fresh and another not, get one record each.

        Args:
            token_ids: int ``[rows][length]``.
            token_mask: 1 if the policy wrote the token, ``[rows][length]``.
            lengths: lengths of the rows without padding.
        """
        if not self._taken:
            self.collect()
        seen: dict[SequenceKey, int] = {}
        rows = []
        for ids, mask, length in zip(token_ids, token_mask, lengths, strict=True):
            row = []
            hasher, hashed = xxhash.xxh3_128(), 0
            for start, end in response_spans(np.asarray(mask[:length]) > 0):
                hasher.update(_bytes(ids[hashed:end]))
                hashed = end
                sequence = hasher.digest(), end - start
                nth = seen.get(sequence, 0)
                seen[sequence] = nth + 1
                found = self._records.get(sequence, ())
                row.append(ResponseSpan(start, end, found[nth] if nth < len(found) else None))
            rows.append(row)
        for sequence, count in seen.items():
            self._used[sequence] = max(count, self._used.get(sequence, 0))
        return rows

    def end_step(self) -> None:
        """Forget the records of rows that will no longer be trained on.

        If rows are trained on in the step in which they were made, these are all records: any
        others belong to rows that were dropped. Otherwise, as in asynchronous GRPO, they are those
        that :meth:`find` has returned. How long a row may wait there is up to NeMo-RL's samplers;
        of the other records, the newest :data:`MAX_RECORDS` sequences are kept, and
        :data:`MAX_BYTES`. They are limited only here: in the step itself each of its rows must be
        found, however many there are. A step without a call of :meth:`find`, such as PPO's that
        train only the value model, has records, too.
        """
        if not self._taken:
            self.collect()
        if self._later:
            self._forget_used()
        else:
            self._records.clear()
        self._used.clear()
        self._taken = False

    def _forget_used(self) -> None:
        """Forget the records that were returned, and the oldest ones beyond the limits."""
        for sequence, count in self._used.items():
            records = self._records.get(sequence, deque())
            for _ in range(min(count, len(records))):
                records.popleft()
            if not records:
                self._records.pop(sequence, None)
        size = sum(map(_births_bytes, self._records.values()))
        while len(self._records) > MAX_RECORDS or size > MAX_BYTES:
            size -= _births_bytes(self._records.pop(next(iter(self._records))))


def response_spans(mask: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the first position and the end of each response in a row.

    Args:
        mask: which tokens the policy wrote, bool ``[length]``.
    """
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _births_bytes(records: Iterable[RolloutMetadata]) -> int:
    return sum(0 if record.births is None else record.births.nbytes for record in records)


def _bytes(token_ids: Any) -> bytes:
    return np.asarray(token_ids, dtype="<i4").tobytes()
