"""A row never takes others with it: bad data, aborts and interrupts, on real engines."""

import math
import os
import random
import signal
import sys

import pytest

from nemo_specrl import Finish, SpecRLConfig, SpeculativeLLM, prompt_key
from nemo_specrl.engine.assembly import reuse_of
from nemo_specrl.engine.compat import logprobs_slice
from nemo_specrl.engine.refit import refit
from nemo_specrl.trainer.task import encode
from tests.conftest import DictCache, weights_of
from tests.engine.helpers import (
    LOSSLESS,
    PROMPT,
    VOCABULARY,
    draft,
    generate,
    needs_drafters,
    sampling,
)
from tests.engine.test_failures import interrupt_after

POISON = 31  # a token that has hidden states of NaN
BAD = [*PROMPT, POISON]
ROUNDS = SpecRLConfig(
    enabled=True, preset="lossless", tree={"method": "rounds", "max_draft_tokens": 6}
)


def poisoned(model):
    """To be run in the worker: what the model makes of POISON is NaN, behind its last layer.

    Before that, NaN would stay in the KV cache, from where vLLM's attention on a CPU spreads it to
    the next request that gets the block.
    """

    def seen(_, arguments, output):
        model.seen = arguments[0] == POISON

    def spoilt(_, arguments, output):
        hidden = output[0] if isinstance(output, tuple) else output
        hidden[model.seen[: len(hidden)]] = math.nan
        return output

    embedding, norm = model.model.embed_tokens, model.model.norm
    model.hooks = [embedding.register_forward_hook(seen), norm.register_forward_hook(spoilt)]


def cured(model):
    for hook in model.hooks:
        hook.remove()
    del model.hooks


@pytest.fixture
def poison(llm):
    llm.apply_model(poisoned)
    yield llm
    llm.apply_model(cured)


def places(prompt, tokens):
    """Whether each token was drawn from NaN."""
    return [token == POISON for token in [prompt[-1], *tokens[:-1]]]


def is_bad(prompt, tokens):
    """Whether a row has a token that was drawn from NaN."""
    return any(places(prompt, tokens))


def values(completion):
    return [next(iter(position.values())).logprob for position in completion.logprobs]


def same(completion, other):
    assert list(completion.token_ids) == list(other.token_ids)
    assert (completion.text, completion.finish_reason) == (other.text, other.finish_reason)
    assert (completion.stop_reason, completion.index) == (other.stop_reason, other.index)
    for value, expected in zip(values(completion), values(other), strict=True):
        assert value == pytest.approx(expected, abs=1e-4, nan_ok=True)


PROMPTS = [PROMPT, BAD, [*PROMPT, 5], BAD, [*PROMPT, 6]] * 2
PARAMS = [sampling(8, seed=i, ignore_eos=True) for i in range(len(PROMPTS))]


def test_rows_of_nan_are_returned_as_they_are_and_cost_their_places_alone(
    speculative, poison, caplog
):
    plain = [o.outputs[0] for o in poison.generate(PROMPTS, PARAMS, use_tqdm=False)]
    made = speculative()
    outputs = made.generate(PROMPTS, PARAMS, use_tqdm=False)
    bad = 0
    for prompt, output, expected in zip(PROMPTS, outputs, plain, strict=True):
        [completion] = output.outputs
        same(completion, expected)
        wrong = is_bad(prompt, expected.token_ids)
        assert (reuse_of(completion) is None) == wrong
        found = [math.isnan(value) for value in values(completion)]
        assert found == places(prompt, completion.token_ids)
        bad += wrong
    assert 4 <= bad < len(PROMPTS)
    assert made.metrics.uncached_rows == bad == len(PROMPTS) - len(made.cache.all())
    assert prompt_key(BAD) not in made.cache.rollouts
    assert made.metrics.cache_errors == 0
    assert sum("log-prob of nan" in r.message for r in caplog.records) == 1


