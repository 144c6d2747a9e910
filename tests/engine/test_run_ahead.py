"""Run-ahead on the real engine: the caller's rows are as without it, and the next batch drafts."""

import numpy as np
import pytest

from nemo_specrl import Finish, Rollout, SpecRLConfig, prompt_key
from nemo_specrl.engine.outputs import rollout_info
from nemo_specrl.speculation.draft_selection import RUN_AHEAD_INDEX
from nemo_specrl.trainer.data.toy_tasks import encode
from tests.conftest import DictCache
from tests.engine.test_failures import interrupt_after
from tests.support.engines import LOSSLESS, PROMPT, SURE
from tests.support.lossless import ROWS, check_distribution, made_with, params, sample

TREE = {"max_draft_tokens": 6}
AHEAD = SpecRLConfig(enabled=True, preset="lossless", tree=TREE, run_ahead={"enabled": True})
NEXT = [[1, *encode(f"{i}-9=?")] for i in range(10, 50)]
PLACES = 64  # of the engine


@pytest.fixture
def llm(drafting_llm):
    return drafting_llm


class Watch:
    """Records what the engine was given, and its rows in each step, callers' and ahead."""

    def __init__(self, llm, monkeypatch):
        self.steps, self.begun, self._ahead = [], [], set()
        self._engine = llm.llm_engine
        self._add, self._step = self._engine.add_request, self._engine.step
        monkeypatch.setattr(self._engine, "add_request", self.add)
        monkeypatch.setattr(self._engine, "step", self.step)

    def add(self, request_id, prompt, params, **options):
        if prompt["prompt_token_ids"] in NEXT:
            self._ahead.add(request_id)
            self.begun.append(prompt["prompt_token_ids"])
        return self._add(request_id, prompt, params, **options)

    def step(self):
        names = set(self._engine.output_processor.external_req_ids)
        self.steps.append((len(names - self._ahead), len(names & self._ahead)))
        return self._step()


def call(made, rows, upcoming, **options):
    """One row a prompt of ``rows``; stops at end-of-sequence."""
    wanted = [params(100, seed=i, ignore_eos=False, **options) for i in range(len(rows))]
    outputs = made.generate(rows, wanted, upcoming=upcoming, use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in outputs]


def test_the_caller_gets_what_it_asked_for_and_waits_for_nothing_else(llm, proposer, monkeypatch):
    watch = Watch(llm, monkeypatch)
    made = made_with(llm, DictCache(), config=AHEAD)
    tokens = call(made, [PROMPT] * 6, NEXT)
    assert not llm.llm_engine.has_unfinished_requests()
    assert len(tokens) == 6
    assert watch.steps[0] == (6, len(NEXT))
    # With the last of the caller's rows, rows under way are cut off: no step is theirs alone.
    assert watch.steps[-1][1] > 0 and min(primary for primary, _ in watch.steps) > 0
    metrics = made.metrics
    assert metrics.run_ahead_rows == len(NEXT)
    assert len(NEXT) < metrics.run_ahead_tokens
    # Nothing of it is in what is counted, returned or cached for the caller.
    assert metrics.rows == 6
    assert metrics.decoded_tokens == metrics.response_tokens == sum(map(len, tokens))
    assert {(r.key, r.sample_index) for r in made.cache.all()} == {
        (prompt_key(PROMPT), i) for i in range(6)
    }
    assert metrics.tree_steps <= sum(map(len, tokens))  # a step yields a token or more
    assert len(proposer.trees) == 1 + len(NEXT)


def test_the_next_batch_drafts_from_it(llm, proposer):
    """One row a prompt and three tokens: there is nothing else that could be drafted."""
    for config, drafts in ((LOSSLESS, False), (AHEAD, True)):
        proposer.__init__(llm.llm_engine.vllm_config)
        made = made_with(llm, DictCache(), config=config)
        made.generate([PROMPT], params(40, seed=0), upcoming=NEXT, use_tqdm=False)
        wanted = [params(3, seed=i) for i in range(len(NEXT))]
        made.policy_version += 1
        outputs = made.generate(NEXT, wanted, use_tqdm=False)
        assert [len(o.outputs[0].token_ids) for o in outputs] == [3] * len(NEXT)
        assert all(rollout_info(o.outputs[0]).fresh for o in outputs)
        assert made.metrics.run_ahead_rows == made.metrics.drafts == 0
        assert (made.metrics.tree_drafted_tokens > 0) == drafts
        assert (made.metrics.as_dict()["spec_rl/tree_accepted_fraction"] > 0) == drafts


