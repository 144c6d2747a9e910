"""Tests of drafts in vLLM's V2 model runner: plain ``vllm.LLM`` and ``AsyncLLM`` with the plug-in.

On a CPU they need Triton with its interpreter, which vLLM has to find when it is imported::

    PYTHONPATH=folder/of/triton python -m pytest -p tests.support.v2_cpu tests/engine/v2

On a GPU the same command runs them with vLLM's own kernels, torch.compile and CUDA graphs.
"""

import zlib

import pytest

from nemo_specrl.cache import RolloutStore
from tests.support.v2_exactness import PROMPT, STORE, VOCABULARY
from tests.support.v2_fixtures import by_reference, mark_if_triton_is_missing

__all__ = ["by_reference"]


def pytest_collection_modifyitems(items):
    mark_if_triton_is_missing(items, __package__)


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def store(cache_dir):
    """The store of a module's engines, in which a test puts what they draft from."""
    made = RolloutStore(cache_dir, vocabulary=STORE)
    yield made
    made.close()


@pytest.fixture(scope="module")
def engines():
    """Those that a module has made, by scheduling. Their memory is given back at the end."""
    made = {}
    yield made
    for engine in made.values():
        engine.llm_engine.engine_core.shutdown()


@pytest.fixture
def prompt(request):
    """A prompt of the test's own, so that tests have their own histories on a shared engine."""
    number = zlib.crc32(request.node.nodeid.encode())
    return [1, *(3 + number // 29**i % (VOCABULARY - 3) for i in range(3)), *PROMPT[1:]]
