"""Plain ``vllm.LLM.generate``: what an engine drafts from, and what it keeps of each request."""

import threading
import time
from collections import Counter

import numpy as np
import pytest
from vllm import SamplingParams

from nemo_specrl import Finish, Rollout, RolloutStore, cache, prompt_key
from nemo_specrl.config import CacheConfig
from nemo_specrl.engine import resident as resident_module
from nemo_specrl.engine.resident import _Cache, _Lookup, _Prompt
from nemo_specrl.engine.row import row_of
from tests.engine.conftest import VOCABULARY_HASH
from tests.support.engines import EOS, PROMPT, params
from tests.support.lossless import KEY, rollouts

ROOM = 192 - len(PROMPT)


def rows_of(drafting, monkeypatch):
    """What the engine core tells the workers about the requests that come."""
    rows, resident = [], drafting.scheduler.resident
    arrive = resident.arrive

    def noted(request):
        arrive(request)
        rows.append(row_of(request))

    monkeypatch.setattr(resident, "arrive", noted)
    return rows


def test_a_prompt_drafts_from_its_own_responses_from_the_second_time_on(drafting, monkeypatch):
    first = drafting.tokens(PROMPT, params(40, seed=1))
    assert drafting.counts()["histories_found"] == 0
    assert [list(r.tokens) for r in drafting.kept(KEY)] == first
    drafting.begin_anew()  # another engine on the same folder
    rows = rows_of(drafting, monkeypatch)
    drafting.tokens(PROMPT, params(40, seed=1))
    [row] = rows
    assert [(r.identity, r.tokens.tobytes()) for r in drafting.kept(KEY)[:1]] == row.history
    after = drafting.counts()
    assert after["histories_found"] == 1 and after["history_bytes"] == 4 * 40
    assert after["drafted_tokens"] > 0 and after["responses_kept"] == 1
    assert after["response_tokens"] == 40


def test_siblings_share_one_look_up_and_one_history(drafting, monkeypatch):
    drafting.remember(rollouts([[5, 6, 7, 8] * 5] * 3))
    rows = rows_of(drafting, monkeypatch)
    drafting.tokens([PROMPT] * 8, params(10))
    assert [len(row.history) for row in rows] == [3, 0, 0, 0, 0, 0, 0, 0]
    assert len({row.identity for row in rows}) == 8
    assert drafting.counts()["histories_found"] == 1
    # The engine has all of them, its own responses included.
    drafting.tokens(PROMPT, params(10))
    assert rows[-1].history == []
    drafting.remember(rollouts([[9, 9]]))
    drafting.tokens(PROMPT, params(10))
    assert [np.frombuffer(t, np.int32).tolist() for _, t in rows[-1].history] == [[9, 9]]


@pytest.mark.parametrize("ending", ["stop", "stop token", "length", "the model's limit"])
def test_a_response_is_kept_with_how_it_ended(drafting, ending):
    options, finish = {
        "stop": ({"ignore_eos": False}, Finish.STOP),
        "stop token": ({"stop_token_ids": [5, 6, 7]}, Finish.STOP),
        "length": ({"max_tokens": 9}, Finish.LENGTH),
        "the model's limit": ({"max_tokens": None}, Finish.LENGTH),
    }[ending]
    for seed in (0, 100):
        made = drafting.tokens(
            [PROMPT] * 12,
            [params(**{"max_tokens": ROOM, "seed": seed + i, **options}) for i in range(12)],
        )
        kept = drafting.kept(KEY)[-12:]
        assert sorted(list(r.tokens) for r in kept) == sorted(made)
        of = {tuple(r.tokens): r.finish for r in kept}
        for tokens in made:
            stops = {"stop": {EOS}, "stop token": {5, 6, 7}}.get(ending, set())
            assert stops.isdisjoint(tokens[:-1])
            whole = Finish.LENGTH if stops and tokens[-1] not in stops else finish
            assert of[tuple(tokens)] is whole
    assert drafting.counts()["accepted_tokens"] > 0


