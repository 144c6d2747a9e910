"""Runs tests/support/nemo_rl/job.py in its own process, and reads the files that it writes."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter

import numpy as np
import pytest

from tests.conftest import REPOSITORY

HOME = os.environ.get("NEMO_RL_HOME")
SITE = REPOSITORY / "tests" / "support" / "nemo_rl" / "path"
"""Folder of a sitecustomize.py that lets NeMo-RL run without a GPU."""
marks = [
    pytest.mark.skipif(
        not HOME,
        reason="set NEMO_RL_HOME to a checkout of NVIDIA-NeMo/RL and run `make test-nemo`",
    ),
    pytest.mark.timeout(900),
]
FAITHFUL = {"enabled": "true", "preset": "faithful"}
"""The spec_rl: block of a job with prefix reuse."""
PROMPTS, GROUP, STEPS_PER_EPOCH = 4, 4, 2
BATCH = PROMPTS // STEPS_PER_EPOCH * GROUP
TOTAL = 192
"""Limit of a sequence in tokens; responses may be longer than most prompts leave room for."""

ACCEPTED = 0.2
"""Lower bound of ``accepted_fraction`` of a step. It differs much between runs, since a step has
about six drafts, each of which counts up to its first refused token. Simulated with the weights of
these jobs before and after an epoch, its mean is 0.91, and 1 step in 10,000 is below 0.41. If the
policy moves three times as far (four passes of PPO at the same learning rate), the mean is 0.59,
and 1 step in 36 is below 0.2."""

COLUMNS = (
    "token_ids",
    "token_loss_mask",
    "advantages",
    "generation_logprobs",
    "prev_logprobs",
)
"""What NeMo-RL logs for each token of the rows that it trained on."""

STARTS = 3
"""How many times a job is started at most: Ray gives a node 30 s, too few on a busy machine."""

ASYNCHRONOUS = {
    "policy.generation.vllm_cfg.async_engine": "true",
    "grpo.async_grpo.enabled": "true",
    "loss_fn.use_importance_sampling_correction": "true",
    "policy.generation.colocated.enabled": "false",
    "policy.generation.colocated.resources.gpus_per_node": "2",
    "cluster.gpus_per_node": "3",
    "grpo.val_at_start": "false",
}
"""Overrides of a job whose collector generates with two engines while the policy is trained."""


class Job:
    """A run of tests/support/nemo_rl/job.py in its own process group.

    ``launcher`` is what comes between Python and the module, followed by ``nemo-specrl run``.
    ``environment`` has further variables; its PYTHONPATH comes after the job's own.
    """

    module = "tests.support.nemo_rl.job"
    block = "policy.generation.spec_rl"

    def __init__(
        self, out, steps, spec_rl=None, algorithm="grpo", launcher=(), environment=(), **overrides
    ):
        self.out = out
        out.mkdir(parents=True, exist_ok=True)
        arguments = [algorithm]
        if steps is not None:
            block = "grpo" if algorithm == "controller" else algorithm
            arguments.append(f"{block}.max_num_steps={steps}")
        arguments += [f"{k}={v}" for k, v in overrides.items()]
        if spec_rl is not None:
            cache = f"cache:{{dir:{out.parent}/stores,deadline_ms:60000}}"
            block = ",".join([*(f"{k}:{v}" for k, v in spec_rl.items()), cache])
            arguments.append(f"++{self.block}={{{block}}}")
        environment = dict(environment)
        # NeMo-RL has a package "tests", too.
        paths = [str(REPOSITORY), HOME, str(SITE), environment.pop("PYTHONPATH", "")]
        self.log, self._launched = out / "log.txt", bool(launcher)
        module = ["-m", self.module]
        self._env = os.environ | environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        if launcher:
            script = str(REPOSITORY / "tests" / "nemo_rl" / "job.py")
            module = [*launcher, "-m", "nemo_specrl", "run", script]
            self._env["NEMO_RL_PY_EXECUTABLES_SYSTEM"] = "1"
        self._command = [sys.executable, *module, str(out), *arguments]
        self._start()

    def _start(self):
        self._ray = tempfile.mkdtemp(dir="/tmp", prefix="ray")  # short, for the names of sockets
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                self._command,
                cwd=REPOSITORY,
                env=self._env | {"NEMO_SPECRL_TEST_RAY": self._ray},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self):
        """Wait for the job's end, which must be successful."""
        assert self.exit_code() == 0, self.log.read_text()[-6000:]
        return self

    def wait_for_kill(self):
        """Wait until the job has killed itself (``++env.killed_in_step``)."""
        assert self.exit_code() == -signal.SIGKILL, self.log.read_text()[-6000:]

    def exit_code(self):
        """Wait for the job's end, and restart it if Ray could not start.

        An interrupt or a time-out of the test ends the job, too.
        """
        for left in reversed(range(STARTS)):
            code = None
            try:
                code = self.process.wait()
            finally:
                if code is None or code == os.EX_TEMPFAIL:  # with what is left of Ray
                    self.kill()
                shutil.rmtree(self._ray, ignore_errors=True)
            if code != os.EX_TEMPFAIL or not left:
                break
            self._start()
        return code

    def kill(self):
        """End the job and everything that it started."""
        if self._launched:  # the job has a session of its own, which its launcher ends
            self.process.terminate()
            self.process.wait(120)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _lines(self, name):
        path = self.out / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def metrics(self, prefix):
        return [r for r in self._lines("metrics.jsonl") if r["prefix"] == prefix]

    def train(self):
        """By step, everything that NeMo-RL logged as train/..."""
        steps = {}
        for record in self.metrics("train"):
            steps.setdefault(record["step"], {}).update(record)
        return steps

    def batch(self, step):
        """The rows that a step was trained on: COLUMNS by token, without padding, and reward."""
        text = (self.out / "logs" / f"train_data_step{step}.jsonl").read_text()
        rows = []
        for row in map(json.loads, text.splitlines()):
            [length], [reward] = row["input_lengths"], row["rewards"]
            columns = {name: np.array(row[name][0][:length]) for name in COLUMNS}
            rows.append({**columns, "reward": reward})
        return rows

    def rollouts(self):
        """All ``generate`` calls of training, whatever their size."""
        return [r for r in self._lines("rows.jsonl") if not r["validating"]]

    def counts(self):
        """How often each process did what, for each ``generate`` call of training.

        Returns:
            For each call, ``{(kind, process): count}`` from the call up to the next one, which
            includes the step's training and logging. Validation is left out.
        """
        steps, validating = [], True
        for line in self._lines("counts.jsonl"):
            kind = line["kind"]
            if kind == "generate":
                validating = line["validating"]
                if not validating:
                    steps.append(Counter())
            elif kind != "generated" and not validating:
                steps[-1][kind, line["pid"]] += 1
        return steps

    def calls(self):
        """The training batches."""
        return [r for r in self._lines("rows.jsonl") if len(r["prompts"]) == BATCH]


