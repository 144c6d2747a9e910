"""What is patched in vLLM's samplers on a CPU."""

import torch
from vllm import SamplingParams
from vllm.v1.sample import rejection_sampler

from nemo_specrl.engine.vllm import cpu_sampler
from tests.support.engines import PROMPT, needs_cpu_build, needs_drafters, sampling


@needs_cpu_build
@needs_drafters
def test_vllm_still_needs_its_rejection_sampler_fixed_on_a_cpu(llm):
    """When this fails, vLLM has fixed it, and ``fix_cpu_rejection_sampler`` can go."""
    values = torch.tensor([1.0, 0.5, 2.0])
    cumulative = torch.tensor([2, 5, 6], dtype=torch.int32)
    expected = [1.0, 1.0, 0.5, 0.5, 0.5, 2.0]
    assert cpu_sampler.expanded_to_tokens.replaced(values, cumulative, 6).tolist() != expected
    assert rejection_sampler.expand_batch_to_tokens is cpu_sampler.expanded_to_tokens
    assert cpu_sampler.expanded_to_tokens(values, cumulative, 6).tolist() == expected
    replaced = cpu_sampler.expanded_to_tokens(torch.tensor([0, 3]), torch.tensor([1, 3]), 3, 0, 1)
    assert replaced.tolist() == [1, 3, 3]


def test_a_row_with_a_seed_is_sampled_by_it_whatever_runs_beside_it(llm):
    """Rows without a seed, as verifications are, end in the first steps, so that the rows of a step
    have seeds in part and then altogether. Versions for CPUs until 0.25.1 ignore the seeds then.

    With 12 tokens a row, of 32 that a random model has, seeds that were ignored would show.
    """
    seeded = [sampling(12, seed=seed, ignore_eos=True) for seed in range(4)]
    greedy = SamplingParams(temperature=0.0, max_tokens=3)
    sampled = sampling(6, seed=None)

    def rows(*params):
        prompts = [{"prompt_token_ids": PROMPT}] * len(params)
        outputs = llm.generate(prompts, list(params), use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    torch.manual_seed(1)
    alone = rows(*seeded)
    torch.manual_seed(2)
    first, _, second, _, third, fourth = rows(
        seeded[0], greedy, seeded[1], sampled, seeded[2], seeded[3]
    )
    assert [first, second, third, fourth] == alone
    assert len({tuple(tokens) for tokens in alone}) == 4


def test_rows_without_a_seed_differ_from_each_other_and_from_call_to_call(llm):
    """Beside one that has a seed, too."""
    params = [sampling(24, seed=seed, ignore_eos=True) for seed in (0, None, None)]
    prompts = [{"prompt_token_ids": PROMPT}] * 3
    found = []
    for _ in range(2):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found += [tuple(output.outputs[0].token_ids) for output in outputs]
    assert found[0] == found[3]
    assert len(set(found)) == 5
