"""Fixtures of the engine's tests: the shared engine with its first weights and no cached blocks."""

import asyncio
import math

import pytest

from nemo_specrl import SpecRLConfig, SpeculativeLLM
from nemo_specrl.engine.compat import refit
from tests.conftest import DictCache, weights_of

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
        config = SpecRLConfig(enabled=True, lenience=lenience, **{"fresh_fraction": 0.0, **options})
        made = SpeculativeLLM(llm, DictCache() if cache is None else cache, config, seed=seed)
        made.policy_version = version
        return made

    return make
