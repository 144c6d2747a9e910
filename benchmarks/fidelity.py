r"""Does reuse learn what plain training learns? Variants and seeds on the embedded trainer.

    .venv/bin/python benchmarks/fidelity.py --out results/fidelity --list
    .venv/bin/python benchmarks/fidelity.py --out results/fidelity --grid presets --jobs 2
    .venv/bin/python benchmarks/fidelity.py --out results/fidelity \
        --report benchmarks/results/fidelity

Each run is a ``nemo-specrl train`` in DIR/SETTING/VARIANT/SEED, which goes on from its checkpoint
when it is started again; runs that are done are not repeated, so that a grid may be made in pieces
and in any order. ``--report`` reads what is there: data (``.json``), pictures (``-SETTING.png``),
and tables for docs/laboratory.md. Of ``--jobs`` runs side by side, each has cores of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
from scipy import stats

from nemo_specrl.config import PRESETS
from nemo_specrl.trainer.log import read_metrics

CONFIGS = {
    "grpo": "examples/configs/grpo_sort_cpu.yaml",
    "dapo": "examples/configs/dapo_arith_cpu.yaml",
    "ppo": "examples/configs/ppo_arith_cpu.yaml",
}
SPEC = "policy.generation.spec_rl."
PLAIN = "plain"
PROMPTS_PER_STEP = 16


@dataclass(frozen=True)
class Setting:
    """A task, a model, a set of prompts and an algorithm, on which variants are compared.

    Under dynamic sampling, where a step may take several batches of prompts, an epoch stands for
    the steps of a pass without it.
    """

    title: str
    prompts: int
    epochs: int
    epochs_per_evaluation: int
    overrides: tuple[str, ...] = ()
    algorithm: str = "grpo"

    @property
    def block(self) -> str:
        """Of the recipe: DAPO has GRPO's."""
        return "ppo" if self.algorithm == "ppo" else "grpo"

    @property
    def steps_per_epoch(self) -> int:
        """Steps in a pass over the prompts."""
        return self.prompts // PROMPTS_PER_STEP


LR = "policy.optimizer.kwargs.lr"
SUMS_TASK = (
    "data.dataset_name=arithmetic",
    "policy.model_name=examples/models/qwen3-arith",
    "policy.generation.max_new_tokens=240",
    "policy.generation.vllm_cfg.max_model_len=512",
)
SORTING = (
    "data.dataset_name=sorting",
    "policy.model_name=examples/models/qwen3-sort",
    f"{LR}=2.0e-5",
)
SMALL = (
    *SUMS_TASK,
    "policy.model_name=examples/models/qwen3-arith-small",
    f"{LR}=3.0e-5",
)
SETTINGS = {
    "sums-64-2e-5": Setting(
        "sums, 64 prompts, 1.6M at 2e-5", 64, 15, 5, (*SUMS_TASK, f"{LR}=2.0e-5")
    ),
    "sums-64-5e-5": Setting(
        "sums, 64 prompts, 1.6M at 5e-5", 64, 15, 5, (*SUMS_TASK, f"{LR}=5.0e-5")
    ),
    "sums-64-1e-4": Setting(
        "sums, 64 prompts, 1.6M at 1e-4", 64, 15, 5, (*SUMS_TASK, f"{LR}=1.0e-4")
    ),
    "sums-256-2e-5": Setting(
        "sums, 256 prompts, 1.6M at 2e-5", 256, 10, 2, (*SUMS_TASK, f"{LR}=2.0e-5")
    ),
    "sums-256-5e-5": Setting(
        "sums, 256 prompts, 1.6M at 5e-5", 256, 10, 2, (*SUMS_TASK, f"{LR}=5.0e-5")
    ),
    "sums-1024": Setting(
        "sums, 1,024 prompts, 1.6M at 2e-5", 1024, 3, 1, (*SUMS_TASK, f"{LR}=2.0e-5")
    ),
    "sums-small-64": Setting("sums, 64 prompts, 0.6M parameters", 64, 15, 5, SMALL),
    "sums-small-64-ppo": Setting("PPO, sums, 64 prompts, 0.6M parameters", 64, 15, 5, SMALL, "ppo"),
    "sums-small-64-ppo-1.5e-5": Setting(
        "PPO, sums, 64 prompts, 0.6M at 1.5e-5",
        *(64, 15, 5),
        (*SMALL, f"{LR}=1.5e-5"),
        "ppo",
    ),
    "sums-small-64-dapo": Setting(
        "DAPO, sums, 64 prompts, 0.6M parameters",
        *(64, 15, 5),
        # As many steps as the others; a step takes up to three batches of prompts.
        (*SMALL, "grpo.max_num_epochs=45", "grpo.max_num_steps=60"),
        "dapo",
    ),
    "sums-small-256": Setting("sums, 256 prompts, 0.6M parameters", 256, 10, 2, SMALL),
    "sorting-64": Setting("sorting, 64 prompts, 0.6M parameters", 64, 15, 5, SORTING),
    "sorting-256": Setting("sorting, 256 prompts, 0.6M parameters", 256, 10, 2, SORTING),
    "sorting-1024": Setting("sorting, 1,024 prompts, 0.6M parameters", 1024, 3, 1, SORTING),
}


