"""The benchmarks as their tests run them: modules, on a recording of a very short training."""

import subprocess
import sys

from tests.conftest import REPOSITORY

SMALL_RECORDING = (
    *("--override", "data.num_prompts=4", "grpo.num_prompts_per_step=4"),
    *("grpo.num_generations_per_prompt=4", "policy.train_global_batch_size=16"),
)
SMALL_TRAINING = (
    *("data.num_prompts=4", "grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=2"),
    "policy.train_global_batch_size=4",
)


def run(*arguments, script="rollout.rollout"):
    """Run a module of ``benchmarks``, as a user would; return what it printed."""
    command = [sys.executable, "-m", f"benchmarks.{script}", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
