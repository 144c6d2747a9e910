"""Real Ray nodes, one each with a network, a disk and processes of its own."""

import tempfile
from pathlib import Path

import pytest

from tests.support.cluster.network import ray_network, why_not


@pytest.fixture(scope="module")
def network():
    """Three nodes; a module's tests may add some, kill some, and cut them off."""
    if why := why_not():
        pytest.skip(f"no networks of namespaces here: {why}")
    with (
        tempfile.TemporaryDirectory(prefix="net", ignore_cleanup_errors=True) as folder,  # short
        ray_network(Path(folder), others=2) as network,
    ):
        yield network
