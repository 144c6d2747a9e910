"""Layers of Mamba-2 and gated delta nets on a CPU, decoding as on a GPU. Import it before models.

vLLM's kernels for a CPU know nothing of drafts, and its CPU build has none for gated delta nets in
float32. What reads and writes a state behind each drafted token, which tests of drafts are about,
is vLLM's Triton kernels here, by the interpreter. What computes prompts is written out in torch:
the interpreter does not run vLLM's kernels for these, and no draft comes near them.
"""

import importlib
import importlib.util
import itertools

import torch
import triton
import triton.language as tl
from vllm import _custom_ops
from vllm.platforms import current_platform

OPS = "vllm.model_executor.layers.mamba.ops"
DELTA_RULES = (
    "vllm.model_executor.layers.fla.ops",  # before 0.29
    "vllm.third_party.flash_linear_attention.ops",
)


class NotCPU:
    """The platform for modules that would choose kernels for a CPU."""

    def __getattr__(self, name):
        return getattr(current_platform, name)

    def is_cpu(self):
        return False


def convolve(
    x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, **others
):
    """What ``causal_conv1d_fn`` of vLLM computes: channels by tokens of all rows, with SiLU."""
    before = weight.shape[1] - 1
    out = torch.empty_like(x)
    bounds = query_start_loc.tolist()
    for row, (start, end) in enumerate(itertools.pairwise(bounds)):
        if start == end:
            continue
        state = conv_states[int(cache_indices[row])][:, :before]
        past = state if has_initial_state[row] else torch.zeros_like(state)
        tokens = torch.cat([past.to(x.dtype), x[:, start:end]], 1)
        mixed = torch.nn.functional.conv1d(tokens[None], weight[:, None], bias, groups=len(x))
        out[:, start:end] = torch.nn.functional.silu(mixed[0])
        state.copy_(tokens[:, -before:])
    return out


def delta_rule(
    q,
    k,
    v,
    g,
    beta,
    initial_state,
    cu_seqlens,
    use_qk_l2norm_in_kernel,
    core_attn_out=None,
    **others,
):
    """What ``chunk_gated_delta_rule`` of vLLM computes, token by token.

    Heads of values share those of queries and keys; states are [rows, heads, values, keys].
    """
    shared = v.shape[2] // q.shape[2]
    q, k = (each[0].repeat_interleave(shared, 1) for each in (q, k))
    if use_qk_l2norm_in_kernel:
        q, k = (torch.nn.functional.normalize(each, dim=-1) for each in (q, k))
    out, states = torch.empty_like(v), initial_state.clone()
    bounds = cu_seqlens.tolist()
    for row, (start, end) in enumerate(itertools.pairwise(bounds)):
        state = states[row]
        for at in range(start, end):
            state = state * g[0, at].exp()[:, None, None]
            known = torch.einsum("hvk,hk->hv", state, k[at])
            update = (v[0, at] - known) * beta[0, at][:, None]
            state = state + update[:, :, None] * k[at][:, None]
            out[0, at] = torch.einsum("hvk,hk->hv", state, q[at]) * q.shape[-1] ** -0.5
        states[row] = state
    if core_attn_out is not None:
        core_attn_out.view(-1)[: out.numel()].copy_(out.view(-1))
    return out, states


@triton.jit
def exp(x):
    """The interpreter finds functions of Triton by this name, but not under another."""
    return tl.exp(x)


def decode_by_triton():
    """Have what is imported from here on take vLLM's Triton kernels for rows that decode."""
    platform, is_cpu = type(current_platform), type(current_platform).is_cpu
    platform.is_cpu = NotCPU.is_cpu
    try:
        convolution = importlib.import_module(f"{OPS}.causal_conv1d")
        importlib.import_module(f"{OPS}.mamba_ssm")
    finally:
        platform.is_cpu = is_cpu
    convolution.causal_conv1d_fn = convolve
    _custom_ops.causal_conv1d_weight_pack = lambda weight: weight[:, None]
    if importlib.util.find_spec("vllm.config.mamba") is not None:
        from vllm.config.mamba import MambaBackendEnum
        from vllm.model_executor.layers.mamba.ops import ssu_dispatch

        if hasattr(MambaBackendEnum, "CPU"):
            backends = ssu_dispatch._BACKEND_REGISTRY
            backends[MambaBackendEnum.CPU] = backends[MambaBackendEnum.TRITON]
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn

    qwen_gdn_linear_attn.current_platform = NotCPU()
    qwen_gdn_linear_attn.causal_conv1d_fn = convolve
    qwen_gdn_linear_attn.fla_chunk_gated_delta_rule = delta_rule
    for package in DELTA_RULES:
        for name in ("fused_recurrent", "fused_sigmoid_gating"):
            try:
                module = importlib.import_module(f"{package}.{name}")
            except ImportError:
                continue
            if hasattr(module, "exp"):
                module.exp = exp
