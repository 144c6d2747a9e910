"""Routed experts of rows that reuse prefixes, compared with those of transformers."""

import numpy as np
import torch

from nemo_specrl import SpecRLConfig, SpeculativeLLM
from tests.conftest import DictCache, make_engine, save_random_model
from tests.support.engines import NEVER, PROMPT, STRICT, SURE, draft, generate, sampling

EXPERTS, CHOSEN = 8, 2
BLOCK = 32  # tokens of a KV block
EOS = 2  # of the random models
LONG = [5 + i % 20 for i in range(40)]  # with the prompt more than one KV block
PARTS = ((LONG[:8], 8), (LONG, 40), (LONG[:10], 6), (LONG, 35), (LONG[:4], 0))
"""What is drafted, and how much of it is accepted: with all of it, also the end that follows."""


def save_mixture(folder):
    """A Qwen3-MoE of random weights, eight experts of which two are chosen."""
    from transformers import Qwen3MoeConfig

    sizes = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": 64}
    return save_random_model(folder, Qwen3MoeConfig, norm_topk_prob=True, **sizes)


def make_mixture_engine(folder, **options):
    """An engine in this process that returns routes, and stays: see ``make_engine``.

    Engines of dense models in the same process have left it without a group for experts; it is made
    of the same single rank as the others.
    """
    from vllm.distributed import parallel_state

    if parallel_state._TP is not None and parallel_state._EP is None:
        parallel_state._EP = parallel_state._TP
    made = make_engine(folder, enable_return_routed_experts=True, **options)
    made.collective_rpc(tell_choices)
    return made


def load_reference(folder):
    """The model in transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def assert_routes(model, tokens, routes):
    """Routes are those of the model in transformers, for each token except the last."""
    ids = torch.tensor([list(tokens)])
    with torch.inference_mode():
        layers = model(ids, output_router_logits=True).router_logits
    expected = torch.stack([layer.topk(CHOSEN).indices for layer in layers], 1)
    # No step has read the last token.
    assert routes.shape == (ids.shape[1] - 1, len(layers), CHOSEN)
    assert (np.sort(routes, -1) == np.sort(expected[:-1].numpy(), -1)).all()


def tell_choices(worker):
    """Make vLLM 0.25 record routes on a CPU, whose layers bypass its hook. Runs in its worker."""
    for layer in worker.model_runner.compilation_config.static_forward_context.values():
        if hasattr(layer, "router"):
            _tell(layer.routed_experts.quant_method.cpu_fused_moe, layer.router.capture_fn)


def _tell(moe, take_down):
    """Make a layer of experts report which ones it applies."""
    apply = moe.forward_method

    def told(layer, x, weights, ids, *args):
        take_down(ids)
        return apply(layer, x, weights, ids, *args)

    moe.forward_method = told


def strict(cls, llm, cache=None, **options):
    """An engine that reuses tokens which are surely better than before, and no others."""
    known = {"preset": "faithful", "lenience": STRICT, "fresh_fraction": 0.0, **options}
    config = SpecRLConfig(enabled=True, **known)
    return cls(llm, DictCache() if cache is None else cache, config, policy_version=1)


def partly_accepted(tokens, kept, *, sample_index=0):
    """A draft of which this many tokens will be accepted, and its end if these are all."""
    old = np.full(len(tokens) + 1, NEVER)
    old[: kept + (kept == len(tokens))] = SURE
    return draft([*tokens, EOS], old, sample_index=sample_index)


def assert_reused_rows_have_their_routes(llm, model):
    """Of rows without a draft, and with drafts that are accepted in whole, in part and not."""
    rollouts = [partly_accepted(*part, sample_index=1 + i) for i, part in enumerate(PARTS)]
    made = strict(SpeculativeLLM, llm, DictCache(rollouts))
    (output,) = generate(made, params=sampling(len(LONG) + 8, n=1 + len(PARTS)))
    accepted = [row.spec_rl.accepted for row in output.outputs]
    assert accepted == [0, 9, 41, 6, 35, 0], accepted
    assert (made.metrics.drafts, made.metrics.full_reuses) == (5, 2)
    # A block of one row was read from the cache; its routes are those of the verification.
    assert made.metrics.recomputed_tokens == 3 * len(PROMPT) + 6 + 35 - BLOCK
    for row in output.outputs:
        assert_routes(model, [*PROMPT, *row.token_ids], row.routed_experts)
