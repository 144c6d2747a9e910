"""Reports and comparisons: the sums, what they refuse, and the files that they write."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import subprocess
import sys

import pytest
from PIL import Image
from rich.console import Console

from nemo_specrl.errors import ConfigError
from nemo_specrl.monitoring.comparison import comparison, verdict
from nemo_specrl.monitoring.metrics_file import MetricsFile
from nemo_specrl.monitoring.report import print_comparison, write_comparison, write_report
from nemo_specrl.monitoring.run_steps import run_steps

STEPS_PER_EPOCH = 2


def metrics_row(step, *, speculative=False, **changes):
    """A step that takes 10 s of rollout when plain; drafts help from the second epoch on."""
    epoch = (step - 1) // STEPS_PER_EPOCH
    helped = speculative and epoch > 0
    row = {
        "step": step,
        "epoch": epoch,
        "policy_version": step - 1,
        "prompts": [step % STEPS_PER_EPOCH, 7],
        "reward": 0.5,
        "fresh_reward": 0.4 if speculative else None,
        "rollout_s": 4.0 / epoch if helped else 10.0,
        "train_s": 5.0,
        "step_s": 5.0 + (4.0 / epoch if helped else 10.0),
        "decoded_tokens": 250 if helped else 1000,
        "response_tokens": 1000,
        "response_length": 125.0,
        "loss": 0.01,
        "clip_fraction": 0.02,
        "kl": 0.001,
        "grad_norm": 0.7,
    }
    if speculative:
        row |= {"spec_rl/reuse_coverage": float(epoch > 0)}
    return row | changes


def make_run(folder, *, steps=6, speculative=False, accuracies=None):
    """A run folder; ``accuracies``: held-out accuracy by step."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [metrics_row(step, speculative=speculative) for step in range(1, steps + 1)]
    for step, accuracy in (accuracies or {}).items():
        rows[step - 1]["heldout_accuracy"] = accuracy
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def runs(tmp_path):
    """A plain run and a speculative one, of three epochs."""
    return (
        make_run(tmp_path / "plain", accuracies={2: 0.30, 4: 0.40, 6: 0.50}),
        make_run(tmp_path / "spec", speculative=True, accuracies={2: 0.32, 4: 0.35, 6: 0.48}),
    )


def image_of(png):
    image = Image.open(io.BytesIO(png))
    image.load()
    return image


def assert_self_contained(page, png):
    """Nothing is loaded from elsewhere, and the embedded picture is the one on disk."""
    assert not re.search(r"""(src|href)\s*=\s*["']?\s*(https?:)?//""", page)
    assert not re.search(r"<script|<link|@import|url\(", page)
    sources = re.findall(r'src="([^"]*)"', page)
    assert len(sources) == 1
    kind, data = sources[0].split(",", 1)
    assert kind == "data:image/png;base64"
    assert base64.b64decode(data) == png


def assert_good_picture(png, size=(1400, 900)):
    assert len(png) < 250_000
    image = image_of(png)
    assert image.format == "PNG"
    assert image.size == size
    assert len(image.convert("RGB").getcolors(1 << 24)) > 20, "an empty canvas"


def printed(compare):
    console = Console(width=120, file=io.StringIO())
    print_comparison(compare, console)
    return console.file.getvalue()


# Reading.


def steps_of(run):
    rows, damaged = run_steps(run)
    return [row["step"] for row in rows], damaged


def test_torn_last_line_is_left_out(tmp_path):
    run = make_run(tmp_path / "run", steps=3)
    path = run / "metrics.jsonl"
    whole = path.read_bytes()
    for torn in (b'{"step": 4, "epo', b'{"step": 4, "note": "\xc3', b"\0\0\0\0", b"[4]"):
        path.write_bytes(whole + torn)
        assert steps_of(run) == ([1, 2, 3], "")
    path.write_bytes(whole.rstrip(b"\n"))  # whole, but for its newline
    assert steps_of(run) == ([1, 2, 3], "")


def test_every_cut_of_the_last_line_is_survived(tmp_path):
    run = make_run(tmp_path / "run", steps=2)
    path = run / "metrics.jsonl"
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for end in range(first, len(whole) - 1):
        path.write_bytes(whole[:end])
        assert steps_of(run) == ([1], "")