def spec(*keys: str) -> tuple[str, ...]:
    """Overrides of the ``spec_rl:`` block; what is not named is strict and has no bounds."""
    base = ("preset=faithful", "lenience=1", "clip_anchor=current", "fresh_fraction=0.05")
    return tuple(f"{SPEC}{key}" for key in ("enabled=true", *base, *keys))


L = "lenience=1.6487"
BEHAVIOUR = "loss_fn.use_importance_sampling_correction=true"
VARIANTS: dict[str, tuple[str, ...]] = {
    PLAIN: (f"{SPEC}enabled=false",),
    **{name: spec(*(f"{k}={v}" for k, v in keys.items())) for name, keys in PRESETS.items()},
    # What the mechanisms do one by one.
    "strict": spec(),
    "lenient, behaviour weights": (*spec(L, "reported_logprobs=behaviour"), BEHAVIOUR),
    "lenient, KL to the start": (*spec(L), "loss_fn.reference_policy_kl_penalty=0.05"),
    "lenient, clip from birth": spec(L, "clip_anchor=birth"),
    "lenient, clip and acceptance from birth": spec(
        L, "clip_anchor=birth", "acceptance_reference=birth"
    ),
    "strict, clip from birth": spec("clip_anchor=birth"),
    "strict, clip of 0.1 from birth": (
        *spec("clip_anchor=birth"),
        "loss_fn.ratio_clip_min=0.1",
        "loss_fn.ratio_clip_max=0.1",
    ),
    "strict, clip and acceptance from birth": spec(
        "clip_anchor=birth", "acceptance_reference=birth"
    ),
    "strict, 10 % fresh": spec("fresh_fraction=0.1"),
    "strict, 30 % fresh": spec("fresh_fraction=0.3"),
    "strict, 50 % fresh": spec("fresh_fraction=0.5"),
    "strict, 20 % fresh, clip from birth": spec("fresh_fraction=0.2", "clip_anchor=birth"),
    # The same time spent on fewer rollouts: what reuse has to beat.
    "plain, 3 of 8 rollouts": (
        f"{SPEC}enabled=false",
        "grpo.num_generations_per_prompt=3",
        "policy.train_global_batch_size=48",
    ),
}
SHOWN = (PLAIN, *PRESETS, "plain, 3 of 8 rollouts")
GRIDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "presets": (("sorting-256", "sums-small-256"), SHOWN),
    "sizes": (("sums-64-2e-5", "sorting-64", "sums-256-2e-5", "sorting-1024", "sums-1024"), SHOWN),
    "steps": (
        ("sums-64-5e-5", "sums-64-1e-4", "sums-256-5e-5", "sums-small-64-ppo-1.5e-5"),
        (PLAIN, "faithful", "strict, 20 % fresh, clip from birth"),
    ),
    "mechanisms": (("sums-small-64",), tuple(VARIANTS)),
    "algorithms": (
        ("sums-small-64-ppo", "sums-small-64-dapo"),
        (PLAIN, *PRESETS, "strict, 30 % fresh", "strict, 50 % fresh"),
    ),
}


