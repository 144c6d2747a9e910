"""Training of Megatron policies through the command line: changes of layout, PPO and DAPO.

Every run is a process of its own with its own Ray, as a user's is.
"""

import re
import shutil

import pytest

from nemo_specrl.monitoring.metrics_file import read_metrics
from tests.trainer.test_loop import DAPO, PPO, records, train

pytestmark = pytest.mark.usefixtures("own_ray")

DEMO = "examples/configs/grpo_sort_megatron_cpu.yaml"
SUMS = (  # with a model of four layers
    "policy.model_name=examples/models/qwen3-arith",
    "data.dataset_name=arithmetic",
    "grpo.max_num_epochs=4",
    "policy.generation.spec_rl.enabled=false",  # the same weights then make the same rollouts
)


def layout(tp=1, pp=1, ranks=2):
    return (
        "policy.megatron_cfg.enabled=true",
        f"policy.megatron_cfg.tensor_model_parallel_size={tp}",
        f"policy.megatron_cfg.pipeline_model_parallel_size={pp}",
        f"cluster.gpus_per_node={ranks}",
        "cluster.num_nodes=1",
    )


@pytest.mark.slow  # test_worker has it without the command line
@pytest.mark.timeout(900)  # four runs
def test_a_run_goes_on_in_another_layout(tmp_path):
    """From TP2 to PP2 to DP2; beside it, a run that stays at TP2."""
    stays, changes = tmp_path / "stays", tmp_path / "changes"
    train(stays, *SUMS, *layout(tp=2), "grpo.max_num_steps=4", config=DEMO)
    shutil.copytree(stays, changes)
    train(stays, *SUMS, *layout(tp=2), config=DEMO)
    train(changes, *SUMS, *layout(pp=2), "grpo.max_num_steps=6", config=DEMO)
    train(changes, *SUMS, *layout(), config=DEMO)
    before, after = records(stays), records(changes)
    assert [r["step"] for r in before] == [r["step"] for r in after] == list(range(1, 9))
    assert before[:4] == after[:4]
    for expected, found in zip(before[4:], after[4:], strict=True):
        assert found["prompts"] == expected["prompts"]
        assert found["reward"] == pytest.approx(expected["reward"], abs=0.1)
        # Of the optimizer's state: other moments would make another next step.
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.1)


@pytest.mark.slow
def test_ppo(tmp_path):
    """The value model is a torch model beside the policy's ranks, whose layers two stages share."""
    model = "policy.model_name=examples/models/qwen3-arith"
    train(tmp_path, *layout(pp=2), model, "ppo.max_num_steps=2", config=PPO)
    steps = read_metrics(tmp_path / "metrics.jsonl")
    assert len(steps) == 2
    assert all(r["value_loss"] > 0 and r["grad_norm"] > 0 for r in steps)


@pytest.mark.slow
def test_dapo(tmp_path):
    """Two steps; resuming from a damaged checkpoint then names it."""
    train(tmp_path, *layout(tp=2), "grpo.max_num_steps=2", config=DAPO)
    steps = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in steps] == [1, 2]
    assert any(len(r["prompts"]) > 4 for r in steps)
    for file in (tmp_path / "step_2" / "policy").glob("*.distcp"):
        file.write_bytes(b"")
    done = train(tmp_path, *layout(tp=2), "grpo.max_num_steps=3", config=DAPO, code=2)
    said = " ".join(done.stderr.split())
    assert re.search(r"step_2: damaged .*: not a checkpoint of this model: .*; remove this", said)