def test_a_damaged_line_elsewhere_costs_that_line_and_is_counted(tmp_path, caplog):
    run = make_run(tmp_path / "run", steps=5)
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines()
    lines[1], lines[3] = lines[1][:20], "[" * 100_000
    path.write_text("\n".join(lines) + "\n")
    said = f"{path}: 2 lines are left out (line 2: not a step's JSON object, ...)"
    assert steps_of(run) == ([1, 3, 5], said)
    assert "<tr>" in write_report(run)[0].read_text()
    assert caplog.messages == [said]


def test_a_file_without_any_step_is_no_log_of_a_run(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"name": "of another program"}\n')
    with pytest.raises(ConfigError, match=r"holds no steps of a run \(line 1: not a step's"):
        write_report(tmp_path)
    with pytest.raises(ConfigError, match="holds no steps of a run"):
        MetricsFile(tmp_path, 0)
    assert "another program" in (tmp_path / "metrics.jsonl").read_text()


def test_steps_done_again_after_a_resume_replace_the_earlier_ones(tmp_path):
    run = make_run(tmp_path / "run", steps=4)
    with open(run / "metrics.jsonl", "a") as file:
        for step in (3, 4, 5):
            file.write(json.dumps(metrics_row(step, reward=0.9)) + "\n")
    rows, _ = run_steps(run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["reward"] for row in rows] == [0.5, 0.5, 0.9, 0.9, 0.9]


@pytest.mark.parametrize("content", [None, "", "\n\n", '{"step": 1, "epo'])
def test_nothing_to_report_on(tmp_path, content):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(ConfigError) as caught:
        write_report(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert not (tmp_path / "report.html").exists()


# One run.


def test_report_of_a_run(tmp_path):
    run = make_run(tmp_path / "<run>", speculative=True, accuracies={2: 0.3, 6: 0.4})
    page, done = write_report(run)
    assert page == run / "report.html" and done  # no total is known
    png = (run / "report.png").read_bytes()
    assert_good_picture(png, (1400, 1300))
    text = page.read_text()
    assert_self_contained(text, png)
    assert "<h1>Run &lt;run&gt;</h1>" in text
    assert text.count("<tr>") == 1 + 6
    assert "heldout_accuracy" in text
    assert sorted(path.name for path in run.iterdir()) == [
        "metrics.jsonl",
        "report.html",
        "report.png",
    ]


def test_report_of_one_plain_step_without_numbers(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps(metrics_row(1, loss=float("nan"), kl=float("inf"), reward=None)) + "\n"
    )
    assert "nan" not in write_report(tmp_path)[0].read_text().split("<h2>")[1].lower()
    assert_good_picture((tmp_path / "report.png").read_bytes(), (1400, 1300))


def test_a_followed_report_reloads_itself_until_the_run_is_done(
    tmp_path, monkeypatch, command_line
):
    rows = [json.dumps(metrics_row(step, total_steps=3)) + "\n" for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(rows[:2]))
    reload = '<meta http-equiv="refresh" content="10">'
    page = tmp_path / "report.html"

    def next_step(seconds):
        assert seconds == 10 and reload in page.read_text()
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(rows.pop())

    monkeypatch.setattr("nemo_specrl.cli.main.time.sleep", next_step)
    command_line("report", tmp_path, "--follow")
    assert len(rows) == 2 and reload not in page.read_text()
    command_line("report", tmp_path)
    assert reload not in page.read_text()


@pytest.mark.parametrize("name", ["lr_$lr_$seed", "a$$b", "exp${lr}_${seed}"])
def test_a_dollar_in_a_folders_name_is_no_mathematics(tmp_path, name):
    make_run(tmp_path / name)
    assert write_report(tmp_path / name)[0].is_file()


def test_pictures_do_not_depend_on_the_users_settings(tmp_path):
    make_run(tmp_path)
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nlines.linewidth: 9\n")
    code = (
        "import sys, pathlib\nfrom nemo_specrl.monitoring.report import write_report\n"
        "write_report(pathlib.Path(sys.argv[1]))\n"
    )
    pictures = []
    for settings in (
        {},
        {
            "MATPLOTLIBRC": str(tmp_path / "matplotlibrc"),
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        },
    ):
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], env=os.environ | settings, check=True
        )
        pictures.append((tmp_path / "report.png").read_bytes())
    assert pictures[0] == pictures[1]


