"""The loop on a real engine without drafts: rows, turns, run-ahead and the end of a phase."""

from collections import deque

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from nemo_specrl.trainer.generation.rows import RunAhead, decode
from tests.conftest import make_engine

PLACES, LONGEST, EOS = 4, 192, 2
PROMPTS = [[1, 5, 6], [1, 7], [1, 8, 9, 10], [1, 11], [1, 12, 13], [1, 14]]


@pytest.fixture(scope="session")
def llm(random_model):
    options = {"max_num_seqs": PLACES, "scheduling_policy": "priority", "max_model_len": LONGEST}
    return make_engine(random_model, **options, skip_tokenizer_init=True)


@pytest.fixture
def steps(llm, monkeypatch):
    """The rows that the engine has at each of its steps."""
    engine, seen = llm.llm_engine, []
    step = engine.step

    def counted():
        seen.append(engine.get_num_unfinished_requests())
        return step()

    monkeypatch.setattr(engine, "step", counted)
    return seen


def rows(prompts=PROMPTS, *, max_tokens=24, eos=EOS, kind=RequestOutputKind.FINAL_ONLY):
    return [
        (
            prompt,
            SamplingParams(
                max_tokens=max_tokens,
                stop_token_ids=[eos],
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                seed=seed,
                output_kind=kind,
            ),
        )
        for seed, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("kind", [RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA])
def test_rows_are_what_vllm_itself_generates(llm, kind):
    wanted = rows()
    responses = decode(llm, rows(kind=kind))
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in wanted],
        [params for _, params in wanted],
        use_tqdm=False,
    )
    for response, output in zip(responses, outputs, strict=True):
        (completion,) = output.outputs
        assert response.tokens == list(completion.token_ids)
        assert response.truncated == (completion.finish_reason == "length")
        assert response.truncated == (response.tokens[-1] != EOS)
        np.testing.assert_allclose(response.logprobs, completion.logprobs.logprobs, atol=1e-5)
        assert response.ended and response.fresh and response.made.all()
    assert {response.truncated for response in responses} == {True, False}


class Answers:
    """An environment that answers every turn by the same tokens."""

    def __init__(self, max_turns, answer=(20, 21)):
        self.max_turns, self.answer, self.turns = max_turns, list(answer), []

    def observe(self, turn):
        self.turns.append(list(turn))
        return self.answer if len(turn) != 3 else None


def test_turns_of_a_conversation(llm):
    """Each is decoded after all that was said before, with a seed of its own."""
    environment = Answers(3)
    wanted = rows(PROMPTS * 4, max_tokens=60)
    for response, (prompt, params) in zip(
        decode(llm, wanted, environment=environment), wanted, strict=True
    ):
        said, seed = [], params.seed
        for turn in range(3):
            (again,) = decode(llm, [(prompt + said, params_with(params, seed + turn))])
            said += again.tokens
            if again.truncated or len(again.tokens) == 3 or turn == 2:
                break
            said += environment.answer
        assert response.tokens == said
        assert response.truncated == again.truncated
        given = np.flatnonzero(~response.made)
        assert len(given) == 2 * turn
        assert [response.tokens[i] for i in given] == environment.answer * turn
        assert (response.logprobs[given] == 0).all() and response.logprobs[response.made].all()
        assert response.length == len(said) - 2 * turn
    assert any(len(turn) == 3 for turn in environment.turns)


def params_with(params, seed):
    params = params.clone()
    params.seed = seed
    return params


def test_a_conversation_without_room_for_another_turn_is_truncated(llm):
    environment = Answers(99, answer=[20] * 60)
    responses = decode(llm, rows(max_tokens=LONGEST), environment=environment)
    for response, prompt in zip(responses, PROMPTS, strict=True):
        assert response.ended
        if len(environment.turns) and response.truncated:
            assert len(prompt) + len(response.tokens) <= LONGEST
        assert response.made[-1]  # no answer comes last
    assert any(r.truncated and r.tokens[-1] == EOS for r in responses)


def test_upcoming_prompts_fill_idle_places_alone(llm, steps):
    alone = decode(llm, rows(max_tokens=60))
    del steps[:]
    upcoming = rows([[1, 20 + i] for i in range(3)], max_tokens=60, kind=RequestOutputKind.DELTA)
    ahead = RunAhead(PLACES, deque(upcoming))
    responses = decode(llm, rows(max_tokens=60), run_ahead=ahead)
    assert [r.tokens for r in responses] == [r.tokens for r in alone]
    assert steps[0] == len(PROMPTS) and max(steps) == len(PROMPTS)
    assert ahead.rows == 3 and ahead.tokens > 3
    last = max(i for i, n in enumerate(steps) if n > PLACES)
    assert all(n <= PLACES for n in steps[last + 1 :])
    assert not llm.llm_engine.has_unfinished_requests()  # those that had not ended are gone


def test_the_end_of_a_phase_gives_up_the_rest(llm, steps):
    def reached(ended):
        return len(ended) >= 3

    wanted = rows(PROMPTS, max_tokens=60, kind=RequestOutputKind.DELTA)
    whole = decode(llm, wanted)
    del steps[:]
    responses = decode(llm, wanted, end_of_phase=reached)
    ended = [response.ended for response in responses]
    assert 3 <= sum(ended) < len(PROMPTS)
    assert all(n > len(PROMPTS) - 3 for n in steps)
    for response, full in zip(responses, whole, strict=True):
        assert response.tokens == full.tokens[: len(response.tokens)]
        assert response.ended == (response.tokens == full.tokens)
    assert any(response.tokens for response in responses if not response.ended)
    assert not llm.llm_engine.has_unfinished_requests()


def test_an_error_of_the_environment_leaves_no_request(llm):
    class Broken(Answers):
        def observe(self, turn):
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        decode(llm, rows(), environment=Broken(2))
    assert not llm.llm_engine.has_unfinished_requests()
    assert all(response.ended for response in decode(llm, rows()))
