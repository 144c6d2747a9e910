"""Every case of the design's rule 4, and how a call is put together, on the real engine."""

import contextlib
import math

import numpy as np
import pytest
from vllm import SamplingParams

from nemo_specrl import Finish, Rollout, RolloutStore, prompt_key
from nemo_specrl.cache.journal import JournaledStore
from nemo_specrl.engine.assembly import reuse_of
from nemo_specrl.errors import ConfigError, UnsupportedSampling
from nemo_specrl.trainer.task import EOS, encode
from tests.conftest import DictCache

PROMPT = [1, *encode("12+34=?")]
SURE, NEVER = -60.0, 0.0  # an old log-prob that makes acceptance certain; or, with 1e-9, rejection
STRICT = 1e-9  # a lenience under which a token with old log-prob 0 is rejected (p < 1e-8 not to be)


def sampling(max_tokens=24, **options):
    options = {"seed": 7, "logprobs": 0, **options}
    return SamplingParams(temperature=1.0, max_tokens=max_tokens, **options)


def draft(tokens, logprobs=SURE, *, sample_index=0, finish=Finish.STOP, version=0, prompt=PROMPT):
    logprobs = np.broadcast_to(np.float32(logprobs), (len(tokens),))
    return Rollout(prompt_key(prompt), sample_index, tokens, logprobs, finish, version)


def generate(made, prompt=PROMPT, params=None, rows=1, **options):
    params = sampling() if params is None else params
    prompts = [{"prompt_token_ids": list(prompt)} for _ in range(rows)]
    return made.generate(prompts, params, use_tqdm=False, **options)


def only(outputs):
    (output,) = outputs
    (completion,) = output.outputs
    return completion


# --- rule 4 -----------------------------------------------------------------------------------


def test_every_draft_accepted_in_full(speculative):
    cache = DictCache()
    first = generate(speculative(cache), rows=16, params=[sampling(seed=i) for i in range(16)])
    again = speculative(cache, version=1)
    second = generate(again, rows=16, params=[sampling(seed=99 + i) for i in range(16)])
    assert {o.outputs[0].finish_reason for o in first} == {"stop", "length"}
    for a, b in zip(first, second, strict=True):
        assert b.outputs[0].token_ids == a.outputs[0].token_ids
        assert b.outputs[0].finish_reason == a.outputs[0].finish_reason
        assert b.outputs[0].stop_reason == a.outputs[0].stop_reason
        assert b.outputs[0].text == a.outputs[0].text
        assert b.prompt_token_ids == a.prompt_token_ids == PROMPT
        assert b.outputs[0].cumulative_logprob == pytest.approx(
            a.outputs[0].cumulative_logprob, abs=1e-3
        )
    assert again.metrics.full_reuses == again.metrics.drafts == 16
    assert again.metrics.decoded_tokens == 0
    assert again.metrics.accepted_tokens == again.metrics.response_tokens


def test_every_draft_rejected_at_the_first_token(speculative):
    tokens = encode("12+34=46;#46")
    cache = DictCache([draft(tokens, NEVER, sample_index=s) for s in range(8)])
    made = speculative(cache, version=1, lenience=STRICT)
    outputs = generate(made, rows=8, params=sampling(seed=None))
    assert made.metrics.drafts == 8
    assert made.metrics.accepted_tokens == made.metrics.full_reuses == 0
    assert made.metrics.decoded_tokens == sum(len(o.outputs[0].token_ids) for o in outputs)
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 8


def test_an_empty_response_in_the_cache_is_decoded_plainly(speculative):
    cache = DictCache(
        [draft([], finish=Finish.PARTIAL), draft([], sample_index=1, finish=Finish.LENGTH)]
    )
    made = speculative(cache, version=1)
    outputs = generate(made, rows=2)
    assert all(reuse_of(o.outputs[0]).fresh for o in outputs)
    assert made.metrics.drafts == 0


def test_a_response_of_its_end_alone_is_reused(speculative):
    made = speculative(DictCache([draft([EOS])]), version=1)
    completion = only(generate(made))
    assert list(completion.token_ids) == [EOS]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert completion.text == ""
    assert made.metrics.decoded_tokens == 0


