"""Rows that come one by one: which engine gets them, and when."""

import asyncio
import functools
import heapq
import pickle
import random
import threading
import time
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
        self.waiting = 0
        self.last = Counter()  # end of each engine

    async def row(self, number, prompt, steps):
        self.waiting += 1
        async with self.queue.place(prompt) as place:
            self.waiting -= 1
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
        running = [self.running[engine] for engine in range(len(self.queue._running))]
        assert not self.waiting or running == [self.queue._places] * len(running)


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
async def test_rows_of_a_prompt_go_to_another_engine_where_theirs_is_full():
    queue = RowQueue(2, together=16, places=8)
    assert await asyncio.wait_for(given(queue, ["a"] * 16), 60) == [0] * 8 + [1] * 8
    assert await given(queue, ["b"] * 8) == [0] * 8  # together, where there is room


@run
async def test_no_row_waits_for_those_of_a_later_batch():
    """Three batches are asked for at once, the first of the shortest rows."""
    queue, began, steps = RowQueue(2, GROUP, places=4, batch=4 * GROUP), [], [10, 30, 90]

    async def ended(prompt):
        async with queue.place(prompt) as place:
            queue.leave(place, steps[prompt // 4])

    async def row(prompt):
        async with queue.place(prompt):
            began.append(prompt // 4)
            await asyncio.sleep(0)

    rows = [prompt for prompt in range(12) for _ in range(GROUP)]
    await asyncio.gather(*map(ended, rows))  # lengths are known from now on
    await asyncio.gather(*map(row, rows))
    assert began == sorted(began) and len(began) == len(rows)


@run
async def test_a_later_turn_of_a_row_stays_in_its_batch():
    queue, turns = RowQueue(1, GROUP, places=1, batch=1), []

    async def row(name):
        for turn in range(2):
            async with queue.place(name):
                turns.append((name, turn))
                await asyncio.sleep(0.001)

    await asyncio.gather(*map(row, "abc"))
    assert turns == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("c", 0), ("c", 1)]


def test_an_event_loop_has_batches_of_its_own():
    """As in NeMo-RL's collector: rows of two batches come in turn, from two threads."""
    queue, began, steps = RowQueue(1, GROUP, places=1, batch=4), [], {"short": 10, "long": 90}

    async def row(prompt, end=None):
        async with queue.place(prompt) as place:
            began.append(prompt)
            if end is not None:
                await asyncio.to_thread(end.wait)
            queue.leave(place, steps.get(prompt))

    async def rows(prompt, mine, others):
        tasks = []
        for _ in range(4):
            await asyncio.to_thread(mine.acquire)
            tasks.append(asyncio.ensure_future(row(prompt)))
            await asyncio.sleep(0)  # it has asked
            others.release()
        await asyncio.gather(*tasks)

    for prompt in steps:
        asyncio.run(row(prompt))
    began.clear()
    end, turns = threading.Event(), [threading.Semaphore(0) for _ in range(3)]
    order = [("short", turns[0], turns[1]), ("long", turns[1], turns[2])]
    threads = [threading.Thread(target=asyncio.run, args=(row("first", end),), daemon=True)]
    threads += [
        threading.Thread(target=asyncio.run, args=(rows(*both),), daemon=True) for both in order
    ]
    for thread in threads:
        thread.start()
        while not began:
            time.sleep(0.001)
    for _ in range(4):
        turns[0].release()
        assert turns[2].acquire(timeout=60)
    end.set()
    for thread in threads:
        thread.join(60)
    assert began == ["first"] + ["short"] * 4 + ["long"] * 4


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
