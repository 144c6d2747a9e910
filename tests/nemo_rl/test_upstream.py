"""The patch that is ready to be sent to NeMo-RL: it applies, and does what its text says."""

from __future__ import annotations

import pytest

from nemo_specrl.nemo_rl import compat
from tests.nemo_rl.test_recipes import nemo  # noqa: F401
from tests.support.upstream import UPSTREAM, found_by, patched_copy


def test_extensions_register_their_workers(nemo, tmp_path):  # noqa: F811
    if compat.pinned_vllm(nemo.home) == "0.20.0":
        pytest.skip("nemo_rl_generation_workers.patch is for NeMo-RL main, this is v0.7.0")
    patch = UPSTREAM / "nemo_rl_generation_workers.patch"
    found = found_by("workers", copy=patched_copy(nemo.home, patch, tmp_path))
    assert found["stock"] and found["ours"] and found["environment"]
    assert found["quantized"].endswith(".VllmQuantAsyncGenerationWorker")
    both, missing = found["refused"]
    assert "quant_cfg and spec_rl" in both and "cannot be combined" in both
    assert "sync alone has no worker in place of" in missing
