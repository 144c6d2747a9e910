"""The distribution of plain vLLM with the plug-in is the policy's, whatever the drafts are.

Each statistical test states its error rate; draws are seeded, so that a test that passes goes on
passing.
"""

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.sample import rejection_sampler

from nemo_specrl.drafting.adaptive_length import DraftLengths
from nemo_specrl.drafting.chances import CHANCES, MIN_PROBABILITY
from nemo_specrl.engine.refit import refit
from tests.conftest import weights_of
from tests.support.engines import (
    EOS,
    PROMPT,
    VOCABULARY,
    chi_squared,
    distribution,
    params,
)
from tests.support.lossless import (
    DRAFTS_OF,
    ERROR_RATE,
    ROWS,
    bent,
    check_distribution,
    good_drafts,
    rollouts,
)


def sample(drafting, rows, max_tokens, *, first_seed=0, **options):
    options = [params(max_tokens, **{"seed": first_seed + i, **options}) for i in range(rows)]
    return drafting.tokens([PROMPT] * rows, options)


@pytest.mark.parametrize("drafts", DRAFTS_OF)
def test_the_distribution_is_the_policys_whatever_is_drafted(drafting, llm, random_model, drafts):
    drafting.remember(rollouts(DRAFTS_OF[drafts](llm)))
    if drafts == "of other weights":
        refit(drafting.llm, weights_of(random_model, noise=0.05, seed=3))
    tokens = sample(drafting, ROWS, 3)
    assert drafting.counts()["drafted_tokens"] > ROWS / 4
    check_distribution(drafting.llm, np.array(tokens))


@pytest.mark.parametrize("drafts", ["unlikely", "siblings alone"])
def test_a_sampler_that_is_bent_is_seen(drafting, llm, monkeypatch, drafts):
    """The control: drafts make a difference that the test of the distribution tells."""
    drafting.remember(rollouts(DRAFTS_OF[drafts](llm)))
    monkeypatch.setattr(
        rejection_sampler, "rejection_sample", bent(rejection_sampler.rejection_sample)
    )
    tokens = sample(drafting, ROWS, 3)
    with pytest.raises(AssertionError):
        check_distribution(llm, np.array(tokens))


@pytest.mark.parametrize("seeded", [True, False])
def test_epochs_of_the_same_seeds_leave_the_distribution_the_policys(drafting, llm, seeded):
    """Each by a new engine of the same seed.

    V2's tests have the control: there, random numbers go by seed and place alone, and seeds that
    are kept are seen.
    """
    import torch

    found = []
    for epoch in range(5):
        drafting.begin_anew()
        torch.manual_seed(0)  # as a worker that is started again
        tokens = sample(drafting, ROWS // 4, 3, **({} if seeded else {"seed": None}))
        found += tokens if epoch > 0 else []
    assert drafting.counts()["histories_found"] == 1
    check_distribution(llm, np.array(found))


def shaped(p, temperature, top_p=1.0, top_k=VOCABULARY):
    """What vLLM draws from instead of p under these parameters."""
    p = p ** (1 / temperature)
    p = np.where(p >= np.sort(p)[-top_k], p, 0)
    p /= p.sum()
    order = np.argsort(p)
    kept = np.zeros(VOCABULARY, bool)
    kept[order[np.cumsum(p[order]) > 1 - top_p]] = True
    return np.where(kept, p, 0) / p[kept].sum()


@pytest.mark.parametrize(
    "shape",
    [{"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.4}, {"temperature": 1.0, "top_k": 6}],
)
def test_other_sampling_has_its_own_distribution(drafting, llm, shape):
    """The first token, the second behind the commonest ones, and the third behind those."""
    drafting.remember(rollouts(good_drafts(llm)))
    tokens, tests = np.array(sample(drafting, ROWS // 2, 3, **shape)), []
    assert drafting.counts()["accepted_tokens"] > ROWS / 40

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


def test_logprobs_are_the_policys_for_drafted_tokens_too(drafting, llm):
    drafting.remember(rollouts(good_drafts(llm)))
    outputs = drafting.generate(
        [PROMPT] * 16, [params(12, seed=i, logprobs=0, flat_logprobs=True) for i in range(16)]
    )
    assert drafting.counts()["accepted_tokens"] > 0
    for output in outputs:
        response = list(output.outputs[0].token_ids)
        (again,) = llm.generate(
            {"prompt_token_ids": PROMPT + response},
            SamplingParams(max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False),
            use_tqdm=False,
        )
        expected = np.asarray(again.prompt_logprobs.logprobs)[-len(response) :]
        assert np.allclose(output.outputs[0].logprobs.logprobs, expected, atol=1e-4)


def test_budgets_stop_tokens_and_the_models_limit_hold_inside_a_draft(drafting):
    drafting.remember(rollouts([[5, 6, 7, 8] * 50] * 4))
    for budget in (2, 5, 7):
        tokens = sample(drafting, 8, budget)
        assert [len(t) for t in tokens] == [budget] * 8
    room = 192 - len(PROMPT)
    tokens = sample(drafting, 4, room)
    assert [len(t) for t in tokens] == [room] * 4
    # A response ends at its first stop token although a draft goes on behind it.
    responses = sample(drafting, 64, 40, ignore_eos=False)
    ended = [t for t in responses if EOS in t]
    assert ended and all(t.index(EOS) == len(t) - 1 for t in ended)


def priced(drafting, token_s, monkeypatch):
    """Have draft lengths be decided on an engine whose steps take 5 ms and ``token_s`` a token."""
    lengths = drafting.proposer.lengths = DraftLengths(CHANCES, MIN_PROBABILITY, 64 * 192)
    observe = lengths.observe
    monkeypatch.setattr(
        lengths,
        "observe",
        lambda step, seconds: observe(step, 5e-3 + token_s * (step.rows + step.drafted)),
    )


@pytest.mark.parametrize("drafts", ["good", "unlikely"])
def test_lengths_by_worth_and_price_leave_the_distribution_the_policys(
    drafting, llm, drafts, monkeypatch
):
    """Tokens cost little here, so that many are drafted, as long as some are accepted."""
    priced(drafting, 1e-6, monkeypatch)
    drafting.remember(rollouts(DRAFTS_OF[drafts](llm)))
    tokens = sample(drafting, ROWS, 3)
    assert drafting.counts()["drafted_tokens"] > ROWS / 8
    check_distribution(llm, np.array(tokens))


def test_drafts_are_as_long_as_they_are_worth_it(drafting, monkeypatch):
    drafted = []
    for token_s in (1e-7, 1e-2):
        drafting.begin_anew()
        drafting.remember(rollouts([[5, 6, 7, 8] * 10] * 4))  # hardly likely
        priced(drafting, token_s, monkeypatch)
        sample(drafting, 64, 40)
        before = drafting.counts()["drafted_tokens"]
        sample(drafting, 64, 40, first_seed=1000)
        drafted.append(drafting.counts()["drafted_tokens"] - before)
    assert drafted[0] > 20 * drafted[1]


def test_the_same_seeds_and_history_give_the_same_responses(drafting, llm):
    drafts, runs = rollouts(good_drafts(llm)), []
    for i in range(2):
        drafting.folder = drafting.folder.with_name(f"run {i}")
        drafting.begin_anew()
        drafting.remember(drafts)
        runs.append(sample(drafting, 24, 10))
    assert runs[0] == runs[1]
