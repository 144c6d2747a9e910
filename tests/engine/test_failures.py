"""A cache that fails costs drafts: no token, no wait beyond the deadline, no error."""

import shutil
import threading
import time

import pytest

from nemo_specrl.engine import resident
from nemo_specrl.engine.refit import refit
from tests.conftest import weights_of
from tests.support.engines import PROMPT, params
from tests.support.lossless import KEY, rollouts

ALMOST_GREEDY = {"top_k": 1}  # sampled, and therefore drafted for; each token is the likeliest
PROMPTS = [[*PROMPT, 3 + i % 20, 3 + i // 20] for i in range(64)]


@pytest.fixture(scope="module")
def expected(engine, random_model):
    """The tokens of an engine without the plug-in."""
    refit(engine, weights_of(random_model))  # other files leave other weights in it
    plain = params(24, temperature=0.0)
    outputs = engine.generate([{"prompt_token_ids": p} for p in PROMPTS], plain, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def check(drafting, expected):
    for seed in range(2):
        made = drafting.tokens(PROMPTS, params(24, seed=seed, **ALMOST_GREEDY))
        assert made == expected
        counts = drafting.counts()  # when what was made is written, if it can be
    return counts


def test_a_whole_cache(drafting, expected):
    counts = check(drafting, expected)
    assert counts["histories_found"] == counts["responses_kept"] / 2 == 64
    assert counts["accepted_tokens"] > 500


def test_a_folder_that_cannot_be_written(drafting, expected, caplog):
    drafting.folder.parent.joinpath("file").write_text("no folder")
    drafting.begin_anew(dir=str(drafting.folder.parent / "file"))
    counts = check(drafting, expected)
    assert counts["responses_kept"] == 0 and counts["responses_dropped"] == 128
    assert caplog.text.count("nothing is kept") == 1
    assert counts["drafted_tokens"] > 0  # from this engine's own rows


def test_a_damaged_store(drafting, expected):
    drafting.remember(rollouts([[5, 6, 7]]))
    [store] = drafting.folder.rglob("rollouts.sqlite")
    store.write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 64)
    drafting.begin_anew()
    check(drafting, expected)


def test_a_folder_that_vanishes_under_load(drafting, expected):
    drafting.tokens(PROMPTS[:4], params(24, **ALMOST_GREEDY))
    shutil.rmtree(drafting.folder)
    check(drafting, expected)


class Slow:
    """Stands in for a disk that takes 30 s: what begins there waits until it is let go."""

    def __init__(self):
        self.let_go = threading.Event()

    def get(self, keys, known):
        self.let_go.wait(30)
        return {KEY: rollouts([[5, 6, 7, 8]])}

    def put(self, rollouts):
        self.let_go.wait(30)
        return len(rollouts)

    def close(self):
        pass


def test_a_slow_cache_is_not_waited_for_again_and_again(drafting, expected, monkeypatch, caplog):
    slow = Slow()
    monkeypatch.setattr("nemo_specrl.cache.open_cache", lambda *args, **options: slow)
    monkeypatch.setattr(resident, "FLUSH_SECONDS", 0.1)
    drafting.begin_anew(deadline_ms=50)
    waited, wait = [], resident.Resident._await

    def timed(self, lookup):
        began = time.monotonic()
        wait(self, lookup)
        waited.append(time.monotonic() - began >= 0.05)

    monkeypatch.setattr(resident.Resident, "_await", timed)
    made = drafting.tokens(PROMPTS, params(24, **ALMOST_GREEDY))
    assert made == expected
    assert sum(waited) == resident.LATE_IN_A_ROW and len(waited) == 64
    counts = drafting.scheduler.resident.counts()
    assert counts["spec_rl/histories_late"] == 64
    assert caplog.text.count("the rollout cache is slow") == 1
    # What was late comes with the prompt's next request.
    lookup = drafting.scheduler.resident._cache.look_up(KEY, ())
    drafting.tokens(PROMPT, params(4))
    slow.let_go.set()
    assert lookup.done.wait(10) and drafting.scheduler.resident.flush(10)
    drafting.tokens(PROMPT, params(4))
    counts = drafting.counts()
    assert counts["histories_found"] == 1 and counts["responses_kept"] == 66


def test_an_error_of_ours_raises_into_nothing(drafting, expected, monkeypatch, caplog):
    def broken(*args):
        raise RuntimeError("broken")

    monkeypatch.setattr(resident, "prompt_key", broken)
    counts = check(drafting, expected)
    assert counts["engine_failures"] == 128
    assert caplog.text.count("a request decodes plainly: its arrival failed") == 1
    monkeypatch.undo()
    monkeypatch.setattr(resident, "Rollout", broken)
    counts = check(drafting, expected)
    assert counts["engine_failures"] == 256
    assert caplog.text.count("a request decodes plainly: its end failed") == 1


def test_what_does_not_fit_into_the_writers_queue_is_dropped_and_counted(
    drafting, expected, monkeypatch
):
    slow = Slow()
    monkeypatch.setattr("nemo_specrl.cache.open_cache", lambda *args, **options: slow)
    monkeypatch.setattr(resident, "WAITING_BYTES", 10 * 4 * 24)
    drafting.begin_anew(deadline_ms=1)
    made = drafting.tokens(PROMPTS, params(24, **ALMOST_GREEDY))
    assert made == expected
    slow.let_go.set()
    counts = drafting.counts()
    assert counts["responses_kept"] == 10 and counts["responses_dropped"] == 54


def test_responses_with_unknown_tokens_are_refused(drafting):
    """As a store of another model would have, if its name were wrong."""
    drafting.remember(rollouts([[5, 6, 99999], [5, 6, 7]]))
    drafting.tokens(PROMPT, params(10))
    counts = drafting.counts()
    assert counts["histories_refused"] == 1 and counts["history_bytes"] == 12
