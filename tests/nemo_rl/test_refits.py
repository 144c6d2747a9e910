"""Refits by a checkpoint engine (NIXL, or one of the user's), and sparse ones, in NeMo-RL workers.

The workers' engines are real. A checkpoint engine's transfer of the weights, which needs GPUs, is a
file; sparse refits are NeMo-RL's own but for Megatron and Ray (tests/support/nemo_rl/sparse.py).
"""

import asyncio
import contextlib
import importlib
import os
import runpy
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from vllm import SamplingParams

from nemo_specrl import SpecRLConfig, SpeculativeLLM
from nemo_specrl.engine.async_engine import AsyncSpeculativeLLM
from nemo_specrl.engine.outputs import rollout_info
from nemo_specrl.engine.vllm.compat import made_so_far
from nemo_specrl.engine.vllm.refit import RefitExtension
from nemo_specrl.errors import IncompatibleVersion
from nemo_specrl.nemo_rl.compat import CHECKPOINT_ENGINE_UPDATE
from nemo_specrl.nemo_rl.context import RunContext
from nemo_specrl.nemo_rl.sparse_refits import SparseRefits
from tests.conftest import REPOSITORY, DictCache, make_engine
from tests.engine.test_async_engine import ClaimingCache
from tests.support.nemo_rl.jobs import HOME, SITE

ENGINE = {
    "dtype": "float32",
    "max_model_len": 192,
    "max_num_seqs": 8,
    "enforce_eager": True,
    "disable_log_stats": True,
    "worker_extension_cls": f"{__name__}.FileEngine",
}
CONFIG = SpecRLConfig(enabled=True, preset="faithful", tree={"enabled": False})
PROMPT = {"prompt_token_ids": [3 + i % 12 for i in range(100)]}
PARAMS = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)


class FileEngine:
    """The worker's side of a checkpoint engine.

    vLLM adds an extension to the class of the process's workers for good, and refuses one whose
    methods are there already: so it does not derive from the extension that other tests have.
    """

    def prepare_checkpoint_engine(self):
        return {"rank": 0}

    def update_weights_from_checkpoint_engine(self):
        weights = load_file(os.environ["NEMO_SPECRL_TEST_WEIGHTS"])
        untied = ((n, w) for n, w in weights.items() if n != "lm_head.weight")
        RefitExtension.specrl_refit(self, untied)
        return True


@pytest.fixture(scope="module")
def workers():
    """The plug-in's two worker classes."""
    if not HOME:
        pytest.skip("set NEMO_RL_HOME to a checkout of NVIDIA-NeMo/RL and run `make test-nemo`")
    runpy.run_path(str(SITE / "sitecustomize.py"))
    with pytest.MonkeyPatch.context() as patch:
        # HOME has a `tests`, too; engine cores, which are spawned, have to find this one.
        patch.setattr(sys, "path", [str(REPOSITORY), *sys.path, HOME])
        package = "nemo_specrl.nemo_rl"
        sync = importlib.import_module(f"{package}.sync_worker").SpecVllmGenerationWorkerImpl
        if not hasattr(super(sync, sync), "checkpoint_engine_rpc"):
            pytest.skip("this NeMo-RL has no checkpoint engines")
        name = "SpecVllmAsyncGenerationWorkerImpl"
        yield sync, getattr(importlib.import_module(f"{package}.async_worker"), name)


@pytest.fixture(autouse=True)
def weights(random_model, monkeypatch):
    monkeypatch.setenv("NEMO_SPECRL_TEST_WEIGHTS", str(random_model / "model.safetensors"))


def test_a_synchronous_worker_counts_them_and_drops_the_old_blocks(workers, random_model):
    worker = object.__new__(workers[0])
    llm = worker.llm = make_engine(random_model, **ENGINE)
    worker._speculative = SpeculativeLLM(llm, DictCache(), CONFIG)
    for cached in (0, 96):
        (output,) = llm.generate(PROMPT, PARAMS, use_tqdm=False)
        assert output.num_cached_tokens == cached
    assert worker.checkpoint_engine_rpc(checkpoint_method="prepare_checkpoint_engine") == [
        {"rank": 0}
    ]
    assert worker.spec_rl_policy_version() == 0
    assert worker.checkpoint_engine_rpc(checkpoint_method=CHECKPOINT_ENGINE_UPDATE) is True
    assert worker.spec_rl_policy_version() == 1
    (output,) = llm.generate(PROMPT, PARAMS, use_tqdm=False)
    assert output.num_cached_tokens == 0


