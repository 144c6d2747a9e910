"""The benchmarks in their smallest form, and the data in ``benchmarks/results``."""

import json
import subprocess
import sys

import pytest

from benchmarks.simulation.balance import gain
from tests.conftest import REPOSITORY

RESULTS = REPOSITORY / "benchmarks/results"
# The others are what ``nemo-specrl compare`` writes.
MEASURED = sorted(p for p in RESULTS.glob("*.json") if not p.name.endswith("_compare.json"))


def run(script, *arguments):
    """Run a module of ``benchmarks``, as a user would; return what it printed."""
    command = [sys.executable, "-m", f"benchmarks.{script}", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_data_is_reported_and_drawn(tmp_path):
    picture = tmp_path / "plot.png"
    printed = run("trainer.demo_seeds", "--report", RESULTS / "demo_seeds.json", "--plot", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sum(line.startswith("| ") for line in printed.splitlines()) > 1


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.name)
def test_data_says_when_and_on_what_machine_it_was_measured(path):
    data = json.loads(path.read_text())
    for machine in data.get("measured") or [data["machine"]]:
        assert {"device", "vllm"} <= set(machine)


@pytest.mark.parametrize("prompt", [200, 2000, 8000])
def test_balance_is_never_below_a_contiguous_split_and_above_it_where_lengths_differ(prompt):
    even, uneven = (gain(prompt, 4, spread, 400, prompts=32)[0] for spread in (0.1, 0.8))
    assert even >= 0.99
    assert uneven > 1.01


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_over_seeds(tmp_path):
    small = (
        *("data.num_prompts=4", "grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=2"),
        *("policy.train_global_batch_size=4", "grpo.max_num_epochs=1"),
    )
    rows = tmp_path / "rows.json"
    printed = run(
        *("trainer.demo_seeds", "--out", tmp_path / "runs", "--json", rows, "--jobs", 1),
        *("--override", *small),
    )
    assert "| 1 | lossless |" in printed
    assert {row["side"] for row in json.loads(rows.read_text())["rows"]} == {"plain", "lossless"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_rollouts_for_a_gpu_on_a_cpu(tmp_path):
    out = tmp_path / "gpu.json"
    printed = run("gpu.gpu_rollout", "--size", "tiny", "--out", out)
    points = json.loads(out.read_text())["points"]
    warm, cold = points["lossless/0.95/8"]["repetitions"], points["cold/8"]["repetitions"]
    assert min(r["drafting"]["tokens_per_step"] for r in warm) > 1
    assert len(cold) == 2 and all(r["plain"]["seconds"] > 0 for r in cold)
    assert all(r["reuse"]["accepted_fraction"] > 0.5 for r in points["reuse/0.0"]["repetitions"])
    assert printed.endswith(run("gpu.gpu_rollout", "--report", out))
