"""The embedded trainer through its command line: real engine, real cache, real SIGKILL.

Every run is a process of its own, as a user's is; most of them begin with torch and vLLM imported
(``warm``). The recipe is the demo's, made small.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from nemo_specrl import RolloutStore
from nemo_specrl.files import step_folders
from nemo_specrl.monitoring.metrics_file import MetricsLog, read_metrics
from nemo_specrl.trainer.generation.engine import cache_config
from nemo_specrl.trainer.loop import Trainer
from nemo_specrl.trainer.recipe import load_recipe
from tests.conftest import REPOSITORY
from tests.support.ports import listening
from tests.support.warm import Command

DEMO = "examples/configs/grpo_sort_cpu.yaml"
DAPO = "examples/configs/dapo_arith_cpu.yaml"
PPO = "examples/configs/ppo_arith_cpu.yaml"
SMALL = (
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "policy.train_global_batch_size=16",
    "data.num_prompts=8",
    "grpo.max_num_epochs=3",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "grpo.val_period=0",
    "checkpointing.save_period=2",
    "policy.generation.spec_rl.cache.max_bytes_per_node=4MiB",
    # Drafts of one length: with others, a busy machine may measure that none are worth it.
    "policy.generation.spec_rl.draft.adaptive=false",
    "policy.generation.spec_rl.cache.deadline_ms=10000",  # and be late with a look-up
)
PLAIN = "policy.generation.spec_rl.enabled=false"
OF_THE_LENGTH = ("total_steps",)
"""Of the run as its recipe had it at the time, which a resumed one may change."""


def command(folder, *overrides, config=DEMO, program=("nemo_specrl", "train")):
    small = [o.replace("grpo.", "ppo.") for o in SMALL] if config == PPO else SMALL
    return [
        *(sys.executable, "-m", *program, config, *small),
        f"checkpointing.checkpoint_dir={folder}",
        f"logger.log_dir={folder}",
        *overrides,
    ]


def environment(folder):
    """Temporary files of a process that is killed stay in the test's own folder."""
    temporary = folder.with_name(folder.name + "-temporary")
    temporary.mkdir(parents=True, exist_ok=True)
    return os.environ | {"TMPDIR": str(temporary), "COLUMNS": "200"}


def train(folder, *overrides, code=0, **options):
    process = start(folder, *overrides, **options)
    assert process.wait(600) == code, process.stderr[-3000:]
    return process


def start(folder, *overrides, **options):
    _, _, module, *arguments = command(folder, *overrides, **options)
    return Command(module, arguments, REPOSITORY, environment(folder))


def records(folder):
    """Each step's record without what depends on the clock."""
    return [
        {k: v for k, v in r.items() if k not in OF_THE_LENGTH and not k.endswith("_s")}
        for r in read_metrics(folder / "metrics.jsonl")
    ]


