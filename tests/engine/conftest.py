"""The engine as the tests of this folder want it: first weights, empty prefix cache."""

import math

import pytest

from nemo_specrl import SpecRLConfig, SpeculativeLLM
from nemo_specrl.engine.compat import refit
from tests.conftest import DictCache, weights_of

LENIENCE = math.exp(0.5)


@pytest.fixture
def llm(engine, random_model):
    """The session's engine with the weights it started from."""
    refit(engine, weights_of(random_model))
    yield engine
    assert not engine.llm_engine.has_unfinished_requests()


@pytest.fixture
def speculative(llm):
    """Make a SpeculativeLLM; without fresh rows unless asked for."""

    def make(cache=None, *, version=0, seed=0, lenience=LENIENCE, **options):
        config = SpecRLConfig(enabled=True, lenience=lenience, **{"fresh_fraction": 0.0, **options})
        made = SpeculativeLLM(llm, DictCache() if cache is None else cache, config, seed=seed)
        made.policy_version = version
        return made

    return make
