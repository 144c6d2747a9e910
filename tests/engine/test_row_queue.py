"""Rows that come one by one: which engine gets them, and when."""

import asyncio
import functools
import heapq
import pickle
import random
import threading
from collections import Counter
from contextlib import AsyncExitStack

import pytest

from nemo_specrl.engine.row_queue import RowQueue

GROUP = 8


def run(test):
    """Run a test that is a coroutine function."""

    @functools.wraps(test)
    def wrapper(*args, **kwargs):
        return asyncio.run(test(*args, **kwargs))

    return wrapper


async def given(queue, prompts):
    """The engine of each row, where none ends."""
    async with AsyncExitStack() as rows:
        return [(await rows.enter_async_context(queue.place(p))).engine for p in prompts]


class Clock:
    """Rows in virtual time: each takes a number of steps from when it starts."""

    def __init__(self, queue):
        self.queue = queue
        self.now = 0
        self.ends = []  # of rows that run: when, number, and what is set then
        self.running, self.most = Counter(), 0
        self.last = Counter()  # end of each engine

    async def row(self, number, prompt, steps):
        async with self.queue.place(prompt) as place:
            self.running[place.engine] += 1
            self.most = max(self.most, self.running[place.engine])
            end = asyncio.Event()
            heapq.heappush(self.ends, (self.now + steps, number, end))
            await end.wait()
            self.running[place.engine] -= 1
            self.last[place.engine] = self.now
            self.queue.leave(place, steps)

    async def run(self, rows):
        tasks = [asyncio.ensure_future(self.row(i, *row)) for i, row in enumerate(rows)]
        await self.settle()
        while self.ends:
            self.now, _, end = heapq.heappop(self.ends)
            end.set()
            await self.settle()
        assert all(task.done() for task in tasks)

    async def settle(self):
        for _ in range(20):
            await asyncio.sleep(0)


