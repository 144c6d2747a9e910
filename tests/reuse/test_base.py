"""Both drivers on real engines: the same rows, with the same random numbers."""

import asyncio

import numpy as np
import pytest
import vllm
from packaging.version import Version
from vllm import SamplingParams

from nemo_specrl import Finish, Rollout, prompt_key
from nemo_specrl.errors import ConfigError, UnsupportedSampling
from nemo_specrl.trainer.data.toy_tasks import encode
from tests.reuse.support import DictCache, draft, generate, only, sampling
from tests.support.engines import EOS, PROMPT

by_seeds = pytest.mark.skipif(
    Version(vllm.__version__) < Version("0.29"),
    reason="CPU builds of this vLLM sample without seeds in a step that has a row without one "
    "(v1/sample/ops/topk_topp_sampler.py, forward_cpu), such as a verification",
)
PROMPTS = [[1, *encode(text)] for text in ("12+34=?", "9-5=?", "7", "33+44+55=?" * 3, "0" * 31)]


async def collect(made, asked):
    """Outputs of rows that begin in this order and run side by side."""

    async def one(number, prompt, params):
        stream = made.generate({"prompt_token_ids": prompt}, params, f"row {number}")
        return [output async for output in stream][-1]

    rows = [one(number, *pair) for number, pair in enumerate(asked)]
    return await asyncio.gather(*rows)


def random_requests(rng, n):
    """Prompts and parameters with stop strings, stop tokens, budgets and ends of sequence."""
    asked = []
    for number in range(n):
        options = {"seed": number, "ignore_eos": bool(rng.random() < 0.3)}
        if rng.random() < 0.4:
            symbols = rng.permutation(list("0123456789+-=;#?"))
            options["stop"] = ["".join(symbols[2 * i : 2 * i + 2]) for i in range(8)]
            options["include_stop_str_in_output"] = bool(rng.random() < 0.5)
        if rng.random() < 0.2:
            options["stop_token_ids"] = rng.integers(3, 19, 2).tolist()
        if rng.random() < 0.2:
            options["logprobs"] = int(rng.integers(1, 4))
        budget = int(rng.integers(1, 60))
        asked.append((PROMPTS[rng.integers(len(PROMPTS))], sampling(budget, **options)))
    return asked


def drafts_of(llm, rng, n):
    """Drafts of the engine's own weights, whose log-probs are taken to have been others."""
    plain = SamplingParams(max_tokens=50, logprobs=0, detokenize=False, flat_logprobs=True)
    drafts = []
    for prompt in PROMPTS:
        own = plain.clone()
        own.n, own.seed = n, len(prompt)
        [output] = llm.generate({"prompt_token_ids": prompt}, own, use_tqdm=False)
        for identity, completion in enumerate(output.outputs, 1):
            values = np.array(completion.logprobs.logprobs, np.float32)
            values += np.where(rng.random(len(values)) < 0.06, rng.exponential(2, len(values)), 0)
            finish = Finish.STOP if completion.finish_reason == "stop" else Finish.LENGTH
            key, tokens = prompt_key(prompt), list(completion.token_ids)
            drafts.append(Rollout(key, tokens, finish, 0, values, 1000 * len(prompt) + identity))
    return drafts


def facts(output):
    [completion] = output.outputs
    reuse = completion.spec_rl
    entries = [
        (token, entry.rank, entry.decoded_token)
        for position in completion.logprobs
        for token, entry in position.items()
    ]
    return (
        (reuse.drafted, reuse.verified, reuse.accepted, reuse.fresh),
        list(completion.token_ids),
        (completion.text, completion.finish_reason, completion.stop_reason),
        entries,
        output.prompt_token_ids,
    )


@pytest.fixture(scope="module")
def asked():
    return random_requests(np.random.default_rng(0), 200)


