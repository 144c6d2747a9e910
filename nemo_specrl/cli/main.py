"""The command line: ``nemo-specrl train | compare | run | check | cache | report | ...``.

What a restart cannot fix (bad input, a package that is missing or does not fit) prints one line
and exits with code 2; other expected errors exit with code 1. Modules that take long to import are
imported by the commands that need them, after these have printed what they are about to do.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from nemo_specrl import __version__
from nemo_specrl.cli.cache import app as cache_app
from nemo_specrl.cli.cache import folder_argument
from nemo_specrl.cli.child import run_child
from nemo_specrl.errors import (
    CacheError,
    CheckpointError,
    ConfigError,
    Diverged,
    IncompatibleVersion,
    SpecRLError,
    may_pass,
)
from nemo_specrl.monitoring import heartbeat
from nemo_specrl.monitoring import names as metric

if TYPE_CHECKING:
    from nemo_specrl.trainer.data.dataset import Dataset
    from nemo_specrl.trainer.loop import Trainer
    from nemo_specrl.trainer.recipe import Recipe

__all__ = ["app", "main"]

app = typer.Typer(
    help="Fast rollouts for reinforcement learning of language models, with NeMo-RL.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(cache_app, name="cache")
console = Console()
error_console = Console(stderr=True)
LARGEST = 2**31 - 1
PIPE_COLUMNS = 1000
"""Width of tables where there is no terminal, so that nothing in them is broken."""

RecipeArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML recipe.")]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, such as grpo.max_num_epochs=3."),
]
RELOAD_S = 10
"""Seconds after which ``report --follow`` writes its page anew."""
OutOption = Annotated[Path, typer.Option("--out", help="Folder for all output.")]


def _version(asked: bool) -> None:
    if asked:
        console.print(f"nemo-specrl {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Options of the program itself."""


def main() -> None:
    """Run the command line; expected errors become one line and an exit code."""
    if not console.is_terminal:
        console.width = max(console.width, PIPE_COLUMNS)
    try:
        try:
            with _sturdy_output():
                app()
        except CheckpointError as error:
            _fail(error, 1 if may_pass(error) else 2)
        except (ConfigError, CacheError, Diverged, IncompatibleVersion) as error:
            _fail(error, 2)
        except SpecRLError as error:
            _fail(error, 1)
        except OSError as error:
            if error.errno not in (errno.ENAMETOOLONG, errno.EACCES):  # of a path that was given
                raise
            _fail(error, 2)
    except SystemExit as end:
        if end.code in (2, 130):  # bad input, a full disk, an interrupt: a restart cannot fix them
            heartbeat.no_restart(f"exit code {end.code}")
        raise


def _fail(error: Exception, code: int) -> None:
    line = " ".join(str(error).split())
    _warn(line, "red")
    raise SystemExit(code)


def _warn(line: str, style: str) -> None:
    with contextlib.suppress(OSError):  # standard error may be full, too
        error_console.print(
            f"nemo-specrl: {line}", style=style, markup=False, highlight=False, soft_wrap=True
        )


def _say(line: str, style: str | None = None) -> None:
    console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)


class _Output(io.FileIO):
    """Standard output that ends no run: if it is full, or its reader has gone, it warns once."""

    def write(self, data: Any) -> int:
        """Write some of the bytes; from the first failure on, to nowhere."""
        try:
            return super().write(data)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            why = f"standard output cannot be written to ({error.strerror})"
            _warn(f"{why}; nothing more is printed there", "yellow")
            return len(data)


@contextlib.contextmanager
def _sturdy_output() -> Iterator[None]:
    """Have everything printed through :class:`_Output`; what cannot be encoded, as its code."""
    out, replaced = sys.stdout, sys.stdout is not sys.__stdout__
    if out is None or replaced:  # closed, or another's
        yield
        return
    with contextlib.suppress(OSError):  # what has been printed before comes first
        out.flush()
    raw = io.BufferedWriter(_Output(out.fileno(), "wb", closefd=False))
    output = io.TextIOWrapper(raw, out.encoding, "backslashreplace", line_buffering=True)
    with output, contextlib.redirect_stdout(output):
        yield


@contextlib.contextmanager
def _disk_in_one_line() -> Iterator[None]:
    """Print an operating system error, which names its file or folder, as one line."""
    try:
        yield
    except OSError as error:
        if isinstance(error, SpecRLError) or error.errno is None:
            raise
        _fail(error, 1 if may_pass(error) else 2)


