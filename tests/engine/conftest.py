"""Fixtures of the engine's tests: the shared engine with its first weights and no cached blocks."""

import asyncio
import math

import pytest

from nemo_specrl import SpecRLConfig, SpeculativeLLM
from nemo_specrl.engine.drafters.method import engine_options
from nemo_specrl.engine.vllm.refit import refit
from tests.conftest import DictCache, make_engine, weights_of
from tests.support.engines import DRAFTS, LOSSLESS, VOCABULARY

LENIENCE = math.exp(0.5)


@pytest.fixture(scope="module")
def loop():
    loop = asyncio.new_event_loop()
    yield loop
    tasks = asyncio.all_tasks(loop)  # that of vLLM 0.25 which takes an engine's outputs outlives it
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks))
    loop.close()


@pytest.fixture
def llm(engine, random_model):
    """The session's engine, reset to the weights it started from."""
    refit(engine, weights_of(random_model))
    yield engine
    assert not engine.llm_engine.has_unfinished_requests()


@pytest.fixture
def speculative(llm):
    """A function that makes a SpeculativeLLM, with ``fresh_fraction`` 0 unless given."""

    def make(cache=None, *, version=0, seed=0, lenience=LENIENCE, **options):
        config = SpecRLConfig(
            enabled=True, preset="faithful", lenience=lenience, **{"fresh_fraction": 0.0, **options}
        )
        made = SpeculativeLLM(llm, DictCache() if cache is None else cache, config, seed=seed)
        made.policy_version = version
        return made

    return make


@pytest.fixture(scope="session")
def drafting_engine(random_model):
    """A real engine with the tree proposer."""
    if not DRAFTS:
        pytest.skip("this vLLM has no custom proposers")
    return make_engine(
        random_model,
        max_num_seqs=64,
        max_num_batched_tokens=64 * 192,
        max_logprobs=VOCABULARY,
        **engine_options(LOSSLESS),
    )


@pytest.fixture(scope="session")
def cramped_engine(random_model):
    """A real engine whose steps have 64 tokens at most, so that it prefills in chunks."""
    return make_engine(random_model, max_num_seqs=8, max_num_batched_tokens=64, max_logprobs=3)


@pytest.fixture
def drafting_llm(drafting_engine, random_model):
    """The engine with the tree proposer, reset to the weights it started from."""
    refit(drafting_engine, weights_of(random_model))
    yield drafting_engine
    assert not drafting_engine.llm_engine.has_unfinished_requests()


@pytest.fixture
def proposer(drafting_llm):
    """The engine's own, with nothing in its trees and its counters at 0."""
    worker = drafting_llm.llm_engine.model_executor.driver_worker.worker
    worker.model_runner.drafter.__init__(drafting_llm.llm_engine.vllm_config)
    return worker.model_runner.drafter


@pytest.fixture
def begun(llm, monkeypatch):
    """Prompts in the order in which they enter the engine."""
    begun = []
    add = llm.llm_engine.add_request

    def note(request_id, prompt, params, **options):
        begun.append(prompt["prompt_token_ids"])
        return add(request_id, prompt, params, **options)

    monkeypatch.setattr(llm.llm_engine, "add_request", note)
    return begun