@by_seeds
def test_both_drivers_make_the_same_rows(llm, reuse, async_reuse, loop, asked):
    drafts = drafts_of(llm, np.random.default_rng(1), 40)
    caches = DictCache(drafts), DictCache(drafts)
    options = {"version": 1, "fresh_fraction": 0.1, "seed": 3}
    made, other = reuse(caches[0], **options), async_reuse(caches[1], **options)
    first = made.generate([prompt for prompt, _ in asked], [params for _, params in asked])
    second = loop.run_until_complete(collect(other, asked))
    other.flush()
    for one, two in zip(first, second, strict=True):
        assert facts(one) == facts(two)
        for name in ("policy_logprobs", "old_logprobs"):
            a, b = (getattr(o.outputs[0].spec_rl, name) for o in (one, two))
            assert a == pytest.approx(b, abs=1e-5)
    names = ("drafts", "full_reuses", "draft_tokens", "accepted_tokens", "decoded_tokens")
    counts = [[getattr(m.metrics, name) for name in names] for m in (made, other)]
    assert counts[0] == counts[1]
    # All kinds of rows are there.
    reuses = [o.outputs[0].spec_rl for o in first]
    reasons = [(o.outputs[0].finish_reason, type(o.outputs[0].stop_reason)) for o in first]
    assert sum(r.fresh for r in reuses) > 8 and made.metrics.full_reuses > 20
    assert sum(0 < r.accepted < r.policy_logprobs.size for r in reuses) > 40
    assert set(reasons) >= {("stop", str), ("stop", int), ("stop", type(None))}
    assert ("length", type(None)) in reasons
    kept = [sorted((r.key, r.finish, r.tokens.tobytes()) for r in cache.of(1)) for cache in caches]
    assert kept[0] == kept[1] and len(kept[0]) == 200


def test_rows_end_as_those_of_vllm_itself(llm, reuse, asked):
    """With drafts of the very weights, at lenience 1, each is accepted whole: the tokens, text,
    reasons and log-probs are those that plain vLLM gave.
    """
    asked = asked[:60]
    prompts, params = [p for p, _ in asked], [p for _, p in asked]
    plain = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    drafts = []
    for prompt, output in zip(prompts, plain, strict=True):
        completion = output.outputs[0]
        values = [next(iter(position.values())).logprob for position in completion.logprobs]
        tokens = list(completion.token_ids)
        drafts.append(Rollout(prompt_key(prompt), tokens, Finish.LENGTH, 0, np.array(values)))
    for drafted in (False, True):
        cache = DictCache(drafts if drafted else ())
        made = reuse(cache, version=1, lenience=1.001)
        again = made.generate(prompts, params)
        for one, two in zip(plain, again, strict=True):
            a, b = one.outputs[0], two.outputs[0]
            assert list(a.token_ids) == list(b.token_ids)
            assert (a.text, a.finish_reason, a.stop_reason) == (
                b.text,
                b.finish_reason,
                b.stop_reason,
            )
            assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, abs=1e-3)
            for x, y in zip(a.logprobs, b.logprobs, strict=True):
                assert [(t, e.decoded_token) for t, e in x.items()] == [
                    (t, e.decoded_token) for t, e in y.items()
                ]
        assert made.metrics.full_reuses == (60 if drafted else 0)


@by_seeds
@pytest.mark.parametrize("n", [1, 3])
def test_n_responses_of_a_prompt(reuse, async_reuse, loop, n):
    drafts = [draft([*encode("12"), EOS]), draft([*encode("345"), EOS])]
    params = sampling(30, n=n, seed=5)
    [one] = generate(reuse(DictCache(drafts), version=1), params=params)
    other = async_reuse(DictCache(drafts), version=1)
    [two] = loop.run_until_complete(collect(other, [(PROMPT, params)]))
    for output in (one, two):
        assert [c.index for c in output.outputs] == list(range(n))
        accepted = [c.spec_rl.accepted for c in output.outputs]
        assert accepted == [3, 4, 0][:n]
    assert [list(c.token_ids) for c in one.outputs] == [list(c.token_ids) for c in two.outputs]


