"""The embedded trainer through its command line: real engine, real cache, real SIGKILL.

Every run is a process of its own, as a user's is. The recipe is the demo's, made small.
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
from nemo_specrl.trainer.generation.engine import tokenizer_identity
from nemo_specrl.trainer.loop import Trainer
from nemo_specrl.trainer.recipe import load_recipe
from tests.conftest import REPOSITORY
from tests.support.ports import listening
from tests.support.stores import restore

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
    "policy.generation.spec_rl.cache.groups_per_prompt=1",
    "policy.generation.spec_rl.preset=faithful",
)
LOSSLESS = "policy.generation.spec_rl.preset=lossless"
OF_THE_LENGTH = ("total_steps",)
"""Of the run as its recipe had it at the time, which a resumed one may change."""
TIMED = ("rollout_s", "verify_s", "train_s", "step_s", "checkpoint_s", "eval_s")
OF_THE_JOURNAL = ("spec_rl/replayed_rows", "spec_rl/recomputed_tokens")
"""How much of a step came out of the journal, and what it took again of prefixes: none then."""
OF_THE_STORE = ("spec_rl/cache_bytes", "spec_rl/cache_hit_fraction", "spec_rl/disk_used_fraction")
"""Depend on when pages are freed, on look-ups since the store was opened, and on the disk."""


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
    done = subprocess.run(
        command(folder, *overrides, **options),
        cwd=REPOSITORY,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == code, done.stderr[-3000:]
    return done


def start(folder, *overrides):
    return subprocess.Popen(
        command(folder, *overrides),
        cwd=REPOSITORY,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def records(folder):
    """Each step's record without what depends on the clock."""
    left_out = (*TIMED, *OF_THE_JOURNAL, *OF_THE_STORE, *OF_THE_LENGTH)
    return [
        {k: v for k, v in r.items() if k not in left_out and not k.endswith("_s")}
        for r in read_metrics(folder / "metrics.jsonl")
    ]