def test_an_asynchronous_worker_counts_them_and_its_rows_go_on(workers, random_model):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    async def refits():
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(random_model), **ENGINE))
        worker = object.__new__(workers[1])
        worker.llm = llm
        speculative = worker._speculative = AsyncSpeculativeLLM(llm, ClaimingCache(), CONFIG)

        async def version_after(method):
            await worker.checkpoint_engine_rpc_async(checkpoint_method=method)
            return worker.spec_rl_policy_version()

        assert await version_after("prepare_checkpoint_engine") == 0
        assert await version_after(CHECKPOINT_ENGINE_UPDATE) == 1
        params = SamplingParams(max_tokens=90, ignore_eos=True, detokenize=False)
        row = asyncio.ensure_future(anext(speculative.generate(PROMPT, params, "running")))
        while not made_so_far(llm, "running"):
            await asyncio.sleep(0.001)
        assert await version_after(CHECKPOINT_ENGINE_UPDATE) == 2
        (completion,) = (await row).outputs
        assert set(rollout_info(completion).birth_versions) == {1, 2}
        llm.shutdown()

    asyncio.run(refits())


RUN = RunContext(CONFIG, 0, 1, "run", "run", None, None, "tokenizer")
SPARSE = "tests.support.nemo_rl.sparse"


@pytest.fixture
def sparse(workers, monkeypatch):
    """The parts of NeMo-RL that make sparse refits, with engines whose weights stay as they are."""
    try:
        importlib.import_module("nemo_rl.models.generation.vllm.vllm_sparse_refit")
    except ImportError:
        pytest.skip("this NeMo-RL has no sparse refits")
    module = importlib.import_module(SPARSE)
    utils = "vllm.model_executor.layers.utils"
    monkeypatch.setattr(f"{utils}.dispatch_cpu_unquantized_gemm", module.unpacked)
    monkeypatch.setenv("NEMO_SPECRL_TEST_UNPACKED", "1")  # in engine processes, too
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SITE), str(REPOSITORY), HOME]))
    node = SimpleNamespace(get_node_id=lambda: "node")
    monkeypatch.setattr("ray.get_runtime_context", lambda: node)
    return module


SPARSE_ENGINE = ENGINE | {
    "dtype": "bfloat16",
    "max_model_len": 256,
    "worker_extension_cls": f"{SPARSE}.SparseExtension",
}


def with_receiver(worker_class, llm, sparse, staging, asynchronous=False):
    """A worker of an engine, with its receiver of sparse refits."""
    receiver = importlib.import_module("nemo_rl.models.generation.vllm.vllm_sparse_refit")
    worker = object.__new__(worker_class)
    worker.llm = llm
    worker.cfg = {
        "refit_transport": "vllm_zmq_sparse",
        "refit_cfg": {"sparse": sparse.CONFIG | {"storage": {"staging_dir": str(staging)}}},
        "vllm_cfg": {"async_engine": asynchronous},
    }
    worker._sparse_refit_receiver = receiver.VllmSparseRefitReceiver(worker)
    return worker


def perturbed(weights, seed):
    """Other weights, of which one in four differs."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: weight + 0.1 * (torch.rand(weight.shape, generator=generator) < 0.25).to(weight.dtype)
        for name, weight in weights.items()
    }


def check_weights(engine, weights):
    """Check that the weights of vLLM's layers are those of a checkpoint, to the bit."""
    together = {"qkv_proj": ("q", "k", "v"), "gate_up_proj": ("gate", "up")}
    for name, actual in engine.items():
        parts = next((parts for fused, parts in together.items() if fused in name), None)
        fused = name.split(".")[-2]
        names = [name.replace(fused, f"{part}_proj") for part in parts or ()] or [name]
        expected = torch.cat([weights[part] for part in names])
        assert torch.equal(actual[: len(expected)], expected), name


def cached_tokens(llm):
    (output,) = llm.generate(PROMPT, PARAMS, use_tqdm=False)
    return output.num_cached_tokens


