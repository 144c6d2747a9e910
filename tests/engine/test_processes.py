"""Engines whose core is a process of its own: ``AsyncLLM``, vLLM's server, and their ends."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from nemo_specrl import RolloutStore
from nemo_specrl.engine.counts import counts_async
from tests.conftest import REPOSITORY, make_async_engine
from tests.support.engines import PROMPT, params
from tests.support.lossless import KEY, check_distribution
from tests.support.processes import Server

VOCABULARY_HASH = "0" * 32
ROUNDS = int(os.environ.get("SPECRL_KILL_ROUNDS", "3"))


def block(folder):
    cache = {"dir": str(folder), "vocabulary": VOCABULARY_HASH, "deadline_ms": 5000}
    return {"cache": cache, "draft": {"max_tokens": 6, "adaptive": False}}


def kept(folder, keys=(KEY,)):
    store = RolloutStore(folder, vocabulary=VOCABULARY_HASH)
    try:
        return [rollout for found in store.get(keys).values() for rollout in found]
    finally:
        store.close()


@pytest.mark.timeout(900)
def test_an_async_engine_drafts_and_keeps_what_is_aborted(random_model, loop, tmp_path):
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    try:
        options = {"additional_config": {"spec_rl": block(tmp_path)}}
        llm = make_async_engine(random_model, loop, **options)
    finally:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

    async def row(name, seed, most=100):
        prompt, made = {"prompt_token_ids": PROMPT}, 0
        async for output in llm.generate(prompt, params(60, seed=seed), name):
            made = len(output.outputs[0].token_ids)
            if made >= most:
                break  # the generator is closed, and the request aborted
        return made

    async def rows():
        lengths = await asyncio.gather(*(row(f"row {i}", i) for i in range(8)))
        first = await counts_async(llm)
        await asyncio.sleep(1)  # the responses are being written
        await asyncio.gather(*(row(f"again {i}", 100 + i) for i in range(4)))
        cut = await asyncio.gather(*(row(f"cut {i}", i, most=5) for i in range(4)))
        await asyncio.sleep(1)
        return lengths, cut, first, await counts_async(llm)

    try:
        lengths, cut, first, second = loop.run_until_complete(rows())
    finally:
        llm.shutdown()
    assert lengths == [60] * 8 and min(cut) >= 5
    assert first["spec_rl/drafting"] == 1 and first["spec_rl/histories_found"] == 0
    assert second["spec_rl/histories_found"] == 2
    assert second["spec_rl/accepted_tokens"] > first["spec_rl/accepted_tokens"] > 0
    assert len(kept(tmp_path)) == 16


@pytest.mark.timeout(1500)
def test_an_unmodified_server_drafts_from_what_it_answered_before_its_restart(
    random_model, llm, tmp_path
):
    """Over HTTP, by several clients at once; the distribution is the policy's."""
    rows, each, seen = 1500, 50, []

    def ask(server, seed, tokens=3, n=each):
        options = {"n": n, "max_tokens": tokens, "seed": seed, "return_token_ids": True}
        answers = server.complete(PROMPT, ignore_eos=True, **options)
        return [answer["token_ids"] for answer in answers]

    for start in range(2):
        with Server(random_model, block(tmp_path / "cache"), tmp_path / f"log {start}") as server:
            with ThreadPoolExecutor(4) as clients:
                begins = range(0, rows * 100, each * 100)
                answers = clients.map(lambda seed, server=server: ask(server, seed), begins)
                seen.append([tokens for answer in answers for tokens in answer])
            metrics = server.metrics()
            assert metrics["accepted_tokens_total"] > 0
        assert server.process.returncode is not None
        assert len(kept(tmp_path / "cache")) == 64  # the newest
    check_distribution(llm, np.array(seen[0] + seen[1]))


SCRIPT = """
import json, sys
from vllm import SamplingParams
from nemo_specrl.engine.counts import counts
from tests.conftest import make_engine

model, block = sys.argv[1], json.loads(sys.argv[2])
llm = make_engine(model, max_num_seqs=16, additional_config={"spec_rl": block})
params = SamplingParams(max_tokens=40, ignore_eos=True, detokenize=False)
engine = llm.llm_engine
for i in range(200):
    prompt = {"prompt_token_ids": [1, *map(int, "12345"), 3 + i % 20]}
    engine.add_request(str(i), prompt, params)
print("begun", flush=True)
while engine.has_unfinished_requests():
    engine.step()
    print(json.dumps(counts(llm)), flush=True)
print("done", flush=True)
"""


@pytest.mark.timeout(300 + 300 * ROUNDS)
def test_what_was_kept_is_there_after_an_engine_was_killed(random_model, tmp_path):
    """At random moments while 200 requests run; the next engine drafts from it."""
    from nemo_specrl import prompt_key

    keys = [prompt_key([1, *map(int, "12345"), 3 + i]) for i in range(20)]
    moments, before = random.Random(7), 0
    for turn in range(ROUNDS):
        engine = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(random_model), json.dumps(block(tmp_path))],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
        )
        last = {}
        for step, line in enumerate(engine.stdout):
            if not line.startswith("{"):
                continue
            last = json.loads(line)
            if last["spec_rl/responses_kept"] > 0 and moments.random() < 0.03:
                engine.send_signal(signal.SIGKILL)
                break
            assert step < 5000
        engine.stdout.close()
        engine.wait()
        assert last["spec_rl/histories_found"] > 0 if turn else True
        stored = kept(tmp_path, keys)
        assert len(stored) >= before + last["spec_rl/responses_kept"]
        assert all(len(rollout) == 40 for rollout in stored)
        before = len(stored)
