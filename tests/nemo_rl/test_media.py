"""Rows with images in NeMo-RL's own synchronous worker, with the plug-in's and a real engine.

They need a checkout of NeMo-RL in NEMO_RL_HOME: `make test-nemo`.
"""

import importlib.util

import numpy as np
import pytest
import torch

from nemo_specrl import SpeculativeLLM, prompt_key
from nemo_specrl.engine.drafters.method import engine_options
from nemo_specrl.engine.metrics import EngineMetrics
from nemo_specrl.media import media_prompt_key
from nemo_specrl.nemo_rl.context import PROMPT_KEYS, SAMPLE_INDICES
from nemo_specrl.speculation.draft_selection import assign_sample_indices
from tests.conftest import DictCache, make_engine
from tests.nemo_rl.test_recipes import nemo  # noqa: F401
from tests.support.engines import DRAFTS, LOSSLESS
from tests.support.vision_models import IMAGE, VIDEO, image, question, vision_model

GROUP = 2
TEXT = [1, 3, 70, 71, 4]
GENERATION = {
    "temperature": 1.0,
    "top_p": 1e-6,  # the likeliest tokens
    "top_k": None,
    "max_new_tokens": 24,
    "stop_token_ids": None,
    "ignore_eos": True,
    "bad_words": [IMAGE, VIDEO],
    "vllm_cfg": {"async_engine": False, "use_tqdm": False, "max_model_len": 96},
    "_pad_token_id": 0,
}


MOVES = {"video": np.zeros((2, 4, 4, 3), np.uint8)}


class Cache(DictCache):
    def deliver(self):
        pass

    def take_failures(self):
        return 0


def batch(model):
    """A batch for generation as NeMo-RL makes it of two images with one text, and of a text."""
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(model)
    rows = []
    for seed in (0, 1):
        seen = image(seed)
        ids = processor(text=[question()], images=[seen])["input_ids"][0]
        rows += [(list(ids), question(), [seen])] * GROUP
    rows += [(TEXT, None, [])] * GROUP
    longest = max(len(ids) for ids, _, _ in rows)
    return BatchedDataDict(
        input_ids=torch.tensor([ids + [0] * (longest - len(ids)) for ids, _, _ in rows]),
        input_lengths=torch.tensor([len(ids) for ids, _, _ in rows]),
        vllm_content=[content for _, content, _ in rows],
        vllm_images=[images for _, _, images in rows],
        vllm_audios=[[] for _ in rows],
        vllm_videos=[[] for _ in rows],
    )


@pytest.mark.skipif(not DRAFTS, reason="this vLLM (0.20) takes no proposer")
@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None,
    reason="needs torchvision, by which transformers prepares images for NeMo-RL",
)
def test_rows_with_images_draft_from_those_of_their_image(nemo, tmp_path, monkeypatch):  # noqa: F811
    from nemo_rl.models.generation.vllm.utils import format_prompt_for_vllm_generation
    from vllm import SamplingParams

    from nemo_specrl.nemo_rl.prompts import prompt_keys
    from nemo_specrl.nemo_rl.sync_worker import SpecVllmGenerationWorkerImpl

    for name in ("range_push", "range_pop"):  # they raise on CPU builds
        monkeypatch.setattr(torch.cuda.nvtx, name, lambda *args: 0)
    model = vision_model(tmp_path, "qwen2_5_vl")
    sizes = {"max_num_seqs": 8, "max_model_len": 96, "limit_mm_per_prompt": {"video": 0}}
    llm = make_engine(model, **sizes, **engine_options(LOSSLESS))
    worker = object.__new__(SpecVllmGenerationWorkerImpl)
    worker.cfg, worker.llm, worker.SamplingParams = GENERATION, llm, SamplingParams
    worker.routed_experts_dtype = torch.int16
    worker._cache, worker._metrics = Cache(), EngineMetrics()
    worker._speculative = SpeculativeLLM(llm, worker._cache, LOSSLESS)

    data = batch(model)
    assert data["input_ids"][0].tolist() == data["input_ids"][GROUP].tolist()  # but not the image
    keys = prompt_keys(data)
    asked = format_prompt_for_vllm_generation(data)
    assert keys[::GROUP] == [*map(media_prompt_key, asked[: 2 * GROUP : GROUP]), prompt_key(TEXT)]
    assert len(set(keys)) == 3

    plain = worker.generate(data)  # without identities of rows
    data[SAMPLE_INDICES] = torch.tensor(assign_sample_indices(keys))
    data[PROMPT_KEYS] = keys
    for _ in range(2):
        output = worker.generate(data)
        for name in ("output_ids", "unpadded_sequence_lengths", "truncated"):
            assert torch.equal(output[name], plain[name])
        assert torch.allclose(output["logprobs"], plain["logprobs"], atol=1e-3)
        metrics = worker.spec_rl_take_metrics()
        worker._refitted(True)
    assert metrics.tree_tokens / metrics.tree_steps > 3
    assert set(worker._cache.rollouts) == set(keys)
    assert output["output_ids"][0].tolist() != output["output_ids"][GROUP].tolist()


def test_rows_of_an_evaluation_with_other_images_are_of_other_prompts(nemo):  # noqa: F811
    from nemo_specrl.nemo_rl.prompts import text_indices

    seen = [{"prompt": question(), "multi_modal_data": {"image": image(n)}} for n in (0, 1, 0)]
    sound = {"audio": (np.arange(8, dtype=np.float32), 16000)}
    heard = [{"prompt": question(), "multi_modal_data": sound | more} for more in ({}, {}, MOVES)]
    texts = [question(), {"prompt": question()}, {"prompt": question("who?")}]
    assert text_indices([*seen, *heard, *texts]) == [0, 0, 1, 0, 1, 0, 0, 1, 0]
