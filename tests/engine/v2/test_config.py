"""How V2 engines are set up, and what is wrapped in vLLM: only what is known."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nemo_specrl.config import SpecRLConfig
from nemo_specrl.engine import v2_config
from nemo_specrl.engine.patches import install, vllm_version
from nemo_specrl.engine.step_costs import max_drafted
from nemo_specrl.engine.v2_lengths import OBSERVED, PROBE, RENEWED, LengthsOfSteps
from nemo_specrl.errors import IncompatibleVersion
from tests.drafting.test_uniform_length import QWEN3_8B

ROW = SimpleNamespace(num_tokens=100)


@pytest.fixture(scope="module")
def v2_patches():
    from nemo_specrl.engine import v2_patches

    install(v2_patches.PATCHES)
    return v2_patches


@pytest.mark.parametrize("name", ["add_requests", "_remove_request"])
def test_unknown_source_is_refused(monkeypatch, v2_patches, name):
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    def changed(self, *args):
        """As a later version may have it."""

    changed.__name__ = name
    monkeypatch.setattr(GPUModelRunner, name, changed)
    with pytest.raises(IncompatibleVersion, match="has a source"):
        install(v2_patches.PATCHES)
    assert getattr(GPUModelRunner, name) is changed


def test_missing_function_is_refused(monkeypatch, v2_patches):
    from vllm.v1.worker.gpu import model_runner

    monkeypatch.delattr(model_runner, "init_speculator")
    with pytest.raises(IncompatibleVersion, match=r"no .*init_speculator"):
        install(v2_patches.PATCHES)


def test_graphs_for_hybrids_are_known(v2_patches):
    """Their patches are applied when such a model is loaded; on this vLLM they could be."""
    for patch in v2_patches.HYBRID_PATCHES:
        if patch.needed():
            patch.target()


def configuration(rows, batched=8192, *, hybrid=False, ranks=1, **draft):
    """What is read and set of an engine's configuration."""
    block = SpecRLConfig(enabled=True, draft=draft).model_dump(mode="json")
    return SimpleNamespace(
        additional_config={"spec_rl": block},
        speculative_config=SimpleNamespace(method="ngram_gpu"),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=None, max_cudagraph_capture_size=None
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", enable_prefix_caching=True),
        model_config=SimpleNamespace(
            get_vocab_size=lambda: QWEN3_8B.vocab_size,
            dtype=torch.bfloat16,
            is_hybrid=hybrid,
            architectures=["NemotronHForCausalLM"] if hybrid else ["Qwen3ForCausalLM"],
            quantization=None,
            hf_text_config=QWEN3_8B,
            max_model_len=8192,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=rows, max_num_batched_tokens=batched),
        parallel_config=SimpleNamespace(
            data_parallel_size=ranks, tensor_parallel_size=1, pipeline_parallel_size=1
        ),
        use_v2_model_runner=True,
    )


def test_engines_without_a_block_are_left_alone():
    config = configuration(8)
    assert v2_config.drafts_from_history(config)
    config.additional_config["spec_rl"]["enabled"] = False
    assert not v2_config.drafts_from_history(config)
    config.additional_config = {}
    assert not v2_config.drafts_from_history(config)


@pytest.mark.parametrize(
    ("rows", "asked", "length"), [(1024, 3, 2), (512, 3, 3), (256, 24, 9), (64, 24, 24)]
)
def test_one_length_for_all_steps_is_as_long_as_memory_allows(rows, asked, length, caplog):
    config = configuration(rows, adaptive=False, max_tokens=asked)
    v2_config.complete(config)
    assert config.speculative_config.num_speculative_tokens == length
    assert (f"rows draft {length} tokens and not {asked}" in caplog.text) == (length < asked)


def test_engines_of_a_group_draft_nothing(caplog):
    """Their ranks could not agree on a length; the line says what would draft."""
    config = configuration(64, ranks=2)
    v2_config.complete(config)
    assert config.speculative_config is None
    assert not v2_config.drafts_from_history(config)
    assert "data_parallel_size = 2" in caplog.text and len(caplog.records) == 1


def test_warm_up_decodes_as_many_rows_as_there_is_memory_for(v2_patches):
    """1,024 rows, announced drafts of 24 tokens: 98 rows, whose logits take 2 GiB."""
    config = configuration(1024)
    v2_config.complete(config)
    seen, scheduler = [], config.scheduler_config
    runner = SimpleNamespace(
        vllm_config=config,
        scheduler_config=scheduler,
        speculator=type("HistorySpeculator", (), {})(),
        num_speculative_steps=config.speculative_config.num_speculative_tokens,
    )
    for _ in range(2):
        v2_patches._warmup_kernels(
            lambda r, _: seen.append(r.scheduler_config.max_num_seqs), runner, 0
        )
        runner.speculator = None  # another engine's
    assert seen == [98, 1024] and scheduler.max_num_seqs == 1024
    assert 98 * 24 <= max_drafted(config) < 99 * 24


