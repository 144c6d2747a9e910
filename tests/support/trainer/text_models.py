"""Tiny models of public architectures, with random weights and a tokenizer of bytes."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

PAD, BOS, EOS = 0, 1, 2
SPECIAL = ("<pad>", "<bos>", "<eos>", "<|user|>", "<|system|>", "<|assistant|>")
TEMPLATE = (
    "<bos>{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
ARCHITECTURES: dict[str, dict[str, object]] = {
    "qwen3": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False},
    "gemma": {"tie_word_embeddings": True},
    "mistral": {"tie_word_embeddings": False, "sliding_window": None},
    "phi3": {"tie_word_embeddings": False, "pad_token_id": PAD},
}
"""Model types, and their options beside ``SIZES``."""


def text_model(folder: Path, kind: str = "llama", *, template: str | None = TEMPLATE) -> Path:
    """Make the folder of a model of an architecture, one token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
    fast.chat_template = template
    fast.save_pretrained(folder)

    config = AutoConfig.for_model(
        kind,
        **SIZES,
        vocab_size=len(vocabulary),
        bos_token_id=BOS,
        eos_token_id=EOS,
        initializer_range=0.2,
        **ARCHITECTURES[kind],
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def write_untied(source: str | Path, folder: Path) -> None:
    """Write a model with an output layer of its own, equal to the embedding at first.

    Args:
        source: the model's folder.
        folder: where to write it.
    """
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.model.embed_tokens.weight.detach().clone())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
