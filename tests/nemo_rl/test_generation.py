"""The driver's side of generation with NeMo-RL's own classes, without engines but for one.

They need a checkout of NeMo-RL in NEMO_RL_HOME: `make test-nemo`.
"""

import os
import stat
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nemo_specrl import RolloutStore, SpecRLConfig, SpeculativeLLM, prompt_key
from nemo_specrl.cache.cluster.membership import Health
from nemo_specrl.engine.load_balance import balanced_order
from nemo_specrl.engine.metrics import EngineMetrics
from nemo_specrl.errors import EngineError
from nemo_specrl.speculation.draft_selection import assign_sample_indices
from tests.conftest import DictCache, make_engine
from tests.nemo_rl.test_recipes import nemo  # noqa: F401
from tests.support.cluster.nodes import wait_until
from tests.support.rollouts import rollout

LENGTHS = {0: 400, 1: 40, 2: 40, 3: 40}
"""By prompt: the mean length of what a policy writes to it."""
GROUP, ENGINES = 8, 4


def test_rows_without_drafts_are_dealt_out_by_the_lengths_of_earlier_ones(nemo, tmp_path):  # noqa: F811
    """As `preset: lossless` does: every row is decoded in full, so that long prompts are spread."""
    from nemo_specrl.nemo_rl.generation import SpecVllmGeneration

    with RolloutStore(tmp_path / "store", max_bytes=2**24, tokenizer_id="t") as store:
        store.put(rollout(p, 1, k, n + k - 4) for p, n in LENGTHS.items() for k in range(GROUP))
        store.sync()
        generation = object.__new__(SpecVllmGeneration)
        generation.cache = SimpleNamespace(outlines=store.get)
        generation.dp_size, generation.fresh_fraction, generation._lookup_s = ENGINES, 1.0, 0.0
        rows = [prompt for prompt in LENGTHS for _ in range(GROUP)]
        keys = [prompt_key([prompt]) for prompt in rows]
        costs = generation._costs(keys, assign_sample_indices(keys))
    order = balanced_order(costs, ENGINES)
    share = len(rows) // ENGINES
    tokens = [
        sum(LENGTHS[rows[i]] for i in order[start : start + share])
        for start in range(0, len(rows), share)
    ]
    assert tokens == [2 * 400 + 6 * 40] * ENGINES  # and 8 * 400 for one of them in the given order


