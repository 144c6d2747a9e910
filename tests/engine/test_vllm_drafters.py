"""Prefix reuse beside a drafter of vLLM's own, on the real engine: n-grams and a draft model.

The distribution is checked by chi-squared tests; each states its error rate, and draws are seeded,
so that a test that passes goes on passing.
"""

import math
import shutil
import sys

import numpy as np
import pytest
from safetensors.torch import save_file
from vllm import SamplingParams
from vllm.v1.sample import rejection_sampler

from nemo_specrl import Finish, Rollout, SpecRLConfig, SpeculativeLLM, prompt_key
from nemo_specrl.engine.outputs import rollout_info
from nemo_specrl.engine.vllm import cpu_sampler
from nemo_specrl.engine.vllm.refit import refit
from tests.conftest import DictCache, make_engine, weights_of
from tests.engine.test_failures import interrupt_after
from tests.support.engines import PROMPT, VOCABULARY, chi_squared, distribution, needs_drafters

pytestmark = needs_drafters

# Behind every token of the vocabulary something follows, so that an n-gram drafts for every row.
LOOKUP = [*range(3, VOCABULARY), *range(VOCABULARY - 1, 2, -1)]
START = [*PROMPT, *LOOKUP]
KEY = prompt_key(START)
MAX_MODEL_LEN = 192
LOOKAHEAD = 3
EOS = 2
ROWS = 1600
ERROR_RATE = 1e-4


@pytest.fixture(scope="session")
def draft_model(random_model, tmp_path_factory):
    """A draft model: the policy's weights with noise, so that it is right now and then."""
    folder = tmp_path_factory.mktemp("draft-model")
    shutil.copytree(random_model, folder, dirs_exist_ok=True)
    weights = dict(weights_of(random_model, noise=0.05, seed=5))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def made_engine(random_model, drafter):
    return make_engine(
        random_model,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=64,
        max_num_batched_tokens=64 * MAX_MODEL_LEN,
        enable_prefix_caching=True,
        max_logprobs=VOCABULARY,
        disable_log_stats=False,  # its counters say what was drafted
        speculative_config={**drafter, "num_speculative_tokens": LOOKAHEAD},
    )


@pytest.fixture(scope="session")
def ngram_engine(random_model):
    lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": 2}
    engine = made_engine(random_model, {"method": "ngram", **lookup})
    # vLLM 0.32 looks into every module when a process makes its next CPU engine, and stumbles over
    # a module that the n-gram proposer's numba has imported (triton_utils/dispatcher.py).
    sys.modules.pop("llvmlite.binding.ffi", None)
    return engine


@pytest.fixture(scope="session")
def draft_model_engine(random_model, draft_model):
    return made_engine(random_model, {"method": "draft_model", "model": str(draft_model)})


@pytest.fixture(scope="module", params=["ngram", "draft_model"])
def engine_with_drafter(request):
    """All tests of one engine come before the other is made: its counters replace those before."""
    return request.getfixturevalue(f"{request.param}_engine")


@pytest.fixture
def llm(engine_with_drafter, random_model):
    refit(engine_with_drafter, weights_of(random_model))
    yield engine_with_drafter
    assert not engine_with_drafter.llm_engine.has_unfinished_requests()


