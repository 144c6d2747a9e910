"""The rules by which nodes become readers and writers of partitions."""

from nemo_specrl.cache.cluster.membership import CopyTask, Health, Membership, Routing
from nemo_specrl.cache.cluster.placement import place


def settled(membership):
    """Have all copies made; the routings on the way."""
    seen = [membership.plan()]
    for _ in range(10):
        for copy in membership.acknowledged():
            membership.copied(copy)
        if not membership.advance():
            break
        seen.append(membership.routing)
    return seen


def test_nodes_that_start_empty_read_and_write_where_they_are_placed():
    membership = Membership(8, 2, epoch=100)
    for name in "abc":
        membership.join(name, [])
    assert membership.changed
    [routing] = settled(membership)
    assert routing == Routing(101, place("abc", 8, 2), place("abc", 8, 2))
    assert not membership.changed and membership.health == Health(3, 0, 0)


def test_a_node_that_joins_is_written_to_before_it_is_read_and_one_that_goes_until_it_is_not():
    membership = Membership(8, 2)
    membership.join("a", [])
    membership.join("b", [])
    settled(membership)
    membership.join("c", [])
    first, second, third = settled(membership)
    old, new = place("ab", 8, 2), place("abc", 8, 2)
    assert (first.readers, second.readers, third.readers) == (old, new, new)
    for partition in range(8):
        both = {*old[partition], *new[partition]}
        assert set(first.writers[partition]) == set(second.writers[partition]) == both
    assert third.writers == new


def test_when_a_node_dies_the_other_copy_serves_and_is_copied():
    membership = Membership(8, 2)
    for name in "abc":
        membership.join(name, [])
    settled(membership)
    membership.leave("a")
    assert membership.health.missing == sum("a" in nodes for nodes in place("abc", 8, 2))
    routing = membership.plan()
    left = tuple(tuple(n for n in nodes if n != "a") for nodes in place("abc", 8, 2))
    assert routing.readers == left
    copies = membership.acknowledged()
    assert copies and all({c.source, c.target} == {"b", "c"} for c in copies)
    for copy in copies:
        membership.copied(copy)
    assert membership.advance()
    assert membership.routing.readers == place("bc", 8, 2)
    assert membership.health == Health(2, 0, 0)


def test_nothing_is_copied_before_all_members_know_the_routing():
    membership = Membership(4, 2)
    membership.join("a", [])
    membership.join("b", [])
    membership.plan()
    assert not membership.advance()
    membership.acknowledged()
    assert not membership.advance()  # nothing to do
    membership.leave("b")
    assert not membership.advance()  # there is, but it asks for a plan


def test_a_node_that_missed_a_write_is_no_reader_until_it_has_it():
    membership = Membership(4, 2)
    membership.join("a", [])
    membership.join("b", [])
    settled(membership)
    membership.missed_write("b")
    routing = membership.plan()
    assert routing.readers == (("a",),) * 4
    assert all(set(nodes) == {"a", "b"} for nodes in routing.writers)
    assert membership.acknowledged() == [CopyTask(p, "b", "a") for p in range(4)]
    membership.missed_write("b")  # once more: what was copied so far does not do
    for partition in range(4):
        membership.copied(CopyTask(partition, "b", "a"))
    assert not membership.advance()
    settled(membership)
    assert membership.routing.readers == place("ab", 4, 2)


def test_a_disk_that_comes_back_brings_what_nobody_else_has():
    membership = Membership(4, 2)
    for name in "ab":
        membership.join(name, [])
    settled(membership)
    membership.leave("a")
    membership.leave("b")
    membership.join("c", [])
    assert settled(membership)[-1].readers == (("c",),) * 4  # cold
    membership.join("a", [0, 2])
    membership.plan()
    copies = set(membership.acknowledged())
    assert copies == {CopyTask(p, "a", "c") for p in range(4)} | {
        CopyTask(p, "c", "a") for p in (0, 2)
    }


def test_disks_of_an_earlier_run_serve_what_they_have():
    membership = Membership(8, 1)
    membership.join("a", range(8))
    membership.join("b", [])
    first, *_, last = settled(membership)
    assert first.readers == (("a",),) * 8
    assert last.readers == place("ab", 8, 1) and ("b",) in last.readers


def test_nodes_with_engines_come_first():
    membership = Membership(16, 2)
    for name in "abcd":
        membership.join(name, [])
    settled(membership)
    membership.set_preferred_nodes(["a", "b"])
    assert all(set(nodes) == {"a", "b"} for nodes in settled(membership)[-1].readers)
    membership.set_preferred_nodes(["c"])
    assert all(nodes[0] == "c" and len(nodes) == 2 for nodes in settled(membership)[-1].readers)
    membership.set_preferred_nodes(["c"])
    assert not membership.changed
    assert place("abcd", 16, 2, first=["gone"]) == place("abcd", 16, 2)
