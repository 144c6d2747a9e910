"""Resident: the part of an engine core that finds histories and keeps responses.

When a request arrives, its root is found by its tokens, and the root's earlier responses are looked
up in the cache; they travel to the workers with the request. When it ends, its response goes to the
cache. Neither raises. No step waits for the cache, and no arrival for longer than
``cache.deadline_ms``: what fails is counted, logged once, and costs drafts.

A drafted token is accepted by random numbers that no draft has seen. A seed that may have made an
earlier response to the same root is therefore derived anew (``request_seeds``).
"""

from __future__ import annotations

import copy
import logging
import threading
import time
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from nemo_specrl.config import CacheConfig
from nemo_specrl.drafting.roots import ROOTS, Roots
from nemo_specrl.engine.request_seeds import derived_seed
from nemo_specrl.engine.row import REQUEST, ROW, Row, config_of, row_of
from nemo_specrl.media import content_tokens
from nemo_specrl.monitoring import names as metric
from nemo_specrl.rollout import Finish, Rollout, new_identity, prompt_key

if TYPE_CHECKING:
    from nemo_specrl.cache import HistoryCache

__all__ = ["Resident"]

logger = logging.getLogger(__name__)

Int32 = npt.NDArray[np.int32]

LATE_IN_A_ROW, PAUSE_SECONDS = 3, 30.0
"""After so many late look-ups in a row, no request waits for one for so long."""
WAITING_LOOKUPS = 4096
"""Look-ups that may wait for the cache; further ones are refused."""
WAITING_BYTES = 256 * 2**20
"""Responses that may wait to be written, bytes; further ones are dropped."""
WRITTEN_AT_ONCE = 4096
WRITE_SECONDS = 0.5
"""How long the writer waits for further responses to end: a transaction costs 0.4 ms, and each
response in it 0.03 ms."""
FLUSH_SECONDS = 5.0
"""The longest that an engine waits for its responses to be written when it ends."""
INDEXED_TOKEN_BYTES = 64
"""Bytes that a token takes in the workers' index, at most. What was sent is taken to be there until
``draft.max_bytes`` have been sent since."""
PROMPTS = 65536
"""Roots about which something is known."""
TURNS = 64
"""Ends of turns that are remembered for each root: what begins with one continues it."""


class _Prompt:
    """What is known about a root.

    Attributes:
        live: by request, the identity of its record in the cache.
        lookup: the look-up that has not been taken yet.
        known: identities of the responses that the workers have.
        nbytes: bytes of these in the workers' index.
        seeds: seeds of the requests so far; None: other random numbers may have made some of its
            responses, too.
        others: stands for these responses, in derived seeds.
        turns: length and hash of the tokens of conversations so far, with their records'
            identities. Siblings may have said the same.
    """

    def __init__(self) -> None:
        self.live: dict[str, int] = {}
        self.lookup: _Lookup | None = None
        self.known: set[int] = set()
        self.nbytes = 0
        self.seeds: set[int] | None = set()
        self.others = 0
        self.turns: deque[tuple[tuple[int, bytes], int]] = deque(maxlen=TURNS)

    def made_by_others(self, identities: Sequence[int] | None) -> None:
        """Note that there are responses of unknown seeds; None: it is not known which."""
        if identities is None and self.seeds is None:
            return
        new = [new_identity()] if identities is None else identities
        self.seeds, self.others = None, derived_seed(self.others, b"", 0, new)


class _Lookup:
    """A look-up of one prompt; ``found`` is set before ``done``.

    Args:
        key: the prompt's key.
        known: identities of the responses that the workers have.
    """

    def __init__(self, key: bytes, known: Collection[int]) -> None:
        self.key, self.known = key, known
        self.found: Sequence[Rollout] = ()
        self.done = threading.Event()


