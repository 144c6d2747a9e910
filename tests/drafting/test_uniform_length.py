"""How many tokens all rows of a step draft: the costs of steps, and what is chosen by them."""

import dataclasses
import itertools
import json
import statistics
from types import SimpleNamespace

import numpy as np
import pytest

from nemo_specrl.drafting.uniform_length import (
    BANDWIDTH_SHARE,
    GPUS,
    LEAST_GAIN,
    LENGTHS,
    ROW_SECONDS,
    SAMPLER_PASSES,
    UniformLengths,
    expected_tokens,
)
from nemo_specrl.engine.step_costs import costs_of
from tests.conftest import REPOSITORY

QWEN3_8B = SimpleNamespace(
    hidden_size=4096,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151_936,
    intermediate_size=12_288,
)
QWEN3_30B_A3B = SimpleNamespace(
    hidden_size=2048,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    vocab_size=151_936,
    intermediate_size=6144,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
)
NEMOTRON_3_NANO = SimpleNamespace(
    hidden_size=2688,
    num_attention_heads=32,
    num_key_value_heads=2,
    head_dim=128,
    layers_block_type=["mamba", "moe"] * 23 + ["attention"] * 6,
    vocab_size=131_072,
    intermediate_size=1856,
    n_routed_experts=128,
    num_experts_per_tok=6,
    moe_intermediate_size=1856,
    mlp_hidden_act="relu2",
    mamba_num_heads=64,
    mamba_head_dim=64,
    ssm_state_size=128,
)
BANDWIDTH = BANDWIDTH_SHARE * GPUS["H100"].bandwidth
COSTS = costs_of(QWEN3_8B, GPUS["H100"], ranks=1, weight_bytes=2, kv_bytes=2)


def chosen(chance, rows=512, costs=COSTS, drafts=4000, context=3000):
    """The table after drafts whose tokens are each accepted with this chance."""
    rng = np.random.default_rng(0)
    lengths = UniformLengths(costs, LENGTHS, rows, max_drafted=883)
    for _ in range(drafts):
        lengths.observe(5, next((i for i in range(5) if rng.random() > chance), 5))
    return lengths, lengths.table(context)


def measured_steps():
    """Rows, length and seconds of steps of Qwen3-8B that were measured on an H100."""
    data = json.loads((REPOSITORY / "benchmarks" / "results" / "gpu_h100.json").read_text())
    repetitions = data["points"]["steps"]["repetitions"]
    for name in repetitions[0]:
        rows, length = name.split("/")
        if length != "plain":
            seconds = statistics.mean(found[name]["seconds"] for found in repetitions)
            yield int(rows), int(length), seconds


def test_a_step_of_8b_on_an_h100():
    """As it was measured, with 192 tokens of a row on average; its weights are 15.1 GB."""
    assert COSTS.weight_bytes == pytest.approx(15.1e9, rel=0.01)
    assert COSTS.kv_bytes == 147_456
    steps = list(measured_steps())
    assert len(steps) == 27
    for rows, length, seconds in steps:
        assert COSTS.seconds(rows, length, 192) == pytest.approx(seconds, rel=0.03), (rows, length)


def test_drafts_cost_what_they_were_measured_to_cost():
    """As ratios to a step without drafts, which decide; within less than what they have to gain."""
    plain = {rows: seconds for rows, length, seconds in measured_steps() if length == 0}
    for rows, length, seconds in measured_steps():
        held = COSTS.seconds(rows, length, 192) / COSTS.seconds(rows, 0, 192)
        assert held == pytest.approx(seconds / plain[rows], rel=0.025), (rows, length)
        assert held > seconds / plain[rows] / LEAST_GAIN, (rows, length)


def test_many_rows_find_out_whether_drafts_pay():
    """Of 256, within four steps; before that they draft, or they would never know."""
    for chance, pays in ((0.2, False), (0.9, True)):
        rng = np.random.default_rng(1)
        lengths = UniformLengths(COSTS, LENGTHS, 256, max_drafted=883)
        for _ in range(4):
            drafted = lengths.table(192)[256]
            for _ in range(256 if drafted else 0):
                accepted = next((i for i in range(drafted) if rng.random() > chance), drafted)
                lengths.observe(drafted, accepted)
        assert (lengths.table(192)[256] > 0) == pays, chance


