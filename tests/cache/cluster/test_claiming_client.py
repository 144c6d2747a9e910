"""Claims of a client against a real shard, which a test holds up for as long as it likes."""

import asyncio
import contextlib
import pickle
import sys
import tempfile
import time
from pathlib import Path

import pytest
import ray

from nemo_specrl.cache.cluster import client as client_module
from nemo_specrl.cache.cluster.shard_calls import FAILURES_TO_OPEN
from nemo_specrl.rollout import prompt_key
from tests.support.cluster.nodes import ray_head, rollout, start_cache, wait_until

KEY = prompt_key([5])
GROUP = 4


@pytest.fixture(scope="module")
def node():
    with (
        tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder,  # short
        ray_head(sys.modules[__name__], folder, failures=60),
    ):
        yield


@pytest.fixture
def cache(node, tmp_path):
    """With a group of a prompt that was served under policy version 0."""
    cache = start_cache(tmp_path / "stores", partitions=4, deadline_ms=60_000)
    cache.put([rollout(5, sample_index=s) for s in range(GROUP)])
    cache.sync()
    yield cache
    cache.close()


@pytest.fixture
def held_up(cache, tmp_path):
    """A function that holds the shard up, in a context; it is entered when the shard stands."""
    [shard] = cache._view.shards.values()

    def wait_for(self, standing, end):  # in the one thread that answers clients
        Path(standing).touch()
        while not Path(end).exists():
            time.sleep(0.01)

    @contextlib.contextmanager
    def held_up():
        standing, end = (tmp_path / name for name in ("standing", "end"))
        for path in (standing, end):
            path.unlink(missing_ok=True)
        call = shard.__ray_call__.remote(wait_for, str(standing), str(end))
        wait_until(standing.exists)
        try:
            yield
        finally:
            end.touch()
            ray.get(call)

    return held_up


def held(cache):
    """The sample indices that rows have on the shard."""
    [shard] = cache._view.shards.values()
    claims = ray.get(shard.__ray_call__.remote(lambda self: self.claims.held(b"", None)))
    return sorted(sample_index for _, sample_index, _ in claims)


async def until(condition):
    async with asyncio.timeout(60):  # half the time after which a claim ends by itself
        while not condition():
            await asyncio.sleep(0.01)


def test_the_rows_of_a_prompt_get_its_group_once(cache, held_up):
    async def rows(version):
        claiming = [asyncio.create_task(cache.claim(KEY, version)) for _ in range(GROUP)]
        await asyncio.sleep(0)
        return claiming

    async def burst():
        with held_up():
            claiming = await rows(1)
        first, *others = await asyncio.gather(*claiming)
        assert first.whole and [r.sample_index for r in first.rollouts] == list(range(GROUP))
        for claim in others:  # asked for while the first answer was under way
            assert [r.sample_index for r in claim.rollouts] == [claim.sample_index]
            assert claim.rollouts == [first.rollouts[claim.sample_index]]
            assert claim.group == [r.outline for r in first.rollouts]
            assert len(pickle.dumps(claim.rollouts)) < len(pickle.dumps(first.rollouts)) / 2
        assert sorted(c.sample_index for c in (first, *others)) == list(range(GROUP))
        for claim in (first, *others):
            cache.release(KEY, claim.sample_index)
        claimed = await asyncio.gather(*await rows(2))  # by weights of which nobody has asked yet
        assert [claim.whole for claim in claimed] == [True, False, False, False]

    asyncio.run(burst())
    assert cache.failures == 0


def test_the_index_of_a_late_claim_is_free_again_and_the_next_row_gets_the_group(cache, held_up):
    async def rows():
        with held_up():
            cache.deadline_s = 0.05
            assert await cache.claim(KEY, 1) is None
            assert cache.take_failures() == 1
            cache.deadline_s = 60.0
            given_up = asyncio.create_task(cache.claim(KEY, 1))
            await asyncio.sleep(0)
            given_up.cancel()
            await asyncio.gather(given_up, return_exceptions=True)
        await until(lambda: held(cache) == [])
        claim = await cache.claim(KEY, 1)
        assert claim.sample_index == 0 and claim.whole and len(claim.rollouts) == GROUP

    asyncio.run(rows())
    assert held(cache) == [0] and cache.failures == 0


def test_a_row_gets_the_group_where_the_one_that_asked_for_it_was_given_up(cache, held_up):
    async def rows():
        with held_up():
            first, *others = [asyncio.create_task(cache.claim(KEY, 1)) for _ in range(GROUP)]
            await asyncio.sleep(0)
            first.cancel()
            await asyncio.sleep(0)
        return await asyncio.gather(*others)

    claimed = asyncio.run(rows())
    assert [claim.whole for claim in claimed].count(True) == 1
    assert sorted(claim.sample_index for claim in claimed) == [1, 2, 3]
    assert cache.failures == 0


def test_an_answer_that_came_while_the_event_loop_was_busy_is_not_late(cache):
    """From Python 3.12 on, ``asyncio.wait_for`` would say that it is."""

    async def row():
        cache.deadline_s = 0.05
        claiming = asyncio.create_task(cache.claim(KEY, 1))
        await asyncio.sleep(0)  # it has asked
        assert held(cache) == [0]  # the shard has answered
        time.sleep(1)  # what another row does when it ends
        return await claiming

    claim = asyncio.run(row())
    assert claim is not None and claim.sample_index == 0 and cache.failures == 0


def test_a_claim_among_many_is_waited_for_longer(cache, held_up, monkeypatch):
    """By the number of those without an answer: the first is late, and the last ones are not."""
    monkeypatch.setattr(client_module, "LOOK_UP_SECONDS", 3600.0)
    cache.deadline_s = 0.1

    async def rows():
        with held_up():
            first, *others = [asyncio.create_task(cache.claim(KEY, 1)) for _ in range(1200)]
            assert await first is None
            assert not others[-1].done()
        return await others[-1]

    assert asyncio.run(rows()) is not None
    cache.deadline_s = 60.0
    assert cache.take_failures() > 0


def test_claims_that_nobody_is_asked_for_count_as_failures(cache, held_up):
    async def rows():
        with held_up():
            cache.deadline_s = 0.05
            for tried in range(1, FAILURES_TO_OPEN + 4):  # the last three without a call
                assert await cache.claim(KEY, 1) is None
                assert cache.failures == tried
            cache.deadline_s = 60.0
        await until(lambda: held(cache) == [])

    asyncio.run(rows())