@pytest.mark.parametrize("when", ["beside it", "drafted from it"])
def test_the_distribution_is_the_policys(llm, proposer, when):
    made = made_with(llm, DictCache(), config=AHEAD)
    if when == "drafted from it":
        other = [1, *encode("1+1=?")]
        made.generate([other], params(30, seed=0), upcoming=[PROMPT], use_tqdm=False)
        assert made.metrics.run_ahead_rows == 1
    wanted = [params(3, seed=i) for i in range(ROWS)]
    outputs = made.generate([PROMPT] * ROWS, wanted, upcoming=NEXT, use_tqdm=False)
    assert made.metrics.run_ahead_rows > 0
    assert made.metrics.tree_drafted_tokens > ROWS / 4
    check_distribution(llm, np.array([list(o.outputs[0].token_ids) for o in outputs]))


def test_it_fills_places_that_nobody_waits_for_and_no_others(llm, proposer, monkeypatch):
    watch = Watch(llm, monkeypatch)
    call(made_with(llm, DictCache(), config=AHEAD), [PROMPT] * 100, NEXT)
    assert any(ahead for _, ahead in watch.steps)
    assert all(primary + ahead <= PLACES for primary, ahead in watch.steps if ahead)
    assert watch.begun == NEXT[: len(watch.begun)]  # each once, the nearest first


def test_rows_that_a_verification_sets_free_get_its_places(llm, proposer, monkeypatch):
    """Equal drafts are verified by one row; then each row needs a place of its own."""
    config = SpecRLConfig(
        enabled=True,
        preset="faithful",
        fresh_fraction=0.0,
        tree=TREE | {"enabled": True},
        run_ahead={"enabled": True},
    )
    key, tokens = prompt_key(PROMPT), encode("12")
    cached = [Rollout(key, i, tokens, [SURE] * 2, Finish.LENGTH, 0) for i in range(50)]
    watch = Watch(llm, monkeypatch)
    made = made_with(llm, DictCache(cached), config=config)
    wanted = [params(20, seed=i) for i in range(50)]
    outputs = made.generate([PROMPT] * 50, wanted, upcoming=NEXT, use_tqdm=False)
    assert watch.steps[0] == (1, len(NEXT))
    assert watch.steps[1] == (50, PLACES - 50)
    assert all(sum(step) <= PLACES for step in watch.steps)
    assert made.metrics.run_ahead_rows == len(NEXT)
    assert all(list(o.outputs[0].token_ids[:2]) == tokens for o in outputs)


def test_prompts_that_cannot_gain_are_passed_over(llm, proposer, monkeypatch):
    watch = Watch(llm, monkeypatch)
    made = made_with(llm, DictCache(), config=AHEAD)
    call(made, [PROMPT], [PROMPT, [5] * 192, [5] * 4000, NEXT[3], NEXT[3], NEXT[0]])
    assert watch.begun == [NEXT[3], NEXT[0]]
    assert made.metrics.run_ahead_rows == 2
    call(made, [PROMPT], [])
    call(made_with(llm, DictCache(), LOSSLESS), [PROMPT], NEXT)
    call(made, [PROMPT], NEXT, temperature=0.0)  # greedy, as in a validation
    assert len(watch.begun) == 2


def test_an_interrupt_keeps_the_callers_rows_alone(llm, proposer, monkeypatch):
    made = made_with(llm, DictCache(), config=AHEAD)
    interrupt_after(llm, monkeypatch, 10)
    with pytest.raises(KeyboardInterrupt):
        call(made, [PROMPT] * 3, NEXT)
    assert not llm.llm_engine.has_unfinished_requests()
    assert {r.key for r in made.cache.all()} == {prompt_key(PROMPT)}
    assert RUN_AHEAD_INDEX not in {r.sample_index for r in made.cache.all()}
    assert sample(made, 3, 4)[1]


def test_between_two_calls_an_idle_engine_decodes_until_it_is_told(llm, proposer, monkeypatch):
    made = made_with(llm, DictCache(), config=AHEAD)
    call(made, [PROMPT], [])
    before, cached = made.metrics, made.cache.all()
    watch = Watch(llm, monkeypatch)
    asked = iter([False] * 5 + [True])
    done = made.run_ahead(NEXT[:8], params(40, seed=0), lambda: next(asked))
    assert watch.steps == [(0, 8)] * 5 and done.run_ahead_rows == 8
    assert done.run_ahead_tokens >= 8 and made.metrics is before and made.cache.all() == cached
    assert not llm.llm_engine.has_unfinished_requests()
    rest = made.run_ahead(NEXT[8:10], params(2, seed=0), lambda: False)  # they end by themselves
    assert (rest.run_ahead_rows, rest.run_ahead_tokens) == (2, 4)
    off = made_with(llm, DictCache(), LOSSLESS)
    assert off.run_ahead(NEXT, params(9, seed=0), lambda: False).run_ahead_rows == 0
    made.policy_version += 1
    call(made, NEXT[:8], [])
    assert made.metrics.tree_drafted_tokens > 0
