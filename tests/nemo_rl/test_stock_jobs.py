"""Stock NeMo-RL in real jobs, whose recipe has the plug-in's block for vLLM and nothing else.

They need an unmodified checkout of NeMo-RL in NEMO_RL_HOME and its environment: `make test-nemo`.
Each runs on a CPU with two engines. What drafts bring is what NeMo-RL itself logs of vLLM.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from nemo_specrl import prompt_key
from nemo_specrl.cache.inspection import open_source
from tests.conftest import REPOSITORY
from tests.support.nemo_rl.jobs import (
    ASYNCHRONOUS,
    CONTROLLED,
    GROUP,
    HOME,
    PROMPTS,
    STEPS_PER_EPOCH,
    TALKING,
    Job,
    environment,
    lengths_of,
    marks,
)

pytestmark = marks
DRAFTED = 1.5
"""Acceptance length of a step whose prompts have been there before, tokens; at least in one of its
steps. How far the policy moves between two epochs differs from job to job."""
STEPS = 3 * STEPS_PER_EPOCH


def kept(job):
    """The responses in the job's cache."""
    [folder] = (job.out.parent / "stores").iterdir()
    with open_source(folder) as source:
        return list(source.rollouts)


def test_synchronous_workers_draft_from_the_second_epoch_on(tmp_path):
    job = Job(tmp_path / "job", STEPS, spec_rl={}, plugin=False).wait()
    steps = job.train()
    lengths = lengths_of(steps)
    print(f"acceptance lengths: {lengths}")
    assert sorted(steps) == list(range(1, STEPS + 1))
    assert max(lengths[step] for step in range(STEPS_PER_EPOCH + 1, STEPS + 1)) > DRAFTED
    assert not [name for record in steps.values() for name in record if "spec_rl" in name]
    for record in steps.values():
        assert record["gen_kl_error"] < 1e-4  # what engines report is the policy's own
    responses = {
        (prompt_key(prompt), tuple(output[len(prompt) :]))
        for row in job.rows()
        for prompt, output in zip(row["prompts"], row["outputs"], strict=True)
    }
    in_cache = {(rollout.key, tuple(rollout.tokens.tolist())) for rollout in kept(job)}
    assert in_cache and in_cache <= responses


def test_asynchronous_workers_draft_while_weights_change(tmp_path):
    """Engine cores are processes of their own, which join Ray by themselves."""
    in_flight = {"grpo.async_grpo.in_flight_weight_updates": "true"}
    job = Job(tmp_path / "job", STEPS, {}, plugin=False, **ASYNCHRONOUS, **in_flight).wait()
    lengths = lengths_of(job.train())
    print(f"acceptance lengths: {lengths}")
    assert sorted(lengths) == list(range(1, STEPS + 1))
    assert max(lengths.values()) > DRAFTED
    assert len({rollout.key for rollout in kept(job)}) >= PROMPTS


def test_conversations_by_http_draft_by_their_first_prompt(tmp_path):
    """As NeMo-Gym leads them: each turn is a request to a worker's HTTP server."""
    job = Job(tmp_path / "job", 2 * STEPS_PER_EPOCH, {}, plugin=False, **TALKING).wait()
    steps = job.train()
    lengths = lengths_of(steps)
    print(f"acceptance lengths: {lengths}")
    assert (
        max(lengths[step] for step in range(STEPS_PER_EPOCH + 1, 2 * STEPS_PER_EPOCH + 1)) > DRAFTED
    )
    for record in steps.values():
        assert record["gen_kl_error"] < 1e-4
    # A conversation is one response to its root, with the second question in it.
    rollouts = kept(job)
    assert len({rollout.key for rollout in rollouts}) == PROMPTS + 2  # with those of validation
    assert np.median([len(rollout) for rollout in rollouts]) > 0
    assert len(rollouts) <= (PROMPTS * GROUP) * 2 + 2 * 3


def test_the_single_controllers_engines_draft(tmp_path):
    pytest.importorskip("transfer_queue", reason="NeMo-RL's data plane is not installed")
    job = Job(tmp_path / "job", STEPS, {}, "controller", plugin=False, **CONTROLLED).wait()
    assert sorted(job.train()) == list(range(1, STEPS + 1))
    length = job.acceptance_length()  # this trainer logs none
    print(f"acceptance length: {length:.2f}")
    assert length > DRAFTED


UV = """#!/bin/bash
# `uv run SCRIPT ...` in the tests' environment, and NeMo-RL's training script without a GPU.
shift
case $1 in
    examples/run_grpo.py) exec {python} {job} {out} script "${{@:2}}" ;;
    *) exec {python} "$@" ;;
esac
"""


def test_the_functional_test_of_the_research_project(tmp_path):
    """As it is in upstream/, from its place in a checkout; of one GPU and its model, the CPU's."""
    checkout, programs = tmp_path / "RL", tmp_path / "bin"
    project = checkout / "research" / "history_drafting"
    shutil.copytree(REPOSITORY / "upstream" / "nemo_rl_research" / "history_drafting", project)
    (checkout / "tests").mkdir()  # not all of it: NeMo-RL's package has the name of this one
    for name in ("examples", "tests/json_dump_tb_logs.py", "tests/check_metrics.py"):
        (checkout / name).symlink_to(Path(HOME).resolve() / name)
    programs.mkdir()
    job = REPOSITORY / "tests" / "support" / "nemo_rl" / "job.py"
    uv = UV.format(python=sys.executable, job=job, out=tmp_path / "job")
    (programs / "uv").write_text(uv)
    (programs / "uv").chmod(0o755)
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ray") as folder:
        done = subprocess.run(
            ["bash", project / "tests" / "functional" / "history_drafting.sh"],
            env=environment(PATH=f"{programs}:{os.environ['PATH']}", NEMO_SPECRL_TEST_RAY=folder),
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    metrics = json.loads((project / "tests/functional/history_drafting/metrics.json").read_text())
    assert len(metrics["train/vllm/spec_acceptance_length"]) == 4
