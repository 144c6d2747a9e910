"""Lossless drafting on the real engine: the policy's distribution, whatever the drafts are.

Each statistical test states its error rate; draws are seeded, so that a test that passes goes on
passing.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.sample import rejection_sampler

from nemo_specrl import Finish, Rollout, SpecRLConfig
from nemo_specrl.engine.drafters.histories import PendingHistories
from nemo_specrl.engine.outputs import rollout_info
from nemo_specrl.engine.sampling_rules import check_verifiable
from nemo_specrl.engine.vllm.compat import EXTRA_ARG
from nemo_specrl.engine.vllm.refit import refit
from nemo_specrl.errors import UnsupportedSampling
from nemo_specrl.speculation.adaptive_length import DraftLengths
from nemo_specrl.speculation.draft_selection import Row, response_id
from nemo_specrl.speculation.suffix_tree import CHANCES, MIN_PROBABILITY
from tests.conftest import DictCache, weights_of
from tests.support.engines import LOSSLESS as CONFIG
from tests.support.engines import (
    PROMPT,
    VOCABULARY,
    chi_squared,
    distribution,
)
from tests.support.lossless import (
    DRAFTS_OF,
    EOS,
    ERROR_RATE,
    KEY,
    ROWS,
    bent,
    check_distribution,
    good_drafts,
    made_with,
    params,
    rollouts,
    sample,
)


@pytest.fixture
def llm(drafting_llm):
    return drafting_llm


@pytest.mark.parametrize("drafts", DRAFTS_OF)
def test_the_distribution_is_the_policys_whatever_is_drafted(llm, proposer, random_model, drafts):
    cached = DRAFTS_OF[drafts](llm)
    if drafts == "of other weights":
        refit(llm, weights_of(random_model, noise=0.05, seed=3))
    made = made_with(llm, DictCache(rollouts(cached)), CONFIG)
    outputs, tokens = sample(made, ROWS, 3)
    assert made.metrics.tree_drafted_tokens > ROWS / 4
    check_distribution(llm, np.array(tokens))
    assert all(rollout_info(o.outputs[0]).fresh for o in outputs)


@pytest.mark.parametrize("drafts", ["unlikely", "siblings alone"])
def test_a_sampler_that_is_bent_is_seen(llm, proposer, monkeypatch, drafts):
    """The control: drafts make a difference that the test of the distribution tells."""
    monkeypatch.setattr(
        rejection_sampler, "rejection_sample", bent(rejection_sampler.rejection_sample)
    )
    made = made_with(llm, DictCache(rollouts(DRAFTS_OF[drafts](llm))), CONFIG)
    _, tokens = sample(made, ROWS, 3)
    with pytest.raises(AssertionError):
        check_distribution(llm, np.array(tokens))


def test_the_distribution_is_the_policys_after_epochs_of_its_own_rollouts(
    llm, proposer, random_model
):
    """Each epoch drafts from those before it, under weights that have moved towards its drafts."""
    cache = DictCache()

    for epoch in range(3):
        refit(llm, weights_of(random_model, noise=0.02 * epoch, seed=epoch))
        _, tokens = sample(made_with(llm, cache, CONFIG, version=epoch), ROWS // 2, 3)
    assert len(cache.all()) == ROWS // 2
    check_distribution(llm, np.array(tokens))


def shaped(p, temperature, top_p=1.0):
    """What vLLM draws from instead of p under these parameters."""
    p = p ** (1 / temperature)
    p /= p.sum()
    order = np.argsort(p)
    dropped = np.cumsum(p[order]) <= 1 - top_p
    dropped[-1] = False
    p[order[dropped]] = 0
    return p / p.sum()


@pytest.mark.parametrize("shape", [{"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.4}])
def test_with_trees_alone_other_sampling_has_its_own_distribution(llm, proposer, shape):
    """The first token, the second behind the commonest ones, and the third behind those."""
    cached = rollouts(good_drafts(llm))
    made = made_with(llm, DictCache(cached), CONFIG)
    _, tokens = sample(made, ROWS // 2, 3, **shape)
    assert made.metrics.tree_drafted_tokens > ROWS / 8
    assert made.metrics.tree_accepted_tokens > ROWS / 40
    tokens, tests = np.array(tokens), []

    def check(prefix):
        behind = tokens[(tokens[:, : len(prefix)] == prefix).all(axis=1), len(prefix)]
        p = shaped(distribution(llm, prefix), **shape)
        counts = np.bincount(behind, minlength=VOCABULARY)
        assert not counts[p == 0].any()
        if (len(behind) * p >= 5).sum() >= 3:
            tests.append(chi_squared(counts[p > 0], len(behind) * p[p > 0], cells=3))
        return np.argsort(-counts)[:3].tolist()

    for first in check([]):
        for second in check([first])[:1]:
            check([first, second])
    assert len(tests) >= 4 and min(tests) > ERROR_RATE / len(tests)
    # The test can tell: what is drawn is not the raw distribution.
    raw = chi_squared(
        np.bincount(tokens[:, 0], minlength=VOCABULARY), len(tokens) * distribution(llm)
    )
    assert raw < 1e-6
    made_now = [r for r in made.cache.all() if r.policy_version == 1]
    assert len(made_now) == len(tokens) and not any(r.raw for r in made_now)


def test_bad_words_never_come_up_and_all_else_keeps_its_distribution(llm, proposer):
    """A word of one token and one of two, both of which are drafted."""
    decode = llm.get_tokenizer().decode

    def likeliest(prefix):
        found = np.argsort(-distribution(llm, prefix)).tolist()
        return [token for token in found if len(decode([token]).strip()) == 1]

    first, second = likeliest([])[:2]
    behind = next(token for token in likeliest([second]) if token != first)
    words = [decode([first]), decode([second, behind])]
    drafts = [[first, second, behind], [second, behind, first], *good_drafts(llm)]
    made = made_with(llm, DictCache(rollouts(drafts)), CONFIG)
    _, sampled = sample(made, ROWS // 2, 3, bad_words=words)
    assert made.metrics.tree_drafted_tokens > ROWS / 8
    tokens = np.array(sampled)
    assert not (tokens == first).any()
    pairs = np.concatenate([tokens[:, :2], tokens[:, 1:]])
    assert not (pairs == [second, behind]).all(axis=1).any()

    def p_value(place, prefix, *forbidden):
        there = tokens[(tokens[:, : len(prefix)] == prefix).all(axis=1), place]
        p = distribution(llm, prefix)
        p[list(forbidden)] = 0
        counts = np.bincount(there, minlength=VOCABULARY)[p > 0]
        return chi_squared(counts, len(there) * p[p > 0] / p.sum(), cells=3)

    common = int(np.bincount(tokens[tokens[:, 0] != second, 0]).argmax())
    tests = [
        p_value(0, [], first),
        p_value(1, [second], first, behind),
        p_value(1, [common], first),
    ]
    assert min(tests) > ERROR_RATE / len(tests)
    # Without the rule they would have come up.
    assert distribution(llm)[first] > 0.01 and distribution(llm, [second])[behind] > 0.01


def test_rollouts_of_other_sampling_are_drafts_for_trees_alone(llm, proposer):
    """After a switch to prefix reuse they are not verified, and after the way back they draft."""
    cache = DictCache()
    made = made_with(llm, cache, CONFIG, version=0)
    sample(made, 4, 12, temperature=0.7)
    reuse = SpecRLConfig(enabled=True, preset="faithful", fresh_fraction=0.0, tree=CONFIG.tree)
    made = made_with(llm, DictCache(cache.all()), reuse)
    outputs, _ = sample(made, 4, 12)
    assert made.metrics.drafts == made.metrics.refused_drafts == 0
    assert made.metrics.tree_drafted_tokens > 0
    assert all(rollout_info(o.outputs[0]).fresh for o in outputs)
    assert all(r.raw for r in made.cache.all())
    again = made_with(llm, DictCache(made.cache.all()), reuse, version=2)
    sample(again, 4, 12)
    assert again.metrics.drafts == 4  # these are of raw sampling
    # A response that was cut off is not continued by verification under other sampling.
    for rollout in cache.all():
        object.__setattr__(rollout, "finish", Finish.PARTIAL)
        object.__setattr__(rollout, "fingerprint", 5)
    made = made_with(llm, DictCache(cache.all()), CONFIG, version=0)
    made.fingerprint = 5
    outputs, _ = sample(made, 4, 20, temperature=0.7)
    assert made.metrics.drafts == 0 and all(rollout_info(o.outputs[0]).fresh for o in outputs)


def test_top_k_is_verified_in_v2_alone():
    """By the V2 runner, whose own tests sample so (drafters/v2/test_engine.py)."""
    likeliest = params(5, temperature=0.8, top_k=5)
    check_verifiable(likeliest, trees="v2")
    for trees in ("proposer", None):
        with pytest.raises(UnsupportedSampling, match=r"top_k = 5|temperature = 0\.8"):
            check_verifiable(likeliest, trees=trees)


@pytest.mark.parametrize("option", [{"min_p": 0.1}, {"logit_bias": {3: 1.0}}])
def test_what_vllm_takes_with_no_drafter_is_refused_with_that_reason(llm, proposer, option):
    """A vLLM that takes it has to be looked at again."""
    (name,) = option
    refused = "not yet supported with speculative decoding"
    with pytest.raises(Exception, match=f"{name}.* {refused}"):  # of another class in each version
        llm.generate({"prompt_token_ids": PROMPT}, params(3, **option), use_tqdm=False)
    for trees in ("proposer", "v2"):
        with pytest.raises(UnsupportedSampling, match=f"{name} = .* every engine with a drafter"):
            check_verifiable(params(3, **option), trees=trees)
    with pytest.raises(UnsupportedSampling, match=f"{name} = .* every engine with a drafter"):
        sample(made_with(llm, DictCache(), CONFIG), 2, 3, **option)


def test_other_sampling_is_refused_by_name_where_more_than_trees_verifies(llm, proposer):
    made = made_with(llm, DictCache(), CONFIG)
    for option in ({"top_k": 5}, {"repetition_penalty": 1.1}, {"min_tokens": 2}):
        with pytest.raises(UnsupportedSampling, match=f"{next(iter(option))} = .* shown to hold"):
            sample(made, 2, 3, **{"detokenize": True, **option})
    made.fresh_fraction = 0.5  # lossless again only by the configuration's own share
    sample(made, 2, 3, temperature=0.7)
    reuse = SpecRLConfig(enabled=True, preset="faithful", tree=CONFIG.tree)
    for option in ({"temperature": 0.7}, {"top_p": 0.9}):
        with pytest.raises(UnsupportedSampling, match="or preset: lossless with an engine that"):
            sample(made_with(llm, DictCache(), reuse), 2, 3, **option)


def test_behind_an_accepted_prefix_trees_draft_and_the_rest_is_as_without(llm, proposer):
    """Prefix reuse and trees together: conditionals behind the prefix are the policy's."""
    config = SpecRLConfig(
        enabled=True, preset="faithful", fresh_fraction=0.0, tree={"enabled": True}
    )
    first = good_drafts(llm)[0][:1]
    now = math.log(distribution(llm)[first[0]])  # as likely as at birth: accepted for certain
    cached = [
        Rollout(KEY, i, first, np.float32([now - 1e-3]), Finish.PARTIAL, 0) for i in range(ROWS)
    ]
    made = made_with(llm, DictCache(cached), config)
    outputs, tokens = sample(made, ROWS, 4)
    assert all(rollout_info(o.outputs[0]).accepted == 1 for o in outputs)
    assert made.metrics.tree_drafted_tokens > ROWS / 4
    tests = []
    tokens = np.array(tokens)
    counts = np.bincount(tokens[:, 1], minlength=VOCABULARY)
    tests.append(chi_squared(counts, ROWS * distribution(llm, first)))
    common = int(counts.argmax())
    behind = tokens[tokens[:, 1] == common, 2]
    p = distribution(llm, [*first, common])
    tests.append(chi_squared(np.bincount(behind, minlength=VOCABULARY), len(behind) * p))
    assert min(tests) > ERROR_RATE / 2


