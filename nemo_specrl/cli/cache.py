"""The command line of the cache: ``nemo-specrl cache inspect | verify | export | import``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from nemo_specrl.errors import CacheError, ConfigError, ForeignStore, StoreInUse

if TYPE_CHECKING:
    from nemo_specrl.cache import RolloutStore
    from nemo_specrl.rollout import Rollout

__all__ = ["app", "folder_argument"]

app = typer.Typer(
    help="Look into, check and move a rollout cache.", no_args_is_help=True, add_completion=False
)
console = Console()
SHOWN = 20

PathArgument = Annotated[
    Path, typer.Argument(metavar="PATH", help="A store, a checkpoint or its rollout_cache.")
]


@app.command(epilog="Example: nemo-specrl cache inspect results/grpo_sort_cpu/step_20")
def inspect(path: PathArgument) -> None:
    """Count what is in a cache: prompts, rollouts, tokens, bytes, versions, ages."""
    from nemo_specrl.cache.inspection import open_source, summary

    with open_source(path) as source:
        found = summary(source)
        table = Table(title=str(path), title_justify="left", show_header=False)
        rows = {
            "kind": source.kind,
            "tokenizer": source.tokenizer_id,
            "partitions": source.partitions,
            "prompts": f"{found.prompts:,}",
            "rollouts": f"{found.rollouts:,}"
            + "".join(f", {n:,} {name}" for name, n in sorted(found.finishes.items())),
            "tokens": f"{found.tokens:,}, {found.tokens / max(1, found.rollouts):,.1f} a rollout, "
            f"at most {found.longest:,}",
            "bytes": f"{source.bytes:,}, {source.bytes / max(1, found.tokens):.1f} a token",
            "policy versions": _versions(found.versions, source.policy_version),
            "ages": f"{found.mean_age:.1f} versions a rollout, {found.mean_token_age:.1f} a token, "
            "on average",
            "hit ratio": f"{source.hits / source.lookups:.1%} of {source.lookups:,} prompts"
            if source.lookups
            else "not known",
        }
        if found.damaged:
            rows["damaged"] = f"{found.damaged:,}; nemo-specrl cache verify names them"
        for name, value in rows.items():
            table.add_row(name, value)
        console.print(table, highlight=False, markup=False)


def _versions(versions: dict[int, int], beside: int | None) -> str:
    text = f"{min(versions)} to {max(versions)}" if versions else "none"
    return text if beside is None else f"{text}, beside the weights of {beside}"


@app.command(epilog="Example: nemo-specrl cache verify /raid/specrl")
def verify(path: PathArgument) -> None:
    """Check every checksum of a cache. Exit code 1 if something is damaged, which is named."""
    from nemo_specrl.cache.inspection import open_source

    damaged: list[CacheError] = []
    sound = 0
    try:
        with open_source(path, check=True) as source:
            for _ in _sound(source.rollouts, damaged):
                sound += 1
    except (ForeignStore, StoreInUse):
        raise
    except CacheError as error:
        damaged.append(error)
    for what in damaged[:SHOWN]:
        _say(f"damaged: {what}")
    if len(damaged) > SHOWN:
        _say(f"... and {len(damaged) - SHOWN:,} more")
    _say(f"{path}: {sound:,} rollouts are sound, {len(damaged):,} damaged")
    if damaged:
        raise SystemExit(1)


def _say(line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


@app.command(epilog="Example: nemo-specrl cache export results/run/step_20 exported")
def export(
    path: PathArgument, out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder.")]
) -> None:
    """Write a cache as safetensors files, which other programs and other runs can read."""
    from nemo_specrl.cache.export import write_export
    from nemo_specrl.cache.inspection import open_source

    out = folder_argument(out)
    with open_source(path) as source:
        damaged: list[CacheError] = []
        count = write_export(out, _sound(source.rollouts, damaged), source.tokenizer_id)
    skipped = f"; {len(damaged):,} damaged ones were left out" if damaged else ""
    _say(f"written: {out}, {count:,} rollouts{skipped}")


def _sound(
    rollouts: Iterable[Rollout | CacheError], damaged: list[CacheError]
) -> Iterator[Rollout]:
    """Yield the rollouts of an open cache; the errors in place of damaged ones are collected."""
    for rollout in rollouts:
        if isinstance(rollout, CacheError):
            damaged.append(rollout)
        else:
            yield rollout


@app.command(
    name="import",
    epilog="Example: nemo-specrl cache import results/run/step_20 /raid/specrl --max-bytes 64GiB",
)
def import_(
    source_path: Annotated[
        Path, typer.Argument(metavar="FROM", help="An export, a store or a checkpoint.")
    ],
    cache_dir: Annotated[
        Path, typer.Argument(metavar="CACHE_DIR", help="spec_rl.cache.dir of the runs to come.")
    ],
    max_bytes: Annotated[
        str, typer.Option(help="Hard cap of the store, as the recipe has it.")
    ] = "64GiB",
) -> None:
    """Give new runs another run's rollouts as drafts.

    They go into CACHE_DIR/warm_start. Each run that starts there, on this node, takes a copy of it.
    Policy versions are counted within a run, so all become 0, and the rollouts are drafted from the
    second step on. Where there is a rollout of a sample index already, that one stays.
    """
    from nemo_specrl.cache import RolloutStore
    from nemo_specrl.cache.inspection import open_source
    from nemo_specrl.cache.run_folders import WARM_START

    cache_dir = folder_argument(cache_dir)
    path = cache_dir / WARM_START
    cap = _bytes(max_bytes)
    if source_path.exists() and path.exists() and source_path.samefile(path):
        raise ConfigError(f"{path}: cannot be imported into itself")
    with ExitStack() as stack:
        source = stack.enter_context(open_source(source_path))
        # Check before the store is opened, which changes its file.
        _check_tokenizer(path, source_path, source.tokenizer_id)
        store = stack.enter_context(
            RolloutStore(path, max_bytes=cap, tokenizer_id=source.tokenizer_id)
        )
        damaged: list[CacheError] = []
        sound = _sound(source.rollouts, damaged)
        taken, there = _add(store, sound, newest_last=source.kind == "export")
        store.sync()
        stats = store.stats()
    notes = [f"{taken:,} rollouts imported"]
    notes += [f"{there:,} left out for newer ones of their sample indices"] if there else []
    notes += [f"{len(damaged):,} damaged ones left out"] if damaged else []
    lost = stats.evicted_prompts
    notes += [f"{lost:,} prompts evicted: max-bytes is too small for all"] if lost else []
    _say(f"{path}: " + ", ".join(notes) + f"; for runs with spec_rl.cache.dir={cache_dir}")


def _check_tokenizer(path: Path, source_path: Path, tokenizer_id: str) -> None:
    """Refuse to add rollouts to a store of another tokenizer; there may not be a store yet."""
    from nemo_specrl.cache.inspection import open_source
    from nemo_specrl.cache.storage.schema import DATA_FILE

    if (path / DATA_FILE).is_file():
        with open_source(path) as there:
            if there.tokenizer_id != tokenizer_id:
                raise ForeignStore(
                    f"{source_path} is of tokenizer {tokenizer_id!r}, the store {path} "
                    f"of {there.tokenizer_id!r}; tokens of one mean nothing to the other"
                )


def _add(store: RolloutStore, rollouts: Iterable[Rollout], *, newest_last: bool) -> tuple[int, int]:
    """Put rollouts into a store, the newest of each sample index for which it has none yet.

    Args:
        store: the store to add to.
        rollouts: rollouts, those of a prompt one after the other.
        newest_last: whether they are listed as in an export; a store lists the newest first.

    Returns:
        How many were put, and how many were left out.
    """
    from nemo_specrl.cache.export import reset_provenance

    taken = left_out = 0
    for key, same_prompt in groupby(rollouts, attrgetter("key")):
        group = list(same_prompt)
        there = {rollout.sample_index for rollout in store.get([key]).get(key, [])}
        oldest_first = group if newest_last else group[::-1]
        new = {r.sample_index: r for r in oldest_first if r.sample_index not in there}
        store.put(map(reset_provenance, new.values()))
        taken += len(new)
        left_out += len(group) - len(new)
    return taken, left_out


def folder_argument(path: Path, option: str = "") -> Path:
    """Parse a folder that will be created, as a recipe would read it.

    Args:
        path: the folder as given.
        option: the option that names it, for the message; empty: an argument without a name.

    Raises:
        ConfigError: it is not a valid folder.
    """
    from nemo_specrl.config import parse_path

    try:
        return parse_path(path)
    except ValueError as error:
        raise ConfigError(f"{option} {path}: {error}".lstrip()) from None


def _bytes(text: str) -> int:
    from nemo_specrl.config import Block, ByteSize, validated

    class Cap(Block):
        max_bytes: ByteSize

    return validated(Cap, {"max_bytes": text}).max_bytes