@run
async def test_rows_of_a_prompt_stay_together():
    prompts = [prompt for prompt in range(24) for _ in range(GROUP)]
    engines = await given(RowQueue(4, GROUP), prompts)
    assert Counter(engines) == dict.fromkeys(range(4), len(prompts) // 4)
    groups = [set(engines[start : start + GROUP]) for start in range(0, len(engines), GROUP)]
    assert all(len(group) == 1 for group in groups)


@run
async def test_with_fewer_prompts_than_engines_no_engine_is_idle():
    engines = await given(RowQueue(4, together=4), [0] * GROUP + [1] * GROUP)
    assert Counter(engines) == dict.fromkeys(range(4), 4)


@run
async def test_rows_go_where_the_prompts_first_ones_were():
    queue = RowQueue(4, together=2)
    for _ in range(3):
        assert await given(queue, ["a", "a"]) == [0, 0]
    async with queue.place("b"), queue.place("c"), queue.place("c"):
        assert await given(queue, ["a"]) == await given(queue, ["b"]) == [0]  # not an idle one
        assert await given(queue, ["c"]) == [2]  # where two of its rows are, is too much to do
        assert await given(queue, ["d", "d", "c", "d"]) == [2, 2, 3, 2]
    assert await given(queue, [None] * 4) == [0, 1, 2, 3]


@run
async def test_expected_lengths_are_balanced():
    """One prompt's rows are seven times as long as the others', and are apart from now on."""
    queue = RowQueue(2, together=2)
    for prompt in range(8):
        async with queue.place(prompt) as place:
            queue.leave(place, 70 if prompt == 0 else 10)
    prompts = [0, *range(1, 8), 0, *range(1, 8)]
    engines = await given(queue, prompts)
    assert engines[:8] == [0] + [1] * 7
    tokens = Counter()
    for engine, prompt in zip(engines, prompts, strict=True):
        tokens[engine] += 70 if prompt == 0 else 10
    assert tokens == {0: 140, 1: 140}


@pytest.mark.parametrize("seed", range(5))
@run
async def test_no_engine_is_idle_while_rows_wait(seed):
    """So the last end is at most what list scheduling guarantees (Graham, 1966)."""
    rng = random.Random(seed)
    of_prompts = [rng.lognormvariate(3, 1) for _ in range(24)]
    rows = [(p, 1 + int(of_prompts[p] * rng.lognormvariate(0, 0.3))) for p in range(24)] * GROUP
    rng.shuffle(rows)
    clock = Clock(RowQueue(4, GROUP, places=4))
    for _ in range(2):  # nothing is known of lengths, and then that of each prompt is
        clock.now, clock.most, clock.last = 0, 0, Counter()
        await clock.run(rows)
        steps = [steps for _, steps in rows]
        assert clock.most == 4 and not any(clock.running.values())
        assert max(clock.last.values()) <= sum(steps) / 16 + max(steps)
        assert max(clock.last.values()) - min(clock.last.values()) <= max(steps)


@run
async def test_an_engine_with_room_takes_its_own_rows_first_and_then_the_longest_of_the_others():
    queue = RowQueue(2, together=1, places=1)
    for prompt, tokens in (("long", 90), ("short", 10), ("middle", 50)):
        async with queue.place(prompt) as place:
            queue.leave(place, tokens)
    began = []

    async def row(prompt, end):
        async with queue.place(prompt) as place:
            began.append((prompt, place.engine))
            await end.wait()

    ends = [asyncio.Event() for _ in range(5)]
    prompts = ["first", "second", "long", "short", "middle"]
    tasks = [asyncio.ensure_future(row(*both)) for both in zip(prompts, ends, strict=True)]
    await asyncio.sleep(0.01)
    assert began == [("first", 0), ("second", 1)]
    for end in (ends[1], ends[4], ends[3]):  # engine 1 ends them all, engine 0 none
        end.set()
        await asyncio.sleep(0.01)
    assert [prompt for prompt, _ in began[2:]] == ["middle", "short", "long"]
    assert {engine for _, engine in began[2:]} == {1}
    ends[0].set()
    ends[2].set()
    await asyncio.gather(*tasks)


@run
async def test_rows_that_are_given_up_leave_their_places():
    queue = RowQueue(1, GROUP, places=1)

    async def row(failing=False):
        async with queue.place("a"):
            if failing:
                raise ValueError
            await asyncio.sleep(60)

    running, waiting, other = (asyncio.ensure_future(row()) for _ in range(3))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.sleep(0.01)
    assert not other.done()  # it is running now
    other.cancel()
    await asyncio.wait([running, waiting, other])
    for _ in range(3):
        with pytest.raises(ValueError):
            await asyncio.wait_for(row(failing=True), 5)
    assert queue._loads == [0.0] and queue._running == [0]


def test_rows_of_several_threads():
    """Each has an event loop of its own, as NeMo-RL's asynchronous collector has; some give up."""
    queue, running, lock = RowQueue(3, GROUP, places=2), Counter(), threading.Lock()

    async def row(rng):
        async with queue.place(rng.randrange(4)) as place:
            with lock:
                running[place.engine] += 1
                assert running[place.engine] <= 2
            try:
                await asyncio.sleep(rng.random() * 0.002)
            finally:
                with lock:
                    running[place.engine] -= 1

    async def rows(seed):
        rng = random.Random(seed)
        tasks = [asyncio.ensure_future(row(rng)) for _ in range(60)]
        for task in tasks:
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() * 0.001)
                task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    ended = []
    threads = [
        threading.Thread(target=lambda seed=seed: ended.extend(asyncio.run(rows(seed))))
        for seed in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(ended) == 360
    assert all(end is None or isinstance(end, asyncio.CancelledError) for end in ended)
    assert queue._running == [0, 0, 0]
    assert queue._loads == pytest.approx([0, 0, 0])


@run
async def test_a_copy_has_no_rows():
    queue = RowQueue(2, GROUP, places=1)
    async with queue.place("a"), queue.place("b"):
        copy = pickle.loads(pickle.dumps(queue))
        assert await asyncio.wait_for(given(copy, ["b", "a"]), 5) == [0, 1]