def test_report_refuses_a_metric_that_is_no_number(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(metrics_row(1, reward="high")) + "\n")
    with pytest.raises(ConfigError, match="step 1: reward must be a number, got 'high'"):
        write_report(tmp_path)


def test_without_matplotlib_the_advice_is_to_install_it(runs, tmp_path):
    # An own process: matplotlib may be loaded in this one. None in sys.modules fails its import.
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from pathlib import Path\n"
        "from nemo_specrl import errors\nfrom nemo_specrl.monitoring import comparison, report\n"
        "compare = comparison.comparison(*map(Path, sys.argv[1:3]))\n"
        "try: report.write_comparison(Path(sys.argv[3]), compare)\n"
        "except errors.ConfigError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, runs), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "pip install matplotlib" in done.stdout
    assert done.stdout.count("\n") == 1
    assert (tmp_path / "out" / "compare.json").exists(), "the numbers need no matplotlib"


# Two runs.


def test_comparison_sums_and_ratios(runs):
    compare = comparison(*runs)
    assert compare["plain"]["rollout_s"] == [10.0] * 6
    assert compare["speculative"]["rollout_s"] == [10.0, 10.0, 4.0, 4.0, 2.0, 2.0]
    assert compare["speculative"]["epoch"] == [0, 0, 1, 1, 2, 2]
    assert compare["plain"]["fresh_reward"] == [None] * 6
    assert compare["plain"]["heldout_accuracy"] == [None, 0.30, None, 0.40, None, 0.50]
    assert compare["ratio"] == pytest.approx(
        {"rollout": 60 / 32, "rollout_warm": 20 / 4, "step": 90 / 62, "decoded_tokens": 6 / 3}
    )


def test_no_third_epoch_no_warm_ratio(tmp_path):
    compare = comparison(
        make_run(tmp_path / "p", steps=4), make_run(tmp_path / "s", steps=4, speculative=True)
    )
    assert compare["ratio"]["rollout_warm"] is None
    assert compare["ratio"]["rollout"] == pytest.approx(40 / 28)
    write_comparison(tmp_path / "out", compare)
    assert json.loads((tmp_path / "out" / "compare.json").read_text()) == compare
    assert "not evaluated" in printed(compare)


def test_runs_of_other_lengths_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="plain has 6 steps, speculative 4"):
        comparison(make_run(tmp_path / "p"), make_run(tmp_path / "s", steps=4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": [3, 4]}, r"step 2: prompts is \[0, 7\] in plain, \[3, 4\] in speculative"),
        ({"epoch": 5}, "step 2: epoch is 0 in plain, 5 in speculative"),
        ({"prompts": list(range(10_000))}, r"step 2: prompts .*\.\.\. in speculative"),
    ],
)
def test_runs_of_other_prompts_are_refused(tmp_path, change, message):
    plain = make_run(tmp_path / "p")
    other = make_run(tmp_path / "s", speculative=True)
    rows = [metrics_row(s, speculative=True, **(change if s == 2 else {})) for s in range(1, 7)]
    (other / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match=message) as caught:
        comparison(plain, other)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", ["rollout_s", "epoch", "reward"])
def test_a_step_without_a_needed_value_is_refused(tmp_path, name):
    run = make_run(tmp_path / "run", steps=1)
    row = metrics_row(1) | {name: None}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match=f"step 1 has no {name}"):
        comparison(run, run)


def test_a_comparison_with_lossless_drafts_shows_what_a_step_gains(runs, tmp_path):
    plain, folder = runs[0], tmp_path / "lossless"
    make_run(folder, speculative=True)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    gains = [3.0, 3.0, 7.0, 8.0, 12.0, 15.0]
    for row, gain in zip(rows, gains, strict=True):
        row |= {"spec_rl/tokens_per_step": gain, "decoded_tokens": row["response_tokens"]}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    compare = comparison(plain, folder)
    assert compare["speculative"]["spec_rl/tokens_per_step"] == gains
    pictures = []
    for name, side in (("lossless", folder), ("reuse", runs[1])):
        write_comparison(tmp_path / f"out-{name}", comparison(plain, side))
        pictures.append((tmp_path / f"out-{name}" / "compare.png").read_bytes())
    assert pictures[0] != pictures[1]
    assert image_of(pictures[0]).size == image_of(pictures[1]).size


