"""The engine of the embedded trainer: rollouts, held-out responses and refits.

It is plain vLLM. With ``spec_rl`` its configuration has one block more, by which it drafts from a
rollout cache by itself; so the two sides of a comparison differ in that block alone. With ``preset:
reuse``, prefixes of earlier responses are verified and kept besides (``reuse.llm``).
"""

from __future__ import annotations

import contextlib
import gc
import logging
import shutil
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash
from pydantic import ValidationError

from nemo_specrl.cache.local import LocalCache, store_metrics
from nemo_specrl.cache.store import RolloutStore
from nemo_specrl.config import CACHE_FOLDER, CacheConfig, first_problem
from nemo_specrl.engine.counts import counts, tokens_per_step
from nemo_specrl.engine.options import engine_options
from nemo_specrl.engine.refit import refit
from nemo_specrl.errors import CacheError, ConfigError, SpecRLError, last_line
from nemo_specrl.monitoring import names as metric
from nemo_specrl.reuse.llm import PrefixReuse
from nemo_specrl.reuse.metrics import ReuseMetrics
from nemo_specrl.rollout import prompt_key, vocabulary_hash
from nemo_specrl.trainer.data.tools import open_environment
from nemo_specrl.trainer.generation.rows import EndOfPhase, Response, RunAhead, decode
from nemo_specrl.trainer.policy_config import eos_token_ids, model_folder, tokenizer_file
from nemo_specrl.trainer.recipe import Recipe

if TYPE_CHECKING:
    import torch
    from vllm import LLM, SamplingParams

__all__ = ["Engine", "build_engine", "cache_config", "in_order", "open_store", "row_seed"]

DEFAULT_MAX_NUM_SEQS = 64
SNAPSHOT = "rollouts.snapshot"
"""Name of the cache's copy in its folder in a checkpoint."""

REPORTED = (
    metric.DRAFTED_TOKENS,
    metric.HISTORIES_FOUND,
    metric.HISTORIES_LATE,
    metric.RESPONSES_KEPT,
    metric.RESPONSES_DROPPED,
)
"""The engine's counts that are in a step's record."""

logger = logging.getLogger(__name__)


def cache_config(recipe: Recipe) -> CacheConfig:
    """Return the ``cache:`` block of a recipe with its folder and the vocabulary's hash.

    Raises:
        ConfigError: the model's folder has no tokenizer.json, or a damaged one.
    """
    from tokenizers import Tokenizer

    file, config = tokenizer_file(recipe.policy.model_name), recipe.spec_rl.cache
    try:
        vocabulary = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
    except Exception as error:  # tokenizers raises nothing else
        raise ConfigError(f"{file}: cannot be read as a tokenizer: {last_line(error)}") from None
    return config.model_copy(
        update={
            "dir": config.dir or recipe.run_dir / CACHE_FOLDER,
            "vocabulary": config.vocabulary or vocabulary_hash(vocabulary),
        }
    )


