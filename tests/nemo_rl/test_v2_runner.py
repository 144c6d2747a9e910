"""A NeMo-RL job whose engines run vLLM's V2 model runner and draft in it, as on GPUs.

Triton's interpreter runs vLLM's kernels; drafts are made by the numpy reference. Needs an
unmodified checkout of NeMo-RL and Triton: `scripts/test_v2.sh nemo DIR`.
"""

import importlib.util
import shutil
from pathlib import Path

import pytest

from tests.nemo_rl.test_evaluation_jobs import Evaluation
from tests.support.nemo_rl.jobs import ASYNCHRONOUS, STEPS_PER_EPOCH, Job, check_drafted, marks

_TRITON = importlib.util.find_spec("triton")
pytestmark = [
    *marks,
    pytest.mark.skipif(_TRITON is None, reason="needs Triton: scripts/test_v2.sh nemo DIR"),
    pytest.mark.timeout(1800),
]
LOSSLESS = {"enabled": "true", "preset": "lossless", "tree": "{max_draft_tokens:5}"}
FIXED = {**LOSSLESS, "tree": "{max_draft_tokens:5,adaptive:false}"}


def environment():
    return {
        "NEMO_SPECRL_TEST_V2": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": str(Path(_TRITON.origin).parents[1]),
    }


def v2_job(out, steps, spec_rl=LOSSLESS, **overrides):
    return Job(out, steps=steps, spec_rl=spec_rl, environment=environment(), **overrides)


def test_drafts_refits_validation_and_a_resumed_checkpoint(tmp_path):
    job = v2_job(tmp_path / "job", steps=4).wait()
    steps = job.train()
    assert sorted(steps) == [1, 2, 3, 4]
    for step, record in steps.items():
        assert record["spec_rl/cache_errors"] == record["spec_rl/refused_drafts"] == 0
        assert record["spec_rl/decoded_tokens"] == record["spec_rl/response_tokens"]
        assert record["spec_rl/tree_drafted_tokens"] > 0
        # Every refit reached the engines: what they report is the policy's own.
        assert record["gen_kl_error"] < 1e-4
        if step > STEPS_PER_EPOCH:  # histories of the first epoch
            assert record["spec_rl/tree_tokens_per_step"] > 1.5
    assert job.metrics("validation")
    # In a new process, with stores that are empty: drafts come from the checkpoint.
    shutil.rmtree(tmp_path / "stores")
    resumed = v2_job(tmp_path / "job", steps=6).wait().train()
    assert sorted(resumed) == [1, 2, 3, 4, 5, 6]
    assert resumed[5]["spec_rl/tree_tokens_per_step"] > 1.5


def test_in_asynchronous_grpo(tmp_path):
    """Engines lie in other processes, refits come between rows, and histories go with requests."""
    job = v2_job(tmp_path / "async", 4, FIXED, **ASYNCHRONOUS).wait()
    steps = [record for _, record in sorted(job.train().items())]
    assert len(steps) == 4
    check_drafted(steps)


def test_a_greedy_evaluation_drafts_from_the_one_before(tmp_path):
    """And has the answers of V1 without drafts."""
    plain = Evaluation(tmp_path / "plain", {"enabled": "false"})
    for name in ("first", "second"):
        drafted = Evaluation(tmp_path / name, LOSSLESS, environment=environment())
        assert drafted.responses == plain.responses
    tokens, accepted = drafted.drafted()
    assert tokens >= 2 and accepted > 50
