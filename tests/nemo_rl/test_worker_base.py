"""What both kinds of workers have in common, and how many calls the asynchronous ones answer."""

import asyncio

import pytest
import ray

from nemo_specrl.nemo_rl.worker_base import ASYNC_CALLS, DraftingWorker
from tests.nemo_rl.test_jobs import launched
from tests.support.nemo_rl.jobs import marks

needs_nemo_rl, within_minutes = marks


@ray.remote(num_cpus=0, max_concurrency=ASYNC_CALLS)
class Worker(DraftingWorker):
    """An asynchronous worker whose rows wait."""

    def __init__(self):
        self.rows, self.over = 0, asyncio.Event()

    async def generate_async(self):
        self.rows += 1
        await self.over.wait()
        yield "row"

    async def begun(self):
        return self.rows

    async def end(self):
        self.over.set()


@pytest.fixture
def worker():
    ray.init("local", num_cpus=2, include_dashboard=False, logging_level="ERROR")
    yield Worker.remote()
    ray.shutdown()


def test_an_asynchronous_worker_answers_while_more_rows_run_than_ray_runs_by_itself(worker):
    rows = [worker.generate_async.remote() for _ in range(1200)]
    # The driver's questions are methods of the loop, refits are coroutines.
    assert ray.get(worker.spec_rl_policy_version.remote(), timeout=60) == 0
    while ray.get(worker.begun.remote(), timeout=60) < len(rows):
        pass
    ray.get(worker.end.remote(), timeout=60)
    assert {ray.get(next(row), timeout=60) for row in rows} == {"row"}


@needs_nemo_rl
@within_minutes
def test_nemo_rl_starts_the_asynchronous_workers_alone_like_that(tmp_path):
    """It reads these options; a synchronous worker with this one would be run by many threads."""
    done = launched(
        tmp_path,
        "from nemo_specrl.nemo_rl import async_worker, quantized_workers, sync_worker\n"
        "for actor in (\n"
        "    sync_worker.SpecVllmGenerationWorker,\n"
        "    quantized_workers.SpecVllmQuantGenerationWorker,\n"
        "    async_worker.SpecVllmAsyncGenerationWorker,\n"
        "    quantized_workers.SpecVllmQuantAsyncGenerationWorker,\n"
        "):\n"
        "    print('CALLS', actor._default_options.get('max_concurrency'))\n",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    calls = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("CALLS")]
    assert calls == ["None", "None", str(ASYNC_CALLS), str(ASYNC_CALLS)]