@pytest.mark.parametrize("rows", [1, 3])
def test_a_draft_that_verifies_to_nan_is_refused(speculative, poison, rows):
    tokens = [*encode("12+34"), POISON, *encode("12")]
    params = [sampling(12, seed=i) for i in range(rows)]
    plain = generate(speculative(), rows=rows, params=params)
    made = speculative(DictCache([draft(tokens, sample_index=s) for s in range(rows)]), version=1)
    outputs = generate(made, rows=rows, params=params)
    assert made.metrics.refused_drafts == rows and made.metrics.drafts == 0
    for output, expected in zip(outputs, plain, strict=True):
        same(output.outputs[0], expected.outputs[0])
        reuse = reuse_of(output.outputs[0])
        assert reuse is None or reuse.fresh


def test_a_continuation_of_nan_is_joined_to_its_prefix_and_uncached(speculative, poison):
    made = speculative(DictCache([draft([*encode("12"), POISON])]), version=1, lenience=1e6)
    [output] = generate(made, params=sampling(9, ignore_eos=True))
    completion = output.outputs[0]
    assert list(completion.token_ids[:3]) == [*encode("12"), POISON]
    assert len(completion.token_ids) == len(completion.logprobs) == 9
    found = [math.isnan(value) for value in values(completion)]
    assert found == places(PROMPT, completion.token_ids) and found[3] and not any(found[:3])
    assert made.metrics.uncached_rows == 1 and made.cache.puts == 0


def test_rows_of_nan_in_rounds(poison):
    made = SpeculativeLLM(poison, DictCache(), ROUNDS)
    for version in range(2):  # the second time, drafts are verified
        made.policy_version = version
        outputs = made.generate(PROMPTS, PARAMS, use_tqdm=False)
        bad = 0
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            [completion] = output.outputs
            assert len(completion.token_ids) == len(completion.logprobs) == 8
            wrong = is_bad(prompt, completion.token_ids)
            assert (reuse_of(completion) is None) == wrong
            bad += wrong
        assert 4 <= made.metrics.uncached_rows == bad < len(PROMPTS)
        assert prompt_key(BAD) not in made.cache.rollouts
    assert made.metrics.tree_accepted_tokens > 0


def no_logprobs(completion):
    completion.logprobs = None


def fewer_logprobs(completion):
    completion.logprobs = logprobs_slice(completion.logprobs, 0, len(completion.logprobs) - 1)


def no_tokens(completion):
    completion.token_ids = []


def unknown_token(completion):
    completion.token_ids = [*completion.token_ids[:-1], VOCABULARY]


def negative_token(completion):
    completion.token_ids = [-1, *completion.token_ids[1:]]


def above_zero(completion):
    completion.logprobs.logprobs[0] = 0.5


def infinite(completion):
    completion.logprobs.logprobs[-1] = -math.inf


def of_other_tokens(completion):
    completion.logprobs.token_ids[0] += 1


def no_entries(completion):
    completion.logprobs.end_indices[0] = completion.logprobs.start_indices[0]


DAMAGES = [no_logprobs, fewer_logprobs, no_tokens, unknown_token, negative_token, above_zero]
DAMAGES += [infinite, of_other_tokens, no_entries]


