"""AsyncLLM on the V2 runner, whose engine core and drafter lie in another process.

Triton's interpreter runs there, too (``tests.support.v2_spawned``), and drafts are made by the
numpy reference, as in ``test_engine``.
"""

import asyncio

import numpy as np
import pytest

from nemo_specrl import (
    AsyncSpeculativeLLM,
    Finish,
    Rollout,
    SpecRLConfig,
    SpeculativeLLM,
    engine_options,
    prompt_key,
    send_histories,
)
from nemo_specrl.engine.metrics import EngineMetrics
from nemo_specrl.engine.served_requests import ServingSpeculativeLLM
from nemo_specrl.errors import ConfigError
from tests.conftest import KV_BLOCKS, DictCache
from tests.engine.test_async_engine import ClaimingCache
from tests.support.engines import PROMPT, VOCABULARY
from tests.support.v2_exactness import BENT_SEEN, bent_sampler, likeliest, p_value, probabilities
from tests.support.v2_workers import forget, refitted, seen

K = 4
CONFIG = SpecRLConfig(
    enabled=True,
    preset="lossless",
    tree={"max_draft_tokens": K, "adaptive": False, "max_bytes": 8 << 20},
    monitor={"enabled": False},
)
PROMPTS = [[*PROMPT[:-1], token] for token in range(3, 9)]
KEY = b"prompt"


def arguments(folder, scheduling):
    return {
        "model": str(folder),
        "enforce_eager": True,
        "max_model_len": 96,
        "max_num_seqs": 16,
        "dtype": "float32",
        **KV_BLOCKS,
        "seed": 0,
        "max_logprobs": VOCABULARY,
        "disable_log_stats": True,
        "worker_extension_cls": "nemo_specrl.engine.vllm.refit.RefitExtension",
        "async_scheduling": scheduling == "async",
        **engine_options(CONFIG),
    }