def lossless_run(folder):
    """As ``preset: lossless`` leaves it: no verification, every row fresh, every token decoded."""
    changes = {"decoded_tokens": 1000, "fresh_reward": 0.5}
    engine = {"spec_rl/reuse_coverage": 0.0, "spec_rl/reused_token_fraction": 0.0}
    rows = [
        metrics_row(step, speculative=True, **changes, **engine)
        | {"spec_rl/tokens_per_step": 2.0 + step}
        for step in range(1, 7)
    ]
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_what_a_preset_does_not_do_is_not_shown(runs, tmp_path):
    lossless, reuse = comparison(runs[0], lossless_run(tmp_path / "lossless")), comparison(*runs)
    assert "tokens of a row per engine step │ 1.0 │ 5.5 │ 5.50x more" in joined(printed(lossless))
    assert "engine step" not in printed(reuse)
    for compare, shown in ((lossless, False), (reuse, True)):
        write_comparison(tmp_path / "out", compare)
        page = (tmp_path / "out" / "compare.html").read_text()
        words = "of freshly decoded rows"
        assert (words in printed(compare)) == (words in page) == shown
        assert ("<th>speculative fresh_reward</th>" in page) == shown
    page = write_report(tmp_path / "lossless")[0].read_text()
    assert "<th>spec_rl/tokens_per_step</th>" in page
    for column in ("fresh_reward", "spec_rl/reused_token_fraction", "decoded_tokens"):
        assert f"<th>{column}</th>" not in page


def joined(text):
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda compare: compare.pop("plain"), "it has no 'plain'"),
        (lambda compare: compare["ratio"].pop("step"), "it has no 'step'"),
        (lambda compare: compare["plain"]["step_s"].pop(), "plain: step_s is not known of each"),
        (lambda compare: compare["plain"].update(reward=["a"] * 6), "reward must be a number"),
        (lambda compare: compare["plain"].update(reward=[10**400] * 6), "reward must be a number"),
        (lambda compare: compare.update(plain=1), "damaged"),
        (lambda compare: compare.update(heldout_table=5), "damaged"),
        (None, "damaged"),
    ],
)
def test_a_damaged_comparison_is_one_line(runs, tmp_path, command_line, damage, said):
    compare = comparison(*runs)
    if damage is not None:
        damage(compare)
    text = "[" * 100_000 if damage is None else json.dumps(compare)
    (tmp_path / "compare.json").write_text(text)
    printed = command_line("report", tmp_path, code=2)
    assert printed.startswith(f"nemo-specrl: {tmp_path / 'compare.json'}: ") and said in printed


def test_comparison_files(runs, tmp_path):
    out = tmp_path / "deep" / "out"
    compare = comparison(*runs)
    write_comparison(out, compare)
    assert json.loads((out / "compare.json").read_text()) == compare
    png = (out / "compare.png").read_bytes()
    assert_good_picture(png)
    page = (out / "compare.html").read_text()
    assert_self_contained(page, png)
    assert "1.88x less" in page
    assert "2.0 points LOWER" in page
    names = ["compare.html", "compare.json", "compare.png"]
    assert sorted(path.name for path in out.iterdir()) == names, "no temporary file stays"
    write_comparison(out, compare)  # again, over the old ones
    assert (out / "compare.png").read_bytes() == png, "the same numbers, the same picture"


