"""Requests of the HTTP server's thread in the event loop of the worker."""

import asyncio
import threading

import pytest

from nemo_specrl.nemo_rl.served_engine import ServedEngine


class Engine:
    """Stands in for an AsyncLLM: what it is asked for says what happens."""

    model_config = "its own"

    def __init__(self):
        self.loops, self.closed = [], asyncio.Event()

    async def generate(self, outputs, *, error=None):
        self.loops.append(asyncio.get_running_loop())
        try:
            for output in outputs:
                await asyncio.sleep(0)
                yield output
            if error is not None:
                raise error
            if not outputs:
                await asyncio.sleep(3600)
        finally:
            self.closed.set()


@pytest.fixture
def worker():
    """The worker's event loop, in a thread, as Ray runs that of an actor."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def attach(served, serve):
    served.attach(serve)


def test_requests_are_served_in_the_loop_that_was_attached(worker):
    engine = Engine()
    served = ServedEngine(engine)
    assert served.model_config == "its own"

    async def ask(*args, **kwargs):
        return [output async for output in served.generate(*args, **kwargs)]

    assert asyncio.run(ask([1, 2])) == [1, 2]
    assert engine.loops.pop() is not worker
    asyncio.run_coroutine_threadsafe(attach(served, engine.generate), worker).result()
    assert asyncio.run(ask([3, 4])) == [3, 4]
    assert engine.loops.pop() is worker
    with pytest.raises(ValueError, match="too long"):
        asyncio.run(ask([5], error=ValueError("too long")))


def test_a_client_that_goes_away_ends_its_request(worker):
    engine = Engine()
    served = ServedEngine(engine)
    asyncio.run_coroutine_threadsafe(attach(served, engine.generate), worker).result()

    async def ask():
        await asyncio.wait_for(anext(served.generate([])), 0.2)

    with pytest.raises(TimeoutError):
        asyncio.run(ask())
    asyncio.run_coroutine_threadsafe(engine.closed.wait(), worker).result(60)