def test_a_mixture_reads_the_experts_that_its_tokens_choose():
    costs = costs_of(QWEN3_30B_A3B, GPUS["H100"], ranks=1, weight_bytes=2, kv_bytes=2)
    whole = costs.weight_bytes + costs.expert_bytes
    assert whole == pytest.approx(60e9, rel=0.05)
    assert costs.token_flops == pytest.approx(2 * 3.0e9, rel=0.1)
    one, two, many = costs.seconds([1, 2, 256], 0, 0) * BANDWIDTH
    assert one < 0.2 * many and one < two < 1.9 * one


def test_a_state_is_written_for_each_drafted_token():
    """Nemotron 3 Nano, 31.6B parameters: 23 layers with a state, and 6 with a KV cache."""
    costs = costs_of(NEMOTRON_3_NANO, GPUS["H100"], ranks=1, weight_bytes=2, kv_bytes=2)
    assert costs.weight_bytes + costs.expert_bytes == pytest.approx(63.2e9, rel=0.1)
    assert costs.kv_bytes == 2 * 6 * 2 * 128 * 2
    assert costs.state_bytes == pytest.approx(48e6, rel=0.01)
    changed = vars(NEMOTRON_3_NANO) | {"mamba_num_heads": 0}
    without = costs_of(SimpleNamespace(**changed), GPUS["H100"], 1, 2, 2)
    written = costs.seconds(64, 3, 2000) - without.seconds(64, 3, 2000)
    assert written == pytest.approx(64 * (1 + 4) * 48e6 / BANDWIDTH, rel=0.01)


def test_tensor_parallel_ranks_share_the_work():
    two = costs_of(QWEN3_8B, GPUS["H100"], ranks=2, weight_bytes=2, kv_bytes=2)
    assert two.weight_bytes == COSTS.weight_bytes / 2
    sixteen = costs_of(QWEN3_8B, GPUS["H100"], ranks=16, weight_bytes=2, kv_bytes=2)
    assert sixteen.kv_bytes == COSTS.kv_bytes / 8  # each rank has one head of keys and values


def test_each_tensor_parallel_rank_samples_from_the_whole_vocabulary():
    """The matrix product of the output layer is shared; the logits are gathered on each rank."""
    eight = costs_of(QWEN3_8B, GPUS["H100"], ranks=8, weight_bytes=2, kv_bytes=2)
    changed = SimpleNamespace(**vars(QWEN3_8B) | {"vocab_size": 32})
    small = costs_of(changed, GPUS["H100"], ranks=8, weight_bytes=2, kv_bytes=2)
    entries = 151_936 - 32
    assert eight.weight_bytes - small.weight_bytes == 4096 * entries * 2 / 8
    assert eight.token_flops - small.token_flops == 4096 * entries * 2 / 8
    work = {"weight_bytes": 0.0, "token_flops": 0.0}  # without that of the output layer
    seconds = [dataclasses.replace(c, **work).seconds(256, 3, 3000) for c in (small, eight)]
    logits = 256 * (1 + 3) * entries * 4  # bytes
    assert seconds[1] - seconds[0] == pytest.approx(SAMPLER_PASSES * logits / BANDWIDTH)


def test_a_configuration_of_unknown_names_is_no_error():
    unknown = SimpleNamespace(num_key_value_heads=[8, 8, 4], intermediate_size=None)
    costs = costs_of(unknown, GPUS["H100"], ranks=1, weight_bytes=2, kv_bytes=2)
    assert 5e9 < costs.weight_bytes < 40e9 and 0 < costs.kv_bytes < 1e6


def test_expected_tokens():
    assert expected_tokens([0.5, 0.5]).tolist() == [1, 1.5, 1.75]


def test_few_rows_draft_long_and_many_draft_short():
    _, table = chosen(0.5)
    assert table[1] == 11 and table[512] in (0, 1)
    lengths = [table[n] for n in (1, 8, 32, 64, 128, 256, 512)]
    assert all(before >= after for before, after in itertools.pairwise(lengths))
    assert set(table) <= set(LENGTHS)


def test_surer_policies_draft_longer():
    rows = 128
    assert chosen(0.3)[1][rows] <= chosen(0.6)[1][rows] <= chosen(0.95)[1][rows] == 5


