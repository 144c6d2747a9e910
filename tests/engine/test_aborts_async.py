"""Aborts, pauses and bad data on a real AsyncLLM: a row ends by itself, under its caller's id."""

import asyncio
import math

import pytest
from vllm import SamplingParams

from nemo_specrl import Finish, SpecRLConfig
from nemo_specrl.engine.async_engine import AsyncSpeculativeLLM
from nemo_specrl.engine.outputs import rollout_info
from nemo_specrl.engine.vllm.compat import made_so_far
from nemo_specrl.errors import ConfigError
from nemo_specrl.trainer.data.toy_tasks import encode
from tests.engine.test_async_engine import ClaimingCache
from tests.engine.test_async_engine import async_llm as async_llm  # a fixture
from tests.engine.test_rows import BAD, cured, is_bad, poisoned, values
from tests.support.engines import PROMPT, draft, sampling

FAITHFUL = SpecRLConfig(enabled=True, preset="faithful", lenience=1e6, fresh_fraction=0.0)
ROUNDS = SpecRLConfig(
    enabled=True, preset="lossless", tree={"method": "rounds", "max_draft_tokens": 6}
)
DRAFT = encode("12+34=46;#46")


class Acting:
    """The engine, which does something at some point of a row's way.

    Args:
        llm: the real one.
        phase: "verification": when it begins; "between": when it has ended; "decoding": when the
            row's next request is in the engine.
    """

    def __init__(self, llm, phase):
        self.llm, self.phase, self.act, self.acting = llm, phase, None, None
        self.requests = 0

    def __getattr__(self, name):
        return getattr(self.llm, name)

    async def _act(self, phase):
        if phase == self.phase and self.acting is None:
            self.acting = asyncio.ensure_future(self.act())
            await asyncio.sleep(0)

    async def generate(self, prompt, params, request_id, **kwargs):
        self.requests += 1
        verifying = params.prompt_logprobs is not None and params.temperature == 0
        if verifying:
            await self._act("verification")
        elif self.phase == "decoding" and self.acting is None:
            self.acting = asyncio.ensure_future(self._when_it_decodes(request_id))
        async for output in self.llm.generate(prompt, params, request_id, **kwargs):
            if verifying:
                await self._act("between")
            yield output

    async def _when_it_decodes(self, request_id):
        processor = self.llm.output_processor
        while request_id not in processor.external_req_ids:
            await asyncio.sleep(0)
        [name] = processor.external_req_ids[request_id]
        while processor.request_states[name].detokenizer.num_output_tokens() < 5:
            await asyncio.sleep(0)
        await self.act()


class ActingCache(ClaimingCache):
    acting = None

    async def claim(self, key, policy_version):
        if self.acting is not None:
            acting, self.acting = self.acting, None
            self.task = asyncio.ensure_future(acting())
            await asyncio.sleep(0)
        return await super().claim(key, policy_version)


def one(made, name="mine", tokens=150, seed=1):
    async def generate():
        params = sampling(tokens, seed=seed, ignore_eos=True)
        prompt = {"prompt_token_ids": PROMPT}
        [output] = [o async for o in made.generate(prompt, params, name)]
        assert output.request_id == name and output.finished
        assert output.prompt_token_ids == PROMPT
        return output.outputs[0]

    return generate()


def made_with(llm, config=FAITHFUL, drafts=()):
    return AsyncSpeculativeLLM(llm, ActingCache(drafts), config, policy_version=1)


@pytest.mark.parametrize("way", ["ours", "vLLM's"])
@pytest.mark.parametrize("phase", ["verification", "between", "decoding"])
def test_an_aborted_row_comes_back_as_aborted(async_llm, loop, phase, way):
    engine = Acting(async_llm, phase)
    made = made_with(engine, drafts=[draft(DRAFT)])
    engine.act = lambda: (made if way == "ours" else async_llm).abort("mine")
    if way == "vLLM's" and phase != "decoding":
        pytest.skip("vLLM does not know a row that has no request in the engine")

    async def run():
        completion = await one(made)
        await engine.acting
        return completion

    completion = loop.run_until_complete(run())
    assert completion.finish_reason == "abort" and completion.stop_reason is None
    n = len(completion.token_ids)
    assert n < 150 and len(completion.logprobs) == n
    now = [r for r in made.cache.all() if r.policy_version == 1]
    if phase == "decoding":
        [partial] = now  # kept as what an interrupt finds is
        assert partial.finish is Finish.PARTIAL and n >= len(DRAFT) + 5
        assert partial.tokens.tolist() == list(completion.token_ids)
    else:
        assert not now and n in (0, len(DRAFT)) and engine.requests == 1
    assert made.metrics.cache_errors == made.metrics.uncached_rows == 0
    assert not async_llm.output_processor.has_unfinished_requests()
    # The engine and the class go on.
    engine.phase = None
    assert loop.run_until_complete(one(made, tokens=20)).finish_reason == "length"


