"""Verification rounds on the real engine: the policy's distribution, whatever the drafts are.

Each statistical test states its error rate; draws are seeded, so that a test that passes goes on
passing.
"""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy import stats
from vllm import SamplingParams

from nemo_specrl import Finish, Rollout, SpecRLConfig, prompt_key
from nemo_specrl.engine.drafters import prompt_logprob_drafter
from nemo_specrl.engine.drafters.method import engine_options
from nemo_specrl.engine.outputs import rollout_info
from nemo_specrl.engine.vllm.refit import refit
from nemo_specrl.errors import UnsupportedSampling
from tests.conftest import DictCache, make_engine, weights_of
from tests.support.engines import PROMPT, VOCABULARY, chi_squared, distribution
from tests.support.lossless import (
    DRAFTS_OF,
    EOS,
    ERROR_RATE,
    KEY,
    ROWS,
    check_distribution,
    good_drafts,
    likely,
    made_with,
    params,
    rollouts,
    sample,
)

TREE = {"method": "rounds", "max_draft_tokens": 6}
CONFIG = SpecRLConfig(enabled=True, preset="lossless", tree=TREE)


@pytest.fixture(scope="session")
def processed_engine(random_model):
    """An engine that reports log-probs of what it samples from, as NeMo-RL's do."""
    return make_engine(
        random_model,
        max_num_seqs=16,
        max_logprobs=VOCABULARY,
        logprobs_mode="processed_logprobs",
    )


@pytest.mark.parametrize("drafts", DRAFTS_OF)
def test_the_distribution_is_the_policys_whatever_is_drafted(llm, random_model, drafts):
    cached = DRAFTS_OF[drafts](llm)
    if drafts == "of other weights":
        refit(llm, weights_of(random_model, noise=0.05, seed=3))
    made = made_with(llm, DictCache(rollouts(cached)), CONFIG)
    outputs, tokens = sample(made, ROWS, 3)
    metrics = made.metrics
    assert metrics.tree_drafted_tokens > ROWS / 4 and metrics.refused_drafts == 0
    assert 0 < metrics.tree_accepted_tokens < metrics.tree_drafted_tokens
    check_distribution(llm, np.array(tokens))
    assert all(rollout_info(o.outputs[0]).fresh for o in outputs)


