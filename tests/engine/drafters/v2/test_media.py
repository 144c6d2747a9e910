"""Prompts with images in vLLM's V2 runner: positions of three dimensions, and histories by image.

Drafts are made by the numpy reference, as in ``test_engine``. Models are tiny, with random weights.
"""

import importlib.util

import pytest
import torch

from nemo_specrl import SpecRLConfig, SpeculativeLLM, engine_options
from nemo_specrl.engine.vllm.environment import Engines
from tests.conftest import DictCache, make_engine
from tests.support.v2_workers import seen
from tests.support.vision_models import IMAGE, check_epochs, prompts, sampled, vision_model

CONFIG = SpecRLConfig(
    enabled=True,
    preset="lossless",
    tree={"max_draft_tokens": 3, "adaptive": False, "max_bytes": 8 << 20},
)
SIZES = {"max_num_seqs": 6, "max_model_len": 96, "max_num_batched_tokens": 256}


@pytest.fixture(scope="module", params=["paddleocr_vl", "qwen2_5_vl"])
def model(request, tmp_path_factory):
    if request.param == "qwen2_5_vl" and importlib.util.find_spec("torchvision") is None:
        pytest.skip("needs torchvision, by which transformers prepares videos")
    return vision_model(tmp_path_factory.mktemp("vision"), request.param)


@pytest.fixture(autouse=True)
def on_a_cpu(by_reference, monkeypatch):
    """The interpreter cannot run the kernel of top-p, and 0.25.1 has pixels in pinned memory.

    On GPUs vLLM takes the other function of top-p for less than 8 rows.
    """
    from vllm.v1.sample.ops import topk_topp_sampler as filters
    from vllm.v1.worker.gpu.mm import encoder_runner

    monkeypatch.setattr(filters, "apply_top_k_top_p_triton", filters.apply_top_k_top_p_pytorch)
    if torch.cuda.is_available() or not Engines.installed(cpu=True).before((0, 29)):
        return
    grouped = encoder_runner.group_and_batch_mm_kwargs

    def group(mm_kwargs, device, pin_memory):
        return grouped(mm_kwargs, device=device, pin_memory=False)

    monkeypatch.setattr(encoder_runner, "group_and_batch_mm_kwargs", group)


def engine(engines, model, scheduling, **options):
    made = engines[model, scheduling, bool(options)] = make_engine(
        model,
        **SIZES,
        limit_mm_per_prompt={"image": 1, "video": 0},
        async_scheduling=scheduling == "async",
        **options,
    )
    assert made.llm_engine.vllm_config.use_v2_model_runner
    assert made.llm_engine.vllm_config.model_config.uses_mrope
    return made


@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_prompts_of_one_text_have_the_histories_of_their_images(engines, model, scheduling):
    plain = engine(engines, model, scheduling)
    llm = engine(engines, model, scheduling, **engine_options(CONFIG))
    made = SpeculativeLLM(llm, DictCache(), CONFIG)
    first, second = check_epochs(sampled(plain, prompts()), made, rows=2)
    assert first.tree_steps and second.tree_tokens / second.tree_steps > 2
    (held,) = llm.collective_rpc(seen)
    assert held["prompts"] == len(prompts())
    # With words forbidden, as NeMo-RL's recipes have them, one of which would come up.
    asked = prompts()[:1]
    said = sampled(plain, asked)[0].outputs[0].text
    words = [IMAGE, next(character for character in said if "!" <= character <= "~")]
    [wanted] = sampled(plain, asked, bad_words=words)
    [got] = sampled(made, asked, bad_words=words)
    assert got.outputs[0].text == wanted.outputs[0].text and words[1] not in got.outputs[0].text
