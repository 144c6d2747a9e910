"""What both drivers of prefix reuse share: prompts to rows, drafts, the window, the cache."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_specrl.config import SpecRLConfig
from nemo_specrl.errors import ConfigError, InvalidRollout
from nemo_specrl.media import has_media
from nemo_specrl.reuse.acceptance import random_stream
from nemo_specrl.reuse.limits import EngineLimits
from nemo_specrl.reuse.metrics import ReuseMetrics
from nemo_specrl.reuse.noise import RoundingNoise
from nemo_specrl.reuse.row import Row
from nemo_specrl.reuse.sampling import check_raw, is_plain
from nemo_specrl.rollout import Rollout, prompt_key, whole_number

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

    from nemo_specrl.cache import HistoryCache

__all__ = ["Place", "ReuseBase", "request_output"]

MOST_SECONDS = 30.0
"""The longest that a batch of prompts waits for its drafts."""
FLUSH_SECONDS = 60.0
"""The longest that a change of the policy's version waits for the cache to be written."""

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Place:
    """A response that was asked for, before its draft is known.

    Args:
        text: the prompt's text, if the caller gave one.
        tokens: token ids of the prompt.
        params: its sampling parameters, with ``n`` 1.
        key: the prompt's key.
        number: number of the row among those of its prompt under this policy version.
        fresh: whether it is decoded without a draft although there may be one.
        salt: the prompt's ``cache_salt``; None: it has none.
    """

    text: str | None
    tokens: list[int]
    params: SamplingParams
    key: bytes
    number: int
    fresh: bool
    salt: str | None