def test_logprobs_are_the_policys_for_drafted_tokens_too(llm, proposer):
    cached = good_drafts(llm)
    made = made_with(llm, DictCache(rollouts(cached)), CONFIG)
    outputs, tokens = sample(made, 32, 12)
    decoded, steps = made.metrics.decoded_tokens, made.metrics.tree_steps
    assert 0 < made.metrics.tree_accepted_tokens <= made.metrics.tree_drafted_tokens
    # Each step of a row yields a token and what is accepted; the last one is not drafted behind.
    assert decoded - 32 <= steps + made.metrics.tree_accepted_tokens <= decoded
    for output, response in zip(outputs, tokens, strict=True):
        (again,) = llm.generate(
            {"prompt_token_ids": PROMPT + response},
            SamplingParams(max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False),
            use_tqdm=False,
        )
        expected = np.asarray(again.prompt_logprobs.logprobs)[-len(response) :]
        reported = np.asarray(output.outputs[0].logprobs.logprobs)
        assert reported.shape == expected.shape
        assert np.allclose(reported, expected, atol=1e-4)


def test_budgets_stop_tokens_and_the_models_limit_hold_inside_a_draft(llm, proposer):
    long = [5, 6, 7, 8] * 50
    cache = DictCache(rollouts([long] * 4))
    for budget in (1, 2, 5, 7):
        _, tokens = sample(made_with(llm, cache, CONFIG), 8, budget)
        assert [len(t) for t in tokens] == [budget] * 8
    room = 192 - len(PROMPT)
    _, tokens = sample(made_with(llm, cache, CONFIG), 4, room)
    assert [len(t) for t in tokens] == [room] * 4
    # A response ends at its first stop token although a draft goes on behind it.
    _, responses = sample(made_with(llm, cache, CONFIG), 64, 40, ignore_eos=False)
    ended = [t for t in responses if EOS in t]
    assert ended and all(t.index(EOS) == len(t) - 1 for t in ended)


