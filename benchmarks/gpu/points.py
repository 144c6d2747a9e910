"""What ``gpu_rollout.py`` measures: comparisons of ways to roll out, on random weights."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.engines import (
    GROUP,
    Engines,
    mean_p,
    prefill,
    prompt_of,
    rollout_of,
    rollouts_of,
    sampling,
    timed,
)
from benchmarks.gpu.model import (
    Fixed,
    Method,
    Size,
    empty_prefix_cache,
    forget_drafts,
    lossless,
    peak_bytes,
    pin_length,
    start_peak,
    start_stamps,
    take_stamps,
)
from nemo_specrl import Rollout, SpecRLConfig, prompt_key
from nemo_specrl.engine.vllm.model_costs import step_costs
from nemo_specrl.engine.vllm.prompt_logprob_memory import prompt_logprob_bytes
from nemo_specrl.engine.vllm.v2_lengths import max_drafted
from nemo_specrl.speculation.acceptance import accepted_lengths, offsets_of
from nemo_specrl.speculation.uniform_length import LENGTHS

FRACTIONS = (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)
"""Fractions of draft tokens that are accepted."""
P_OF_REUSE = 0.85
REUSE = SpecRLConfig(enabled=True, preset="faithful", fresh_fraction=0)
CERTAIN = -1000.0
"""A recorded log-prob with which any token is accepted, nats."""
SETTLED = 4
"""Steps until they follow each other evenly."""


class Bench(Engines):
    """The comparisons."""

    def __init__(self, size: Size, folder: Path) -> None:
        super().__init__(size, folder)
        self._earlier: dict[float, tuple[list[Any], Fixed]] = {}

    def verification(self, rows: int, length: int) -> dict[str, Any]:
        """Drafts that are accepted whole, raw prefill of the same tokens, and decoding."""
        size, n = self.size, self.size.prompt
        tokens = self.tokens(2, rows, n + length)
        whole = [prompt_of(row) for row in tokens]
        prompts = [prompt_of(row[:n]) for row in tokens]
        halves = [prompt_of(row[: n + length // 2]) for row in tokens]
        certain = np.full(length, CERTAIN, dtype=np.float32)
        drafts = Fixed([rollout_of(row[:n], 0, row[n:], certain) for row in tokens])

        def prefilled(**more: Any) -> dict[str, Any]:
            empty_prefix_cache(self.engine("plain"))
            times, _ = timed(lambda: self.generate("plain", whole, prefill(**more)))
            return {**times, "tokens": tokens.size}

        def verified(i: int) -> dict[str, Any]:
            params = sampling(length)
            times, _, metrics = self.speculate("plain", REUSE, drafts, prompts, params, i)
            names = ("lookup_s", "verify_s", "assembly_s")
            return {
                **times,
                "tokens": tokens.size,
                "accepted_fraction": metrics.accepted_tokens / (rows * length),
                **{name: getattr(metrics, name) for name in names},
            }

        def decoded() -> dict[str, Any]:
            """From the middle of a response on, whose KV is in the cache."""
            empty_prefix_cache(self.engine("plain"))
            self.generate("plain", halves, prefill())
            params = sampling(size.decoded)
            times, outputs = timed(lambda: self.generate("plain", halves, params))
            cached = sum(output.num_cached_tokens or 0 for output in outputs)
            fraction = cached / (rows * (n + length // 2))
            return {**times, "tokens": rows * size.decoded, "cached_fraction": fraction}

        return {
            "repetitions": self.compare(
                lambda i: {
                    "prefill": prefilled,
                    "verification": lambda: verified(i),
                    "prompt_logprobs": lambda: prefilled(prompt_logprobs=0),  # no drafts
                    "decoding": decoded,
                }
            )
        }

    def reuse(self) -> dict[str, Any]:
        """Rollouts with prefix reuse at several accepted fractions, and plain ones."""
        scale = self.scale_of("plain", P_OF_REUSE)
        self.set_weights("plain", scale)
        prompts, params, drafts = self.drafts("plain", *self.size.reuse)
        probe = [prompt["prompt_token_ids"] for prompt in prompts[:: 4 * GROUP]]
        drifts = {f: self.drift_to("plain", scale, f, drafts, probe) for f in FRACTIONS}

        def reused(i: int, fraction: float) -> dict[str, Any]:
            self.set_weights("plain", scale, drifts[fraction])
            times, _, metrics = self.speculate("plain", REUSE, drafts, prompts, params, i)
            return {**times, **counts_of_reuse(metrics)}

        return {
            "scale": scale,
            "drifts": drifts,
            "repetitions": self.compare(
                lambda i: {
                    "plain": functools.partial(self.plain, scale, prompts, params),
                    **{str(f): functools.partial(reused, i, f) for f in FRACTIONS},
                }
            ),
        }

    def searched(self) -> dict[str, Any]:
        """Seconds in which drafts are made for so many rows, without an engine.

        Each group has eight earlier responses, and its rows have decoded half of theirs.
        """
        from benchmarks.gpu.search import DraftedRows

        drafted = {n: DraftedRows(n, GROUP, self.size) for n in self.size.searched}
        sides = {str(n): rows.timed for n, rows in drafted.items()}
        return {
            "searched": {str(n): rows.searched for n, rows in drafted.items()},
            "repetitions": self.compare(lambda i: dict(sides)),
        }

    def lossless(self, p: float, batch: int, methods: dict[Method, str]) -> dict[str, Any]:
        """Plain decoding beside drafts from the policy's own rollouts.

        Args:
            p: probability of a sampled token, on average.
            batch: rows.
            methods: of drafting, and the engine of each.
        """
        scale, params = self.scale_of("plain", p), sampling(self.size.response)
        self.set_weights("plain", scale)
        if p not in self._earlier:
            tokens = self.groups(5, max(*self.size.batches, *self.size.drafted))
            prompts = [prompt_of(row) for row in tokens]
            outputs = self.generate("plain", prompts, params)
            self._earlier[p] = prompts, Fixed(rollouts_of(tokens, outputs))
        prompts, rollouts = self._earlier[p]
        prompts = prompts[:batch]

        def drafted(i: int, name: str, method: Method) -> dict[str, Any]:
            self.set_weights(name, scale)
            if method != "rounds":
                self.engine(name).collective_rpc(forget_drafts)
            config = lossless(method)
            times, outputs, metrics = self.speculate(name, config, rollouts, prompts, params, i)
            steps = max(1, metrics.tree_steps)
            return {
                **times,
                "mean_p": mean_p(outputs),
                "tokens_per_step": metrics.tree_tokens / steps,
                "drafted_per_step": metrics.tree_drafted_tokens / steps,
                "tree_s": metrics.tree_s,
                "requests_per_row": metrics.tree_requests / batch,
                "refused_drafts": metrics.refused_drafts,
            }

        return {
            "scale": scale,
            "repetitions": self.compare(
                lambda i: {
                    "plain": functools.partial(self.plain, scale, prompts, params),
                    **{m: functools.partial(drafted, i, name, m) for m, name in methods.items()},
                }
            ),
        }

    def steps(self) -> dict[str, Any]:
        """Seconds of a step by rows and draft tokens: plain, and of each length, always drafted.

        Beside them ``computed``: what the choice of lengths takes them for.
        """
        scale = self.scale_of("plain", P_OF_REUSE)
        context = self.size.prompt + self.size.decoded / 2
        config = self.engine("v2").llm_engine.vllm_config
        costs, most = step_costs(config), max_drafted(config)
        for name in ("plain", "v2"):
            self.set_weights(name, scale)

        def stepped(rows: int, length: int | None) -> dict[str, Any]:
            name = "plain" if length is None else "v2"
            llm = self.engine(name)
            empty_prefix_cache(llm)
            if length is not None:
                llm.collective_rpc(pin_length, args=(length,))
            prompts = [prompt_of(row) for row in self.groups(7, rows)]
            self.generate(name, prompts, prefill())
            llm.collective_rpc(start_stamps)
            self.generate(name, prompts, sampling(self.size.decoded))
            stamps = llm.collective_rpc(take_stamps)[0]
            if length is not None:
                llm.collective_rpc(pin_length, args=(None,))
            whole = [number == rows and tokens == rows * (1 + (length or 0))
                     for _, number, tokens in stamps]  # fmt: skip
            times = [
                stamps[i + 1][0] - stamps[i][0]
                for i in range(SETTLED, len(stamps) - 1)
                if whole[i] and whole[i + 1]
            ]
            return {"seconds": float(np.median(times)) if times else None, "steps": len(times)}

        sides = {
            f"{rows}/{'plain' if length is None else length}": functools.partial(
                stepped, rows, length
            )
            for rows in self.size.stepped
            for length in (None, *LENGTHS)
            if rows * (length or 0) <= most
        }
        computed = {
            name: float(costs.seconds(int(rows), int(length), context))
            for name in sides
            for rows, length in [name.replace("plain", "0").split("/")]
        }
        return {
            "computed": computed,
            "repetitions": self.compare(lambda i: dict(sides)),
        }

    def memory(self, name: str) -> dict[str, Any]:
        """Peaks of memory of prefill with and without prompt log-probs, bytes."""
        llm, size = self.engine(name), self.size
        length = size.prompt + max(length for _, length in size.places)
        prompts = [prompt_of(row) for row in self.tokens(6, 4, length)]

        def peak(**more: Any) -> dict[str, Any]:
            empty_prefix_cache(llm)
            llm.collective_rpc(start_peak)
            self.generate(name, prompts, prefill(**more))
            return {"bytes": llm.collective_rpc(peak_bytes)[0]}

        return {
            "engine": name,
            "max_num_batched_tokens": size.bound if name == "bound" else size.batched,
            "prompt_logprob_bytes": prompt_logprob_bytes(llm),
            "repetitions": self.compare(
                lambda i: {"prefill": peak, "verification": lambda: peak(prompt_logprobs=0)}
            ),
        }

    def pressure(self) -> dict[str, Any]:
        """The step loop against two phases, where the KV of all drafts has no room."""
        name, (rows, longest, kv_tokens) = "pressure", self.size.pressure
        scale = self.scale_of(name, P_OF_REUSE)
        self.set_weights(name, scale)
        prompts, params, drafts = self.drafts(name, rows, longest)
        tokens = [prompt["prompt_token_ids"] for prompt in prompts]
        drift = self.drift_to(name, scale, 0.5, drafts, tokens[:: 4 * GROUP])
        self.set_weights(name, scale, drift)
        pairs = [(r, drafts.rollouts[prompt_key(r)][k % GROUP]) for k, r in enumerate(tokens)]

        def loop(i: int) -> dict[str, Any]:
            times, _, metrics = self.speculate(name, REUSE, drafts, prompts, params, i)
            counts = counts_of_reuse(metrics)
            return {**times, **counts, "recomputed_tokens": metrics.recomputed_tokens}

        def phases(i: int) -> dict[str, Any]:
            empty_prefix_cache(self.engine(name))
            times, found = timed(lambda: self.two_phases(name, pairs, params, i))
            return {**times, **found}

        return {
            "drift": drift,
            "kv_tokens": kv_tokens,
            "tokens": sum(len(row) + len(rollout) for row, rollout in pairs),
            "repetitions": self.compare(
                lambda i: {"loop": lambda: loop(i), "phases": lambda: phases(i)}
            ),
        }

    def two_phases(
        self, name: str, pairs: list[tuple[Any, Rollout]], params: list[Any], i: int
    ) -> dict[str, Any]:
        """Verify all drafts, and then continue all rows."""
        new = np.concatenate(self.verify(name, pairs))
        old = np.concatenate([rollout.logprobs for _, rollout in pairs])
        offsets = offsets_of([len(rollout) for _, rollout in pairs])
        uniforms = 1 - np.random.default_rng([7, i]).random(len(new))
        kept = accepted_lengths(new, old, uniforms, offsets, 1.0).tolist()
        going_on = [k for k, n in enumerate(kept) if n < params[k].max_tokens]
        prompts = [[*pairs[k][0], *pairs[k][1].tokens[: kept[k]]] for k in going_on]
        rest = [sampling(params[k].max_tokens - kept[k]) for k in going_on]
        outputs = self.generate(name, [prompt_of(tokens) for tokens in prompts], rest)
        cached = sum(output.num_cached_tokens or 0 for output in outputs)
        return {
            "accepted_fraction": sum(kept) / len(new),
            "recomputed_tokens": sum(map(len, prompts)) - cached,
        }


def counts_of_reuse(metrics: Any) -> dict[str, Any]:
    return {
        "accepted_fraction": metrics.accepted_tokens / max(1, metrics.draft_tokens),
        "refused_drafts": metrics.refused_drafts,
    }
