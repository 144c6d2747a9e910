"""Tests of V2 drafting.

On a CPU they need Triton with its interpreter, which vLLM has to find when it is imported::

    PYTHONPATH=folder/of/triton python -m pytest -p tests.support.v2_cpu tests/engine/drafters/v2

On a GPU the same command runs them with vLLM's own kernels, torch.compile and CUDA graphs.
"""

import sys

import pytest
import torch

needs_interpreter = pytest.mark.skipif(
    not getattr(sys.modules.get("tests.support.v2_cpu"), "READY", False),
    reason="needs Triton, and pytest -p tests.support.v2_cpu",
)


def pytest_collection_modifyitems(items):
    for item in items:
        if __package__ in item.module.__name__ and not hasattr(item.module, "NEEDS_NO_TRITON"):
            item.add_marker(needs_interpreter)


@pytest.fixture(scope="module")
def engines():
    """Those that a module has made, by scheduling. Their memory is given back at the end."""
    made = {}
    yield made
    for engine in made.values():
        engine.llm_engine.engine_core.shutdown()


@pytest.fixture
def by_reference(monkeypatch):
    """Launch the numpy reference in place of the kernels, which it equals. Not on a GPU."""
    if torch.cuda.is_available():
        return
    from nemo_specrl.engine.drafters.v2 import arrays
    from tests.support import v2_numpy

    monkeypatch.setattr(arrays, "kernels", v2_numpy)
