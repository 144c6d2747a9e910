"""A row never takes others with it: invalid data of the engine, on real engines."""

import math

import pytest

from nemo_specrl import Finish, SpecRLConfig, SpeculativeLLM, prompt_key
from nemo_specrl.engine.outputs import rollout_info
from nemo_specrl.engine.prefix.noise import PrefillNoise
from nemo_specrl.engine.vllm.compat import logprobs_slice
from nemo_specrl.trainer.data.toy_tasks import encode
from tests.conftest import DictCache
from tests.support.engines import (
    LOSSLESS,
    PROMPT,
    VOCABULARY,
    draft,
    generate,
    needs_drafters,
    sampling,
)

POISON = 31  # a token that has hidden states of NaN
BAD = [*PROMPT, POISON]
ROUNDS = SpecRLConfig(
    enabled=True, preset="lossless", tree={"method": "rounds", "max_draft_tokens": 6}
)


def poisoned(model):
    """To be run in the worker: what the model makes of POISON is NaN, behind its last layer.

    Before that, NaN would stay in the KV cache, from where vLLM's attention on a CPU spreads it to
    the next request that gets the block.
    """

    def seen(_, arguments, output):
        model.seen = arguments[0] == POISON

    def spoilt(_, arguments, output):
        hidden = output[0] if isinstance(output, tuple) else output
        hidden[model.seen[: len(hidden)]] = math.nan
        return output

    embedding, norm = model.model.embed_tokens, model.model.norm
    model.hooks = [embedding.register_forward_hook(seen), norm.register_forward_hook(spoilt)]


def cured(model):
    for hook in model.hooks:
        hook.remove()
    del model.hooks


@pytest.fixture
def poison(llm):
    llm.apply_model(poisoned)
    yield llm
    llm.apply_model(cured)


def places(prompt, tokens):
    """Whether each token was drawn from NaN."""
    return [token == POISON for token in [prompt[-1], *tokens[:-1]]]


def is_bad(prompt, tokens):
    """Whether a row has a token that was drawn from NaN."""
    return any(places(prompt, tokens))


def values(completion):
    return [next(iter(position.values())).logprob for position in completion.logprobs]


def same(completion, other):
    assert list(completion.token_ids) == list(other.token_ids)
    assert (completion.text, completion.finish_reason) == (other.text, other.finish_reason)
    assert (completion.stop_reason, completion.index) == (other.stop_reason, other.index)
    for value, expected in zip(values(completion), values(other), strict=True):
        assert value == pytest.approx(expected, abs=1e-4, nan_ok=True)


PROMPTS = [PROMPT, BAD, [*PROMPT, 5], BAD, [*PROMPT, 6]] * 2
PARAMS = [sampling(8, seed=i, ignore_eos=True) for i in range(len(PROMPTS))]


def test_rows_of_nan_are_returned_as_they_are_and_cost_their_places_alone(
    speculative, poison, caplog
):
    plain = [o.outputs[0] for o in poison.generate(PROMPTS, PARAMS, use_tqdm=False)]
    made = speculative()
    outputs = made.generate(PROMPTS, PARAMS, use_tqdm=False)
    bad = 0
    for prompt, output, expected in zip(PROMPTS, outputs, plain, strict=True):
        [completion] = output.outputs
        same(completion, expected)
        wrong = is_bad(prompt, expected.token_ids)
        assert (rollout_info(completion) is None) == wrong
        found = [math.isnan(value) for value in values(completion)]
        assert found == places(prompt, completion.token_ids)
        bad += wrong
    assert 4 <= bad < len(PROMPTS)
    assert made.metrics.uncached_rows == bad == len(PROMPTS) - len(made.cache.all())
    assert prompt_key(BAD) not in made.cache.rollouts
    assert made.metrics.cache_errors == 0
    assert sum("log-prob of nan" in r.message for r in caplog.records) == 1


def test_rows_of_nan_are_no_measurement_of_noise(speculative, poison):
    made = speculative()
    made._noise = PrefillNoise(2, 192)
    rows = [o.outputs[0] for o in made.generate(PROMPTS, PARAMS, use_tqdm=False)]
    measured = [c for c in rows if rollout_info(c) is not None]
    assert 0 < len(measured) < PrefillNoise.ROWS
    assert made.metrics.noise_tokens == sum(len(c.token_ids) for c in measured)
    assert math.isfinite(made.metrics.noise_rejected)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_draft_that_verifies_to_nan_is_refused(speculative, poison, rows):
    tokens = [*encode("12+34"), POISON, *encode("12")]
    params = [sampling(12, seed=i) for i in range(rows)]
    plain = generate(speculative(), rows=rows, params=params)
    made = speculative(DictCache([draft(tokens, sample_index=s) for s in range(rows)]), version=1)
    outputs = generate(made, rows=rows, params=params)
    assert made.metrics.refused_drafts == rows and made.metrics.drafts == 0
    for output, expected in zip(outputs, plain, strict=True):
        same(output.outputs[0], expected.outputs[0])
        reuse = rollout_info(output.outputs[0])
        assert reuse is None or reuse.fresh