def wait_for_steps(process, folder, steps):
    while len(read_metrics(folder / "metrics.jsonl")) < steps:
        assert process.poll() is None, process.stderr[-3000:]
        time.sleep(0.02)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """A run of six steps, three epochs, that was never interrupted: folder, and what it printed."""
    folder = tmp_path_factory.mktemp("whole")
    done = subprocess.run(
        command(folder),
        cwd=REPOSITORY,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, done


@pytest.fixture(scope="module")
def whole(whole_run):
    return whole_run[0]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The same run without drafts, which repeats to the bit: its folder."""
    folder = tmp_path_factory.mktemp("plain")
    train(folder, PLAIN)
    return folder


def cached(folder):
    """The responses in a run's cache, by prompt."""
    overrides = [f"checkpointing.checkpoint_dir={folder}"]
    config = cache_config(load_recipe(REPOSITORY / DEMO, overrides))
    with RolloutStore(config.dir, vocabulary=config.vocabulary, max_bytes=2**22) as store:
        return store.get(key for key, _ in store.scan())


def test_a_run_prints_what_it_loads_and_each_step_once(whole_run):
    _, done = whole_run
    first, *steps = done.stdout.splitlines()
    assert first == f"train: loading {DEMO}, torch and vLLM; the first step takes a minute or more"
    numbers = [re.match(r"speculative step +(\d+)  reward .* tokens/", s)[1] for s in steps]
    assert numbers == ["1", "2", "3", "4", "5", "6"]
    for third_party in ("Triton", "FutureWarning", "NUMA", "it/s"):
        assert third_party not in done.stderr


def test_a_log_that_cannot_be_closed_leaves_no_process(tmp_path):
    class Part:
        def __init__(self):
            self.process = subprocess.Popen(["sleep", "600"])

        def shutdown(self):
            self.process.kill()
            self.process.wait()

    class Begun(Trainer):
        def build(self):
            self.policy, self.generation, self.value = Part(), Part(), Part()
            self.log = MetricsLog(tmp_path, 0, tensorboard=False)
            os.dup2(pipe[1], self.log._file._file.fileno())  # a pipe cannot be flushed to a disk

    pipe = os.pipe()
    trainer = Begun(load_recipe(REPOSITORY / DEMO, [f"checkpointing.checkpoint_dir={tmp_path}"]))
    trainer.stop = True
    with pytest.raises(OSError, match="Invalid argument"):
        list(trainer.run())
    parts = (trainer.policy, trainer.generation, trainer.value)
    assert [part.process.returncode for part in parts] == [-signal.SIGKILL] * 3
    trainer.log._file._file.close()
    for end in pipe:
        os.close(end)


def test_a_run_writes_what_it_promises(whole):
    steps = read_metrics(whole / "metrics.jsonl")
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5, 6]
    assert [r["epoch"] for r in steps] == [0, 0, 1, 1, 2, 2]
    for epoch in range(3):
        prompts = [p for r in steps if r["epoch"] == epoch for p in r["prompts"]]
        assert sorted(prompts) == list(range(8))
    assert steps[0]["prompts"] != steps[2]["prompts"]  # shuffled anew
    for record in steps:
        assert record["policy_version"] == record["step"] - 1
        assert record["step_s"] >= record["rollout_s"] + record["train_s"] - 1e-3
        assert record["decoded_tokens"] == record["response_tokens"]
        assert record["spec_rl/histories_late"] == record["spec_rl/responses_dropped"] == 0
        assert record["spec_rl/responses_kept"] == 16
        assert record["spec_rl/tokens_per_step"] > 1  # siblings draft for each other at once
    cold, warm = steps[:2], steps[2:]
    assert [r["spec_rl/histories_found"] for r in steps] == [0, 0, 4, 4, 4, 4]
    assert [r["spec_rl/cache_prompts"] for r in steps] == [4, *[8] * 5]
    assert [r["spec_rl/cache_responses"] for r in steps] == [16 * step for step in range(1, 7)]
    assert min(r["spec_rl/tokens_per_step"] for r in warm) > max(
        r["spec_rl/tokens_per_step"] for r in cold
    )
    assert [p.name for p in sorted(whole.glob("step_*"))] == ["step_4", "step_6"]
    assert list((whole / "tensorboard").iterdir())


def test_a_run_that_is_done_has_nothing_to_do(whole):
    before = (whole / "metrics.jsonl").read_bytes()
    done = train(whole)
    assert "nothing to do: 6 steps are done" in done.stdout
    assert (whole / "metrics.jsonl").read_bytes() == before


def test_a_killed_run_without_drafts_goes_on_as_if_it_had_not_been(plain, tmp_path):
    """SIGKILL at a random moment; every step once, each exactly as without."""
    rng = random.Random(1)
    process = start(tmp_path, PLAIN, "checkpointing.save_period=3")
    wait_for_steps(process, tmp_path, rng.randint(2, 5))
    assert listening(process.pid) <= {"127.0.0.1", "::1"}  # nothing for other machines
    time.sleep(rng.random())
    process.kill()
    process.wait()
    survived = max((int(p.name[5:]) for p in tmp_path.glob("step_*")), default=0)
    done = train(tmp_path, PLAIN)
    assert survived == 0 or f"resuming from step {survived}" in done.stdout
    assert records(tmp_path) == records(plain)
    assert not (tmp_path / "rollout_cache").exists()
    assert not any(name.startswith("spec_rl/") for r in records(plain) for name in r)


def test_a_killed_run_with_drafts_goes_on_from_its_checkpoint(whole, tmp_path):
    """With the prompts of a run that was not killed, and drafts from its first step on.

    What was decoded after the checkpoint is history, too.
    """
    process = start(tmp_path, "checkpointing.save_period=3")
    wait_for_steps(process, tmp_path, 5)
    process.kill()
    process.wait()
    before = sum(map(len, cached(tmp_path).values()))
    assert before >= 5 * 16
    done = train(tmp_path, "checkpointing.save_period=3")
    assert "resuming from step 3" in done.stdout
    steps, alone = (read_metrics(folder / "metrics.jsonl") for folder in (tmp_path, whole))
    for name in ("step", "epoch", "prompts", "policy_version"):
        assert [r[name] for r in steps] == [r[name] for r in alone]
    assert steps[3]["spec_rl/histories_found"] == 4
    assert steps[3]["spec_rl/cache_responses"] == before + 16
    assert steps[3]["spec_rl/tokens_per_step"] > steps[0]["spec_rl/tokens_per_step"]


