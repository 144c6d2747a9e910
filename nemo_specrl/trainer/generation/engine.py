"""An engine of the embedded trainer: rollouts, held-out responses and refits.

Plain training uses the same engine, seeds and code with speculation switched off, so that the two
sides of a comparison differ only in speculation.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from nemo_specrl.cache.run_folders import run_folder
from nemo_specrl.config import CACHE_FOLDER, first_problem
from nemo_specrl.engine.caches import RolloutCache
from nemo_specrl.engine.drafters.method import engine_options
from nemo_specrl.engine.early_end import EarlyEnd
from nemo_specrl.engine.metrics import EngineMetrics
from nemo_specrl.engine.outputs import made_tokens, rollout_info
from nemo_specrl.engine.plain_turns import generate_plainly
from nemo_specrl.engine.policy_version import reset_prefix_cache
from nemo_specrl.engine.sync_engine import SpeculativeLLM
from nemo_specrl.engine.vllm.refit import refit
from nemo_specrl.engine.weight_fingerprint import FingerprintedWeights
from nemo_specrl.errors import CacheError, ConfigError, SpecRLError
from nemo_specrl.rollout import prompt_key
from nemo_specrl.speculation.acceptance import derived_seed
from nemo_specrl.trainer.data.tools import open_environment
from nemo_specrl.trainer.policy_config import eos_token_ids, model_folder, tokenizer_file
from nemo_specrl.trainer.recipe import Recipe

if TYPE_CHECKING:
    import torch
    from vllm import LLM

__all__ = [
    "Engine",
    "Response",
    "RolloutTimes",
    "build_engine",
    "cache_folder",
    "tokenizer_identity",
]

DEFAULT_MAX_NUM_SEQS = 64

logger = logging.getLogger(__name__)


def tokenizer_identity(model_name: str) -> str:
    """Hash of a model's tokenizer file. A store opened with another tokenizer is refused.

    Raises:
        ConfigError: the folder has no tokenizer.json.
    """
    return "sha256:" + hashlib.sha256(tokenizer_file(model_name).read_bytes()).hexdigest()


def cache_folder(recipe: Recipe) -> Path:
    """Where a node keeps a run's rollout cache: under ``spec_rl.cache.dir``, or with the run."""
    config, run = recipe.spec_rl.cache, recipe.run_dir
    return run_folder(config.dir, run) if config.dir else run.absolute() / CACHE_FOLDER


def build_engine(recipe: Recipe) -> LLM:
    """Build the vLLM engine that a recipe describes, in this process.

    Raises:
        ConfigError: vLLM refuses the model or an argument.
    """
    from vllm import LLM
    from vllm.platforms import current_platform

    generation = recipe.policy.generation
    vllm_cfg = generation.vllm_cfg
    # A CPU engine must not split the prefill of a seeded request over two steps: vLLM would rewind
    # the request's generator, which CPU generators do not support
    # (v1/worker/gpu_model_runner.py, _bookkeeping_sync). With a token budget for max_num_seqs rows
    # of max_model_len tokens, none is split.
    rows = generation.vllm_kwargs.get("max_num_seqs", DEFAULT_MAX_NUM_SEQS)
    whole = rows * vllm_cfg.max_model_len
    batched = generation.vllm_kwargs.get("max_num_batched_tokens", whole)
    if current_platform.is_cpu() and batched < whole:
        raise ConfigError(
            f"policy.generation.vllm_kwargs.max_num_batched_tokens = {batched}: must be at least "
            f"max_num_seqs * max_model_len = {whole} on a CPU, or left out"
        )
    options = engine_options(recipe.spec_rl)
    if generation.training_temperature != 1:
        options = {"logprobs_mode": "processed_logprobs", **options}
    try:
        return LLM(
            model=str(model_folder(recipe.policy.model_name)),
            dtype=vllm_cfg.precision,
            max_model_len=vllm_cfg.max_model_len,
            gpu_memory_utilization=vllm_cfg.gpu_memory_utilization,
            enforce_eager=vllm_cfg.enforce_eager,
            seed=recipe.algorithm.seed,
            skip_tokenizer_init=not (generation.stop_strings or recipe.env.tools),
            enable_prefix_caching=True,
            disable_log_stats=True,
            worker_extension_cls="nemo_specrl.engine.vllm.refit.RefitExtension",
            **{
                "max_num_seqs": rows,
                "max_num_batched_tokens": batched,
                "use_tqdm_on_load": False,
                **generation.vllm_kwargs,
                **options,
            },
        )
    except SpecRLError:
        raise
    except Exception as error:  # vLLM's parts raise many kinds without a common base
        reason = " ".join(str(error).split())
        if isinstance(error, ValidationError):
            reason = first_problem(error)
        refused = f"policy.generation: vLLM refuses it: {reason[:300] or type(error).__name__}"
        raise ConfigError(refused) from error