def test_an_aborted_response_and_one_with_a_stop_string_are_partial(drafting):
    """The front end finds stop strings, behind the engine core's back; so it is not inferred."""
    made = drafting.tokens(
        [PROMPT] * 8, [params(60, seed=i, detokenize=True, stop=["1", "3"]) for i in range(8)]
    )
    kept = drafting.kept(KEY)
    assert len(kept) == 8
    for rollout in kept:  # tokens behind the stop string's are kept as drafts, too
        assert any(list(rollout.tokens[: len(tokens)]) == tokens for tokens in made)
        assert rollout.finish is (Finish.LENGTH if len(rollout) == 60 else Finish.PARTIAL)
    engine = drafting.llm.llm_engine
    engine.add_request("aborted", {"prompt_token_ids": [*PROMPT, 4]}, params(50))
    engine.add_request("never begun", {"prompt_token_ids": [*PROMPT, 5, 5]}, params(50))
    for _ in range(4):
        engine.step()
    engine.abort_request(["aborted", "never begun"])
    while engine.has_unfinished_requests():
        engine.step()
    for last in ([4], [5, 5]):
        [partial] = drafting.kept(prompt_key([*PROMPT, *last])) or drafting.kept(KEY)[-1:]
        assert partial.finish is Finish.PARTIAL and 0 < len(partial) < 50


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"prompt_logprobs": 0},
        {"extra_args": {"spec_rl": False}},
        {"max_tokens": 1},
        {"extra_args": {"spec_rl": False, "spec_rl_row": "forged, over HTTP"}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_some_requests_are_neither_fetched_for_nor_kept(drafting, monkeypatch, options):
    drafting.remember(rollouts([[5, 6, 7, 8] * 5]))
    rows = rows_of(drafting, monkeypatch)
    drafting.tokens([PROMPT] * 2, params(**{"max_tokens": 12, **options}))
    assert rows == [None, None]
    counts = drafting.counts()
    assert counts.pop("drafting") == 1
    assert set(counts.values()) == {0}
    assert len(drafting.kept(KEY)) == 1


def test_a_host_may_say_where_the_response_begins_and_what_is_not_kept(drafting, monkeypatch):
    drafting.remember(rollouts([[5, 6, 7, 8] * 5]))
    rows = rows_of(drafting, monkeypatch)
    own = {"spec_rl": {"prompt_length": len(PROMPT), "keep": False, "ahead": True}, "mine": 1}
    mine = params(12, extra_args=own)
    drafting.tokens([[*PROMPT, 5, 6]], mine)
    assert mine.extra_args == own and own["mine"] == 1  # the caller's stay
    [row] = rows
    assert (row.key, row.start, row.counted, len(row.history)) == (KEY, len(PROMPT), False, 1)
    counts = drafting.counts()
    assert counts["responses_kept"] == counts["drafted_tokens"] == counts["response_tokens"] == 0
    made = drafting.tokens(
        [[*PROMPT, 5, 6]], params(3, extra_args={"spec_rl": {"prompt_length": len(PROMPT)}})
    )
    assert list(drafting.kept(KEY)[-1].tokens) == [5, 6, *made[0]]


@pytest.mark.parametrize("sampling", [{}, {"top_k": 1}], ids=["", "siblings that say the same"])
def test_a_conversation_is_one_response_to_its_first_prompt(drafting, monkeypatch, sampling):
    """Each turn replaces the record of the one before; two with the same beginning are two."""
    rows = rows_of(drafting, monkeypatch)
    said = [list(PROMPT), list(PROMPT)]
    for turn in range(3):
        made = drafting.tokens(said, [params(6, seed=10 * turn, **sampling)] * 2)
        kept = drafting.kept(KEY)
        assert sorted(list(r.tokens) for r in kept) == sorted(
            [*s[len(PROMPT) :], *t] for s, t in zip(said, made, strict=True)
        )
        said = [[*s, *t, 9, turn + 3] for s, t in zip(said, made, strict=True)]
        assert (said[0] == said[1]) == bool(sampling)
    assert {row.key for row in rows} == {KEY}
    assert [row.start for row in rows] == [len(PROMPT)] * 6
    # The conversation drafts for the next one of its prompt.
    drafting.begin_anew()
    drafting.tokens(PROMPT, params(20))
    assert drafting.counts()["drafted_tokens"] > 0


def test_turns_that_are_written_together_are_one_response(drafting):
    """The last one; those before it are in it, and not lost."""
    for tokens in ([5, 6], [5, 6, 7]):
        drafting.scheduler.resident._cache.put(Rollout(KEY, tokens, Finish.STOP, identity=5))
    assert [list(r.tokens) for r in drafting.kept(KEY)] == [[5, 6, 7]]
    assert drafting.scheduler.resident.counts()["spec_rl/responses_dropped"] == 0


def test_n_children_are_rows_of_their_own(drafting, monkeypatch):
    rows = rows_of(drafting, monkeypatch)
    for seed in (None, 3):
        [output] = drafting.generate(PROMPT, params(12, n=4, seed=seed))
        assert len(output.outputs) == 4
    assert len({row.identity for row in rows}) == 8 and len(drafting.kept(KEY)) == 8


def test_a_seed_is_not_used_again_for_a_prompt_whose_responses_it_may_have_made(
    drafting, monkeypatch
):
    seeds, resident = [], drafting.scheduler.resident
    arrive = resident.arrive

    def noted(request):
        arrive(request)
        seeds.append(request.sampling_params.seed)

    monkeypatch.setattr(resident, "arrive", noted)
    other = [*PROMPT[:-1], 9]
    drafting.tokens([PROMPT, PROMPT, other, PROMPT], [params(5, seed=s) for s in (7, 8, 7, 7)])
    assert seeds[:3] == [7, 8, 7] and seeds[3] not in (7, 8)
    assert resident.flush()
    drafting.tokens(PROMPT, params(5, seed=9))  # the cache has responses of unknown seeds now
    assert seeds[4] != 9 and len(set(seeds[3:])) == 2
    mine = params(5, seed=7)
    drafting.tokens(PROMPT, mine)
    assert mine.seed == 7 and seeds[5] not in seeds[:5]
    drafting.tokens(PROMPT, params(5))
    assert seeds[6] is None


def test_rows_that_were_preempted_are_kept_once_and_whole(drafting, monkeypatch):
    """The scheduler takes rows out of the engine and back in at a later step."""
    scheduler, preempted, steps = drafting.scheduler, [], [0]
    schedule = scheduler.schedule

    def with_preemption(*args, **kwargs):
        steps[0] += 1
        if steps[0] % 5 == 4 and len(scheduler.running) > 2:
            row = scheduler.running.pop()
            scheduler._preempt_request(row, 0.0)
            preempted.append(row.request_id)
        return schedule(*args, **kwargs)

    monkeypatch.setattr(scheduler, "schedule", with_preemption)
    for seed in (0, 100):
        made = drafting.tokens([PROMPT] * 8, [params(100, seed=seed + i) for i in range(8)])
        kept = drafting.kept(KEY)[-8:]
        assert sorted(list(r.tokens) for r in kept) == sorted(made)
        assert {len(r) for r in kept} == {100}
    assert len(preempted) > 3 and drafting.counts()["accepted_tokens"] > 0


def test_a_history_is_sent_again_if_its_request_never_ran(drafting, monkeypatch):
    drafting.remember(rollouts([[5, 6, 7, 8] * 5]))
    engine = drafting.llm.llm_engine
    engine.add_request("gone", {"prompt_token_ids": PROMPT}, params(12))
    engine.abort_request(["gone"])
    rows = rows_of(drafting, monkeypatch)
    drafting.tokens([PROMPT], params(12))
    assert [len(row.history) for row in rows] == [1]


def test_requests_that_run_when_an_engine_ends_are_kept_as_partial(drafting):
    engine = drafting.llm.llm_engine
    for i in range(3):
        engine.add_request(f"running {i}", {"prompt_token_ids": PROMPT}, params(100, seed=i))
    for _ in range(5):
        engine.step()
    core = engine.engine_core.engine_core
    for request in list(core.scheduler.requests.values()):
        core.scheduler.resident.end(request, Finish.PARTIAL)  # as ``shutdown`` does
    kept = drafting.kept(KEY)
    assert len(kept) == 3 and all(r.finish is Finish.PARTIAL and len(r) >= 4 for r in kept)
    engine.abort_request([f"running {i}" for i in range(3)])
    while engine.has_unfinished_requests():
        engine.step()
    assert len(drafting.kept(KEY)) == 3


def test_greedy_tokens_are_those_without_the_plug_in(drafting, llm):
    greedy = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, detokenize=False)
    drafting.tokens([PROMPT] * 4, params(30))
    prompts = [PROMPT, [*PROMPT, 5], [3, 4, 5]]
    plain = llm.generate([{"prompt_token_ids": p} for p in prompts], greedy, use_tqdm=False)
    assert drafting.tokens(prompts, greedy) == [list(o.outputs[0].token_ids) for o in plain]