def wait_for_steps(process, folder, steps):
    while len(read_metrics(folder / "metrics.jsonl")) < steps:
        assert process.poll() is None, process.stdout.read()[-3000:]
        time.sleep(0.02)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """A run of six steps, three epochs, that was never interrupted: folder, and what it printed."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(folder)


@pytest.fixture(scope="module")
def whole(whole_run):
    return whole_run[0]


def test_a_run_prints_what_it_loads_and_each_step_once(whole_run):
    _, done = whole_run
    first, *steps = done.stdout.splitlines()
    assert first == f"train: loading {DEMO}, torch and vLLM; the first step takes a minute or more"
    numbers = [re.match(r"speculative step +(\d+)  reward .* reused \d+%", s)[1] for s in steps]
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
        parts = ("lookup_s", "verify_s", "decode_s", "assembly_s")
        assert record["rollout_s"] >= sum(record[f"spec_rl/{p}"] for p in parts) - 1e-3
        assert record["decoded_tokens"] == record["spec_rl/decoded_tokens"]
    cold, warm = steps[:2], steps[2:]
    assert all(r["spec_rl/draft_coverage"] == 0 for r in cold)
    assert all(r["spec_rl/draft_coverage"] > 0.5 for r in warm)
    assert all(r["decoded_tokens"] < r["response_tokens"] for r in warm)
    assert all(r["decoded_tokens"] == r["response_tokens"] for r in cold)
    assert [p.name for p in sorted(whole.glob("step_*"))] == ["step_4", "step_6"]
    assert list((whole / "tensorboard").iterdir())


def test_a_run_that_is_done_has_nothing_to_do(whole):
    before = (whole / "metrics.jsonl").read_bytes()
    done = train(whole)
    assert "nothing to do: 6 steps are done" in done.stdout
    assert (whole / "metrics.jsonl").read_bytes() == before


def test_a_killed_run_goes_on_as_if_it_had_not_been(whole, tmp_path):
    """SIGKILL at a random moment; every step once, each with the same prompts and rewards.

    The steps that were lost are not decoded again.
    """
    rng = random.Random(1)
    process = start(tmp_path, "checkpointing.save_period=3")
    wait_for_steps(process, tmp_path, rng.randint(2, 5))
    time.sleep(rng.random())
    process.kill()
    process.wait()
    done_before = len(read_metrics(tmp_path / "metrics.jsonl"))
    survived = max((int(p.name[5:]) for p in tmp_path.glob("step_*")), default=0)
    done = train(tmp_path)
    assert survived == 0 or f"resuming from step {survived}" in done.stdout
    assert records(tmp_path) == records(whole)
    replayed = {
        r["step"]: r["spec_rl/replayed_rows"] for r in read_metrics(tmp_path / "metrics.jsonl")
    }
    assert all(replayed[step] == 16 for step in range(survived + 1, done_before + 1))
    assert sum(rows > 0 for rows in replayed.values()) <= done_before - survived + 1


@pytest.mark.timeout(600)  # three runs
def test_a_run_that_loses_all_its_steps_takes_them_from_the_journal(whole, tmp_path):
    """Without any checkpoint, and killed twice."""
    for steps in (1, 3):
        process = start(tmp_path, "checkpointing.save_period=1000")
        wait_for_steps(process, tmp_path, steps)
        process.kill()
        process.wait()
        steps = len(read_metrics(tmp_path / "metrics.jsonl"))
    last = steps + 1
    train(tmp_path, "checkpointing.save_period=1000", f"grpo.max_num_steps={last}")
    assert records(tmp_path) == records(whole)[:last]
    rows = [r["spec_rl/replayed_rows"] for r in read_metrics(tmp_path / "metrics.jsonl")]
    assert rows[:steps] == [16] * steps


def test_a_run_of_another_recipe_takes_nothing_from_the_journal(tmp_path):
    process = start(tmp_path, "checkpointing.save_period=1000")
    wait_for_steps(process, tmp_path, 1)
    assert listening(process.pid) <= {"127.0.0.1", "::1"}  # nothing for other machines
    process.kill()
    process.wait()
    train(tmp_path, "checkpointing.save_period=1000", "grpo.seed=7", "grpo.max_num_steps=1")
    assert [r["spec_rl/replayed_rows"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [0]


@pytest.mark.timeout(600)  # three runs
def test_a_checkpoint_is_written_beside_the_rollouts_of_the_next_step(whole, tmp_path):
    """It has the weights of its own step, and these rollouts outlive the process in the journal."""
    job = "tests.support.trainer.saving_job"
    train(tmp_path, code=-signal.SIGKILL, program=(job, "kill"))
    assert [p.name for p in tmp_path.glob("step_*")] == ["step_2"]
    failed = train(tmp_path, code=2, program=(job, "full"))
    assert "resuming from step 2" in failed.stdout
    assert "step_4: cannot be written: " in failed.stderr
    assert [p.name for p in tmp_path.glob("*step_*")] == ["step_2"]
    train(tmp_path)
    assert records(tmp_path) == records(whole)
    steps = {r["step"]: r for r in read_metrics(tmp_path / "metrics.jsonl")}
    assert [steps[step]["spec_rl/replayed_rows"] for step in (3, 4, 5, 6)] == [16, 16, 16, 0]


@pytest.mark.timeout(600)  # two runs
def test_a_full_disk_of_the_cache_costs_a_run_speed_alone(tmp_path):
    """Its checkpoint is without the cache; what resumes from it starts cold and goes on."""
    more = "checkpointing.save_period=2"
    job = ("tests.support.trainer.saving_job", "cache")
    done = train(tmp_path, more, "grpo.max_num_steps=2", program=job)
    said = " ".join((done.stdout + done.stderr).split())
    assert said.count("Further failures are counted in spec_rl/cache_errors") == 1
    assert said.count("the checkpoint is without it") == 1
    assert said.count("closing the rollout cache: ") == 1
    assert "Traceback" not in said
    assert [p.name for p in tmp_path.glob("*step_*")] == ["step_2"]
    assert not (tmp_path / "step_2" / "rollout_cache" / "manifest.json").exists()
    steps = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["spec_rl/cache_errors"] for r in steps] == [1, 1]
    resumed = train(tmp_path, more, "grpo.max_num_steps=4")
    assert "resuming from step 2" in resumed.stdout
    assert "it starts cold" in " ".join(resumed.stderr.split())
    steps = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["spec_rl/cache_errors"] for r in steps] == [1, 1, 0, 0]
    assert (tmp_path / "step_4" / "rollout_cache" / "manifest.json").exists()


def test_an_interrupt_leaves_a_checkpoint(whole, tmp_path):
    process = start(tmp_path, "checkpointing.save_period=1000")
    wait_for_steps(process, tmp_path, 2)
    process.send_signal(signal.SIGINT)
    for _ in range(2):  # what Slurm sends, and what a launcher passes on, changes nothing
        time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output[-3000:]
    assert output.count("finishing this step, then saving") == 1
    (checkpoint,) = tmp_path.glob("step_*")
    assert checkpoint.name in ("step_2", "step_3", "step_4")
    train(tmp_path)
    assert records(tmp_path) == records(whole)


def test_the_cache_of_a_run_is_in_its_checkpoint(whole, tmp_path):
    restore(whole / "step_6" / "rollout_cache", tmp_path / "copy")
    identity = tokenizer_identity(str(REPOSITORY / "examples/models/qwen3-sort"))
    with RolloutStore(tmp_path / "copy", max_bytes=2**22, tokenizer_id=identity) as store:
        assert store.stats().prompts == 8
        assert store.stats().rollouts == 32


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


def test_plain_and_speculative_begin_alike(whole, tmp_path):
    """Same seeds: the cold epoch's rollouts, rewards and updates are those of plain training."""
    train(tmp_path, "policy.generation.spec_rl.enabled=false", "grpo.max_num_epochs=1")
    plain = read_metrics(tmp_path / "metrics.jsonl")
    speculative = read_metrics(whole / "metrics.jsonl")[:2]
    for name in ("prompts", "reward", "response_tokens", "loss", "grad_norm"):
        assert [r[name] for r in plain] == [r[name] for r in speculative]
    assert not (tmp_path / "rollout_cache").exists()
    assert not any(name.startswith("spec_rl/") for r in plain for name in r)