# What is kept of a run, by epoch: the mean over its steps, or what an evaluation at its end gave.
MEANS = (
    *("reward", "fresh_reward", "reused_reward", "response_length", "distinct_in_group"),
    *("reward_std_in_group", "groups_without_advantage", "clip_fraction"),
)
SUMS = ("rollout_s", "verify_s", "train_s", "step_s", "decoded_tokens", "response_tokens")
EVALUATED = ("heldout_accuracy", "heldout_kl_to_start", "heldout_entropy", "heldout_length")


def train(
    out: Path, setting: str, variant: str, seed: int, max_num_seqs: int, cores: Queue[set[int]]
) -> str:
    """One run on some cores, from where it stands to its end; returns a line about it."""
    s = SETTINGS[setting]
    a, config = s.block, CONFIGS[s.algorithm]
    folder = out / setting / variant / str(seed)
    command = [
        *(sys.executable, "-m", "nemo_specrl", "train", config),
        f"{a}.num_prompts_per_step={PROMPTS_PER_STEP}",
        f"data.num_prompts={s.prompts}",
        f"{a}.max_num_epochs={s.epochs}",
        f"{a}.seed={seed}",
        f"{a}.val_period={s.steps_per_epoch * s.epochs_per_evaluation}",
        f"{a}.max_val_samples=256",
        f"{a}.val_kl_to_start=true",
        "policy.generation.vllm_cfg.precision=float32",
        f"policy.generation.vllm_kwargs.max_num_seqs={max_num_seqs}",
        "logger.tensorboard_enabled=false",
        f"checkpointing.checkpoint_dir={folder}",
        f"logger.log_dir={folder}",
        f"checkpointing.save_period={s.steps_per_epoch}",
        "checkpointing.keep_top_k=1",
        *s.overrides,
        *VARIANTS[variant],
    ]
    folder.mkdir(parents=True, exist_ok=True)
    mine = cores.get()
    try:
        with (folder / "train.log").open("a") as log:
            code = subprocess.run(
                ["taskset", "-c", ",".join(map(str, mine)), *command], stdout=log, stderr=log
            ).returncode
    finally:
        cores.put(mine)
    if code:
        last = (folder / "train.log").read_text().strip().splitlines()[-1:]
        return f"{setting}/{variant}/{seed}: exit code {code}: {' '.join(last)}"
    return f"{setting}/{variant}/{seed}: done"


