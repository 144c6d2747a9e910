"""Interrupts, errors and aborts on real engines: requests leave, and rows end by themselves."""

import os
import random
import signal
import sys

import pytest

from nemo_specrl import Finish, SpeculativeLLM, prompt_key
from nemo_specrl.engine.vllm.compat import in_this_process
from nemo_specrl.engine.vllm.refit import refit
from nemo_specrl.trainer.data.toy_tasks import encode
from tests.conftest import DictCache, weights_of
from tests.engine.test_failures import interrupt_after
from tests.engine.test_rows import BAD, PROMPTS, ROUNDS
from tests.engine.test_rows import poison as poison  # a fixture
from tests.support.engines import LOSSLESS, PROMPT, draft, generate, sampling


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
    made.policy_version += 1
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
    if not in_this_process(llm.llm_engine):
        pytest.skip(
            "the model runner is in a process of its own, where nothing can be made to fail"
        )
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
