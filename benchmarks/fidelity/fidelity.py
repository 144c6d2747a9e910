r"""Does reuse learn what plain training learns? Variants and seeds on the embedded trainer.

    .venv/bin/python -m benchmarks.fidelity.fidelity --out results/fidelity
    .venv/bin/python -m benchmarks.fidelity.fidelity --out results/fidelity \
        --grid presets --seeds 1 2 3
    .venv/bin/python -m benchmarks.fidelity.fidelity --out results/fidelity \
        --report benchmarks/results/fidelity

Each run is a ``nemo-specrl train`` (through ``train.py``) in DIR/SETTING/VARIANT/SEED, which goes
on from its checkpoint when it is started again; runs that are done are not repeated, so that a grid
may be made in pieces and in any order. Data (``.json``), pictures (``-SETTING.png``) and tables for
docs/evidence/laboratory.md are made of what is there: in DIR, or where ``--report`` says, which
runs nothing unless there is a ``--grid``. Of ``--jobs`` runs side by side, each has cores of its
own.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.fidelity.report import COUNTS, report
from benchmarks.fidelity.settings import CONFIGS, GRIDS, PROMPTS_PER_STEP, SETTINGS, VARIANTS
from benchmarks.shared.cores import Cores


def train(
    out: Path, setting: str, variant: str, seed: int, max_num_seqs: int, cores: Cores
) -> str | None:
    """Finish a run, which may have begun before, on some cores; returns None or what went wrong."""
    s = SETTINGS[setting]
    a, config = s.block, CONFIGS[s.algorithm]
    folder = out / setting / variant / str(seed)
    arguments = [
        *("-m", "benchmarks.fidelity.train", str(folder / COUNTS), config),
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
    return cores.python(f"{setting}/{variant}/{seed}", arguments, folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--grid", choices=GRIDS, action="append", help="default: short")
    parser.add_argument(
        "--settings",
        nargs="+",
        choices=SETTINGS,
        metavar="NAME",
        help="only these (settings.py)",
    )
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        metavar="NAME",
        help="only these (settings.py)",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, one a core at most")
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
        for grid in args.grid or ([] if args.report else ["short"])
        for setting in args.settings or GRIDS[grid][0]
        for variant in args.variants or GRIDS[grid][1]
    ]
    if args.list:
        for setting, variant, seed in wanted:
            print(f"{setting}/{variant}/{seed}", *VARIANTS[variant])
        return
    cores = Cores(args.jobs)

    def run(which: tuple[str, str, int]) -> str | None:
        return train(args.out, *which, args.max_num_seqs, cores)

    failed = cores.each(run, dict.fromkeys(wanted))
    report(args.out, args.report or args.out / "fidelity")
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