def test_what_is_vllms_alone_passes_through(llm, reuse, async_reuse, loop):
    greedy = SamplingParams(temperature=0, max_tokens=5, logprobs=0)
    scored = SamplingParams(temperature=1, max_tokens=5, prompt_logprobs=0, seed=1)
    asked_not_to = sampling(5, top_p=0.9, extra_args={"spec_rl": False})
    for params in (greedy, scored, asked_not_to):
        cache = DictCache([draft(encode("12"))])
        [plain] = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
        [one] = generate(reuse(cache, version=1), params=params)
        [two] = loop.run_until_complete(collect(async_reuse(cache), [(PROMPT, params)]))
        for output in (one, two):
            assert list(output.outputs[0].token_ids) == list(plain.outputs[0].token_ids)
            assert (output.prompt_logprobs is None) == (plain.prompt_logprobs is None)
            assert not hasattr(output.outputs[0], "spec_rl")
        assert len(cache.all()) == 1


def test_text_prompts_and_prompts_of_two_kinds(llm, reuse):
    made = reuse(DictCache([draft([*encode("12"), EOS], prompt=PROMPTS[1])]), version=1)
    text = {"prompt": "9-5=?", "prompt_token_ids": PROMPTS[1]}
    greedy = SamplingParams(temperature=0, max_tokens=3)
    outputs = made.generate([text, "12", PROMPTS[2]], [sampling(9), sampling(9), greedy])
    assert [o.prompt for o in outputs][:2] == ["9-5=?", "12"]
    assert outputs[0].outputs[0].spec_rl.accepted == 3
    assert outputs[1].prompt_token_ids == llm.get_tokenizer().encode("12")
    assert len(outputs[2].outputs[0].token_ids) == 3


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"temperature": 0.7}, "temperature = 0.7"),
        ({"top_p": 0.9}, "top_p = 0.9"),
        ({"top_k": 5}, "top_k = 5"),
        ({"min_p": 0.1}, "min_p = 0.1"),
        ({"repetition_penalty": 1.1}, "repetition_penalty = 1.1"),
        ({"bad_words": ["1"]}, "bad_words = "),
        ({"min_tokens": 3}, "min_tokens = 3"),
        ({"logit_bias": {3: 1.0}}, "logit_bias = "),
        ({"allowed_token_ids": [3]}, "allowed_token_ids = "),
    ],
)
def test_sampling_that_is_not_raw_is_refused_in_one_line(reuse, options, wrong):
    params = SamplingParams(**{"temperature": 1.0, "max_tokens": 4, **options})
    with pytest.raises(UnsupportedSampling) as refused:
        generate(reuse(), params=params)
    assert str(refused.value).startswith(f"prompts[0]: {wrong}")
    assert "preset: lossless" in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("prompt", [[], [[1, 2]], [1.5], list(range(1, 30)) * 8])
def test_prompts_that_are_none_are_refused(reuse, prompt):
    with pytest.raises(ConfigError, match=r"prompts\[1\]: (a|the) prompt"):
        reuse().generate([PROMPT, {"prompt_token_ids": prompt}], sampling())


def test_other_presets_and_numbers_of_parameters_are_refused(llm, reuse):
    from nemo_specrl import SpecRLConfig
    from nemo_specrl.reuse.llm import PrefixReuse

    with pytest.raises(ConfigError, match="preset = lossless: prefix reuse is for preset: reuse"):
        PrefixReuse(llm, SpecRLConfig(), None)
    with pytest.raises(ConfigError, match="1 of them for 2 prompts"):
        reuse().generate([PROMPT, PROMPT], [sampling()])


def test_fresh_rows_are_a_share(reuse):
    """2,000 rows of which a quarter is to be fresh; a false alarm once in 10,000 runs."""
    from scipy import stats

    cache = DictCache([draft([EOS]) for _ in range(2000)])
    made = reuse(cache, version=1, fresh_fraction=0.25)
    outputs = generate(made, rows=2000, params=sampling(1, seed=None, detokenize=False))
    fresh = sum(o.outputs[0].spec_rl.fresh for o in outputs)
    assert stats.binomtest(fresh, 2000, 0.25).pvalue > 1e-4
    assert cache.taken[prompt_key(PROMPT), 1] == 2000 - fresh