def with_history(calls):
    """For each call, whether each row's prompt and sample index had a rollout of older weights."""
    made, marked = {}, []
    for call in calls:
        seen, drafted = Counter(), []
        for prompt in map(tuple, call["prompts"]):
            place = (prompt, seen[prompt])
            seen[prompt] += 1
            drafted.append(made.get(place, call["policy_version"]) != call["policy_version"])
            made[place] = call["policy_version"]
        marked.append(drafted)
    return marked


def assert_drafts_follow_the_history(job, calls):
    """Each row with an older rollout has a draft (synchronous engines, ``fresh_fraction: 0``)."""
    rows = {}
    for call, drafted in zip(calls, with_history(calls), strict=True):
        rows.setdefault(call["policy_version"], []).extend(drafted)
    steps = job.train()
    assert len(rows) == len(steps)
    for drafted, (_, record) in zip(rows.values(), sorted(steps.items()), strict=True):
        assert record["spec_rl/cache_errors"] == record["spec_rl/refused_drafts"] == 0
        assert record["spec_rl/draft_coverage"] == pytest.approx(sum(drafted) / len(drafted))


def check_drafted(steps):
    """Trees drafted in asynchronous GRPO, in later epochs most; the steps in which rows were made.

    The collector runs ahead: a step may find that all its rows were rolled out already.
    """
    for record in steps:
        assert record["spec_rl/cache_errors"] == record["spec_rl/refused_drafts"] == 0
        assert record["spec_rl/draft_coverage"] == 0
    drafted = [record for record in steps if "spec_rl/tree_tokens_per_step" in record]
    assert all(record["spec_rl/tree_drafted_tokens"] > 0 for record in drafted)
    assert max(record["spec_rl/tree_tokens_per_step"] for record in drafted) > 1.5
    return drafted


def check_talks(job, count):
    """Conversations drafted in a job of asynchronous GRPO; its steps, by number."""
    steps = job.train()
    assert sorted(steps) == list(range(1, count + 1))
    assert sum(record["spec_rl/cache_errors"] for record in steps.values()) == 0
    drafted = [r.get("spec_rl/tree_tokens_per_step", 1) for r in steps.values()]
    print(f"tokens a step: {drafted}")
    assert max(drafted) > 1.5
    return steps
