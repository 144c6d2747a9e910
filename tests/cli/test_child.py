"""A comparison that is killed or stopped in mid-run: nothing goes on without it, and it resumes."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from nemo_specrl.monitoring.metrics_file import read_metrics
from tests.conftest import REPOSITORY

SMALL = (
    *("grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=4", "data.num_prompts=8"),
    *("policy.train_global_batch_size=16", "grpo.max_num_epochs=4", "grpo.val_at_start=false"),
    *("grpo.val_at_end=false", "grpo.val_period=0", "checkpointing.save_period=2"),
)
STEPS = 8


def compare(out, temporary):
    """Start a comparison whose temporary files stay in the test's own folder."""
    temporary.mkdir(exist_ok=True)
    demo = "examples/configs/grpo_sort_cpu.yaml"
    return subprocess.Popen(
        [sys.executable, "-m", "nemo_specrl", "compare", demo, *SMALL, "--out", str(out)],
        cwd=REPOSITORY,
        env=os.environ | {"TMPDIR": str(temporary), "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_steps(process, side, steps):
    """Returns the training that the comparison waits for."""
    while len(read_metrics(side / "metrics.jsonl")) < steps:
        assert process.poll() is None, process.stdout.read()[-3000:]
        time.sleep(0.02)
    (training,) = psutil.Process(process.pid).children()
    return training


@pytest.mark.slow
@pytest.mark.timeout(600)  # three comparisons
def test_a_comparison_resumes_wherever_it_was_ended(tmp_path):
    out, temporary = tmp_path / "out", tmp_path / "temporary"

    process = compare(out, temporary)
    training = wait_for_steps(process, out / "plain", 3)
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    training.wait(60)  # it is gone, long before its last step
    assert len(read_metrics(out / "plain" / "metrics.jsonl")) < STEPS
    assert not (out / "compare.json").exists()
    process.stdout.close()

    process = compare(out, temporary)
    training = wait_for_steps(process, out / "speculative", 3)
    process.terminate()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output[-3000:]
    assert "resuming from step 2" in output
    assert output.count("finishing this step, then saving") == 1
    assert not training.is_running()
    done = read_metrics(out / "speculative" / "metrics.jsonl")[-1]["step"]
    assert (out / "speculative" / f"step_{done}").is_dir()

    process = compare(out, temporary)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output[-3000:]
    assert f"nothing to do: {STEPS} steps are done" in output
    assert f"resuming from step {done}" in output
    result = json.loads((out / "compare.json").read_text())
    for side in ("plain", "speculative"):
        steps = [r["step"] for r in read_metrics(out / side / "metrics.jsonl")]
        assert steps == list(range(1, STEPS + 1))
        for name in ("rollout_s", "train_s", "decoded_tokens", "reward"):
            assert len(result[side][name]) == STEPS and None not in result[side][name]
    for name in ("compare.png", "compare.html"):
        assert (out / name).stat().st_size > 10_000