@app.command(
    epilog="Example: nemo-specrl train examples/configs/grpo_sort_cpu.yaml grpo.max_num_epochs=3"
)
def train(config: RecipeArgument, overrides: OverridesArgument = None) -> None:
    """Train on one machine. Run again to resume from the last checkpoint; Ctrl-C saves one."""
    if config.is_file():
        _say(f"train: loading {config}, torch and vLLM; the first step takes a minute or more")
    from nemo_specrl.engine.environment import local_cpu_environment
    from nemo_specrl.trainer.checkpoint import run_date
    from nemo_specrl.trainer.data.dataset import open_dataset
    from nemo_specrl.trainer.policy_config import model_folder
    from nemo_specrl.trainer.recipe import load_recipe
    from nemo_specrl.trainer.start_checks import check_start, only_run

    recipe = load_recipe(config, overrides or ())
    model_folder(recipe.policy.model_name)  # while the hub may still be accessed
    local_cpu_environment()
    _quiet_libraries()
    check_start(recipe)
    with only_run(recipe):
        heldout = recipe.algorithm.max_val_samples
        data = open_dataset(recipe.data, recipe.policy, heldout, run_date(recipe))
        heartbeat.connect(recipe.run_dir)
        trainer = _set_up(recipe, data)
        if not trainer.done:
            with _disk_in_one_line():
                _train_with_progress(trainer, recipe)
    if trainer.stop:
        raise SystemExit(130)


def _quiet_libraries() -> None:
    """Suppress messages that libraries print at the start of a run and that need no action.

    Errors are still shown, and so are warnings from anywhere else. Call it before torch is
    imported. Environment variables that the user has set are left unchanged.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # while weights are read
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # on NUMA nodes
    # vLLM uses names that are deprecated in torch.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")
    # Triton is missing on a CPU.
    logging.getLogger("torch._library.triton").addFilter(lambda record: record.levelno >= 40)


@heartbeat.section("setup")
def _set_up(recipe: Recipe, data: Dataset) -> Trainer:
    """Import the training loop, find the last checkpoint, and load what the run needs."""
    from nemo_specrl.trainer.loop import Trainer

    trainer = Trainer(recipe, data)
    _stop_on_signals(trainer)
    begun = trainer.progress.step
    if trainer.done:
        _say(f"nothing to do: {begun} steps are done in {trainer.folder}")
        return trainer
    if begun:
        _say(f"resuming from step {begun} in {trainer.folder}")
    with _disk_in_one_line():
        trainer.build()
    return trainer


def _train_with_progress(trainer: Trainer, recipe: Recipe) -> None:
    name = "speculative" if recipe.spec_rl.enabled else "plain"
    with Progress(
        TextColumn(f"{name:>11}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(name, total=trainer.total_steps, completed=trainer.progress.step)
        for record in trainer.run():
            if trainer.warning:
                _say(f"warning: step {record[metric.STEP]}: {trainer.warning}", "yellow")
            _say(f"{name:>11} step {record[metric.STEP]:4d}  {_status(record, recipe)}")
            progress.update(task, completed=record[metric.STEP])


def _status(record: dict[str, Any], recipe: Recipe) -> str:
    speed = record[metric.RESPONSE_TOKENS] / max(1e-9, record[metric.ROLLOUT_S])
    parts = [f"reward {record[metric.REWARD]:.3f}", f"{speed:,.0f} tokens/s"]
    if metric.TOKENS_PER_STEP in record:
        parts.append(f"{record[metric.TOKENS_PER_STEP]:.1f} tokens/engine step")
    if metric.REUSED_TOKEN_FRACTION in record:
        parts.append(f"reused {record[metric.REUSED_TOKEN_FRACTION]:.0%}")
    parts.append(f"rollout {record[metric.ROLLOUT_S]:.1f} s, step {record[metric.STEP_S]:.1f} s")
    if metric.HELDOUT_ACCURACY in record:
        parts.append(f"held-out {record[metric.HELDOUT_ACCURACY]:.3f}")
    return "  ".join(parts)


def _stop_on_signals(trainer: Trainer) -> None:
    """On SIGINT or SIGTERM, finish the step, save and exit; on a second SIGINT exit at once.

    A second SIGTERM says nothing new: Slurm sends it to each process of a step, and ft_launcher
    passes its own on.
    """

    def stop(number: int, _frame: Any) -> None:
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
        if not trainer.stop:
            _say("finishing this step, then saving; press Ctrl-C again to exit at once")
        trainer.stop = True

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)


@app.command(
    epilog="Example: nemo-specrl compare examples/configs/grpo_sort_cpu.yaml --out results/demo"
)
def compare(
    config: RecipeArgument,
    overrides: OverridesArgument = None,
    out: OutOption = Path("results/compare"),
) -> None:
    """Train with speculation off and on: same seeds, same machine, one after the other.

    Prints a table and writes compare.json, compare.png and compare.html. Run again to resume.
    """
    if config.is_file():
        _say(f"compare: {config}, first plain, then speculative, each in a process of its own")
    from nemo_specrl.monitoring.comparison import comparison
    from nemo_specrl.monitoring.report import print_comparison, write_comparison
    from nemo_specrl.trainer.recipe import load_recipe
    from nemo_specrl.trainer.start_checks import check_start

    out = folder_argument(out, "--out")
    sides = {}
    for side, enabled in {"plain": "false", "speculative": "true"}.items():
        sides[side] = [
            *(overrides or ()),
            f"policy.generation.spec_rl.enabled={enabled}",
            f"checkpointing.checkpoint_dir={out / side}",
            f"logger.log_dir={out / side}",
        ]
        check_start(load_recipe(config, sides[side]))  # before either is trained
    for arguments in sides.values():  # so that no side sees the other's warm state
        if code := run_child(["train", str(config), *arguments]):
            raise SystemExit(code)
    result = comparison(out / "plain", out / "speculative")
    write_comparison(out, result)
    print_comparison(result, console)
    _say(f"written: {out / 'compare.json'}, {out / 'compare.png'}, {out / 'compare.html'}")


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Example: nemo-specrl run examples/run_grpo.py --config my_recipe.yaml",
)
def run(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="A script of NeMo-RL.")],
) -> None:
    """Run a stock NeMo-RL script with the plug-in; all further arguments are the script's own."""
    if script.is_file():
        _say(f"nemo-specrl run: loading NeMo-RL with the plug-in, for {script}")
    from nemo_specrl.nemo_rl.launcher import launch

    launch(script, context.args)