@pytest.mark.parametrize("config", [None, ROUNDS], ids=["plain", "rounds"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_whatever_else_is_wrong_with_a_row_is_its_own(
    speculative, llm, monkeypatch, damage, config
):
    """Damages the last output of one row of four."""
    made = speculative() if config is None else SpeculativeLLM(llm, DictCache(), config)
    step, damaged = llm.llm_engine.step, []

    def damaging():
        outputs = step()
        for output in outputs:
            if output.finished and output.prompt_logprobs is None and not damaged:
                damage(output.outputs[0])
                damaged.append(list(output.outputs[0].token_ids))
        return outputs

    monkeypatch.setattr(llm.llm_engine, "step", damaging)
    params = [sampling(4 + i, seed=i, ignore_eos=True, detokenize=False) for i in range(4)]
    outputs = generate(made, rows=4, params=params)
    assert [reuse_of(o.outputs[0]) is None for o in outputs] == [True, False, False, False]
    assert made.metrics.uncached_rows == 1
    assert sorted(r.sample_index for r in made.cache.all()) == [1, 2, 3]
    n = len(damaged[0])
    assert n == 0 or list(outputs[0].outputs[0].token_ids)[-n:] == damaged[0]


def test_what_a_journal_has_of_another_model_is_decoded_anew(llm, speculative):
    class Journal(DictCache):
        def take(self, rows, policy_version, fingerprint):
            wrong = draft([5, VOCABULARY, 6, 7], -1.0, finish=Finish.LENGTH)
            object.__setattr__(wrong, "fingerprint", fingerprint)
            return [wrong for _ in rows]

    made = speculative(Journal())
    made.fingerprint = 5
    [output] = generate(made, params=sampling(4, ignore_eos=True))
    assert VOCABULARY not in output.outputs[0].token_ids
    assert made.metrics.replayed_rows == 0

    class Short(Journal):
        def take(self, rows, policy_version, fingerprint):
            return []

    made = speculative(Short())
    made.fingerprint = 5
    assert len(generate(made, rows=2)) == 2 and made.metrics.cache_errors == 1


def test_an_interrupt_keeps_the_partials_of_sound_rows(speculative, poison, monkeypatch):
    made = speculative()
    interrupt_after(poison, monkeypatch, 4)
    with pytest.raises(KeyboardInterrupt):
        made.generate(PROMPTS[:5], sampling(40, ignore_eos=True), use_tqdm=False)
    assert not poison.llm_engine.has_unfinished_requests()
    kept = made.cache.all()
    assert {r.finish for r in kept} == {Finish.PARTIAL}
    assert {r.key for r in kept} <= {prompt_key(p) for p in PROMPTS if p is not BAD}
    assert len(kept) + made.metrics.uncached_rows == 5 and made.metrics.uncached_rows >= 2
    assert made.metrics.cache_errors == 0


def test_a_request_that_the_engine_lost_costs_the_others_nothing(
    speculative, llm, monkeypatch, caplog
):
    made = speculative()
    step, steps = llm.llm_engine.step, iter(range(10))

    def losing():
        if next(steps) < 6:
            return step()
        lost = next(iter(llm.llm_engine.output_processor.external_req_ids))
        llm.llm_engine.abort_request([lost])
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.llm_engine, "step", losing)
    with pytest.raises(KeyboardInterrupt):
        generate(made, rows=4, params=[sampling(40, seed=i, ignore_eos=True) for i in range(4)])
    assert sorted(r.sample_index for r in made.cache.all()) == [1, 2, 3]
    assert made.metrics.cache_errors == 0
    assert not [r for r in caplog.records if "rollout cache failed" in r.message]


class Dying(DictCache):
    """A cache whose put ends in something worse than an error, once."""

    def __init__(self, rollouts=()):
        self.error = None
        super().__init__(rollouts)

    def put(self, rollouts):
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        super().put(rollouts)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), OSError("gone")])
def test_requests_leave_the_engine_whatever_the_cache_does(
    speculative, llm, random_model, monkeypatch, error
):
    cache = Dying()
    made = speculative(cache)
    step, steps = llm.llm_engine.step, iter(range(10))

    def failing():
        if next(steps) < 5:
            return step()
        cache.error = error
        raise ValueError("the step failed")

    with monkeypatch.context() as patched:
        patched.setattr(llm.llm_engine, "step", failing)
        seen = ValueError if isinstance(error, OSError) else type(error)
        with pytest.raises(seen):
            generate(made, rows=4, params=sampling(40, ignore_eos=True))
    assert not llm.llm_engine.has_unfinished_requests()
    refit(llm, weights_of(random_model))
    assert len(generate(made, rows=3)) == 3