@dataclass(eq=False)
class Response:
    """A response of the current policy.

    Args:
        tokens: response token ids.
        policy_logprobs: log-probs under the current policy, float32 ``[n]``, nats.
        reported_logprobs: log-probs that the engine reports (``spec_rl.reported_logprobs``),
            float32 ``[n]``, nats.
        birth_logprobs: log-probs under the policy that sampled each token, float32 ``[n]``, nats.
        reused: whether another policy sampled the token, such as an earlier one or that of a step
            which a resume has lost, bool ``[n]``.
        fresh: whether the response was decoded without a draft.
        truncated: whether it was cut off at the maximum length.
        made: which tokens the policy made, bool ``[n]``. The others are the environment's; their
            log-probs are 0.
        ended: False if it was given up before its end.
    """

    tokens: list[int]
    policy_logprobs: npt.NDArray[np.float32]
    reported_logprobs: npt.NDArray[np.float32]
    birth_logprobs: npt.NDArray[np.float32]
    reused: npt.NDArray[np.bool_]
    fresh: bool
    truncated: bool
    made: npt.NDArray[np.bool_]
    ended: bool = True

    @classmethod
    def of(cls, completion: Any) -> Response:
        """Return what an engine's completion, ``vllm.CompletionOutput``, is for training."""
        reported = np.asarray(completion.logprobs.logprobs, dtype=np.float32)
        tokens = list(completion.token_ids)
        truncated, given_up = (completion.finish_reason == r for r in ("length", "abort"))
        made = made_tokens(completion)
        if made is None:
            made = np.ones(len(tokens), dtype=bool)
        reuse = rollout_info(completion)
        if reuse is None:
            none = np.zeros(len(tokens), dtype=bool)
            logprobs = reported, reported, reported
            return cls(tokens, *logprobs, none, True, truncated, made, not given_up)
        # Not by policy versions (Rollout.reused): after a resume, those of lost steps come again.
        reused = np.arange(len(tokens)) < (0 if reuse.fresh else reuse.accepted)
        logprobs = reuse.policy_logprobs, reported, reuse.birth_logprobs
        return cls(tokens, *logprobs, reused, reuse.fresh, truncated, made, not given_up)

    @property
    def length(self) -> int:
        """Number of tokens that the policy made."""
        return int(self.made.sum())


@dataclass
class RolloutTimes:
    """Time, seconds, and tokens of rollouts, summed over a step's ``generate`` calls."""

    rollout_s: float = 0.0
    decoded_tokens: int = 0
    response_tokens: int = 0
    engine: EngineMetrics = field(default_factory=EngineMetrics)


class Cache(RolloutCache, Protocol):
    """A cache of rollouts that other processes may read as well."""

    def sync(self) -> None:
        """Wait until everything that was put is on disk, and can be found by all processes."""


