"""Prompts with images on a real engine of a tiny model that sees them, by the tree proposer."""

import asyncio

import pytest
import torch
from safetensors.torch import save_file
from vllm import SamplingParams

from nemo_specrl import SpecRLConfig, SpeculativeLLM, errors
from nemo_specrl.engine.async_engine import AsyncSpeculativeLLM
from nemo_specrl.engine.drafters.method import engine_options
from nemo_specrl.engine.served_requests import ServingSpeculativeLLM
from nemo_specrl.engine.vllm.refit import refit
from nemo_specrl.media import media_prompt_key
from tests.conftest import DictCache, make_async_engine, make_engine, weights_of
from tests.engine.test_async_engine import ClaimingCache
from tests.engine.test_in_flight import load
from tests.support.engines import DRAFTS, LOSSLESS
from tests.support.vision_models import (
    check_epochs,
    image,
    prompts,
    question,
    sampled,
    vision_model,
)

pytestmark = pytest.mark.skipif(not DRAFTS, reason="this vLLM has no custom proposers")
SIZES = {"max_num_seqs": 8, "max_model_len": 96, "limit_mm_per_prompt": {"image": 2}}


# Engines of this process are the session's: one that ends takes the process groups of others along.
@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return vision_model(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="session")
def llm(model):
    return make_engine(model, **SIZES, **engine_options(LOSSLESS))


@pytest.fixture(scope="session")
def plain_llm(model):
    return make_engine(model, **SIZES)


@pytest.fixture(scope="module")
def plain(plain_llm):
    """What it gives."""
    return sampled(plain_llm, prompts())


def test_prompts_of_one_text_have_the_histories_of_their_images(llm, plain):
    made = SpeculativeLLM(llm, DictCache(), LOSSLESS)
    first, second = check_epochs(plain, made, rows=2)
    assert first.tree_steps and second.tree_tokens / second.tree_steps > 3
    drafter = llm.llm_engine.model_executor.driver_worker.worker.model_runner.drafter
    assert len(drafter.roots) == len(plain)


def test_budgets_and_stop_strings(llm, plain):
    """The model's limit is that of the tokens with placeholders, which the engine alone knows."""
    made = SpeculativeLLM(llm, DictCache(), LOSSLESS)
    for _ in range(2):
        for output in sampled(made, prompts()[:2], max_tokens=None):
            [completion] = output.outputs
            assert completion.finish_reason == "length"
            assert len(output.prompt_token_ids) + len(completion.token_ids) == 96
        made.policy_version += 1
    stop = plain[0].outputs[0].text[4:6]
    for _ in range(2):
        [output] = sampled(made, prompts()[:1], stop=[stop])
        assert output.outputs[0].stop_reason == stop
        assert output.outputs[0].text == plain[0].outputs[0].text.split(stop)[0]
        made.policy_version += 1
    assert made.metrics.tree_accepted_tokens > 0


def seeing_otherwise(model):
    """Its weights, with noise on those of the part that sees."""
    noise = torch.Generator().manual_seed(0)
    return [
        (name, w + 0.2 * torch.randn(w.shape, generator=noise) if "visual" in name else w)
        for name, w in weights_of(model)
    ]


def test_a_new_policy_version_sees_images_with_the_new_weights(model, llm, plain_llm, plain):
    """The engine keeps what its encoder has made of an image, until it is told otherwise."""
    weights, seeing = weights_of(model), seeing_otherwise(model)
    made = SpeculativeLLM(llm, DictCache(), LOSSLESS)
    sampled(made, prompts())
    try:
        refit(plain_llm, seeing)
        llm.collective_rpc("specrl_refit", args=(seeing,))  # by others, as NeMo-RL does it
        made.policy_version += 1
        for ours, theirs, before in zip(
            sampled(made, prompts()), sampled(plain_llm, prompts()), plain, strict=True
        ):
            said = list(theirs.outputs[0].token_ids)
            assert list(ours.outputs[0].token_ids) == said
            seen = "<|image_pad|>" in (theirs.prompt or "")
            assert (said != list(before.outputs[0].token_ids)) is seen
    finally:
        for engine in (plain_llm, llm):
            refit(engine, weights)


@pytest.mark.parametrize(
    "options", [{"preset": "faithful"}, {"preset": "fast"}, {"preset": "faithful", "tree": {}}]
)
def test_where_prompts_verify_images_are_refused_in_one_line(llm, options):
    made = SpeculativeLLM(llm, DictCache(), SpecRLConfig(enabled=True, **options))
    with pytest.raises(errors.ConfigError, match=r"images, sounds and videos.*preset: lossless"):
        sampled(made, prompts(), top_p=1.0)
    off = SpeculativeLLM(llm, DictCache(), SpecRLConfig(enabled=False))
    assert len(sampled(off, prompts())) == 3


def test_conversations_with_images_are_refused_in_one_line(llm):
    made = SpeculativeLLM(llm, DictCache(), LOSSLESS)
    params = SamplingParams(max_tokens=4)
    with pytest.raises(errors.ConfigError, match="environment: leads conversations by tokens"):
        made.generate(prompts(), params, environment=lambda *said: None, use_tqdm=False)