def adaptive(proposer, token_s, monkeypatch):
    """Have draft lengths be decided on an engine whose steps take 5 ms and ``token_s`` a token."""
    lengths = proposer.lengths = DraftLengths(CHANCES, MIN_PROBABILITY, 64 * 192)
    observe = lengths.observe

    def observed(step, seconds):
        assert 0 < seconds < 60
        observe(step, 5e-3 + token_s * (step.rows + step.drafted))

    monkeypatch.setattr(lengths, "observe", observed)


@pytest.mark.parametrize("drafts", DRAFTS_OF)
def test_lengths_by_worth_and_price_leave_the_distribution_the_policys(
    llm, proposer, drafts, monkeypatch
):
    """Tokens cost little here, so that many are drafted, as long as some are accepted."""
    adaptive(proposer, 1e-6, monkeypatch)
    made = made_with(llm, DictCache(rollouts(DRAFTS_OF[drafts](llm))), CONFIG)
    _, tokens = sample(made, ROWS, 3)
    assert made.metrics.tree_drafted_tokens > ROWS / 8
    check_distribution(llm, np.array(tokens))


def test_drafts_are_as_long_as_they_are_worth_it(llm, proposer, monkeypatch):
    cache = rollouts([[5, 6, 7, 8] * 10] * 4)  # hardly likely
    drafted, cuts = [], []
    for token_s in (1e-7, 1e-2):
        proposer.__init__(llm.llm_engine.vllm_config)
        adaptive(proposer, token_s, monkeypatch)
        made = made_with(llm, DictCache(cache), CONFIG)
        sample(made, 256, 40)
        made.metrics.tree_drafted_tokens = 0
        sample(made, 256, 40, first_seed=1000)
        drafted.append(made.metrics.tree_drafted_tokens)
        cuts.append(made.metrics.as_dict()["spec_rl/tree_least_chance"])
    assert drafted[0] > 20 * drafted[1]
    assert cuts[0] < 0.3 < 0.8 < cuts[1] <= 1


