"""What is wrapped in vLLM: only what is known, and only for engines that ask for it."""

from types import SimpleNamespace

import pytest

from nemo_specrl.errors import IncompatibleVersion
from tests.support.upstream import graph_manager


@pytest.mark.parametrize("name", ["add_requests", "_remove_request"])
def test_unknown_source_is_refused(monkeypatch, name):
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from nemo_specrl.engine.vllm import v2_patches

    def changed(self, *args):
        """As a later version may have it."""

    changed.__name__ = name
    monkeypatch.setattr(GPUModelRunner, name, changed)
    with pytest.raises(IncompatibleVersion, match="has a source"):
        v2_patches.install()
    assert getattr(GPUModelRunner, name) is changed


def test_missing_function_is_refused(monkeypatch):
    from vllm.v1.worker.gpu import model_runner

    from nemo_specrl.engine.vllm import v2_patches

    monkeypatch.delattr(model_runner, "init_speculator")
    with pytest.raises(IncompatibleVersion, match="no init_speculator"):
        v2_patches.install()


def test_engines_without_the_options_are_left_alone():
    from nemo_specrl.engine.vllm import v2_patches

    other = SimpleNamespace(additional_config={}, speculative_config=SimpleNamespace())
    assert not v2_patches.drafts_from_history(other)
    options = v2_patches.speculator_options(3, 1000, adaptive=True)["additional_config"]
    none = SimpleNamespace(additional_config=options, speculative_config=None)
    assert not v2_patches.drafts_from_history(none)
    asked = SimpleNamespace(additional_config=options, speculative_config=SimpleNamespace())
    assert v2_patches.drafts_from_history(asked)


def test_installed_once():
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from nemo_specrl.engine.vllm import v2_patches

    v2_patches.install()
    once = GPUModelRunner.add_requests
    v2_patches.install()
    assert GPUModelRunner.add_requests is once


def captured_graphs(*, sizes, lengths, rows, drafts=True):
    """A manager of graphs of vLLM's, which has captured those of these sizes."""
    from nemo_specrl.engine.vllm import v2_patches

    v2_patches.install()
    options = v2_patches.speculator_options(max(lengths), 1000, adaptive=True)
    return graph_manager(sizes, lengths, rows, options["additional_config"] if drafts else {})


def test_each_step_finds_the_graph_of_its_length():
    """Full graphs for all rows of all lengths, and piecewise ones for steps that prefill, too."""
    from vllm.config.compilation import CUDAGraphMode

    lengths = (0, 2, 3, 5, 11)
    sizes = [1, 2, 4, *range(8, 513, 8)]
    manager = captured_graphs(sizes=sizes, lengths=lengths, rows=64)
    for length in lengths:
        for rows in range(1, 512 // (1 + length) - 8):
            if rows > 64:
                break
            tokens = rows * (1 + length)
            graph = manager.dispatch(rows, tokens, 1 + length, 0)
            assert graph.cg_mode == CUDAGraphMode.FULL, (length, rows)
            assert graph.uniform_token_count == 1 + length and graph.num_reqs >= rows
            assert graph.num_tokens < tokens + 8 + 1 + length
    for tokens in range(1, 513):
        assert manager.dispatch(1, tokens, None, 0).cg_mode == CUDAGraphMode.PIECEWISE, tokens


def test_graphs_of_other_engines_are_vllms():
    manager = captured_graphs(sizes=[1, 2, 4, 8, 16], lengths=(0, 2), rows=4, drafts=False)
    ours = captured_graphs(sizes=[1, 2, 4, 8, 16], lengths=(0, 2), rows=4)
    assert manager._capture_descs == ours._capture_descs
    assert {key[0] for key in manager._candidates} == set(range(17))


def configuration(rows, batched, vocabulary, **options):
    """What lengths and sizes of graphs are chosen by, of a configuration of vLLM's."""
    import torch

    return SimpleNamespace(
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=None, max_cudagraph_capture_size=None
        ),
        model_config=SimpleNamespace(
            get_vocab_size=lambda: vocabulary, dtype=torch.bfloat16, is_hybrid=False
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=rows, max_num_batched_tokens=batched),
        parallel_config=SimpleNamespace(data_parallel_size=1),
        speculative_config=SimpleNamespace(),
        additional_config={"spec_rl": options},
    )


@pytest.mark.parametrize(
    ("rows", "asked", "length"), [(1024, 3, 2), (512, 3, 3), (256, 24, 9), (64, 24, 24)]
)
def test_one_length_for_all_steps_is_as_long_as_memory_allows(rows, asked, length, caplog):
    from nemo_specrl.engine.vllm import v2_patches

    config = configuration(rows, 8192, 151_936, lengths=[asked])
    v2_patches._set_lengths(config)
    assert config.speculative_config.num_speculative_tokens == length
    assert (f"rows draft {length} tokens and not {asked}" in caplog.text) == (length < asked)


