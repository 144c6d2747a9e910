"""An engine of one method of speculation, whose steps are counted and timed as it runs.

``arms.py`` compares several of them. They run in the caller's process, which has to call
``arms.environment`` first, or ``local_cpu_environment`` if the weights do not change.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.recording import recipe_of
from benchmarks.shared.turns import Turns
from nemo_specrl.engine.vllm.cpu_sampler import fix_cpu_rejection_sampler
from nemo_specrl.rollout import Finish, Rollout, prompt_key

QUANTITIES = ("reward", "logprob", "length")


def sorting_engine(places: int, options: dict[str, Any]) -> Any:
    """A ``vllm.LLM`` of the demo's model.

    Args:
        places: rows at once.
        options: of the method of speculation (``nemo_specrl.engine_options``).
    """
    from vllm import LLM

    return LLM(
        model="examples/models/qwen3-sort",
        dtype="float32",
        max_model_len=256,
        max_num_seqs=places,
        max_num_batched_tokens=places * 256,
        block_size=32,
        num_gpu_blocks_override=max(1024, 16 * places),  # all rows, twice; not a GiB each
        enforce_eager=True,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        **options,
    )


class Counter:
    """Counts of an engine in this process, the same for every method of drafting.

    Args:
        llm: the engine.

    Attributes:
        steps: number of the engine's steps.
        row_steps: number of steps in which a row yielded a token, summed over rows; without
            drafting, the number of tokens.
        drafted: number of tokens that a drafter inside the engine proposed and the engine verified.
        accepted: number of those that were accepted and belong to a response.
        proposer_s: processor seconds of that drafter.
        tree_bytes: largest memory of the trees.
        proposed: drafts of each step, where their lengths depend on measured times.
        again: drafts to be used instead of the drafter's own, by step; None: its own.
    """

    def __init__(self, llm: Any) -> None:
        self.clear()
        core = llm.llm_engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        update = core.scheduler.update_from_output

        def update_from_output(scheduled: Any, output: Any) -> Any:
            sampled = [len(tokens) for tokens in output.sampled_token_ids]
            # In place, vLLM cuts what lies behind a response's end (_update_request_with_output).
            outputs = update(scheduled, output)
            self._count(scheduled, output, sampled)
            return outputs

        core.scheduler.update_from_output = update_from_output
        self.drafter = getattr(runner, "drafter", None)
        if self.drafter is not None:
            propose = self.drafter.propose
            adaptive = getattr(self.drafter, "lengths", None) is not None

            def timed(*args: Any, **kwargs: Any) -> Any:
                started = time.thread_time()
                drafts = propose(*args, **kwargs)
                self.proposer_s += time.thread_time() - started
                if self.steps % 32 == 0:
                    self.look()
                if adaptive and self.again is not None:
                    return next(self.again)
                if adaptive:
                    self.proposed.append(drafts)
                return drafts

            self.drafter.propose = timed

    def clear(self) -> None:
        """Set everything to 0."""
        self.steps = self.row_steps = self.drafted = self.accepted = self.tree_bytes = 0
        self.proposer_s = 0.0
        self.proposed: list[list[list[int]]] = []
        self.again: Iterator[list[list[int]]] | None = None

    def look(self) -> None:
        """Note the memory of the trees."""
        trees = getattr(self.drafter, "trees", None)
        if trees is not None:
            self.tree_bytes = max(self.tree_bytes, trees.nbytes)

    def _count(self, scheduled: Any, output: Any, sampled: list[int]) -> None:
        """Count a step.

        Args:
            scheduled: the scheduler's output for the step.
            output: the step's output, without tokens after the end of a response.
            sampled: number of tokens that the step sampled for each row of ``output``, with those.
        """
        self.steps += scheduled.total_num_scheduled_tokens > 0
        drafts = scheduled.scheduled_spec_decode_tokens
        for name in scheduled.num_scheduled_tokens:
            if not sampled:
                break
            row = output.req_id_to_index[name]
            self.row_steps += sampled[row] > 0
            if drafts.get(name):
                self.drafted += len(drafts[name])
                self.accepted += min(sampled[row] - 1, len(output.sampled_token_ids[row]))


class Steps:
    """Processor seconds of each step of an engine in this thread, with the work before the step.

    Args:
        engine: ``LLM.llm_engine``.
        turns: turns of this engine and others; they may change between two steps.
        drafter: drafter of the engine. If it measures steps, the time of waiting is not counted.

    Attributes:
        seconds: seconds by step since :meth:`begin`; after :meth:`end`, also those of the work
            after the last step.
    """

    def __init__(self, engine: Any, turns: Turns, drafter: Any = None) -> None:
        self.begin()
        step = engine.step

        def timed() -> Any:
            waited = turns.passed()
            if hasattr(drafter, "_last"):
                drafter._last += waited
            outputs = step()
            self.end()
            return outputs

        engine.step = timed

    def begin(self) -> None:
        """Start the measurement anew from this moment."""
        self.seconds: list[float] = []
        self._last = time.thread_time()

    def end(self) -> None:
        """Add what this thread has done since the last step."""
        now = time.thread_time()
        self.seconds.append(now - self._last)
        self._last = now


def of_steps(readings: Sequence[Sequence[float]], reading: Callable[..., Any] = np.median) -> float:
    """Seconds of a repeated phase: the sum over its steps of ``reading`` over the repetitions.

    Repetitions with the same seeds take the same steps. A repetition whose number of steps differs
    from that of most others is left out.
    """
    usual = statistics.mode(map(len, readings))
    same = [seconds for seconds in readings if len(seconds) == usual]
    return float(reading(same, axis=0).sum())


class Arm:
    """An engine with its options, and a rollout cache if it needs one.

    Attributes:
        responses: responses of the last epoch, ``[prompt][sample]``.
        logprobs: log-probs of their tokens, nats.
        step_s: processor seconds of each step of the last epoch, and of the work after the last
            step, for each of the engines that share the rows.
    """

    def __init__(
        self, task: str, recording: Path, folder: Path, overrides: tuple[str, ...], turns: Turns
    ) -> None:
        from nemo_specrl.trainer.generation.in_process import InProcessEngine

        self._place = task, recording, overrides
        self.recipe = recipe_of(*self._place)
        self._folders = (folder / str(i) for i in itertools.count())
        self.store = self._new_store() if self.recipe.spec_rl.enabled else None
        self.generation = InProcessEngine(self.recipe, self.store)
        config = self.generation.llm.llm_engine.vllm_config
        if config.speculative_config is not None:
            fix_cpu_rejection_sampler()
        self.counter = Counter(self.generation.llm)
        self._steps = Steps(self.generation.llm.llm_engine, turns, self.counter.drafter)
        self.responses: list[list[list[int]]] = []
        self.logprobs: list[list[list[float]]] = []
        self.step_s: list[list[float]] = []

    def _new_store(self) -> Any:
        from nemo_specrl.trainer.generation.engine import tokenizer_identity
        from nemo_specrl.trainer.replay_journal import JournaledStore

        folder = next(self._folders)
        return JournaledStore(
            folder / "cache",
            folder / "journal",
            run="benchmark",
            max_bytes=2**28,
            tokenizer_id=tokenizer_identity(self.recipe.policy.model_name),
            groups_per_prompt=self.recipe.spec_rl.cache.groups_per_prompt,
        )

    def begin_again(
        self,
        seed: int,
        sequences: int,
        overrides: Sequence[str] = (),
        earlier: Sequence[Sequence[Rollout]] = (),
    ) -> None:
        """Empty the cache and the drafters, and change how rollouts are made.

        A drafter keeps what it has learned of costs and chances, as it does while an engine runs.

        Args:
            seed: seed of sampling.
            sequences: number of sequences that the engine runs at once, at most that with which it
                was made.
            overrides: overrides of the recipe for rollouts; the engine itself does not change.
            earlier: rollouts of each prompt to fill the cache with.
        """
        from nemo_specrl.speculation.suffix_tree import DraftTrees

        generation = self.generation
        task, recording, its_own = self._place
        more = (*its_own, *overrides, f"grpo.seed={seed}")
        self.recipe = generation.recipe = recipe_of(task, recording, more)
        if self.store is not None:
            self.store.close()
            self.store = generation.store = generation.cache = self._new_store()
        core = generation.llm.llm_engine.engine_core.engine_core
        core.scheduler.scheduler_config.max_num_seqs = sequences  # what SpeculativeLLM reads
        assert core.scheduler.max_num_active_reqs  # of vLLM 0.32; another may have another name
        core.scheduler.max_num_active_reqs = sequences
        speculative, drafter = generation.speculative, self.counter.drafter
        speculative.__init__(speculative.llm, self.store, speculative.config, seed)
        if isinstance(getattr(drafter, "trees", None), DraftTrees):
            drafter.trees = DraftTrees(self.recipe.spec_rl.tree.max_bytes)
        elif hasattr(drafter, "suffix_cache"):
            drafter.__init__(generation.llm.llm_engine.vllm_config)
        self.responses, self.logprobs = [], []
        if self.store is not None and earlier:
            self.store.put(rollout for group in earlier for rollout in group)
            self.store.sync()
            self.responses = [[rollout.tokens.tolist() for rollout in group] for group in earlier]

    def rollouts(self, problems: Sequence[Any]) -> list[list[Rollout]]:
        """The rollouts of the last epoch, which was measured on these problems, by prompt."""
        speculative = self.generation.speculative
        return [
            [
                Rollout(
                    prompt_key(problem.prompt),
                    k,
                    tokens,
                    logprobs,
                    # A response of these tasks ends with this token, or at its budget.
                    Finish.STOP if tokens and tokens[-1] in self.generation.eos else Finish.LENGTH,
                    speculative.policy_version,
                    fingerprint=speculative.fingerprint,
                )
                for k, (tokens, logprobs) in enumerate(zip(*group, strict=True))
            ]
            for problem, *group in zip(problems, self.responses, self.logprobs, strict=True)
        ]

    def measure(
        self,
        epoch: int,
        new_weights: Any,
        chosen: list[Any],
        engines: int = 1,
        again: Sequence[list[list[int]]] | None = None,
    ) -> dict[str, Any]:
        """Roll out a group for each problem under an epoch's weights.

        ``again`` has drafts to be verified instead of those that an adaptive drafter proposes. With
        several engines, this one does the work of each in turn; seconds and steps are those of the
        slowest one, counts are sums.
        """
        from nemo_specrl.engine.load_balance import balanced_order

        self.generation.refit(new_weights, epoch)
        self.counter.clear()
        self.counter.again = None if again is None else iter(again)
        if self.store is not None and self.responses:  # as trainer/generation/ray_engines.py does
            costs = [statistics.fmean(map(len, group)) for group in self.responses]
            order = balanced_order(costs, engines)
        else:
            order = list(range(len(chosen)))
        size = -(-len(chosen) // engines)
        longest = dict.fromkeys(("processor_s", "engine_steps"), 0.0)
        by_prompt: dict[int, list[Any]] = {}
        self.step_s = []
        for start in range(0, len(chosen), size):
            share = order[start : start + size]
            steps = self.counter.steps
            self._steps.begin()
            rollouts = self.generation.rollouts([chosen[i].prompt for i in share])
            self._steps.end()
            here = {
                "processor_s": sum(self._steps.seconds),
                "engine_steps": self.counter.steps - steps,
            }
            longest = {name: max(longest[name], here[name]) for name in longest}
            self.step_s.append(self._steps.seconds)
            by_prompt.update(zip(share, rollouts, strict=True))
        groups = [by_prompt[i] for i in range(len(chosen))]
        self.counter.look()
        self.responses = [[g.tokens for g in group] for group in groups]
        self.logprobs = [[g.policy_logprobs.tolist() for g in group] for group in groups]
        times = self.generation.take_times()
        if self.store is not None:
            self.store.forget()  # the journal, as at a checkpoint
        rows = [
            [(problem.reward(g.tokens), g.policy_logprobs.mean(), len(g.tokens)) for g in group]
            for problem, group in zip(chosen, groups, strict=True)
        ]
        values = np.array(rows, dtype=float)  # [prompts, group, quantities]
        se = np.sqrt(values.var(axis=1, ddof=1).mean(axis=0) / values[..., 0].size)
        p = np.exp(np.concatenate([g.policy_logprobs for group in groups for g in group]))
        counter = self.counter
        return {
            "prompts": len(chosen),
            **longest,
            "row_steps": counter.row_steps,
            "response_tokens": times.response_tokens,
            "decoded_tokens": times.decoded_tokens,
            "drafted_tokens": counter.drafted,
            "accepted_tokens": counter.accepted,
            "proposer_s": counter.proposer_s,
            "tree_bytes": counter.tree_bytes,
            "mean_p": float(p.mean()),
            **dict(zip(QUANTITIES, values.mean(axis=(0, 1)), strict=True)),
            **{f"{name}_se": value for name, value in zip(QUANTITIES, se, strict=True)},
        }
