"""One shard as a plain object; real Ray nodes have their own tests."""

import numpy as np
import pytest

from nemo_specrl.cache import snapshot
from nemo_specrl.cache.cluster.placement import ranking
from nemo_specrl.cache.cluster.shard import Shard
from nemo_specrl.rollout import Finish, Rollout, prompt_key

VOCABULARY = "0" * 32
NODES = [f"10.0.0.{number}" for number in range(5)]
KEYS = [prompt_key([prompt]) for prompt in range(100)]


@pytest.fixture
def shard(tmp_path):
    shard = Shard({"dir": str(tmp_path / "a"), "max_bytes_per_node": 2**24}, VOCABULARY, NODES[0])
    yield shard
    shard.close()


def rollout(key, version=0, tokens=(1, 2)):
    return Rollout(key, np.array(tokens), Finish.STOP, version, np.zeros(len(tokens), np.float32))


def test_drafts_that_are_used_up_are_told_from_a_prompt_that_is_not_there(shard):
    shard.put([rollout(KEYS[0], 1), rollout(KEYS[0], 1)])
    wanted = {KEYS[0]: 1, KEYS[1]: 1}
    first, second = (shard.take_drafts(wanted, 2)[KEYS[0]] for _ in range(2))
    assert len(first) == len(second) == 1 and first != second
    assert shard.take_drafts(wanted, 2) == {KEYS[0]: []}


def test_a_copy_has_the_prompts_of_which_the_shard_is_the_first_owner(shard, tmp_path):
    shard.put([rollout(key, tokens=[n]) for n, key in enumerate(KEYS)])
    mine = {key for key in KEYS if ranking(key, NODES)[0] == NODES[0]}
    file = tmp_path / "copy"
    assert shard.snapshot(str(file), NODES, None) == len(mine) > 0
    assert {key for key, _ in snapshot.read(file)} == mine
    assert shard.snapshot(str(file), NODES, 50) == len(mine & set(KEYS[50:100]))


def test_what_is_added_as_older_does_not_replace_what_is_there(shard):
    old, new = rollout(KEYS[0], 1), rollout(KEYS[0], 2)
    shard.put([old])
    shard.snapshot(str(shard._store.path / "copy"), NODES[:1], None)
    groups = list(snapshot.read(shard._store.path / "copy"))
    shard.put([new])
    shard.add_older(groups)
    assert shard.get([KEYS[0]]) == {KEYS[0]: [old, new]}