@app.command(epilog="Example: nemo-specrl check my_recipe.yaml cluster.num_nodes=2")
def check(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe of NeMo-RL.")],
    overrides: OverridesArgument = None,
) -> None:
    """Say what of a NeMo-RL recipe would be refused; starts nothing."""
    from nemo_specrl.nemo_rl.recipe_file import check_file

    _say(check_file(recipe, overrides or ()))


@app.command(epilog="Example: nemo-specrl report results/grpo_sort_cpu --follow")
def report(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run or a comparison.")
    ],
    follow: Annotated[
        bool,
        typer.Option("--follow", help="Write the page anew, which reloads itself, until the end."),
    ] = False,
) -> None:
    """Draw plots and write an HTML page of a run or a comparison."""
    from nemo_specrl.monitoring.comparison import read_comparison
    from nemo_specrl.monitoring.report import write_comparison, write_report

    if (run_dir / "compare.json").exists():
        write_comparison(run_dir, read_comparison(run_dir))
        _say(f"written: {run_dir / 'compare.html'}")
        return
    page, done = write_report(run_dir, RELOAD_S if follow else None)
    _say(f"written: {page}")
    if follow and not done:
        _say(f"it is written anew every {RELOAD_S} s until the run is done (Ctrl-C ends it)")
        with contextlib.suppress(KeyboardInterrupt):
            while not done:
                time.sleep(RELOAD_S)
                _, done = write_report(run_dir, RELOAD_S)


@app.command(epilog="Example: nemo-specrl simulate logs/exp_001 --engines 8 --max-num-seqs 128")
def simulate(
    run_dir: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_DIR", help="Folder of a run: NeMo-RL's log folder, or a speculative run."
        ),
    ],
    engines: Annotated[
        int, typer.Option(min=1, max=65536, help="Engines that share a step's rows.")
    ] = 1,
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, max=LARGEST, help="Rows that an engine runs at once.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int,
        typer.Option(min=1, max=LARGEST, help="Tokens that an engine computes in a step, at most."),
    ] = 8192,
    kv_tokens: Annotated[
        int | None, typer.Option(min=1, max=LARGEST, help="Tokens that an engine's KV cache holds.")
    ] = None,
    max_draft_tokens: Annotated[
        int | None, typer.Option(min=1, max=128, help="Tokens of a draft, at most.")
    ] = None,
    costs: Annotated[
        Path | None, typer.Option(help="JSON file with the costs of an engine's steps.")
    ] = None,
) -> None:
    """Predict the speed-up of each preset on a recorded run, in a simulated engine."""
    if run_dir.is_dir():
        _say(f"simulate: reading {run_dir}, then simulating; this takes seconds to minutes")
    from nemo_specrl.config import DraftConfig
    from nemo_specrl.simulation.prediction import predict, read_costs
    from nemo_specrl.simulation.recorded_run import read_run
    from nemo_specrl.simulation.simulated_engine import SimulatedEngine

    measured = None if costs is None else read_costs(costs)
    recorded = read_run(run_dir)
    at_once = max_num_seqs or recorded.max_num_seqs or 256
    longest = max_draft_tokens or recorded.max_draft_tokens or DraftConfig().max_tokens
    engine = SimulatedEngine(at_once, max_num_batched_tokens, kv_tokens, max_draft_tokens=longest)
    predictions, assumed = predict(recorded, engine, engines, measured)
    table = Table("preset", "epoch", "rollouts, times faster", "90 %", "engine steps")
    for column in table.columns:
        column.overflow = "fold"
    for p in predictions:
        table.add_row(
            p.preset,
            "later" if p.later else "first",
            f"{p.speed_up:.2f}",
            f"{p.low:.2f} to {p.high:.2f}",
            f"{p.steps:.0%} of plain's",
        )
    console.print(table)
    engines_text = f"{engines} engine{'s' * (engines > 1)}, {at_once} rows at once in each"
    for line in ("a simulation, not a measurement", engines_text, *assumed):
        _say(line)


@app.command(epilog="Example: nemo-specrl doctor")
def doctor() -> None:
    """Check the installation: what is missing, what does not fit, and what to do about it."""
    from nemo_specrl.cli.doctor import diagnose, print_findings

    code = print_findings(diagnose(), console)
    if code:
        raise SystemExit(code)


if __name__ == "__main__":
    main()
