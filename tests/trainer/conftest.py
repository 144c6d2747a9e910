"""Fixtures of the embedded trainer's tests."""

import tempfile

import pytest


@pytest.fixture(scope="module")
def own_ray():
    """Policies of a module start a Ray of their own, in a folder whose path is short.

    Paths of Ray's sockets may not be longer than 107 bytes.
    """
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("RAY_TMPDIR", folder)
        patch.delenv("RAY_ADDRESS", raising=False)
        yield