def build_engine(recipe: Recipe) -> LLM:
    """Build the vLLM engine that a recipe describes, in this process.

    Raises:
        ConfigError: vLLM refuses the model or an argument.
    """
    from vllm import LLM
    from vllm.platforms import current_platform

    generation, spec_rl = recipe.policy.generation, recipe.spec_rl
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
    spec_rl = spec_rl.model_copy(update={"cache": cache_config(recipe)} if spec_rl.enabled else {})
    options = engine_options(spec_rl)
    if generation.training_temperature != 1:
        options["logprobs_mode"] = "processed_logprobs"
    if spec_rl.run_ahead.enabled:
        options["scheduling_policy"] = "priority"
    # vLLM's start collects garbage a dozen times, each time looking at all that was imported.
    gc.freeze()
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
            worker_extension_cls="nemo_specrl.engine.refit.RefitExtension",
            **{
                **options,
                "max_num_seqs": rows,
                "max_num_batched_tokens": batched,
                "use_tqdm_on_load": False,
                **generation.vllm_kwargs,
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


@dataclass
class RolloutTimes:
    """Time, seconds, and tokens of rollouts, summed over a step's calls.

    Attributes:
        reuse: what prefix reuse counted in each call.
        metrics: what engine, cache and prefix reuse counted, by metric name.
    """

    rollout_s: float = 0.0
    response_tokens: int = 0
    decoded_tokens: int = 0
    run_ahead_rows: int = 0
    run_ahead_tokens: int = 0
    reuse: list[ReuseMetrics] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


def row_seed(run: str, prompt: list[int], sample: int) -> int:
    """Return the seed of a row, which depends on nothing but the row, ``0 .. 2**31 - 1``."""
    message = prompt_key(prompt) + f"{run} {sample}".encode()
    return xxhash.xxh3_64_intdigest(message) & 0x7FFFFFFF


def in_order(prompts: Sequence[list[int]], group: int, lengths: Mapping[bytes, float]) -> list[int]:
    """Return the order in which the rows of a batch go to an engine that drafts from history.

    Long ones come first, so that few are left at the end. Rows of a prompt without a history have
    nothing to draft from but each other, and side by side they are at the same token: the first row
    of each such prompt comes before the second of any.

    Args:
        prompts: token ids.
        group: number of rows of each, which are consecutive.
        lengths: mean length of the earlier responses to prompts, by key, tokens.
    """
    known = [lengths.get(prompt_key(prompt)) for prompt in prompts]
    found = [length for length in known if length is not None]
    mean = sum(found) / max(1, len(found))

    def place(row: int) -> tuple[int, float]:
        length = known[row // group]
        return (row % group, -mean) if length is None else (0, -length)

    return sorted(range(len(prompts) * group), key=place)


def open_store(recipe: Recipe, resume_from: Path | None) -> RolloutStore | None:
    """Open the run's rollout cache with what the checkpoint has; None: it cannot be had.

    The folder of a run is emptied at its start; one that the user has named is left as it is. After
    a crash it still has what was decoded since the checkpoint, which is history like any other.
    Prefix reuse goes by policy versions, of which a repeated step would have two: it begins with
    what the checkpoint has.
    """
    config = cache_config(recipe)
    assert config.dir is not None and config.vocabulary is not None
    anew = resume_from is None or recipe.spec_rl.preset == "reuse"
    if recipe.spec_rl.cache.dir is None and anew:
        shutil.rmtree(config.dir, ignore_errors=True)
    try:
        store = RolloutStore(
            config.dir,
            vocabulary=config.vocabulary,
            max_bytes=config.max_bytes_per_node,
            responses_per_prompt=config.responses_per_prompt,
        )
    except CacheError as error:
        logger.warning("rollout cache: %s; the run's checkpoints are without it", error)
        return None
    if resume_from is not None:
        try:
            store.restore(resume_from / CACHE_FOLDER / SNAPSHOT)
        except CacheError as error:
            logger.warning("rollout cache: %s; it is not restored", error)
    return store


class Engine:
    """The engine of a run, and what the run does with its rollout cache.

    The engine itself opens the cache, reads and writes it. The run empties that of its own folder
    at the start, copies it into checkpoints, and restores it from one.

    Args:
        recipe: the whole recipe.
        resume_from: the checkpoint; None at the start of a run.

    Attributes:
        policy_version: version of the weights in the engine.
        heldout_s: duration of the last decoding of held-out prompts, seconds.

    Raises:
        ConfigError: vLLM refuses the model or an argument.
    """

    def __init__(self, recipe: Recipe, resume_from: Path | None) -> None:
        self.recipe = recipe
        self.policy_version = 0
        self.heldout_s = 0.0
        self.eos = eos_token_ids(recipe.policy.model_name)
        self.environment = open_environment(recipe)
        self._times = RolloutTimes()
        self._store = open_store(recipe, resume_from) if recipe.spec_rl.enabled else None
        self.llm = build_engine(recipe)
        self._reuse: PrefixReuse | None = None
        if recipe.spec_rl.enabled and recipe.spec_rl.preset == "reuse":
            cache = None if self._store is None else LocalCache(self._store)
            self._reuse = PrefixReuse(self.llm, recipe.spec_rl, cache, recipe.algorithm.seed)
        self._counted: dict[str, float] = {}
        self._lengths: dict[bytes, float] = {}
        self._warm_up()

    def refit(self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        """Stream new weights into the engine, tensor by tensor.

        Args:
            weights: :meth:`Policy.stream_weights`, in the engine's ``dtype``.
            policy_version: version of these weights.
        """
        refit(self.llm, weights)
        self.policy_version = policy_version
        if self._reuse is not None:
            self._reuse.policy_version = policy_version

    def rollouts(
        self,
        prompts: Sequence[list[int]],
        attempt: int = 0,
        upcoming: Sequence[list[int]] = (),
        end_of_phase: EndOfPhase | None = None,
    ) -> list[list[Response]]:
        """Roll out a group of responses for each prompt.

        Args:
            prompts: token ids.
            attempt: index of this batch in its step. It goes into the seeds, so that a prompt that
                occurs twice in a step gets different responses.
            upcoming: prompts of the next batch, for ``run_ahead``.
            end_of_phase: when to give up the rows that have not ended; None: never.
        """
        group = self.recipe.algorithm.num_generations_per_prompt
        rows = self._rows(prompts, group, f"rollout {attempt}")
        run_ahead = None
        if self.recipe.spec_rl.run_ahead.enabled:
            new = [prompt for prompt in upcoming if prompt not in prompts]
            ahead = self._rows(new, 1, "ahead", {"ahead": True})
            places = self.llm.llm_engine.vllm_config.scheduler_config.max_num_seqs
            run_ahead = RunAhead(places, deque(ahead))
        times = self._times
        started = time.perf_counter()
        if self._reuse is not None:
            responses = self._reused(self._reuse, rows)
        else:
            order = list(range(len(rows)))
            if self.recipe.spec_rl.enabled and end_of_phase is None:
                order = in_order(prompts, group, self._lengths)
            decoded = decode(
                self.llm,
                [rows[index] for index in order],
                environment=self.environment,
                run_ahead=run_ahead,
                end_of_phase=end_of_phase,
            )
            by_row = dict(zip(order, decoded, strict=True))
            responses = [by_row[index] for index in range(len(rows))]
        times.rollout_s += time.perf_counter() - started
        times.response_tokens += sum(response.length for response in responses)
        times.decoded_tokens += sum(response.length - response.accepted for response in responses)
        if run_ahead is not None:
            times.run_ahead_rows += run_ahead.rows
            times.run_ahead_tokens += run_ahead.tokens
        groups = [responses[i : i + group] for i in range(0, len(responses), group)]
        for prompt, found in zip(prompts, groups, strict=True):
            self._lengths[prompt_key(prompt)] = sum(response.length for response in found) / group
        return groups

    def _reused(
        self, reuse: PrefixReuse, rows: Sequence[tuple[list[int], SamplingParams]]
    ) -> list[Response]:
        outputs = reuse.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in rows], [params for _, params in rows]
        )
        self._times.reuse.append(reuse.metrics)
        responses = [Response() for _ in rows]
        for response, output in zip(responses, outputs, strict=True):
            completion: Any = output.outputs[0]
            response.take(completion)
            response.fresh, response.accepted = (
                completion.spec_rl.fresh,
                completion.spec_rl.accepted,
            )
        return responses

    def heldout(self, prompts: Sequence[list[int]], samples: int) -> list[list[Response]]:
        """Decode responses for an evaluation, without drafts."""
        plain = False if self.recipe.spec_rl.enabled else None
        rows = self._rows(prompts, samples, "heldout", plain)
        started = time.perf_counter()
        responses = decode(self.llm, rows, environment=self.environment)
        self.heldout_s = time.perf_counter() - started
        return [responses[i : i + samples] for i in range(0, len(responses), samples)]

    def take_times(self) -> RolloutTimes:
        """Return the times since the last call."""
        times, self._times = self._times, RolloutTimes()
        if self.recipe.spec_rl.enabled:
            times.metrics = self._metrics(times)
        return times

    def _metrics(self, times: RolloutTimes) -> dict[str, float]:
        self._flush()
        before, self._counted = self._counted, counts(self.llm)
        new = {name: value - before.get(name, 0.0) for name, value in self._counted.items()}
        metrics = {name: new[name] for name in REPORTED if name in new}
        drafted = new.get(metric.DRAFTED_TOKENS, 0.0)
        accepted = new.get(metric.ACCEPTED_TOKENS, 0.0)
        metrics[metric.DRAFT_ACCEPTED_FRACTION] = accepted / max(1.0, drafted)
        if (tokens := tokens_per_step(self._counted, before)) is not None:
            metrics[metric.TOKENS_PER_STEP] = tokens
        if self.recipe.spec_rl.run_ahead.enabled:
            metrics[metric.RUN_AHEAD_ROWS] = float(times.run_ahead_rows)
            metrics[metric.RUN_AHEAD_TOKENS] = float(times.run_ahead_tokens)
        if times.reuse:
            metrics |= _sum(times.reuse).as_dict()
        if self._store is not None:
            with contextlib.suppress(CacheError):  # these metrics are then missing
                metrics |= store_metrics([self._store.stats()])
        return metrics

    def _flush(self) -> None:
        """Wait, for seconds at most, until the engine has written all responses to the cache."""
        core: Any = self.llm.llm_engine.engine_core
        resident = getattr(core.engine_core.scheduler, "resident", None)
        if resident is not None:
            resident.flush()

    def save(self, folder: Path) -> None:
        """Write the cache into a checkpoint. Call it between two steps.

        A run that resumes from a checkpoint without the cache starts cold, which costs only speed.
        """
        if self._store is None:
            return
        self._flush()
        try:
            self._store.snapshot(folder / SNAPSHOT, self.recipe.data.prompts)
        except CacheError as error:
            logger.warning("rollout cache: %s; the checkpoint is without it", error)

    def shutdown(self) -> None:
        """End the engine, which writes what waits, and close the cache."""
        self.llm.llm_engine.engine_core.shutdown()
        if self._store is not None:
            self._store.close()

    def _warm_up(self) -> None:
        """Run a request, so that one-time costs are not part of any timing."""
        rows = self._rows([self.eos[:1] * 8], 1, "warm-up", None)
        for _, params in rows:
            params.max_tokens, params.extra_args = 2, {"spec_rl": False}
        decode(self.llm, rows)
        self.llm.reset_prefix_cache()

    def _rows(
        self,
        prompts: Sequence[list[int]],
        group: int,
        purpose: str,
        spec_rl: Any = None,
    ) -> list[tuple[list[int], SamplingParams]]:
        """Make a row for each of ``group`` responses to each prompt."""
        run = f"{purpose} {self.recipe.algorithm.seed} {self.policy_version}"
        return [
            (prompt, self._params(row_seed(run, prompt, sample), spec_rl))
            for prompt in prompts
            for sample in range(group)
        ]

    def _params(self, seed: int, spec_rl: Any) -> SamplingParams:
        """Return the sampling parameters of a row.

        Args:
            seed: of the row.
            spec_rl: what the row asks of the drafting engine; None: to be drafted for and kept.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        generation, algorithm = self.recipe.policy.generation, self.recipe.algorithm
        counted = algorithm.partial_rollouts.enabled or generation.spec_rl.run_ahead.enabled
        stop = [*(generation.stop_strings or ())]
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
            output_kind=RequestOutputKind.DELTA if counted else RequestOutputKind.FINAL_ONLY,
            extra_args=None if spec_rl is None else {"spec_rl": spec_rl},
        )


def _sum(counts: Sequence[ReuseMetrics]) -> ReuseMetrics:
    """Add the counts of several calls; how far rounding alone lets prefixes go is the last's."""
    *_, last = counts
    sums = {
        each.name: sum(getattr(one, each.name) for one in counts)
        for each in fields(ReuseMetrics)
        if each.name != "noise_prefix_tokens"
    }
    return replace(last, **sums)