@pytest.mark.slow
@pytest.mark.timeout(600)  # three runs
def test_a_checkpoint_is_written_beside_the_rollouts_of_the_next_step(plain, tmp_path):
    """It has the weights of its own step."""
    job = "tests.support.trainer.saving_job"
    train(tmp_path, PLAIN, code=-signal.SIGKILL, program=(job, "kill"))
    assert [p.name for p in tmp_path.glob("step_*")] == ["step_2"]
    failed = train(tmp_path, PLAIN, code=2, program=(job, "full"))
    assert "resuming from step 2" in failed.stdout
    assert "step_4: cannot be written: " in failed.stderr
    assert [p.name for p in tmp_path.glob("*step_*")] == ["step_2"]
    train(tmp_path, PLAIN)
    assert records(tmp_path) == records(plain)


def test_an_interrupt_leaves_a_checkpoint(plain, tmp_path):
    process = start(tmp_path, PLAIN, "checkpointing.save_period=1000")
    wait_for_steps(process, tmp_path, 2)
    process.send_signal(signal.SIGINT)
    for _ in range(2):  # what Slurm sends, and what a launcher passes on, changes nothing
        time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
    assert process.wait(600) == 130, process.stderr[-3000:]
    output = process.stdout + process.stderr
    assert output.count("finishing this step, then saving") == 1
    (checkpoint,) = tmp_path.glob("step_*")
    assert checkpoint.name in ("step_2", "step_3", "step_4")
    train(tmp_path, PLAIN)
    assert records(tmp_path) == records(plain)


def test_a_recipe_that_changed_is_refused(whole):
    done = train(whole, "grpo.seed=1", "grpo.max_num_epochs=4", code=2)
    assert "was made with grpo.seed = 42, the recipe says 1" in " ".join(done.stderr.split())


def test_a_damaged_checkpoint_is_named(whole, tmp_path):
    subprocess.run(["cp", "-r", str(whole), str(tmp_path / "run")], check=True)
    damaged = tmp_path / "run" / "step_6" / "progress.json"
    damaged.write_text("{")
    done = train(tmp_path / "run", "grpo.max_num_epochs=4", code=2)
    assert "remove this folder to resume from step_4" in " ".join(done.stderr.split())


