"""SpeculativeLLM on an engine that drafts in its V2 runner: counts, reuse, and draft lengths.

Drafts are made by the numpy reference, as in ``test_engine``.
"""

import pytest

from nemo_specrl import SpecRLConfig
from tests.conftest import KV_BLOCKS, DictCache
from tests.support.engines import PROMPT, VOCABULARY

LENGTHS = [0, 2, 3, 4]
MAX_ROWS = 8


def config(**options):
    tree = {"method": "auto", "enabled": True, "max_draft_tokens": 4, "max_bytes": 8 << 20}
    return SpecRLConfig(enabled=True, tree=tree, monitor={"enabled": False}, **options)


def make_llm(folder, **options):
    from vllm import LLM

    from nemo_specrl import engine_options

    return LLM(
        str(folder),
        enforce_eager=True,
        max_num_seqs=MAX_ROWS,
        dtype="float32",
        skip_tokenizer_init=True,
        **KV_BLOCKS,
        seed=0,
        max_logprobs=VOCABULARY,
        **options,
        **engine_options(config()),
    )


@pytest.fixture(scope="module", params=["sync", "async"])
def llm(request, random_model):
    return make_llm(random_model, max_model_len=96, async_scheduling=request.param == "async")


def scheduler_of(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler


def speculator_of(llm):
    from nemo_specrl.engine.vllm import v2_patches

    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    return v2_patches.speculator_of(runner)


@pytest.fixture
def speculator(llm, by_reference):
    made = speculator_of(llm)
    made.index.forget()
    made.take_counts()
    return made


def rollouts(llm, config, epochs, *, rows=4, max_tokens=20, **options):
    """Metrics and responses of epochs of one prompt."""
    from vllm import SamplingParams

    from nemo_specrl import SpeculativeLLM

    made = SpeculativeLLM(llm, DictCache(), config)
    params = SamplingParams(
        **{"temperature": 1.0, "logprobs": 0, "max_tokens": max_tokens} | options
    )
    for epoch in range(epochs):
        if epoch:
            made.policy_version += 1
        prompts = [{"prompt_token_ids": list(PROMPT)} for _ in range(rows)]
        outputs = made.generate(prompts, params, use_tqdm=False)
        yield made.metrics, [list(output.outputs[0].token_ids) for output in outputs]


def test_counts_are_those_of_the_responses(llm, speculator):
    """Also where a response ends at a stop token inside a draft. Nearly the same in each epoch."""
    options = {"temperature": 0.05, "stop_token_ids": [5, 6, 7], "rows": 6}
    epochs = list(rollouts(llm, config(), 3, **options))
    for metrics, responses in epochs:
        tokens = sum(map(len, responses))
        assert metrics.tree_tokens == metrics.decoded_tokens == tokens
        assert metrics.tree_accepted_tokens <= metrics.tree_drafted_tokens
        assert metrics.tree_steps >= max(map(len, responses)) // 5
        gained = metrics.tree_tokens - metrics.tree_steps
        assert (
            metrics.tree_accepted_tokens - len(responses) <= gained <= metrics.tree_accepted_tokens
        )
        assert metrics.tree_s > 0
    assert min(metrics.tree_tokens / metrics.tree_steps for metrics, _ in epochs[1:]) > 2


def test_prefix_reuse_beside_drafts(llm, speculator):
    """Accepted prefixes stand, and what follows them is drafted."""
    (cold, _), (warm, responses) = rollouts(
        llm, config(preset="faithful", fresh_fraction=0), 2, rows=6
    )
    assert cold.drafts == 0 and warm.drafts == 6
    # With unchanged weights every draft is accepted whole, up to the noise of a prefill.
    assert warm.accepted_tokens > 0.9 * warm.response_tokens
    assert warm.decoded_tokens == sum(map(len, responses)) - warm.accepted_tokens
    assert warm.tree_tokens == warm.decoded_tokens


def test_lengths_by_rows(llm, speculator):
    """Every length has graphs, and rows draft as many tokens as the table says."""
    engine_config = llm.llm_engine.vllm_config
    declared = engine_config.speculative_config.num_speculative_tokens_per_batch_size
    assert sorted(length for *_, length in declared) == LENGTHS
    assert declared[-1][1] == MAX_ROWS
    scheduler = scheduler_of(llm)
    assert set(scheduler.dynamic_sd_lookup[1:]) == {4}  # a GPU would wait for its weights
    table = scheduler.dynamic_sd_lookup.copy()
    try:
        for length in LENGTHS:
            scheduler.dynamic_sd_lookup[:] = [length] * len(table)
            scheduler.spec_rl_lengths.table = lambda context, n=length: [n] * (MAX_ROWS + 1)
            ((metrics, responses),) = rollouts(llm, config(), 1, temperature=0.05)
            # The first token of a row has no draft, and the next to last ones have no room for it.
            steps = metrics.tree_steps - len(responses)
            assert length * (steps - 4 * len(responses)) <= metrics.tree_drafted_tokens
            assert metrics.tree_drafted_tokens <= length * steps
            if length == 0:
                assert metrics.tree_steps == sum(map(len, responses))
    finally:
        del scheduler.spec_rl_lengths.table
        scheduler.dynamic_sd_lookup[:] = table


def test_what_is_accepted_changes_the_table(llm, speculator, monkeypatch):
    """Rejected drafts alone: the scheduler stops drafting, and begins again after some refits, also
    of an engine that is never idle.
    """
    from vllm import SamplingParams

    from nemo_specrl.engine.vllm import v2_lengths
    from nemo_specrl.speculation import uniform_length

    monkeypatch.setattr(v2_lengths, "OBSERVED", 16)
    monkeypatch.setattr(uniform_length, "PRIOR_WEIGHT", 20.0)
    scheduler = scheduler_of(llm)
    monkeypatch.setattr(scheduler, "spec_rl_lengths", fresh_lengths(scheduler))
    draft = speculator.index.draft

    def wrong(*args):
        """Drafts that are never accepted: another token than any that greedy rows sample."""
        made = draft(*args)
        made.fill_(VOCABULARY - 1)
        return made

    monkeypatch.setattr(speculator.index, "draft", wrong)
    options = {"max_tokens": 80, "rows": 8, "temperature": 0.05}
    ((metrics, _),) = rollouts(llm, config(), 1, **options)
    assert metrics.tree_accepted_tokens < 0.1 * metrics.tree_drafted_tokens
    assert scheduler.spec_rl_lengths.chances()[0] < 0.3
    assert scheduler.dynamic_sd_lookup[MAX_ROWS] == 0
    for _ in range(2000):  # as in a longer batch
        scheduler.spec_rl_lengths.observe(4, 0)
    engine = llm.llm_engine
    for refits, tokens in enumerate([60, *[1] * 12]):
        if refits:
            engine.reset_prefix_cache()
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False)
        engine.add_request(f"row {refits}", {"prompt_token_ids": list(PROMPT)}, params)
        engine.step()
        assert engine.has_unfinished_requests()
        assert refits or scheduler.dynamic_sd_lookup[MAX_ROWS] == 0
    assert scheduler.dynamic_sd_lookup[MAX_ROWS] > 0
    while engine.has_unfinished_requests():
        engine.step()


