"""Models with other layers than attention in vLLM's V2 runner, on each version that has it.

Their state has to be that of the tokens that were accepted, whatever was drafted, beside prompts
that come in parts, and in steps with drafts of other lengths or none.
"""

import sys

import numpy as np
import pytest
import torch

from nemo_specrl.engine.vllm.environment import Engines
from nemo_specrl.rollout import prompt_key
from tests.conftest import make_engine, save_random_model
from tests.support.engines import VOCABULARY

K = 3
ROWS, TOKENS, LONGEST_PROMPT, IN_A_STEP = 8, 16, 40, 64
"""Rows, tokens of each, tokens of a prompt at most, and tokens of a step: prompts come in parts."""
LENGTHS = (3, 0, 2, 3, 0, 0, 2)
"""Of drafts, step by step."""
TOLERANCE = {"gated delta nets": 1e-3, "Mamba-2": 0.05}
"""Of log-probs, in nats. A wrong state is off by one to seven; plain decoding of this Mamba-2, too,
is off from transformers by up to .025."""
CACHED_STATES = not Engines.installed(cpu=True).before((0, 29))

v2_cpu = sys.modules.get("tests.support.v2_cpu")
if v2_cpu is not None and v2_cpu.READY and not v2_cpu.ON_GPU:
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


@pytest.fixture(
    scope="module", params=[pytest.param("sync", id="alternating"), pytest.param("async")]
)
def llm(request, hybrid):
    from nemo_specrl.engine.vllm import v2_patches

    v2_patches.install()
    made = make_engine(
        hybrid[1],
        max_model_len=96,
        max_num_seqs=16,
        max_num_batched_tokens=IN_A_STEP,
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        async_scheduling=request.param == "async",
        **v2_patches.speculator_options(11, 8 << 20, adaptive=True),
    )
    yield made
    made.llm_engine.engine_core.shutdown()


@pytest.fixture
def varied(monkeypatch):
    """Drafts of a step are as long as ``LENGTHS`` says, not as long as pays."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from nemo_specrl.engine.vllm import v2_lengths

    original, lengths = Scheduler.schedule, iter(LENGTHS * 1000)

    def schedule(self, *args, **kwargs):
        self.dynamic_sd_lookup[:] = [next(lengths)] * len(self.dynamic_sd_lookup)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    monkeypatch.setattr(v2_lengths, "renew_table", lambda scheduler: None)


def responses(llm, prompts, histories, identity):
    """Of rows that draft from these histories, decoded greedily."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=0,
            logprobs=0,
            detokenize=False,
            ignore_eos=True,
            max_tokens=TOKENS - i % 5,
            extra_args={
                "spec_rl": [
                    prompt_key(prompt),
                    identity + i,
                    [(0, np.array(history, np.int32).tobytes())],
                    len(prompt),
                ]
            },
        )
        for i, (prompt, history) in enumerate(zip(prompts, histories, strict=True))
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