def summary(out: Path) -> list[dict[str, Any]]:
    """A row for each epoch of each run in ``out``; seconds and tokens are sums from the start."""
    rows = []
    for path in sorted(out.glob("*/*/*/metrics.jsonl")):
        setting, variant, seed = path.parts[-4:-1]
        records = read_metrics(path)
        if setting not in SETTINGS or not records:
            continue
        label = {"setting": setting, "variant": variant, "seed": int(seed)}
        at_start = {name: f"{name}_at_start" for name in EVALUATED}
        first = {name: records[0][key] for name, key in at_start.items() if key in records[0]}
        rows.append({**label, "epoch": 0, "step": 0, **dict.fromkeys(SUMS, 0.0), **first})
        totals = dict.fromkeys(SUMS, 0.0)
        per_epoch = SETTINGS[setting].steps_per_epoch
        for epoch in range(len(records) // per_epoch):  # without one that is under way
            steps = records[epoch * per_epoch : (epoch + 1) * per_epoch]
            row = {**label, "epoch": epoch + 1, "step": steps[-1]["step"]}
            for name in SUMS:
                totals[name] += sum(r[name] for r in steps)
                row[name] = totals[name]
            for name in MEANS:
                values = [r[name] for r in steps if r.get(name) is not None]
                row[name] = float(np.mean(values)) if values else None
            row |= {name: steps[-1][name] for name in EVALUATED if name in steps[-1]}
            rows.append(row)
    return [
        {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in row.items()}
        for row in rows
    ]


# --- what the rows say --------------------------------------------------------------------------


@dataclass(frozen=True)
class Band:
    """Mean over seeds by epoch, and the half width of its 95 % confidence band (Student's t)."""

    epochs: list[int]
    mean: np.ndarray
    half: float
    seeds: int


def band(rows: Iterable[dict[str, Any]], name: str) -> Band | None:
    """Of the rows of one setting and variant.

    The spread over seeds is pooled over the epochs: with three seeds, one epoch's says little.
    """
    by_epoch: dict[int, list[float]] = {}
    for row in rows:
        if row.get(name) is not None:
            by_epoch.setdefault(row["epoch"], []).append(row[name])
    if not by_epoch:
        return None
    most = max(len(v) for v in by_epoch.values())
    epochs = sorted(e for e, v in by_epoch.items() if len(v) == most)
    values = np.array([by_epoch[e] for e in epochs])  # [epochs, seeds]
    half = 0.0
    if most > 1:
        pooled = math.sqrt(values.var(axis=1, ddof=1).mean())
        half = stats.t.ppf(0.975, most - 1) * pooled / math.sqrt(most)
    return Band(epochs, values.mean(axis=1), half, most)


def run_of(row: dict[str, Any]) -> tuple[str, str, int]:
    """What tells runs apart."""
    return row["setting"], row["variant"], row["seed"]


def of(rows: list[dict[str, Any]], setting: str, variant: str) -> list[dict[str, Any]]:
    """The rows of one setting and variant."""
    return [r for r in rows if r["setting"] == setting and r["variant"] == variant]


def variants_in(rows: list[dict[str, Any]], setting: str) -> list[str]:
    """In the order in which they are defined, plain first."""
    there = {r["variant"] for r in rows if r["setting"] == setting}
    return [v for v in VARIANTS if v in there]


def table(rows: list[dict[str, Any]], setting: str) -> str:
    """Markdown: speed and held-out accuracy of each variant of a setting."""
    plain = of(rows, setting, PLAIN)
    reference = band(plain, "heldout_accuracy")
    if reference is None:
        return ""
    names = [f"epoch {e}" for e in reference.epochs]
    lines = [
        "| variant | seeds | rollout s | decoded tokens | reward at the end | "
        + " | ".join(names)
        + " |",
        "|---" * (5 + len(names)) + "|",
    ]
    for variant in variants_in(rows, setting):
        mine = of(rows, setting, variant)
        held = band(mine, "heldout_accuracy")
        last = max(r["epoch"] for r in mine)
        if held is None or last == 0:
            continue  # just begun

        def at_end(name: str, mine: Any = mine, last: int = last) -> float:
            return float(np.mean([r[name] for r in mine if r["epoch"] == last]))

        cells = []
        for epoch in reference.epochs:
            if epoch not in held.epochs:
                cells.append("")
                continue
            mean = held.mean[held.epochs.index(epoch)]
            i = reference.epochs.index(epoch)
            below = reference.seeds > 1 and mean < reference.mean[i] - reference.half
            cells.append(f"{mean:.3f}" + (" (below)" if below else ""))
        decoded = at_end("decoded_tokens")
        lines.append(
            f"| {variant} | {held.seeds} | {at_end('rollout_s'):.0f} | {decoded / 1e6:.2f}M"
            f" | {at_end('reward'):.2f} | " + " | ".join(cells) + " |"
        )
    note = f"95 % band of plain: ± {reference.half:.3f}; *below*: under it."
    return "\n".join([*lines, "", note if reference.seeds > 1 else "One seed: no band."])


PANELS = [
    ("heldout_accuracy", "step", "Held-out accuracy by steps"),
    ("heldout_accuracy", "step_s", "Held-out accuracy by minutes"),
    ("fresh_reward", "step", "Reward, fresh rows"),
    ("reused_reward", "step", "Reward, reused rows"),
    ("heldout_kl_to_start", "step", "KL to the start, nats per token"),
    ("heldout_entropy", "step", "Entropy, nats per token"),
    ("response_length", "step", "Response length, tokens"),
    ("distinct_in_group", "step", "Distinct rollouts of a group of 8"),
    ("reward_std_in_group", "step", "Std of rewards in a group"),
]
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#8C5A94", "#56B4E9", "#E69F00", "#555555"]


def picture(rows: list[dict[str, Any]], setting: str, variants: list[str], path: Path) -> None:
    """Curves of the variants of a setting: means over seeds with their 95 % bands."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 11), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(3, 3).ravel()
    figure.suptitle(f"{SETTINGS[setting].title}: mean over seeds, 95 % band", fontsize=14)
    for ax, (name, against, title) in zip(axes, PANELS, strict=True):
        for variant, colour in zip(variants, COLOURS, strict=False):
            mine = of(rows, setting, variant)
            curve = band(mine, name)
            if curve is None:
                continue
            x = np.array(
                [np.mean([r[against] for r in mine if r["epoch"] == e]) for e in curve.epochs]
            )
            x = x / 60 if against == "step_s" else x
            label = f"{variant} ({curve.seeds} seeds)"
            ax.plot(x, curve.mean, color=colour, label=label, marker=".")
            ax.fill_between(
                x, curve.mean - curve.half, curve.mean + curve.half, color=colour, alpha=0.15, lw=0
            )
        ax.set_title(title, loc="left", fontsize=11)
        ax.grid(axis="y", color="#E6E6E6")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=9)
    figure.savefig(path, dpi=80)


def report(out: Path, prefix: Path) -> None:
    """Data, pictures and tables of what is in ``out``."""
    rows = summary(out)
    data = Path(f"{prefix}.json")
    if data.exists():  # runs that were made elsewhere stay
        here = {run_of(row) for row in rows}
        rows += [row for row in json.loads(data.read_text()) if run_of(row) not in here]
    rows.sort(key=lambda row: (*run_of(row), row["epoch"]))
    prefix.parent.mkdir(parents=True, exist_ok=True)
    text = ",\n".join(json.dumps(row) for row in rows)
    data.write_text(f"[\n{text}\n]\n")
    for setting in SETTINGS:
        variants = variants_in(rows, setting)
        if not variants:
            continue
        print(f"\n{SETTINGS[setting].title}\n\n{table(rows, setting)}")
        shown = [v for v in SHOWN if v in variants]
        if len(shown) > 1:
            picture(rows, setting, shown, Path(f"{prefix}-{setting}.png"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--grid", choices=GRIDS, action="append", default=[])
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, help="only these")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="only these")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument(
        "--max-num-seqs",
        type=int,
        default=16,
        help="of the engine. An eighth of a step's rows, as on clusters, where rows outnumber what "
        "runs at once; more makes runs faster and their rollout seconds no measure",
    )
    parser.add_argument("--list", action="store_true", help="say what would be run")
    parser.add_argument("--report", type=Path, metavar="PREFIX", help="write data and pictures")
    args = parser.parse_args()

    wanted = [
        (setting, variant, seed)
        for seed in args.seeds  # a seed of everything first: what is there can be compared
        for grid in args.grid
        for setting in args.settings or GRIDS[grid][0]
        for variant in args.variants or GRIDS[grid][1]
    ]
    if args.list:
        for setting, variant, seed in wanted:
            print(f"{setting}/{variant}/{seed}", *VARIANTS[variant])
        return
    cores: Queue[set[int]] = Queue()
    for job in range(args.jobs):
        cores.put(set(sorted(os.sched_getaffinity(0))[job :: args.jobs]))
    with ThreadPoolExecutor(args.jobs) as pool:

        def run(which: tuple[str, str, int]) -> str:
            return train(args.out, *which, args.max_num_seqs, cores)

        for line in pool.map(run, dict.fromkeys(wanted)):
            print(line, flush=True)
    if args.report:
        report(args.out, args.report)


if __name__ == "__main__":
    main()