def test_the_compile_cache_of_older_versions_stays_on(monkeypatch):
    """They switch it off for the method that V2 engines have by name; the answer is pickled."""
    import pickle

    config = configuration(8)
    monkeypatch.setattr(v2_config, "vllm_version", lambda: (0, 25, 1))
    v2_config.complete(config)
    drafter = pickle.loads(pickle.dumps(config.speculative_config))
    assert drafter.use_ngram_gpu() is False


@pytest.mark.parametrize(
    ("rows", "batched", "largest"),
    [
        (256, 4096, 1536),  # 256 rows of 1 + 5 tokens
        (176, 4096, 1536),  # more rows of 1 + 11 tokens than graphs are captured for
        (256, 768, 768),
        (32, 4096, 800),  # 32 rows of 1 + 24 tokens
        (16, 4096, None),  # vLLM's own sizes suffice
    ],
)
def test_graphs_are_captured_for_the_largest_steps_of_drafts(rows, batched, largest):
    config = configuration(rows, batched)
    compilation = config.compilation_config
    v2_config.complete(config)
    sizes = compilation.cudagraph_capture_sizes
    assert (sizes and sizes[-1]) == largest
    assert sizes is None or sizes == sorted(set(sizes))
    compilation.max_cudagraph_capture_size, compilation.cudagraph_capture_sizes = 64, None
    v2_config.complete(config)
    assert compilation.cudagraph_capture_sizes is None  # the user's bound stays


@pytest.mark.parametrize(("rows", "hybrid"), [(1, False), (2, True), (5, False), (8, True)])
def test_graphs_are_captured_for_each_length_that_is_chosen(rows, hybrid, v2_patches):
    """Also where an engine has fewer rows than there are lengths; 0 and the longest come first."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    config = configuration(rows, hybrid=hybrid)
    v2_config.complete(config)
    drafter = config.speculative_config
    longest = drafter.num_speculative_tokens
    assert longest == (3 if hybrid else 24)
    ranges = drafter.num_speculative_tokens_per_batch_size
    if rows == 1:  # all steps draft as many
        assert ranges is None
        return
    lookup = build_dynamic_sd_schedule_lookup(ranges, rows, longest)
    kept = sorted(set(lookup[1:]))
    assert len(kept) == min(rows, 4 if hybrid else 9) and kept[-1] == longest
    sizes = [1, 2, 4, *range(8, 129, 8)]
    manager = graph_manager(sizes, tuple(lookup[1:]), rows, config.additional_config)
    full = manager._capture_descs[CUDAGraphMode.FULL]
    assert sorted({graph.uniform_token_count - 1 for graph in full}) == kept

    scheduler = SimpleNamespace(vllm_config=config, dynamic_sd_lookup=lookup)
    lengths = LengthsOfSteps.of(scheduler)
    assert set(lookup[1:]) <= {16, longest}
    for _ in range(3000):  # nothing is accepted
        lengths.observe(longest, 0)
    lengths.before_step([ROW])
    assert set(lookup[1:]) == {0}


def graph_manager(sizes, lengths, rows, additional_config):
    """A manager of vLLM's for CUDA graphs of these sizes, which holds them for captured."""
    from tests.support import upstream

    return upstream.graph_manager(sizes, lengths, rows, additional_config)


def test_each_step_finds_the_graph_of_its_length(v2_patches):
    """Full graphs for all rows of all lengths, and piecewise ones for steps that prefill, too."""
    from vllm.config.compilation import CUDAGraphMode

    lengths, sizes = (0, 2, 3, 5, 11), [1, 2, 4, *range(8, 513, 8)]
    manager = graph_manager(sizes, lengths, 64, configuration(64).additional_config)
    for length in lengths:
        for rows in range(1, min(64, 512 // (1 + length) - 8)):
            tokens = rows * (1 + length)
            graph = manager.dispatch(rows, tokens, 1 + length, 0)
            assert graph.cg_mode == CUDAGraphMode.FULL, (length, rows)
            assert graph.uniform_token_count == 1 + length and graph.num_reqs >= rows
            assert graph.num_tokens < tokens + 8 + 1 + length
    for tokens in range(1, 513):
        assert manager.dispatch(1, tokens, None, 0).cg_mode == CUDAGraphMode.PIECEWISE, tokens


def test_graphs_of_other_engines_are_vllms(v2_patches):
    theirs, ours = (
        graph_manager([1, 2, 4, 8, 16], (0, 2), 4, block)
        for block in ({}, configuration(4).additional_config)
    )
    assert theirs._capture_descs == ours._capture_descs
    assert {key[0] for key in theirs._candidates} == set(range(17))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: setattr(c, "use_v2_model_runner", False), "VLLM_USE_V2_MODEL_RUNNER=1"),
        (lambda c: setattr(c.parallel_config, "pipeline_parallel_size", 2), "set it to 1"),
        (lambda c: setattr(c.model_config, "architectures", ["JambaForCausalLM"]), "another model"),
    ],
)
def test_refused_in_one_line(change, message):
    config = configuration(8, hybrid="another" in message)
    change(config)
    message = "use vLLM 0.29" if vllm_version() < (0, 29) and "another" in message else message
    with pytest.raises(IncompatibleVersion, match=message) as raised:
        v2_config.check(config)
    assert "\n" not in str(raised.value)


