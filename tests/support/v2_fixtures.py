"""Fixtures of the tests of V2 drafting, and the mark of those that need Triton."""

import sys

import pytest
import torch


def mark_if_triton_is_missing(items, package, modules=()):
    """Skip the tests of a package, or of some of its modules, without ``v2_cpu``."""
    if getattr(sys.modules.get("tests.support.v2_cpu"), "READY", False):
        return
    for item in items:
        name = item.module.__name__
        if name.startswith(package) and (not modules or name.rsplit(".", 1)[1] in modules):
            item.add_marker(pytest.mark.skip("needs Triton, and pytest -p tests.support.v2_cpu"))


@pytest.fixture
def by_reference(monkeypatch):
    """Launch the numpy reference in place of the kernels, which it equals. Not on a GPU."""
    if torch.cuda.is_available():
        return
    from nemo_specrl.drafting import device_arrays
    from tests.support import v2_numpy

    monkeypatch.setattr(device_arrays, "kernels", v2_numpy)