def test_sparse_refits_are_counted_once_where_weights_have_changed(
    workers, sparse, random_model, tmp_path, monkeypatch
):
    llm = make_engine(random_model, **SPARSE_ENGINE)
    worker = with_receiver(workers[0], llm, sparse, tmp_path)
    receiver = worker._sparse_refit_receiver
    receiver.start_sync_server()
    worker.spec_rl_attach(DictCache(), RUN, 5)
    old = load_file(random_model / "model.safetensors")
    policy = sparse.Policy(old)
    synchronizer = sparse.synchronizer(policy, worker, monkeypatch)
    synchronizer.sync_weights()
    synchronizer._request_receivers("/nemo-rl/refit/flush", {})
    assert worker.spec_rl_policy_version() == 5  # nothing has changed
    assert [cached_tokens(llm), cached_tokens(llm)] == [0, 96]

    policy.weights = perturbed(old, seed=0)
    metrics = synchronizer.sync_weights()
    assert metrics["transfer/payloads"] > 4 and metrics["delta_verify/samples"] > 4
    assert worker.spec_rl_policy_version() == 6
    check_weights(llm.collective_rpc("dense_weights")[0], policy.weights)
    assert cached_tokens(llm) == 0
    synchronizer._request_receivers("/nemo-rl/refit/flush", {})
    assert worker.spec_rl_policy_version() == 6

    applied = []

    def broken(*payloads):
        applied.append(payloads)
        if len(applied) > 1:
            raise RuntimeError("out of memory")
        return update(*payloads)

    update = receiver.update_weights_from_staged_sparse_payloads
    receiver.update_weights_from_staged_sparse_payloads = broken
    policy.weights = perturbed(old, seed=1)
    with pytest.raises(RuntimeError, match="out of memory"):
        synchronizer.sync_weights()
    assert worker.spec_rl_policy_version() == 7  # they have changed in part
    receiver.shutdown()
    assert worker.spec_rl_policy_version() == 7


def test_rows_of_an_asynchronous_worker_go_on_through_a_sparse_refit(
    workers, sparse, random_model, tmp_path, monkeypatch
):
    """No token is made by weights of which a part is old: the engine stands still meanwhile."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    old = load_file(random_model / "model.safetensors")
    policy, refitted = sparse.Policy(old), []
    params = SamplingParams(max_tokens=150, temperature=1.0, ignore_eos=True, detokenize=False)

    async def refit_between_rows():
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(random_model), **SPARSE_ENGINE))
        worker = with_receiver(workers[1], llm, sparse, tmp_path, asynchronous=True)
        worker._install_engine_input_socket_lock()
        receiver = worker._sparse_refit_receiver
        hostnames = await llm.collective_rpc("report_node_hostname")
        receiver.set_worker_hostnames(hostnames)
        receiver._setup_vllm_refit_server()
        await worker.spec_rl_attach(ClaimingCache(), RUN, 0)
        synchronizer = await asyncio.to_thread(sparse.synchronizer, policy, worker, monkeypatch)
        running, stood = {}, []

        async def rows(name):
            versions, count = [], 0
            while not refitted or count == 0:
                running[name] = f"{name}-{count}"
                stream = worker._speculative.generate(PROMPT, params, running[name])
                (completion,) = (await anext(stream)).outputs
                versions.append(rollout_info(completion).birth_versions.tolist())
                count += 1
            return versions

        def made():
            return {name: made_so_far(llm, row) for name, row in running.items()}

        def apply(*payloads):
            stood.append(made())
            time.sleep(0.03)  # several steps of an engine that does not stand still
            return update(*payloads)

        update = receiver.update_weights_from_staged_sparse_payloads
        receiver.update_weights_from_staged_sparse_payloads = apply
        policy.weights = perturbed(old, seed=0)
        tasks = [asyncio.ensure_future(rows(name)) for name in "ab"]
        while not made_so_far(llm, "a-0"):
            await asyncio.sleep(0.001)
        await asyncio.to_thread(synchronizer.sync_weights)
        refitted.append(True)
        versions = [row for task in tasks for row in await task]
        assert any(made is not None for made in stood[0].values())
        assert len(stood) > 4 and all(made == stood[0] for made in stood)
        assert worker.spec_rl_policy_version() == 1
        assert {1} < {version for row in versions for version in row} == {0, 1}
        assert any(set(row) == {0, 1} for row in versions)
        assert all(row == sorted(row) for row in versions)
        check_weights((await llm.collective_rpc("dense_weights"))[0], policy.weights)
        await asyncio.to_thread(receiver.shutdown)
        assert worker.spec_rl_policy_version() == 1
        llm.shutdown()

    asyncio.run(refit_between_rows())


@pytest.mark.parametrize("receiver", [None, SimpleNamespace(_submit_pending_sparse_payloads=1)])
def test_a_receiver_that_is_not_as_expected_is_refused(receiver):
    with pytest.raises(
        IncompatibleVersion, match=r"refit_transport: this NeMo-RL has no _\w+_sparse"
    ):
        SparseRefits(receiver, contextlib.nullcontext)
