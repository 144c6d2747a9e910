"""Write docs/reference/keys.md, metrics.md and patches.md from the code itself.

.venv/bin/python scripts/reference.py            # write the pages
.venv/bin/python scripts/reference.py --check    # exit code 1 if a page would change
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from nemo_specrl.config import SpecRLConfig
from nemo_specrl.engine.patches import Patch
from nemo_specrl.engine.plugin import all_patches
from nemo_specrl.monitoring import names
from nemo_specrl.trainer.recipe import Recipe

FOLDER = Path(__file__).parent.parent / "docs" / "reference"
NOTE = "<!-- Written by scripts/reference.py from the code; change it there. -->\n\n"
KEYS = """# Keys

The `spec_rl:` block is the same everywhere: under `policy.generation` in a recipe of NeMo-RL or
of the embedded trainer, and as `additional_config: {spec_rl: {...}}` in any other host of vLLM,
where `enabled` is true unless it is set. An unknown or wrong key ends the start with one line.

"""
TRAINER = """
## Recipes of the embedded trainer

Keys that NeMo-RL also has mean the same there.

"""
METRICS = """# Metrics

The embedded trainer writes them to `metrics.jsonl`. In TensorBoard and in NeMo-RL's logger all
begin with `train/`. Prometheus has them
[under names made from these](../guide/monitoring.md#prometheus). What NeMo-RL logs by itself is
not listed.
"""
PATCHES = """# What is replaced in other packages

Nothing is written into another package's files. Where it is enough, what vLLM offers to plug-ins is
used: its entry point `vllm.general_plugins`, custom proposers, `scheduler_cls`, `extra_args`.

## vLLM

`nemo_specrl/engine/patches.py` wraps each function, all or none of a group. *Sources* are the
versions whose source of the function is known by its hash; with any other, the engine starts
without drafts. Where none are named, the function's arguments alone are relied on. What vLLM could
adopt is in [upstream/](../../upstream/README.md).

"""
GROUPS = {
    "engine": "Where an engine is configured, and in its core",
    "v1": "In the V1 model runner (CPUs)",
    "v2": "In the V2 model runner (GPUs)",
    "hybrid": "There, for models with layers other than attention",
}
OTHERS = """
## NeMo-RL

By `nemo-specrl run` alone; with `vllm_kwargs.additional_config` nothing of NeMo-RL is touched.
Names are checked when the plug-in is installed (`nemo_specrl/nemo_rl/compat.py`).

| replaced | why |
|---|---|
| `VllmGeneration`, by a subclass | balance of rows over engines; writes the block into `additional_config` |
| `setup` of GRPO, PPO and distillation, `setup_single_controller` | reads and checks the block, adds the hooks |
| `validate` of these | rows of a validation reuse no prefixes |
| `SingleControllerActor`, by a subclass | hooks in the actor's process |
| `log_metrics` of the logger and `begin_finalization` of the checkpoint manager of the run | metrics; the cache in checkpoints |
| `TimeoutChecker` | the last checkpoint is due at a point in time of the job |
| the worker's class, with `preset: reuse` alone: `worker_extension_cls_fqn` where NeMo-RL has it | prefix reuse |

## Megatron-Core

On a CPU, some calls of CUDA in torch and in megatron's random state
(`nemo_specrl/trainer/policy/megatron/cpu.py`).
"""  # noqa: E501


def docstrings(source: str) -> dict[str, str]:
    """The strings behind the assignments of a class or a module, by name, in one line each."""
    tree = ast.parse(textwrap.dedent(source))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else tree.body
    found = {}
    for node, following in itertools.pairwise(body):
        target = node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(node, ast.Assign):
            target = node.targets[0]
        if isinstance(target, ast.Name) and isinstance(following, ast.Expr):
            text = getattr(following.value, "value", None)
            if isinstance(text, str):
                found[target.id] = plain(text)
    return found


def plain(text: str) -> str:
    """A docstring as a cell of a table."""
    text = re.sub(r":\w+:`~?\.?([\w.]+)`", r"`\1`", " ".join(text.split()))
    return text.replace("``", "`").replace("|", "\\|")


def block_in(annotation: Any) -> type[BaseModel] | None:
    """The block that a field has, optional or not."""
    options = (annotation, *getattr(annotation, "__args__", ()))
    models = [o for o in options if isinstance(o, type) and issubclass(o, BaseModel)]
    return models[0] if models else None


def rows(model: type[BaseModel], prefix: str, without: tuple[str, ...] = ()) -> Iterator[str]:
    """A line for each key of a block and of those in it."""
    said: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if issubclass(cls, BaseModel) and cls is not BaseModel:
            said |= docstrings(inspect.getsource(cls))
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        if path in without:
            continue
        inner = block_in(field.annotation)
        if inner is not None:
            yield from rows(inner, f"{path}.", without)
            continue
        default = field.get_default(call_default_factory=True)
        shown = "" if default is PydanticUndefined else f"`{of_yaml(path, default)}`"
        yield f"| `{path}` | {shown} | {said.get(name, '')} |"


def of_yaml(path: str, value: Any) -> str:
    """A default as a recipe would have it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if "bytes" in path and isinstance(value, int):
        return f"{value >> 30}GiB" if value >= 2**30 else f"{value >> 20}MiB"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(list(value) if isinstance(value, tuple) else value)


def keys_page() -> str:
    """The page of keys."""
    head = "| key | default | meaning |\n|---|---|---|\n"
    block = "\n".join(rows(SpecRLConfig, ""))
    recipe = "\n".join(
        rows(Recipe, "", without=("policy.generation.spec_rl", "ppo", "value.optimizer"))
    )
    return NOTE + KEYS + head + block + "\n" + TRAINER + head + recipe + "\n"


def metrics_page() -> str:
    """The page of metrics, by the sections of ``names.py``."""
    page = NOTE + METRICS
    for part in re.split(r"^# --- ", inspect.getsource(names), flags=re.M)[1:]:
        title, _, body = part.partition("\n")
        lines = []
        for name, text in docstrings(body).items():
            value = getattr(names, name)
            if isinstance(value, str):
                lines.append(f"| `{value}` | {text} |")
        if lines:
            title = title.strip("- ")
            page += f"\n## {title[0].upper()}{title[1:]}\n\n| metric | meaning |\n|---|---|\n"
            page += "\n".join(lines) + "\n"
    return page


def patches_page() -> str:
    """The page of patches, by the table of the engine."""
    page = NOTE + PATCHES
    for group, patches in all_patches().items():
        page += (
            f"### {GROUPS[group]}\n\n| replaced | versions | sources | why |\n|---|---|---|---|\n"
        )
        page += "".join(patch_row(patch) for patch in patches) + "\n"
    return page.rstrip("\n") + "\n" + OTHERS


def patch_row(patch: Patch) -> str:
    """A line of the table."""

    def text(version: tuple[int, ...]) -> str:
        return ".".join(map(str, version))

    owner = patch.owner.replace(":", ".")
    versions = f"from {text(patch.since)}"
    if patch.before is not None:
        versions += f", before {text(patch.before)}"
    sources = ", ".join(dict.fromkeys(patch.sources.values()))
    return f"| `{owner}.{patch.name}` | {versions} | {sources} | {plain(patch.reason)} |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    changed = []
    pages = {"keys.md": keys_page(), "metrics.md": metrics_page(), "patches.md": patches_page()}
    for name, text in pages.items():
        path = FOLDER / name
        if path.exists() and path.read_text() == text:
            continue
        changed.append(name)
        if not check:
            path.write_text(text)
    if check and changed:
        sys.exit(f"{', '.join(changed)}: out of date; run scripts/reference.py")


if __name__ == "__main__":
    main()