@pytest.fixture
def cluster(nemo, monkeypatch):  # noqa: F811
    """Ray, with a stand-in for uv that makes an environment of one file."""
    import ray

    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ray") as folder:
        uv = Path(folder, "uv")
        uv.write_text(
            "#!/bin/sh\n"
            '[ "$1 $2" = "venv --allow-existing" ] || exit 0\n'
            'mkdir -p "$3/bin" && echo made >>"$3/bin/python"\n'
        )
        uv.chmod(uv.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        monkeypatch.setenv("NEMO_RL_VENV_DIR", f"{folder}/venvs")
        monkeypatch.setenv("PYTHONPATH", f"{nemo.home}:{os.environ.get('PYTHONPATH', '')}")
        ray.init("local", num_cpus=1, include_dashboard=False, _temp_dir=f"{folder}/r")
        try:
            yield Path(folder, "venvs")
        finally:
            ray.shutdown()


def test_the_worker_has_the_environment_of_the_stock_one(cluster, monkeypatch):
    """Found, made or made anew under the stock name by NeMo-RL's own rules; never a second one."""
    from nemo_specrl.nemo_rl import compat

    stock = cluster / compat.STOCK_WORKER / "bin" / "python"
    find = lambda: compat._python_of(compat.STOCK_WORKER, "uv run --locked --extra vllm")  # noqa: E731
    assert find() == str(stock) and stock.read_text() == "made\n"
    stock.write_text("of the image\n")
    assert find() == str(stock) and stock.read_text() == "of the image\n"
    monkeypatch.setenv("NRL_FORCE_REBUILD_VENVS", "true")
    from nemo_rl.utils.venvs import create_local_venv

    create_local_venv.cache_clear()
    assert find() == str(stock) and stock.read_text() == "made\n"
    assert [folder.name for folder in cluster.iterdir()] == [compat.STOCK_WORKER]
    assert compat._python_of(compat.STOCK_WORKER, "/usr/bin/python3") == "/usr/bin/python3"


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("before", [{}, {"worker_extension_cls_fqn": None}])
def test_the_worker_is_named_by_the_official_key_where_there_is_one(
    nemo,  # noqa: F811
    monkeypatch,
    asynchronous,
    before,
):
    """As NeMo-RL after August 2026 has it; an older one is told that it does, too."""
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
    from nemo_rl.models.generation.vllm import vllm_generation

    from nemo_specrl.nemo_rl import compat

    annotations = vllm_generation.VllmConfig.__annotations__
    monkeypatch.setitem(annotations, compat.WORKER_EXTENSION, str | None)
    stocks = (compat.STOCK_WORKER, compat.STOCK_ASYNC_WORKER)
    for stock in stocks:
        monkeypatch.setitem(ACTOR_ENVIRONMENT_REGISTRY, stock, f"/envs/{stock}/bin/python")
        monkeypatch.setitem(ACTOR_ENVIRONMENT_REGISTRY, f"ours of {stock}", None)
        del ACTOR_ENVIRONMENT_REGISTRY[f"ours of {stock}"]
    config = {"vllm_cfg": {"async_engine": asynchronous}, **before}
    resolve, stock = vllm_generation.resolve_generation_worker_cls, stocks[asynchronous]
    with compat.substituted_workers({name: f"ours of {name}" for name in stocks}, config):
        assert config[compat.WORKER_EXTENSION] == f"ours of {stock}"
        # VllmGeneration asks for the environment before it starts anything.
        assert ACTOR_ENVIRONMENT_REGISTRY[f"ours of {stock}"] == f"/envs/{stock}/bin/python"
        assert vllm_generation.resolve_generation_worker_cls is resolve
    assert config == {"vllm_cfg": {"async_engine": asynchronous}, **before}


class Worker:
    """An engine's worker that does not answer while a file is there."""

    def __init__(self, silent):
        self.silent, self.version = silent, 7

    def wait(self):
        while self.silent.exists():
            time.sleep(0.01)

    def spec_rl_take_metrics(self):
        self.wait()
        return EngineMetrics(decoded_tokens=1, tree_steps=1, tree_s=3.0)

    def spec_rl_policy_version(self):
        self.wait()
        return self.version

    def refit(self):
        self.version += 1


def stand_in(workers, cache):
    """A generation with workers that are actors, and no NeMo-RL about them."""
    from nemo_specrl.nemo_rl.engine_calls import EngineCalls
    from nemo_specrl.nemo_rl.generation import SpecVllmGeneration

    generation = object.__new__(SpecVllmGeneration)
    generation.cache = cache
    generation.cfg = {"vllm_cfg": {"async_engine": False}}
    generation._start_counting()
    generation.worker_group = SimpleNamespace(
        run_all_workers_single_data=lambda method, **_: [
            getattr(worker, method).remote() for worker in workers
        ],
        shutdown=lambda **_: True,
    )
    generation._engines = EngineCalls(generation.worker_group)
    return generation


@pytest.fixture
def workers(cluster, tmp_path):
    """Two actors, and the file of each while which is there it does not answer."""
    import ray

    files = [tmp_path / "first", tmp_path / "second"]
    actor = ray.remote(Worker).options(num_cpus=0)
    actors = [actor.remote(file) for file in files]
    ray.get([one.spec_rl_policy_version.remote() for one in actors])  # they have started
    return actors, files


def test_an_engine_that_does_not_answer_holds_up_one_step_and_is_counted_later(
    workers, monkeypatch, caplog
):
    """In the hook of the trainer's logger, whose errors would end the run."""
    from nemo_specrl.errors import StoreUnavailable
    from nemo_specrl.nemo_rl import engine_calls

    def unknown(within_s):
        raise StoreUnavailable("the coordinator does not answer")

    monkeypatch.setattr(engine_calls, "STEP_SECONDS", 1.0)
    cache = SimpleNamespace(take_failures=lambda: 3, health=unknown, stats=lambda within_s: {})
    generation = stand_in(workers[0], cache)

    def tokens():
        counted, _ = generation.take_metrics()
        assert counted["spec_rl/cache_errors"] == counted["spec_rl/tree_s"] == 3
        return counted["spec_rl/decoded_tokens"]

    assert tokens() == 2 and not caplog.messages
    silent = workers[1][0]  # that of the first one, which nothing must depend on
    silent.touch()
    assert [tokens() for _ in range(3)] == [1, 1, 1]
    assert generation.policy_version == 7
    assert caplog.text.count("continuing without them") == 1  # it is waited for once
    silent.unlink()
    later = []
    wait_until(lambda: later.append(tokens()) or sum(later) == 2 * len(later) + 3)
    assert tokens() == 2  # and nothing is counted twice


def test_a_version_that_one_engine_alone_keeps_does_not_stand_still(workers, caplog):
    """As one that NeMo-RL has taken out of its fleet, which gets no refits."""
    import ray

    actors, _ = workers
    cache = SimpleNamespace(
        take_failures=lambda: 0, health=lambda within_s: Health(1, 0, 0), stats=lambda within_s: {}
    )
    generation = stand_in(actors, cache)
    for _ in range(5):
        ray.get(actors[1].refit.remote())
        generation.take_metrics()
    assert not caplog.messages
    for _ in range(5):
        generation.take_metrics()
    assert caplog.text.count("the policy version has stayed at 12 for 3 steps") == 1


def killed(actor):
    """Kill an actor, which may answer a question or two before it dies."""
    import ray

    ray.kill(actor)
    with pytest.raises(ray.exceptions.RayActorError):
        while True:
            ray.get(actor.spec_rl_policy_version.remote())


def test_a_step_goes_on_without_an_engine_that_has_died(workers, caplog):
    actors, _ = workers
    cache = SimpleNamespace(
        take_failures=lambda: 0, health=lambda within_s: Health(1, 0, 0), stats=lambda within_s: {}
    )
    generation = stand_in(actors, cache)
    assert generation.take_metrics()[0]["spec_rl/decoded_tokens"] == 2
    killed(actors[0])
    for _ in range(2):
        counted, _ = generation.take_metrics()
        assert counted["spec_rl/decoded_tokens"] == counted["spec_rl/cache_nodes"] == 1
    assert generation.policy_version == 7  # which a checkpoint has
    assert caplog.text.count("engine 0 does not answer") == 1
    killed(actors[1])
    with pytest.raises(EngineError, match="no engine answers"):
        generation.policy_version  # noqa: B018


def test_a_shutdown_after_ray_has_ended_asks_nobody(nemo, monkeypatch):  # noqa: F811
    """As ``__del__`` at the end of a process; Ray would wait for the cluster that was there."""
    import ray

    from nemo_specrl.nemo_rl.generation import SpecVllmGeneration

    assert not ray.is_initialized()
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # where nobody answers
    generation = object.__new__(SpecVllmGeneration)
    generation.cache = None
    worker = ray.remote(Worker)
    generation.worker_group = SimpleNamespace(shutdown=lambda **_: worker.remote(None))
    assert generation.shutdown()
    del generation
    assert not ray.is_initialized()


def test_an_engine_that_gets_no_rows_counts_none(nemo, monkeypatch, random_model):  # noqa: F811
    """As in the last turns of conversations, of which fewer are left than there are engines."""
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    from nemo_specrl.nemo_rl.context import SAMPLE_INDICES
    from nemo_specrl.nemo_rl.sync_worker import SpecVllmGenerationWorkerImpl

    for name in ("range_push", "range_pop"):  # they raise on CPU builds
        monkeypatch.setattr(torch.cuda.nvtx, name, lambda *args: 0)
    worker = object.__new__(SpecVllmGenerationWorkerImpl)
    worker.llm = make_engine(random_model, enforce_eager=True)
    worker._cache = SimpleNamespace(deliver=lambda: None, take_failures=lambda: 0)
    worker._metrics = EngineMetrics()
    worker._speculative = SpeculativeLLM(
        worker.llm,
        DictCache(),
        SpecRLConfig(enabled=True, preset="faithful", tree={"enabled": False}),
    )
    worker._speculative.metrics = EngineMetrics(rows=8)  # of the turn before
    none = torch.zeros(0, dtype=torch.int64)
    data = {"input_ids": none.view(0, 0), "input_lengths": none, SAMPLE_INDICES: none}
    assert len(worker.generate(BatchedDataDict(data))["output_ids"]) == 0
    assert worker.spec_rl_take_metrics().rows == 0
