"""NeMo-RL's worker of one engine of a data-parallel group, without Ray.

``tests.support.group_engine`` starts two such processes. The worker makes its engine by itself, and
is asked for rows as the driver of a run asks it.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path

from tests.support.group_engine import LONG, Noted, give_collectives
from tests.support.nemo_rl import cpu  # before vllm

PAD = 0
BLOCK = {
    "enabled": True,
    "preset": "faithful",
    "fresh_fraction": 0.0,
    "cache": {"dir": "/not/used"},
}


def config_of(model):
    """The generation's block, as the driver gives it to its workers."""
    return {
        "backend": "vllm",
        "model_name": model,
        "max_new_tokens": LONG,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": None,
        "stop_token_ids": None,
        "stop_strings": None,
        "_pad_token_id": PAD,
        "spec_rl": BLOCK,
        "vllm_cfg": {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "expert_parallel_size": 2,
            "async_engine": False,
            "gpu_memory_utilization": 0.3,
            "precision": "float32",
            "load_format": "auto",
            "skip_tokenizer_init": False,
            "enable_prefix_caching": True,
            "enforce_eager": True,
            "max_model_len": 192,
            "use_tqdm": False,
        },
        "vllm_kwargs": {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 2048,
            "block_size": 32,
            "num_gpu_blocks_override": 1024,
        },
    }


class Worker(cpu.SpecWorkerImpl):
    """Has a part of each expert; with some of the experts, vLLM's kernel for CPUs crashes."""

    def _create_engine(self, llm_kwargs):
        assert llm_kwargs["enable_expert_parallel"]
        super()._create_engine(llm_kwargs | {"enable_expert_parallel": False})


def main(model, folder, _):
    import torch
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    from nemo_specrl.engine.metrics import EngineMetrics
    from nemo_specrl.engine.sync_engine import SpeculativeLLM
    from nemo_specrl.nemo_rl.context import SAMPLE_INDICES, read_block
    from tests.conftest import DictCache
    from tests.support.engines import PROMPT

    class Cache(DictCache):
        def deliver(self):
            pass

    rank = int(os.environ["RANK"])
    give_collectives()
    worker = Worker(config_of(model), bundle_indices=[], seed=rank)
    engine = worker.llm.llm_engine
    assert engine.dp_group is not None
    assert not engine.vllm_config.scheduler_config.async_scheduling
    # What spec_rl_attach does, with a cache in this process.
    worker._cache, worker._metrics = Cache(), EngineMetrics()
    worker._speculative = SpeculativeLLM(worker.llm, worker._cache, read_block(BLOCK, "spec_rl"))
    asked, ask = [0], engine.has_unfinished_requests

    def has_unfinished_requests():
        asked[0] += 1
        return ask()

    engine.has_unfinished_requests = has_unfinished_requests
    noted = {}

    def call(name, rows, drafted=True):
        data = BatchedDataDict(
            {
                "input_ids": torch.tensor(PROMPT).repeat(rows, 1),
                "input_lengths": torch.full((rows,), len(PROMPT)),
            }
        )
        if drafted:
            data[SAMPLE_INDICES] = torch.arange(rows)
        asked[0] = 0
        made = worker.generate(data)
        lengths = made["generation_lengths"].tolist()
        rows = [
            (ids[len(PROMPT) : len(PROMPT) + length].tolist(), length)
            for ids, length in zip(made["output_ids"], lengths, strict=True)
        ]
        noted[name] = vars(Noted(asked[0], rows, worker._speculative.metrics.as_dict()))

    call("first", 3 - rank)
    worker._refitted(True)
    call("second", 3 - rank)
    call("no rows", 2 * (1 - rank))
    call("validation without rows", 2 * (1 - rank), drafted=False)
    (Path(folder) / f"noted-{rank}").write_bytes(pickle.dumps(noted))


if __name__ == "__main__":
    # Those of NeMo-RL's worker groups, of which each worker takes its own.
    rank, port = os.environ["VLLM_DP_RANK"], os.environ["VLLM_DP_MASTER_PORT"]
    os.environ["RANK"] = rank
    os.environ["AVAILABLE_ADDR_LIST"] = json.dumps(["127.0.0.1"] * 2)
    os.environ["AVAILABLE_PORT_LIST"] = json.dumps([int(port)] * 2)
    main(*sys.argv[1:])