def test_two_refits_without_an_accepted_token_are_warned_about_once(drafting, caplog):
    def batch(history):
        drafting.remember(rollouts(history))
        drafting.tokens([PROMPT] * 4, params(20))

    scheduler = drafting.scheduler
    for _ in range(4):
        scheduler._drafted, scheduler._accepted = 100, 0
        drafting.llm.reset_prefix_cache()
    assert drafting.counts()["refits_without_acceptance"] == 1
    assert caplog.text.count("no draft has been accepted for two refits") == 1
    batch([[5, 6, 7, 8] * 5] * 8)
    drafting.llm.reset_prefix_cache()
    assert scheduler._refits_without == 0


def test_a_turn_that_begins_with_the_response_alone_continues_it(drafting):
    """Nothing was added by the user."""
    [made] = drafting.tokens(PROMPT, params(6))
    [more] = drafting.tokens([[*PROMPT, *made]], params(5))
    assert [list(r.tokens) for r in drafting.kept(KEY)] == [[*made, *more]]


def test_what_workers_may_have_evicted_is_forgotten(drafting):
    """Their index holds so many tokens; of a prompt that comes back no seed is taken for new."""
    resident, prompts = drafting.scheduler.resident, [[*PROMPT, 5], [*PROMPT, 6], [*PROMPT, 7]]
    resident._most_bytes = 30 * resident_module.INDEXED_TOKEN_BYTES
    for prompt in prompts:
        drafting.tokens(prompt, params(20))
    [(key, last)] = resident._prompts.items()
    assert key == prompt_key(prompts[-1])
    assert resident._nbytes == last.nbytes == 20 * resident_module.INDEXED_TOKEN_BYTES
    assert last.seeds is None
    drafting.tokens(prompts, params(20))  # none of them can be forgotten meanwhile
    assert drafting.counts()["engine_failures"] == 0
    assert resident._nbytes == sum(prompt.nbytes for prompt in resident._prompts.values())