def test_nothing_follows_an_end_of_sequence_and_padding_is_no_end(speculative):
    pad = 0  # eos is 2 here: a pad token is a token like any other
    made = speculative(DictCache([draft([*encode("1"), pad, pad, *encode("2"), EOS])]), version=1)
    completion = only(generate(made))
    assert list(completion.token_ids) == [*encode("1"), pad, pad, *encode("2"), EOS]
    assert completion.finish_reason == "stop"


def test_a_smaller_budget_cuts_the_draft(speculative):
    tokens = [*encode("12+34=46"), EOS]
    made = speculative(DictCache([draft(tokens)]), version=1)
    completion = only(generate(made, params=sampling(max_tokens=4)))
    assert list(completion.token_ids) == tokens[:4]
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)
    assert made.cache.all()[0].finish is Finish.LENGTH
    assert made.metrics.decoded_tokens == 0


@pytest.mark.parametrize("finish", [Finish.LENGTH, Finish.PARTIAL])
def test_a_larger_budget_is_decoded_on(speculative, finish):
    tokens = encode("12+34")
    made = speculative(DictCache([draft(tokens, finish=finish)]), version=1)
    completion = only(generate(made, params=sampling(max_tokens=20, ignore_eos=True)))
    assert list(completion.token_ids)[:5] == tokens
    assert len(completion.token_ids) == 20
    assert completion.finish_reason == "length"
    assert made.metrics.decoded_tokens == 15
    reuse = reuse_of(completion)
    assert (reuse.drafted, reuse.accepted) == (5, 5)
    assert reuse.birth_versions.tolist() == [0] * 5 + [1] * 15


def test_a_draft_exactly_as_long_as_the_budget_needs_no_decoding(speculative):
    tokens = encode("12+34")
    made = speculative(DictCache([draft(tokens, finish=Finish.LENGTH)]), version=1)
    completion = only(generate(made, params=sampling(max_tokens=5)))
    assert (completion.finish_reason, list(completion.token_ids)) == ("length", tokens)
    assert made.metrics.decoded_tokens == 0


def test_an_end_of_sequence_that_is_rejected_is_decoded_over(speculative):
    tokens = [*encode("12"), EOS]
    old = np.array([SURE, SURE, NEVER], dtype=np.float32)
    lengths = set()
    for seed in range(4):
        made = speculative(DictCache([draft(tokens, old)]), version=1, lenience=STRICT)
        completion = only(generate(made, params=sampling(seed=seed)))
        assert list(completion.token_ids)[:2] == tokens[:2]
        assert reuse_of(completion).accepted == 2
        lengths.add(len(completion.token_ids))
    assert max(lengths) > 3


def test_a_draft_goes_on_where_its_end_no_longer_ends_it(speculative):
    tokens = [*encode("12"), EOS]
    made = speculative(DictCache([draft(tokens)]), version=1)
    completion = only(generate(made, params=sampling(max_tokens=10, ignore_eos=True)))
    assert list(completion.token_ids)[:3] == tokens
    assert len(completion.token_ids) == 10


def test_a_stop_token_that_is_new_ends_the_draft_where_it_stands(speculative):
    semicolon = encode(";")[0]
    made = speculative(DictCache([draft([*encode("12;34"), EOS])]), version=1)
    completion = only(generate(made, params=sampling(stop_token_ids=[semicolon])))
    assert list(completion.token_ids) == encode("12;")
    assert (completion.finish_reason, completion.stop_reason) == ("stop", semicolon)
    assert completion.text == "12"  # as vLLM: the stop token is no part of the text


@pytest.mark.parametrize("include", [True, False])
def test_a_stop_string_across_the_seam(speculative, include):
    # The draft stands up to "...3"; whatever printable token is decoded behind it stops.
    stops = ["3" + c for c in "0123456789+-=;#?"]
    tokens, old = encode("12+34"), np.array([SURE] * 4 + [NEVER], dtype=np.float32)
    for seed in range(6):
        made = speculative(DictCache([draft(tokens, old)]), version=1, lenience=STRICT)
        params = sampling(
            seed=seed, stop=stops, include_stop_str_in_output=include, ignore_eos=True
        )
        completion = only(generate(made, params=params))
        assert completion.finish_reason == "stop"
        assert completion.stop_reason in stops
        assert completion.text == ("12+" + completion.stop_reason if include else "12+")
        assert list(completion.token_ids)[:4] == tokens[:4]
        # Special and unused tokens have no text and may lie in between; the last one completes it.
        assert encode(completion.stop_reason[-1])[0] == completion.token_ids[-1]
        assert len(completion.logprobs) == len(completion.token_ids)
        assert made.cache.all()[0].finish is Finish.STOP_STRING


