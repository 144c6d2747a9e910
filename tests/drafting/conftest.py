"""Tests of drafts.

Those of V2's kernels and index need Triton, with its interpreter on a CPU::

PYTHONPATH=folder/of/triton python -m pytest -p tests.support.v2_cpu tests/drafting
"""

from tests.support.v2_fixtures import by_reference, mark_if_triton_is_missing

__all__ = ["by_reference"]
NEED_TRITON = ("test_device_index", "test_kernels")


def pytest_collection_modifyitems(items):
    mark_if_triton_is_missing(items, __package__, NEED_TRITON)
