"""Routed experts of reused rows, as NeMo-RL's router replay needs them, in vLLM's V1 model runner.

On a CPU vLLM's layers choose experts and apply them in one go, past the hook by which it takes down
what was chosen. The engines here have them tell that hook (``tell_choices``); all behind it is
vLLM's: the slots of KV blocks, the scheduler, the outputs. Later versions return routes from the V2
model runner alone (``drafters/v2/test_mixture.py``).
"""

import asyncio
import contextlib
import shutil

import pytest
from safetensors.torch import save_file

from nemo_specrl import Finish, SpeculativeLLM
from nemo_specrl.engine.async_engine import AsyncSpeculativeLLM
from nemo_specrl.engine.early_end import EarlyEnd
from nemo_specrl.engine.vllm.environment import FIRST_WITH_ROUTES, Engines
from nemo_specrl.engine.vllm.refit import refit
from nemo_specrl.trainer.replay_journal import JournaledStore
from tests.conftest import DictCache, make_async_engine, weights_of
from tests.engine.test_async_engine import ClaimingCache
from tests.support.engines import PROMPT, generate, only, sampling
from tests.support.routes import (
    CHOSEN,
    LONG,
    assert_reused_rows_have_their_routes,
    assert_routes,
    load_reference,
    make_mixture_engine,
    partly_accepted,
    save_mixture,
    strict,
    tell_choices,
)
from tests.support.stores import restore

pytestmark = pytest.mark.skipif(
    Engines.here().before((0, 25)) or not Engines.here().before(FIRST_WITH_ROUTES),
    reason="needs a vLLM that returns routes from its V1 model runner (0.25.1, 0.26.0)",
)
NONE = (0, 2, CHOSEN)
STOPS = ["0", "1", "=", ";", "#"]  # none of them in the drafts


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return save_mixture(tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def reference(mixture):
    return load_reference(mixture)


@pytest.fixture(scope="module")
def llm(mixture):
    return make_mixture_engine(mixture, max_num_seqs=16, max_model_len=128)


def test_routes_of_reused_rows_are_those_of_the_weights_that_judged_them(llm, reference):
    assert_reused_rows_have_their_routes(llm, reference)


def test_after_a_refit_no_route_is_of_the_old_weights(llm, mixture, tmp_path):
    """Of rows that the old ones have made, whose KV blocks are still there, and that are kept."""
    cache = DictCache()
    made = strict(SpeculativeLLM, llm, cache, lenience=1e9)
    generate(made, params=sampling(60, n=3, ignore_eos=True))
    changed = weights_of(mixture, noise=0.3, seed=1)
    shutil.copytree(mixture, tmp_path / "changed")
    save_file(dict(changed), tmp_path / "changed" / "model.safetensors", {"format": "pt"})
    reference = load_reference(tmp_path / "changed")
    try:
        refit(llm, changed)
        llm.collective_rpc(tell_choices)
        made.policy_version = 2
        (output,) = generate(made, params=sampling(60, n=3, ignore_eos=True))
        assert made.metrics.accepted_tokens > 100
        for row in output.outputs:
            assert_routes(reference, [*PROMPT, *row.token_ids], row.routed_experts)
            with pytest.raises(AssertionError):
                assert_routes(
                    load_reference(mixture), [*PROMPT, *row.token_ids], row.routed_experts
                )
    finally:
        refit(llm, weights_of(mixture))
        llm.collective_rpc(tell_choices)


def test_a_row_that_ends_at_a_stop_string_has_its_routes(llm, reference):
    """Which vLLM was not asked to look for, since it may begin in the prefix."""
    made = strict(SpeculativeLLM, llm, DictCache([partly_accepted(LONG[:10], 6)]))
    row = only(generate(made, params=sampling(60, stop=STOPS)))
    assert row.stop_reason in STOPS and row.spec_rl.accepted == 6
    assert_routes(reference, [*PROMPT, *row.token_ids], row.routed_experts)


def test_a_row_that_was_put_off_has_none(llm):
    """An empty table: NeMo-RL takes no row without any."""
    made = strict(SpeculativeLLM, llm)
    params = [sampling(n, ignore_eos=True) for n in (4, 60)]
    prompts = [{"prompt_token_ids": [*PROMPT, n]} for n in (4, 5)]
    early = EarlyEnd(group_size=1, groups=1)
    outputs = made.generate(prompts, params, early_end=early, use_tqdm=False)
    ended, put_off = (output.outputs[0] for output in outputs)
    assert ended.routed_experts.shape == (len(PROMPT) + 4, 2, CHOSEN)
    assert put_off.finish_reason == "abort" and put_off.token_ids
    assert put_off.routed_experts.shape == NONE


def test_what_a_journal_has_is_verified_anew_for_its_routes(llm, reference, tmp_path):
    def opened():
        options = {"run": "test", "max_bytes": 8 * 2**20, "tokenizer_id": "test"}
        return JournaledStore(tmp_path / "store", tmp_path / "journal", **options)

    def step(store):
        made = strict(SpeculativeLLM, llm, store, lenience=1.5)
        made.fingerprint = 1
        (output,) = generate(made, params=sampling(n=4))
        return made.metrics, output.outputs

    store = opened()
    store.snapshot(tmp_path / "snapshot")
    store.forget()
    _, before = step(store)
    store.close()
    restore(tmp_path / "snapshot", tmp_path / "store")  # as after a crash
    with contextlib.closing(opened()) as store:
        metrics, after = step(store)
    assert (metrics.replayed_rows, metrics.full_reuses) == (0, 4)
    for old, new in zip(before, after, strict=True):
        assert old.token_ids == new.token_ids
        assert_routes(reference, [*PROMPT, *new.token_ids], new.routed_experts)


def test_rows_of_an_asynchronous_engine_have_theirs(mixture, reference, loop):
    """Without a draft, reused in whole and in part, ended at a stop string, and aborted."""
    llm = make_async_engine(mixture, loop, max_model_len=128, enable_return_routed_experts=True)
    parts = (LONG[:8], 8), (LONG, 35), (LONG[:10], 6)
    kept = [partly_accepted(*part, sample_index=i) for i, part in enumerate(parts)]
    params = [sampling(60), sampling(60), sampling(60, stop=STOPS), sampling(8)]

    async def rows():
        await llm.collective_rpc(tell_choices)
        made = strict(AsyncSpeculativeLLM, llm, ClaimingCache(kept))

        async def row(i):
            prompt = {"prompt_token_ids": PROMPT}
            return [o.outputs[0] async for o in made.generate(prompt, params[i], f"row-{i}")][-1]

        ended = [await row(i) for i in range(4)]  # so that each has the sample index of its draft
        params.append(sampling(100, ignore_eos=True))
        aborted = asyncio.ensure_future(row(4))
        while "row-4" not in llm.output_processor.external_req_ids:
            await asyncio.sleep(0)
        await made.abort("row-4")
        return ended, await aborted

    try:
        ended, aborted = loop.run_until_complete(rows())
    finally:
        llm.shutdown()
    assert [row.spec_rl.accepted for row in ended] == [9, 35, 6, 0]
    assert ended[0].spec_rl.rollout.finish is Finish.STOP and ended[2].stop_reason in STOPS
    for row in ended:
        assert_routes(reference, [*PROMPT, *row.token_ids], row.routed_experts)
    assert aborted.finish_reason == "abort"
    if aborted.token_ids:
        assert_routes(reference, [*PROMPT, *aborted.token_ids], aborted.routed_experts)
    else:
        assert aborted.routed_experts.shape == NONE