def test_lossless(tmp_path):
    """Trees draft from the first epoch on, nothing is reused, and a kill loses no rollout."""
    # Drafts of one length: with others, a busy machine may measure that none are worth it.
    options = LOSSLESS, "policy.generation.spec_rl.tree.adaptive=false"
    process = start(tmp_path, *options, "checkpointing.save_period=1000")
    wait_for_steps(process, tmp_path, 3)
    process.kill()
    process.wait()
    before = read_metrics(tmp_path / "metrics.jsonl")
    train(tmp_path, *options, "checkpointing.save_period=1000")
    steps = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5, 6]
    replayed = [r["spec_rl/replayed_rows"] for r in steps]
    assert replayed[: len(before)] == [16] * len(before)
    for name in ("prompts", "reward", "response_tokens"):
        assert [r[name] for r in steps[: len(before)]] == [r[name] for r in before]
    for record in (*before, *steps[len(before) + 1 :]):
        assert record["spec_rl/draft_coverage"] == record["spec_rl/cache_errors"] == 0
        assert record["decoded_tokens"] == record["response_tokens"]
        assert record["spec_rl/tree_tokens_per_step"] > 1
    assert steps[-1]["spec_rl/tree_tokens_per_step"] > before[0]["spec_rl/tree_tokens_per_step"]