def test_a_continuation_of_nan_is_joined_to_its_prefix_and_uncached(speculative, poison):
    made = speculative(DictCache([draft([*encode("12"), POISON])]), version=1, lenience=1e6)
    [output] = generate(made, params=sampling(9, ignore_eos=True))
    completion = output.outputs[0]
    assert list(completion.token_ids[:3]) == [*encode("12"), POISON]
    assert len(completion.token_ids) == len(completion.logprobs) == 9
    found = [math.isnan(value) for value in values(completion)]
    assert found == places(PROMPT, completion.token_ids) and found[3] and not any(found[:3])
    assert made.metrics.uncached_rows == 1 and made.cache.puts == 0


def test_rows_of_nan_in_rounds(poison):
    made = SpeculativeLLM(poison, DictCache(), ROUNDS)
    for version in range(2):  # the second time, drafts are verified
        made.policy_version = version
        outputs = made.generate(PROMPTS, PARAMS, use_tqdm=False)
        bad = 0
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            [completion] = output.outputs
            assert len(completion.token_ids) == len(completion.logprobs) == 8
            wrong = is_bad(prompt, completion.token_ids)
            assert (rollout_info(completion) is None) == wrong
            bad += wrong
        assert 4 <= made.metrics.uncached_rows == bad < len(PROMPTS)
        assert prompt_key(BAD) not in made.cache.rollouts
    assert made.metrics.tree_accepted_tokens > 0


def no_logprobs(completion):
    completion.logprobs = None


def fewer_logprobs(completion):
    completion.logprobs = logprobs_slice(completion.logprobs, 0, len(completion.logprobs) - 1)


def no_tokens(completion):
    completion.token_ids = []


def unknown_token(completion):
    completion.token_ids = [*completion.token_ids[:-1], VOCABULARY]


def negative_token(completion):
    completion.token_ids = [-1, *completion.token_ids[1:]]


def above_zero(completion):
    completion.logprobs.logprobs[0] = 0.5


def infinite(completion):
    completion.logprobs.logprobs[-1] = -math.inf


def of_other_tokens(completion):
    completion.logprobs.token_ids[0] += 1


def no_entries(completion):
    completion.logprobs.end_indices[0] = completion.logprobs.start_indices[0]


DAMAGES = [no_logprobs, fewer_logprobs, no_tokens, unknown_token, negative_token, above_zero]
DAMAGES += [infinite, of_other_tokens, no_entries]


@pytest.mark.parametrize("config", [None, ROUNDS], ids=["plain", "rounds"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_whatever_else_is_wrong_with_a_row_is_its_own(
    speculative, llm, monkeypatch, damage, config
):
    """Damages the last output of one row of four."""
    made = speculative() if config is None else SpeculativeLLM(llm, DictCache(), config)
    step, damaged = llm.llm_engine.step, []

    def damaging():
        outputs = step()
        for output in outputs:
            if output.finished and output.prompt_logprobs is None and not damaged:
                damage(output.outputs[0])
                damaged.append(list(output.outputs[0].token_ids))
        return outputs

    monkeypatch.setattr(llm.llm_engine, "step", damaging)
    params = [sampling(4 + i, seed=i, ignore_eos=True, detokenize=False) for i in range(4)]
    outputs = generate(made, rows=4, params=params)
    assert [rollout_info(o.outputs[0]) is None for o in outputs] == [True, False, False, False]
    assert made.metrics.uncached_rows == 1
    assert sorted(r.sample_index for r in made.cache.all()) == [1, 2, 3]
    n = len(damaged[0])
    assert n == 0 or list(outputs[0].outputs[0].token_ids)[-n:] == damaged[0]


def test_what_a_journal_has_of_another_model_is_decoded_anew(llm, speculative):
    class Journal(DictCache):
        def take(self, rows, policy_version, fingerprint, enough=all):
            wrong = draft([5, VOCABULARY, 6, 7], -1.0, finish=Finish.LENGTH)
            object.__setattr__(wrong, "fingerprint", fingerprint)
            return [wrong for _ in rows]

    made = speculative(Journal())
    made.fingerprint = 5
    [output] = generate(made, params=sampling(4, ignore_eos=True))
    assert VOCABULARY not in output.outputs[0].token_ids
    assert made.metrics.replayed_rows == 0

    class Short(Journal):
        def take(self, rows, policy_version, fingerprint, enough=all):
            return []

    made = speculative(Short())
    made.fingerprint = 5
    assert len(generate(made, rows=2)) == 2 and made.metrics.cache_errors == 1


@needs_drafters
def test_nan_with_the_tree_proposer_beside_sound_rows(drafting_llm, proposer):
    drafting_llm.apply_model(poisoned)
    try:
        made = SpeculativeLLM(drafting_llm, DictCache(), LOSSLESS)
        for version in range(2):
            made.policy_version = version
            outputs = made.generate(PROMPTS, PARAMS, use_tqdm=False)
            wrong = [
                is_bad(prompt, o.outputs[0].token_ids)
                for prompt, o in zip(PROMPTS, outputs, strict=True)
            ]
            assert [rollout_info(o.outputs[0]) is None for o in outputs] == wrong
            assert made.metrics.uncached_rows == sum(wrong) < len(PROMPTS)
    finally:
        drafting_llm.apply_model(cured)