def test_no_more_is_drafted_than_there_is_memory_for():
    _, table = chosen(0.99)
    assert all(rows * length <= 883 for rows, length in enumerate(table))
    assert [table[n] for n in (80, 81, 126, 127, 441, 442)] == [11, 7, 7, 5, 2, 1]


def test_where_nothing_is_accepted_nothing_is_drafted():
    lengths, table = chosen(0.0, drafts=20_000)
    assert set(table) == {0}
    for _ in range(20):
        lengths.begin_batch()
    assert lengths.table(3000)[1] > 0  # what was seen long ago does not count


def test_a_long_batch_does_not_outweigh_what_comes_behind_it():
    """100,000 drafts that are accepted, and then 20,000 that are not, without a batch between."""
    lengths = UniformLengths(COSTS, LENGTHS, 256, max_drafted=883)
    for drafts, accepted in ((100_000, 5), (20_000, 0)):
        for i in range(drafts):
            lengths.observe(5, accepted)
            if i % 512 == 0:
                lengths.table(3000)
    assert lengths.chances()[0] < 0.5


@pytest.mark.parametrize(("before", "behind"), [(0, 1), (1, 0)])
def test_a_sudden_change_is_seen_at_once(before, behind):
    """By one step of 64 rows, after thousands of drafts."""
    lengths = UniformLengths(COSTS, LENGTHS, 64, max_drafted=883)
    for _ in range(20):
        for _ in range(512):
            lengths.observe(1, before)
        lengths.table(3000)
    for _ in range(64):
        lengths.observe(1, behind)
    lengths.table(3000)
    assert abs(lengths.chances()[0] - behind) < 0.2


def test_positions_that_no_draft_reached_are_as_likely_as_those_before():
    lengths = UniformLengths(COSTS, LENGTHS, 8, max_drafted=883)
    for _ in range(5000):
        lengths.observe(2, 2)
    assert lengths.chances()[:2].min() > 0.9 and lengths.chances()[10] > 0.9
    lengths.observe(0, 0)
    lengths.observe(99, 5)  # of another configuration


def test_a_chosen_length_is_the_best_of_all():
    lengths, table = chosen(0.6)
    tokens = expected_tokens(lengths.chances())
    for rows in (1, 16, 64, 256):
        gains = {k: tokens[k] / COSTS.seconds(rows, k, 3000) for k in LENGTHS}
        assert gains[table[rows]] >= max(gains.values()) / LEAST_GAIN


def test_layers_that_were_timed_take_the_place_of_what_is_computed():
    """Timed where they take what is computed, a step costs the same; where twice that, more."""
    layers = dataclasses.replace(
        COSTS,
        weight_bytes=COSTS.weight_bytes - COSTS.head_bytes,
        token_flops=COSTS.token_flops - COSTS.head_flops,
        vocabulary=0,
    )
    sizes = [*range(1, 65), *range(80, 1537, 16)]
    seconds = (layers.seconds(sizes, 0, 0) - np.array(sizes) * ROW_SECONDS).tolist()
    timed = dataclasses.replace(COSTS, timed=list(zip(sizes, seconds, strict=True)))
    slow = dataclasses.replace(COSTS, timed=[(n, 2 * s) for n, s in timed.timed])
    for rows, length, _ in measured_steps():
        for context in (0, 3000):
            computed = COSTS.seconds(rows, length, context)
            assert timed.seconds(rows, length, context) == pytest.approx(computed, rel=0.05)
    assert slow.seconds(8, 0, 0) > 1.8 * timed.seconds(8, 0, 0)
    more = slow.seconds(8, 0, 3000) - slow.seconds(8, 0, 0)
    assert more == pytest.approx(timed.seconds(8, 0, 3000) - timed.seconds(8, 0, 0))
    beyond, last = timed.seconds([512, 256], [5, 5], 0)
    assert beyond == pytest.approx(2 * last, rel=0.1)  # of 3,072 and 1,536 tokens
    noisy = dataclasses.replace(COSTS, timed=[(1, 2e-3), (8, 1e-3), (16, 3e-3)])
    assert (np.diff(noisy.seconds(np.arange(1, 17), 0, 0)) > 0).all()