def test_a_reset_that_would_lose_tokens_is_refused(monkeypatch):
    """With vLLM 0.25.1, while a step with drafts is in flight; it is not done by halves."""
    from nemo_specrl.engine import scheduler

    class Engine:
        def reset_prefix_cache(self, reset_running_requests):
            return "reset"

    history = type("History", (scheduler._History, Engine), {"__init__": lambda self: None})()
    history.lengths, history._drafted, history.running = None, 0, []
    for version, placeholders, refused in (
        ((0, 25, 1), 4, True),
        ((0, 25, 1), 1, False),
        ((0, 32, 0), 4, False),
    ):
        monkeypatch.setattr(scheduler, "vllm_version", lambda version=version: version)
        history.running = [SimpleNamespace(num_output_placeholders=n) for n in (0, placeholders)]
        if refused:
            with pytest.raises(IncompatibleVersion, match="drafts of 1 rows") as raised:
                history.reset_prefix_cache(reset_running_requests=True)
            assert "\n" not in str(raised.value)
        else:
            assert history.reset_prefix_cache(reset_running_requests=True) == "reset"
        assert history.reset_prefix_cache() == "reset"  # leaves rows that run alone


def lengths_of(rows, **draft):
    """The lengths of a scheduler, and its table; drafts are worth little in long contexts."""
    config = configuration(rows, **draft)
    v2_config.complete(config)
    table = [0] * (rows + 1)
    return LengthsOfSteps.of(SimpleNamespace(vllm_config=config, dynamic_sd_lookup=table)), table


def test_the_table_follows_the_contexts_that_run():
    """256 rows of 8B: with 200 tokens each, drafts cost more than they yield, with 6,000 less."""
    lengths, table = lengths_of(256)
    rng = np.random.default_rng(0)
    for accepted in np.minimum(rng.geometric(0.8, 4 * OBSERVED) - 1, 3).tolist():
        lengths.observe(3, accepted)  # each token with a chance of 0.2
    short, long = ([SimpleNamespace(num_tokens=n)] * 256 for n in (200, 6000))
    lengths.before_step(short)
    assert table[256] == 0
    for _ in range(RENEWED):
        lengths.before_step(long)
    assert table[256] > 0


def test_one_step_in_two_hundred_drafts_where_the_table_says_none():
    lengths, table = lengths_of(256)
    for _ in range(4000):
        lengths.observe(2, 0)
    rows, drafted = [SimpleNamespace(num_tokens=200)] * 256, []
    for step in range(3 * PROBE + 10):
        lengths.before_step(rows)
        if table[256]:
            drafted.append(step)
    assert len(drafted) == 3 and table[256] == 0
    assert all(256 * n <= max_drafted(configuration(256)) for n in table)


def test_a_batch_begins_with_a_step_that_drafts():
    """Whatever was observed before: the new policy may be another one, and is found to be."""
    lengths, table = lengths_of(256)
    for _ in range(4000):
        lengths.observe(2, 0)
    rows = [SimpleNamespace(num_tokens=200)] * 256
    drafted = []
    for chance in (0, 1):
        lengths.begin_batch()
        for _ in range(5):
            lengths.before_step(rows)
            drafted.append(table[256])
            for _ in range(256 if table[256] else 0):
                lengths.observe(table[256], table[256] * chance)
    assert drafted[:5] == [1, 0, 0, 0, 0]
    assert drafted[5] == 1 and min(drafted[6:]) > 0


def test_drafts_are_cut_to_the_length_of_the_step():
    lengths, table = lengths_of(8)
    table[:] = [0, 5, 2, 0, 0, 0, 0, 0, 0]
    drafts = [[1, 2, 3], [4, 5, 6]]
    lengths.cut(drafts)
    assert drafts == [[1, 2], [4, 5]]
