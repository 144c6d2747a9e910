"""Replay from the journal of rollouts that a lost process had made for the present step."""

import contextlib

from nemo_specrl import prompt_key
from nemo_specrl.engine.outputs import rollout_info
from nemo_specrl.trainer.replay_journal import JournaledStore
from tests.support.engines import PROMPT, generate, sampling
from tests.support.stores import restore


def test_rollouts_of_a_lost_step_are_replayed_unchanged(speculative, tmp_path):
    """Rows with and without drafts and stop strings; metrics and log-probs are equal to the bit."""

    def opened(name):
        return JournaledStore(
            tmp_path / name,
            tmp_path / "journal",
            run="test",
            max_bytes=8 * 2**20,
            tokenizer_id="test",
        )

    def made_by(cache, version, fingerprint):
        made = speculative(cache, version=version, lenience=1.0)
        made.fingerprint = fingerprint
        return made

    def step(made):
        params = [sampling(seed=s, stop=["9"] if s % 3 == 0 else None) for s in range(8)]
        return generate(made, rows=8, params=params)

    store = opened("store")
    step(made_by(store, 0, 1))
    store.snapshot(tmp_path / "snapshot")
    store.forget()
    first = made_by(store, 1, 2)
    before = step(first)
    kept = store.get([prompt_key(PROMPT)])
    twice = step(first)  # the same rows again under the same weights: other rollouts
    store.close()
    restore(tmp_path / "snapshot", tmp_path / "store")  # as after a crash
    with contextlib.closing(opened("store")) as store:
        again = made_by(store, 1, 2)
        after = step(again)
        assert store.get([prompt_key(PROMPT)]) == kept
        assert again.metrics.replayed_rows == 8 and first.metrics.replayed_rows == 0
        for old, new in zip(before + twice, after + step(again), strict=True):
            a, b = old.outputs[0], new.outputs[0]
            for name in ("token_ids", "text", "finish_reason", "stop_reason", "cumulative_logprob"):
                assert getattr(a, name) == getattr(b, name), name
            assert [next(iter(p.values())).logprob for p in a.logprobs] == [
                next(iter(p.values())).logprob for p in b.logprobs
            ]
            for name in ("fresh", "drafted", "accepted"):
                assert getattr(rollout_info(a), name) == getattr(rollout_info(b), name)
            for name in ("policy_logprobs", "birth_logprobs", "birth_versions"):
                assert (
                    getattr(rollout_info(a), name).tolist()
                    == getattr(rollout_info(b), name).tolist()
                )
        step(again)
        assert again.metrics.replayed_rows == 0  # each is taken once
    restore(tmp_path / "snapshot", tmp_path / "store")
    with contextlib.closing(opened("store")) as store:
        other = made_by(store, 1, 3)  # the step could not be repeated to the bit
        step(other)
        assert other.metrics.replayed_rows == 0
        assert other.metrics.drafts == 8
        assert other.metrics.accepted_tokens == other.metrics.draft_tokens  # p_new = p_old here
    restore(tmp_path / "snapshot", tmp_path / "store")
    with contextlib.closing(opened("store")) as store:
        unknown = made_by(store, 1, 0)
        step(unknown)
        assert unknown.metrics.replayed_rows == 0
