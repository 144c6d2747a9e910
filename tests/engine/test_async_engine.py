"""AsyncSpeculativeLLM on a real AsyncLLM, with rows that come one by one and run concurrently."""

import asyncio
from types import SimpleNamespace

import pytest
from vllm import SamplingParams

from nemo_specrl import SpecRLConfig, prompt_key
from nemo_specrl.cache.cluster.sample_index_leases import SampleIndexLeases
from nemo_specrl.engine.async_engine import AsyncSpeculativeLLM
from nemo_specrl.engine.outputs import rollout_info
from nemo_specrl.errors import ConfigError, UnsupportedSampling
from nemo_specrl.rollout import Claim
from nemo_specrl.trainer.data.toy_tasks import encode
from tests.conftest import DictCache, make_async_engine
from tests.support.engines import NEVER, PROMPT, STRICT, draft, sampling

OTHER = [1, *encode("45-21=?")]


class ClaimingCache(DictCache):
    """A cache in this process that assigns sample indices."""

    def __init__(self, rollouts=()):
        self.claims = SampleIndexLeases()
        super().__init__(rollouts)

    async def claim(self, key, policy_version):
        rollouts = list(self.rollouts.get(key, {}).values())
        sample_index = self.claims.claim(key, rollouts, policy_version)
        return Claim(sample_index, rollouts, [rollout.outline for rollout in rollouts])

    def release(self, key, sample_index):
        self.claims.release(key, sample_index)

    def put(self, rollouts):
        for rollout in rollouts:
            self.claims.release(rollout.key, rollout.sample_index)
        super().put(rollouts)

    def flush(self):
        pass


class CacheInParts(ClaimingCache):
    """A cache that gives the whole group to the first row of a prompt under a policy version.

    The others get the rollouts of their sample index. The first answer comes behind
    ``before_whole`` others, as a large one may.
    """

    def __init__(self, rollouts=(), before_whole=0):
        super().__init__(rollouts)
        self.brought, self.before_whole = set(), before_whole
        self.parts = 0

    async def claim(self, key, policy_version):
        claim = await super().claim(key, policy_version)
        if (key, policy_version) in self.brought:
            self.parts += 1
            own = [r for r in claim.rollouts if r.sample_index == claim.sample_index]
            return claim._replace(rollouts=own)
        self.brought.add((key, policy_version))
        while self.parts < self.before_whole:
            await asyncio.sleep(0)
        return claim


@pytest.fixture(scope="module")
def async_llm(random_model, loop):
    llm = make_async_engine(random_model, loop, max_num_seqs=16, enable_prefix_caching=True)
    yield llm
    llm.shutdown()


@pytest.fixture
def ask(async_llm, loop):
    """A function that generates rows concurrently and returns their completions in order."""
    count = iter(range(10**6))

    def ask(made, rows, params=None):
        async def one(prompt, parameters):
            stream = made.generate(
                {"prompt_token_ids": list(prompt)}, parameters, f"row-{next(count)}"
            )
            outputs = [output async for output in stream]
            assert outputs[-1].prompt_token_ids == list(prompt)
            return outputs[-1].outputs[0]

        async def everything():
            parameters = params or [sampling(seed=i) for i in range(len(rows))]
            return await asyncio.gather(*map(one, rows, parameters))

        return loop.run_until_complete(everything())

    return ask


@pytest.fixture
def speculative(async_llm):
    def make(cache, *, version=0, llm=None, lenience=1.0, enabled=True):
        config = SpecRLConfig(
            enabled=enabled, preset="faithful", lenience=lenience, fresh_fraction=0.0
        )
        return AsyncSpeculativeLLM(llm or async_llm, cache, config, policy_version=version)

    return make


ROWS = [PROMPT, OTHER] * 6


def test_cold_it_gives_what_the_engine_gives_and_keeps_it(ask, speculative):
    cache = ClaimingCache()
    ours = ask(speculative(cache), ROWS)
    theirs = ask(speculative(ClaimingCache(), enabled=False), ROWS)
    assert [c.token_ids for c in ours] == [c.token_ids for c in theirs]
    assert [c.finish_reason for c in ours] == [c.finish_reason for c in theirs]
    for key in map(prompt_key, (PROMPT, OTHER)):
        assert sorted(cache.rollouts[key]) == list(range(6))  # a sample index for each row
    kept = sorted(tuple(r.tokens.tolist()) for r in cache.all())
    assert kept == sorted(tuple(c.token_ids) for c in ours)


