"""Tiny models that see images, with random weights, a tokenizer of bytes and a processor.

And what tests of drafting in both of vLLM's model runners ask of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

from nemo_specrl import prompt_key
from nemo_specrl.media import has_media, media_prompt_key
from tests.support.trainer.text_models import SIZES

PAD, BOS, EOS = 0, 1, 2
START, END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
SPECIAL = ("<pad>", "<bos>", "<eos>", "<|user|>", "<|assistant|>", START, END, IMAGE, VIDEO)
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{% if part.type == 'image' %}" + START + IMAGE + END + ""
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PATCH = 14
TEXT = SIZES | {
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "initializer_range": 0.25,
    "tie_word_embeddings": True,
    # Positions of an image's tokens are those of its time, rows and columns.
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
}
VISION = {
    "paddleocr_vl": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 4 * PATCH,
        "patch_size": PATCH,
        "initializer_range": 0.2,
    },
    "qwen2_5_vl": {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": PATCH,
        "window_size": 4 * PATCH,
        "fullatt_block_indexes": [0],
        "initializer_range": 0.2,
    },
}
"""Model types, and their part that sees. Both have positions of three dimensions (M-RoPE)."""
PROCESSORS = {
    "paddleocr_vl": {
        "processor_class": "PaddleOCRVLProcessor",
        "image_processor_type": "PaddleOCRVLImageProcessor",
    },
    "qwen2_5_vl": {
        "processor_class": "Qwen2_5_VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessor",
    },
}


def vision_model(folder: Path, kind: str = "paddleocr_vl") -> Path:
    """Make the folder of a model: one token a byte of text, four an image of 56 x 56 pixels.

    Args:
        folder: that is there.
        kind: ``paddleocr_vl``, or ``qwen2_5_vl``, whose processor needs torchvision.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        extra_special_tokens={"image_token": IMAGE, "video_token": VIDEO},
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    seen = {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 1}
    if kind == "qwen2_5_vl":
        seen["temporal_patch_size"] = 2
    size = {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": (8 * PATCH) ** 2}
    processor = {**PROCESSORS[kind], **seen, "size": size}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    if kind == "qwen2_5_vl":
        video = {**processor, "video_processor_type": "Qwen2VLVideoProcessor"}
        (folder / "video_preprocessor_config.json").write_text(json.dumps(video))

    config = AutoConfig.for_model(
        kind,
        text_config={**TEXT, "vocab_size": len(vocabulary)},
        vision_config=VISION[kind],
        image_token_id=vocabulary[IMAGE],
        video_token_id=vocabulary[VIDEO],
        vision_start_token_id=vocabulary[START],
        vision_end_token_id=vocabulary[END],
        tie_word_embeddings=True,
        initializer_range=0.25,
    )
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def image(seed: int, edge: int = 4 * PATCH) -> Image.Image:
    """An image of noise, square."""
    pixels = np.random.default_rng(seed).integers(0, 256, (edge, edge, 3), np.uint8)
    return Image.fromarray(pixels)


def question(text: str = "what?") -> str:
    """A prompt with one image, as a processor's chat template makes it."""
    return f"<|user|>{START}{IMAGE}{END}{text}<|assistant|>"


def prompts() -> list[dict[str, Any]]:
    """Prompts as NeMo-RL makes them: two of one text with other images, and one without."""
    seen = [{"prompt": question(), "multi_modal_data": {"image": image(seed)}} for seed in (0, 1)]
    return [*seen, {"prompt_token_ids": [BOS, 3, 70, 71, 4]}]


def sampled(llm: Any, asked: list[dict[str, Any]], **options: Any) -> list[Any]:
    """The outputs of an engine, or of a SpeculativeLLM, for its likeliest tokens.

    Not greedily: such requests are not drafted for.
    """
    from vllm import SamplingParams

    likeliest = {"temperature": 1.0, "top_p": 1e-6, "max_tokens": 24, "ignore_eos": True}
    params = SamplingParams(**{**likeliest, "logprobs": 0, **options})
    outputs: list[Any] = llm.generate(asked, params, use_tqdm=False)
    return outputs


def check_epochs(plain: list[Any], made: Any, *, rows: int) -> list[Any]:
    """Two epochs of :func:`prompts`: what is drafted is what plain decoding gives.

    Args:
        plain: what a plain engine gives for them.
        made: a SpeculativeLLM with a ``DictCache``, whose engine has no history.
        rows: of each prompt.

    Returns:
        The metrics of both epochs.
    """
    metrics = []
    for _ in range(2):
        outputs = sampled(made, prompts(), n=rows)
        metrics.append(made.metrics)
        for ours, theirs in zip(outputs, plain, strict=True):
            assert ours.prompt_token_ids == theirs.prompt_token_ids
            assert ours.prompt == theirs.prompt
            for completion in ours.outputs:
                assert completion.token_ids == list(theirs.outputs[0].token_ids)
                assert completion.text == theirs.outputs[0].text
        made.policy_version += 1
    cached = {
        key: [rollout.tokens.tolist() for rollout in group.values()]
        for key, group in made.cache.rollouts.items()
    }
    said = [list(output.outputs[0].token_ids) for output in plain]
    assert cached == {key_of(p): [tokens] * rows for p, tokens in zip(prompts(), said, strict=True)}
    assert len(set(map(tuple, said))) == len(said)  # the image says something
    return metrics


def key_of(prompt: dict[str, Any]) -> bytes:
    """The key of a prompt with an image or without."""
    return media_prompt_key(prompt) if has_media(prompt) else prompt_key(prompt["prompt_token_ids"])
