"""Which of NeMo-RL's own recipes run with the ``spec_rl:`` block added, and why others are refused.

    make nemo-table NEMO_RL_HOME=DIR

Each recipe under examples/configs of the checkout in DIR is loaded as NeMo-RL loads it and asked by
the checks that run when a job starts, for engines on GPUs with the vLLM that the checkout pins. The
checkout's part of docs/reference/nemo_rl_recipes.md is written anew.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import runpy
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
TABLE = REPOSITORY / "docs" / "reference" / "nemo_rl_recipes.md"
PRESETS = ("lossless", "faithful")
CONTROLLER = "single controller"
KINDS = {
    "eval": "evaluation",
    "teachers": "off-policy distillation",
    "distillation": "distillation",
    "async_rl": CONTROLLER,
    "grpo": "GRPO",
    "ppo": "PPO",
    "sft": "SFT",
    "dpo": "DPO",
    "rm": "reward model",
}
"""What a recipe is for, by the first of these blocks that it has.

NeMo-RL's scripts say so by their names alone.
"""
PLAIN = ("off-policy distillation", "SFT", "DPO", "reward model")
MODELS: dict[str, dict[str, Any]] = {
    "deepseek.md": {"architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 256},
    "DeepSeek-R1-Distill-Qwen": {"architectures": ["Qwen2ForCausalLM"]},
    "GLM-4.7-Flash": {"architectures": ["Glm4MoeLiteForCausalLM"], "n_routed_experts": 64},
    "GLM-5.1": {"architectures": ["GlmMoeDsaForCausalLM"], "n_routed_experts": 256},
    "gemma-3-1b": {"architectures": ["Gemma3ForCausalLM"]},
    "gemma-3-27b": {"architectures": ["Gemma3ForConditionalGeneration"]},
    "gemma-4-26B-A4B": {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": {"num_experts": 128},
    },
    "gemma-4": {"architectures": ["Gemma4ForConditionalGeneration"]},
    "gpt-oss": {"architectures": ["GptOssForCausalLM"], "num_local_experts": 32},
    "Llama-3": {"architectures": ["LlamaForCausalLM"]},
    "MiniMax-M2": {"architectures": ["MiniMaxM2ForCausalLM"], "num_local_experts": 256},
    "Mistral-Medium-3.5": {"architectures": ["Mistral3ForConditionalGeneration"]},
    "Moonlight": {"architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 64},
    "Nemotron-Nano": {"architectures": ["NemotronHForCausalLM"]},
    "Nemotron-3": {"architectures": ["NemotronHForCausalLM"]},
    "nemotron-super-omni": {"architectures": ["NemotronH_Super_Omni_Reasoning_V3"]},
    "Qwen2.5-Omni": {"architectures": ["Qwen2_5OmniModel"]},
    "Qwen2.5-VL": {"architectures": ["Qwen2_5_VLForConditionalGeneration"]},
    "Qwen2.5": {"architectures": ["Qwen2ForCausalLM"]},
    "Qwen3-Omni": {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "thinker_config": {"text_config": {"num_experts": 128}},
    },
    "Qwen3.5-9B": {"architectures": ["Qwen3_5ForConditionalGeneration"]},
    "Qwen3.5": {"architectures": ["Qwen3_5MoeForConditionalGeneration"]},
    "Qwen3-30B-A3B": {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128},
    "Qwen3-235B-A22B": {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128},
    "Qwen3-": {"architectures": ["Qwen3ForCausalLM"]},
}
"""What the checks read of a model's config.json, by a part of the model's name: the first one that
fits. A job reads the file itself; here it is told, so that the table is the same without a network.
"""


@dataclass(frozen=True)
class Recipe:
    """A recipe and what the checks say of it: a reason by preset, or None where it runs."""

    path: str
    kind: str
    model: str
    reasons: Mapping[str, str | None]


class NemoRl:
    """A checkout of NeMo-RL, whose loader and models of recipes are used."""

    def __init__(self, home: Path) -> None:
        from nemo_specrl.nemo_rl.compat import pinned_vllm

        # By its path, since this Python may have a sitecustomize of its own.
        runpy.run_path(str(REPOSITORY / "tests/support/nemo_rl/path/sitecustomize.py"))
        sys.path.insert(0, str(home))
        from omegaconf import OmegaConf

        self.home = home
        self.vllm = pinned_vllm(home)
        version, _, commit = str(
            importlib.import_module("nemo_rl.package_info").__version__
        ).partition("+")
        self.version = f"{version} ({commit[:7]})"
        self._config = importlib.import_module("nemo_rl.utils.config")
        # What run_eval.py asks.
        eval_datasets = importlib.import_module("nemo_rl.data.datasets.eval_datasets")
        self._is_multimodal = eval_datasets._is_multimodal_dataset
        self._config.register_omegaconf_resolvers()
        # A user's variables are paths, which no check reads: those that are not set may be any.
        OmegaConf.register_new_resolver(
            "oc.env",
            lambda name, default=None: os.environ.get(name, default or f"/{name}"),
            replace=True,
        )

    def recipes(self) -> Iterator[Recipe]:
        """All recipes, in the order of their paths."""
        folder = self.home / "examples" / "configs"
        for path in sorted(folder.rglob("*.yaml")):
            yield self._asked(path, str(path.relative_to(folder)))

    def _asked(self, path: Path, name: str) -> Recipe:
        from omegaconf import OmegaConf

        loaded = OmegaConf.to_container(self._config.load_config(path), resolve=True)
        kind = next(kind for block, kind in KINDS.items() if loaded.get(block) is not None)
        block = loaded["generation"] if kind == "evaluation" else loaded["policy"]
        model = str(block["model_name"]).split()[-1].removeprefix("https://github.com/")
        reasons = (
            {} if kind in PLAIN else {p: self._refusal(loaded, kind, name, p) for p in PRESETS}
        )
        return Recipe(name, kind, model, reasons)

    def _refusal(self, loaded: dict[str, Any], kind: str, name: str, preset: str) -> str | None:
        """Why a recipe with the block added is refused when a job starts."""
        from nemo_specrl.engine.vllm.environment import Engines
        from nemo_specrl.errors import SpecRLError
        from nemo_specrl.nemo_rl.context import RunContext, read_block
        from nemo_specrl.nemo_rl.evaluation import BLOCK, check_evaluation

        policy = loaded["generation"] if kind == "evaluation" else loaded["policy"]
        generation = {
            **(policy if kind == "evaluation" else policy["generation"]),
            "spec_rl": {"enabled": True, "preset": preset, "cache": {"dir": "/raid/specrl"}},
        }
        variables = (generation.get("vllm_cfg") or {}).get("env_vars") or {}
        known = {
            "engines": Engines.elsewhere(
                self.vllm, {key: str(value) for key, value in variables.items()}
            ),
            "model": facts_of(str(policy["model_name"])),
        }
        try:
            if kind == "evaluation":
                config = SimpleNamespace(**{**loaded, "generation": generation})
                images = self._is_multimodal(loaded["data"]["dataset_name"])
                spec_rl = read_block(generation["spec_rl"], BLOCK)
                check_evaluation(config, spec_rl, images=images, **known)
                return None
            algorithm = "grpo" if kind == CONTROLLER else kind.lower()
            module = "single_controller_utils" if kind == CONTROLLER else algorithm
            config = importlib.import_module(f"nemo_rl.algorithms.{module}").MasterConfig
            RunContext.of(
                config(**{**loaded, "policy": {**policy, "generation": generation}}),
                algorithm,
                # run_vlm_grpo.py starts these, and gives them a processor.
                images=name.startswith(("vlm_", "audio_", "recipes/vlm/")),
                single_controller=kind == CONTROLLER,
                **known,
            )
        except SpecRLError as refusal:
            return str(refusal)
        return None


def facts_of(name: str) -> dict[str, Any]:
    """What MODELS says of a model."""
    for part, facts in MODELS.items():
        if part in name:
            return facts
    raise SystemExit(f"{name}: no such model in MODELS of {Path(__file__).name}; add it there")


def section(nemo_rl: NemoRl) -> str:
    """A checkout's part of the table."""
    recipes = list(nemo_rl.recipes())
    asked = [recipe for recipe in recipes if recipe.reasons]
    plain = [recipe for recipe in recipes if not recipe.reasons]
    lines = [
        heading(nemo_rl),
        "",
        f"{len(recipes)} recipes, {len(asked)} of which make rollouts.",
        "",
        "| preset | run | refused |",
        "|---|---|---|",
    ]
    for preset in PRESETS:
        run = sum(recipe.reasons[preset] is None for recipe in asked)
        share = round(100 * (len(asked) - run) / len(asked))
        lines.append(f"| `{preset}` | {run} | {len(asked) - run} ({share} %) |")
    run = sum(None in recipe.reasons.values() for recipe in asked)
    share = round(100 * (len(asked) - run) / len(asked))
    lines.append(f"| whichever runs | {run} | {len(asked) - run} ({share} %) |")
    counts = {p: Counter(rule_of(recipe.reasons[p]) for recipe in asked) for p in PRESETS}
    reasons = sorted(
        {reason for counted in counts.values() for reason in counted if reason},
        key=lambda reason: (-sum(counts[p][reason] for p in PRESETS), reason),
    )
    number = {reason: i for i, reason in enumerate(reasons, 1)}
    lines += ["", "Refused because, with the number of recipes:", ""]
    lines += ["| | `lossless` | `faithful` | |", "|---|---|---|---|"]
    for reason in reasons:
        told = reason.replace("|", "\\|")
        row = " | ".join(str(counts[p][reason] or "") for p in PRESETS)
        lines.append(f"| {number[reason]} | {row} | {told} |")
    lines += ["", "| for | model | `lossless` | `faithful` | recipes |", "|---|---|---|---|---|"]
    grouped: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for recipe in asked:
        said = [rule_of(recipe.reasons[p]) for p in PRESETS]
        results = [f"refused: {number[rule]}" if rule else "runs" for rule in said]
        grouped[(recipe.kind, recipe.model, *results)].append(recipe.path)
    for recipe in plain:
        grouped[(recipe.kind, "any", "no rollouts", "no rollouts")].append(recipe.path)
    lines += [
        f"| {' | '.join(key)} | {', '.join(f'`{path}`' for path in paths)} |"
        for key, paths in sorted(grouped.items())
    ]
    return "\n".join(lines) + "\n"


