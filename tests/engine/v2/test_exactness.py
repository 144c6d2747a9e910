"""Drafts in vLLM's own V2 runner, by Triton's interpreter: what requests get is what they would.

Drafts are made by the numpy reference, to which ``test_kernels`` has the kernels equal, except in
the test that says so.
"""

import numpy as np
import pytest
import torch

from tests.support.v2_exactness import (
    BENT_SEEN,
    VOCABULARY,
    Gained,
    bent_sampler,
    drafting,
    likeliest,
    make_llm,
    p_value,
    probabilities,
    put,
    runner_of,
)
from tests.support.v2_reads import Launches, nothing_read

K = 3
ROWS, TOKENS = 24, 5
LOGPROB_NOISE = 0.02 if torch.cuda.is_available() else 2e-4
"""Between the engine's log-probs and those of transformers, nats: GPUs multiply in TF32."""
GREEDY = {"temperature": 1.0, "top_k": 1}
"""Not temperature 0: such requests are not drafted for."""


@pytest.fixture(params=["sync", "async"])
def llm(request, engines, random_model, cache_dir, by_reference, monkeypatch):
    from vllm.v1.sample.ops import topk_topp_sampler as filters

    # The interpreter cannot run this kernel. On GPUs vLLM takes the other for less than 8 rows.
    monkeypatch.setattr(filters, "apply_top_k_top_p_triton", filters.apply_top_k_top_p_pytorch)
    if request.param not in engines:
        engines[request.param] = make_llm(random_model, request.param, **drafting(cache_dir, K))
    return engines[request.param]


@pytest.fixture
def index(llm):
    return runner_of(llm).speculator.index


