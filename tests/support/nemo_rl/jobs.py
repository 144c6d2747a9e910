"""Runs tests/support/nemo_rl/job.py in its own process, and reads the files that it writes."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile

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
    pytest.mark.timeout(1800),
]
PROMPTS, GROUP, STEPS_PER_EPOCH = 4, 4, 2
BATCH = PROMPTS // STEPS_PER_EPOCH * GROUP
TOTAL = 192
"""Limit of a sequence in tokens; responses may be longer than most prompts leave room for."""

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


CONTROLLED = {
    "grpo.val_period": "0",
    "grpo.val_at_start": "false",
    "policy.generation.colocated.resources.gpus_per_node": "2",
    "cluster.gpus_per_node": "3",
    "checkpointing.enabled": "true",
    "data_plane.num_storage_units": "1",
}
"""Overrides of a job of the single controller, whose engines run on through refits."""
TALKING = {
    "++env.questions": "2",
    "policy.max_total_sequence_length": "400",
    "policy.generation.vllm_cfg.max_model_len": "400",
}
"""Overrides of a job whose conversations have two turns, over HTTP as NeMo-Gym leads them."""

IN_RECIPE = "policy.generation.vllm_kwargs.additional_config"
"""Where a recipe of stock NeMo-RL has the plug-in's block."""


def environment(**variables):
    """Variables of a job's process."""
    # NeMo-RL has a package "tests", too.
    paths = os.pathsep.join([str(REPOSITORY), HOME, str(SITE)])
    return os.environ | variables | {"PYTHONPATH": paths}


class Job:
    """A run of tests/support/nemo_rl/job.py in its own process group.

    Args:
        out: folder of what the job writes; its cache is beside it.
        steps: number of steps.
        spec_rl: the ``spec_rl:`` block, whose cache is added; None: the recipe has none.
        algorithm: ``grpo``, ``ppo`` or ``controller``.
        plugin: whether ``nemo-specrl run`` starts it; else it is stock NeMo-RL, and its recipe has
            the block where vLLM reads it.
        launcher: what comes between Python and ``-m nemo_specrl run``.
        variables: further ones of its environment.
        overrides: further keys of the recipe.
    """

    def __init__(
        self,
        out,
        steps,
        spec_rl=None,
        algorithm="grpo",
        plugin=True,
        launcher=(),
        variables=(),
        **overrides,
    ):
        self.out = out
        out.mkdir(parents=True, exist_ok=True)
        block = "grpo" if algorithm == "controller" else algorithm
        arguments = [algorithm, f"{block}.max_num_steps={steps}"]
        arguments += [f"{k}={v}" for k, v in overrides.items()]
        if spec_rl is not None:
            cache = f"cache:{{dir:{out.parent}/stores,deadline_ms:60000}}"
            own = ",".join([*(f"{k}:{v}" for k, v in spec_rl.items()), cache])
            arguments.append(
                f"++policy.generation.spec_rl={{enabled:true,{own}}}"
                if plugin
                else f"++{IN_RECIPE}={{spec_rl:{{{own}}}}}"
            )
        self._env = environment(**dict(variables))
        self.log, self._launched = out / "log.txt", bool(launcher)
        program = ["-m", "tests.support.nemo_rl.job"]
        if plugin:
            script = str(REPOSITORY / "tests" / "support" / "nemo_rl" / "job.py")
            program = [*launcher, "-m", "nemo_specrl", "run", script]
            self._env["NEMO_RL_PY_EXECUTABLES_SYSTEM"] = "1"
        self._command = [sys.executable, *program, str(out), *arguments]
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

    def acceptance_length(self):
        """That of all engines from the start to the end of the job, by vLLM's own counters."""
        counters = json.loads((self.out / "counters.json").read_text())
        names = ("num_accepted_tokens", "num_drafts")
        accepted, drafts = (counters[f"vllm:spec_decode_{name}"] for name in names)
        return 1 + accepted / drafts

    def rows(self):
        """All ``generate`` calls, with prompts, outputs and engines."""
        return self._lines("rows.jsonl")


def lengths_of(steps):
    """NeMo-RL's own acceptance lengths, by step: 1 without drafts."""
    return {n: round(step["vllm/spec_acceptance_length"], 2) for n, step in sorted(steps.items())}


def tokens_per_step(steps):
    """Tokens of a row per step of its engine, as the plug-in logs them, by step."""
    return {n: round(s.get("spec_rl/tokens_per_step", 1), 2) for n, s in sorted(steps.items())}