def test_a_stop_string_in_the_continuation_alone(speculative):
    """A seeded continuation, once with stop strings watched here and once without any."""
    tokens, old = encode("12+34"), np.array([SURE] * 3 + [NEVER] * 2, dtype=np.float32)

    def run(**options):
        made = speculative(DictCache([draft(tokens, old)]), version=1, lenience=STRICT)
        params = sampling(max_tokens=60, ignore_eos=True, seed=5, **options)
        return only(generate(made, params=params))

    free = run()
    stop = free.text[10:12]
    assert len(stop) == 2
    held = run(stop=[stop], include_stop_str_in_output=True)
    assert held.text == free.text[: free.text.index(stop, 2) + 2]
    assert list(held.token_ids) == list(free.token_ids)[: len(held.token_ids)]


def test_a_stop_string_within_the_draft_ends_it(speculative):
    made = speculative(DictCache([draft([*encode("12+34=46;#46"), EOS])]), version=1)
    completion = only(generate(made, params=sampling(stop=["=4"])))
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "=4")
    assert completion.text == "12+34"
    assert list(completion.token_ids) == encode("12+34=4")
    assert made.metrics.decoded_tokens == 0


# --- limits of the model ----------------------------------------------------------------------


@pytest.mark.parametrize("room", [1, 2, 5])
def test_prompts_at_the_models_length_limit(speculative, room):
    prompt = [1, *(3 + i % 12 for i in range(192 - room - 1))]
    tokens = encode("1234567890")
    cache = DictCache([draft(tokens, prompt=prompt, finish=Finish.LENGTH)])
    made = speculative(cache, version=1)
    completion = only(generate(made, prompt, sampling(max_tokens=50, ignore_eos=True)))
    assert len(completion.token_ids) == room
    assert completion.finish_reason == "length"
    # The last token of the model's length cannot be verified, since vLLM wants room behind it.
    assert list(completion.token_ids)[: room - 1] == tokens[: room - 1]
    assert reuse_of(completion).accepted == room - 1