def test_the_distribution_is_the_policys_after_epochs_of_its_own_rollouts(llm, random_model):
    """Each epoch drafts from those before it, under weights that have moved towards its drafts."""
    cache = DictCache()
    for epoch in range(3):
        refit(llm, weights_of(random_model, noise=0.02 * epoch, seed=epoch))
        _, tokens = sample(made_with(llm, cache, CONFIG, version=epoch), ROWS // 2, 3)
    assert len(cache.all()) == ROWS // 2
    check_distribution(llm, np.array(tokens))


def test_behind_an_accepted_prefix_trees_draft_and_the_rest_is_as_without(llm):
    """Prefix reuse and trees together: conditionals behind the prefix are the policy's."""
    config = SpecRLConfig(
        enabled=True, preset="faithful", fresh_fraction=0.0, tree={**TREE, "enabled": True}
    )
    first = good_drafts(llm)[0][:1]
    now = math.log(distribution(llm)[first[0]])  # as likely as at birth: accepted for certain
    # Rows with equal drafts begin together: they draft from responses that were there before. Of
    # many rows that have not gone on, the tree would look at these alone.
    batch = 60
    second = int(distribution(llm, first).argmax())
    longer = [*first, second, int(distribution(llm, [*first, second]).argmax())]
    cached = [
        Rollout(KEY, i, first, np.float32([now - 1e-3]), Finish.PARTIAL, 0) for i in range(batch)
    ]
    cached += [Rollout(KEY, batch + i, longer, [-1.0] * 3, Finish.LENGTH, 0) for i in range(8)]
    tokens, drafted = [], 0
    for version in range(1, 1 + ROWS // batch):
        made = made_with(llm, DictCache(cached), config, version=version)
        outputs, some = sample(made, batch, 4, first_seed=version * batch)
        assert all(rollout_info(o.outputs[0]).accepted == 1 for o in outputs)
        tokens += some
        drafted += made.metrics.tree_drafted_tokens
    assert drafted > ROWS / 4
    tokens = np.array(tokens)
    counts = np.bincount(tokens[:, 1], minlength=VOCABULARY)
    tests = [chi_squared(counts, ROWS * distribution(llm, first))]
    common = int(counts.argmax())
    behind = tokens[tokens[:, 1] == common, 2]
    p = distribution(llm, [*first, common])
    tests.append(chi_squared(np.bincount(behind, minlength=VOCABULARY), len(behind) * p))
    assert min(tests) > ERROR_RATE / 2


def test_rows_that_the_same_weights_make_again_are_independent_of_the_first_ones(llm):
    """The second call drafts from the first one's rollouts of the very rows that it makes."""
    cache = DictCache(rollouts(good_drafts(llm)))
    made = made_with(llm, cache, CONFIG)
    resumed = made_with(llm, cache, CONFIG)  # the same step in another process
    tokens = [
        np.array(sample(by, ROWS // 2, 3, first_seed=i * ROWS)[1])
        for i, by in enumerate([made, made, resumed])
    ]
    p = distribution(llm)
    counts = np.bincount(tokens[1][:, 0], minlength=VOCABULARY)
    assert chi_squared(counts, ROWS // 2 * p) > ERROR_RATE
    common = int(counts.argmax())
    behind = tokens[1][tokens[1][:, 0] == common, 1]
    expected = len(behind) * distribution(llm, [common])
    assert chi_squared(np.bincount(behind, minlength=VOCABULARY), expected) > ERROR_RATE
    for one, other in itertools.combinations(tokens, 2):
        equal = int((one[:, 0] == other[:, 0]).sum())
        test = stats.binomtest(equal, ROWS // 2, float((p**2).sum()))
        assert test.pvalue > ERROR_RATE / 3


def check_logprobs(llm, outputs, tokens, candidates):
    """Log-probs, ranks and candidates of responses against the engine's own for them as prompts."""
    for output, response in zip(outputs, tokens, strict=True):
        (again,) = llm.generate(
            {"prompt_token_ids": PROMPT + response},
            SamplingParams(max_tokens=1, prompt_logprobs=candidates, detokenize=False),
            use_tqdm=False,
        )
        reported = output.outputs[0].logprobs
        assert len(reported) == len(response)
        for token, ours, theirs in zip(
            response, reported, again.prompt_logprobs[-len(response) :], strict=True
        ):
            assert next(iter(ours)) == token and set(ours) == set(theirs)
            for candidate, entry in theirs.items():
                assert ours[candidate].logprob == pytest.approx(entry.logprob, abs=1e-4)
                assert ours[candidate].rank == entry.rank


@pytest.mark.parametrize("candidates", [0, 2, 6])
@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_logprobs_are_the_policys_for_every_token(
    request, llm, random_model, mode, candidates, monkeypatch
):
    """Accepted tokens, those behind a rejection, drawn here or by the engine, and plain ones."""
    engine = llm if mode == "raw" else request.getfixturevalue("processed_engine")
    if candidates == 0:
        monkeypatch.setattr(
            prompt_logprob_drafter, "CANDIDATES", 1
        )  # so that the engine draws most of the rest
    cached = likely(llm)
    made = made_with(engine, DictCache(rollouts(cached)), CONFIG)
    outputs, tokens = sample(made, 32, 12, logprobs=candidates)
    metrics = made.metrics
    assert 0 < metrics.tree_accepted_tokens < metrics.tree_drafted_tokens
    assert metrics.decoded_tokens == metrics.tree_tokens == metrics.response_tokens == 32 * 12
    check_logprobs(llm, outputs, tokens, candidates)


def test_text_and_the_names_of_tokens_are_as_plainly_decoded(llm):
    made = made_with(llm, DictCache(rollouts(good_drafts(llm))), CONFIG)
    outputs, tokens = sample(made, 8, 12, detokenize=True, flat_logprobs=False, logprobs=1)
    tokenizer = llm.get_tokenizer()
    for output, response in zip(outputs, tokens, strict=True):
        completion = output.outputs[0]
        assert completion.text == tokenizer.decode(response, skip_special_tokens=True)
        assert output.prompt_token_ids == PROMPT and output.prompt_logprobs is None
        for position in completion.logprobs:
            assert all(e.decoded_token == tokenizer.decode([t]) for t, e in position.items())


def test_budgets_and_the_models_limit_hold_inside_a_draft(llm):
    long = [5, 6, 7, 8] * 50
    cache = DictCache(rollouts([long] * 4))
    for budget in (1, 2, 5, 7):
        outputs, tokens = sample(made_with(llm, cache, CONFIG), 8, budget)
        assert [len(t) for t in tokens] == [budget] * 8
        assert {o.outputs[0].finish_reason for o in outputs} == {"length"}
    room = 192 - len(PROMPT)
    outputs, tokens = sample(made_with(llm, cache, CONFIG), 4, None)
    assert [len(t) for t in tokens] == [room] * 4
    assert {o.outputs[0].finish_reason for o in outputs} == {"length"}


@pytest.mark.parametrize("candidates", [1, 4])
def test_a_response_ends_at_its_first_stop_token(llm, candidates, monkeypatch):
    """Stop tokens that lie in drafts, and those that are drawn behind a rejection."""
    monkeypatch.setattr(prompt_logprob_drafter, "CANDIDATES", candidates)
    ended = [[token, EOS, 5, 6, 7, 8] for token in range(4, 12)]
    made = made_with(llm, DictCache(rollouts(ended)), CONFIG)
    outputs, tokens = sample(made, 256, 40, ignore_eos=False, stop_token_ids=[9])
    reasons = set()
    for output, response in zip(outputs, tokens, strict=True):
        completion = output.outputs[0]
        reasons.add((completion.finish_reason, completion.stop_reason))
        last = {("stop", None): EOS, ("stop", 9): 9}.get(
            (completion.finish_reason, completion.stop_reason)
        )
        stops = [i for i, token in enumerate(response) if token in (EOS, 9)]
        assert stops == ([] if last is None else [len(response) - 1])
        assert last is None or response[-1] == last
        assert last is not None or len(response) == 40
    assert reasons >= {("stop", None), ("stop", 9)}


@pytest.mark.parametrize("included", [False, True])
def test_stop_strings_end_a_response_wherever_they_begin(llm, included):
    """In drafts, across their ends, behind rejections and between rounds."""
    tokenizer = llm.get_tokenizer()
    drafts = [list(tokenizer.encode(text)) for text in ("12;34;56;78", "1+2=3;", "33;3", "+1;4")]
    made = made_with(llm, DictCache(rollouts(drafts)), CONFIG)
    options = {
        "stop": ["3", "1+", ";4"],
        "detokenize": True,
        "include_stop_str_in_output": included,
    }
    outputs, tokens = sample(made, 128, 30, **options)
    assert made.metrics.tree_accepted_tokens > 0
    found = set()
    for output, response in zip(outputs, tokens, strict=True):
        completion = output.outputs[0]
        text = tokenizer.decode(response, skip_special_tokens=True)
        stop = completion.stop_reason
        found.add(stop)
        before = tokenizer.decode(response[:-1], skip_special_tokens=True)
        assert not any(s in before for s in options["stop"])
        if stop is None:
            assert completion.finish_reason == "length" and completion.text == text
        else:
            assert completion.finish_reason == "stop" and text.endswith(stop)
            assert completion.text == (text if included else text[: -len(stop)])
        assert rollout_info(completion).rollout.finish is (
            Finish.LENGTH if stop is None else Finish.STOP_STRING
        )
    assert "3" in found


def test_the_same_seeds_and_trees_give_the_same_rollouts_and_other_seeds_others(llm):
    cached = rollouts(likely(llm))
    runs = [
        sample(made_with(llm, DictCache(cached), CONFIG, seed=seed), 24, 10)[1]
        for seed in (0, 0, 1)
    ]
    assert runs[0] == runs[1] != runs[2]


def test_greedy_requests_are_not_drafted_for_and_callers_parameters_stay(llm):
    made = made_with(llm, DictCache(rollouts(good_drafts(llm))), CONFIG)
    made.generate([PROMPT] * 4, params(5, temperature=0.0), use_tqdm=False)
    assert made.metrics.tree_requests == 0
    mine = params(5, seed=3, stop_token_ids=[9])
    before = repr(mine)
    made.generate([PROMPT] * 4, mine, use_tqdm=False)
    assert made.metrics.tree_requests >= 4 and repr(mine) == before


def test_several_rollouts_of_one_request_are_decoded_in_rounds(llm):
    made = made_with(llm, DictCache(rollouts(likely(llm))), CONFIG)
    [output] = made.generate([PROMPT], params(6, n=5, seed=1), use_tqdm=False)
    assert [c.index for c in output.outputs] == [0, 1, 2, 3, 4]
    assert all(len(c.token_ids) == 6 for c in output.outputs)
    assert len({tuple(c.token_ids) for c in output.outputs}) > 1
    assert made.metrics.tree_drafted_tokens > 0


def test_sampling_that_cannot_be_verified_is_refused(llm):
    made = made_with(llm, DictCache(), CONFIG)
    for option in ({"top_p": 0.9}, {"top_k": 5}, {"temperature": 0.7}, {"min_tokens": 2}):
        with pytest.raises(UnsupportedSampling, match=next(iter(option))):
            made.generate([PROMPT], params(4, **option), use_tqdm=False)


def test_a_draft_that_the_prefix_cache_covers_is_refused_and_the_distribution_stays(
    llm, monkeypatch
):
    """Where rows share blocks, some drafts have been computed already, without log-probs."""
    monkeypatch.setattr(prompt_logprob_drafter, "_salts", itertools.repeat(0))
    padding = [5] * (30 - len(PROMPT))  # drafts begin two tokens before a block ends
    first = int(distribution(llm, padding).argmax())
    second = int(distribution(llm, [*padding, first]).argmax())
    prompt = PROMPT + padding
    cached = [
        Rollout(prompt_key(prompt), i, [first, second] * 3, [-1.0] * 6, Finish.LENGTH, 0)
        for i in range(8)
    ]
    made = made_with(llm, DictCache(cached), CONFIG)
    outputs = made.generate(
        [prompt] * 3000, [params(4, seed=i) for i in range(3000)], use_tqdm=False
    )
    assert made.metrics.refused_drafts > 50
    tokens = np.array([o.outputs[0].token_ids for o in outputs])
    counts = np.bincount(tokens[:, 0], minlength=VOCABULARY)
    tests = [chi_squared(counts, 3000 * distribution(llm, padding))]
    behind = tokens[tokens[:, 0] == first, 1]
    p = distribution(llm, [*padding, first])
    tests.append(chi_squared(np.bincount(behind, minlength=VOCABULARY), len(behind) * p))
    assert min(tests) > ERROR_RATE / 2


def test_an_interrupted_row_is_kept_and_continued(llm):
    cache = DictCache(rollouts(good_drafts(llm)))
    made = made_with(llm, cache, CONFIG, version=1)
    made.fingerprint = 7  # only the very weights that began a row continue it
    steps = itertools.count()
    step = llm.llm_engine.step

    def interrupted():
        if next(steps) == 12:
            raise KeyboardInterrupt
        return step()

    llm.llm_engine.step = interrupted
    try:
        with pytest.raises(KeyboardInterrupt):
            sample(made, 8, 60)
    finally:
        del llm.llm_engine.step
    partial = {r.sample_index: r for r in cache.all() if r.policy_version == 1}
    assert len(partial) == 8
    assert all(r.finish is Finish.PARTIAL and len(r) >= 6 for r in partial.values())
    made = made_with(llm, cache, CONFIG, version=1)
    made.fingerprint = 7  # only the very weights that began a row continue it
    outputs, tokens = sample(made, 8, 60)
    for i, response in enumerate(tokens):
        begun = partial[i].tokens.tolist()
        assert response[: len(begun)] == begun and len(response) == 60
    check_logprobs(llm, outputs, tokens, 0)


def test_a_cache_that_fails_costs_no_rollout(llm):
    class Broken(DictCache):
        def get(self, keys):
            raise OSError("gone")

    made = made_with(llm, Broken(), CONFIG)
    _, tokens = sample(made, 8, 4)
    assert [len(t) for t in tokens] == [4] * 8
    assert made.metrics.cache_errors == 1


def test_drafts_with_tokens_that_the_model_does_not_know_end_before_them(llm):
    first = good_drafts(llm)[0][:1]
    made = made_with(llm, DictCache(rollouts([[*first, VOCABULARY + 9, 5]] * 4)), CONFIG)
    _, tokens = sample(made, 16, 6)
    assert [len(t) for t in tokens] == [6] * 16
    assert made.metrics.tree_drafted_tokens > 0


def test_an_engine_for_rounds_is_built_as_without_speculation():
    assert engine_options(CONFIG) == {}


def test_rows_take_fewer_steps_and_what_a_round_adds_is_a_few_tokens_of_prefill(llm):
    made = made_with(llm, DictCache(rollouts(likely(llm))), CONFIG, version=2)
    sample(made, 64, 8)
    metrics = made.metrics
    assert metrics.tree_steps < metrics.tree_tokens == 64 * 8
    # Each request prefills at most what lies behind its last full block.
    assert metrics.recomputed_tokens <= 32 * metrics.tree_requests


def test_an_engine_without_a_tokenizer_decodes_in_rounds(llm):
    """As NeMo-RL builds its engines; parameters say ``detokenize`` all the same."""
    made = made_with(llm, DictCache(rollouts(likely(llm))), CONFIG)
    made._limits = dataclasses.replace(made._limits, tokenizer=None)
    made._prompt_logprob_drafter._limits = made._limits
    _, tokens = sample(made, 8, 12, detokenize=True)
    assert [len(response) for response in tokens] == [12] * 8
    assert made.metrics.tree_drafted_tokens > 0
