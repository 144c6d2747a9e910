"""The store against a dict: any order of puts, look-ups, drafts, evictions and reopenings."""

import shutil

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from nemo_specrl.rollout import prompt_key
from tests.support.rollouts import rollout
from tests.support.stores import MIB, bytes_on_disk, contents, open_store

KEPT = 3


class StoreMachine(RuleBasedStateMachine):
    """Two processes' stores of one file. A prompt may be missing only if it was evicted, and only
    the least recently used ones are.
    """

    prompt = st.integers(0, 5)
    which = st.integers(0, 1)
    lives = 0

    def __init__(self, folder):
        super().__init__()
        StoreMachine.lives += 1
        self.path = folder / str(StoreMachine.lives)
        self.stores = [self.opened(), self.opened()]
        self.model = {}  # prompt -> responses, oldest first; prompts by their last put
        self.taken = {}  # prompt, version -> identities
        self.version = self.evicted = 0

    def opened(self):
        return open_store(self.path, MIB, responses_per_prompt=KEPT)

    def sync_model(self):
        """Forget what was evicted since: whole prompts, and none that was put after one that
        stayed.
        """
        found = contents(self.stores[0], range(9))
        gone = [p for p in self.model if p not in found]
        evicted = sum(store.stats().evicted for store in self.stores)
        assert len(gone) <= evicted - self.evicted
        self.evicted = evicted
        for p in gone:
            del self.model[p]
        assert found == self.model
        stats = self.stores[1].stats()
        assert (stats.prompts, stats.responses) == (
            len(found),
            sum(map(len, found.values())),
        )
        assert stats.damaged == stats.restarts == stats.dropped == 0
        assert bytes_on_disk(self.path) <= MIB

    def put_all(self, which, made):
        for p, r in made:
            old = [one for one in self.model.pop(p, []) if one.identity != r.identity]
            self.model[p] = [*old, r][-KEPT:]
        self.stores[which].put([r for _, r in made])
        self.sync_model()

    @rule(which=which, puts=st.lists(st.tuples(prompt, st.sampled_from([0, 9, 900])), max_size=8))
    def put(self, which, puts):
        made = []
        for i, (p, n) in enumerate(puts):
            self.version += 1
            made.append((p, rollout(p, self.version, i, n)))
        self.put_all(which, made)

    @rule(which=which, prompt=prompt)
    def replace(self, which, prompt):
        if prompt in self.model:
            self.version += 1
            identity = self.model[prompt][0].identity
            self.put_all(which, [(prompt, rollout(prompt, self.version, identity=identity))])

    @rule(which=which, prompt=st.integers(6, 8))
    def put_much(self, which, prompt):
        """Others have to go."""
        for i in range(10):
            self.version += 1
            self.put_all(
                which, [(6 + (prompt + i) % 3, rollout(6 + (prompt + i) % 3, self.version, n=7000))]
            )
        assert 6 + (prompt + 9) % 3 in self.model

    @rule(which=which, prompts=st.lists(prompt, unique=True), most=st.integers(1, KEPT))
    def get(self, which, prompts, most):
        found = self.stores[which].get([prompt_key([p]) for p in prompts], most)
        want = {prompt_key([p]): self.model[p][-most:] for p in prompts if p in self.model}
        assert found == want

    @rule(which=which, prompt=prompt, rows=st.integers(1, 2), ahead=st.booleans())
    def take(self, which, prompt, rows, ahead):
        version = self.version + ahead
        drafts = self.stores[which].take_drafts(prompt_key([prompt]), version, rows)
        group = [r for r in self.model.get(prompt, []) if r.policy_version != version]
        newest = [r for r in group if r.policy_version == group[-1].policy_version]
        assert all(draft in newest for draft in drafts) and len(drafts) <= rows
        taken = self.taken.setdefault((prompt, version), set())
        identities = {draft.identity for draft in drafts}
        assert len(identities) == len(drafts) and not identities & taken
        taken |= identities

    @rule(which=which)
    def reopen(self, which):
        self.evicted -= self.stores[which].stats().evicted
        self.stores[which].close()
        self.stores[which] = self.opened()

    @rule(which=which)
    def sync(self, which):
        self.stores[which].sync()

    def teardown(self):
        for store in self.stores:
            store.close()
        shutil.rmtree(self.path)


def test_any_order(tmp_path):
    run_state_machine_as_test(
        lambda: StoreMachine(tmp_path),
        settings=settings(max_examples=10, stateful_step_count=25, deadline=None),
    )