def test_a_validation_does_not_change_what_is_known_of_drafts(llm, speculator, monkeypatch):
    """Its requests bring nothing and draft in vain. They count as long as none brings anything."""
    from vllm import SamplingParams

    scheduler = scheduler_of(llm)
    lengths = fresh_lengths(scheduler)
    monkeypatch.setattr(scheduler, "spec_rl_lengths", lengths)
    monkeypatch.setattr(scheduler, "spec_rl_identified", False)
    monkeypatch.setattr(lengths, "begin_batch", lambda: None)  # halves what was seen
    prompts = [{"prompt_token_ids": [7, *PROMPT]} for _ in range(4)]
    params = SamplingParams(max_tokens=30, ignore_eos=True, detokenize=False)

    def validate():
        before = lengths._counts.copy()
        llm.generate(prompts, params, use_tqdm=False)
        return lengths._counts - before

    foreign = validate()
    assert foreign.sum() > 4 * 5
    list(rollouts(llm, config(), 2, temperature=0.05))
    own = lengths._counts.copy()
    assert own.sum() > 0
    assert own[:, 0].sum() < 0.5 * own.sum()  # those of the first validation are forgotten
    assert not validate().any()


def fresh_lengths(scheduler):
    """As the scheduler makes them at its start, for a GPU on which each token costs."""
    from nemo_specrl.engine.vllm.model_costs import costs_of
    from nemo_specrl.speculation.uniform_length import Gpu, UniformLengths
    from tests.speculation.test_uniform_length import QWEN3_8B

    costs = costs_of(QWEN3_8B, Gpu(3.35e12, 100e12), 1, 2, 2)
    return UniformLengths(costs, LENGTHS, len(scheduler.dynamic_sd_lookup) - 1, max_drafted=883)
