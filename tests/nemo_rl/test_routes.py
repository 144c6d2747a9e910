"""Router replay: the routes of reused rows that NeMo-RL's own synchronous worker hands over.

With the plug-in's worker and a real engine, which is told on a CPU which experts were chosen
(``tests/engine/test_routes.py``). Needs a checkout of NeMo-RL in NEMO_RL_HOME: `make test-nemo`.
"""

import torch

from nemo_specrl import SpeculativeLLM, prompt_key
from nemo_specrl.engine.metrics import EngineMetrics
from nemo_specrl.nemo_rl.context import PROMPT_KEYS, SAMPLE_INDICES
from tests.engine.test_routes import pytestmark  # noqa: F401
from tests.nemo_rl.test_media import GENERATION, Cache
from tests.nemo_rl.test_recipes import nemo  # noqa: F401
from tests.support.engines import PROMPT
from tests.support.routes import (
    LONG,
    PARTS,
    assert_routes,
    load_reference,
    make_mixture_engine,
    partly_accepted,
    save_mixture,
    strict,
)

ROWS = 1 + len(PARTS)
REPLAYED = {
    "top_p": 1.0,
    "max_new_tokens": len(LONG) + 8,
    "ignore_eos": False,
    "bad_words": None,
    "vllm_kwargs": {"enable_return_routed_experts": True},
}


def test_the_worker_hands_over_all_routes_of_reused_rows(nemo, tmp_path, monkeypatch):  # noqa: F811
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from vllm import SamplingParams

    from nemo_specrl.nemo_rl.sync_worker import SpecVllmGenerationWorkerImpl

    for name in ("range_push", "range_pop"):  # they raise on CPU builds
        monkeypatch.setattr(torch.cuda.nvtx, name, lambda *args: 0)
    model = save_mixture(tmp_path)
    llm = make_mixture_engine(model, max_num_seqs=8, max_model_len=96)
    worker = object.__new__(SpecVllmGenerationWorkerImpl)
    worker.cfg, worker.llm, worker.SamplingParams = GENERATION | REPLAYED, llm, SamplingParams
    worker.routed_experts_dtype = torch.int8
    rollouts = [partly_accepted(*part, sample_index=1 + i) for i, part in enumerate(PARTS)]
    worker._cache, worker._metrics = Cache(rollouts), EngineMetrics()
    worker._speculative = strict(SpeculativeLLM, llm, worker._cache)

    data = BatchedDataDict(
        input_ids=torch.tensor([PROMPT] * ROWS), input_lengths=torch.tensor([len(PROMPT)] * ROWS)
    )
    data[SAMPLE_INDICES] = torch.arange(ROWS)
    data[PROMPT_KEYS] = [prompt_key(PROMPT)] * ROWS
    output = worker.generate(data)
    assert worker._metrics.accepted_tokens == 9 + 41 + 6 + 35
    assert not output["r3_routed_experts_missing_routes"].any()
    reference = load_reference(model)
    for i, length in enumerate(output["unpadded_sequence_lengths"].tolist()):
        tokens = output["output_ids"][i, :length].tolist()
        assert_routes(reference, tokens, output["routed_experts"][i, : length - 1].numpy())