class Engine:
    """An engine that drafts from a rollout cache.

    Args:
        recipe: the whole recipe.
        cache: the rollout cache, or None with speculation switched off.

    Attributes:
        times: times of the rollouts since the last :meth:`take_times`.
        eos: the model's end-of-sequence tokens.
        environment: answers the turns of a rollout; None if it has one turn.
        heldout_s: duration of the last plain decoding of held-out prompts, seconds.

    Raises:
        ConfigError: vLLM refuses the model or an argument.
    """

    def __init__(self, recipe: Recipe, cache: Cache | None) -> None:
        self.recipe, self.cache = recipe, cache
        self.llm = build_engine(recipe)
        self.speculative = SpeculativeLLM(
            self.llm, cache, recipe.spec_rl, seed=recipe.algorithm.seed
        )
        self.eos = eos_token_ids(recipe.policy.model_name)
        self.environment = open_environment(recipe)
        self.times = RolloutTimes()
        self.heldout_s = 0.0
        self._sync_failed = False
        self._warm_up()

    @property
    def policy_version(self) -> int:
        """Version of the weights in the engine."""
        return self.speculative.policy_version

    def refit(self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        """Stream new weights into the engine, tensor by tensor.

        Args:
            weights: :meth:`Policy.stream_weights`, in the engine's ``dtype``.
            policy_version: version of these weights.
        """
        stream = FingerprintedWeights(weights)
        refit(self.llm, stream)
        self.speculative.policy_version = policy_version
        self.speculative.fingerprint = stream.fingerprint

    def rollouts(
        self,
        prompts: list[list[int]],
        attempt: int = 0,
        upcoming: list[list[int]] | None = None,
        early_end: EarlyEnd | None = None,
    ) -> list[list[Response]]:
        """Roll out a group of responses for each prompt and add the time to ``times``.

        Args:
            prompts: token ids.
            attempt: index of this batch in its step. It goes into the seeds, so that a prompt that
                occurs twice in a step gets different responses.
            upcoming: prompts of the next batch, for ``run_ahead``.
            early_end: decides when rows that have not ended are given up; None: never.
        """
        group = self.recipe.algorithm.num_generations_per_prompt
        seed = self.speculative.draw_seed
        rows, params = self._rows(prompts, group, f"rollout {attempt}", seed)
        started = time.perf_counter()
        outputs = self.speculative.generate(
            rows,
            params,
            upcoming=[{"prompt_token_ids": p} for p in upcoming or ()],
            environment=self.environment,
            early_end=early_end,
            use_tqdm=False,
        )
        if self.cache is not None:
            self._sync(self.cache)
        elapsed = time.perf_counter() - started
        generated = [Response.of(output.outputs[0]) for output in outputs]
        self._count(elapsed, generated)
        return [generated[i : i + group] for i in range(0, len(generated), group)]

    def _sync(self, cache: Cache) -> None:
        """Get what was put onto disk; a failure costs only speed, is counted, and logged once."""
        try:
            cache.sync()
        except CacheError as error:
            self.speculative.metrics.cache_errors += 1
            if not self._sync_failed:
                logger.warning(
                    "rollout cache: %s; if the run dies, it decodes again what is not on disk. "
                    "Further failures are counted in spec_rl/cache_errors",
                    error,
                )
            self._sync_failed = True

    def heldout(self, prompts: list[list[int]], samples: int) -> list[list[Response]]:
        """Decode responses for an evaluation, without the cache."""
        rows, params = self._rows(prompts, samples, "heldout", self.recipe.algorithm.seed)
        started = time.perf_counter()
        outputs = generate_plainly(self.llm, rows, params, self.environment)
        self.heldout_s = time.perf_counter() - started
        generated = [Response.of(output.outputs[0]) for output in outputs]
        return [generated[i : i + samples] for i in range(0, len(generated), samples)]

    def take_times(self) -> RolloutTimes:
        """Return ``times`` and reset them."""
        times, self.times = self.times, RolloutTimes()
        return times

    def _rows(
        self, prompts: list[list[int]], group: int, purpose: str, seed: int
    ) -> tuple[list[Any], list[Any]]:
        """Repeat each prompt ``group`` times, and make sampling parameters for every row."""
        rows, params = [], []
        for prompt in prompts:
            key = prompt_key(prompt)
            rows += [{"prompt_token_ids": prompt} for _ in range(group)]
            # Seeds depend only on the row, so that a repeated step is the same.
            params += [
                self._params(derived_seed(purpose, seed, self.policy_version, key, sample_index))
                for sample_index in range(group)
            ]
        return rows, params

    def _params(self, seed: int) -> Any:
        """Sampling parameters of a row."""
        from vllm import SamplingParams

        generation = self.recipe.policy.generation
        stop = list(generation.stop_strings or ())
        if self.environment is not None:
            stop += self.environment.stop_strings
        return SamplingParams(
            max_tokens=generation.max_new_tokens,
            temperature=generation.temperature,
            top_p=generation.top_p,
            top_k=generation.top_k or 0,
            stop_token_ids=generation.stop_token_ids or self.eos,
            stop=stop or None,
            include_stop_str_in_output=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(stop),
            seed=seed,
        )

    def _count(self, elapsed: float, generated: list[Response]) -> None:
        times = self.times
        tokens = sum(g.length for g in generated)
        times.rollout_s += elapsed
        times.response_tokens += tokens
        if not self.recipe.spec_rl.enabled:
            times.decoded_tokens += tokens
            return
        metrics = self.speculative.metrics
        times.decoded_tokens += metrics.decoded_tokens
        times.engine = times.engine + metrics

    def _warm_up(self) -> None:
        """Run one request of each kind, so that one-time costs are not part of any timing."""
        from vllm import SamplingParams

        for params in (
            SamplingParams(max_tokens=2, logprobs=0, detokenize=False, seed=0),
            SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False),
        ):
            self.llm.generate({"prompt_token_ids": self.eos[:1] * 8}, params, use_tqdm=False)
        reset_prefix_cache(self.llm)