def test_a_run_that_diverges_ends_and_leaves_its_last_checkpoint(whole, tmp_path):
    """Moments that are not finite ruin the weights of the next step, before any refit or save."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    file = run / "step_6" / "policy" / "optimizer.pt"
    state = torch.load(file, weights_only=True)
    for moments in state["state"].values():
        moments["exp_avg"].fill_(float("inf"))
    torch.save(state, file)
    more = ("grpo.max_num_epochs=4", "checkpointing.save_period=1", "checkpointing.keep_top_k=1")
    done = train(run, *more, code=2)
    line = done.stderr.splitlines()[-1]
    assert line.startswith("nemo-specrl: step 7: the training has diverged (the policy's weights ")
    assert f"the last checkpoint is {run / 'step_6'}" in line
    assert "Traceback" not in done.stderr
    assert [p.name for p in step_folders(run)] == ["step_4", "step_6"]
    assert len(read_metrics(run / "metrics.jsonl")) == 6


def test_without_checkpoints_none_is_read_and_none_is_written(whole, tmp_path):
    def files():
        return {p: p.stat().st_mtime_ns for p in whole.rglob("*")}

    before = files()
    off = ("checkpointing.enabled=false", "grpo.max_num_steps=1", f"logger.log_dir={tmp_path}")
    done = train(whole, *off)
    assert "resuming" not in done.stdout
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1]
    assert files() == before
    assert not step_folders(tmp_path)


def test_run_ahead(whole, tmp_path):
    """The look ahead moves no prompt. What is decoded ahead is history, and in no other count."""
    train(tmp_path, "policy.generation.spec_rl.run_ahead.enabled=true")
    steps, alone = read_metrics(tmp_path / "metrics.jsonl"), read_metrics(whole / "metrics.jsonl")
    assert [r["prompts"] for r in steps] == [r["prompts"] for r in alone]
    assert sum(r["spec_rl/run_ahead_tokens"] for r in steps) > 0
    assert all(r["spec_rl/run_ahead_rows"] <= 4 for r in steps)  # one a prompt of the next batch
    assert steps[-1]["spec_rl/run_ahead_rows"] == 0  # nothing comes behind the last one
    assert steps[1]["spec_rl/histories_found"] > 0
    assert all(r["decoded_tokens"] == r["response_tokens"] for r in steps)
    ahead = sum(r["spec_rl/run_ahead_rows"] for r in steps)
    assert 6 * 16 < sum(map(len, cached(tmp_path).values())) <= 6 * 16 + ahead


@pytest.mark.timeout(600)  # two runs
def test_prefix_reuse(tmp_path):
    """Some rows are fresh; a killed run repeats what it had made since its checkpoint."""
    reuse = (
        "policy.generation.spec_rl.preset=reuse",
        "policy.generation.spec_rl.reuse.fresh_fraction=0.3",
    )
    process = start(tmp_path, *reuse, "checkpointing.save_period=3")
    wait_for_steps(process, tmp_path, 4)
    process.kill()
    process.wait()
    train(tmp_path, *reuse, "checkpointing.save_period=3")
    steps = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5, 6]
    for record in steps[:2]:
        assert record["spec_rl/reuse_coverage"] == 0
        assert record["decoded_tokens"] == record["response_tokens"]
        assert "fresh_rows" not in record
    for record in steps[2:]:
        assert record["decoded_tokens"] < record["response_tokens"]
        assert record["spec_rl/reused_token_fraction"] > 0.1
        assert record["fresh_rows"] / 16 == pytest.approx(1 - record["spec_rl/reuse_coverage"])
        assert {"fresh_reward", "reused_reward", "spec_rl/reward_gap"} <= record.keys()
    assert sum(r["fresh_rows"] for r in steps[2:]) > 0
    # What was made after the checkpoint is not there a second time.
    assert steps[-1]["spec_rl/cache_responses"] == 6 * 16


def test_dapo(tmp_path):
    """Clip-higher and dynamic sampling: groups that teach nothing are replaced."""
    small_groups = ("grpo.num_generations_per_prompt=2", "policy.train_global_batch_size=8")
    train(tmp_path, *small_groups, config=DAPO)
    steps = read_metrics(tmp_path / "metrics.jsonl")
    assert sum(len(r["prompts"]) for r in steps) == 24  # three epochs of eight
    assert any(len(r["prompts"]) > 4 for r in steps)
    assert all(r["grad_norm"] > 0 for r in steps[:-1])


def test_ppo(tmp_path):
    """A value model, GAE and several passes; it resumes like GRPO."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train(whole, PLAIN, "ppo.max_num_steps=4", config=PPO)
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "step_4")
    train(resumed, PLAIN, "ppo.max_num_steps=4", config=PPO)
    assert records(resumed) == records(whole)
    assert all(r["value_loss"] > 0 for r in records(whole))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("checkpointing.checkpoint_dir=/proc/nowhere", "/proc/nowhere"),
        (
            "policy.generation.vllm_kwargs.block_size=7",
            "vLLM refuses it: No common block size for 7",
        ),
    ],
)
def test_bad_input_is_one_line_and_code_2(tmp_path, override, message):
    done = train(tmp_path, override, code=2)
    line = " ".join(done.stderr.split("nemo-specrl: ")[-1].split())
    assert message in line
    assert "Traceback" not in done.stderr


def test_a_folder_that_the_user_names_is_shared_by_runs(whole, tmp_path):
    """The second run drafts from its first step on; what is in the folder besides is left alone."""
    cache = tmp_path / "cache"
    shutil.copytree(whole / "rollout_cache", cache)
    (cache / "of the user").touch()
    names = f"policy.generation.spec_rl.cache.dir={cache}", "grpo.max_num_steps=1"
    train(tmp_path / "warm", *names)
    (step,) = read_metrics(tmp_path / "warm" / "metrics.jsonl")
    assert step["spec_rl/histories_found"] == 4
    assert step["spec_rl/cache_responses"] == 7 * 16
    assert (cache / "of the user").exists()
    assert not (tmp_path / "warm" / "rollout_cache").exists()


def test_report_of_a_run(whole):
    done = subprocess.run(
        [sys.executable, "-m", "nemo_specrl", "report", str(whole)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "report.html" in done.stdout.replace("\n", "")
    assert (whole / "report.png").stat().st_size > 10_000


def test_compare(tmp_path):
    """Both sides end to end, from one command."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "nemo_specrl", "compare", DEMO, *SMALL),
            *("grpo.val_at_end=true", "grpo.max_val_samples=8", "--out", str(tmp_path)),
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=1200,
        env=environment(tmp_path / "compare"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "compare.json").read_text())
    assert {"rollout", "rollout_warm", "step", "decoded_tokens"} <= result["ratio"].keys()
    for side in ("plain", "speculative"):
        for name in ("rollout_s", "train_s", "step_s", "decoded_tokens", "reward"):
            assert len(result[side][name]) == 6
        assert result[side]["heldout_accuracy"][-1] is not None
    plain, speculative = result["plain"], result["speculative"]
    expected = sum(plain["rollout_s"]) / sum(speculative["rollout_s"])
    assert result["ratio"]["rollout"] == pytest.approx(expected)
    for name in ("compare.png", "compare.html"):
        assert (tmp_path / name).stat().st_size > 10_000