def test_the_same_seeds_and_trees_give_the_same_rollouts(llm, proposer):
    """Without lengths that go by the time of steps."""
    assert proposer.lengths is None
    cache = rollouts(good_drafts(llm))
    runs = []
    for _ in range(2):
        proposer.__init__(llm.llm_engine.vllm_config)
        runs.append(sample(made_with(llm, DictCache(cache), CONFIG), 24, 10)[1])
    assert runs[0] == runs[1]


def test_the_memory_of_trees_keeps_its_bound_inside_the_engine(llm, proposer):
    proposer.trees.max_bytes = 60_000
    prompts = [[*PROMPT, i] for i in range(3, 23)]
    made = made_with(llm, DictCache(), CONFIG)
    outputs = made.generate(
        [{"prompt_token_ids": p} for p in prompts],
        [params(60, seed=i) for i in range(len(prompts))],
        use_tqdm=False,
    )
    assert [len(o.outputs[0].token_ids) for o in outputs] == [60] * len(prompts)
    trees = proposer.trees
    assert 0 < len(trees) < len(prompts)
    assert trees.nbytes == sum(t.index.nbytes for t in trees._trees.values()) <= 60_000


def test_a_history_is_sent_once_for_each_policy_version():
    def request(sample_index):
        row = Row(KEY, sample_index)
        return SimpleNamespace(row=row, prompt_tokens=PROMPT, media=None)

    def history(version, sample_index):
        histories.add(cached, version)
        sent = histories.with_history(request(sample_index), SamplingParams(), version)
        return sent.extra_args[EXTRA_ARG][2]

    histories, cached = PendingHistories(), {KEY: rollouts([[3, 4], [5]])}
    everything = [(response_id(i, 0), np.int32(t).tobytes()) for i, t in enumerate([[3, 4], [5]])]
    assert [history(1, 0), history(1, 1), history(1, 2)] == [everything, [], []]
    assert [history(2, 0), history(2, 1)] == [everything, []]


