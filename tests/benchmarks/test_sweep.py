"""Benchmarks over many settings in their smallest form: sweep, regimes, simulator."""

import json

import pytest

from tests.support.benchmarks import SMALL_RECORDING, run

pytestmark = pytest.mark.timeout(900)  # two processes with three to five engines each


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """The sweep over five axes: what it printed, and rows by place."""
    out = tmp_path_factory.mktemp("sweep")
    picture = out / "sweep.png"
    small = ("--arms", "tree", "--seconds", 0.3, *SMALL_RECORDING)
    points = ("temperature=0.5,2", "length=5,20", "group=32", "sequences=2,16", "engines=1,4")
    printed = run(
        *("--out", out, "--points", *points, "--seeds", 1, 2, *small, "--plot", picture),
        script="rollout.sweep",
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = json.loads((out / "sweep.json").read_text())["rows"]
    seeds = [[row["response_tokens"] for row in rows if row["seed"] == seed] for seed in (1, 2)]
    assert seeds[1] and seeds[0][: len(seeds[1])] != seeds[1]  # they are other samples
    quickest = [row for row in rows if row["arm"] == "tree" and row["axis"] != "engines"]
    assert all(sum(row["repetitions_s"]) > 0.299 for row in quickest)  # short ones are repeated
    rows = [row for row in rows if row["seed"] == 1]
    return printed, {(row["axis"], row["value"], row["arm"], row["epoch"]): row for row in rows}


def test_the_sweep_makes_the_policy_unsure_without_changing_how_the_engine_samples(swept):
    _, rows = swept
    sure, unsure = (rows["temperature", value, "tree", 1] for value in (0.5, 2))
    assert sure["mean_p"] > 0.98 and unsure["mean_p"] < 0.8
    gains = [row["response_tokens"] / row["row_steps"] for row in (sure, unsure)]
    assert gains[0] > 1.5 * gains[1] > 1.5


def test_several_engines_of_the_sweep_share_the_rows_and_the_longest_counts(swept):
    printed, rows = swept
    assert printed.count("\n| ") == 5 + 9  # a header for each axis, and all points
    for arm in ("plain", "tree"):
        one, four = (rows["engines", value, arm, 1] for value in (1, 4))
        # Eight prompts, of which each of four engines has two.
        assert one["engine_steps"] / 4 <= four["engine_steps"] < 0.7 * one["engine_steps"]
        if arm == "plain":
            assert four["response_tokens"] == four["row_steps"] == one["row_steps"]


def test_methods_of_the_sweep_draft_from_what_plain_decoding_made(swept):
    _, rows = swept
    assert {epoch for *_, epoch in rows} == {1}
    tree = rows["group", 32, "tree", 1]
    # Two prompts of 32 rows, all of which have 32 earlier rollouts to draft from.
    assert tree["row_steps"] < 0.3 * tree["response_tokens"]


def test_the_sweep_limits_the_rows_that_its_engines_run_at_once(swept):
    _, rows = swept
    few, many = (rows["sequences", value, "plain", 1] for value in (2, 16))
    assert few["row_steps"] == many["row_steps"]
    assert few["row_steps"] / 2 <= few["engine_steps"] < few["row_steps"] / 1.8
    assert many["row_steps"] / 16 <= many["engine_steps"] < many["row_steps"] / 8


def test_engines_of_the_sweep_serve_other_lengths_and_groups(swept):
    _, rows = swept
    for arm in ("plain", "tree"):
        for length in (5, 20):  # responses of this task are longer
            assert rows["length", length, arm, 1]["response_tokens"] == 64 * length
        of_two = rows["group", 32, arm, 1]
        assert of_two["prompts"] == 2
        assert of_two["response_tokens"] == pytest.approx(64 * of_two["length"], rel=1e-3)


def test_regimes_differ_in_how_far_drafts_go(tmp_path):
    printed = run(
        *("--out", tmp_path, "--tasks", "sorting", "--sequences", 4, "--seeds", 1),
        *("--prompts", 2, *SMALL_RECORDING),
        script="rollout.regimes",
    )
    assert printed.count("\n| sorting | 4 |") == 2
    data = json.loads((tmp_path / "regimes.json").read_text())
    (here,) = data["measured"]
    assert here["device"].startswith("CPU: ")
    assert set(here) == {"date", "device", "python", "vllm", "torch", "nemo_specrl"}
    rows = data["rows"]
    assert all(len(row["repetitions_s"]) == 2 for row in rows)
    for epoch in (0, 1):
        here = {row["arm"]: row for row in rows if row["epoch"] == epoch}
        assert here["plain"]["drafted_tokens"] == 0
        lengths = [here[p]["drafted_tokens"] / here[p]["row_steps"] for p in ("0.1", "0.2", "0.6")]
        assert lengths[0] > lengths[1] > lengths[2] > 0
        assert here["adaptive"]["response_tokens"] > 0


def test_the_simulator_is_compared_with_the_engine(tmp_path):
    small = ("--prompts", 2, "--seconds", 0, "--warm-up-steps", 2, *SMALL_RECORDING)
    parts = ("--parts", "sorting-16", "any-order-64")
    printed = run("--out", tmp_path, *parts, *small, script="simulation.simulate")
    result = json.loads((tmp_path / "simulator.json").read_text())
    assert printed.count("\n| any-order | 64 |") == 8
    for point in result["points"]:
        if point["arm"] == "plain":
            assert point["simulated"] == point["measured"]  # counts of steps, rows and tokens
        assert point["predicted_s"] > 0 and point["measured_s"] > 0