def test_weights_do_not_change_under_running_rows(llm, reuse, async_reuse, loop):
    made = reuse(version=1)
    llm.llm_engine.add_request("other", {"prompt_token_ids": PROMPT}, sampling(3))
    llm.llm_engine.step()
    with pytest.raises(ConfigError, match="policy_version = 2: requests are still running"):
        made.policy_version = 2
    assert made.policy_version == 1
    llm.llm_engine.abort_request(["other"])
    made.policy_version = 2

    async def change():
        other = async_reuse_now
        row = asyncio.ensure_future(collect(other, [(PROMPT, sampling(150, ignore_eos=True))]))
        await asyncio.sleep(0.01)
        with pytest.raises(ConfigError, match="policy_version = 2: requests are still running"):
            await other.set_policy_version(2)
        await row
        await other.set_policy_version(2)
        assert other.policy_version == 2

    async_reuse_now = async_reuse(version=1)
    loop.run_until_complete(change())


@pytest.mark.parametrize("version", [1.0, np.float32(3), "5", None, -1, 2**63])
def test_a_policy_version_that_is_none_is_refused(reuse, async_reuse, loop, version):
    made, other = reuse(version=1), async_reuse(version=1)
    with pytest.raises(ConfigError, match="policy_version must be "):
        made.policy_version = version
    with pytest.raises(ConfigError, match="policy_version must be "):
        loop.run_until_complete(other.set_policy_version(version))
    assert made.policy_version == other.policy_version == 1
    made.policy_version = np.int64(4)
    assert made.policy_version == 4 and type(made.policy_version) is int


def test_a_cache_salt_keeps_blocks_apart_in_all_requests_of_a_row(reuse, async_reuse, loop):
    """Rows of a salt read the blocks of that salt, and nothing reads those of another one."""
    prompt = [1, *np.random.default_rng(4).integers(3, 19, 96).tolist()]

    async def one(made, prompt, name):
        stream = made.generate(prompt, sampling(4, ignore_eos=True), name)
        return [output async for output in stream].pop()

    drivers = reuse(version=1), async_reuse(version=1)
    for made in drivers:
        made.cache.put([draft(encode("12"), prompt=prompt) for _ in range(6)])
    for made in drivers:
        read = []
        for number, salt in enumerate(["a", "a", "b", None, None]):
            salted = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
            if made is drivers[0]:
                [output] = made.generate([salted], sampling(4, ignore_eos=True))
            else:
                output = loop.run_until_complete(one(made, salted, f"salted {number}"))
            assert output.outputs[0].spec_rl.accepted == 2
            read.append(made.metrics.prefilled_tokens)
        prefilled = np.diff(read, prepend=0) if made is drivers[1] else np.array(read)
        assert prefilled.tolist() == [99, 3, 99, 99, 3]  # 96 tokens are whole blocks


def test_aborted_and_cancelled_rows_leave_nothing_behind(async_reuse, loop):
    """Rows in the engine, between its requests and before it; their places go to others."""
    drafts = [draft(encode("12+34=46") * 12, finish=Finish.LENGTH) for _ in range(30)]
    made = async_reuse(DictCache(drafts), version=1, lenience=1e9)
    object.__setattr__(made.limits, "kv_tokens", 3 * 104)

    async def run():
        params = sampling(150, ignore_eos=True)

        async def one(name):
            stream = made.generate({"prompt_token_ids": PROMPT}, params, name)
            return [output.outputs[0] async for output in stream].pop()

        tasks = [asyncio.ensure_future(one(str(i))) for i in range(30)]
        await asyncio.sleep(0.05)
        await made.abort([str(i) for i in range(0, 30, 3)])
        for i in range(1, 30, 3):
            tasks[i].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    ended = loop.run_until_complete(run())
    for i, end in enumerate(ended):
        if i % 3 == 1:
            assert isinstance(end, asyncio.CancelledError)
        elif i % 3 == 0:
            assert end.finish_reason == "abort" and len(end.token_ids) < 150
        else:
            assert end.finish_reason == "length" and len(end.token_ids) == 150
    assert made._running == 0 and not made._names and not made._waiting
    loop.run_until_complete(made.set_policy_version(2))