def test_run_ahead(whole, tmp_path):
    """The look ahead moves nothing: after a kill, each step has the prompts of a run without it.

    What is decoded ahead is in no count of the training's, and not in the cache.
    """
    options = (LOSSLESS, "policy.generation.spec_rl.run_ahead.enabled=true")
    process = start(tmp_path, *options, "checkpointing.save_period=2")
    wait_for_steps(process, tmp_path, 3)
    process.kill()
    process.wait()
    before = read_metrics(tmp_path / "metrics.jsonl")
    train(tmp_path, *options, "checkpointing.save_period=2")
    steps = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["prompts"] for r in steps] == [r["prompts"] for r in records(whole)]
    for name in ("prompts", "reward", "response_tokens"):
        assert [r[name] for r in steps[: len(before)]] == [r[name] for r in before]
    assert sum(r["spec_rl/run_ahead_tokens"] for r in before) > 0
    for record in (*before, *steps):
        if record["spec_rl/replayed_rows"] or record["step"] == 6:
            # Nothing is decoded in a replayed step, and nothing comes behind the last one.
            assert record.get("spec_rl/run_ahead_tokens", 0) == 0
        assert record.get("spec_rl/run_ahead_rows", 0) <= 4  # one for each prompt of a batch
        assert record["decoded_tokens"] == record["response_tokens"]
        assert record["spec_rl/cache_errors"] == record["spec_rl/draft_coverage"] == 0
    identity = tokenizer_identity(str(REPOSITORY / "examples/models/qwen3-sort"))
    for folder in (tmp_path / "step_6" / "rollout_cache", tmp_path / "step_4" / "rollout_cache"):
        copy = tmp_path / f"copy-{folder.parent.name}"
        restore(folder, copy)
        with RolloutStore(copy, max_bytes=2**22, tokenizer_id=identity) as store:
            assert (store.stats().prompts, store.stats().rollouts) == (8, 32)


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
    train(whole, "ppo.max_num_steps=4", config=PPO)
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "step_4")
    train(resumed, "ppo.max_num_steps=4", config=PPO)
    assert records(resumed) == records(whole)
    steps = records(whole)
    assert all(r["value_loss"] > 0 for r in steps)
    assert steps[3]["spec_rl/draft_coverage"] > 0.5


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


def test_a_run_begins_with_a_warm_start_and_not_with_what_another_run_left(whole, tmp_path):
    """Though both name the same cache folder; the warm start's rollouts serve from step 2 on."""
    cache = tmp_path / "cache"
    with RolloutStore(cache / ("a" * 16), max_bytes=2**22, tokenizer_id="another"):
        pass
    command = (sys.executable, "-m", "nemo_specrl", "cache", "import", whole / "step_6", cache)
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    names = f"policy.generation.spec_rl.cache.dir={cache}", "grpo.max_num_steps=2"
    train(tmp_path / "warm", *names)
    cold = read_metrics(whole / "metrics.jsonl")[:2]
    warm = read_metrics(tmp_path / "warm" / "metrics.jsonl")
    assert [r["spec_rl/cache_prompts"] for r in cold] == [4, 8]
    assert [r["spec_rl/cache_prompts"] for r in warm] == [8, 8]
    assert [r["spec_rl/draft_coverage"] for r in cold] == [0, 0]
    assert warm[0]["spec_rl/draft_coverage"] == 0 < warm[1]["spec_rl/draft_coverage"]
    assert sorted(len(folder.name) for folder in cache.iterdir()) == [10, 16, 16]


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
        timeout=280,
        env=environment(tmp_path / "compare"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "compare.json").read_text())
    assert {"rollout", "rollout_warm", "step", "decoded_tokens"} <= result["ratio"].keys()
    for side in ("plain", "speculative"):
        for name in ("rollout_s", "verify_s", "train_s", "step_s", "decoded_tokens", "reward"):
            assert len(result[side][name]) == 6
        assert result[side]["heldout_accuracy"][-1] is not None
    plain, speculative = result["plain"], result["speculative"]
    assert plain["reward"][:2] == speculative["reward"][:2]
    expected = sum(plain["rollout_s"]) / sum(speculative["rollout_s"])
    assert result["ratio"]["rollout"] == pytest.approx(expected)
    assert result["ratio"]["decoded_tokens"] > 1
    for name in ("compare.png", "compare.html"):
        assert (tmp_path / name).stat().st_size > 10_000
