"""The command line of the cache: ``nemo-specrl cache inspect | verify | export | import``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nemo_specrl.errors import CacheError, ConfigError, ForeignStore

if TYPE_CHECKING:
    from nemo_specrl.cache.inspection import Source

__all__ = ["app", "folder_argument"]

app = typer.Typer(
    help="Look into, check and move a rollout cache.", no_args_is_help=True, add_completion=False
)
SHOWN = 20

PathArgument = Annotated[
    Path,
    typer.Argument(
        metavar="PATH", help="A cache's folder, a checkpoint or an export; in use or not."
    ),
]


@app.command(epilog="Example: nemo-specrl cache inspect results/grpo_sort_cpu/step_20")
def inspect(path: PathArgument) -> None:
    """Count what is in a cache: prompts, responses, tokens, bytes, policy versions."""
    from nemo_specrl.cache.inspection import open_source, sources

    for place in sources(path):
        with open_source(place) as source:
            typer.echo(str(place))
            for name, value in _figures(source).items():
                typer.echo(f"  {name:<16}{value}")  # as wide as it is: one may want to compare it


def _figures(source: Source) -> dict[str, str]:
    from nemo_specrl.cache.inspection import summary

    found = summary(source)
    finishes = ", ".join(f"{n:,} {name}" for name, n in sorted(found.finishes.items()))
    versions = f"{min(found.versions)} to {max(found.versions)}" if found.versions else "none"
    figures = {
        "kind": source.kind,
        "vocabulary": source.vocabulary,
        "prompts": f"{found.prompts:,}",
        "responses": f"{found.responses:,}" + (f": {finishes}" if finishes else ""),
        "with log-probs": f"{found.scored:,}",
        "tokens": f"{found.tokens:,}, {found.tokens / max(1, found.responses):,.1f} a response, "
        f"at most {found.longest:,}",
        "bytes": f"{source.size:,}"
        + (f", {source.size / found.tokens:.1f} a token" if found.tokens else ""),
        "policy versions": versions,
    }
    if found.damaged:
        figures["damaged"] = f"{len(found.damaged):,}; nemo-specrl cache verify names them"
    return figures


@app.command(epilog="Example: nemo-specrl cache verify /raid/specrl")
def verify(path: PathArgument) -> None:
    """Check every checksum of a cache. Exit code 1 if something is damaged, which is named."""
    from nemo_specrl.cache.inspection import open_source, sources, summary

    bad = False
    for place in sources(path):
        sound, damaged = 0, []
        try:
            with open_source(place) as source:
                found = summary(source)
                sound, damaged = found.responses, found.damaged
        except ForeignStore:
            raise
        except CacheError as error:
            damaged = [error]
        for what in damaged[:SHOWN]:
            typer.echo(f"damaged: {what}")
        if len(damaged) > SHOWN:
            typer.echo(f"... and {len(damaged) - SHOWN:,} more")
        typer.echo(f"{place}: {sound:,} responses are sound, {len(damaged):,} damaged")
        bad = bad or bool(damaged)
    if bad:
        raise SystemExit(1)


@app.command(epilog="Example: nemo-specrl cache export results/run/step_20 exported.jsonl")
def export(
    path: PathArgument, out: Annotated[Path, typer.Argument(metavar="OUT", help="A new file.")]
) -> None:
    """Write a cache as JSON lines, which other programs and other runs can read."""
    from nemo_specrl.cache.inspection import open_source, write_export

    out = folder_argument(out)
    damaged: list[CacheError] = []
    with open_source(path) as source:
        count = write_export(out, source.vocabulary, source.sound(damaged))
    skipped = f"; left out as damaged: {len(damaged):,}" if damaged else ""
    typer.echo(f"written: {out}, {count:,} responses{skipped}")


@app.command(
    name="import",
    epilog="Example: nemo-specrl cache import results/run/step_20 /raid/specrl --max-bytes 64GiB",
)
def import_(
    source_path: Annotated[
        Path, typer.Argument(metavar="FROM", help="A cache's folder, a checkpoint or an export.")
    ],
    cache_dir: Annotated[
        Path, typer.Argument(metavar="CACHE_DIR", help="cache.dir of the runs to come.")
    ],
    max_bytes: Annotated[
        str, typer.Option(help="Hard cap of the store, as the recipe has it.")
    ] = "64GiB",
) -> None:
    """Give runs on this node another run's responses as history.

    They count as older than all that is there, and are added while there is room.
    """
    from nemo_specrl.cache import RolloutStore
    from nemo_specrl.cache.inspection import open_source

    cache_dir = folder_argument(cache_dir)
    cap = _bytes(max_bytes)
    damaged: list[CacheError] = []
    with (
        open_source(source_path) as source,
        RolloutStore(
            cache_dir, vocabulary=source.vocabulary, max_bytes=cap, responses_per_prompt=4096
        ) as store,
    ):
        added = store.add_older(source.groups(damaged))
        store.sync()
        path = store.path
    skipped = f"; left out as damaged: {len(damaged):,}" if damaged else ""
    typer.echo(f"{path}: {added:,} responses added{skipped}; for runs with cache.dir={cache_dir}")


def folder_argument(path: Path, option: str = "") -> Path:
    """Parse a path that will be created, as a recipe would read it.

    Args:
        path: the path as given.
        option: the option that names it, for the message; empty: an argument without a name.

    Raises:
        ConfigError: it is not a valid path.
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
