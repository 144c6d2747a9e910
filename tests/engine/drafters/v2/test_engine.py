"""Drafts in vLLM's own V2 runner, by Triton's interpreter: what requests get is what they would.

Drafts are made by the numpy reference, to which ``test_kernels`` has the kernels equal, except in
the test that says so.
"""

import math

import numpy as np
import pytest
import torch

from tests.conftest import make_engine
from tests.support.engines import PROMPT, VOCABULARY
from tests.support.v2_exactness import BENT_SEEN, bent_sampler, likeliest, p_value, probabilities
from tests.support.v2_reads import Launches, nothing_read
from tests.support.v2_workers import forget

K = 3
ROWS, TOKENS = 24, 5
KEY = b"prompt"
LOGPROB_NOISE = 0.02 if torch.cuda.is_available() else 2e-4
"""Between the engine's log-probs and those of transformers, nats: GPUs multiply in TF32."""


@pytest.fixture(params=["sync", "async"])
def llm(request, engines, random_model):
    from nemo_specrl.engine.vllm import v2_patches

    if request.param not in engines:
        v2_patches.install()
        made = engines[request.param] = make_engine(
            random_model,
            max_model_len=96,
            max_num_seqs=64,
            enforce_eager=not torch.cuda.is_available(),
            skip_tokenizer_init=True,
            max_logprobs=VOCABULARY,
            async_scheduling=request.param == "async",
            **v2_patches.speculator_options(K, 8 << 20, adaptive=False),
        )
        config = made.llm_engine.vllm_config
        assert config.use_v2_model_runner
        assert config.scheduler_config.async_scheduling == (request.param == "async")
    return engines[request.param]


@pytest.fixture
def speculator(llm, by_reference):
    from nemo_specrl.engine.vllm.v2_patches import speculator_of

    llm.collective_rpc(forget)
    return speculator_of(llm.llm_engine.model_executor.driver_worker.worker.model_runner)


def generate(
    llm,
    rows,
    *,
    history=(),
    prompt=PROMPT,
    identity=0,
    extra=True,
    words=None,
    seeded=False,
    **options,
):
    """Completions of rows of one prompt, which has this history."""
    from vllm import SamplingParams

    history = [(i, np.array(tokens, np.int32).tobytes()) for i, tokens in enumerate(history)]
    params = [
        SamplingParams(
            **{
                "temperature": 1.0,
                "logprobs": 0,
                "detokenize": False,
                "ignore_eos": True,
                "seed": i if seeded else None,
                **options,
            },
            extra_args={"spec_rl": [KEY, identity + i, history, len(prompt)]} if extra else None,
        )
        for i in range(rows)
    ]
    for one in params:  # the engine has no tokenizer, by which vLLM finds the tokens of words
        one._bad_words_token_ids = words
    prompts = [{"prompt_token_ids": list(prompt)} for _ in range(rows)]
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


SHAPES = {"tempered": {"temperature": 0.7}, "of the likeliest": {"temperature": 0.8, "top_k": 6}}
"""Sampling that is not raw, for drafts that are good."""


@pytest.mark.parametrize(
    ("llm", "drafts"),
    [
        ("sync", "good"),
        ("sync", "unlikely"),
        ("sync", "foreign"),
        ("sync", "siblings"),
        ("async", "good"),
        ("async", "unlikely"),
        ("async", "tempered"),
        ("sync", "of the likeliest"),
        ("async", "of the likeliest"),
    ],
    indirect=["llm"],
)
def test_exact(llm, speculator, random_model, drafts, monkeypatch):
    """Each token has the distribution that is sampled from, given those before it.

    The bound is 1e-3 for each of nine tests: a correct sampler fails one of them for 0.9 % of all
    seeds, and these are fixed. The control: a sampler that is bent is seen where its tokens are not
    those that the policy is likely to sample, too.
    """
    from vllm.v1.sample.ops import topk_topp_sampler as filters

    # The interpreter cannot run this kernel. On GPUs vLLM takes the other for less than 8 rows.
    monkeypatch.setattr(filters, "apply_top_k_top_p_triton", filters.apply_top_k_top_p_pytorch)
    history, options = [], SHAPES.get(drafts, {})
    if drafts == "foreign":
        history = np.random.default_rng(0).integers(0, VOCABULARY, (16, 8)).tolist()
    elif drafts != "siblings":
        history = likeliest(random_model, -1 if drafts == "unlikely" else 1)

    def tested(rows=ROWS, **seeds):
        outputs = generate(llm, rows, history=history, max_tokens=TOKENS, **options, **seeds)
        samples = np.array([output.token_ids for output in outputs])
        assert samples.shape == (rows, TOKENS)
        steps, tokens, *_ = speculator.index.take_totals()
        if drafts == "good" or options:
            assert tokens / steps > 1.15  # parts of drafts are accepted
        raw = probabilities(random_model, samples.tolist())
        own = np.take_along_axis(raw, samples[:, :, None], -1)  # log-probs are raw ones
        for output, logprobs in zip(outputs, np.log(own[:, :, 0]), strict=True):
            got = [e[t].logprob for e, t in zip(output.logprobs, output.token_ids, strict=True)]
            assert got == pytest.approx(logprobs, abs=LOGPROB_NOISE)
        p = raw ** (1 / options.get("temperature", 1.0))
        least = np.sort(p, -1)[..., -options.get("top_k", VOCABULARY), None]
        p = np.where(p < least, 0, p)
        return p_value(samples, p / p.sum(-1, keepdims=True))

    assert tested() > 1e-3
    if drafts in ("unlikely", "foreign", "siblings"):
        llm.collective_rpc(forget)
        with bent_sampler(llm.collective_rpc):
            # With seeds, so that the tests before have no part in whether it is seen, and with
            # more rows: with as many as above, siblings' drafts had p-values up to 1e-4.
            assert tested(2 * ROWS, seeded=True) < BENT_SEEN