@pytest.mark.parametrize("kind", [ClaimingCache, CacheInParts])
def test_of_the_same_weights_every_draft_stands_once(ask, speculative, kind):
    cache = kind()
    first = ask(speculative(cache), ROWS)
    again = speculative(cache, version=1)
    second = ask(again, ROWS)
    assert sorted(tuple(c.token_ids) for c in second) == sorted(tuple(c.token_ids) for c in first)
    assert again.metrics.full_reuses == again.metrics.drafts == again.metrics.rows == len(ROWS)
    assert again.metrics.decoded_tokens == 0
    assert again.metrics.lookup_s > 0 and again.metrics.verify_s > 0  # sums over the rows
    assert sorted(cache.rollouts[prompt_key(PROMPT)]) == list(range(6))
    # These weights have served these sample indices already; further rows get further ones.
    third = ask(again, ROWS)
    assert all(rollout_info(c).fresh for c in third)
    assert sorted(cache.rollouts[prompt_key(PROMPT)]) == list(range(12))


def test_what_is_rejected_is_decoded_anew(ask, speculative):
    tokens = encode("12+34=46;#46")
    cache = ClaimingCache([draft(tokens, NEVER, sample_index=s) for s in range(6)])
    made = speculative(cache, version=1, lenience=STRICT)
    completions = ask(made, [PROMPT] * 6)
    assert made.metrics.drafts == 6 and made.metrics.accepted_tokens == 0
    assert made.metrics.decoded_tokens == sum(len(c.token_ids) for c in completions)
    assert {r.policy_version for r in cache.all()} == {1}


def test_a_part_of_a_draft_is_continued(ask, speculative):
    cache = ClaimingCache()
    whole = ask(speculative(cache), [PROMPT] * 4, [sampling(12, seed=i) for i in range(4)])
    long = ask(speculative(cache, version=1), [PROMPT] * 4, [sampling(40, seed=9)] * 4)
    starts = sorted(tuple(c.token_ids[:12]) for c in long)
    assert starts == sorted(tuple(c.token_ids) for c in whole)
    assert any(0 < rollout_info(c).accepted < len(c.token_ids) for c in long)
    for completion in long:
        assert len(completion.logprobs) == len(completion.token_ids)


def test_a_stop_string_across_the_seam_ends_the_response(ask, speculative):
    tokens = encode("12+34=46;")
    params = sampling(40, seed=None, stop=["46;#"], include_stop_str_in_output=True)
    for seed in range(40):  # until the engine happens to decode what completes it
        cache = ClaimingCache([draft(tokens)])
        params.seed = seed
        [completion] = ask(speculative(cache, version=1), [PROMPT], [params])
        if completion.token_ids[len(tokens) : len(tokens) + 1] == encode("#"):
            assert completion.token_ids == [*tokens, *encode("#")]
            assert completion.stop_reason == "46;#"
            return
    pytest.fail("the engine never decoded what completes the stop string")


def test_a_version_begins_by_a_coroutine_that_drops_the_old_blocks(async_llm, loop, speculative):
    made = speculative(ClaimingCache(), version=1)
    with pytest.raises(ConfigError, match=r"use `await set_policy_version\(2\)`"):
        made.policy_version += 1
    assert made.policy_version == 1

    async def cached_tokens(name):
        prompt = {"prompt_token_ids": [3 + i % 12 for i in range(100)]}
        params = SamplingParams(temperature=0.0, max_tokens=1)
        async for output in async_llm.generate(prompt, params, name):
            return output.num_cached_tokens

    async def versions():
        await cached_tokens("cold")
        warm = await cached_tokens("warm")
        await made.set_policy_version(2, fingerprint=5)
        return warm, await cached_tokens("cold again")

    assert loop.run_until_complete(versions()) == (96, 0)
    assert (made.policy_version, made.fingerprint) == (2, 5)