def test_a_prompt_beyond_the_limit_is_vllms_error_and_leaves_a_clean_engine(speculative, llm):
    made = speculative(
        DictCache([draft(encode("12"), sample_index=s) for s in range(4)]), version=1
    )
    prompts = [{"prompt_token_ids": PROMPT}] * 4 + [{"prompt_token_ids": [5] * 500}]
    with pytest.raises(Exception, match="500"):
        made.generate(prompts, sampling(), use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    assert len(only(generate(made)).token_ids) > 0


def test_verification_logits_are_bounded(speculative, llm):
    """The rows of a full vocabulary that verification has in memory at once."""
    from nemo_specrl.engine.compat import prompt_logprob_bytes

    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    prompt = [1, *(3 + i % 12 for i in range(160))]
    drafts = [encode(f"{s}234567") * 3 for s in range(4)]
    cache = DictCache([draft(d, prompt=prompt, sample_index=s) for s, d in enumerate(drafts)])
    rows, compute = [], model.compute_logits
    model.compute_logits = lambda hidden, *a, **k: (
        rows.append(len(hidden)) or compute(hidden, *a, **k)
    )
    try:
        generate(speculative(cache, version=1), prompt, rows=4)
    finally:
        del model.compute_logits
    per_row = 32 * (4 + 4)
    assert 90 < max(rows) <= prompt_logprob_bytes(llm) // per_row
    assert prompt_logprob_bytes(llm) == 192 * per_row  # a whole model's length, of one draft


# --- batches and parameters -------------------------------------------------------------------


def test_no_some_and_only_drafts(speculative):
    for drafted in (0, 3, 6):
        cache = DictCache([draft([*encode(f"{s}"), EOS], sample_index=s) for s in range(drafted)])
        made = speculative(cache, version=1)
        outputs = generate(made, rows=6, params=[sampling(seed=s) for s in range(6)])
        reuses = [reuse_of(o.outputs[0]) for o in outputs]
        assert [r.fresh for r in reuses] == [False] * drafted + [True] * (6 - drafted)
        for s, output in enumerate(outputs[:drafted]):
            assert output.outputs[0].text == f"{s}"
        assert len(made.cache.all()) == 6


def test_an_empty_batch(speculative):
    made = speculative()
    assert made.generate([], sampling(), use_tqdm=False) == []


def test_each_request_has_its_own_parameters(speculative):
    cache = DictCache(
        [draft(encode("123456"), sample_index=s, finish=Finish.LENGTH) for s in range(3)]
    )
    made = speculative(cache, version=1)
    params = [
        sampling(max_tokens=2),
        sampling(max_tokens=9, ignore_eos=True),
        sampling(stop_token_ids=encode("4"), logprobs=None),
    ]
    short, long, stopped = (o.outputs[0] for o in generate(made, rows=3, params=params))
    assert list(short.token_ids) == encode("12")
    assert len(long.token_ids) == 9
    assert list(stopped.token_ids) == encode("1234")
    assert (stopped.logprobs, stopped.cumulative_logprob) == (None, None)


def test_order_of_the_batch_is_kept(speculative):
    prompts = [[1, *encode(f"{i}+{i}=?")] for i in range(10, 30)]
    cache = DictCache([draft([*encode(f"{i}"), EOS], prompt=p) for i, p in enumerate(prompts)])
    made = speculative(cache, version=1)
    shuffled = [prompts[i] for i in np.random.default_rng(0).permutation(20)]
    outputs = made.generate([{"prompt_token_ids": p} for p in shuffled], sampling(), use_tqdm=False)
    assert [o.prompt_token_ids for o in outputs] == shuffled
    assert [o.outputs[0].text for o in outputs] == [str(prompts.index(p)) for p in shuffled]


def test_equal_drafts_are_verified_once_and_judged_each_by_itself(speculative, llm, monkeypatch):
    params = [sampling(seed=s, ignore_eos=True) for s in range(8)]
    plain = DictCache()
    only(generate(speculative(plain), params=sampling(max_tokens=12, ignore_eos=True)))
    (decoded,) = plain.all()
    # Old log-probs that are too high: each sample index rejects at a place of its own.
    old = np.minimum(decoded.logprobs + np.float32(0.3), 0)
    cache = [draft(decoded.tokens, old, sample_index=s, finish=Finish.LENGTH) for s in range(8)]
    verified = []
    add = llm.llm_engine.add_request

    def count(request_id, prompt, params, **options):
        if params.prompt_logprobs is not None:
            verified.append(request_id)
        return add(request_id, prompt, params, **options)

    monkeypatch.setattr(llm.llm_engine, "add_request", count)
    together = speculative(DictCache(cache), version=1, lenience=1.0)
    got = [o.outputs[0] for o in generate(together, rows=8, params=params)]
    assert len(verified) == 1
    assert together.metrics.drafts == 8
    alone = speculative(DictCache(cache), version=1, lenience=1.0)
    for sample_index, completion in enumerate(got):
        other = only(generate(alone, params=params[sample_index], sample_indices=[sample_index]))
        assert list(completion.token_ids) == list(other.token_ids)
        assert reuse_of(completion).accepted == reuse_of(other).accepted
        assert list(completion.logprobs)[-1].keys() == list(other.logprobs)[-1].keys()
    assert len(verified) == 9
    assert len({reuse_of(c).accepted for c in got}) > 2, "drafts that do not part prove nothing"
    kept = {r.sample_index: r for r in together.cache.all()}
    assert {s: r.tokens.tolist() for s, r in kept.items()} == {
        s: list(c.token_ids) for s, c in enumerate(got)
    }


def test_several_rollouts_of_one_request(speculative):
    cache = DictCache([draft([*encode(f"{s}"), EOS], sample_index=s) for s in (0, 2)])
    made = speculative(cache, version=1)
    (output,) = generate(made, params=sampling(n=3))
    assert [c.index for c in output.outputs] == [0, 1, 2]
    assert [reuse_of(c).fresh for c in output.outputs] == [False, True, False]
    assert {r.sample_index for r in made.cache.all()} == {0, 1, 2}


def test_sample_indices_may_come_in_several_calls(speculative):
    cache = DictCache([draft([*encode(f"{s}"), EOS], sample_index=s) for s in range(4)])
    made = speculative(cache, version=1)
    texts = [only(generate(made, sample_indices=[s])).text for s in (3, 1, 0, 2)]
    assert texts == ["3", "1", "0", "2"]
    with pytest.raises(ConfigError, match="the same sample index"):
        generate(made, rows=2, sample_indices=[1, 1])
    with pytest.raises(ConfigError, match="sample_indices: 1 of them for 2 prompts"):
        generate(made, rows=2, sample_indices=[1])


def test_plain_rows_are_what_vllm_returns(speculative, llm):
    """Text, token ids, log-probs, ranks and endings of rows without a draft, seed by seed."""
    params = [
        sampling(seed=i, logprobs=[0, 2, None][i % 3], flat_logprobs=i % 2 == 0, stop=["7"])
        for i in range(12)
    ]
    prompts = ["12+34=?", PROMPT] * 6
    expected = llm.generate(prompts, params, use_tqdm=False)
    for output, reference in zip(
        speculative().generate(prompts, params, use_tqdm=False), expected, strict=True
    ):
        got, want = output.outputs[0], reference.outputs[0]
        assert list(got.token_ids) == list(want.token_ids)
        assert (got.text, got.finish_reason) == (want.text, want.finish_reason)
        assert (got.stop_reason, got.index) == (want.stop_reason, want.index)
        assert (output.prompt, output.prompt_token_ids) == (
            reference.prompt,
            reference.prompt_token_ids,
        )
        assert type(got.logprobs) is type(want.logprobs)
        if want.logprobs is not None:
            assert list(got.logprobs) == list(want.logprobs)
            assert got.cumulative_logprob == pytest.approx(want.cumulative_logprob, abs=1e-4)


@pytest.mark.parametrize(("wanted", "flat"), [(0, True), (0, False), (3, False)])
def test_logprobs_of_reused_tokens_are_those_of_plain_decoding(speculative, wanted, flat):
    """Half a response is reused and the rest decoded: all log-probs as if decoded in one piece."""
    cache = DictCache()
    params = sampling(max_tokens=30, ignore_eos=True, logprobs=wanted, flat_logprobs=flat)
    plain = only(generate(speculative(cache), params=params))
    (whole,) = cache.all()
    half = DictCache([whole.prefix(15)])
    made = speculative(half, version=1)
    joined = only(generate(made, params=params))
    assert reuse_of(joined).accepted == 15
    assert list(joined.token_ids)[:15] == list(plain.token_ids)[:15]
    for a, b in zip(list(plain.logprobs)[:15], list(joined.logprobs)[:15], strict=True):
        assert list(a) == list(b)
        for token in a:
            assert b[token].logprob == pytest.approx(a[token].logprob, abs=0.02)
            assert b[token].decoded_token == a[token].decoded_token
    assert len(joined.logprobs) == 30


def test_a_continuation_is_not_drawn_from_its_drafts_stream(speculative):
    """A caller that seeds each row the same at every step must not get correlated tokens."""
    cache = DictCache()
    first = only(generate(speculative(cache), params=sampling(max_tokens=8, ignore_eos=True)))
    (whole,) = cache.all()
    seen = set()
    for version in range(1, 6):
        made = speculative(DictCache([whole.prefix(1)]), version=version)
        completion = only(generate(made, params=sampling(max_tokens=8, ignore_eos=True)))
        seen.add(tuple(completion.token_ids)[1:])
    assert len(seen) == 5
    assert tuple(first.token_ids)[1:] not in seen


# --- what never touches the cache -------------------------------------------------------------


def test_greedy_requests_neither_read_nor_write_the_cache(speculative):
    made = speculative(DictCache([draft([*encode("12"), EOS])]), version=1)
    before = made.cache.all()
    outputs = generate(made, rows=2, params=SamplingParams(temperature=0.0, max_tokens=6))
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
    assert made.cache.all() == before
    assert made.cache.puts == 0
    assert made.metrics.drafts == 0


def test_requests_for_prompt_logprobs_get_the_engines_own(speculative):
    made = speculative(DictCache([draft([*encode("12"), EOS])]), version=1)
    (output,) = generate(made, params=sampling(prompt_logprobs=1))
    assert len(output.prompt_logprobs) == len(PROMPT)
    assert reuse_of(output.outputs[0]).fresh


def test_a_sample_index_is_drafted_once_for_each_policy_version(speculative):
    made = speculative(DictCache([draft([*encode("12"), EOS])]), version=1)
    assert not reuse_of(only(generate(made))).fresh
    assert reuse_of(only(generate(made))).fresh
    made.policy_version = 2
    assert not reuse_of(only(generate(made))).fresh


def test_switched_off_it_is_the_engine(speculative, llm):
    made = speculative()
    object.__setattr__(made.config, "enabled", False)
    got = only(generate(made))
    want = only(llm.generate({"prompt_token_ids": PROMPT}, sampling(), use_tqdm=False))
    assert list(got.token_ids) == list(want.token_ids)
    assert made.cache.gets == made.cache.puts == 0


# --- what goes wrong --------------------------------------------------------------------------


class BrokenCache(DictCache):
    on = "nothing yet"

    def get(self, keys):
        if self.on == "get":
            raise OSError("the disk is gone")
        return super().get(keys)

    def put(self, rollouts):
        if self.on == "put":
            raise OSError("the disk is gone")
        super().put(rollouts)


@pytest.mark.parametrize("on", ["get", "put"])
def test_a_cache_that_fails_costs_speed_alone(speculative, llm, caplog, on):
    cache = BrokenCache()
    cache.on = on
    made = speculative(cache, version=1)
    outputs = generate(made, rows=3, params=[sampling(seed=i) for i in range(3)])
    plain = llm.generate([PROMPT] * 3, [sampling(seed=i) for i in range(3)], use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [
        list(o.outputs[0].token_ids) for o in plain
    ]
    # Of puts as many as there were: rows that finish together are put together.
    assert 1 <= made.metrics.cache_errors <= (1 if on == "get" else 3)
    messages = [r.message for r in caplog.records if "rollout cache failed" in r.message]
    assert len(messages) == 1


def test_a_draft_of_foreign_tokens_is_decoded_plainly(speculative):
    made = speculative(DictCache([draft([5, 31_999, 6])]), version=1)
    assert reuse_of(only(generate(made))).fresh
    assert made.metrics.refused_drafts == 1


def test_a_damaged_record_is_decoded_plainly_and_counted(speculative, tmp_path):
    """A real store, one byte of one rollout's tokens flipped on disk; its sibling is reused."""
    options = {"max_bytes": 2**21, "tokenizer_id": "test"}
    tokens = [*encode("12+34=46;#46"), EOS]
    with RolloutStore(tmp_path / "store", **options) as store:
        store.put([draft(tokens), draft([*encode("99"), EOS], sample_index=1)])
    path = tmp_path / "store" / "data.mdb"
    data = bytearray(path.read_bytes())
    place = data.index(np.asarray(tokens, dtype="<u2").tobytes())
    data[place] ^= 1
    path.write_bytes(data)
    with RolloutStore(tmp_path / "store", **options) as store:
        made = speculative(store, version=1)
        damaged, sound = generate(made, rows=2, params=[sampling(seed=1), sampling(seed=2)])
        assert reuse_of(damaged.outputs[0]).fresh
        assert sound.outputs[0].text == "99"
        assert store.stats().corrupt_records == 1
        assert made.metrics.cache_errors == 0
        assert len(store) == 2  # what was decoded has taken the damaged record's place


def test_an_interrupt_leaves_an_engine_that_can_be_used_again(speculative, llm):
    made = speculative(
        DictCache([draft(encode("12"), sample_index=s) for s in range(4)]), version=1
    )

    class Interrupt:
        def __init__(self, **_):
            pass

        def update(self, _):
            raise KeyboardInterrupt

        def close(self):
            pass

    with pytest.raises(KeyboardInterrupt):
        made.generate([PROMPT] * 200, sampling(), use_tqdm=Interrupt)
    assert not llm.llm_engine.has_unfinished_requests()
    assert len(generate(made, rows=3)) == 3


def interrupt_after(llm, monkeypatch, steps):
    step = llm.llm_engine.step
    left = iter(range(steps))

    def stepped():
        if next(left, None) is None:
            monkeypatch.setattr(llm.llm_engine, "step", step)
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.llm_engine, "step", stepped)


@pytest.mark.parametrize("stop", [None, ["99"]], ids=["", "stop string"])
def test_what_an_interrupt_finds_under_way_is_kept_and_continued(
    speculative, llm, monkeypatch, stop
):
    """A draft accepted in part, a row without one, and one that was still being verified."""
    old = draft([*encode("12"), *encode("7777")], [SURE, SURE, *[NEVER] * 4], sample_index=0)
    cache = DictCache([old])
    params = sampling(ignore_eos=True, max_tokens=60, stop=stop)
    made = speculative(cache, version=1, lenience=STRICT)
    made.fingerprint = 5
    interrupt_after(llm, monkeypatch, 12)
    with pytest.raises(KeyboardInterrupt):
        generate(made, rows=2, params=params)
    by_sample = {r.sample_index: r for r in cache.all()}
    assert set(by_sample) == {0, 1}
    for partial in by_sample.values():
        assert partial.finish is Finish.PARTIAL
        assert (partial.policy_version, partial.fingerprint, partial.occurrence) == (
            *(1, 5),
            1 - partial.sample_index,
        )
        assert 5 < len(partial) < 60
    assert by_sample[0].tokens[:2].tolist() == old.tokens[:2].tolist()
    assert by_sample[0].birth_versions.tolist() == [0, 0] + [1] * (len(by_sample[0]) - 2)
    assert by_sample[0].birth_logprobs[:2].tolist() == [SURE, SURE]
    assert set(by_sample[1].birth_versions.tolist()) == {1}
    # The same weights go on with it, and so do those that come next.
    for version in (1, 2):
        again = speculative(DictCache(by_sample.values()), version=version, lenience=1e6)
        outputs = generate(again, rows=2, params=params)
        for output, partial in zip(outputs, (by_sample[0], by_sample[1]), strict=True):
            n = len(partial)
            assert list(output.outputs[0].token_ids[:n]) == partial.tokens.tolist()
            assert reuse_of(output.outputs[0]).accepted == n
        finished = {r.sample_index: r for r in again.cache.all()}
        assert [finished[s].occurrence for s in (0, 1)] == [1, 0]
        assert Finish.PARTIAL not in {r.finish for r in finished.values()}


def test_what_a_lost_step_had_made_is_taken_as_it_is(speculative, tmp_path):
    """Plain rows, drafted rows, a stop string; metrics and log-probs to the bit."""

    def opened(name):
        return JournaledStore(
            tmp_path / name,
            tmp_path / "journal",
            run="test",
            max_bytes=8 * 2**20,
            tokenizer_id="test",
        )

    def made_by(cache, version, fingerprint):
        made = speculative(cache, version=version, lenience=1.0)
        made.fingerprint = fingerprint
        return made

    def step(made):
        params = [sampling(seed=s, stop=["9"] if s % 3 == 0 else None) for s in range(8)]
        return generate(made, rows=8, params=params)

    store = opened("store")
    step(made_by(store, 0, 1))
    store.snapshot(tmp_path / "snapshot")
    store.forget()
    first = made_by(store, 1, 2)
    before = step(first)
    kept = store.get([prompt_key(PROMPT)])
    twice = step(first)  # the same rows again under the same weights: other rollouts
    store.close()
    RolloutStore.restore(tmp_path / "snapshot", tmp_path / "store")  # as after a crash
    with contextlib.closing(opened("store")) as store:
        again = made_by(store, 1, 2)
        after = step(again)
        assert store.get([prompt_key(PROMPT)]) == kept
        assert again.metrics.replayed_rows == 8 and first.metrics.replayed_rows == 0
        for old, new in zip(before + twice, after + step(again), strict=True):
            a, b = old.outputs[0], new.outputs[0]
            for name in ("token_ids", "text", "finish_reason", "stop_reason", "cumulative_logprob"):
                assert getattr(a, name) == getattr(b, name), name
            assert [next(iter(p.values())).logprob for p in a.logprobs] == [
                next(iter(p.values())).logprob for p in b.logprobs
            ]
            for name in ("drafted", "accepted"):
                assert getattr(reuse_of(a), name) == getattr(reuse_of(b), name)
            for name in ("policy_logprobs", "birth_logprobs", "birth_versions"):
                assert getattr(reuse_of(a), name).tolist() == getattr(reuse_of(b), name).tolist()
        step(again)
        assert again.metrics.replayed_rows == 0  # each is taken once
    RolloutStore.restore(tmp_path / "snapshot", tmp_path / "store")
    with contextlib.closing(opened("store")) as store:
        other = made_by(store, 1, 3)  # the step could not be repeated to the bit
        step(other)
        assert other.metrics.replayed_rows == 0
        assert other.metrics.drafts == 8
        assert other.metrics.accepted_tokens == other.metrics.draft_tokens  # p_new = p_old here
    RolloutStore.restore(tmp_path / "snapshot", tmp_path / "store")
    with contextlib.closing(opened("store")) as store:
        unknown = made_by(store, 1, 0)
        step(unknown)
        assert unknown.metrics.replayed_rows == 0


@pytest.mark.parametrize(
    "option",
    [
        {"temperature": 0.7},
        {"top_p": 0.9},
        {"top_k": 5},
        {"min_p": 0.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"min_tokens": 3},
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": [3, 4]},
        {"bad_words": ["1"]},
    ],
)
def test_sampling_that_cannot_be_verified_is_refused(speculative, option):
    ((name, value),) = option.items()
    params = SamplingParams(**{"temperature": 1.0, "max_tokens": 4, **option})
    with pytest.raises(UnsupportedSampling, match=f"{name} = .*set {name}: ") as caught:
        generate(speculative(), params=params)
    assert "\n" not in str(caught.value)
    assert str(value)[:3] in str(caught.value)


def test_age_is_bounded_in_epochs(speculative):
    """A row is drafted max_age times in a row, no more and (after its first turn) no less."""
    cache, rows = DictCache(), 8
    fresh = []
    for version in range(12):
        made = speculative(cache, version=version, lenience=1e6, max_age=2)
        outputs = generate(made, rows=rows, params=sampling(max_tokens=3))
        fresh.append([reuse_of(o.outputs[0]).fresh for o in outputs])
        assert [r.occurrence for r in cache.all()] == [version] * rows
    for row in np.array(fresh).T:
        turns = np.flatnonzero(row)
        assert turns[0] == 0 and turns[1] <= 3
        assert set(np.diff(turns[1:])) == {3}


def test_reported_logprobs(speculative):
    """`policy` reports p_new for accepted tokens, `behaviour` min(p_old, l * p_new)."""
    tokens, old = [*encode("12+34"), EOS], np.float32(-5.0)
    rows = {}
    for mode in ("policy", "behaviour"):
        made = speculative(
            DictCache([draft(tokens, old)]), version=1, lenience=1e6, reported_logprobs=mode
        )
        rows[mode] = only(generate(made))
    new = reuse_of(rows["policy"]).policy_logprobs
    carried = [next(iter(p.values())).logprob for p in rows["policy"].logprobs]
    assert carried == pytest.approx(new.tolist(), abs=1e-6)
    carried = [next(iter(p.values())).logprob for p in rows["behaviour"].logprobs]
    assert carried == pytest.approx(np.minimum(old, new + math.log(1e6)).tolist(), abs=1e-5)
    assert reuse_of(rows["behaviour"]).policy_logprobs.tolist() == new.tolist()
    (stored,) = made.cache.all()
    assert stored.logprobs.tolist() == new.tolist()  # the cache keeps the policy's own
    assert stored.birth_logprobs.tolist() == [-5.0] * 6


def test_acceptance_against_birth(speculative):
    tokens = [*encode("12"), EOS]
    made_from = Rollout(
        prompt_key(PROMPT),
        0,
        tokens,
        [SURE] * 3,
        Finish.STOP,
        5,
        birth_logprobs=[SURE, NEVER, SURE],
        birth_versions=[1, 2, 3],
    )
    for reference, accepted in (("last", 3), ("birth", 1)):
        made = speculative(
            DictCache([made_from]), version=6, lenience=STRICT, acceptance_reference=reference
        )
        completion = only(generate(made))
        assert reuse_of(completion).accepted == accepted
        births = reuse_of(completion).birth_versions.tolist()
        assert births[:accepted] == [1, 2, 3][:accepted]
        assert set(births[accepted:]) <= {6}
