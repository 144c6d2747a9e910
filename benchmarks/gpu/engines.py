"""The engines of ``gpu_rollout.py``, what they are asked for, and how sides are timed.

A comparison has sides, which are timed in turn, several times over, each time in another order.
Figures are ratios of two sides of one repetition, so that a busy or a warm machine favours none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.model import (
    Fixed,
    Method,
    Size,
    empty_prefix_cache,
    give_weights,
    lossless,
    make_engine,
    runner_name,
    write_config,
)
from nemo_specrl import Finish, Rollout, SpecRLConfig, SpeculativeLLM, prompt_key
from nemo_specrl.engine.prefix.verification import matching_logprobs, sampled_values
from nemo_specrl.engine.vllm.environment import has_custom_proposers

GROUP = 8

Side = Callable[[], dict[str, Any]]


class Engines:
    """Engines of random weights, made when they are first needed.

    Args:
        size: how much is measured.
        folder: for the model's configuration.
    """

    def __init__(self, size: Size, folder: Path) -> None:
        self.size = size
        self.folder = folder
        self._engines: dict[str, Any] = {}
        self._weights: dict[str, tuple[float, float]] = {}
        self._scales: dict[tuple[str, float], float] = {}
        write_config(size.shape, folder)

    def engine(self, name: str) -> Any:
        """``plain``: V2. ``v2``: V2 that drafts. ``v1``: with the tree proposer where this vLLM
        takes one. ``pressure``: V2, with room for little KV. ``bound``: V1, with few tokens in a
        step.
        """
        if name in self._engines:
            return self._engines[name]
        size = self.size
        longest = max(size.reuse[1], *(length for _, length in size.places))
        options = {
            "max_model_len": size.prompt + longest + 16,
            "max_num_batched_tokens": size.batched,
            "max_num_seqs": max(*size.batches, *size.drafted, *(rows for rows, _ in size.places)),
            "gpu_memory_utilization": 0.42,  # two engines are there at once
            "seed": 0,
        }
        if name == "pressure":
            rows, length, kv_tokens = size.pressure
            options["max_model_len"] = size.prompt + length + 16
            options |= {"max_num_seqs": rows // 4, "kv_tokens": kv_tokens}
        if name == "bound":
            options |= {"max_num_batched_tokens": size.bound, "enforce_eager": True}
        v2 = name in ("plain", "v2", "pressure")
        methods: dict[str, Method] = {"v2": "v2"}
        if has_custom_proposers():
            methods["v1"] = "proposer"
        method = methods.get(name)
        llm = make_engine(self.folder, size.shape, v2=v2, method=method, **options)
        self._engines[name] = llm
        tokens = self.tokens(0, 8, size.prompt)  # what happens once, kernels of Triton among it
        prompts = [prompt_of(row) for row in tokens]
        self.generate(name, prompts, prefill(prompt_logprobs=0))
        outputs = self.generate(name, prompts, sampling(16))
        if method is not None:
            rollouts = Fixed(rollouts_of(tokens, outputs))
            self.speculate(name, lossless(method), rollouts, prompts, sampling(16), 0)
        return llm

    def runners(self) -> dict[str, str]:
        """The model runner of each engine."""
        return {name: llm.collective_rpc(runner_name)[0] for name, llm in self._engines.items()}

    def set_weights(self, name: str, scale: float, drift: float = 0.0) -> None:
        """Give an engine a policy (``model.give_weights``) and an empty prefix cache."""
        llm = self.engine(name)
        if self._weights.get(name) != (scale, drift):
            give_weights(llm, self.size.shape, scale, drift)
            self._weights[name] = scale, drift
        empty_prefix_cache(llm)

    def tokens(self, seed: int, *size: int) -> Any:
        """Random tokens, int64."""
        return np.random.default_rng(seed).integers(0, self.size.shape.vocabulary, size)

    def groups(self, seed: int, rows: int) -> Any:
        """Random prompts, each for a group of rows, int64 ``[rows, prompt]``."""
        prompts = self.tokens(seed, -(-rows // GROUP), self.size.prompt)
        return np.repeat(prompts, GROUP, axis=0)[:rows]

    def generate(self, name: str, prompts: list[Any], params: Any) -> list[Any]:
        """The outputs of an engine without speculation."""
        outputs: list[Any] = self.engine(name).generate(prompts, params, use_tqdm=False)
        return outputs

    def plain(self, scale: float, prompts: list[Any], params: Any) -> dict[str, Any]:
        """Time plain decoding with the weights of a scale."""
        self.set_weights("plain", scale)
        times, outputs = timed(lambda: self.generate("plain", prompts, params))
        return {**times, "mean_p": mean_p(outputs)}

    def speculate(
        self,
        name: str,
        config: SpecRLConfig,
        rollouts: Fixed,
        prompts: list[Any],
        params: Any,
        repetition: int,
    ) -> tuple[dict[str, float], list[Any], Any]:
        """Time a ``SpeculativeLLM`` that has seen nothing yet: times, outputs and metrics."""
        empty_prefix_cache(self.engine(name))
        speculative = SpeculativeLLM(self.engine(name), rollouts, config, seed=repetition)
        speculative.policy_version = 1
        times, outputs = timed(lambda: speculative.generate(prompts, params, use_tqdm=False))
        return times, outputs, speculative.metrics

    def scale_of(self, name: str, p: float) -> float:
        """The scale with which sampled tokens have a probability of ``p`` on average."""
        if (name, p) not in self._scales:
            prompts = [prompt_of(row) for row in self.tokens(1, 64, self.size.prompt)]
            low, high = 0.0, 8.0  # logarithm to base 2
            for _ in range(8):
                middle = (low + high) / 2
                self.set_weights(name, 2**middle)
                seen = mean_p(self.generate(name, prompts, sampling(self.size.response // 2)))
                low, high = (low, middle) if seen > p else (middle, high)
            self._scales[name, p] = 2 ** ((low + high) / 2)
        return self._scales[name, p]

    def drafts(self, name: str, rows: int, longest: int) -> tuple[list[Any], list[Any], Fixed]:
        """Prompts, sampling parameters, and rollouts of the policy that an engine has.

        Lengths are log-normal around a third of the longest, with a long tail as in training.
        """
        tokens = self.groups(3, rows)
        prompts = [prompt_of(row) for row in tokens]
        lengths = np.random.default_rng(4).lognormal(np.log(longest / 3), 0.6, rows)
        params = [sampling(n) for n in np.clip(lengths, longest / 16, longest)]
        return prompts, params, Fixed(rollouts_of(tokens, self.generate(name, prompts, params)))

    def drift_to(self, name: str, scale: float, wanted: float, drafts: Fixed, rows: Any) -> float:
        """The drift at which a fraction of the draft tokens is accepted, found by bisection of its
        logarithm. With bfloat16, the least drift rounds all weights anew.

        Args:
            name: of the engine.
            scale: of its policy.
            wanted: the fraction.
            drafts: of the policy without drift.
            rows: prompts as token ids; of each, all rollouts are judged.
        """
        if wanted in (0.0, 1.0):
            return 1.0 - wanted
        pairs = [(row, rollout) for row in rows for rollout in drafts.rollouts[prompt_key(row)]]
        low, high = -20.0, 0.0  # logarithm to base 2
        for _ in range(10):
            middle = (low + high) / 2
            drift = 2**middle
            self.set_weights(name, scale, drift)
            accepted = 0.0
            for new, (_, rollout) in zip(self.verify(name, pairs), pairs, strict=True):
                accepted += float(np.exp(np.minimum(0, new - rollout.logprobs).cumsum()).sum())
            seen = accepted / sum(len(rollout) for _, rollout in pairs)
            low, high = (middle, high) if seen > wanted else (low, middle)
        return float(2 ** ((low + high) / 2))

    def verify(self, name: str, pairs: list[tuple[Any, Rollout]]) -> list[Any]:
        """Log-probs of the tokens of drafts, by prompt and draft, in a prefill of them all."""
        whole = [prompt_of([*row, *rollout.tokens]) for row, rollout in pairs]
        outputs = self.generate(name, whole, prefill(prompt_logprobs=0))
        return [
            sampled_values(_proved(output.prompt_logprobs, rollout.tokens))
            for output, (_, rollout) in zip(outputs, pairs, strict=True)
        ]

    def compare(self, sides: Callable[[int], dict[str, Side]]) -> list[dict[str, Any]]:
        """What each side measured, by repetition.

        Args:
            sides: for a repetition, by name, what times itself and returns what it found.
        """
        found: list[dict[str, Any]] = []
        started = time.perf_counter()
        while len(found) < self.size.repetitions:
            if len(found) > 1 and time.perf_counter() - started > self.size.patience:
                break
            here = sides(len(found))
            order = list(here)[:: -1 if len(found) % 2 else 1]
            measured = {name: here[name]() for name in order}
            found.append({name: measured[name] for name in here})
        return found


def timed(work: Callable[[], Any]) -> tuple[dict[str, float], Any]:
    """Call a function; returns its seconds and this process's processor seconds, and its result."""
    wall, processor = time.perf_counter(), time.process_time()
    result = work()
    times = {
        "seconds": time.perf_counter() - wall,
        "processor_s": time.process_time() - processor,
    }
    return times, result


