"""The cache of a process, and how it is opened."""

import logging
import subprocess
import threading
import time

import pytest

from nemo_specrl.cache import open_cache
from nemo_specrl.cache.local import WAITING, LocalCache, Threads, store_metrics
from nemo_specrl.config import CacheConfig
from nemo_specrl.monitoring import names as metric
from nemo_specrl.rollout import prompt_key
from tests.support.rollouts import rollout
from tests.support.stores import MIB, PREAMBLE, VOCABULARY, data_file, open_store, run_python

KEY = prompt_key([1])
LONG = 60.0


def test_what_one_process_keeps_another_finds(tmp_path):
    config = CacheConfig(dir=tmp_path, max_bytes_per_node=4 * MIB, responses_per_prompt=2)
    cache = open_cache(config, VOCABULARY, cluster=False)
    made = [rollout(1, index=i) for i in range(3)]
    assert cache.put(made) == 2
    script = f"""{PREAMBLE}
from nemo_specrl.cache import open_cache
from nemo_specrl.config import CacheConfig
cache = open_cache(CacheConfig(dir=sys.argv[1]), VOCABULARY)
key = prompt_key([1])
assert cache.get([key, prompt_key([2])], {LONG}) == {{key: [rollout(1, index=i) for i in (1, 2)]}}
assert cache.take_drafts({{key: 1}}, 3, {LONG}) == {{key: [rollout(1, index=1)]}}
assert cache.put([rollout(2)]) == 1
cache.close()
assert cache.put([rollout(2)]) == 0 and cache.get([key], {LONG}) == {{}}
assert "ray" not in sys.modules
"""
    with run_python(script, tmp_path) as process:
        assert process.wait() == 0
    assert cache.get([prompt_key([2])], LONG) == {prompt_key([2]): [rollout(2)]}
    assert cache.take_drafts({KEY: 5}, 3, LONG) == {KEY: [made[2]]}
    stats = cache.stats()
    assert stats[metric.CACHE_PROMPTS] == 2 and stats[metric.CACHE_RESPONSES] == 3
    assert stats[metric.CACHE_MAX_BYTES] == 4 * MIB and stats[metric.CACHE_ERRORS] == 0
    assert 0 < stats[metric.CACHE_BYTES] <= 4 * MIB and 0 < stats[metric.DISK_USED_FRACTION] <= 1
    cache.close()
    assert store_metrics([]) == {}


def test_failures_are_counted_and_logged_once(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        cache = LocalCache(open_store(tmp_path))
        cache.store.close()
        for _ in range(3):
            assert cache.get([KEY], LONG) == {}
            assert cache.put([rollout(1)]) == 0
            assert cache.take_drafts({KEY: 1}, 1, LONG) == {}
        assert cache.put(["no rollout"]) == 0
        assert cache.stats() == {metric.CACHE_ERRORS: 11.0}
        cache.close()
    assert len(caplog.records) == 1 and "is closed" in caplog.text


def test_a_file_that_is_damaged_meanwhile_raises_nothing(tmp_path):
    with open_store(tmp_path, MIB) as store:
        store.put([rollout(p, n=300) for p in range(200)])
    cache = open_cache(CacheConfig(dir=tmp_path, max_bytes_per_node=MIB), VOCABULARY, cluster=False)
    assert len(cache.get([KEY], LONG)) == 1
    damage = """
import os, sys
with open(sys.argv[1], "r+b") as file:
    file.seek(1024)
    file.write(b"\\xa5" * (os.path.getsize(sys.argv[1]) - 1024))
"""
    with run_python(damage, data_file(tmp_path)) as process:
        assert process.wait() == 0
    for version in range(5):
        cache.get([prompt_key([p]) for p in range(200)], LONG)
        cache.put([rollout(1, version)])
    assert cache.get([KEY], LONG)[KEY][-1] == rollout(1, 4)
    assert cache.stats()[metric.CACHE_ERRORS] >= 3
    cache.close()


def test_a_slow_call_is_given_up_and_those_that_wait_behind_it_are_not_made():
    threads, gate, made = Threads("test", 1), threading.Event(), []

    def slow():
        gate.wait()
        made.append("slow")

    with pytest.raises(TimeoutError):
        threads.run(slow, 0.01)
    for _ in range(WAITING):
        with pytest.raises(TimeoutError):
            threads.run(lambda: made.append("given up"), 0.001)
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="earlier calls"):
        threads.run(lambda: made.append("refused"), LONG)
    assert time.monotonic() - started < LONG / 2
    gate.set()
    while True:
        try:
            threads.run(lambda: made.append("next"), LONG)
            break
        except TimeoutError:  # those that were given up are being passed over
            time.sleep(0.001)
    assert made == ["slow", "next"]
    with pytest.raises(ZeroDivisionError):
        threads.run(lambda: 1 / 0, LONG)


def test_a_late_lookup_is_left_out_and_counted(tmp_path, monkeypatch):
    cache = LocalCache(open_store(tmp_path))
    cache.put([rollout(1)])
    gate = threading.Event()
    get = cache.store.get
    monkeypatch.setattr(cache.store, "get", lambda keys, known: gate.wait() and get(keys))
    assert cache.get([KEY], 0.01) == {}
    gate.set()
    assert cache.get([KEY], LONG) == {KEY: [rollout(1)]}
    assert cache.stats()[metric.CACHE_ERRORS] == 1
    cache.close()


def test_without_a_folder_there_is_no_cache_and_one_line(caplog):
    with caplog.at_level(logging.INFO):
        assert open_cache(CacheConfig(), VOCABULARY) is None
    assert len(caplog.records) == 1


def test_a_folder_that_is_a_file_is_one_line(tmp_path, caplog):
    (tmp_path / "a").write_text("")
    assert open_cache(CacheConfig(dir=tmp_path / "a"), VOCABULARY, cluster=False) is None
    (record,) = caplog.records
    assert "\n" not in record.getMessage() and str(tmp_path / "a") in record.getMessage()


@pytest.mark.parametrize(
    ("code", "more"),
    [
        ("import nemo_specrl.cache", {"numpy", "pydantic", "sqlite3", "ray", "vllm"}),
        ("from nemo_specrl.cache import LocalCache", {"pydantic", "ray", "vllm", "torch"}),
    ],
)
def test_importing_it_is_cheap(code, more):
    script = f"import sys\n{code}\nprint(*sys.modules)"
    with run_python(script, stdout=subprocess.PIPE) as process:
        modules = set(process.communicate()[0].split())
    assert process.returncode == 0 and not modules & more