def test_greedy_requests_and_those_of_others_are_not_drafted_for(llm, proposer):
    made = made_with(llm, DictCache(rollouts(good_drafts(llm))), CONFIG)
    made.generate([PROMPT] * 4, params(5, temperature=0.0), use_tqdm=False)
    llm.generate({"prompt_token_ids": PROMPT}, params(5), use_tqdm=False)
    assert proposer.counts.steps == 0


def test_greedy_rows_draft_where_they_are_told_to_and_are_those_of_plain_decoding(llm, proposer):
    """As an evaluation asks for them; the second one drafts from the first, and both from siblings.

    Drafts that are wrong from some token on change nothing.
    """
    greedy = params(12, temperature=0.0)
    [plain] = [o.outputs[0].token_ids for o in llm.generate([PROMPT], greedy, use_tqdm=False)]
    cache = DictCache(rollouts([[*plain[:7], 3, 3]]))
    for version in (1, 2):
        made = made_with(llm, cache, CONFIG, version=version)
        made.drafts_greedy = True
        outputs = made.generate([PROMPT] * 2, greedy, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == [plain] * 2
        assert made.metrics.tree_accepted_tokens > 0
        assert [list(r.tokens) for r in cache.all()] == [plain] * 2
    assert made.metrics.tree_tokens >= 2 * made.metrics.tree_steps


def test_callers_extra_args_stay(llm, proposer):
    made = made_with(llm, DictCache(), CONFIG)
    mine = params(3, extra_args={"mine": 1})
    made.generate([PROMPT], mine, use_tqdm=False)
    assert mine.extra_args == {"mine": 1}
    [row] = proposer._rows.values()
    assert row is not None and EXTRA_ARG not in mine.extra_args


def test_a_cache_that_fails_costs_no_rollout(llm, proposer):
    class Broken(DictCache):
        def get(self, keys):
            raise OSError("gone")

    made = made_with(llm, Broken(), CONFIG)
    _, tokens = sample(made, 8, 4)
    assert [len(t) for t in tokens] == [4] * 8
    assert made.metrics.cache_errors == 1