def test_a_folder_that_cannot_be_written(runs, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_comparison(tmp_path / "file" / "out", comparison(*runs))


def test_where_speculation_is_lower_is_said_plainly(runs):
    assert verdict(comparison(*runs)) == (
        "Held-out accuracy at step 6: plain 50.0 %, speculative 48.0 % (2.0 points LOWER). "
        "Speculation is lower at 2 of 3 evaluations, by 5.0 points at most (step 4). "
        "One run a side: a small gap can be chance."
    )
    other_way = verdict(comparison(runs[1], runs[0]))
    assert "(2.0 points higher)" in other_way
    assert "lower at 1 of 3" in other_way


def test_accuracy_before_the_first_step_is_step_0(runs):
    for run in runs:
        lines = (run / "metrics.jsonl").read_text().splitlines()
        first = json.loads(lines[0]) | {"heldout_accuracy_at_start": 0.25}
        (run / "metrics.jsonl").write_text("\n".join([json.dumps(first), *lines[1:]]) + "\n")
    compare = comparison(*runs)
    assert compare["plain"]["heldout_accuracy_at_start"] == 0.25
    assert len(compare["plain"]["heldout_accuracy"]) == 6
    assert "lower at 2 of 4 evaluations" in verdict(compare)
    assert "25.0 % (step 0)" in printed(compare)


def test_slower_speculation_is_said_plainly(runs, tmp_path):
    swapped = comparison(runs[1], runs[0])
    assert swapped["ratio"]["rollout"] == pytest.approx(32 / 60)
    assert "1.88x MORE" in printed(swapped)
    write_comparison(tmp_path / "out", swapped)
    assert_good_picture((tmp_path / "out" / "compare.png").read_bytes())


def test_printed_table(runs):
    lines = printed(comparison(*runs)).splitlines()
    cells = {}
    for line in lines:
        name, *values = (cell.strip() for cell in line.strip("│ ").split("│"))
        cells[name] = values
    assert cells["rollout, s"] == ["60.0", "32.0", "1.88x less"]
    assert cells["rollout from the third epoch on"] == ["", "", "5.00x less"]
    assert cells["training, s"] == ["30.0", "30.0", "equal"]
    assert cells["whole steps, s"] == ["90.0", "62.0", "1.45x less"]
    assert cells["decoded tokens"] == ["6,000", "3,000", "2.00x less"]
    assert cells["reward, mean of the last epoch"] == ["0.500", "0.500", "equal"]
    assert cells["of freshly decoded rows"] == ["0.500", "0.400", "0.100 LOWER"]
    assert cells["held-out accuracy, first"] == [
        "30.0 % (step 2)",
        "32.0 % (step 2)",
        "2.0 points higher",
    ]
    assert cells["held-out accuracy, last"] == [
        "50.0 % (step 6)",
        "48.0 % (step 6)",
        "2.0 points LOWER",
    ]


# Several seeds.


def test_several_seeds_are_averaged_and_kept(runs, tmp_path):
    table = [
        {"side": side, "seed": seed, "step": step, "heldout_accuracy": base + 0.02 * seed}
        for side, base in (("plain", 0.40), ("speculative", 0.39))
        for seed in range(3)
        for step in (2, 6)
    ]
    compare = comparison(*runs)
    write_comparison(tmp_path / "out", compare, heldout_table=table)
    kept = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert kept == compare | {"heldout_table": table}
    assert verdict(kept) == (
        "Held-out accuracy at step 6: plain 42.0 %, speculative 41.0 % (1.0 points LOWER). "
        "Speculation is lower at 2 of 2 evaluations, by 1.0 points at most (step 2). "
        "Means of 3 seeds."
    )
    png = (tmp_path / "out" / "compare.png").read_bytes()
    assert_good_picture(png)
    write_comparison(tmp_path / "again", kept)  # what was read back draws the same
    assert (tmp_path / "again" / "compare.png").read_bytes() == png


@pytest.mark.parametrize(
    "row",
    [
        {"side": "fast", "seed": 0, "step": 1, "heldout_accuracy": 0.5},
        {"side": "plain", "seed": 0, "heldout_accuracy": 0.5},
        {"side": "plain", "step": 1, "heldout_accuracy": 0.5},
        {"side": "plain", "seed": 0, "step": 1, "heldout_accuracy": "good"},
    ],
)
def test_a_wrong_table_of_seeds_is_refused(runs, tmp_path, row):
    with pytest.raises(ConfigError, match="held-out table"):
        write_comparison(tmp_path / "out", comparison(*runs), heldout_table=[row])
    assert not (tmp_path / "out").exists()