@pytest.mark.parametrize("stop", [None, ["never"]], ids=["no stop string", "a stop string"])
@pytest.mark.parametrize("drafted", [False, True], ids=["afresh", "drafted"])
def test_what_a_cancelled_row_has_decoded_is_kept(async_llm, loop, drafted, stop):
    """Behind the accepted draft, too; with a stop string its outputs come token by token."""
    params = sampling(170, seed=1, ignore_eos=True, stop=stop)

    async def row(made):
        prompt = {"prompt_token_ids": PROMPT}
        return [output async for output in made.generate(prompt, params, "mine")]

    async def cancelled(made):
        task = asyncio.ensure_future(row(made))
        while (made_so_far(async_llm, "mine") or 0) < 10:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    drafts = [draft(DRAFT)] if drafted else []
    made, whole = (made_with(async_llm, drafts=drafts) for _ in range(2))
    loop.run_until_complete(cancelled(made))
    assert not async_llm.output_processor.has_unfinished_requests()
    [output] = loop.run_until_complete(row(whole))
    [kept] = [r for r in made.cache.all() if r.policy_version == 1]
    assert kept.finish is Finish.PARTIAL and made.cache.claims.held(b"", None) == []
    n = len(kept)
    assert (10 + len(DRAFT) if drafted else 10) <= n < 170
    assert kept.tokens.tolist() == list(output.outputs[0].token_ids[:n])
    assert kept.logprobs == pytest.approx(values(output.outputs[0])[:n], abs=1e-3)
    assert rollout_info(loop.run_until_complete(row(made))[0].outputs[0]).drafted == n


def test_a_row_is_aborted_while_it_asks_the_cache(async_llm, loop):
    made = made_with(async_llm, drafts=[draft(DRAFT)])
    made.cache.acting = lambda: made.abort(["mine", "another"])
    completion = loop.run_until_complete(one(made))
    assert completion.finish_reason == "abort" and len(completion.token_ids) == 0
    assert made.cache.puts == 0


@pytest.mark.parametrize("greedy", [False, True], ids=["drafted", "without the cache"])
def test_a_row_is_aborted_while_it_waits_for_new_weights(async_llm, loop, greedy):
    made = made_with(async_llm)
    params = sampling(150, seed=1, ignore_eos=True)
    params.temperature = 0.0 if greedy else 1.0

    async def row():
        stream = made.generate({"prompt_token_ids": PROMPT}, params, "mine")
        return [output async for output in stream][-1].outputs[0]

    async def update():
        waiting = asyncio.ensure_future(row())
        await asyncio.sleep(0.1)  # it has asked the cache
        aborting = asyncio.ensure_future(made.abort("mine"))
        await asyncio.sleep(0)
        assert not waiting.done()
        return waiting, aborting

    async def run():
        completion, _ = await asyncio.gather(*await made.refit(update, 2))
        return completion

    completion = loop.run_until_complete(run())
    assert completion.finish_reason == "abort" and len(completion.token_ids) < 150
    assert not len(made._rows) and not async_llm.output_processor.has_unfinished_requests()


def test_other_rows_are_not_aborted_and_places_are_given_back(async_llm, loop):
    """In rounds: 16 rows have a place, the others wait for one; every second one is aborted."""
    made = made_with(async_llm, ROUNDS)

    async def run():
        rows = [asyncio.ensure_future(one(made, f"row {i}", 40, seed=i)) for i in range(24)]
        while made.metrics.tree_tokens < 30:
            await asyncio.sleep(0)
        await made.abort([f"row {i}" for i in range(0, 24, 2)])
        _, waiting = await asyncio.wait(rows[::2], timeout=60)
        assert not waiting
        return await asyncio.gather(*rows)

    completions = loop.run_until_complete(run())
    assert [c.finish_reason for c in completions] == ["abort", "length"] * 12
    assert [len(c.token_ids) for c in completions[1::2]] == [40] * 12
    assert any(0 < len(c.token_ids) < 40 for c in completions[::2])
    assert [len(c.token_ids) for c in completions[16::2]] == [0] * 4
    for rollout in made.cache.all():
        assert (rollout.finish is Finish.PARTIAL) == (len(rollout) < 40)
    assert made._decoding._value == 16