def generate(llm, prompt, rows, *, extra=None, words=None, seed=None, apart=1, **options):
    """Completions of rows of one prompt."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            **{
                "temperature": 1.0,
                "logprobs": 0,
                "detokenize": False,
                "ignore_eos": True,
                "seed": None if seed is None else seed + apart * i,
                **options,
            },
            extra_args=extra,
        )
        for i in range(rows)
    ]
    for one in params:  # the engine has no tokenizer, by which vLLM finds the tokens of words
        one._bad_words_token_ids = words
    prompts = [{"prompt_token_ids": list(prompt)} for _ in range(rows)]
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


def tokens_of(completions):
    return [list(completion.token_ids) for completion in completions]


SHAPES = {"tempered": {"temperature": 0.7}, "of the likeliest": {"temperature": 0.8, "top_k": 6}}
"""Sampling that is not raw, for drafts that are good."""


@pytest.mark.parametrize(
    ("llm", "drafts"),
    [
        ("sync", "good"),
        ("sync", "foreign"),
        ("sync", "siblings"),
        ("async", "good"),
        ("async", "unlikely"),
        ("async", "tempered"),
        ("sync", "of the likeliest"),
    ],
    indirect=["llm"],
)
def test_exact(llm, store, prompt, random_model, drafts):
    """Each token has the distribution that is sampled from, given those before it.

    The bound is 1e-3 for each of seven tests: a correct sampler fails one of them for 0.7 % of all
    seeds, and these are fixed. The control: a sampler that is bent is seen where its tokens are not
    those that the policy is likely to sample, too.
    """
    options = SHAPES.get(drafts, {})

    def tested(rows, prompt, seed):
        if drafts == "foreign":
            put(store, prompt, np.random.default_rng(0).integers(0, VOCABULARY, (16, 8)).tolist())
        elif drafts != "siblings":
            put(store, prompt, likeliest(random_model, -1 if drafts == "unlikely" else 1, prompt))
        gained = Gained(llm)
        outputs = generate(llm, prompt, rows, max_tokens=TOKENS, seed=seed, **options)
        samples = np.array(tokens_of(outputs))
        assert samples.shape == (rows, TOKENS)
        if drafts == "good" or options:
            assert gained() > 1.15  # parts of drafts are accepted
        raw = probabilities(random_model, samples.tolist(), prompt)
        own = np.take_along_axis(raw, samples[:, :, None], -1)  # log-probs are raw ones
        for output, logprobs in zip(outputs, np.log(own[:, :, 0]), strict=True):
            got = [e[t].logprob for e, t in zip(output.logprobs, output.token_ids, strict=True)]
            assert got == pytest.approx(logprobs, abs=LOGPROB_NOISE)
        p = raw ** (1 / options.get("temperature", 1.0))
        least = np.sort(p, -1)[..., -options.get("top_k", VOCABULARY), None]
        p = np.where(p < least, 0, p)
        return p_value(samples, p / p.sum(-1, keepdims=True))

    p = tested(ROWS, prompt, 0)
    print(f"p = {p:.3g}")
    assert p > 1e-3
    if drafts in ("unlikely", "foreign"):
        with bent_sampler(llm.collective_rpc):  # on a prompt that has no good drafts yet
            assert tested(2 * ROWS, [*prompt[:-1], 19], 100) < BENT_SEEN


@pytest.mark.parametrize("llm", ["async"], indirect=True)  # seeds are none of the scheduler's
def test_one_seed_in_every_epoch(llm, prompt, random_model, monkeypatch):
    """A request never meets a draft that its own random numbers have accepted before.

    All requests of five epochs have the same seed and draft from each other's responses. The bound
    is 1e-3 for each of two tests. The control: seeds that stay as they are miss it.
    """
    rows, tokens, epochs = 12, 6, 5
    resident = llm.llm_engine.engine_core.engine_core.scheduler.resident

    def tested(of_prompt, least_gained):
        samples = []
        gained = Gained(llm)
        for _ in range(epochs):
            outputs = generate(llm, of_prompt, rows, max_tokens=tokens, seed=0, apart=0)
            samples += tokens_of(outputs)
            assert resident.flush()
        assert gained() > least_gained
        return p_value(np.array(samples), probabilities(random_model, samples, of_prompt))

    p = tested(prompt, 1.05)
    print(f"p = {p:.3g}")
    assert p > 1e-3
    # How much the control drafts depends on what the engine has learned in the tests before.
    monkeypatch.setattr(resident, "_seed", lambda seed, *_: seed)
    assert tested([*prompt[:-1], 19], 1.0) < 1e-3


def forbidden(samples, words):
    """Which tokens would complete a bad word, bool ``[rows, tokens, vocabulary]``."""
    mask = np.zeros((*samples.shape, VOCABULARY), bool)
    for *beginning, last in words:
        for place in range(len(beginning), samples.shape[1]):
            before = samples[:, place - len(beginning) : place]
            mask[(before == beginning).all(1), place, last] = True
    return mask


@pytest.mark.parametrize("llm", ["async"], indirect=True)  # where the host knows least
def test_bad_words(llm, store, prompt, random_model):
    """They never come up, although drafts hold them, and all else has its own distribution.

    The words of two and three tokens begin with tokens that are drafted, too, and accepted. The
    bound is 1e-3 for each of two tests: a correct sampler fails one for 0.2 % of all seeds.
    """
    responses, temperature = likeliest(random_model, 1, prompt), 0.4
    put(store, prompt, responses)
    words = [[responses[0][4]], *(r[2:4] for r in responses), *(r[1:4] for r in responses)]
    words = [list(word) for word in dict.fromkeys(map(tuple, words))]
    gained = Gained(llm)
    options = {"words": words, "temperature": temperature, "seed": 0}
    samples = np.array(tokens_of(generate(llm, prompt, ROWS, max_tokens=TOKENS, **options)))
    assert gained() > 1.08  # parts of drafts are accepted
    p = probabilities(random_model, samples.tolist(), prompt) ** (1 / temperature)
    p /= p.sum(-1, keepdims=True)
    mask = forbidden(samples, words)
    assert not np.take_along_axis(mask, samples[:, :, None], -1).any()
    assert np.where(mask, p, 0).sum(-1).max() > 0.2  # they would have come up
    p = np.where(mask, 0, p)
    assert p_value(samples, p / p.sum(-1, keepdims=True)) > 1e-3


BENT = {
    "right": lambda draft, wrong, stop: draft,
    "wrong first": lambda draft, wrong, stop: [wrong(draft[0]), *draft[1:]],
    "wrong middle": lambda draft, wrong, stop: [draft[0], wrong(draft[1]), *draft[2:]],
    "wrong last": lambda draft, wrong, stop: [*draft[:-1], wrong(draft[-1])],
    "all wrong": lambda draft, wrong, stop: [wrong(token) for token in draft],
    "short": lambda draft, wrong, stop: [*draft[:1], *[draft[0]] * (K - 1)],
    "filler": lambda draft, wrong, stop: [0] * K,
    "stop inside": lambda draft, wrong, stop: [draft[0], stop, *draft[2:]],
}
STEPS = {"right": 7, "wrong last": 9, "wrong middle": 13, "short": 13, "stop inside": 13}
"""Steps at most for 24 tokens, by what the bent drafts still have right; the others take 24."""


def test_bent_drafts(llm, index, prompt, monkeypatch):
    """Whole responses of the likeliest tokens and their log-probs, whatever is drafted."""
    plain = generate(llm, prompt, 1, temperature=0, max_tokens=24)[0]
    truth = list(plain.token_ids)
    stop = next(t for t in range(VOCABULARY) if t not in truth)
    draft, calls = index.draft, []

    for name, bend in BENT.items():

        def bent(batch, batch_host, lengths, tokens, totals, *args, bend=bend):
            calls.append(len(batch))
            made = draft(batch, batch_host, lengths, tokens, totals, *args)
            for i, row in enumerate(batch_host):
                done = int(totals[row]) - len(prompt)
                right = (truth[done : done + K] + [0] * K)[:K]
                made[i] = torch.tensor(bend(right, lambda t: (t + 1) % VOCABULARY, stop))
            return made

        monkeypatch.setattr(index, "draft", bent)
        calls.clear()
        (output,) = generate(llm, prompt, 1, max_tokens=24, stop_token_ids=[stop], **GREEDY)
        assert list(output.token_ids) == truth, name
        got, wanted = (
            [next(iter(entry.values())).logprob for entry in made.logprobs]
            for made in (output, plain)
        )
        assert got == pytest.approx(wanted, abs=1e-4), name
        assert len(calls) <= STEPS.get(name, 24) + 1, name  # one more where scheduling is async
        if name in ("wrong first", "stop inside"):  # the control
            with bent_sampler(llm.collective_rpc):
                (output,) = generate(llm, prompt, 1, temperature=0, max_tokens=24)
            assert list(output.token_ids) != truth, name


def test_stop_inside_an_accepted_draft(llm, store, prompt):
    """A response ends at its stop token, also where the draft went on behind it."""
    truth = list(generate(llm, prompt, 1, temperature=0, max_tokens=14)[0].token_ids)
    put(store, prompt, [truth])
    stop, gained = truth[9], Gained(llm)
    (output,) = generate(llm, prompt, 1, max_tokens=14, stop_token_ids=[stop], **GREEDY)
    assert list(output.token_ids) == truth[: truth.index(stop) + 1]
    assert gained() > 1.5


@pytest.mark.parametrize("llm", ["async"], indirect=True)
def test_history_makes_steps_fewer_with_kernels(llm, index, prompt, monkeypatch):
    """The kernels themselves in the runner; a second row drafts from the first one's response.

    Steps find the kernels that the start has warmed up, by the arguments that vLLM's runner passes:
    one that compiles would hold up all rows.
    """
    from nemo_specrl.drafting import device_arrays, kernels
    from tests.support.v2_compiled import Specializations

    watched = Specializations(kernels)
    monkeypatch.setattr(device_arrays, "kernels", watched)
    index.warm_up()
    warmed = {name: set(found) for name, found in watched.seen.items()}
    assert set(warmed) == {"append", "search", "update", "vote"}
    watched.seen.clear()
    (first,) = generate(llm, prompt, 1, max_tokens=12, **GREEDY)
    gained = Gained(llm)
    (second,) = generate(llm, prompt, 1, max_tokens=12, **GREEDY)
    assert list(second.token_ids) == list(first.token_ids)
    assert gained() > 2
    assert set(watched.seen) == set(warmed)
    for name, found in watched.seen.items():
        assert found and found <= warmed[name], name


def test_requests_without_a_row(llm, index, prompt):
    """They decode, greedily or because they ask for it, beside others, and are not indexed."""
    before = len(index)
    plain = tokens_of(generate(llm, prompt, 2, extra={"spec_rl": False}, max_tokens=5, **GREEDY))
    greedy = tokens_of(generate(llm, prompt, 2, temperature=0, max_tokens=5))
    assert plain == greedy and len(greedy[0]) == 5
    assert len(index) == before


def test_requests_that_end_together_are_removed_in_order(llm, prompt, monkeypatch):
    """In the same one on every rank, whatever order their sets have; preempted ones, too.

    The eight requests of a set come in order by chance once in 40,320 times.
    """
    from vllm import SamplingParams

    engine, removed, runner = llm.llm_engine, [], runner_of(llm)
    remove = runner._remove_request

    def noted(req_id):
        if req_id in runner.req_states.req_id_to_index:
            removed.append(req_id)
        return remove(req_id)

    monkeypatch.setattr(runner, "_remove_request", noted)
    generate(llm, prompt, 8, max_tokens=2)
    removed.clear()
    for i in range(8):
        params = SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False)
        engine.add_request(f"row {i}", {"prompt_token_ids": list(prompt)}, params)
    engine.step()  # tells the runner that the others have ended
    assert len(removed) == 8 and removed == sorted(removed)
    removed.clear()
    engine.reset_prefix_cache(reset_running_requests=True)
    engine.step()
    assert len(removed) == 8 and removed == sorted(removed)
    while engine.has_unfinished_requests():
        engine.step()


READS = {
    "a list": lambda batch, sampled: sampled.tolist(),
    "a number": lambda batch, sampled: int(sampled[0]),
    "a choice": lambda batch, sampled: bool(sampled[0] > 0),
    "places": lambda batch, sampled: sampled.nonzero(),
    "a copy": lambda batch, sampled: sampled.to("cpu", copy=True),
    "an array": lambda batch, sampled: np.asarray(sampled),
    "a choice of rows": lambda batch, sampled: batch.idx_mapping[sampled > 0],
}


@pytest.mark.parametrize("llm", ["async"], indirect=True)
def test_propose_reads_nothing_on_the_host(llm, store, prompt, monkeypatch):
    """All of it, in vLLM's steps: rows that come, grow, are drafted for, end and make room.

    The control: whatever reads a value is seen, on the very arguments of the runner.
    """
    from nemo_specrl.drafting import device_arrays

    kernels = Launches(device_arrays.kernels)
    monkeypatch.setattr(device_arrays, "kernels", kernels)
    speculator = runner_of(llm).speculator
    propose, calls = speculator.propose, []

    def watched(input_batch, *args, **kwargs):
        calls.append((input_batch, args[4]))
        with nothing_read(monkeypatch):
            return propose(input_batch, *args, **kwargs)

    monkeypatch.setattr(speculator, "propose", watched)
    truth = list(generate(llm, prompt, 1, temperature=0, max_tokens=30)[0].token_ids)
    put(store, prompt, [truth, *[truth[:20] + [3] * 9] * 70])
    gained = Gained(llm)
    outputs = generate(llm, prompt, 5, max_tokens=30, **GREEDY)
    assert tokens_of(outputs) == [truth] * 5
    assert gained() > 2
    assert len(calls) > 20 and set(kernels.launched) == {"update", "append", "search", "vote"}
    for name, read in READS.items():
        with pytest.raises(AssertionError), nothing_read(monkeypatch):
            read(*calls[-1])
            pytest.fail(f"{name} was not seen")
