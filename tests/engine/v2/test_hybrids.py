"""Models with other layers than attention in vLLM's V2 runner, from 0.29 on.

Their state has to be that of the tokens that were accepted, whatever was drafted, beside prompts
that come in parts, and in steps with drafts of other lengths or none.
"""

import sys

import numpy as np
import pytest
import torch

from nemo_specrl.engine.patches import vllm_version
from tests.conftest import save_random_model
from tests.support.v2_exactness import VOCABULARY, Gained, drafting, make_llm, runner_of

pytestmark = pytest.mark.skipif(vllm_version() < (0, 29), reason="refused there; see test_config")
K = 3
ROWS, TOKENS, LONGEST_PROMPT, IN_A_STEP = 4, 16, 40, 48
"""Rows, tokens of each, tokens of a prompt at most, and tokens of a step: prompts come in parts."""
LENGTHS = (3, 0, 2, 3, 0, 0, 2)
"""Of drafts, step by step."""
TOLERANCE = {"gated delta nets": 1e-3, "Mamba-2": 0.05}
"""Of log-probs, in nats. A wrong state is off by one to seven; plain decoding of this Mamba-2, too,
is off from transformers by up to .025."""

v2_cpu = sys.modules.get("tests.support.v2_cpu")
if v2_cpu is not None and v2_cpu.READY and not v2_cpu.ON_GPU and vllm_version() >= (0, 29):
    from tests.support.v2_recurrent import decode_by_triton

    decode_by_triton()


@pytest.fixture(scope="module", params=list(TOLERANCE))
def hybrid(request, tmp_path_factory):
    """The name of a kind of layer, and a model of random weights that has it beside attention."""
    from transformers import NemotronHConfig, Qwen3NextConfig

    folder = tmp_path_factory.mktemp("hybrid")
    if request.param == "Mamba-2":
        layers = ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]
        sizes = {"mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 1}
        return request.param, save_random_model(
            folder,
            NemotronHConfig,
            num_hidden_layers=len(layers),
            tie_word_embeddings=False,
            layers_block_type=layers,
            chunk_size=16,
            **sizes,
        )
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    widths = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return request.param, save_random_model(
        folder,
        Qwen3NextConfig,
        tie_word_embeddings=False,
        layer_types=["linear_attention", "full_attention"],
        shared_expert_intermediate_size=32,
        **heads,
        **widths,
        **experts,
    )


@pytest.fixture(scope="module")
def llm(hybrid, cache_dir):
    """Asynchronous with gated delta nets, synchronous with Mamba-2."""
    made = make_llm(
        hybrid[1],
        "sync" if hybrid[0] == "Mamba-2" else "async",
        max_num_seqs=16,
        max_num_batched_tokens=IN_A_STEP,
        enable_prefix_caching=True,
        **drafting(cache_dir, 11, adaptive=True),
    )
    config = made.llm_engine.vllm_config
    assert config.model_config.is_hybrid and config.speculative_config.num_speculative_tokens == K
    yield made
    made.llm_engine.engine_core.shutdown()


def responses(llm, prompts):
    """Of rows that take the likeliest tokens; at temperature 0 they would not be drafted for."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            top_k=1, logprobs=0, detokenize=False, ignore_eos=True, max_tokens=TOKENS - i % 5
        )
        for i in range(len(prompts))
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


def test_whatever_is_drafted_log_probs_are_those_of_the_tokens(
    llm, hybrid, by_reference, monkeypatch
):
    """Drafts that are right, right at first, right now and then, and wrong, of any length."""
    from transformers import AutoModelForCausalLM
    from vllm.v1.sample.ops import topk_topp_sampler as filters

    monkeypatch.setattr(filters, "apply_top_k_top_p_triton", filters.apply_top_k_top_p_pytorch)
    lengths, step = llm.llm_engine.engine_core.engine_core.scheduler.lengths, iter(LENGTHS * 100)

    def before_step(running):
        lengths.table[:] = [next(step)] * len(lengths.table)

    monkeypatch.setattr(lengths, "before_step", before_step)
    monkeypatch.setattr(lengths, "begin_batch", lambda: None)
    kind, folder = hybrid
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rng = np.random.default_rng(1)
    sizes = [1 + K, *rng.integers(2, LONGEST_PROMPT, ROWS - 1).tolist()]
    prompts = [rng.integers(3, VOCABULARY, size).tolist() for size in sizes]
    plain, index, histories = responses(llm, prompts), runner_of(llm).speculator.index, []
    for i, row in enumerate(plain):
        right, wrong = list(row.token_ids), [(token + 1) % VOCABULARY for token in row.token_ids]
        at_times = np.where(rng.random(len(right)) < 0.8, right, wrong).tolist()
        at_first = right[: len(right) // 2] + wrong[len(right) // 2 :]
        histories.append([right, at_first, at_times, wrong][i % 4])
    draft, gained = index.draft, Gained(llm)

    def bent(batch, batch_host, bounds, tokens, totals, *args):
        made = draft(batch, batch_host, bounds, tokens, totals, *args)
        for i, row in enumerate(batch_host):
            own = tokens[row, : totals[row]].tolist()
            of_row = next(j for j, prompt in enumerate(prompts) if own[: len(prompt)] == prompt)
            done = len(own) - len(prompts[of_row])
            made[i] = torch.tensor((histories[of_row][done:] + [0] * K)[:K])
        return made

    monkeypatch.setattr(index, "draft", bent)
    drafted = responses(llm, prompts)
    assert gained() > 1.3
    for prompt, row in zip(prompts * 2, [*plain, *drafted], strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *row.token_ids]])).logits[0, len(prompt) - 1 :]
        logprobs = torch.log_softmax(logits[:-1], -1)
        expected = logprobs[range(len(row.token_ids)), row.token_ids]
        got = [e[t].logprob for e, t in zip(row.logprobs, row.token_ids, strict=True)]
        assert got == pytest.approx(expected.tolist(), abs=TOLERANCE[kind])
        assert (logprobs.max(-1).values - expected).max() < 2 * TOLERANCE[kind]


def test_graphs_are_captured_for_every_length(llm):
    """On a GPU vLLM builds this for each graph while the engine starts."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    builders = [
        group.get_metadata_builder(0) for groups in runner_of(llm).attn_groups for group in groups
    ]
    states = [builder for builder in builders if hasattr(builder, "decode_cudagraph_max_bs")]
    assert states
    rows = 2
    for builder in states:
        for length in (0, 2, K):
            ends = torch.arange(rows + 1, dtype=torch.int32) * (1 + length)
            lengths = torch.full((rows,), 1 + length, dtype=torch.int32)
            built = builder.build_for_cudagraph_capture(
                CommonAttentionMetadata(
                    query_start_loc=ends,
                    query_start_loc_cpu=ends,
                    seq_lens=lengths,
                    seq_lens_cpu_upper_bound=lengths,
                    num_reqs=rows,
                    num_actual_tokens=rows * (1 + length),
                    max_query_len=1 + length,
                    max_seq_len=96,
                    block_table_tensor=torch.ones(rows, 8, dtype=torch.int32),
                    slot_mapping=torch.zeros(rows * (1 + length), dtype=torch.int64),
                    is_prefilling=torch.zeros(rows, dtype=torch.bool),
                )
            )
            decoding = getattr(built, "num_spec_decodes", 0) or built.num_decodes
            assert decoding == rows and built.num_prefills == 0
            assert built.num_accepted_tokens is not None