def test_run_ahead_rows_leave_the_engine_too(drafting_llm, proposer, monkeypatch):
    config = LOSSLESS.model_copy(update={"run_ahead": type(LOSSLESS.run_ahead)(enabled=True)})
    made = SpeculativeLLM(drafting_llm, DictCache(), config)
    engine = drafting_llm.llm_engine

    def failing(request_ids, internal=False):
        monkeypatch.undo()
        raise RuntimeError("the engine does not abort")

    class Interrupt:
        def __init__(self, **_):
            pass

        def update(self, _):
            assert len(engine.output_processor.request_states) > 2
            monkeypatch.setattr(engine, "abort_request", failing)
            raise KeyboardInterrupt

        def close(self):
            raise RuntimeError("the bar does not close")

    with pytest.raises(KeyboardInterrupt):
        made.generate(
            [PROMPT] * 3,
            [sampling(n, seed=n, ignore_eos=True) for n in (40, 4, 41)],
            upcoming=[[*PROMPT, i] for i in range(3, 6)],
            use_tqdm=Interrupt,
        )
    # vLLM refused to abort the rows that were run ahead; the caller's own are out.
    assert len(engine.output_processor.request_states) == 3
    engine.abort_request(list(engine.output_processor.external_req_ids))
    assert len(generate(made, rows=3)) == 3


class Strike:
    """Does something at some call of a function inside of a step of the engine."""

    def __init__(self, at, act=None):
        self.calls, self.at, self.act = 0, at, act

    def __call__(self, frame, event, argument):
        if event == "call":
            self.calls += 1
            if self.calls == self.at:
                sys.setprofile(None)
                self.act()


def struck(llm, strike):
    """A step of the engine that is struck the third time it is called."""
    step, steps = llm.llm_engine.step, iter(range(1000))

    def stepped():
        if next(steps) != 2:
            return step()
        sys.setprofile(strike)
        try:
            return step()
        finally:
            sys.setprofile(None)
            if 0 < strike.calls < strike.at:  # this step has fewer calls
                strike.act()

    return stepped


