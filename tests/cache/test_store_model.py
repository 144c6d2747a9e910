"""The rollout store against a dict, in any order of calls, crashes and evictions."""

import itertools
import shutil
from collections import defaultdict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from tests.support.rollouts import rollout
from tests.support.stores import (
    contents,
    open_store,
)


def by_sample(group):
    sample_indices = defaultdict(list)
    for r in group:
        sample_indices[r.sample_index].append(r)
    return dict(sample_indices)


class StoreMachine(RuleBasedStateMachine):
    """Any order of calls, crashes and evictions, against a dict.

    Of what has not been synced, a crash may lose the latest puts. A prompt may be missing where the
    store says that it has evicted as many.
    """

    prompt = st.integers(0, 5)
    large = st.integers(6, 8)
    prompts = range(9)

    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        self.lives = 0
        self.open()
        self.model = {}  # prompt -> sample index -> newest first
        self.since_sync = [{}]
        self.saved = None
        self.version = 0

    def open(self):
        self.path = self.folder / f"store-{self.lives}"
        self.store = open_store(self.path, groups_per_prompt=2)
        self.missed = 0  # evictions that are accounted for

    @staticmethod
    def want(model, prompt):
        return [r for _, group in sorted(model.get(prompt, {}).items()) for r in group[:2]]

    def put_all(self, places):
        made = []
        for prompt, sample_index, n in places:
            self.version += 1
            made.append(rollout(prompt, self.version, sample_index, n))
            self.model = {
                p: {s: list(g) for s, g in sample_indices.items()}
                for p, sample_indices in self.model.items()
            }
            self.model.setdefault(prompt, {}).setdefault(sample_index, []).insert(0, made[-1])
        self.store.put(made)
        self.since_sync.append(self.model)

    @rule(puts=st.lists(st.tuples(prompt, st.integers(0, 2), st.sampled_from([0, 9, 900]))))
    def put(self, puts):
        self.put_all(puts)

    @rule(prompt=large)
    def put_much(self, prompt):
        """A fifth of the cap: others have to go."""
        self.put_all([(prompt, 0, 400_000)])
        assert contents(self.store, [prompt])[prompt][0] == self.model[prompt][0][0]
        self.sync()

    @rule(prompts=st.lists(prompt, unique=True))
    def get(self, prompts):
        found = contents(self.store, prompts)
        for prompt in prompts:
            want, group = self.want(self.model, prompt), found.get(prompt, [])
            if group != want:  # evicted, and maybe put again
                assert all(r in want for r in group)
                self.missed += 1
                self.model = {**self.model, prompt: by_sample(group)}
                self.since_sync = [{**m, prompt: by_sample(group)} for m in self.since_sync]
        assert self.missed <= self.store.stats().evicted_prompts

    @rule()
    def count(self):
        self.get(self.prompts)
        rollouts = [r for prompt in self.prompts for r in self.want(self.model, prompt)]
        assert len(self.store) == len(rollouts)

    @rule()
    def sync(self):
        self.store.sync()
        self.get(self.prompts)
        self.since_sync = [self.model]

    @rule()
    def reopen(self):
        self.sync()
        self.store.close()
        self.open()

    @rule()
    def crash(self):
        """Another process finds what is on disk at this moment."""
        self.lives += 1
        with self.store._mutex:
            shutil.copytree(self.path, self.folder / f"store-{self.lives}")
            lost = self.store.stats().evicted_prompts - self.missed
        self.store.close()
        self.open()
        found = contents(self.store, self.prompts)

        def evicted(model):
            """Prompts of which something is missing; all, where something else is there."""
            wanted = {p: self.want(model, p) for p in self.prompts}
            if any(r not in wanted[p] for p, group in found.items() for r in group):
                return self.prompts
            return [p for p in self.prompts if found.get(p, []) != wanted[p]]

        assert min(len(evicted(model)) for model in self.since_sync) <= lost
        self.model = {p: by_sample(group) for p, group in found.items()}
        self.since_sync = [self.model]

    @rule()
    def snapshot(self):
        self.sync()
        self.store.snapshot(self.folder / "snapshot")
        self.saved = self.model

    @rule()
    def restore(self):
        if self.saved is not None:
            self.get(self.prompts)  # notices what was evicted until now
            assert self.store.restore(self.folder / "snapshot")[1] == []
            self.model = self.saved
            self.since_sync = [self.model]

    def teardown(self):
        self.get(self.prompts)
        self.store.close()


def test_any_order_of_calls_agrees_with_a_dict(tmp_path):
    numbers = itertools.count()
    run_state_machine_as_test(
        lambda: StoreMachine(tmp_path / str(next(numbers))),
        settings=settings(
            derandomize=True, max_examples=60, stateful_step_count=40, deadline=None, database=None
        ),
    )