def rule_of(reason: str | None) -> str:
    """A refusal without the values of its recipe; empty where there is none."""
    return re.sub(r"= '?(?!true|v2|auto)[\w.]+'?|\([\w, ]+\)|(?<=most )\d+", "...", reason or "")


def heading(nemo_rl: NemoRl) -> str:
    """The first line of a checkout's part."""
    return f"## NeMo-RL {nemo_rl.version}, vLLM {nemo_rl.vllm}"


def committed(nemo_rl: NemoRl, table: str) -> str | None:
    """A checkout's part of the table as it stands there; None where there is none."""
    found = re.search(rf"^{re.escape(heading(nemo_rl))}\n.*?(?=^## |\Z)", table, re.M | re.S)
    return None if found is None else found[0].rstrip("\n") + "\n"


def main() -> None:
    """Write a checkout's part of the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("home", type=Path, help="a checkout of NeMo-RL")
    sys.path.insert(0, str(REPOSITORY))
    nemo_rl = NemoRl(parser.parse_args().home.resolve())
    table = TABLE.read_text()
    old, new = committed(nemo_rl, table), section(nemo_rl)
    table = table.rstrip("\n") + f"\n\n{new}" if old is None else table.replace(old, new)
    TABLE.write_text(table)
    print(f"{TABLE.relative_to(REPOSITORY)}: {heading(nemo_rl).removeprefix('## ')} written")


if __name__ == "__main__":
    main()
