"""Which of NeMo-RL's own recipes run with the plug-in's block added, and why others are refused.

    NEMO_RL_HOME=DIR python scripts/nemo_rl_recipes.py

Each recipe under examples/configs of the checkout is read by NeMo-RL's loader and checked as
``nemo-specrl check`` does, with ``preset: lossless`` and with ``reuse``. Nothing is started.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from nemo_specrl.errors import SpecRLError
from nemo_specrl.nemo_rl.recipe import check_recipe
from nemo_specrl.nemo_rl.recipe_file import load

PRESETS = ("lossless", "reuse")


def refusal(recipe: dict[str, Any], preset: str, images: bool) -> str:
    """The line with which a recipe is refused, without its values; empty if it runs."""
    block = {"enabled": True, "preset": preset, "cache": {"dir": "/raid/specrl"}}
    recipe["policy"]["generation"]["spec_rl"] = block
    try:
        check_recipe(recipe, images=images, controller=recipe.get("async_rl") is not None)
    except SpecRLError as error:
        return re.sub(r" = '?(?!reuse)[\w.]+'?", "", str(error))
    return ""


def main() -> None:
    """Print a table for each preset."""
    home = os.environ.get("NEMO_RL_HOME")
    if home is None:
        raise SystemExit("set NEMO_RL_HOME to a checkout of NeMo-RL")
    folder = Path(home) / "examples" / "configs"
    # A user's variables are paths, which no check reads: those that are not set may be any.
    OmegaConf.register_new_resolver(
        "oc.env",
        lambda name, default=None: os.environ.get(name, default or f"/{name}"),
        replace=True,
    )
    reasons: dict[str, Counter[str]] = {preset: Counter() for preset in PRESETS}
    for path in sorted(folder.rglob("*.yaml")):
        recipe = load(path)
        if not (recipe.get("policy") or {}).get("generation"):
            continue  # it makes no rollouts, or is an evaluation
        images = path.name.startswith(("vlm_", "audio_")) or path.parent.name == "vlm"
        for preset in PRESETS:
            reasons[preset][refusal(recipe, preset, images)] += 1
    for preset, counted in reasons.items():
        total, run = counted.total(), counted.pop("")
        print(f"preset: {preset}: {run} of {total} recipes run; refused:")
        for reason, number in counted.most_common():
            print(f"{number:5} {reason}")


if __name__ == "__main__":
    main()