def test_a_request_that_the_engine_refuses_is_forgotten(drafting, monkeypatch):
    drafting.remember(rollouts([[5, 6, 7, 8] * 5]))
    requests, resident = [], drafting.scheduler.resident
    arrive = resident.arrive
    monkeypatch.setattr(resident, "arrive", lambda r: (requests.append(r), arrive(r)))
    drafting.tokens(PROMPT, params(5, extra_args={"mine": 1}))
    [request] = requests
    assert request.sampling_params.extra_args["mine"] == 1
    prompt = resident._prompts[KEY]
    assert prompt.live == {} and len(prompt.known) == 2
    prompt.known.clear()
    arrive(request)
    assert list(prompt.live) == [request.request_id] and len(prompt.known) >= 2
    resident.leave(request)
    assert prompt.live == {}
    assert len(prompt.known) == 1  # its own identity; the history was perhaps not sent
    resident.leave(request)


def test_after_three_late_look_ups_in_a_row_none_is_awaited(drafting):
    resident, late = drafting.scheduler.resident, _Lookup(KEY, ())
    resident._deadline = 0.001
    in_time = _Lookup(KEY, ())
    in_time.done.set()
    for lookup in (late, late, in_time, late, late):
        resident._await(lookup)
        assert resident._no_wait_until <= time.monotonic()
    resident._await(late)
    assert resident._no_wait_until > time.monotonic() + resident_module.PAUSE_SECONDS / 2
    assert drafting.counts()["histories_late"] == 5
    resident._deadline = 600  # which is not waited for
    resident._await(late)