@pytest.fixture
def interruptible():
    """Ctrl-C interrupts, which it does not where a shell has started the tests behind its back."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_at_any_point_of_a_step_leaves_a_usable_engine(
    speculative, llm, random_model, monkeypatch, interruptible
):
    """A real signal, at eight points drawn with a fixed seed from all calls of functions."""
    params = [sampling(6, seed=i, ignore_eos=True) for i in range(3)]
    expected = [o.outputs[0].token_ids for o in generate(speculative(), rows=3, params=params)]
    count = Strike(-1)
    with monkeypatch.context() as patched:
        patched.setattr(llm.llm_engine, "step", struck(llm, count))
        generate(speculative(), rows=3, params=params)
    draw = random.Random(0)
    for at in draw.sample(range(1, count.calls), 8):
        strike = Strike(at, lambda: os.kill(os.getpid(), signal.SIGINT))
        with monkeypatch.context() as patched:
            patched.setattr(llm.llm_engine, "step", struck(llm, strike))
            with pytest.raises(KeyboardInterrupt):
                generate(speculative(), rows=3, params=params)
        assert not llm.llm_engine.has_unfinished_requests(), at
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        refit(llm, weights_of(random_model))
        again = generate(speculative(), rows=3, params=params)
        assert [o.outputs[0].token_ids for o in again] == expected, at


@pytest.mark.parametrize("place", ["forward", "compute_logits", "between"])
def test_an_error_in_the_middle_of_a_step_leaves_a_usable_engine(
    speculative, llm, random_model, monkeypatch, place
):
    """In the model, behind it, and between the two halves of a step of the V1 model runner."""
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    params = [sampling(6, seed=i, ignore_eos=True) for i in range(3)]
    expected = [o.outputs[0].token_ids for o in generate(speculative(), rows=3, params=params)]
    calls = iter(range(1000))
    where = {
        "forward": (runner.model.model, "forward"),
        "compute_logits": (runner.model, "compute_logits"),
        "between": (runner, "sample_tokens"),
    }[place]
    right = getattr(*where)

    def failing(*arguments, **options):
        if next(calls) == 2:
            raise ValueError("a kernel failed")
        return right(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(*where, failing)
        with pytest.raises(ValueError, match="a kernel failed"):
            generate(speculative(), rows=3, params=params)
    assert not llm.llm_engine.has_unfinished_requests()
    refit(llm, weights_of(random_model))
    again = generate(speculative(), rows=3, params=params)
    assert [o.outputs[0].token_ids for o in again] == expected


@pytest.mark.parametrize("config", [None, ROUNDS], ids=["plain", "rounds"])
@pytest.mark.parametrize("rows", [0, 3])
def test_the_engine_says_when_a_call_has_ended(speculative, llm, monkeypatch, config, rows):
    """As one of several data-parallel engines, of which another has three steps more to do."""
    engine, left, dummies = llm.llm_engine, iter(range(3)), []
    asked, dummy = engine.has_unfinished_requests, engine.engine_core.execute_dummy_batch

    def of_all():
        if asked():
            return True
        engine.should_execute_dummy_batch = next(left, None) is not None
        return engine.should_execute_dummy_batch

    def counted():
        dummies.append(1)
        dummy()

    made = speculative() if config is None else SpeculativeLLM(llm, DictCache(), config)
    with monkeypatch.context() as patched:
        patched.setattr(engine, "has_unfinished_requests", of_all)
        patched.setattr(engine.engine_core, "execute_dummy_batch", counted)
        params = [sampling(6, seed=i, ignore_eos=True) for i in range(rows)]
        outputs = made.generate([PROMPT] * rows, params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [6] * rows
    assert len(dummies) == 3


def aborting(llm, monkeypatch, at, which=0):
    """Have the engine abort one of its requests before a step."""
    step, steps = llm.llm_engine.step, iter(range(10**6))

    def stepped():
        if next(steps) == at:
            names = list(llm.llm_engine.output_processor.external_req_ids)
            llm.llm_engine.abort_request([names[which]])
        return step()

    monkeypatch.setattr(llm.llm_engine, "step", stepped)


@pytest.mark.parametrize("phase", ["verification", "decoding", "rounds", "all at once"])
def test_a_request_that_is_aborted_ends_its_row_as_aborted(speculative, llm, monkeypatch, phase):
    at, rows = 5, 1 if phase == "all at once" else 3
    params = [sampling(30, seed=i, ignore_eos=True) for i in range(rows)]
    made = speculative()
    if phase == "verification":
        at = 0
        drafts = [draft(encode(f"{s}2+34"), sample_index=s) for s in range(3)]
        made = speculative(DictCache(drafts), version=1)
    elif phase == "rounds":
        made = SpeculativeLLM(llm, DictCache(), ROUNDS)
    aborting(llm, monkeypatch, at)
    outputs = generate(made, rows=rows, params=params)
    reasons = [o.outputs[0].finish_reason for o in outputs]
    assert sorted(reasons) == ["abort"] + ["length"] * (rows - 1)
    for output in outputs:
        whole = output.outputs[0].finish_reason == "length"
        assert (len(output.outputs[0].token_ids) == 30) == whole
    finished = [r for r in made.cache.all() if r.policy_version == made.policy_version]
    kept = [Finish.PARTIAL] if phase == "rounds" else []
    assert sorted(r.finish for r in finished) == [Finish.LENGTH] * (rows - 1) + kept
    assert made.metrics.cache_errors == made.metrics.uncached_rows == 0


@needs_drafters
def test_nan_with_the_tree_proposer_beside_sound_rows(drafting_llm, proposer):
    drafting_llm.apply_model(poisoned)
    try:
        made = SpeculativeLLM(drafting_llm, DictCache(), LOSSLESS)
        for version in range(2):
            made.policy_version = version
            outputs = made.generate(PROMPTS, PARAMS, use_tqdm=False)
            wrong = [
                is_bad(prompt, o.outputs[0].token_ids)
                for prompt, o in zip(PROMPTS, outputs, strict=True)
            ]
            assert [reuse_of(o.outputs[0]) is None for o in outputs] == wrong
            assert made.metrics.uncached_rows == sum(wrong) < len(PROMPTS)
    finally:
        drafting_llm.apply_model(cured)