def test_an_error_ends_all_rows_of_a_call(llm, reuse, monkeypatch):
    made = reuse(DictCache([draft(encode("12"))] * 8), version=1)
    step, steps = llm.llm_engine.step, []

    def failing():
        steps.append(step())
        if len(steps) == 3:
            raise RuntimeError("a worker died")
        return steps[-1]

    monkeypatch.setattr(llm.llm_engine, "step", failing)
    with pytest.raises(RuntimeError, match="a worker died"):
        generate(made, rows=8, params=sampling(100, ignore_eos=True))
    assert not llm.llm_engine.has_unfinished_requests()
    monkeypatch.undo()
    assert len(only(generate(made, params=sampling(5, ignore_eos=True))).token_ids) == 5


LONG = 80  # tokens of a draft; few enough for Triton's interpreter


def long_drafts(llm, prompt, rows):
    """Drafts as the engine's own weights make them."""
    params = SamplingParams(
        n=rows, seed=3, max_tokens=LONG, logprobs=0, flat_logprobs=True, ignore_eos=True
    )
    [output] = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    values = [np.array(c.logprobs.logprobs, np.float32) for c in output.outputs]
    tokens = [list(c.token_ids) for c in output.outputs]
    return [
        Rollout(prompt_key(prompt), t, Finish.LENGTH, 0, v)
        for t, v in zip(tokens, values, strict=True)
    ]


def test_a_group_prefills_its_prompt_once_and_reads_each_piece_aright(llm, reuse, monkeypatch):
    """Pieces of a block, each read behind what the one before has left in the prefix cache."""
    monkeypatch.setattr("nemo_specrl.reuse.row.PIECE_TOKENS", 32)
    prompt = [1, *np.random.default_rng(0).integers(3, 19, 44).tolist()]
    drafts = long_drafts(llm, prompt, 4)
    made = reuse(DictCache(drafts), version=1, lenience=1.001)
    outputs = generate(made, prompt, sampling(LONG, ignore_eos=True, detokenize=False), rows=4)
    for output, drafted in zip(outputs, drafts, strict=True):
        spec_rl = output.outputs[0].spec_rl
        assert spec_rl.accepted == LONG
        assert spec_rl.policy_logprobs == pytest.approx(drafted.logprobs, abs=1e-4)
        assert list(output.outputs[0].token_ids) == drafted.tokens.tolist()
    # Behind the first row: a block of the prompt is shared, and no piece is prefilled twice.
    assert made.metrics.prefilled_tokens <= 45 + 3 * (45 - 32) + 4 * (LONG + 2)
    again = reuse(DictCache(drafts), version=2, lenience=1.001)
    monkeypatch.undo()
    generate(again, prompt, sampling(LONG, ignore_eos=True, detokenize=False), rows=4)
    assert again.metrics.accepted_tokens == 4 * LONG


def test_rows_that_begin_alike_hide_nothing_from_each_other(llm, reuse):
    """Twice the same drafts, all of which are read: the second time without the prefix cache."""
    drafts = long_drafts(llm, PROMPT, 2)
    twins = [Rollout(d.key, d.tokens, d.finish, 0, d.logprobs) for d in drafts]
    made = reuse(DictCache(drafts + twins), version=1, lenience=1.001)
    outputs = generate(made, params=sampling(LONG, ignore_eos=True, detokenize=False), rows=4)
    for output, drafted in zip(outputs, drafts * 2, strict=True):
        assert output.outputs[0].spec_rl.accepted == LONG
        assert output.outputs[0].spec_rl.policy_logprobs == pytest.approx(
            drafted.logprobs, abs=1e-4
        )