def forbidden(samples, words):
    """Which tokens would complete a bad word, bool ``[rows, tokens, vocabulary]``."""
    mask = np.zeros((*samples.shape, VOCABULARY), bool)
    for *beginning, last in words:
        for place in range(len(beginning), samples.shape[1]):
            before = samples[:, place - len(beginning) : place]
            mask[(before == beginning).all(1), place, last] = True
    return mask


def test_bad_words(llm, speculator, random_model):
    """They never come up, although drafts hold them, and all else has its own distribution.

    The words of two and three tokens begin with tokens that are drafted, too, and accepted. The
    bound is 1e-3 for each of two tests: a correct sampler fails one for 0.2 % of all seeds.
    """
    responses, temperature = likeliest(random_model, 1), 0.4
    words = [[responses[0][4]], *(r[2:4] for r in responses), *(r[1:4] for r in responses)]
    words = [list(word) for word in dict.fromkeys(map(tuple, words))]
    options = {"history": responses, "words": words, "temperature": temperature, "seeded": True}
    outputs = generate(llm, ROWS, max_tokens=TOKENS, **options)
    samples = np.array([output.token_ids for output in outputs])
    steps, tokens, *_ = speculator.index.take_totals()
    assert tokens / steps > 1.08  # parts of drafts are accepted
    p = probabilities(random_model, samples.tolist()) ** (1 / temperature)
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


def test_bent_drafts(llm, speculator, monkeypatch):
    """Whole greedy responses and their log-probs, whatever is drafted."""
    plain = generate(llm, 1, extra=False, temperature=0, max_tokens=24)[0]
    truth = list(plain.token_ids)
    stop = next(t for t in range(VOCABULARY) if t not in truth)
    draft = speculator.index.draft

    for name, bend in BENT.items():

        def bent(batch, batch_host, lengths, tokens, totals, *args, bend=bend):
            made = draft(batch, batch_host, lengths, tokens, totals, *args)
            for i, row in enumerate(batch_host):
                done = int(totals[row]) - len(PROMPT)
                right = (truth[done : done + K] + [0] * K)[:K]
                made[i] = torch.tensor(bend(right, lambda t: (t + 1) % VOCABULARY, stop))
            return made

        monkeypatch.setattr(speculator.index, "draft", bent)
        speculator.index.take_totals()
        (output,) = generate(
            llm, 1, temperature=0, max_tokens=24, stop_token_ids=[stop], identity=50
        )
        steps, *_ = speculator.index.take_totals()
        assert list(output.token_ids) == truth, name
        got, wanted = (
            [next(iter(entry.values())).logprob for entry in made.logprobs]
            for made in (output, plain)
        )
        assert got == pytest.approx(wanted, abs=1e-4), name
        assert steps <= STEPS.get(name, 24) + 1, name  # one more where steps are asynchronous
        if name not in ("right", "short"):  # the control; of these nothing may be rejected
            with bent_sampler(llm.collective_rpc):
                (output,) = generate(llm, 1, temperature=0, max_tokens=24, identity=60)
            assert list(output.token_ids) != truth, name


def test_stop_inside_an_accepted_draft(llm, speculator):
    """A response ends at its stop token, also where the draft went on behind it."""
    truth = list(generate(llm, 1, extra=False, temperature=0, max_tokens=14)[0].token_ids)
    stop = truth[9]
    (output,) = generate(
        llm, 1, history=[truth], temperature=0, max_tokens=14, stop_token_ids=[stop], identity=9
    )
    assert list(output.token_ids) == truth[: truth.index(stop) + 1]


