"""Refits by a checkpoint engine (NIXL, or one of the user's), in NeMo-RL's own workers.

The workers' engines are real; the transfer of the weights, which needs GPUs, is a file.
"""

import asyncio
import importlib
import os
import runpy
import sys

import pytest
from safetensors.torch import load_file
from vllm import SamplingParams

from nemo_specrl import SpecRLConfig, SpeculativeLLM
from nemo_specrl.engine.async_engine import AsyncSpeculativeLLM
from nemo_specrl.engine.outputs import rollout_info
from nemo_specrl.engine.vllm.compat import made_so_far
from nemo_specrl.engine.vllm.refit import RefitExtension
from nemo_specrl.nemo_rl.compat import CHECKPOINT_ENGINE_UPDATE
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
