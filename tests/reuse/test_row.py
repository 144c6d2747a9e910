"""One row without an engine: what it asks for, and what it makes of the answers."""

import itertools
import math

import numpy as np
import pytest

from nemo_specrl import Finish, prompt_key
from nemo_specrl.reuse.acceptance import random_stream
from nemo_specrl.reuse.noise import RoundingNoise
from nemo_specrl.reuse.row import PIECE_TOKENS
from nemo_specrl.trainer.data.toy_tasks import encode
from tests.reuse.markov import BLOCK, MarkovEngine, chain, limits, moved, row
from tests.reuse.support import NEVER, STRICT, SURE, draft, sampling
from tests.reuse.test_acceptance import algorithm_1
from tests.support.engines import EOS, PROMPT, VOCABULARY

OLD = chain()


@pytest.fixture
def engine():
    return MarkovEngine(moved(OLD, 0.2))


def drawn(tokens, *, finish=Finish.LENGTH, prompt=PROMPT):
    """These tokens as a draft of the first chain."""
    pairs = np.array(list(itertools.pairwise([prompt[-1], *tokens])), int).reshape(-1, 2)
    return draft(tokens, OLD[pairs[:, 0], pairs[:, 1]], finish=finish, prompt=prompt)


def long_draft(length, seed=0, prompt=PROMPT):
    tokens = MarkovEngine(OLD, seed=seed)._decode(prompt, sampling(length, ignore_eos=True))[0]
    return drawn(tokens, prompt=prompt)


def completed(row):
    completion = row.completion
    assert len(completion.token_ids) == len(completion.logprobs)
    return list(completion.token_ids), completion.finish_reason, completion.stop_reason


