"""New weights for a real AsyncLLM while its rows are running.

One engine drafts by the V1 proposer, the other has no drafter. What a token's log-prob should be is
computed by transformers, in float32: by the weights of the token's own policy version, on KV of
these or of the old ones. Rows have no seeds of their own, with which vLLM's CPU build fails where a
prompt takes several steps.
"""

import asyncio
import itertools

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams

from nemo_specrl import Finish, SpecRLConfig
from nemo_specrl.engine.async_engine import AsyncSpeculativeLLM
from nemo_specrl.engine.drafters.method import engine_options
from nemo_specrl.engine.outputs import rollout_info
from nemo_specrl.engine.vllm.compat import made_so_far
from nemo_specrl.engine.vllm.refit import RefitExtension
from nemo_specrl.errors import ConfigError
from tests.conftest import make_async_engine, weights_of
from tests.engine.test_async_engine import ClaimingCache
from tests.support.engines import DRAFTS, LOSSLESS, VOCABULARY, chi_squared, draft, sampling

needs_proposer = pytest.mark.skipif(not DRAFTS, reason="this vLLM has no custom proposers")
FAITHFUL = SpecRLConfig(enabled=True, preset="faithful", fresh_fraction=0.0)
ROUNDS = SpecRLConfig(enabled=True, preset="lossless", tree={"method": "rounds"})
PROMPT = [1, *(3 + i % 12 for i in range(70))]  # more than two blocks of KV
LENGTH = 100
TOLERANCE = 1e-3
ERROR_RATE = 1e-4


def load(worker, path):
    """To be run in the worker."""
    RefitExtension.specrl_refit(worker, load_file(path).items())


@pytest.fixture(scope="module")
def policies(random_model, tmp_path_factory):
    """Weights of even policy versions and of odd ones: a file, and transformers' model of them."""
    from transformers import Qwen3ForCausalLM

    made = []
    for noise in (0.0, 0.05):
        weights = weights_of(random_model, noise=noise, seed=1)
        path = tmp_path_factory.mktemp("policy") / "weights.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in weights}, path)
        model = Qwen3ForCausalLM.from_pretrained(random_model, dtype=torch.float32)
        with torch.no_grad():
            for name, tensor in weights:
                model.get_parameter(name).copy_(tensor.float())
        made.append((str(path), model))
    return made


def start_engine(model, loop, **options):
    return make_async_engine(
        model,
        loop,
        max_num_seqs=32,
        max_num_batched_tokens=128,
        long_prefill_token_threshold=32,  # a prompt takes several steps
        enable_prefix_caching=True,
        **options,
    )


@pytest.fixture(scope="module")
def drafting(random_model, loop):
    llm = start_engine(random_model, loop, **engine_options(LOSSLESS))
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def plain(random_model, loop):
    llm = start_engine(random_model, loop)
    yield llm
    llm.shutdown()


class Run:
    """An engine with the weights of version 0, a cache, and rows that are asked for one by one."""

    def __init__(self, llm, policies, loop, config):
        self.llm, self.policies, self.cache = llm, policies, ClaimingCache()
        loop.run_until_complete(self.load(0))
        self.made = AsyncSpeculativeLLM(llm, self.cache, config)
        loop.run_until_complete(self.made.set_policy_version(0))
        self.asked = 0

    async def load(self, version):
        await self.llm.collective_rpc(load, args=(self.policies[version % 2][0],))

    async def refit(self, **options):
        version = self.made.policy_version + 1
        await self.made.refit(lambda: self.load(version), version, **options)

    async def row(self, length=LENGTH, greedy=False):
        self.asked += 1
        params = sampling(length, seed=None, ignore_eos=True)
        if greedy:
            params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
        stream = self.made.generate(
            {"prompt_token_ids": list(PROMPT)}, params, f"{id(self)}-{self.asked}"
        )
        return [output async for output in stream][-1]

    def begin(self, rows, **options):
        return [asyncio.ensure_future(self.row(**options)) for _ in range(rows)]

    async def until_all_have(self, tokens, tasks):
        """Wait until each of the rows that were begun last has some tokens."""
        await asyncio.sleep(0)
        for i, task in enumerate(tasks, start=self.asked - len(tasks) + 1):
            while (self.made_so_far(i) or 0) < tokens and not task.done():
                await asyncio.sleep(0.001)

    def made_so_far(self, row):
        return made_so_far(self.llm, f"{id(self)}-{row}")


@pytest.fixture(
    params=[
        pytest.param(LOSSLESS, marks=needs_proposer, id="lossless"),
        pytest.param(FAITHFUL, id="faithful"),
    ]
)
def run(request, policies, loop):
    llm = request.getfixturevalue("drafting" if request.param is LOSSLESS else "plain")
    return Run(llm, policies, loop, request.param)


@pytest.fixture
def lossless(drafting, policies, loop):
    return Run(drafting, policies, loop, LOSSLESS)


