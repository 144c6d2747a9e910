"""Which nodes keep a prompt."""

from collections import Counter

from nemo_specrl.cache.cluster.placement import ranking
from nemo_specrl.rollout import prompt_key

NODES = [f"10.0.0.{number}" for number in range(5)]
KEYS = [prompt_key([prompt]) for prompt in range(2000)]


def test_owners_are_spread_evenly_and_only_those_of_a_node_that_leaves_change():
    owners = {key: ranking(key, NODES)[:2] for key in KEYS}
    counts = Counter(node for two in owners.values() for node in two)
    # Each of 5 nodes owns 800 of 2,000 on average, with a deviation of 22.
    assert all(650 < counts[node] < 950 for node in NODES)
    left = NODES[1:]
    for key, two in owners.items():
        now = ranking(key, reversed(left))[:2]
        assert now == two if NODES[0] not in two else set(two) - {NODES[0]} < set(now)
