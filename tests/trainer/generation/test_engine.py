"""What the embedded trainer takes from an engine's completion."""

from types import SimpleNamespace

import pytest

from nemo_specrl.engine.outputs import RolloutInfo
from nemo_specrl.rollout import Finish, Rollout, prompt_key
from nemo_specrl.trainer.generation.engine import Response


@pytest.mark.parametrize("drafted_by", [4, 5])  # 5: a step of the same number, lost by a resume
def test_tokens_of_a_draft_count_as_reused_whatever_the_number_of_its_step(drafted_by):
    rollout = Rollout(
        *(prompt_key([1]), 0, [5, 6, 7], [-1.0, -2.0, -3.0], Finish.STOP, 5),
        birth_logprobs=[-1.5, -2.5, -3.0],
        birth_versions=[drafted_by, drafted_by, 5],
        fresh=False,
    )
    completion = SimpleNamespace(
        token_ids=[5, 6, 7],
        logprobs=SimpleNamespace(logprobs=[-1.0, -2.0, -3.0]),
        finish_reason="stop",
        spec_rl=RolloutInfo(rollout, accepted=2, drafted=3),
    )
    response = Response.of(completion)
    assert response.reused.tolist() == [True, True, False]
    assert response.birth_logprobs.tolist() == [-1.5, -2.5, -3.0]
    completion.spec_rl = None
    assert not Response.of(completion).reused.any()
