"""Failures of the cache, damaged and foreign drafts, interrupts: they cost speed, no rollout."""

import numpy as np
import pytest

from nemo_specrl import Finish, RolloutStore
from nemo_specrl.engine.outputs import rollout_info
from nemo_specrl.trainer.data.toy_tasks import EOS, encode
from tests.conftest import DictCache
from tests.support.engines import NEVER, PROMPT, STRICT, SURE, draft, generate, only, sampling


class BrokenCache(DictCache):
    on = "nothing yet"

    def get(self, keys):
        if self.on == "get":
            raise OSError("the disk is gone")
        return super().get(keys)

    def put(self, rollouts):
        if self.on == "put":
            raise OSError("the disk is gone")
        super().put(rollouts)


@pytest.mark.parametrize("on", ["get", "put"])
def test_a_cache_that_fails_costs_speed_alone(speculative, llm, caplog, on):
    cache = BrokenCache()
    cache.on = on
    made = speculative(cache, version=1)
    outputs = generate(made, rows=3, params=[sampling(seed=i) for i in range(3)])
    plain = llm.generate([PROMPT] * 3, [sampling(seed=i) for i in range(3)], use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [
        list(o.outputs[0].token_ids) for o in plain
    ]
    # One error per put; rows that finish together share one.
    assert 1 <= made.metrics.cache_errors <= (1 if on == "get" else 3)
    messages = [r.message for r in caplog.records if "rollout cache failed" in r.message]
    assert len(messages) == 1


def test_a_draft_of_foreign_tokens_is_decoded_plainly(speculative):
    made = speculative(DictCache([draft([5, 31_999, 6])]), version=1)
    assert rollout_info(only(generate(made))).fresh
    assert made.metrics.refused_drafts == 1


class LosingEngine:
    """Damages the engine's verifications as vLLM 0.20 does, on whichever version runs here."""

    def __init__(self, llm, monkeypatch, damage):
        self.step, self.damage, self.verified = llm.llm_engine.step, damage, 0
        monkeypatch.setattr(llm.llm_engine, "step", self.damaged_step)

    def damaged_step(self):
        outputs = self.step()
        for output in outputs:
            if output.finished and output.prompt_logprobs is not None:
                output.prompt_logprobs = self.damage(output.prompt_logprobs)
                self.verified += 1
        return outputs


def cut_short(logprobs):
    return logprobs[: len(logprobs) - 1]


def uninitialised(logprobs):
    logprobs.token_ids[: len(logprobs) // 2 + 4] = [0] * (len(logprobs) // 2 + 4)
    return logprobs


def without_entries(logprobs):
    return type(logprobs)(start_indices=[0] * len(logprobs), end_indices=[0] * len(logprobs))


@pytest.mark.parametrize("damage", [lambda _: None, cut_short, uninitialised, without_entries])
def test_a_verification_without_the_drafts_logprobs_is_refused(
    speculative, llm, monkeypatch, damage
):
    """The rows are decoded as without a draft; equal drafts share one verification."""
    tokens = encode("12+34=46;#46")
    params = [sampling(seed=i) for i in range(3)]
    plain = [list(o.outputs[0].token_ids) for o in generate(speculative(), rows=3, params=params)]
    made = speculative(DictCache([draft(tokens, sample_index=s) for s in range(3)]), version=1)
    engine = LosingEngine(llm, monkeypatch, damage)
    outputs = generate(made, rows=3, params=params)
    assert engine.verified == 1
    assert [list(o.outputs[0].token_ids) for o in outputs] == plain
    assert made.metrics.refused_drafts == 3 and made.metrics.drafts == 0
    assert all(rollout_info(o.outputs[0]).fresh for o in outputs)
    assert all(r.fresh and not r.reused.any() for r in made.cache.all())


def test_a_damaged_record_is_decoded_plainly_and_counted(speculative, tmp_path):
    """A real store, one byte of one rollout's tokens flipped on disk; its sibling is reused."""
    options = {"max_bytes": 2**21, "tokenizer_id": "test"}
    tokens = [*encode("12+34=46;#46"), EOS]
    with RolloutStore(tmp_path / "store", **options) as store:
        store.put([draft(tokens), draft([*encode("99"), EOS], sample_index=1)])
    path = tmp_path / "store" / "rollouts.sqlite"
    data = bytearray(path.read_bytes())
    place = data.index(np.asarray(tokens, dtype="<u2").tobytes())
    data[place] ^= 1
    path.write_bytes(data)
    with RolloutStore(tmp_path / "store", **options) as store:
        made = speculative(store, version=1)
        damaged, sound = generate(made, rows=2, params=[sampling(seed=1), sampling(seed=2)])
        assert rollout_info(damaged.outputs[0]).fresh
        assert sound.outputs[0].text == "99"
        assert store.stats().corrupt_records == 1
        assert made.metrics.cache_errors == 0
        assert len(store) == 2  # the new rollout has replaced the damaged record


def test_an_interrupt_leaves_an_engine_that_can_be_used_again(speculative, llm):
    made = speculative(
        DictCache([draft(encode("12"), sample_index=s) for s in range(4)]), version=1
    )

    class Interrupt:
        def __init__(self, **_):
            pass

        def update(self, _):
            raise KeyboardInterrupt

        def close(self):
            pass

    with pytest.raises(KeyboardInterrupt):
        made.generate([PROMPT] * 200, sampling(), use_tqdm=Interrupt)
    assert not llm.llm_engine.has_unfinished_requests()
    assert len(generate(made, rows=3)) == 3


def interrupt_after(llm, monkeypatch, steps):
    step = llm.llm_engine.step
    left = iter(range(steps))

    def stepped():
        if next(left, None) is None:
            monkeypatch.setattr(llm.llm_engine, "step", step)
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.llm_engine, "step", stepped)


@pytest.mark.parametrize("stop", [None, ["99"]], ids=["", "stop string"])
def test_what_an_interrupt_finds_under_way_is_kept_and_continued(
    speculative, llm, monkeypatch, stop
):
    """A draft accepted in part, a row without one, and one that was still being verified."""
    old = draft([*encode("12"), *encode("7777")], [SURE, SURE, *[NEVER] * 4], sample_index=0)
    cache = DictCache([old])
    params = sampling(ignore_eos=True, max_tokens=60, stop=stop)
    made = speculative(cache, version=1, lenience=STRICT)
    made.fingerprint = 5
    interrupt_after(llm, monkeypatch, 12)
    with pytest.raises(KeyboardInterrupt):
        generate(made, rows=2, params=params)
    by_sample = {r.sample_index: r for r in cache.all()}
    assert set(by_sample) == {0, 1}
    for partial in by_sample.values():
        assert partial.finish is Finish.PARTIAL
        assert (partial.policy_version, partial.fingerprint, partial.occurrence) == (
            *(1, 5),
            1 - partial.sample_index,
        )
        assert 5 < len(partial) < 60
    assert by_sample[0].tokens[:2].tolist() == old.tokens[:2].tolist()
    assert by_sample[0].birth_versions.tolist() == [0, 0] + [1] * (len(by_sample[0]) - 2)
    assert by_sample[0].birth_logprobs[:2].tolist() == [SURE, SURE]
    assert set(by_sample[1].birth_versions.tolist()) == {1}
    assert [by_sample[s].fresh for s in (0, 1)] == [False, True]
    # The same weights continue the rows, and so do the next ones.
    for version in (1, 2):
        again = speculative(DictCache(by_sample.values()), version=version, lenience=1e6)
        again.fingerprint = 4 + version
        outputs = generate(again, rows=2, params=params)
        for output, partial in zip(outputs, (by_sample[0], by_sample[1]), strict=True):
            n = len(partial)
            assert list(output.outputs[0].token_ids[:n]) == partial.tokens.tolist()
            assert rollout_info(output.outputs[0]).accepted == n
        finished = {r.sample_index: r for r in again.cache.all()}
        assert [finished[s].occurrence for s in (0, 1)] == [1, 0]
        # A row that one policy decoded from its first token to its last is fresh.
        assert [finished[s].fresh for s in (0, 1)] == [False, version == 1]
        assert Finish.PARTIAL not in {r.finish for r in finished.values()}