@pytest.fixture
def faithful(plain, policies, loop):
    return Run(plain, policies, loop, FAITHFUL)


def logprobs_of(model, tokens):
    """Log-probs of all tokens at each position of responses, float32 [rows, n, vocabulary]."""
    ids = torch.tensor([[*PROMPT, *row] for row in tokens])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, len(PROMPT) - 1 : -1]
    return torch.log_softmax(logits, -1).numpy()


def values(logprobs, tokens):
    """Those of the tokens themselves, float32 [n], of one response."""
    return logprobs[np.arange(len(tokens)), tokens]


def logprobs_on_old_kv(old, new, tokens, made):
    """Log-probs where ``new`` goes on from what ``old`` has computed for the first tokens.

    The last token that the old weights have sampled is not in their KV yet.
    """
    ids = torch.tensor([[*PROMPT, *tokens]])
    kept = len(PROMPT) + made - 1
    with torch.no_grad():
        first = old(input_ids=ids[:, :kept], use_cache=True)
        second = new(input_ids=ids[:, kept:], past_key_values=first.past_key_values)
    logits = torch.cat([first.logits, second.logits], 1)[0, len(PROMPT) - 1 : -1]
    return torch.log_softmax(logits, -1).numpy()


def engine_logprobs(completion):
    pairs = zip(completion.logprobs, completion.token_ids, strict=True)
    return np.array([position[token].logprob for position, token in pairs])


@pytest.mark.parametrize("recompute", [True, False])
def test_each_token_has_the_version_whose_weights_made_it(run, policies, loop, recompute):
    """Log-probs of both parts of a row, and of rows that begin after the refit."""
    (_, old), (_, new) = policies

    async def span_a_refit():
        tasks = run.begin(6)
        await run.until_all_have(5, tasks)
        await run.refit(recompute_kv=recompute, fingerprint=7)
        return [output.outputs[0] for output in await asyncio.gather(*tasks)]

    apart = []
    for completion in loop.run_until_complete(span_a_refit()):
        rollout, tokens = rollout_info(completion).rollout, list(completion.token_ids)
        versions = rollout.birth_versions
        assert versions[0] == 0 and versions[-1] == 1 and (np.diff(versions) >= 0).all()
        assert rollout.policy_version == 1 and rollout.fresh and rollout.fingerprint == 0
        made = int((versions == 0).sum())
        by_old = values(logprobs_of(old, [tokens])[0], tokens)
        by_new = values(logprobs_of(new, [tokens])[0], tokens)
        expected = by_new
        if not recompute:
            expected = values(logprobs_on_old_kv(old, new, tokens, made), tokens)
            assert np.abs(expected - by_new)[made:].max() > 10 * TOLERANCE
        got = engine_logprobs(completion)
        assert np.abs(got - np.where(versions == 0, by_old, expected)).max() < TOLERANCE
        assert np.array_equal(rollout.logprobs, rollout.birth_logprobs)
        assert np.abs(got - rollout.logprobs).max() < 1e-5
        apart.append(np.abs(by_old - by_new))
    # The other version's weights would have given something else.
    assert (np.concatenate(apart) > 10 * TOLERANCE).mean() > 0.5

    output = loop.run_until_complete(run.row())
    (completion,), tokens = output.outputs, list(output.outputs[0].token_ids)
    assert output.num_cached_tokens == 0
    rollout = rollout_info(completion).rollout
    assert set(rollout.birth_versions) == {1} and rollout.fingerprint == 7
    by_new = values(logprobs_of(new, [tokens])[0], tokens)
    assert np.abs(engine_logprobs(completion) - by_new).max() < TOLERANCE
    assert run.made.metrics.cache_errors == run.made.metrics.uncached_rows == 0


@needs_proposer
def test_rows_that_span_refits_have_the_distribution_of_their_versions(lossless, policies, loop):
    """600 rows of 8 tokens under weights that change again and again, with drafts.

    The version of a token is known before it is drawn, so that its place in the distribution of
    that version, given the tokens before it, is uniform: chi-squared over 20 cells, over all tokens
    of all rows. Error rate 1e-4. By the other version's distribution it is not.
    """
    run = lossless

    async def rows():
        await asyncio.gather(*run.begin(32, length=8))
        tasks = run.begin(600, length=8)
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.05)
            await run.refit()
        return [output.outputs[0] for output in await asyncio.gather(*tasks)]

    completions = loop.run_until_complete(rows())
    tokens = np.array([c.token_ids for c in completions])
    versions = np.array([rollout_info(c).birth_versions for c in completions])
    assert (versions[:, 0] != versions[:, -1]).sum() > 50
    loop.run_until_complete(run.made.count_tree_drafts())
    assert run.made.metrics.tree_accepted_tokens > 100
    both = np.stack([np.exp(logprobs_of(model, tokens.tolist())) for _, model in policies])
    uniforms = np.random.default_rng(0).random(tokens.shape)

    def p_value(policy):
        p = np.take_along_axis(both, policy[None, ..., None], 0)[0]
        own = np.take_along_axis(p, tokens[..., None], -1)[..., 0]
        below = np.take_along_axis(p.cumsum(-1), tokens[..., None], -1)[..., 0] - own
        places = (below + uniforms * own).clip(0, 1 - 1e-9)
        counts = np.bincount((places * 20).astype(int).ravel(), minlength=20).astype(float)
        return chi_squared(counts, np.full(20, tokens.size / 20))

    assert p_value(versions % 2) > ERROR_RATE
    assert p_value((versions + 1) % 2) < 1e-6