def _proved(prompt_logprobs: Any, tokens: Any) -> Any:
    found = matching_logprobs(prompt_logprobs, tokens)
    if found is None:
        raise RuntimeError("the engine returned prompt log-probs of other tokens than the draft's")
    return found


def rollout_of(prompt: Any, sample_index: int, tokens: Any, logprobs: Any) -> Rollout:
    tokens = np.asarray(tokens, dtype=np.int32)
    return Rollout(prompt_key(prompt), sample_index, tokens, logprobs, Finish.LENGTH, 0)


def rollouts_of(prompts: Any, outputs: list[Any]) -> list[Rollout]:
    """The rollouts of groups, from what the engine returned for them."""
    return [
        rollout_of(row, i % GROUP, output.outputs[0].token_ids, logprobs_of(output))
        for i, (row, output) in enumerate(zip(prompts, outputs, strict=True))
    ]


def prompt_of(tokens: Any) -> dict[str, Any]:
    return {"prompt_token_ids": [int(token) for token in tokens]}


def sampling(max_tokens: int, **more: Any) -> Any:
    """Sampling parameters of a rollout, with the log-probs of its tokens."""
    from vllm import SamplingParams

    usual = {"temperature": 1.0, "logprobs": 0, "flat_logprobs": True, "detokenize": False}
    return SamplingParams(max_tokens=int(max_tokens), **usual | more)


def prefill(**more: Any) -> Any:
    """Sampling parameters of a request that only prefills its prompt."""
    return sampling(1, temperature=0.0, logprobs=None, **more)


def logprobs_of(output: Any) -> Any:
    return sampled_values(output.outputs[0].logprobs)


def mean_p(outputs: list[Any]) -> float:
    """Probability that a sampled token had, on average."""
    return float(np.exp(np.concatenate([logprobs_of(output) for output in outputs])).mean())
