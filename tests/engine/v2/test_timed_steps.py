"""The layers of a model are timed when an engine has started, and lengths chosen by what was found.

A clock decides what is found, so that only its form and its use are tested.
"""

import pytest

from nemo_specrl.engine import v2_patches
from nemo_specrl.engine.step_costs import TIMED, time_layers
from tests.support.v2_exactness import VOCABULARY, drafting, make_llm

ROWS, K = 4, 3


def scheduler_of(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler


@pytest.fixture(scope="module")
def timed(random_model, cache_dir):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(v2_patches, "on_gpu", lambda: True)
        draft = drafting(cache_dir, K, adaptive=True)
        llm = make_llm(random_model, "async", max_num_seqs=ROWS, **draft)
    yield llm
    llm.llm_engine.engine_core.shutdown()


def test_a_scheduler_gets_what_was_timed(timed):
    """Of steps without drafts up to all rows, and of the longest drafts beyond that."""
    scheduler = scheduler_of(timed)
    found = scheduler.vllm_config.additional_config[TIMED]
    assert [tokens for tokens, _ in found] == [1, 2, 3, 4, *range(8, 17, 4)]
    assert all(0 < seconds < 60 for _, seconds in found)
    assert scheduler.lengths.uniform._costs.timed == found


def test_timing_leaves_an_engine_as_it_was(timed, by_reference, monkeypatch):
    """Greedy rows before and after it."""
    from vllm import SamplingParams
    from vllm.v1.sample.ops import topk_topp_sampler as filters

    # The interpreter cannot run this kernel. On GPUs vLLM takes the other for less than 8 rows.
    monkeypatch.setattr(filters, "apply_top_k_top_p_triton", filters.apply_top_k_top_p_pytorch)
    prompt = {"prompt_token_ids": [1, 5, 9, VOCABULARY - 1]}
    greedy = SamplingParams(temperature=1.0, top_k=1, max_tokens=8, ignore_eos=True)
    said = []
    for _ in range(2):
        (output,) = timed.generate(prompt, greedy, use_tqdm=False)
        said.append(output.outputs[0].token_ids)
        assert timed.collective_rpc(time_layers)[0][0][0] == 1
    assert said[0] == said[1] and len(said[0]) == 8


def test_steps_that_cannot_be_timed_are_computed(random_model, cache_dir, monkeypatch, caplog):
    monkeypatch.setattr(v2_patches, "on_gpu", lambda: True)
    monkeypatch.setattr(v2_patches, "time_layers", lambda worker: worker.none)
    draft = drafting(cache_dir, K, adaptive=True)
    llm = make_llm(random_model, "async", max_num_seqs=ROWS, **draft)
    scheduler = scheduler_of(llm)
    assert TIMED not in scheduler.vllm_config.additional_config
    assert not scheduler.lengths.uniform._costs.timed
    llm.llm_engine.engine_core.shutdown()