@pytest.fixture(scope="module", params=["async", "sync"])
def started(request, random_model, loop):
    """The engine, and its kind of scheduling."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    async def start():
        options = AsyncEngineArgs(**arguments(random_model, request.param))
        return AsyncLLM.from_engine_args(options)

    made = loop.run_until_complete(start())
    config = made.vllm_config
    assert config.use_v2_model_runner
    assert config.scheduler_config.async_scheduling == (request.param == "async")
    yield made, request.param
    made.shutdown()


@pytest.fixture
def llm(started, loop):
    """The engine, with an empty index; ``llm.rpc`` asks its worker and waits."""
    made = started[0]
    made.rpc = lambda *args: loop.run_until_complete(made.collective_rpc(*args))[0]
    made.rpc(forget)
    return made


def sampling(max_tokens, history=None, identity=0, **options):
    from vllm import SamplingParams

    extra = None
    if history is not None:
        sent = [(i, np.array(tokens, np.int32).tobytes()) for i, tokens in enumerate(history)]
        extra = {"spec_rl": [KEY, identity, sent, len(PROMPT)]}
    usual = {"temperature": 1.0, "logprobs": 0, "detokenize": False, "ignore_eos": True}
    return SamplingParams(max_tokens=max_tokens, **usual | options, extra_args=extra)


class Rows:
    """Rows of an engine, each of which comes when the one before it has its second token."""

    def __init__(self, llm, loop):
        self.llm, self.loop, self.count = llm, loop, 0

    def __call__(self, params, prompts=None):
        """Completions of rows with these parameters, in order."""
        return self.loop.run_until_complete(self._all(params, prompts or [PROMPT] * len(params)))

    async def _all(self, params, prompts):
        begun = [asyncio.Event() for _ in params]
        return await asyncio.gather(
            *(
                self._one(prompt, p, begun[i - 1] if i else None, begun[i])
                for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))
            )
        )

    async def _one(self, prompt, params, before, begun):
        if before is not None:
            await before.wait()
        self.count += 1
        stream = self.llm.generate({"prompt_token_ids": list(prompt)}, params, f"row{self.count}")
        try:
            async for output in stream:
                if len(output.outputs[0].token_ids) >= 2:
                    begun.set()
        finally:
            begun.set()
        return output.outputs[0]


@pytest.fixture
def rows(llm, loop):
    return Rows(llm, loop)


def test_exact(llm, rows, random_model):
    """Each token of rows that come at different times has the policy's distribution.

    With good drafts, parts of which are accepted. The bound is 1e-3 for each of two kinds of
    scheduling: a correct sampler fails one of them for 0.2 % of all seeds, and these are fixed. The
    control: a sampler that is bent is seen.
    """
    history = likeliest(random_model, 1)

    def tested():
        llm.rpc(forget)
        params = [sampling(6, history if i == 0 else (), identity=100 + i) for i in range(32)]
        completions = rows(params)
        samples = np.array([completion.token_ids for completion in completions])
        steps, tokens, *_ = llm.rpc(seen)["totals"]
        assert samples.shape == (32, 6) and tokens == samples.size
        assert tokens / steps > 1.1  # parts of drafts are accepted
        p = probabilities(random_model, samples.tolist())
        own = np.log(np.take_along_axis(p, samples[:, :, None], -1))[:, :, 0]
        for completion, logprobs in zip(completions, own, strict=True):
            entries = zip(completion.logprobs, completion.token_ids, strict=True)
            assert [e[t].logprob for e, t in entries] == pytest.approx(logprobs, abs=2e-4)
        return p_value(samples, p)

    assert tested() > 1e-3
    with bent_sampler(llm.rpc):
        assert tested() < BENT_SEEN


def test_greedy_rows_are_those_of_plain_decoding(llm, rows):
    """Whole responses, whatever is drafted; the control is a bent sampler."""
    plain = rows([sampling(20, temperature=0)] * 2, PROMPTS[:2])
    wrong = [list(plain[0].token_ids)[:7] + [5] * 8, list(plain[1].token_ids)]

    def drafted():
        llm.rpc(forget)
        params = [sampling(20, wrong if i == 0 else (), i, temperature=0) for i in range(6)]
        return [list(completion.token_ids) for completion in rows(params, PROMPTS[:1] * 6)]

    truth = list(plain[0].token_ids)
    assert drafted() == [truth] * 6
    steps, tokens, *_ = llm.rpc(seen)["totals"]
    assert tokens / steps > 2
    with bent_sampler(llm.rpc):
        assert all(tokens != truth for tokens in drafted())


@pytest.fixture(scope="module")
def synchronous(started, random_model):
    """``vllm.LLM`` with the same options, in this process."""
    from vllm import LLM

    return LLM(**arguments(random_model, started[1]))


@pytest.mark.parametrize("started", ["async"], indirect=True)
def test_as_many_tokens_a_step_as_synchronous_engines(
    llm, started, synchronous, loop, by_reference
):
    """In the second epoch, on the same rollouts: to the step where rows come one by one.

    The second epoch takes the likeliest tokens, so that both engines have the same responses.
    """
    synchronous.collective_rpc(forget)
    cache, first = DictCache(), sampling(24, temperature=0.6, seed=5)
    made = SpeculativeLLM(synchronous, cache, CONFIG)
    twice = [prompt for prompt in PROMPTS for _ in range(2)]
    made.generate([{"prompt_token_ids": p} for p in twice], first, use_tqdm=False)
    rollouts, likely = cache.all(), sampling(24, temperature=0.01, seed=6)
    assert len(rollouts) == len(twice)
    for apart in (True, False):
        calls = [[prompt] for prompt in PROMPTS] if apart else [PROMPTS]
        synchronous.collective_rpc(forget)
        steps, wanted = 0, []
        made = SpeculativeLLM(synchronous, DictCache(rollouts), CONFIG, policy_version=1)
        for call in calls:
            prompts = [{"prompt_token_ids": prompt} for prompt in call]
            outputs = made.generate(prompts, likely, use_tqdm=False)
            wanted += [list(output.outputs[0].token_ids) for output in outputs]
            steps += made.metrics.tree_steps
        llm.rpc(forget)
        here = AsyncSpeculativeLLM(llm, ClaimingCache(rollouts), CONFIG, policy_version=1)
        completions, metrics = loop.run_until_complete(
            epoch(here, PROMPTS, apart=apart, params=likely)
        )
        assert [list(completion.token_ids) for completion in completions] == wanted
        assert metrics.cache_errors == 0
        assert metrics.tree_tokens == metrics.decoded_tokens == 24 * len(PROMPTS)
        assert metrics.tree_tokens / metrics.tree_steps > 1.5
        if apart:
            assert metrics.tree_steps == steps
        else:  # the corpus depends on which rows end first
            assert abs(metrics.tree_steps - steps) <= 0.1 * steps


def test_turns_that_come_without_a_row(llm, rows, loop):
    """As by HTTP: both turns draft from the conversation that the cache has of their root."""
    greedy = [sampling(24, temperature=0)]
    (first,) = rows(greedy)
    later = [*PROMPT, *first.token_ids, 3, 4, 5]
    (second,) = rows(greedy, [later])
    said = [*first.token_ids, 3, 4, 5, *second.token_ids]
    known = Rollout(prompt_key(PROMPT), 0, said, [-0.1] * len(said), Finish.STOP, 0, raw=False)
    made = ServingSpeculativeLLM(llm, ClaimingCache([known]), CONFIG, policy_version=1)
    params = sampling(24, temperature=0.01, seed=6)
    for prompt, plain in ((PROMPT, first), (later, second)):

        async def turn(prompt=prompt):
            stream = made.serve({"prompt_token_ids": prompt}, params, str(prompt))
            [output] = [output async for output in stream if output.finished]
            await made.count_tree_drafts()
            return output.outputs[0]

        made.metrics = EngineMetrics()
        assert list(loop.run_until_complete(turn()).token_ids) == list(plain.token_ids)
        assert made.metrics.tree_tokens / made.metrics.tree_steps > 2.5
        assert made.metrics.cache_errors == 0


async def epoch(made, prompts, *, apart=False, params, during=None):
    """Completions of an epoch, at once or one row after the other, and its metrics."""

    async def row(i, prompt):
        name = f"{made.policy_version}-{i}"
        stream = made.generate({"prompt_token_ids": list(prompt)}, params, name)
        return [output async for output in stream][-1].outputs[0]

    made.metrics = EngineMetrics()
    if apart:
        completions = [await row(i, prompt) for i, prompt in enumerate(prompts)]
    else:
        tasks = [asyncio.ensure_future(row(i, prompt)) for i, prompt in enumerate(prompts)]
        if during is not None:
            await during(tasks)
        completions = await asyncio.gather(*tasks, return_exceptions=during is not None)
    await made.count_tree_drafts()
    return completions, made.metrics


async def until(condition):
    """Wait until something is so."""
    while not await condition():
        await asyncio.sleep(0.02)


def test_aborted_and_cancelled_rows(llm, loop):
    """They leave the index with what they have, which later rows draft from."""
    cache = ClaimingCache()
    made = AsyncSpeculativeLLM(llm, cache, CONFIG)
    params = sampling(80, temperature=0.01, seed=6)

    async def during(tasks):
        async def begun():
            (here,) = await llm.collective_rpc(seen)
            return here["rows"] == 6 and here["totals"][1] > 0

        await until(begun)
        tasks[4].cancel()
        # The second as vLLM's own callers do.
        await asyncio.gather(made.abort(["0-1", "0-2"]), llm.abort("0-3"))

    completions, metrics = loop.run_until_complete(
        epoch(made, PROMPTS[:1] * 6, params=params, during=during)
    )
    assert isinstance(completions[4], asyncio.CancelledError)
    assert [len(completions[i].token_ids) for i in (0, 5)] == [80, 80]
    for aborted in completions[1:4]:
        assert aborted.finish_reason == "abort" and len(aborted.token_ids) < 80
    assert metrics.cache_errors == 0
    loop.run_until_complete(made.set_policy_version(1))
    completions, metrics = loop.run_until_complete(epoch(made, PROMPTS[:1] * 2, params=params))
    assert [len(completion.token_ids) for completion in completions] == [80, 80]
    assert metrics.tree_tokens / metrics.tree_steps > 2.5
    here = llm.rpc(seen)
    # Rows that were aborted are gone; of those that ended last, the next step would tell.
    assert here["rows"] <= 2 and here["prompts"] == 1


def test_greedy_rows_beside_rows_that_are_aborted(llm, rows, loop):
    """They and those behind them are as with plain decoding."""
    (plain,) = rows([sampling(40, temperature=0)])
    truth = list(plain.token_ids)
    aborted = []

    async def abort_some():
        while len(aborted) < 3:
            await asyncio.sleep(0.2)
            aborted.append(f"row{rows.count - len(aborted)}")
            await llm.abort(aborted[-1])

    params = [sampling(40, [truth] if i == 0 else (), i, temperature=0) for i in range(12)]
    task = loop.create_task(abort_some())
    completions = rows(params)
    loop.run_until_complete(task)
    whole = [list(c.token_ids) for c in completions if c.finish_reason != "abort"]
    assert 9 <= len(whole) < 12 and all(tokens == truth for tokens in whole)
    for completion in completions:
        assert list(completion.token_ids) == truth[: len(completion.token_ids)]


def test_refits(llm, rows, loop, random_model):
    """Drafts of other weights cost no correctness, and each version sends histories again."""
    params = sampling(24, temperature=0.01, seed=6)
    made = AsyncSpeculativeLLM(llm, ClaimingCache(), CONFIG)
    loop.run_until_complete(epoch(made, PROMPTS[:1] * 2, params=params))
    greedy = [sampling(24, temperature=0)] * 2
    (old, _) = rows(greedy, PROMPTS[:2])
    try:
        llm.rpc(refitted, None, (str(random_model), 0.05))
        loop.run_until_complete(made.set_policy_version(1))
        _, metrics = loop.run_until_complete(epoch(made, PROMPTS[:1] * 2, params=params))
        assert metrics.tree_drafted_tokens > 0
        drafted = rows(greedy, PROMPTS[:2])  # by their prompt's tokens
        assert list(drafted[0].token_ids) != list(old.token_ids)
        llm.rpc(forget)  # as if the prompt had made room
        plain = rows(greedy, PROMPTS[:2])
        assert llm.rpc(seen)["prompts"] == 0
        assert [list(c.token_ids) for c in drafted] == [list(c.token_ids) for c in plain]
        loop.run_until_complete(made.set_policy_version(2))
        _, metrics = loop.run_until_complete(epoch(made, PROMPTS[:1], params=params))
        assert metrics.tree_tokens / metrics.tree_steps > 2.5
        assert llm.rpc(seen)["responses"] >= 2
    finally:
        llm.rpc(refitted, None, (str(random_model), 0.0))
        loop.run_until_complete(llm.reset_prefix_cache())


def test_histories_sent_ahead_draft_for_requests_that_bring_nothing(llm, rows, loop):
    """The root is found by tokens; a later turn's prompt begins with it."""
    later = [*PROMPTS[0], 3, 4, 5, 6]
    params = [sampling(20, temperature=0)] * 3
    prompts = [PROMPTS[0], PROMPTS[1], later]
    plain = [list(completion.token_ids) for completion in rows(params, prompts)]
    assert llm.rpc(seen)["prompts"] == 0
    histories = [(PROMPTS[0], [plain[0], plain[2]]), (PROMPTS[1], [plain[1]])]
    sent = loop.run_until_complete(send_histories(llm, histories))
    assert sent == [{"prompts": 2, "responses": 3}]
    again = loop.run_until_complete(send_histories(llm, histories))
    assert again == sent and llm.rpc(seen)["responses"] == 3  # each is there once
    assert [list(completion.token_ids) for completion in rows(params, prompts)] == plain
    steps, tokens, *_ = llm.rpc(seen)["totals"]
    assert tokens == 60 and tokens / steps > 3
    with pytest.raises(ConfigError, match=r"histories\[0\], response 1: must be a sequence of"):
        send_histories(llm, [(PROMPT, [[1], "12"])])
    # What only the worker knows; its error comes back, and the engine goes on.
    with pytest.raises(Exception, match=f"prompt: must have token ids of 0 to {VOCABULARY - 1}"):
        loop.run_until_complete(send_histories(llm, [([VOCABULARY], [[1]])]))
    assert len(rows([sampling(3)])[0].token_ids) == 3


def test_where_the_package_is_no_plugin_it_is_refused_in_one_line(llm, monkeypatch):
    """VLLM would draft n-grams of its own in the engine's other process."""
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    with pytest.raises(ConfigError, match="installed by pip and VLLM_PLUGINS") as raised:
        AsyncSpeculativeLLM(llm, ClaimingCache(), CONFIG)
    assert "\n" not in str(raised.value)