class ReuseBase:
    """Base of :class:`PrefixReuse` and :class:`AsyncPrefixReuse`; see them for arguments."""

    def __init__(
        self,
        engine: Any,
        config: SpecRLConfig,
        cache: HistoryCache | None,
        seed: int,
        policy_version: int,
    ) -> None:
        if config.reuse is None:
            raise ConfigError(
                f"spec_rl.preset = {config.preset}: prefix reuse is for preset: reuse; with "
                "lossless, call vLLM itself"
            )
        self.config, self.cache, self.seed = config, cache, seed
        self.limits = EngineLimits.of(engine)
        self.metrics = ReuseMetrics()
        self._reuse = config.reuse
        self._noise = RoundingNoise(config.reuse.lenience, self.limits.dtype_bytes)
        self._finished: deque[Rollout] = deque()
        self._writer = ThreadPoolExecutor(1, "nemo-specrl-reuse")
        self._begin(policy_version)

    def _begin(self, policy_version: int) -> None:
        """Note the version of the weights that the engine has from now on.

        Raises:
            ConfigError: it is no whole number in 0..2^63-1.
        """
        try:
            self._policy_version = whole_number("policy_version", policy_version, 0)
        except InvalidRollout as error:
            raise ConfigError(str(error)) from None
        self._rows_of: Counter[bytes] = Counter()  # rows begun under this version, by prompt
        self._expected_tokens = self._drafted_rows = 0  # of prompts and drafts of these rows

    @property
    def policy_version(self) -> int:
        """Version of the weights in the engine."""
        return self._policy_version

    @property
    def window(self) -> int | None:
        """How many rows may be in the engine at once, so that a verified prefix is still in the KV
        cache when its continuation reads it; None: no draft is known, so that nothing can be lost.
        """
        if not self._drafted_rows:
            return None
        return max(1, self.limits.kv_tokens * self._drafted_rows // self._expected_tokens)

    def _places(self, prompt: Any, params: SamplingParams, where: str) -> list[Place] | None:
        """Make a place for each of the ``n`` responses to a prompt; None: vLLM decodes it alone.

        Raises:
            UnsupportedSampling: a draft could not be verified under these parameters.
            ConfigError: the prompt is not what vLLM takes.
        """
        if is_plain(params) or has_media(prompt):
            return None
        check_raw(params, where)
        text, tokens = self._tokens_of(prompt, where)
        salt = prompt.get("cache_salt") if isinstance(prompt, dict) else None
        key = prompt_key(tokens)
        places = []
        for i in range(params.n):
            own = copy.copy(params)
            own.n = 1
            if params.seed is not None:
                own.seed = params.seed + i  # as vLLM's ParentRequest does
            number = self._rows_of[key]
            self._rows_of[key] += 1
            stream = random_stream("fresh", self.seed, self.policy_version, number, key)
            fresh = float(stream.random()) < self._reuse.fresh_fraction
            places.append(Place(text, tokens, own, key, number, fresh, salt))
        return places

    def _tokens_of(self, prompt: Any, where: str) -> tuple[str | None, list[int]]:
        text = None
        if isinstance(prompt, dict):
            text = prompt.get("prompt")
            prompt = prompt.get("prompt_token_ids", text)
        if isinstance(prompt, str):
            if self.limits.tokenizer is None:
                raise ConfigError(f"{where}text prompts need an engine without skip_tokenizer_init")
            text, prompt = prompt, self.limits.tokenizer.encode(prompt)
        tokens = np.asarray(prompt)
        if tokens.ndim != 1 or not tokens.size or tokens.dtype.kind not in "iu":
            raise ConfigError(f"{where}a prompt must be text or at least one token id")
        if len(tokens) >= self.limits.max_model_len:
            raise ConfigError(
                f"{where}the prompt has {len(tokens)} tokens, and max_model_len = "
                f"{self.limits.max_model_len} holds prompt and response; shorten it"
            )
        return text, tokens.tolist()

    def _row(self, place: Place, draft: Rollout | None) -> Row:
        row = Row(
            place.tokens,
            place.params,
            key=place.key,
            names=(self.seed, self.policy_version, place.number),
            policy_version=self.policy_version,
            limits=self.limits,
            config=self._reuse,
            draft=draft,
            noise=self._noise,
            cache_salt=place.salt,
        )
        if row.drafted:
            self._drafted_rows += 1
            self._expected_tokens += len(place.tokens) + row.drafted
        return row

    def _take_drafts(self, places: Sequence[Place]) -> list[Rollout | None]:
        """Take a draft for each place that is not fresh, as far as the cache has any."""
        wanted = Counter(place.key for place in places if not place.fresh)
        if self.cache is None or not wanted:
            return [None] * len(places)
        timeout = min(MOST_SECONDS, self.config.cache.deadline_ms / 1000 * len(wanted))
        taken = self.cache.take_drafts(wanted, self.policy_version, timeout)
        left = {key: iter(drafts) for key, drafts in taken.items()}
        return [None if p.fresh else next(left.get(p.key, iter(())), None) for p in places]

    def _end(self, row: Row) -> None:
        """Count a row that has ended, and put its response into the cache, in the background."""
        self.metrics.add(row)
        self.metrics.noise_prefix_tokens = self._noise.prefix_tokens
        if self.cache is not None and row.rollout is not None:
            self._finished.append(row.rollout)
            self._writer.submit(self._put)

    def _put(self) -> None:
        """Put all responses that have ended since the last put into the cache."""
        rollouts = [self._finished.popleft() for _ in range(len(self._finished))]
        if rollouts and self.cache is not None:
            self.cache.put(rollouts)

    def flush(self) -> None:
        """Wait, ``FLUSH_SECONDS`` at most, until the responses of all ended rows are kept."""
        try:
            self._writer.submit(self._put).result(FLUSH_SECONDS)
        except TimeoutError:
            logger.warning("the rollout cache is slow: responses are kept late, and draft late")


def request_output(place: Place, rows: Sequence[Row], request_id: str) -> RequestOutput:
    """Make the output of a prompt from its rows, which have ended."""
    from vllm import RequestOutput

    completions = []
    for i, row in enumerate(rows):
        assert row.completion is not None
        row.completion.index = i
        completions.append(row.completion)
    last = rows[0].output
    return RequestOutput(
        request_id=request_id,
        prompt=place.text,
        prompt_token_ids=place.tokens,
        prompt_logprobs=None,
        outputs=completions,
        finished=True,
        metrics=None if last is None else last.metrics,
        lora_request=None if last is None else last.lora_request,
        num_cached_tokens=None if last is None else last.num_cached_tokens,
    )
