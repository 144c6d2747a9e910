"""Benchmarks in their smallest form, on the real engine: what they write, not how fast."""

import json
import statistics
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.shared.arms import in_own_process
from benchmarks.shared.engines import of_steps
from benchmarks.shared.recording import TASKS, record, weights
from benchmarks.shared.turns import SLICE, Turns
from tests.conftest import REPOSITORY
from tests.support.benchmarks import SMALL_RECORDING, SMALL_TRAINING, run

ARMS = ["plain", "n-gram", "suffix", "tree", "fast, tree"]
EPOCHS, PROMPTS, GROUP = 2, 2, 3
pytestmark = pytest.mark.timeout(900)  # two processes with three to five engines each


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Its printed text, the rows it wrote, the arms it left out, its report, and its folder."""
    out = tmp_path_factory.mktemp("rollout")
    printed = run(
        *("--out", out, "--tasks", "sorting", "--arms", *ARMS, "--epochs", EPOCHS),
        *("--prompts", PROMPTS, "--group", GROUP, "--sequences", 4, "--groups", 2),
        *SMALL_RECORDING,
    )
    data = json.loads((out / "rollout.json").read_text())
    again = run("--report", out / "rollout.json")
    return printed, data["rows"], data["left_out"], again, out


def test_what_a_benchmark_started_ends_with_it_even_if_it_is_killed():
    work = "import os, time; print(os.getpid(), flush=True); time.sleep(300)"
    code = f"from benchmarks.shared.arms import in_own_process; in_own_process(exec, {work!r})"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE) as process:
        started = psutil.Process(int(process.stdout.readline()))
        process.kill()
    started.wait(30)


def of(rows, arm, *, of_groups=False):
    return [row for row in rows if (row["arm"], row["of_groups"]) == (arm, of_groups)]


def test_work_that_takes_turns_goes_on_side_by_side_and_a_failure_is_raised():
    turns, order = Turns(), []

    def work(name, fails=False):
        for _ in range(4):
            order.append(name)
            until = time.thread_time() + 1.5 * SLICE
            while time.thread_time() < until:
                pass
            turns.passed()
        if fails:
            raise ValueError(name)
        return name.upper()

    works = {name: lambda name=name: work(name) for name in "ab"}
    assert turns.run(works, {}) == {"a": "A", "b": "B"}
    assert set(order[:3]) == set(order[-3:]) == {"a", "b"}
    with pytest.raises(ValueError, match="b"):
        turns.run({"a": works["a"], "b": lambda: work("b", fails=True)}, {})


def test_seconds_of_repetitions_are_those_of_their_steps():
    readings = [[1.0, 5.0], [2.0, 3.0], [9.0, 4.0], [1.0, 1.0, 1.0]]  # the last took other steps
    assert of_steps(readings) == 2.0 + 4.0
    assert of_steps(readings, np.min) == 1.0 + 3.0


def test_every_arm_has_a_row_for_each_epoch_or_a_reason(result):
    _, rows, left_out, *_ = result
    for arm in ARMS:
        if arm in left_out:
            assert arm == "suffix" and "Arctic Inference" in left_out[arm]
            continue
        assert [row["epoch"] for row in of(rows, arm)] == list(range(EPOCHS))
        assert all(row["prompts"] * row["group"] == PROMPTS * GROUP for row in of(rows, arm))
    assert not {row["arm"] for row in rows} & set(left_out)


def test_counts_of_plain_decoding_are_those_of_its_tokens(result):
    _, rows, *_ = result
    for row in of(rows, "plain"):
        assert row["drafted_tokens"] == row["accepted_tokens"] == row["tree_bytes"] == 0
        assert row["row_steps"] == row["response_tokens"] == row["decoded_tokens"] > 0
        assert row["engine_steps"] < row["row_steps"]


def test_drafting_is_counted_and_saves_steps(result):
    _, rows, *_ = result
    for row in of(rows, "tree") + of(rows, "n-gram"):
        assert 0 < row["accepted_tokens"] <= row["drafted_tokens"]
        # A response may end inside its last draft, of which the rest is counted as accepted.
        assert row["row_steps"] < row["response_tokens"]
        assert row["row_steps"] + row["accepted_tokens"] >= row["response_tokens"]
        assert row["proposer_s"] > 0
    assert all(row["tree_bytes"] > 0 for row in of(rows, "tree"))
    cold, warm = of(rows, "fast, tree")
    assert cold["decoded_tokens"] == cold["response_tokens"]
    assert warm["decoded_tokens"] < warm["response_tokens"]


def test_weights_move_between_the_epochs_and_arms_share_them(result):
    """The policies are the same for all arms: only sampling tells their log-probs apart."""
    _, rows, _, _, out = result
    first, second = (
        load_file(out / "recordings" / "sorting" / f"epoch_{epoch}.safetensors")
        for epoch in range(EPOCHS)
    )
    assert second.keys() == first.keys() - {"lm_head.weight"}
    moved = [float((second[name] - first[name].float()).abs().max()) for name in second]
    assert 0 < max(moved) < 1e-3
    for epoch in range(EPOCHS):
        here = [row for row in rows if row["epoch"] == epoch and not row["of_groups"]]
        plain = next(row for row in here if row["arm"] == "plain")
        for row in here:
            assert 0.9 < row["mean_p"] <= 1
            assert abs(row["logprob"] - plain["logprob"]) < 0.1
            assert 0 <= row["reward"] <= 1 and row["processor_s"] > 0


def test_a_training_of_adapters_is_recorded_as_adapters(tmp_path):
    """And the weights that engines get are those with the adapter merged, by peft."""
    recipe = ("policy.dtensor_cfg.lora_cfg.enabled=true", "policy.dtensor_cfg.lora_cfg.dim=4")
    amount = (tmp_path, 2, 0, (*recipe, *SMALL_RECORDING[1:]))
    in_own_process(record, "sorting", *amount)
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"epoch_0.safetensors", "epoch_1", "recording.json"}
    base = AutoModelForCausalLM.from_pretrained(REPOSITORY / TASKS["sorting"].model)
    first, second = dict(weights(tmp_path, 0)), dict(weights(tmp_path, 1))
    merged = PeftModel.from_pretrained(base.float(), tmp_path / "epoch_1").merge_and_unload()
    wanted = {name: p.detach() for name, p in merged.named_parameters()}
    assert second.keys() == wanted.keys()
    for name, weight in second.items():
        torch.testing.assert_close(weight.float(), wanted[name], rtol=0, atol=1e-6)
    assert any(not torch.equal(first[name], second[name]) for name in second)


def test_groups_are_measured_and_the_trees_of_a_bound_are_an_arm(result):
    _, rows, *_ = result
    for arm in ("plain", "tree", "tree, 2 MiB"):
        assert [(row["group"], row["epoch"]) for row in of(rows, arm, of_groups=True)] == [
            (2, 0),
            (2, 1),
        ]


def test_the_report_is_what_was_printed(result):
    printed, rows, _, again, _ = result
    assert again.strip() in printed
    for arm in {row["arm"] for row in rows}:
        assert f"| {arm} |" in again


def test_a_training_for_the_study_of_fidelity_counts_its_rollouts(tmp_path):
    counts = tmp_path / "counts.jsonl"
    run(
        *(counts, REPOSITORY / "examples/configs/grpo_sort_cpu.yaml", *SMALL_TRAINING),
        *("grpo.max_num_epochs=1", "grpo.val_at_start=false", "grpo.val_at_end=false"),
        "logger.tensorboard_enabled=false",
        *(f"logger.log_dir={tmp_path}", f"checkpointing.checkpoint_dir={tmp_path}"),
        script="fidelity.train",
    )
    lines = [json.loads(line) for line in counts.read_text().splitlines()]
    assert [(line["step"], line["attempt"]) for line in lines] == [(1, 0), (2, 0)]
    # A response has at most 160 tokens, and no step yields less than one.
    assert all(0 < line["engine_steps"] <= 160 and line["rollout_cpu_s"] > 0 for line in lines)


def test_one_store_is_measured_beside_disk_and_memory(tmp_path):
    out = tmp_path / "cache.json"
    small = ("--dir", tmp_path, "--prompts", 16, "--tokens", 50, "--runs", 2)
    printed = run("--out", out, *small, script="cache.cache")
    assert "| of the raw speed |" in printed
    timings = json.loads(out.read_text())["timings"]
    assert all(len(figures["runs"]) == 2 and figures["mb_s"] > 0 for figures in timings.values())
    assert timings["put and sync"]["mb"] == timings["get, warm"]["mb"] > 0.05
    assert [path.name for path in tmp_path.iterdir()] == ["cache.json"]


def test_the_demo_is_trained_with_each_side_of_a_seed(tmp_path):
    few = ("grpo.max_num_epochs=2", "grpo.max_val_samples=2", "grpo.val_period=2")
    small = ("--override", *SMALL_TRAINING, *few)
    out = tmp_path / "seeds.json"
    printed = run("--out", tmp_path / "runs", "--json", out, *small, script="fidelity.demo_seeds")
    assert "seed 1, plain: done" in printed and "seed 1, lossless: done" in printed
    assert "| seed | side |" in printed and "\n| 1 | lossless |" in printed
    plain, lossless = json.loads(out.read_text())["rows"]
    assert (plain["side"], lossless["side"]) == ("plain", "lossless")
    assert plain["steps"] == lossless["steps"] == 4
    assert set(plain["heldout_accuracy"]) == {"0", "2", "4"}


def test_run_ahead_is_compared_with_and_without(tmp_path):
    out = tmp_path / "run_ahead.json"
    small = ("--places", 32, "--batches", 2, "--epochs", 1, "--repeats", 2)
    printed = run("--out", out, *small, script="rollout.run_ahead")
    assert printed.count("\n| 32 | first |") == 1
    off, on = json.loads(out.read_text())["rows"]
    assert off["run_ahead_tokens"] == 0 < on["run_ahead_tokens"]
    assert len(on["repetitions_s"]) == 2  # of the same steps
    assert on["cpu_s"] == pytest.approx(statistics.fmean(on["repetitions_s"]), abs=1e-3)
    assert on["engine_steps"] > 0 and on["tree_accepted_tokens"] > 0


def test_engines_that_share_a_batch_are_compared_by_how_it_is_dealt_out(tmp_path):
    out = tmp_path / "balance.json"
    small = ("--places", 4, "--drafts", 3, "--seeds", 0, "--prompts", 4)
    printed = run("--out", out, *small, script="rollout.balance")
    rows = json.loads(out.read_text())["rows"]
    places = [(row["epoch"], row["mode"]) for row in rows]
    assert places == [(0, mode) for mode in ("split", "in turn", "queue")] + [
        (1, mode) for mode in ("split", "in turn", "queue", "prompts", "rows")
    ]
    assert printed.count("\n| 4 | 4 | 3 |") == len(rows)
    for row in rows:
        assert len(row["ends"]) == len(row["ends_s"]) == 4  # one for each engine
        assert 0 < row["row_steps"] <= row["tokens"] and min(row["ends"]) > 0
    # Of drafts from the first epoch, each row gets some in the second one.
    first, second = (next(row for row in rows if row["epoch"] == epoch) for epoch in (0, 1))
    assert second["tokens"] / second["row_steps"] > first["tokens"] / first["row_steps"]


def test_a_cold_cache_is_measured_in_pairs(tmp_path):
    out = tmp_path / "cold.json"
    run("--out", out, "--pairs", 2, "--prompts", 1, script="rollout.cold_overhead")
    data = json.loads(out.read_text())
    assert len(data["ratios"]) == len(data["seconds"]["plain"]) == 2


def test_lost_steps_are_made_again(tmp_path):
    out = tmp_path / "resume.json"
    printed = run(
        *("--out", out, "--steps", 2, "--repeats", 2, *SMALL_TRAINING), script="trainer.resume"
    )
    assert "rewards and lengths the same" in printed
    steps = json.loads(out.read_text())["steps"]
    assert len(steps) == 2
    assert all(len(step["repetitions_s"]["again"]) == 2 for step in steps)


@pytest.fixture(scope="module")
def gpu_result(tmp_path_factory):
    """The GPU benchmark with a tiny model on a CPU, cut off behind two points and begun again:
    the points of the first part, everything, and what was printed.
    """
    out = tmp_path_factory.mktemp("gpu") / "gpu.json"
    options = ("--size", "tiny", "--out", out)
    run(*options, "--points", "verification/4x32", "memory/bound", script="gpu.gpu_rollout")
    first = json.loads(out.read_text())["points"]
    printed = run(*options, "--plot", out.with_suffix(".png"), script="gpu.gpu_rollout")
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    return first, json.loads(out.read_text()), printed


def medians(point, side, name):
    return statistics.median(repetition[side][name] for repetition in point["repetitions"])


def test_the_gpu_benchmark_goes_on_where_it_was_cut_off(gpu_result):
    first, data, printed = gpu_result
    assert set(first) == {"verification/4x32", "memory/bound"}
    assert {name: data["points"][name] for name in first} == first
    assert {name.split("/")[0] for name in data["points"]} == {
        *("verification", "reuse", "lossless", "memory", "pressure")
    }
    assert not data["failed"] and "all points are measured" in printed
    assert data["machine"]["size"] == "tiny" and data["machine"]["device"].startswith("CPU")
    for point in data["points"].values():
        assert len(point["repetitions"]) == 2
        assert set(point["runners"].values()) == {"V1, CPU"}


def test_the_gpu_benchmark_verifies_whole_drafts_and_finds_the_fractions_it_wants(gpu_result):
    points = gpu_result[1]["points"]
    for name in ("verification/4x32", "verification/8x64"):
        assert medians(points[name], "verification", "accepted_fraction") == 1
    reuse, pressure = points["reuse"], points["pressure"]
    found = [medians(reuse, side, "accepted_fraction") for side in ("0.0", "0.5", "1.0")]
    assert found[0] < 0.1 < found[1] < 0.9 < found[2]
    assert medians(reuse, "1.0", "refused_drafts") == 0
    assert pressure["tokens"] > 1.5 * pressure["kv_tokens"]
    for side in ("loop", "phases"):
        assert 0.1 < medians(pressure, side, "accepted_fraction") < 0.9


def test_the_gpu_benchmark_drafts_for_policies_of_the_entropy_it_names(gpu_result):
    points = gpu_result[1]["points"]
    for batch in (1, 16):
        uncertain, certain = (points[f"lossless/{p}/{batch}"] for p in (0.7, 0.95))
        assert medians(uncertain, "plain", "mean_p") < medians(certain, "plain", "mean_p")
        for method in ("proposer", "rounds"):
            steps = [medians(p, method, "tokens_per_step") for p in (uncertain, certain)]
            assert 1 < steps[0] < steps[1]
            assert medians(certain, method, "refused_drafts") == 0
    assert 0.6 < medians(points["lossless/0.7/16"], "plain", "mean_p") < 0.8