def test_a_verification_that_spans_a_refit_is_made_anew(faithful, policies, loop):
    """Drafts whose prefill takes six steps, among which the weights change several times."""
    run, rows = faithful, 24
    random = np.random.default_rng(0)
    responses = [random.integers(3, VOCABULARY, LENGTH).tolist() for _ in range(rows)]
    run.made.cache.put(
        [
            draft(tokens, sample_index=i, prompt=PROMPT, finish=Finish.LENGTH)
            for i, tokens in enumerate(responses)
        ]
    )
    again = itertools.count()
    generate = run.llm.generate

    def counted(*args, **kwargs):
        next(again)
        return generate(*args, **kwargs)

    async def verified():
        await run.refit()
        tasks = run.begin(rows)
        while not any(run.made_so_far(i + 1) is not None for i in range(rows)):
            await asyncio.sleep(0.001)
        for _ in range(4):
            await run.refit(recompute_kv=False)  # a prefill goes on where it was
            await asyncio.sleep(0.1)
        return [output.outputs[0] for output in await asyncio.gather(*tasks)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.llm, "generate", counted)
        completions = loop.run_until_complete(verified())
    assert next(again) > rows  # some were verified more than once
    assert run.made.metrics.drafts == run.made.metrics.full_reuses == rows
    for completion in completions:
        rollout, tokens = rollout_info(completion).rollout, list(completion.token_ids)
        assert set(rollout.birth_versions) == {0}  # of the drafts
        model = policies[rollout.policy_version % 2][1]
        by_own = values(logprobs_of(model, [tokens])[0], tokens)
        assert np.abs(rollout.logprobs - by_own).max() < TOLERANCE


def test_an_engine_that_its_user_has_paused_stays_paused(faithful, loop):
    run = faithful

    async def refitted():
        tasks = run.begin(4)
        await run.until_all_have(5, tasks)
        await run.made.pause_generation(mode="keep", clear_cache=False)
        await run.refit()
        assert await run.llm.is_paused()
        await run.refit()
        await run.llm.resume_generation()
        return [rollout_info(o.outputs[0]).rollout for o in await asyncio.gather(*tasks)]

    for rollout in loop.run_until_complete(refitted()):
        assert set(rollout.birth_versions) == {0, 2} and rollout.policy_version == 2


def test_rows_that_come_during_a_refit_are_of_the_new_weights(faithful, loop):
    """Also those that the cache knows nothing of."""
    run = faithful

    async def refitted():
        async def update():
            tasks.extend(run.begin(3, length=8))
            tasks.extend(run.begin(1, length=8, greedy=True))
            await asyncio.sleep(0.05)
            await run.load(1)

        tasks = []
        await run.made.refit(update, 1)
        return [output.outputs[0] for output in await asyncio.gather(*tasks)]

    completions = loop.run_until_complete(refitted())
    assert [len(c.token_ids) for c in completions] == [8] * 4
    versions = [set(info.birth_versions) for c in completions if (info := rollout_info(c))]
    assert versions and all(made == {1} for made in versions)


def test_what_the_update_raises_is_raised_and_the_rows_go_on(faithful, loop):
    run = faithful

    async def refitted():
        async def update():
            raise OSError("the trainer is gone")

        tasks = run.begin(3)
        await run.until_all_have(5, tasks)
        with pytest.raises(OSError, match="the trainer is gone"):
            await run.made.refit(update, 1)
        assert not await run.llm.is_paused()
        return [rollout_info(o.outputs[0]).rollout for o in await asyncio.gather(*tasks)]

    rollouts = loop.run_until_complete(refitted())
    assert run.made.policy_version == 1
    assert all(set(rollout.birth_versions) == {0, 1} for rollout in rollouts)


def test_in_rounds_it_is_refused_while_rows_run(plain, policies, loop):
    run = Run(plain, policies, loop, ROUNDS)

    async def refitted():
        tasks = run.begin(3)
        await run.until_all_have(2, tasks)
        with pytest.raises(ConfigError, match="requests are still running"):
            await run.refit()
        assert run.made.policy_version == 0
        outputs = await asyncio.gather(*tasks)
        await run.refit()
        return outputs

    for output in loop.run_until_complete(refitted()):
        assert len(output.outputs[0].token_ids) == LENGTH
    assert run.made.policy_version == 1
