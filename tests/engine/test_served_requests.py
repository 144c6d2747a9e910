"""Requests without a row, as vLLM's HTTP server makes them, on a real AsyncLLM that drafts."""

import asyncio
import itertools

import pytest
from vllm import CompletionOutput, RequestOutput, SamplingParams
from vllm.sampling_params import RequestOutputKind

from nemo_specrl import Finish, Rollout, prompt_key
from nemo_specrl.engine.drafters.method import engine_options
from nemo_specrl.engine.served_requests import ServingSpeculativeLLM, _appended
from tests.conftest import make_async_engine
from tests.engine.test_async_engine import ClaimingCache
from tests.support.engines import DRAFTS, LOSSLESS

pytestmark = pytest.mark.skipif(not DRAFTS, reason="this vLLM has no custom proposers")
LENGTH = 36
SAID = [3, 4, 5]  # by an environment
prompts = ([1, 16, 8 + n, 9, 11] for n in itertools.count())
"""New ones, of which the engine's trees know nothing yet."""


@pytest.fixture(scope="module")
def async_llm(random_model, loop):
    llm = make_async_engine(random_model, loop, max_num_seqs=8, **engine_options(LOSSLESS))
    yield llm
    llm.shutdown()


class Counting(ClaimingCache):
    """A cache that writes down for which prompts it was asked."""

    def __init__(self, rollouts=(), broken=False, late=0):
        super().__init__(rollouts)
        self.asked, self.broken, self.late = [], broken, late

    async def claim(self, key, policy_version):
        self.asked.append(key)
        if self.broken:
            raise OSError("no shard")
        if len(self.asked) <= self.late:
            return None
        return await super().claim(key, policy_version)


@pytest.fixture
def served(async_llm, loop):
    """A function that makes an engine of a cache, and ask: a function that asks it for turns."""
    names = itertools.count()

    def serve(cache, version=1):
        made = ServingSpeculativeLLM(async_llm, cache, LOSSLESS, policy_version=version)
        notes = []

        async def one(prompt, options):
            # The likeliest tokens, though not greedily: such requests are not drafted for.
            params = SamplingParams(
                **{"top_p": 1e-6, "max_tokens": LENGTH, "ignore_eos": True, **options}
            )
            stream = made.serve(
                {"prompt_token_ids": prompt}, params, f"turn-{next(names)}", note=notes.append
            )
            return [output async for output in stream]

        def ask(*prompts, **options):
            async def together():
                return await asyncio.gather(*(one(prompt, options) for prompt in prompts))

            return [
                outputs[-1].outputs[0].token_ids for outputs in loop.run_until_complete(together())
            ]

        def accepted():
            before = made.metrics.tree_accepted_tokens
            loop.run_until_complete(made.count_tree_drafts())
            return made.metrics.tree_accepted_tokens - before

        accepted()
        return made, notes, ask, accepted

    return serve


def plain(async_llm, loop, prompt):
    """What the engine says to a prompt, without drafts and without learning from it."""

    async def ask():
        params = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
        stream = async_llm.generate({"prompt_token_ids": prompt}, params, f"plain-{prompt}")
        return [output async for output in stream][-1].outputs[0].token_ids

    return loop.run_until_complete(ask())


def test_turns_draft_from_conversations_that_the_cache_knows(async_llm, served, loop):
    root = next(prompts)
    first = plain(async_llm, loop, root)
    later = [*root, *first, *SAID]
    second = plain(async_llm, loop, later)
    said = [*first, *SAID, *second]
    known = Rollout(prompt_key(root), 0, said, [-0.1] * len(said), Finish.STOP, 0, raw=False)
    cache = Counting([known])
    made, notes, ask, accepted = served(cache)
    assert ask(root) == [first]
    assert accepted() > LENGTH / 2
    assert ask(later, root) == [second, first]
    assert accepted() > LENGTH
    assert cache.asked == [prompt_key(root)]  # once for all of its requests
    assert cache.claims.claim(prompt_key(root), [known], 1) == 0  # and no index is kept back
    assert sorted(turn.prompt for turn in notes) == [root, root, later]
    assert all(turn.versions.of(2, 0).tolist() == [1, 1] for turn in notes)
    assert made.metrics.rows == 3 and made.metrics.decoded_tokens == 3 * LENGTH
    assert made.metrics.cache_errors == 0 and list(cache.all()) == [known]
    loop.run_until_complete(made.set_policy_version(2))
    ask(root)
    assert cache.asked == [prompt_key(root)] * 2  # the next weights ask again
    assert notes[-1].versions.of(1, 0).tolist() == [2]


def test_what_nobody_knows_drafts_from_its_own_group(async_llm, served, loop):
    root = next(prompts)
    expected = plain(async_llm, loop, root)
    for cache in (Counting(), Counting(broken=True)):
        made, _, ask, accepted = served(cache)
        assert ask(root, root) == [expected] * 2
        assert ask(root) == [expected]
        assert accepted() > LENGTH / 2
        assert made.metrics.cache_errors == cache.broken


def test_an_answer_that_was_late_is_asked_for_again(served):
    root = next(prompts)
    cache = Counting(late=1)
    made, _, ask, _ = served(cache)
    for _ in range(3):
        ask(root)
    assert cache.asked == [prompt_key(root)] * 2 and made.metrics.cache_errors == 0


def test_streams_are_noted_whole(served):
    root = next(prompts)
    _, notes, ask, _ = served(Counting())
    ask(root, output_kind=RequestOutputKind.DELTA)
    [whole] = ask(root)
    assert [turn.tokens for turn in notes] == [whole, whole]


def test_no_output_of_a_stream_copies_the_response():
    """The list that has it stays the same one: copies would take a time that grows with n²."""
    params = SamplingParams(output_kind=RequestOutputKind.DELTA)
    so_far = tokens = []
    for new in ([5, 6], [], [7]):
        completion = CompletionOutput(0, "", new, None, None)
        output = RequestOutput("row", None, [1], None, [completion], False)
        tokens = _appended(tokens, output, params)
        assert tokens is so_far
    assert tokens == [5, 6, 7]


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"n": 2}, {"min_tokens": 3}])
def test_what_cannot_be_drafted_for_is_decoded_plainly(served, options):
    root = next(prompts)
    cache = Counting()
    made, notes, ask, accepted = served(cache)
    ask(root, **options)
    assert cache.asked == notes == [] and accepted() == made.metrics.rows == 0
