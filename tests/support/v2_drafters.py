"""Drafters of a user's own beside history, made from the model for which they draft."""

import json
import shutil

import torch
from safetensors.torch import load_file, save_file


def noisy(folder, made, noise):
    """A copy of a model with noise on its weights, as a draft model."""
    shutil.copytree(folder, made)
    generator = torch.Generator().manual_seed(1)
    weights = load_file(made / "model.safetensors")
    for name, w in weights.items():
        drawn = torch.randn(w.shape, generator=generator)
        weights[name] = (w.float() + noise * w.float().std() * drawn).to(w.dtype)
    save_file(weights, made / "model.safetensors", {"format": "pt"})
    return made


def eagle3(folder, made):
    """An EAGLE-3 head with random weights, of the target's sizes."""
    made.mkdir()
    target = json.loads((folder / "config.json").read_text())
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim")
    config = {name: target[name] for name in (*names, "num_key_value_heads")}
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": target["vocab_size"],
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (made / "config.json").write_text(json.dumps(config))
    hidden, inner, head = (config[n] for n in ("hidden_size", "intermediate_size", "head_dim"))
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (q, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, q),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
    }
    generator = torch.Generator().manual_seed(2)
    weights = {
        name: 0.25 * torch.randn(shape, generator=generator)
        if len(shape) > 1
        else torch.ones(shape)
        for name, shape in shapes.items()
    }
    save_file(weights, made / "model.safetensors", {"format": "pt"})
    return made
