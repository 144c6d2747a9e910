"""Connecting to Ray. Actors that fail are tested with policies."""

import os
import socket
import time

import pytest
import ray

from nemo_specrl.errors import ConfigError, PolicyError
from nemo_specrl.trainer.policy.megatron import ray_actors


@pytest.fixture
def closed_port():
    """A port of this machine at which nobody listens, and nobody else will."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "ray://127.0.0.1:{port}"])
def test_an_address_at_which_nobody_answers(monkeypatch, closed_port, address):
    """Ray itself would try for two minutes."""
    address = address.format(port=closed_port)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match="no Ray answers there; start one, or unset it") as told:
        ray_actors.connect()
    assert str(told.value).startswith(f"RAY_ADDRESS = {address!r}: ")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_port_too_large(monkeypatch, host):
    """Looked up with the host's name it would be cut to 16 bits, and another program may answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"{host}:{server.getsockname()[1] + 2**16}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ConfigError, match="no Ray answers there; start one, or unset it"):
            ray_actors.connect()


@pytest.mark.parametrize("address", ["local:", "x:y:z", "file:///x"])
def test_what_is_no_address(monkeypatch, address):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=f"RAY_ADDRESS = '{address}': .*; give HOST:PORT, or"):
        ray_actors.connect()


@pytest.mark.timeout(60)
def test_an_address_that_drops_what_is_sent(monkeypatch):
    """As behind a firewall: nobody takes the connection, which is not refused either."""
    monkeypatch.setattr(ray_actors, "CONNECT_SECONDS", 0.5)
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for client in waiting:
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{full.getsockname()[1]}")
        with pytest.raises(ConfigError, match="no Ray answers there"):
            ray_actors.connect()
        for client in waiting:
            client.close()


class Sleeper:
    def pid(self):
        return os.getpid()

    def ping(self):
        pass

    def sleep(self):
        time.sleep(60)


def test_an_actor_that_ray_kills_for_memory_says_so(own_ray, monkeypatch):
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.001")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "100")
    ray_actors.connect()
    ended = []
    actors = ray_actors.Actors(
        Sleeper,
        [()],
        nodes=1,
        gpu=False,
        name=lambda index: f"rank {index}",
        error=PolicyError,
        on_failure=lambda: ended.append(True),
    )
    with pytest.raises(PolicyError, match="rank 0 was killed by Ray because the memory"):
        actors.all("sleep")
    assert ended
    ray.shutdown()
