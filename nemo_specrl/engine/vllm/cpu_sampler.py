"""What is replaced in vLLM's samplers on a CPU, which would otherwise give wrong or unrepeatable
samples.

The rules are those of ``patches``. ``plugin`` applies both in each of vLLM's processes; the engine
layer applies the first one if a drafter needs it. Samplers on GPUs need neither.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from nemo_specrl.engine.vllm.patches import wrap_functions
from nemo_specrl.errors import IncompatibleVersion

if TYPE_CHECKING:
    import torch

__all__ = ["expanded_to_tokens", "fix_cpu_rejection_sampler", "keep_cpu_seeds"]

SEEDS_IGNORED = "len(generators) != logits.shape[0]"
"""In the source of a ``TopKTopPSampler.forward_cpu`` that needs ``keep_cpu_seeds``."""


def fix_cpu_rejection_sampler() -> None:
    """On a CPU, make sampled speculative decoding divide logits by the requested temperature.

    ``expand_batch_to_tokens`` of vLLM's CPU builds writes temperatures (and top-k, top-p) into a
    copy that is discarded and returns memory that was never written, so that accepted tokens come
    from another distribution (utils/cpu_triton_utils.py, ``_expand_kernel_impl``; 0.20 to 0.33).
    Neither greedy decoding nor GPUs are affected. Raises IncompatibleVersion if this vLLM's
    rejection sampler has no such function.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.sample import rejection_sampler

    original = getattr(rejection_sampler, "expand_batch_to_tokens", None)
    if original is None:
        raise IncompatibleVersion(
            "this vLLM's rejection sampler has no expand_batch_to_tokens; sampled speculative "
            "decoding on a CPU has not been checked with it"
        )
    if original is not expanded_to_tokens:
        rejection_sampler.expand_batch_to_tokens = expanded_to_tokens
        expanded_to_tokens.replaced = original  # type: ignore[attr-defined]


def expanded_to_tokens(
    values: torch.Tensor,
    cumulative: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Repeat each row's value for each of its tokens: what ``expand_batch_to_tokens`` documents.

    Args:
        values: by row, ``[rows]``.
        cumulative: tokens of a row and of those before it, int ``[rows]``.
        num_tokens: number of tokens of all rows.
        replace_from: a value to replace.
        replace_to: its replacement.
    """
    import torch

    counts = torch.diff(cumulative, prepend=cumulative.new_zeros(1)).long()
    if replace_from != replace_to:
        values = torch.where(values == replace_from, replace_to, values).to(values.dtype)
    return values.repeat_interleave(counts, output_size=num_tokens)


def keep_cpu_seeds() -> None:
    """On a CPU, sample a row with a seed by its seed, whatever other rows a step has.

    ``TopKTopPSampler.forward_cpu`` samples all rows of a step by the generator of the process if
    one of them has no generator of its own (v1/sample/ops/topk_topp_sampler.py; 0.20 and 0.25.1,
    not 0.32; the functions for GPUs do not). A verification has none. What was decoded together
    with one therefore depended on everything that the process had sampled before, and a run that
    was killed and restarted did not repeat its steps. Rows without a seed keep the generator of the
    process.

    Raises:
        IncompatibleVersion: this vLLM's TopKTopPSampler has no forward_cpu. Whether seeds are
            respected there is not known.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import torch
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    def forward(
        original: Any,
        self: Any,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        *args: Any,
    ) -> Any:
        if 0 < len(generators) < len(logits):
            every_row = range(len(logits))
            generators = {row: generators.get(row, torch.default_generator) for row in every_row}
        return original(self, logits, generators, *args)

    found = getattr(TopKTopPSampler, "forward_cpu", None)
    if found is None or SEEDS_IGNORED in inspect.getsource(found):
        hint = "; a resumed run may differ"
        wrap_functions([(TopKTopPSampler, "forward_cpu", forward)], hint=hint)
