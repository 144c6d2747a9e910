"""Fixtures of the tests of prefix reuse: engines with their first weights and no cached blocks."""

import pytest

from nemo_specrl.engine.refit import refit
from nemo_specrl.reuse.async_llm import AsyncPrefixReuse
from nemo_specrl.reuse.llm import PrefixReuse
from tests.conftest import make_async_engine, weights_of
from tests.reuse.support import DictCache, block
from tests.support.engines import event_loop

SMALL_KV = {"block_size": 32, "num_gpu_blocks_override": 200}  # of 6,400 tokens
# vLLM's CPU engines cannot prefill a seeded request in chunks.
WHOLE_PREFILLS = {"max_num_batched_tokens": 128 * 192}


@pytest.fixture(scope="session")
def loop():
    yield from event_loop()


@pytest.fixture(scope="session")
def async_engine(random_model, loop):
    """A real ``AsyncLLM`` with the weights that ``engine`` starts from."""
    llm = make_async_engine(
        random_model, loop, max_num_seqs=128, seed=0, **SMALL_KV, **WHOLE_PREFILLS
    )
    yield llm
    llm.shutdown()


@pytest.fixture
def llm(engine, random_model):
    """The session's engine, reset to the weights it started from."""
    refit(engine, weights_of(random_model))
    yield engine
    assert not engine.llm_engine.has_unfinished_requests()


@pytest.fixture
def reuse(llm):
    """A function that makes a PrefixReuse of a policy version, with no fresh rows unless asked."""

    def make(cache=None, *, version=0, seed=0, **options):
        cache = DictCache() if cache is None else cache
        made = PrefixReuse(llm, block(**options), cache, seed)
        made.policy_version = version
        return made

    return make


@pytest.fixture
def async_reuse(async_engine, loop):
    """The same of an AsyncPrefixReuse."""

    def make(cache=None, *, version=0, seed=0, **options):
        cache = DictCache() if cache is None else cache
        made = AsyncPrefixReuse(async_engine, block(**options), cache, seed)
        loop.run_until_complete(made.set_policy_version(version))
        return made

    return make