def test_whatever_is_drafted_log_probs_are_those_of_the_tokens(llm, hybrid, varied, by_reference):
    """Drafts that are right, right at first, right now and then, and wrong."""
    from transformers import AutoModelForCausalLM

    from nemo_specrl.engine.vllm.v2_patches import speculator_of

    kind, folder = hybrid
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    index = speculator_of(llm.llm_engine.model_executor.driver_worker.worker.model_runner).index
    rng = np.random.default_rng(1)
    sizes = [1 + K, *rng.integers(2, LONGEST_PROMPT, ROWS - 1).tolist()]
    prompts = [rng.integers(3, VOCABULARY, size).tolist() for size in sizes]
    first = responses(llm, prompts, [[7] * TOKENS] * ROWS, 1000)
    index.take_totals()
    histories = []
    for i, row in enumerate(first):
        right, wrong = list(row.token_ids), [(token + 1) % VOCABULARY for token in row.token_ids]
        at_times = np.where(rng.random(len(right)) < 0.8, right, wrong).tolist()
        at_first = right[: len(right) // 2] + wrong[len(right) // 2 :]
        histories.append([right, at_first, at_times, wrong][i % 4])
    second = responses(llm, prompts, histories, 2000)
    steps = index.take_totals()[0]
    assert steps < 0.75 * sum(len(row.token_ids) for row in second)
    for prompt, row in zip(prompts * 2, [*first, *second], strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *row.token_ids]])).logits[0, len(prompt) - 1 :]
        logprobs = torch.log_softmax(logits[:-1], -1)
        expected = logprobs[range(len(row.token_ids)), row.token_ids]
        got = [e[t].logprob for e, t in zip(row.logprobs, row.token_ids, strict=True)]
        assert got == pytest.approx(expected.tolist(), abs=TOLERANCE[kind])
        assert (logprobs.max(-1).values - expected).max() < 2 * TOLERANCE[kind]


@pytest.mark.skipif(
    CACHED_STATES, reason="this vLLM itself replays no full graph for a step with a prompt"
)
def test_no_full_graph_is_replayed_for_a_step_with_a_prompt(llm, varied, monkeypatch):
    """Of a prompt as long as a step that verifies, alone; the steps behind it are uniform."""
    from vllm.v1.worker.gpu import model_runner

    asked, dispatch = [], model_runner.dispatch_cg_and_sync_dp

    def noting(manager, rows, tokens, uniform, *args, **kwargs):
        asked.append((rows, tokens, uniform))
        return dispatch(manager, rows, tokens, uniform, *args, **kwargs)

    monkeypatch.setattr(model_runner, "dispatch_cg_and_sync_dp", noting)
    responses(llm, [[3] * (1 + K)], [[7] * TOKENS], 3000)
    assert asked[0] == (1, 1 + K, None)
    assert len(asked) > 1 and all(uniform == tokens for _, tokens, uniform in asked[1:])


def test_how_such_engines_are_set_up(llm):
    config = llm.llm_engine.vllm_config
    assert config.use_v2_model_runner and config.model_config.is_hybrid
    assert config.speculative_config.num_speculative_tokens == K
    cache = config.cache_config
    assert cache.enable_prefix_caching == CACHED_STATES
    assert cache.mamba_cache_mode == ("align" if CACHED_STATES else "none")


def test_rows_that_have_room_beside_the_states_of_drafts(llm, caplog):
    """A warning says so where it is fewer rows than the engine would run."""
    from nemo_specrl.engine.vllm.v2_states import rows_with_room, warn_of_fewer_rows

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    cache = scheduler.kv_cache_config
    kinds = [group.kv_cache_spec for group in cache.kv_cache_groups]
    states = sum(hasattr(kind, "num_speculative_blocks") for kind in kinds)
    attention = [kind for kind in kinds if not hasattr(kind, "num_speculative_blocks")]
    assert states and attention
    size = attention[0].block_size
    for blocks in (1, 5):
        of_row = states * (1 + K) + len(attention) * blocks
        assert rows_with_room(cache, blocks * size, K) == cache.num_blocks // of_row
        assert rows_with_room(cache, blocks * size, 0) > rows_with_room(cache, blocks * size, K)
    warn_of_fewer_rows(scheduler)
    assert "has room for" not in caplog.text  # more rows than the engine runs
    scheduler.vllm_config.scheduler_config.max_num_seqs += cache.num_blocks
    warn_of_fewer_rows(scheduler)
    scheduler.vllm_config.scheduler_config.max_num_seqs -= cache.num_blocks
    assert f"each row keeps {1 + K} states" in caplog.text


def test_graphs_are_captured_for_every_length(llm):
    """On a GPU vLLM builds this for each graph while the engine starts."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    builders = [group.get_metadata_builder(0) for groups in runner.attn_groups for group in groups]
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