class Resident:
    """Histories in, responses out, for the engine core of this process.

    Args:
        vllm_config: configuration of the engine.
    """

    def __init__(self, vllm_config: Any) -> None:
        config = config_of(vllm_config)
        self._deadline = config.cache.deadline_ms / 1000
        self._most_bytes = config.draft.max_bytes
        self._vocabulary = int(vllm_config.model_config.get_vocab_size())
        self._lock = threading.Lock()
        self._roots = Roots(ROOTS)
        self._prompts: OrderedDict[bytes, _Prompt] = OrderedDict()
        self._nbytes = self._arrived = 0
        self._forgot = False
        self._late_in_a_row, self._no_wait_until = 0, 0.0
        self._counts: Counter[str] = Counter()
        self._failed_at: set[str] = set()
        self._cache = _Cache(config.cache, self._counts)
        weakref.finalize(self, self._cache.close)  # also at the interpreter's exit

    def arrive(self, request: Any) -> None:
        """Give a request its history. Called where vLLM takes requests in, never in its step loop.

        Args:
            request: vLLM's ``EngineCoreRequest``; its sampling parameters are replaced.
        """
        params = request.sampling_params
        extra = (params.extra_args if params is not None else None) or {}
        if ROW in extra:  # from a client; workers would take it for ours
            request.sampling_params = copy.copy(params)
            request.sampling_params.extra_args = {k: v for k, v in extra.items() if k != ROW}
        try:
            self._arrive(request)
        except Exception:
            self._failed("arrival")

    def leave(self, request: Any) -> None:
        """Forget a request that arrived and that the engine has refused."""
        row = row_of(request)
        prompt = self._prompts.get(row.key) if row is not None else None
        if prompt is not None and row is not None:
            prompt.live.pop(request.request_id, None)
            _not_sent(prompt, row)

    def end(self, request: Any, finish: Finish | None) -> None:
        """Keep the response of a request that has ended.

        Args:
            request: vLLM's ``Request``.
            finish: how it ended; None: its response is not to be kept.
        """
        try:
            self._end(request, finish)
        except Exception:
            self._failed("end")

    def counts(self) -> dict[str, float]:
        """Counts since the engine began, by the names of ``monitoring.names``."""
        return {name: float(self._counts[name]) for name in metric.ENGINE_COUNTS} | {
            metric.DRAFTING: 1.0
        }

    def add(self, **counts: int) -> None:
        """Add to counts, by the names of constants in ``monitoring.names``."""
        for name, number in counts.items():
            self._counts[getattr(metric, name)] += number

    def without_acceptance(self) -> None:
        """Note that no draft was accepted between several refits."""
        self._counts[metric.REFITS_WITHOUT_ACCEPTANCE] += 1
        self._log_once("acceptance", "no draft has been accepted for two refits; is this intended?")

    def flush(self, timeout: float = FLUSH_SECONDS) -> bool:
        """Wait until all responses so far are in the cache; False: not within ``timeout``."""
        return self._cache.flush(timeout)

    def close(self) -> None:
        """Write what waits, for at most ``FLUSH_SECONDS``, and close the cache."""
        self._cache.close()

    def _arrive(self, request: Any) -> None:
        params, tokens = request.sampling_params, request.prompt_token_ids
        own = ((params.extra_args if params is not None else None) or {}).get(REQUEST)
        if (
            params is None
            or not tokens
            or own in (False,)  # 0 over HTTP, where arguments are numbers or text
            or params.temperature == 0
            or params.max_tokens == 1  # nothing can be drafted
            or params.prompt_logprobs is not None
            or getattr(request, "resumable", False)
        ):
            return
        own = own if isinstance(own, dict) else {}
        media = [
            (part.identifier, part.mm_position.offset, part.mm_position.length)
            for part in request.mm_features or ()
        ]
        n = min(max(1, int(own.get("prompt_length") or len(tokens))), len(tokens))
        ids = np.asarray(content_tokens(tokens, media), np.int32)
        with self._lock:
            self._arrived += 1
            key, start = self._roots.find(ids[:n], prompt_key(ids[:n]))
            assert key is not None
            prompt = self._prompt(key)
            prompt.live[request.request_id] = 0
        try:
            history = self._history(key, prompt)
            identity = new_identity()
            params = copy.copy(params)  # requests of one call share it
            params.seed = self._seed(params.seed, key, prompt)
            with self._lock:
                if own.get("keep", True):
                    continued = _continued(prompt, ids[start:])
                    prompt.live[request.request_id] = continued or identity
                self._count_known(prompt, [identity], 0)
        except BaseException:
            prompt.live.pop(request.request_id, None)
            raise
        row = Row(key, identity, history, start, not own.get("ahead", False))
        params.extra_args = {**(params.extra_args or {}), ROW: list(row)}
        request.sampling_params = params

    def _prompt(self, key: bytes) -> _Prompt:
        """The prompt of a key, as the one that was used last."""
        prompt = self._prompts.get(key)
        if prompt is None:
            prompt = self._prompts[key] = _Prompt()
            if self._forgot:  # perhaps this one, whose responses workers may still have
                prompt.made_by_others(None)
        self._prompts.move_to_end(key)
        return prompt

    def _count_known(self, prompt: _Prompt, identities: Sequence[int], tokens: int) -> None:
        """Note what the workers have of a prompt, and forget what they may have evicted."""
        prompt.known.update(identities)
        nbytes = INDEXED_TOKEN_BYTES * tokens
        prompt.nbytes += nbytes
        self._nbytes += nbytes
        while self._nbytes > self._most_bytes or len(self._prompts) > PROMPTS:
            key = next((k for k, p in self._prompts.items() if not p.live), None)
            if key is None:
                return
            self._nbytes -= self._prompts.pop(key).nbytes
            self._forgot = True

    def _history(self, key: bytes, prompt: _Prompt) -> list[tuple[int, bytes]]:
        """The responses to a prompt that its workers do not have yet.

        A prompt with other requests in the engine is not looked up again, nor awaited again.
        """
        lookup = prompt.lookup
        if lookup is None and len(prompt.live) == 1:
            with self._lock:
                known = frozenset(prompt.known)
            lookup = prompt.lookup = self._cache.look_up(key, known)
            if lookup is not None:
                self._await(lookup)
        if lookup is None:
            return []
        if not lookup.done.is_set():
            prompt.made_by_others(None)  # what comes later is not known yet
            return []
        prompt.lookup = None
        fresh = [r for r in lookup.found if len(r) and r.identity not in prompt.known]
        right = [r for r in fresh if int(r.tokens.max()) < self._vocabulary]
        if lookup.found:
            self._counts[metric.HISTORIES_FOUND] += 1
            prompt.made_by_others([rollout.identity for rollout in lookup.found])
        self._counts[metric.HISTORIES_REFUSED] += len(fresh) - len(right)
        tokens = sum(map(len, right))
        self._counts[metric.HISTORY_BYTES] += 4 * tokens
        with self._lock:
            self._count_known(prompt, [r.identity for r in right], tokens)
        return [(r.identity, r.tokens.tobytes()) for r in right]

    def _await(self, lookup: _Lookup) -> None:
        now = time.monotonic()
        waits = now >= self._no_wait_until
        if lookup.done.wait(self._deadline if waits else 0):
            self._late_in_a_row = 0
            return
        self._counts[metric.HISTORIES_LATE] += 1
        self._late_in_a_row += waits
        if self._late_in_a_row >= LATE_IN_A_ROW:
            self._late_in_a_row, self._no_wait_until = 0, now + PAUSE_SECONDS
            self._log_once(
                "late", "the rollout cache is slow: for %d s no request waits for it", PAUSE_SECONDS
            )

    def _seed(self, seed: int | None, key: bytes, prompt: _Prompt) -> int | None:
        """The seed of a request: its own, unless it may have made a response that can be drafted.

        Requests without one are not repeated within a process, and workers see to it that they are
        not between processes (``request_seeds.Foreign``).
        """
        if seed is None:
            return None
        if prompt.seeds is not None and seed not in prompt.seeds:
            prompt.seeds.add(seed)
            return seed
        return derived_seed(seed, key, self._arrived, [prompt.others])

    def _end(self, request: Any, finish: Finish | None) -> None:
        row = row_of(request)
        if row is None:
            return
        made, rollout = len(request.output_token_ids), None
        with self._lock:
            prompt = self._prompts.get(row.key)
            identity = prompt.live.pop(request.request_id, 0) if prompt is not None else 0
            if prompt is not None and not made:
                _not_sent(prompt, row)
            elif prompt is not None and identity and finish is not None:
                said = request.prompt_token_ids[row.start :]
                tokens = np.asarray([*said, *request.output_token_ids], np.int32)
                self._count_known(prompt, [identity], len(tokens))
                prompt.turns.append((_turn(tokens), identity))
                rollout = Rollout(row.key, tokens, finish, identity=identity)
        if row.counted:
            self._counts[metric.ENGINE_RESPONSE_TOKENS] += made
        if rollout is not None:
            self._cache.put(rollout)

    def _failed(self, where: str) -> None:
        self._counts[metric.ENGINE_FAILURES] += 1
        if where not in self._failed_at:
            self._failed_at.add(where)
            logger.warning("a request decodes plainly: its %s failed", where, exc_info=True)

    def _log_once(self, name: str, message: str, *values: Any) -> None:
        if name not in self._failed_at:
            self._failed_at.add(name)
            logger.warning(message, *values)