def test_responses_of_unknown_seeds_change_what_derived_seeds_depend_on():
    prompt = _Prompt()
    seen = [prompt.others]
    for identities in ([5], [6], None):
        prompt.made_by_others(identities)
        seen.append(prompt.others)
    assert prompt.seeds is None
    assert len(set(seen[:3])) == 3 and seen[3] == seen[2]


class Held:
    """A cache behind its threads, which opens when it is told."""

    def __init__(self, folder, monkeypatch, error=None):
        self.opens, self.folder, self.counts = threading.Event(), folder, Counter()
        real = cache.open_cache

        def open_cache(*args, **kwargs):
            assert self.opens.wait(60)
            if error is not None:
                raise error
            return real(*args, **kwargs)

        monkeypatch.setattr(cache, "open_cache", open_cache)
        config = CacheConfig(dir=str(folder), vocabulary=VOCABULARY_HASH)
        self.cache = _Cache(config, self.counts)

    def put(self, *lengths):
        for length in lengths:
            self.cache.put(Rollout(KEY, [5] * length, Finish.LENGTH))

    @property
    def dropped(self):
        return self.counts["spec_rl/responses_dropped"]

    def kept(self):
        with RolloutStore(self.folder, vocabulary=VOCABULARY_HASH) as store:
            return sorted(len(r) for r in store.get([KEY]).get(KEY, []))


def test_only_so_much_waits_for_a_cache_that_is_slow_to_open(tmp_path, monkeypatch):
    monkeypatch.setattr(resident_module, "WAITING_LOOKUPS", 2)
    monkeypatch.setattr(resident_module, "WAITING_BYTES", 40)
    held = Held(tmp_path, monkeypatch)
    lookups = [held.cache.look_up(KEY, ()) for _ in range(3)]
    assert [lookup is None for lookup in lookups] == [False, False, True]
    assert held.counts["spec_rl/histories_refused"] == 1
    held.put(5, 6, 5)  # 20, 24 and 20 bytes
    assert held.dropped == 1
    assert not held.cache.flush(0.1)
    held.opens.set()
    assert all(lookup.done.wait(60) for lookup in lookups[:2])
    assert held.cache.flush(60) and held.counts["spec_rl/responses_kept"] == 2
    assert held.cache._flushing == 0
    held.put(10)  # there is room again, and the writer comes by itself
    deadline = time.monotonic() + 60
    while held.counts["spec_rl/responses_kept"] < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    held.cache.close()
    assert held.kept() == [5, 5, 10] and held.dropped == 1
    assert held.cache.look_up(KEY, ()) is None
    held.put(7)
    assert held.dropped == 2
    held.cache.close()
    assert held.kept() == [5, 5, 10]


def test_what_waits_for_a_cache_that_cannot_be_opened_is_dropped(tmp_path, monkeypatch, caplog):
    held = Held(tmp_path, monkeypatch, OSError("no such disk"))
    lookup = held.cache.look_up(KEY, ())
    held.put(5, 6)
    held.opens.set()
    assert lookup.done.wait(60) and not lookup.found
    assert held.cache.flush(60) and held.dropped == 2
    assert held.cache.look_up(KEY, ()) is None
    held.put(7)
    assert held.dropped == 3
    assert caplog.text.count("the rollout cache cannot be opened; nothing is kept") == 1
    held.cache.close()


def test_an_engine_does_not_wait_for_a_writer_that_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr(resident_module, "FLUSH_SECONDS", 0.2)
    held, begun, goes_on = Held(tmp_path, monkeypatch), threading.Event(), threading.Event()
    put = RolloutStore.put

    def slow(self, *args):
        begun.set()
        assert goes_on.wait(60)
        return put(self, *args)

    monkeypatch.setattr(RolloutStore, "put", slow)
    held.opens.set()
    held.put(5)
    assert begun.wait(60)
    held.put(6, 7)
    held.cache.close()
    assert held.dropped == 2
    goes_on.set()
    assert held.cache.flush(60) and held.counts["spec_rl/responses_kept"] == 1