def test_history_makes_steps_fewer_with_kernels(llm, speculator, monkeypatch):
    """The kernels themselves in the runner; a second row drafts from a history."""
    from nemo_specrl.engine.drafters.v2 import arrays, kernels

    monkeypatch.setattr(arrays, "kernels", kernels)
    (first,) = generate(llm, 1, temperature=0, max_tokens=16)
    speculator.index.take_totals()
    (second,) = generate(llm, 1, temperature=0, max_tokens=16, identity=1)
    steps, tokens, *_ = speculator.index.take_totals()
    assert list(second.token_ids) == list(first.token_ids)
    assert tokens / steps > 2.5


def test_requests_without_identity(llm, speculator):
    """They decode all the same."""
    outputs = generate(llm, 2, extra=False, max_tokens=5)
    assert [len(output.token_ids) for output in outputs] == [5, 5]
    assert math.isfinite(outputs[0].logprobs[0][outputs[0].token_ids[0]].logprob)
    assert len(speculator.index) == 0


def test_later_turn_drafts_from_its_root(llm, speculator):
    """Also where its request brings nothing: its prompt begins with one that is known."""
    later = [*PROMPT, 3, 4, 5, 6]
    plain = generate(llm, 1, prompt=later, extra=False, temperature=0, max_tokens=12)[0]
    generate(llm, 1, history=[plain.token_ids], max_tokens=1)
    speculator.index.take_totals()
    drafted = generate(llm, 1, prompt=later, extra=False, temperature=0, max_tokens=12)[0]
    steps, tokens, *_ = speculator.index.take_totals()
    assert list(drafted.token_ids) == list(plain.token_ids)
    assert tokens / steps > 2
    assert len(speculator.index) == 1


@pytest.mark.parametrize("llm", ["sync"], indirect=True)
def test_requests_that_end_together_are_removed_in_order(llm, speculator, monkeypatch):
    """In the same one on every rank, whatever order their sets have; preempted ones, too.

    The eight requests of a set come in order by chance once in 40,320 times.
    """
    from vllm import SamplingParams

    engine, removed = llm.llm_engine, []
    runner = engine.model_executor.driver_worker.worker.model_runner
    remove = runner._remove_request

    def noted(req_id):
        if req_id in runner.req_states.req_id_to_index:
            removed.append(req_id)
        return remove(req_id)

    monkeypatch.setattr(runner, "_remove_request", noted)
    generate(llm, 8, max_tokens=2)
    removed.clear()
    for i in range(8):
        params = SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False)
        engine.add_request(f"row {i}", {"prompt_token_ids": list(PROMPT)}, params)
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


def test_propose_reads_nothing_on_the_host(llm, speculator, monkeypatch):
    """All of it, in vLLM's steps: rows that come, grow, are drafted for, end and make room.

    The control: whatever reads a value is seen, on the very arguments of the runner.
    """
    from nemo_specrl.engine.drafters.v2 import arrays

    kernels = Launches(arrays.kernels)
    monkeypatch.setattr(arrays, "kernels", kernels)
    propose, calls = speculator.propose, []

    def watched(input_batch, *args, **kwargs):
        calls.append((input_batch, args[4]))
        with nothing_read(monkeypatch):
            return propose(input_batch, *args, **kwargs)

    monkeypatch.setattr(speculator, "propose", watched)
    truth = list(generate(llm, 1, extra=False, temperature=0, max_tokens=30)[0].token_ids)
    for history in ([truth], [truth[:20] + [3] * 9] * 70):
        outputs = generate(
            llm, 5, history=history, temperature=0, max_tokens=30, identity=len(history)
        )
        assert [list(output.token_ids) for output in outputs] == [truth] * 5
        generate(llm, 3, extra=False, temperature=0.9, max_tokens=5)
    assert len(calls) > 20 and set(kernels.launched) == {"update", "append", "search", "vote"}
    steps, tokens, *_ = speculator.index.take_totals()
    assert tokens / steps > 2
    for name, read in READS.items():
        with pytest.raises(AssertionError), nothing_read(monkeypatch):
            read(*calls[-1])
            pytest.fail(f"{name} was not seen")


@pytest.mark.parametrize("llm", ["sync"], indirect=True)
def test_min_p_is_refused_by_vllm(llm):
    """By the check of requests, although the V2 runner's sampler would apply it to drafts."""
    with pytest.raises(Exception, match=r"min_p.* not yet supported with speculative decoding"):
        generate(llm, 1, extra=False, max_tokens=3, min_p=0.1)