def _not_sent(prompt: _Prompt, row: Row) -> None:
    """Forget that workers have the history of a request that perhaps never reached them."""
    prompt.known.difference_update(identity for identity, _ in row.history)


def _turn(tokens: Int32) -> tuple[int, bytes]:
    return len(tokens), xxhash.xxh3_128_digest(tokens.tobytes())


def _continued(prompt: _Prompt, said: Int32) -> int | None:
    """The identity of the record that a later turn of a conversation continues, and replaces.

    Args:
        prompt: the conversation's root. Two requests do not continue the same record.
        said: what the request's prompt has behind the root, int32 ``[n]``.
    """
    lengths = {length for (length, _), _ in prompt.turns if length <= len(said)}
    for length in sorted(lengths, reverse=True):
        turn = _turn(said[:length])
        for known in prompt.turns:
            if known[0] == turn:
                prompt.turns.remove(known)
                return known[1]
    return None


class _Cache:
    """The cache behind two threads: one opens it and looks up, one writes.

    Args:
        config: where the cache is.
        counts: what was kept, dropped and refused is added.
    """

    def __init__(self, config: CacheConfig, counts: Counter[str]) -> None:
        self._config, self._counts = config, counts
        self._cache: HistoryCache | None = None
        self._opened = threading.Event()
        self._closing = False
        self._changed = threading.Condition()
        self._lookups: deque[_Lookup] = deque()
        self._responses: deque[Rollout] = deque()
        self._nbytes = self._writing = self._flushing = 0
        for work in (self._look_up_all, self._write_all):
            threading.Thread(target=work, name=f"spec_rl{work.__name__}", daemon=True).start()

    def look_up(self, key: bytes, known: Collection[int]) -> _Lookup | None:
        """Begin a look-up; None: there is no cache, or too many wait."""
        with self._changed:
            if self._closing or (self._opened.is_set() and self._cache is None):
                return None
            if len(self._lookups) >= WAITING_LOOKUPS:
                self._counts[metric.HISTORIES_REFUSED] += 1
                return None
            lookup = _Lookup(key, known)
            self._lookups.append(lookup)
            self._changed.notify_all()
        return lookup

    def put(self, rollout: Rollout) -> None:
        """Have a response written; drops it if too many wait."""
        with self._changed:
            nbytes = rollout.tokens.nbytes
            unwanted = self._opened.is_set() and self._cache is None
            if unwanted or self._closing or self._nbytes + nbytes > WAITING_BYTES:
                self._counts[metric.RESPONSES_DROPPED] += 1
                return
            self._nbytes += nbytes
            self._responses.append(rollout)
            if len(self._responses) == 1:
                self._changed.notify_all()

    def flush(self, timeout: float) -> bool:
        with self._changed:
            self._flushing += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(
                    lambda: not (self._responses or self._writing), timeout
                )
            finally:
                self._flushing -= 1

    def close(self) -> None:
        with self._changed:
            if self._closing:
                return
        self.flush(FLUSH_SECONDS)
        with self._changed:
            self._closing = True
            self._counts[metric.RESPONSES_DROPPED] += len(self._responses)
            self._responses.clear()
            self._changed.notify_all()
        if self._cache is not None and not self._writing:
            closing = threading.Thread(target=self._cache.close, daemon=True)
            closing.start()
            closing.join(FLUSH_SECONDS)

    def _open(self) -> None:
        try:
            from nemo_specrl.cache import open_cache

            assert self._config.vocabulary is not None
            self._cache = open_cache(self._config, self._config.vocabulary, counts=self._counts)
        except Exception:
            logger.warning("the rollout cache cannot be opened; nothing is kept", exc_info=True)
        with self._changed:
            self._opened.set()
            if self._cache is None:
                self._counts[metric.RESPONSES_DROPPED] += len(self._responses)
                self._responses.clear()
                self._nbytes = 0
            self._changed.notify_all()

    def _look_up_all(self) -> None:
        self._open()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lookups or self._closing)
                lookups = list(self._lookups)
                self._lookups.clear()
                if self._closing or self._cache is None:
                    for lookup in lookups:
                        lookup.done.set()
                    return
            found: dict[bytes, list[Rollout]] = {}
            try:
                keys, known = zip(*((one.key, one.known) for one in lookups), strict=True)
                found = self._cache.get(keys, known=frozenset().union(*known))
            except Exception:
                self._counts[metric.ENGINE_FAILURES] += 1
            for lookup in lookups:
                lookup.found = found.get(lookup.key, ())
                lookup.done.set()

    def _write_all(self) -> None:
        self._opened.wait()
        cache = self._cache
        while cache is not None:
            with self._changed:
                self._changed.wait_for(lambda: self._responses or self._closing)
                self._changed.wait_for(lambda: self._flushing or self._closing, WRITE_SECONDS)
                if not self._responses:
                    return
                wanted = min(WRITTEN_AT_ONCE, len(self._responses))
                rollouts = [self._responses.popleft() for _ in range(wanted)]
                self._writing = len(rollouts)
            # Of a conversation, the last turn alone: it has the others.
            last = {(rollout.key, rollout.identity): rollout for rollout in rollouts}
            kept = 0
            try:
                kept = cache.put(list(last.values()))
            except Exception:
                self._counts[metric.ENGINE_FAILURES] += 1
            with self._changed:
                self._counts[metric.RESPONSES_KEPT] += kept
                self._counts[metric.RESPONSES_DROPPED] += len(last) - kept
                self._nbytes -= sum(rollout.tokens.nbytes for rollout in rollouts)
                self._writing = 0
                self._changed.notify_all()