@pytest.mark.parametrize("rows", [512, 1024])
def test_many_rows_draft_where_it_pays(rows):
    from nemo_specrl.engine.vllm import v2_lengths
    from nemo_specrl.speculation.uniform_length import GPUS, LENGTHS, StepCosts, UniformLengths

    costs = StepCosts(GPUS["H100"], 15e9, 0, 0, 15e9, 147e3, 151_936)
    most = v2_lengths.max_drafted(configuration(rows, 8192, 151_936))
    lengths = UniformLengths(costs, LENGTHS, rows, most)
    for _ in range(2000):
        lengths.observe(2, 2)
    assert min(lengths.table(3000)[1:]) > 0


@pytest.mark.parametrize(
    ("rows", "batched", "vocabulary", "largest"),
    [
        (256, 4096, 151_936, 1536),  # 256 rows of 1 + 5 tokens
        (176, 4096, 151_936, 1536),  # more rows of 1 + 11 tokens than graphs are captured for
        (256, 768, 151_936, 768),
        (512, 8192, 32, 1536),
        (32, 4096, 151_936, None),  # vLLM's own sizes suffice
    ],
)
def test_graphs_are_captured_for_the_largest_steps_of_drafts(rows, batched, vocabulary, largest):
    from nemo_specrl.engine.vllm import v2_graphs, v2_lengths

    config = configuration(rows, batched, vocabulary)
    compilation = config.compilation_config
    most = v2_lengths.max_drafted(config)
    v2_graphs.set_graph_sizes(config, [0, 2, 3, 5, 11], rows, most)
    sizes = compilation.cudagraph_capture_sizes
    assert (sizes and sizes[-1]) == largest
    assert sizes is None or sizes == sorted(set(sizes))
    compilation.max_cudagraph_capture_size, compilation.cudagraph_capture_sizes = 64, None
    v2_graphs.set_graph_sizes(config, [0, 2, 3, 5, 11], rows, most)
    assert compilation.cudagraph_capture_sizes is None  # the user's bound stays


def drafting_config(rows, *, hybrid=False):
    """What is read of an engine's configuration where the lengths of drafts are chosen."""
    from nemo_specrl.engine.vllm import v2_patches
    from tests.speculation.test_uniform_length import QWEN3_8B

    options = v2_patches.speculator_options(24, 1 << 29, adaptive=True)
    config = configuration(rows, 8192, QWEN3_8B.vocab_size)
    config.additional_config = options["additional_config"]
    vars(config.speculative_config).update(options["speculative_config"])
    vars(config.model_config).update(
        is_hybrid=hybrid, quantization=None, hf_text_config=QWEN3_8B, max_model_len=8192
    )
    config.cache_config = SimpleNamespace(cache_dtype="auto")
    config.parallel_config.tensor_parallel_size = 1
    return config


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("rows", range(1, 9))
def test_graphs_are_captured_for_each_length_that_is_chosen(rows, hybrid):
    """Also where an engine has fewer rows than there are lengths; 0 and the longest come first."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    from nemo_specrl.engine.vllm import v2_lengths, v2_patches

    v2_patches.install()
    config = drafting_config(rows, hybrid=hybrid)
    given = config.additional_config
    before = repr(given)
    v2_patches._set_lengths(config)
    assert repr(given) == before  # another engine may be built with the same options
    longest = config.speculative_config.num_speculative_tokens
    assert longest == (3 if hybrid else 11)
    kept = config.additional_config["spec_rl"]["lengths"]
    assert len(kept) == min(rows, 3 if hybrid else 5) and kept[-1] == longest
    ranges = config.speculative_config.num_speculative_tokens_per_batch_size
    if rows == 1:  # all steps draft as many
        assert ranges is None and kept == [longest]
        return
    lookup = build_dynamic_sd_schedule_lookup(ranges, rows, longest)
    sizes = [1, 2, 4, *range(8, 129, 8)]
    manager = graph_manager(sizes, tuple(lookup[1:]), rows, config.additional_config)
    full = manager._capture_descs[CUDAGraphMode.FULL]
    assert sorted({graph.uniform_token_count - 1 for graph in full}) == kept

    scheduler = SimpleNamespace(vllm_config=config, dynamic_sd_lookup=lookup, running=[])
    v2_lengths.choose_by_rows(scheduler)
    assert scheduler.spec_rl_lengths._lengths == kept
    assert set(scheduler.dynamic_sd_lookup[1:]) == {longest}
    for _ in range(3000):  # nothing is accepted
        scheduler.spec_rl_lengths.observe(longest, 0)
    v2_lengths.renew_table(scheduler)
    assert set(scheduler.dynamic_sd_lookup[1:]) == {0}