@pytest.mark.parametrize("lenience", [1.0, math.exp(0.2), math.exp(0.5)])
def test_pieces_accept_what_the_rule_accepts_of_the_whole(engine, lenience):
    """120 rows of up to four pieces against Algorithm 1 on the whole draft, with these uniforms."""
    lengths = []
    gentle = MarkovEngine(moved(OLD, 0.002))
    for number in range(120):
        draft_ = long_draft(int(np.random.default_rng(number).integers(1, 1900)), seed=number % 40)
        tokens = draft_.tokens
        new = gentle.log_p[[PROMPT[-1], *tokens[:-1]], tokens]
        stream = random_stream("accept", 0, 1, number, prompt_key(PROMPT), tokens.tobytes())
        uniforms = 1 - stream.random(len(tokens))
        expected = algorithm_1(np.exp(new), np.exp(draft_.logprobs), uniforms, lenience)
        params = sampling(len(tokens) + 5, ignore_eos=True, flat_logprobs=True)
        made = gentle.run(row(draft_, params=params, number=number, lenience=lenience))
        assert made.accepted == expected
        assert made.verified <= min(len(draft_), expected // PIECE_TOKENS * PIECE_TOKENS + 1100)
        assert list(made.completion.token_ids[:expected]) == tokens[:expected].tolist()
        assert made.completion.spec_rl.policy_logprobs[:expected] == pytest.approx(new[:expected])
        lengths.append(expected)
    assert sum(length > 600 for length in lengths) > 10


@pytest.mark.parametrize("v2", [False, True])
def test_nothing_is_prefilled_twice(v2):
    """A group of 16 drafts accepted whole: the prompt once, each draft once, but for parts of
    blocks.
    """
    prompt = [1, *np.random.default_rng(0).integers(3, VOCABULARY, 996).tolist()]
    engine = MarkovEngine(OLD, v2=v2)
    rows = []
    for number in range(16):
        draft_ = long_draft(2000, seed=number, prompt=prompt)
        made = engine.run(row(draft_, prompt=prompt, params=sampling(2000, ignore_eos=True)))
        assert made.accepted == 2000 and made.drafted == 2000 and not made.decoded
        rows.append(made)
    assert rows[0].prefilled <= 997 + 2000 + 8
    assert sum(r.prefilled for r in rows) <= 997 + 16 * (2000 + BLOCK + 8)
    assert len(engine.requests) == 16 * 4
    ends = {(len(r.tokens)) % BLOCK for r in engine.requests[:3]}
    assert ends == {1}, "a piece ends behind the first token of a block"


def test_at_three_tenths_accepted_at_most_half_is_verified():
    """Drafts of 2,048 tokens whose tokens are rejected at a constant rate."""
    engine = MarkovEngine(OLD)
    verified = accepted = total = 0
    for number in range(120):
        draft_ = long_draft(2048, seed=number % 10)
        rate = np.float32(1 / 640)
        object.__setattr__(draft_, "logprobs", draft_.logprobs - np.log1p(-rate))
        params = sampling(2048, ignore_eos=True, flat_logprobs=True)
        made = engine.run(row(draft_, params=params, number=number, lenience=1.0))
        verified, accepted = verified + made.verified, accepted + made.accepted
        total += 2048
    assert 0.25 < accepted / total < 0.35
    assert verified / total < 0.5


@pytest.mark.parametrize("v2", [False, True])
def test_what_a_sibling_left_in_the_cache_is_read_around(v2):
    """The same draft again: its log-probs are hidden by the cache, and it is prefilled anew."""
    engine, draft_ = MarkovEngine(OLD, v2=v2), long_draft(100)
    first, again = (
        engine.run(row(draft_, params=sampling(100, ignore_eos=True), number=n)) for n in (0, 1)
    )
    assert first.accepted == again.accepted == 100
    assert len(engine.requests) == 3
    assert [r.params.skip_reading_prefix_cache for r in engine.requests] == [False, False, True]
    assert again.completion.spec_rl.policy_logprobs == pytest.approx(draft_.logprobs)


def test_a_prompt_of_whole_blocks_reads_no_cache():
    prompt = [1, *encode("12+34=?" * 4), 5, 6, 7][:BLOCK]
    engine = MarkovEngine(OLD)
    for number in range(2):
        draft_ = long_draft(20, seed=number, prompt=prompt)
        made = engine.run(row(draft_, prompt=prompt, params=sampling(20, ignore_eos=True)))
        assert made.accepted == 20
    assert all(r.params.skip_reading_prefix_cache for r in engine.requests)


def nothing(request, output):
    output.prompt_logprobs = None


def too_few(request, output):
    output.prompt_logprobs = output.prompt_logprobs[1:]


def nan(request, output):
    output.prompt_logprobs.logprobs[-1] = math.nan


def of_other_tokens(request, output):
    output.prompt_logprobs.token_ids[-2] = 0


@pytest.mark.parametrize("damage", [nothing, too_few, nan, of_other_tokens])
def test_a_draft_that_cannot_be_read_is_refused(engine, damage):
    def spoil(request, output):
        if output.prompt_logprobs is not None:
            damage(request, output)

    engine.spoil = spoil
    made = engine.run(row(draft(encode("12+34")), params=sampling(30)))
    assert made.accepted == made.verified == 0 and made.drafted == 5
    assert made.completion.spec_rl.fresh and made.rollout is not None
    assert engine.requests[-1].tokens == PROMPT
    assert engine.requests[-1].params.seed == 7, "as the caller asked"


def test_the_first_rejection_cuts_and_its_token_is_drawn_anew(engine):
    tokens = encode("12+34=46")
    old = [SURE, SURE, SURE, NEVER, SURE, SURE, SURE, SURE]
    thirds = []
    for number in range(40):
        params = sampling(6, ignore_eos=True)
        made = engine.run(row(draft(tokens, old), params=params, number=number, lenience=STRICT))
        assert made.accepted == 3
        assert list(made.completion.token_ids[:3]) == tokens[:3]
        assert (made.decoded, made.verified) == (3, 6)
        thirds.append(made.completion.token_ids[3])
    assert len(set(thirds)) > 3
    assert len({r.params.seed for r in engine.requests if r.params.prompt_logprobs is None}) == 40


def test_a_verification_computes_no_more_than_it_needs(engine):
    """Of what was accepted, the continuation computes the part behind the last whole block."""
    tokens, old = long_draft(300).tokens.tolist(), [SURE] * 40 + [NEVER] * 260
    params = sampling(320, ignore_eos=True)
    made = engine.run(row(draft(tokens, old), params=params, lenience=STRICT))
    first, *_, last = engine.requests
    assert (first.params.temperature, first.params.max_tokens) == (0.0, 1)
    assert (first.params.prompt_logprobs, first.params.detokenize) == (0, False)
    assert made.accepted == 40 and last.params.max_tokens == 320 - 40
    before = len(PROMPT) + 40
    assert made.prefilled_again == before - BLOCK * ((before - 1) // BLOCK)


def test_a_row_without_a_seed_gets_none(engine):
    made = engine.run(row(draft(encode("12")), params=sampling(9, seed=None)))
    assert made.verified and made.decoded
    assert [request.params.seed for request in engine.requests] == [None] * len(engine.requests)


@pytest.mark.parametrize("missing", [1, 0, -5])
def test_routes_are_those_of_all_tokens_but_the_last(engine, missing):
    """What was in the prefix cache has none; then there are too few, and none are told."""
    known = len(PROMPT) + 9 - 1

    def spoil(request, output):
        output.outputs[0].routed_experts = np.arange(known - missing)

    engine.spoil = spoil
    made = engine.run(row(params=sampling(9, ignore_eos=True)))
    told = made.completion.routed_experts
    assert told is None if missing > 0 else told.tolist() == list(range(known))


def test_a_draft_accepted_whole_needs_no_decoding(engine):
    tokens = [*encode("12+34"), EOS]
    made = engine.run(row(draft(tokens)))
    assert completed(made) == (tokens, "stop", None)
    assert made.completion.text == "12+34"
    assert len(engine.requests) == 1 and made.rollout.finish is Finish.STOP
    assert made.rollout.tokens.tolist() == tokens
    assert made.rollout.policy_version == 1
    reuse = made.completion.spec_rl
    assert (reuse.drafted, reuse.verified, reuse.accepted, reuse.fresh) == (6, 6, 6, False)
    assert reuse.old_logprobs.tolist() == [SURE] * 6
    assert reuse.policy_logprobs == pytest.approx(made.rollout.logprobs)


def test_an_end_of_sequence_that_is_rejected_is_decoded_over(engine):
    tokens = [*encode("12"), EOS]
    made = engine.run(row(draft(tokens, [SURE, SURE, NEVER]), lenience=STRICT))
    assert made.accepted == 2 and made.decoded > 0


def test_nothing_follows_an_end_of_sequence_and_padding_is_no_end(engine):
    tokens = [*encode("1"), 0, 0, *encode("2"), EOS]
    made = engine.run(row(draft([*tokens, 5, 6])))
    assert completed(made) == (tokens, "stop", None)


def test_an_end_that_no_longer_ends_is_decoded_on(engine):
    tokens = [*encode("12"), EOS]
    made = engine.run(row(draft(tokens), params=sampling(10, ignore_eos=True)))
    assert list(made.completion.token_ids[:3]) == tokens and len(made.completion.token_ids) == 10


def test_stop_tokens_end_the_draft_as_vllm_reports_them(engine):
    semicolon, end = encode(";")[0], draft([*encode("12;34"), EOS])
    made = engine.run(row(end, params=sampling(stop_token_ids=[semicolon])))
    assert completed(made) == (encode("12;"), "stop", semicolon)
    assert made.completion.text == "12"  # as vLLM: a stop token is no part of the text
    also_eos = limits(extra_eos=frozenset({semicolon}))
    assert completed(engine.run(row(end, at=also_eos)))[2] == semicolon
    params = sampling(6, ignore_eos=True)
    assert completed(engine.run(row(end, at=also_eos, params=params)))[1] == "length"
    params = sampling(stop_token_ids=[EOS])
    assert completed(engine.run(row(end, params=params)))[1:] == ("stop", None)


@pytest.mark.parametrize("finish", [Finish.LENGTH, Finish.PARTIAL])
def test_budgets_cut_drafts_and_go_on_behind_them(engine, finish):
    tokens = encode("12+34=46")
    smaller = engine.run(row(draft(tokens, finish=finish), params=sampling(4)))
    assert completed(smaller) == (tokens[:4], "length", None)
    assert smaller.rollout.finish is Finish.LENGTH
    equal = engine.run(row(draft(tokens, finish=finish), params=sampling(8)))
    assert completed(equal) == (tokens, "length", None)
    assert len(engine.requests) == 2
    larger = engine.run(row(draft(tokens, finish=finish), params=sampling(20, ignore_eos=True)))
    assert completed(larger)[0][:8] == tokens and larger.decoded == 12
    continuation = engine.requests[-1]
    assert continuation.tokens == PROMPT + tokens
    assert continuation.params.max_tokens == 12
    assert continuation.params.extra_args["spec_rl"] == {"prompt_length": 8, "keep": False}


def test_the_models_limit_ends_a_response_and_leaves_room_for_a_prefill(engine):
    engine.limits = short = limits(max_model_len=16)
    made = engine.run(row(draft(encode("12+34=46")), at=short, params=sampling(None)))
    assert made.drafted == 7, "vLLM wants room for a token behind a prompt"
    assert completed(made)[0] == [*encode("12+34=4"), made.completion.token_ids[7]]
    assert made.completion.finish_reason in ("length", "stop")
    long = [1, *encode("12+34=?1234567")]
    assert engine.run(row(draft([5, 6], prompt=long), prompt=long, at=short)).drafted == 0


def test_what_is_no_draft_is_decoded_plainly(engine):
    empty, foreign = draft([], finish=Finish.PARTIAL), draft([5, VOCABULARY])
    no_logprobs = draft([5, 6])
    object.__setattr__(no_logprobs, "logprobs", None)
    for other in (None, empty, foreign, no_logprobs):
        made = engine.run(row(other))
        assert made.drafted == 0 and made.completion.spec_rl.fresh
        assert engine.requests[-1].params.extra_args["spec_rl"] == {"keep": False}
        assert engine.requests[-1].params.max_tokens == 24


@pytest.mark.parametrize("include", [True, False])
def test_a_stop_string_across_the_seam(engine, include):
    """The draft is accepted up to "...3"; any symbol behind it completes a stop string."""
    stops = ["3" + symbol for symbol in "0123456789+-=;#?"]
    tokens, old = encode("12+34"), [SURE] * 4 + [NEVER]
    params = sampling(60, stop=stops, include_stop_str_in_output=include, ignore_eos=True)
    for number in range(10):
        made = engine.run(row(draft(tokens, old), params=params, number=number, lenience=STRICT))
        tokens_, reason, stop = completed(made)
        assert reason == "stop" and stop in stops and tokens_[:4] == tokens[:4]
        assert made.completion.text == ("12+" + stop if include else "12+")
        assert tokens_[-1] == encode(stop[1])[0], "the last token completes it"
        assert made.rollout.finish is Finish.STOP_STRING
        assert len(made.rollout) == len(tokens_)


def test_a_stop_string_in_the_draft_ends_it(engine):
    made = engine.run(row(draft([*encode("12+34=46;#46"), EOS]), params=sampling(stop=["=4"])))
    assert completed(made) == (encode("12+34=4"), "stop", "=4")
    assert made.completion.text == "12+34" and not made.decoded


def test_a_row_aborted_at_any_time_gives_what_it_has():
    draft_ = long_draft(1200)
    for before, tokens in ((0, 0), (1, 513), (2, 1025), (3, 1200)):
        engine = MarkovEngine(OLD)
        params = sampling(1300, ignore_eos=True)
        made = engine.run(row(draft_, params=params, lenience=1e6), abort_before=before)
        assert made.completion.finish_reason == "abort"
        assert abs(len(made.completion.token_ids) - tokens) <= BLOCK
        assert made.rollout is None, "its draft is in the cache already"


def test_an_abort_while_decoding_keeps_what_was_decoded(engine):
    def spoil(request, output):
        if output.prompt_logprobs is None:
            output.outputs[0].finish_reason = "abort"

    engine.spoil = spoil
    made = engine.run(row(draft(encode("12")), params=sampling(30, ignore_eos=True)))
    assert completed(made)[1:] == ("abort", None)
    assert made.rollout.finish is Finish.PARTIAL and len(made.rollout) == 30


def test_a_verification_that_the_engine_aborts_ends_the_row(engine):
    def spoil(request, output):
        output.outputs[0].finish_reason = "abort"

    engine.spoil = spoil
    made = engine.run(row(draft(encode("12"))))
    assert completed(made) == ([], "abort", None) and made.rollout is None


@pytest.mark.parametrize(
    ("what", "value"),
    [("logprobs", math.nan), ("logprobs", 0.5), ("token_ids", VOCABULARY), ("end_indices", 0)],
)
def test_what_the_engine_spoilt_is_returned_and_not_kept(engine, what, value):
    def spoil(request, output):
        if output.prompt_logprobs is None:
            getattr(output.outputs[0].logprobs, what)[2] = value

    engine.spoil = spoil
    made = engine.run(row(draft(encode("12")), params=sampling(9, ignore_eos=True)))
    assert completed(made)[1] == "length" and len(made.completion.token_ids) == 9
    assert not made.valid and made.rollout is None


@pytest.mark.parametrize("reported", ["policy", "behaviour"])
def test_reported_logprobs(engine, reported):
    tokens, lenience = encode("12+34=46;#46"), math.exp(0.5)
    params = sampling(30, ignore_eos=True)
    draft_ = drawn(tokens)
    made = engine.run(row(draft_, params=params, lenience=1e6, reported_logprobs=reported))
    policy = made.completion.spec_rl.policy_logprobs
    values = [next(iter(entry.values())).logprob for entry in made.completion.logprobs]
    expected = policy.copy()
    if reported == "behaviour":
        expected[:12] = np.minimum(draft_.logprobs, policy[:12] + math.log(1e6))
    assert values == pytest.approx(expected) and made.accepted == 12
    assert made.completion.cumulative_logprob == pytest.approx(expected.sum(), rel=1e-6)
    assert made.rollout.logprobs == pytest.approx(policy), "the cache keeps the policy's"
    strict = engine.run(row(draft_, params=params, lenience=lenience, reported_logprobs=reported))
    assert strict.completion.spec_rl.policy_logprobs.shape == (30,)


def test_logprobs_come_in_the_form_that_was_asked_for(engine):
    for options in ({"logprobs": None}, {"flat_logprobs": True}, {"logprobs": 0}):
        made = engine.run(row(draft(encode("12")), params=sampling(5, ignore_eos=True, **options)))
        logprobs = made.completion.logprobs
        if options.get("logprobs", 0) is None:
            assert logprobs is None and made.completion.cumulative_logprob is None
        else:
            assert len(logprobs) == 5 and isinstance(logprobs, list) != (
                len(options) == 1 and "flat_logprobs" in options
            )


def test_noise_is_measured_once_and_told_only_where_it_ends_prefixes(caplog):
    """What decoding and prefill give differs by 0.05 nats in every third token."""
    engine, noise = MarkovEngine(OLD), RoundingNoise(1.0, 2)

    def spoil(request, output):
        if output.prompt_logprobs is not None:
            values = output.prompt_logprobs.logprobs
            values[:] = [v - 0.05 * (i % 3 == 0) for i, v in enumerate(values)]

    engine.spoil = spoil
    for number in range(20):
        made = engine.run(row(noise=noise, params=sampling(600, ignore_eos=True), number=number))
        assert made.verified == 0 and made.decoded == 600
    assert len(engine.requests) == 20 + RoundingNoise.ROWS
    assert noise.prefix_tokens == pytest.approx(3 / -math.expm1(-0.05), rel=0.01)
    assert caplog.text.count("rounding alone ends an accepted prefix after about 61.5") == 1


@pytest.mark.parametrize(("length", "measured"), [(48, 0), (47, 1)])
def test_a_response_up_to_the_models_limit_leaves_no_room_for_a_prefill(engine, length, measured):
    engine.limits = short = limits(max_model_len=48)
    params = sampling(length - len(PROMPT), ignore_eos=True)
    engine.run(row(noise=RoundingNoise(1.0, 2), params=params, at=short))
    assert len(engine.requests) == 1 + measured


@pytest.mark.parametrize(
    ("lenience", "dtype_bytes", "apart", "prefix"),
    [(1.0, 2, 0.0, math.inf), (1.0, 4, 0.5, None), (math.exp(0.5), 2, 0.05, math.inf)],
)
def test_no_noise_is_no_warning(caplog, lenience, dtype_bytes, apart, prefix):
    noise = RoundingNoise(lenience, dtype_bytes)
    for _ in range(20):
        if noise.take():
            noise.add(np.full(500, -1.0 - apart), np.full(500, -1.0))
    assert noise.prefix_tokens == prefix and not caplog.records