@pytest.fixture(scope="module")
def async_llm(model, loop):
    llm = make_async_engine(model, loop, **SIZES, **engine_options(LOSSLESS))
    yield llm
    llm.shutdown()


PARAMS = {"temperature": 1.0, "top_p": 1e-6, "max_tokens": 24, "ignore_eos": True, "logprobs": 0}


async def epoch(made, name):
    """What each of the prompts gets from an asynchronous engine."""

    async def row(prompt, name):
        stream = made.generate(prompt, SamplingParams(**PARAMS), name)
        return [output async for output in stream][-1]

    asked = enumerate(prompts())
    return await asyncio.gather(*(row(prompt, f"{name} {i}") for i, prompt in asked))


def test_asynchronous_rows(async_llm, loop, plain):
    made = AsyncSpeculativeLLM(async_llm, ClaimingCache(), LOSSLESS)
    for number in (1, 2):
        outputs = loop.run_until_complete(epoch(made, number))
        for ours, theirs in zip(outputs, plain, strict=True):
            assert ours.prompt_token_ids == theirs.prompt_token_ids
            assert list(ours.outputs[0].token_ids) == list(theirs.outputs[0].token_ids)
        loop.run_until_complete(made.set_policy_version(number))
        loop.run_until_complete(made.count_tree_drafts())
        steps, made.metrics = made.metrics, type(made.metrics)()
    assert steps.tree_tokens / steps.tree_steps > 3
    assert len(made.cache.rollouts) == len(plain)


@pytest.mark.parametrize("in_flight", [True, False])
def test_asynchronous_rows_see_images_with_the_new_weights(
    model, async_llm, loop, plain_llm, plain, tmp_path, in_flight
):
    """After ``refit``, and after a refit of another's with ``set_policy_version`` behind it."""
    policies = []
    for weights in (weights_of(model), seeing_otherwise(model)):
        policies.append(tmp_path / f"{len(policies)}.safetensors")
        save_file({name: tensor.contiguous() for name, tensor in weights}, policies[-1])
    made = AsyncSpeculativeLLM(async_llm, ClaimingCache(), LOSSLESS)

    async def new_weights(number):
        def update():
            return async_llm.collective_rpc(load, args=(str(policies[number % 2]),))

        if in_flight:
            await made.refit(update, number)
        else:
            await update()
            await made.set_policy_version(number)

    before = loop.run_until_complete(epoch(made, f"{in_flight} before"))
    try:
        refit(plain_llm, seeing_otherwise(model))
        loop.run_until_complete(new_weights(1))
        outputs = loop.run_until_complete(epoch(made, f"{in_flight} after"))
        for ours, theirs in zip(outputs, sampled(plain_llm, prompts()), strict=True):
            assert list(ours.outputs[0].token_ids) == list(theirs.outputs[0].token_ids)
    finally:
        loop.run_until_complete(new_weights(2))
        refit(plain_llm, weights_of(model))
    assert [list(output.outputs[0].token_ids) for output in before] == [
        list(output.outputs[0].token_ids) for output in plain
    ]


def test_requests_of_the_http_server(async_llm, loop, plain):
    """As vLLM's server renders them. A later turn drafts from the conversation with its image."""
    made = ServingSpeculativeLLM(async_llm, ClaimingCache(), LOSSLESS)
    renderer = async_llm.renderer
    notes = []

    def rendered(seed, said=""):
        text = question("served?") + said
        prompt = {"prompt": text, "multi_modal_data": {"image": image(seed)}}
        [made] = renderer.render_cmpl([prompt])
        assert made["type"] == "multimodal"
        return made

    async def one(prompt, name):
        params = SamplingParams(**PARAMS)
        return [o async for o in made.serve(prompt, params, name, note=notes.append)][-1]

    def ask(prompt, name):
        loop.run_until_complete(made.count_tree_drafts())
        before = made.metrics.tree_accepted_tokens
        output = loop.run_until_complete(one(prompt, name))
        loop.run_until_complete(made.count_tree_drafts())
        return output.outputs[0], made.metrics.tree_accepted_tokens - before

    cat, dog = ask(rendered(5), "cat")[0], ask(rendered(6), "dog")[0]
    assert list(cat.token_ids) != list(dog.token_ids)
    for seed, name, said in ((5, "cat", cat), (6, "dog", dog)):
        again, accepted = ask(rendered(seed), f"{name} again")
        assert list(again.token_ids) == list(said.token_ids) and accepted > 12
    assert len({turn.key for turn in notes}) == 2
    assert {turn.key for turn in notes[:2]} == {media_prompt_key(rendered(s)) for s in (5, 6)}
    assert len(made._roots) == 2
    raw = {"prompt": question("raw?"), "multi_modal_data": {"image": image(5)}}
    assert len(ask(raw, "raw")[0].token_ids) == 24 and len(notes) == 4  # plainly