@pytest.mark.parametrize("config", [FAITHFUL, ROUNDS], ids=["faithful", "rounds"])
@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_rows_in_all_phases_at_a_pause(async_llm, loop, config, mode):
    """24 rows, of which 16 fit in the engine: some are verified, some decode, some wait."""
    drafts = [draft(DRAFT, sample_index=s) for s in range(0, 24, 2)]
    made = made_with(async_llm, config, drafts)

    async def run():
        rows = [asyncio.ensure_future(one(made, f"row {i}", 60, seed=i)) for i in range(24)]
        while made.metrics.tree_tokens + made.metrics.draft_tokens < 40:
            await asyncio.sleep(0)
        pausing = asyncio.ensure_future(made.pause_generation(mode=mode))
        if mode != "wait":
            await pausing
        await asyncio.sleep(0)
        late = asyncio.ensure_future(one(made, "late", 5))
        await pausing
        assert await async_llm.is_paused()
        if mode == "keep":
            assert not all(row.done() for row in rows)
        else:
            _, waiting = await asyncio.wait(rows, timeout=60)
            assert not waiting
        assert not late.done()
        await async_llm.resume_generation()
        return await asyncio.gather(*rows), await late

    completions, late = loop.run_until_complete(run())
    assert late.finish_reason == "length" and len(late.token_ids) == 5
    reasons = {c.finish_reason for c in completions}
    assert "abort" in reasons if mode == "abort" else reasons == {"length"}
    for completion in completions:
        assert (len(completion.token_ids) == 60) == (completion.finish_reason == "length")
    kept = [r for r in made.cache.all() if r.policy_version == 1]
    lengths = [len(r) for r in kept if r.finish is Finish.LENGTH]
    whole = sum(completion.finish_reason == "length" for completion in completions)
    assert sorted(lengths) == [5] + [60] * whole
    assert all(len(r) < 60 for r in kept if r.finish is Finish.PARTIAL)


def worker_poisoned(worker):
    poisoned(worker.model_runner.model)


def worker_cured(worker):
    cured(worker.model_runner.model)


@pytest.mark.parametrize("config", [FAITHFUL, ROUNDS], ids=["faithful", "rounds"])
def test_rows_of_nan_cost_their_places_alone(async_llm, loop, config):
    made = made_with(async_llm, config)
    prompts = [PROMPT, BAD] * 4

    async def row(i, prompt):
        params = sampling(8, seed=i, ignore_eos=True)
        outputs = [o async for o in made.generate(prompt, params, f"row {i}")]
        return outputs[-1].outputs[0]

    async def run():
        await async_llm.collective_rpc(worker_poisoned)
        try:
            return await asyncio.gather(*(row(i, p) for i, p in enumerate(prompts)))
        finally:
            await async_llm.collective_rpc(worker_cured)
            await async_llm.reset_prefix_cache()

    completions = loop.run_until_complete(run())
    wrong = [is_bad(p, c.token_ids) for p, c in zip(prompts, completions, strict=True)]
    assert [rollout_info(c) is None for c in completions] == wrong
    assert [any(map(math.isnan, values(c))) for c in completions] == wrong
    assert 4 <= made.metrics.uncached_rows == sum(wrong) < 8
    assert len(made.cache.all()) == 8 - sum(wrong)


def test_switched_off_nothing_is_checked(async_llm, loop):
    """Two samples at another temperature, from an engine that speculation would refuse."""
    made = AsyncSpeculativeLLM(async_llm, ClaimingCache(), SpecRLConfig(enabled=False))

    async def run():
        params = SamplingParams(temperature=0.8, n=2, max_tokens=4, ignore_eos=True)
        return [o async for o in made.generate("12+34=?", params, "mine")]

    outputs = loop.run_until_complete(run())
    assert {output.request_id for output in outputs} == {"mine"}
    lengths = {c.index: len(c.token_ids) for output in outputs for c in output.outputs}
    assert lengths == {0: 4, 1: 4}


def test_a_prompt_that_cannot_be_is_named(async_llm, loop):
    made = made_with(async_llm)

    async def run(prompt):
        return [o async for o in made.generate(prompt, sampling(4), "mine")]

    for prompt, line in (([], "has no token"), ([5] * 192, "has 192 tokens"), ([99], "token 99")):
        with pytest.raises(ConfigError, match=rf"prompts\[0\]: .*{line}"):
            loop.run_until_complete(run({"prompt_token_ids": prompt}))
    assert not made._rows and not async_llm.output_processor.has_unfinished_requests()