def counted(llm):
    """Tokens that the drafter has proposed so far, and those that were accepted."""
    values = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    return np.array(
        [values[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted")]
    )


def params(max_tokens, **options):
    return SamplingParams(
        **{
            "temperature": 1.0,
            "max_tokens": max_tokens,
            "logprobs": 0,
            "flat_logprobs": True,
            "detokenize": False,
            "ignore_eos": True,
            **options,
        }
    )


def made_with(llm, cache=None, *, version=1, **options):
    config = SpecRLConfig(enabled=True, preset="faithful", **{"fresh_fraction": 0.0, **options})
    made = SpeculativeLLM(llm, DictCache() if cache is None else cache, config)
    made.policy_version = version
    return made


def sample(made, rows, max_tokens, prompt=START, **options):
    outputs = made.generate(
        [{"prompt_token_ids": prompt}] * rows,
        [params(max_tokens, **{"seed": i, **options}) for i in range(rows)],
        use_tqdm=False,
    )
    return outputs, [list(o.outputs[0].token_ids) for o in outputs]


def of_certain_prefix(llm, prefix, rows):
    """A cache whose drafts are accepted for certain: as likely now as they were at birth."""
    now, before = [], []
    for token in prefix:
        now.append(math.log(distribution(llm, [*LOOKUP, *before])[token]) - 1e-3)
        before.append(token)
    return DictCache(
        Rollout(KEY, i, prefix, np.float32(now), Finish.PARTIAL, 0) for i in range(rows)
    )


def check_distribution(llm, tokens, behind=()):
    """The first token, and the second and third behind the commonest ones, against exact p."""
    behind = [*LOOKUP, *behind]
    tests, column = [], 0
    while len(tokens) >= 300 and column < tokens.shape[1]:
        counts = np.bincount(tokens[:, column], minlength=VOCABULARY).astype(float)
        tests.append(chi_squared(counts, len(tokens) * distribution(llm, behind)))
        common = int(counts.argmax())
        tokens = tokens[tokens[:, column] == common]
        behind, column = [*behind, common], column + 1
    assert len(tests) >= 2
    assert min(tests) > ERROR_RATE / len(tests)


def prompt_logprobs(llm, prompt, response):
    (again,) = llm.generate(
        {"prompt_token_ids": prompt + response},
        SamplingParams(max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False),
        use_tqdm=False,
    )
    return np.asarray(again.prompt_logprobs.logprobs)[-len(response) :]


@pytest.mark.parametrize("refitted", [False, True])
def test_fresh_rows_have_the_policys_distribution(llm, random_model, refitted):
    """Also under other weights, for which the draft model is a worse guess."""
    if refitted:
        refit(llm, weights_of(random_model, noise=0.05, seed=3))
    before = counted(llm)
    outputs, tokens = sample(made_with(llm), ROWS, 3)
    drafted, accepted = counted(llm) - before
    assert drafted > ROWS and accepted > 5  # n-grams mostly guess wrong: the draft model does not
    check_distribution(llm, np.array(tokens))
    assert all(rollout_info(o.outputs[0]).fresh for o in outputs)


def test_behind_an_accepted_prefix_the_rest_has_the_policys_distribution(llm):
    first = [int(distribution(llm, LOOKUP).argmax())]
    made = made_with(llm, of_certain_prefix(llm, first, ROWS))
    before = counted(llm)
    outputs, tokens = sample(made, ROWS, 4)
    drafted, accepted = counted(llm) - before
    assert drafted > ROWS and accepted > 50
    assert all(rollout_info(o.outputs[0]).accepted == 1 for o in outputs)
    assert [t[0] for t in tokens] == first * ROWS
    check_distribution(llm, np.array(tokens)[:, 1:], behind=first)


def test_drafts_are_judged_as_without_a_drafter(llm, engine, random_model):
    """The same verdicts, log-probs and prefixes as on an engine that drafts nothing."""
    refit(engine, weights_of(random_model))
    _, old = sample(made_with(engine, version=0), 24, 20)
    rollouts = [
        Rollout(KEY, i, tokens, prompt_logprobs(engine, START, tokens), Finish.LENGTH, 0)
        for i, tokens in enumerate(old)
    ]
    new = weights_of(random_model, noise=0.02, seed=4)
    found = []
    for which in (llm, engine):
        refit(which, new)
        outputs, _ = sample(made_with(which, DictCache(rollouts)), 24, 20)
        found.append([rollout_info(o.outputs[0]) for o in outputs])
    with_drafter, without = found
    assert [r.accepted for r in with_drafter] == [r.accepted for r in without]
    assert len({r.accepted for r in without}) > 5
    for one, other in zip(with_drafter, without, strict=True):
        n = one.accepted
        assert np.allclose(one.policy_logprobs[:n], other.policy_logprobs[:n], atol=1e-4)


def test_logprobs_are_the_policys_for_reused_and_for_drafted_tokens(llm):
    prefix = [int(distribution(llm, LOOKUP).argmax())]
    cache = of_certain_prefix(llm, prefix, 16)  # half of the rows have a draft
    before = counted(llm)
    outputs, tokens = sample(made_with(llm, cache), 32, 24)
    assert (counted(llm) - before)[1] > 10
    assert [rollout_info(o.outputs[0]).accepted for o in outputs] == [1] * 16 + [0] * 16
    for output, response in zip(outputs, tokens, strict=True):
        reported = np.asarray(output.outputs[0].logprobs.logprobs)
        assert np.allclose(reported, prompt_logprobs(llm, START, response), atol=1e-4)
        assert np.array_equal(rollout_info(output.outputs[0]).policy_logprobs, np.float32(reported))


def test_budgets_hold_inside_a_draft_and_behind_a_prefix(llm):
    prefix = [int(distribution(llm, LOOKUP).argmax())]
    for budget in (1, 2, 3, 7):
        cache = of_certain_prefix(llm, prefix, 4)
        outputs, tokens = sample(made_with(llm, cache), 8, budget)
        assert [len(t) for t in tokens] == [budget] * 8
        assert {o.outputs[0].finish_reason for o in outputs} == {"length"}


@pytest.mark.parametrize("short_of_the_limit", [0, 1, LOOKAHEAD + 1])
def test_the_models_limit_holds(llm, short_of_the_limit):
    """Up to the last token, and cut by NeMo-RL's margin for drafters that read ahead."""
    room = MAX_MODEL_LEN - len(START) - short_of_the_limit
    cache = DictCache()
    _, first = sample(made_with(llm, cache, version=0), 8, room)
    assert [len(t) for t in first] == [room] * 8
    again = made_with(llm, cache)  # of the same weights: every draft stands
    outputs, second = sample(again, 8, room)
    # vLLM needs room for a token behind a draft, so that the last one may be decoded anew.
    kept = min(room, MAX_MODEL_LEN - 1 - len(START))
    assert [rollout_info(o.outputs[0]).accepted for o in outputs] == [kept] * 8
    assert [len(t) for t in second] == [room] * 8
    assert [t[:kept] for t in second] == [t[:kept] for t in first]
    # A draft of which only the beginning stands is continued up to the same limit.
    half = [room // 2] * 8
    cut = DictCache(
        Rollout(KEY, i, t, prompt_logprobs(llm, START, t), Finish.PARTIAL, 0)
        for i, t in enumerate(t[:n] for t, n in zip(first, half, strict=True))
    )
    outputs, third = sample(made_with(llm, cut), 8, room)
    assert [len(t) for t in third] == [room] * 8
    assert [t[: room // 2] for t in third] == [t[: room // 2] for t in first]


def test_a_response_ends_at_its_first_stop_token(llm):
    _, tokens = sample(made_with(llm), 128, 40, ignore_eos=False)
    ended = [t for t in tokens if EOS in t]
    assert len(ended) > 20 and all(t.index(EOS) == len(t) - 1 for t in ended)


@pytest.mark.parametrize("include", [True, False])
def test_nothing_follows_a_stop_string(llm, include):
    """For fresh rows and behind a prefix, although a step may bring tokens beyond it."""
    prefix = [int(distribution(llm, LOOKUP).argmax())]
    cache = of_certain_prefix(llm, prefix, 24)
    stops = list("13579")
    outputs, tokens = sample(
        *(made_with(llm, cache), 48, 40),
        stop=stops,
        include_stop_str_in_output=include,
        detokenize=True,
    )
    tokenizer = llm.get_tokenizer()
    stopped = 0
    for output, response in zip(outputs, tokens, strict=True):
        completion = output.outputs[0]
        pieces = [tokenizer.decode([t]) for t in response]
        assert not any(stop in piece for piece in pieces[:-1] for stop in stops)
        if completion.finish_reason == "stop":
            stopped += 1
            assert completion.stop_reason in pieces[-1]
            assert (completion.stop_reason in completion.text) == include
        assert len(completion.logprobs.start_indices) == len(response)
    assert stopped > 24
    assert [rollout_info(o.outputs[0]).fresh for o in outputs].count(True) == 24


def test_what_an_interrupt_finds_under_way_is_kept_and_continued(llm, monkeypatch):
    cache = DictCache()
    made = made_with(llm, cache)
    made.fingerprint = 7
    with monkeypatch.context() as patched:
        interrupt_after(llm, patched, 24)
        with pytest.raises(KeyboardInterrupt):
            sample(made, 16, 60)
    kept = {r.sample_index: r for r in cache.all()}
    assert len(kept) == 16
    for rollout in kept.values():
        assert rollout.finish is Finish.PARTIAL and rollout.fresh and 0 < len(rollout) < 60
        expected = prompt_logprobs(llm, START, rollout.tokens.tolist())
        assert np.allclose(rollout.logprobs, expected, atol=1e-4)
    assert len({len(r) for r in kept.values()}) > 1  # some rows had more drafts accepted
    outputs, tokens = sample(made, 16, 60)
    for i, response in enumerate(tokens):
        before = kept[i].tokens.tolist()
        assert len(response) == 60 and response[: len(before)] == before
    assert all(rollout_info(o.outputs[0]).fresh for o in outputs)  # both parts are of one policy


def test_a_refit_leaves_the_draft_models_weights(draft_model_engine, random_model):
    worker = draft_model_engine.llm_engine.model_executor.driver_worker.worker
    drafter = worker.model_runner.drafter.model
    before = {name: w.clone() for name, w in drafter.named_parameters()}
    assert sum(w.numel() for w in before.values()) > 0
    exact = distribution(draft_model_engine, LOOKUP)
    refit(draft_model_engine, weights_of(random_model, noise=0.1, seed=9))
    assert abs(distribution(draft_model_engine, LOOKUP) - exact).max() > 0.01
    after = dict(drafter.named_parameters())
    assert all(after[name].equal(w) for name, w in before.items())


def test_the_rejection_sampler_of_this_process_is_fixed(ngram_engine):
    original = getattr(cpu_sampler.expanded_to_tokens, "replaced", None)
    assert original is not None or rejection_sampler.expand_batch_to_tokens is not None
    if original is not None:
        rejection_sampler.expand_batch_to_tokens = original
    made_with(ngram_engine)
    assert rejection_sampler.expand_batch_to_tokens is cpu_sampler.expanded_to_tokens
