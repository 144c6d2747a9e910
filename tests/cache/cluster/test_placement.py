"""Placement: balance, minimal movement, no two copies on a node."""

import math

from hypothesis import given
from hypothesis import strategies as st

from nemo_specrl import prompt_key
from nemo_specrl.cache.cluster.placement import place
from nemo_specrl.cache.partitions import partition_of

names = st.lists(st.text("abcdef0123456789-", min_size=1), min_size=1, max_size=12, unique=True)
partitions = st.integers(1, 128)
replicas = st.integers(1, 4)


def moved(before, after):
    """The partitions that nodes have to receive, and these nodes."""
    return [
        (partition, node)
        for partition, (old, new) in enumerate(zip(before, after, strict=True))
        for node in new
        if node not in old
    ]


@given(names, partitions, replicas, st.randoms())
def test_a_table_is_a_function_of_its_arguments(members, count, copies, random):
    table = place(members, count, copies)
    shuffled = random.sample(members, len(members))
    assert place(shuffled, count, copies) == table
    assert len(table) == count
    for nodes in table:
        assert len(nodes) == min(copies, len(members)) == len(set(nodes))
        assert set(nodes) <= set(members)


@given(names, partitions, replicas)
def test_more_copies_or_other_partitions_leave_a_partitions_nodes_alone(members, count, copies):
    table = place(members, count, copies)
    assert [n[:copies] for n in place(members, count, copies + 1)] == list(table)
    assert place(members, count + 5, copies)[:count] == table


@given(names, st.text("xyz", min_size=1), partitions, replicas)
def test_a_node_that_comes_takes_what_it_scores_highest_on_and_nothing_else(
    members, new, count, copies
):
    before, after = place(members, count, copies), place([*members, new], count, copies)
    assert {target for _, target in moved(before, after)} <= {new}
    for old, now in zip(before, after, strict=True):
        assert [n for n in now if n != new] == list(old)[: len(now) - (new in now)]


@given(names.filter(lambda m: len(m) > 1), partitions, replicas)
def test_a_node_that_goes_moves_its_own_copies_and_nothing_else(members, count, copies):
    gone, *rest = members
    before, after = place(members, count, copies), place(rest, count, copies)
    made = moved(before, after)
    assert all(gone in before[partition] for partition, _ in made)
    lost = sum(gone in nodes for nodes in before)
    assert len(made) == (lost if len(rest) >= copies else 0)
    # With a second copy, the node that answers after a loss held the partition before it.
    if copies > 1 and len(rest) >= copies:
        assert all(now[0] in old for old, now in zip(before, after, strict=True))


def test_balance():
    """256 partitions with 2 copies on 8 nodes: each holds 64 on average.

    Loads are binomial with standard deviation 7; beyond 5 of them, over 40 tables of 8 nodes, the
    chance is 2e-4.
    """
    for run in range(40):
        members = [f"node-{run}-{i}" for i in range(8)]
        table = place(members, 256, 2)
        spread = math.sqrt(256 * 2 / 8 * (1 - 2 / 8))
        for node in members:
            assert abs(sum(node in nodes for nodes in table) - 64) < 5 * spread
        first = [sum(nodes[0] == node for nodes in table) for node in members]
        assert max(first) < 32 + 5 * math.sqrt(32)


def test_keys_fall_evenly_into_partitions():
    """10,000 keys into 10 partitions, each 1,000 +- 30; beyond 5 deviations: 6e-6."""
    counts = [0] * 10
    for i in range(10_000):
        counts[partition_of(prompt_key([i]), 10)] += 1
    assert all(850 < c < 1150 for c in counts)
    assert partition_of(bytes(16), 7) == 0
    assert partition_of(b"\xff" * 16, 7) == 6


def test_tables_never_change():
    """Nodes of one job may run another release for a while: the hash is part of the format."""
    assert place(["a", "b", "c"], 4, 2) == (("a", "c"), ("a", "b"), ("b", "a"), ("b", "a"))