@pytest.mark.parametrize("ours", [True, False], ids=["a row", "a plain request"])
def test_no_version_begins_while_requests_run(async_llm, loop, speculative, ours):
    """Neither while the engine decodes for a row, nor between two requests of a row."""
    cache = ClaimingCache([draft(encode("12+34=46;#46"))] if ours else ())
    made = speculative(cache, version=1)

    class Watched:
        """The engine, and what becomes of a new version when an output comes out of it."""

        def __init__(self):
            self.refusals = []

        def __getattr__(self, name):
            return getattr(async_llm, name)

        async def generate(self, prompt, params, request_id, **kwargs):
            async for output in async_llm.generate(prompt, params, request_id, **kwargs):
                if ours or not self.refusals:  # the end of a plain request comes a little late
                    with pytest.raises(ConfigError, match="requests are still running") as raised:
                        await made.set_policy_version(2)
                    self.refusals.append(str(raised.value))
                yield output

    engine = made.llm = Watched()

    async def row():
        params = sampling(100, ignore_eos=True)
        stream = (made if ours else engine).generate(
            {"prompt_token_ids": list(PROMPT)}, params, f"row-of-version-{ours}"
        )
        outputs = [output async for output in stream]
        await made.set_policy_version(2)
        return outputs[-1].outputs[0]

    completion = loop.run_until_complete(row())
    assert len(completion.token_ids) == 100 and made.policy_version == 2
    assert len(engine.refusals) >= (2 if ours else 1)  # at the verification and at decoding
    if ours:
        [rollout] = cache.all()
        assert rollout.policy_version == 1


def test_a_second_adapter_within_a_version_is_refused(loop, speculative):
    made = speculative(ClaimingCache())

    def row(name):
        adapter = SimpleNamespace(lora_name=name, lora_int_id=1, lora_path=f"/{name}")
        stream = made.generate(
            {"prompt_token_ids": list(PROMPT)}, sampling(), "with-adapter", lora_request=adapter
        )
        return loop.run_until_complete(anext(stream))

    # vLLM's own error, of a type that depends on its version: this engine has no adapters.
    with pytest.raises(Exception, match="LoRA is not enabled"):
        row("a")
    with pytest.raises(ConfigError, match=r"version 0 has generated with 'a' .*; raise policy_ver"):
        row("b")


class Unfinished:
    """The engine, of which a row never gets an output: it fails, or waits until it is cancelled."""

    def __init__(self, llm):
        self.llm, self.error = llm, None

    def __getattr__(self, name):
        return getattr(self.llm, name)

    async def generate(self, prompt, params, request_id, **kwargs):
        if self.error is not None:
            raise self.error
        await asyncio.Event().wait()
        yield


def test_a_row_that_fails_or_is_cancelled_gives_its_sample_index_back(
    ask, speculative, async_llm, loop
):
    cache, engine = ClaimingCache(), Unfinished(async_llm)
    made = speculative(cache, llm=engine)

    async def cancelled():
        stream = made.generate({"prompt_token_ids": list(PROMPT)}, sampling(seed=0), "cancelled")
        row = asyncio.ensure_future(anext(stream))
        while not cache.claims.held(b"", None):
            await asyncio.sleep(0)
        row.cancel()
        await asyncio.gather(row, return_exceptions=True)

    loop.run_until_complete(cancelled())
    assert cache.claims.held(b"", None) == []
    engine.error = RuntimeError("no engine")
    with pytest.raises(RuntimeError, match="no engine"):
        ask(made, [PROMPT])
    assert cache.claims.held(b"", None) == [] and not cache.rollouts


@pytest.mark.parametrize("answer", [None, RuntimeError("no shard")])
def test_without_an_answer_of_the_cache_rows_are_decoded_plainly(ask, speculative, answer):
    class Silent(ClaimingCache):
        async def claim(self, key, policy_version):
            if answer is not None:
                raise answer
            return None

    cache = Silent()
    made = speculative(cache)
    ours = ask(made, ROWS[:4])
    theirs = ask(speculative(cache, enabled=False), ROWS[:4])
    assert [c.token_ids for c in ours] == [c.token_ids for c in theirs]
    assert made.metrics.cache_errors == (0 if answer is None else 4)
    assert cache.puts == 0


def test_greedy_rows_and_several_responses(ask, speculative):
    cache = ClaimingCache()
    ask(speculative(cache), [PROMPT], [SamplingParams(temperature=0.0, max_tokens=5)])
    assert not cache.rollouts
    with pytest.raises(ConfigError, match="n = 2: must be 1"):
        ask(speculative(cache), [PROMPT], [sampling(n=2)])
    with pytest.raises(UnsupportedSampling, match=r"top_p = 0\.9"):
        ask(speculative(cache), [PROMPT], [sampling(top_p=0.9)])
