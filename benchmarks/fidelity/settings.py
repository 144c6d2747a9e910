"""The comparisons of ``fidelity.py``: settings, variants of ``spec_rl:``, grids. Runs nothing."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_specrl.config import PRESETS

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
        """Name of the recipe's block of the algorithm; DAPO uses ``grpo``."""
        return "ppo" if self.algorithm == "ppo" else "grpo"

    @property
    def task(self) -> str:
        """The title's first words, as tables name the task."""
        return self.title.partition(",")[0]

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


def with_trees(preset: str, *keys: str) -> tuple[str, ...]:
    """Overrides for a preset that drafts from trees, with four epochs of rollouts in each."""
    trees = ("tree.enabled=true", "cache.groups_per_prompt=4")
    return tuple(f"{SPEC}{key}" for key in ("enabled=true", f"preset={preset}", *trees, *keys))


L = "lenience=1.6487"
BEHAVIOUR = "loss_fn.use_importance_sampling_correction=true"
VARIANTS: dict[str, tuple[str, ...]] = {
    PLAIN: (f"{SPEC}enabled=false",),
    "lossless": with_trees("lossless"),
    **{
        name: spec(*(f"{key}={value}" for key, value in PRESETS[name].items()))
        for name in ("faithful", "fast")
    },
    # Reuse beside trees, which make fresh rows cheap.
    "faithful, trees": with_trees("faithful"),
    "faithful, trees, 35 % fresh": with_trees("faithful", "fresh_fraction=0.35"),
    "faithful, trees, 50 % fresh": with_trees("faithful", "fresh_fraction=0.5"),
    # What the mechanisms do one by one.
    "strict": spec(),
    # SPEC-RL's own sweep over lenience; "strict" and "fast" are its points at 1 and e^0.5.
    "lenience e^0.2": spec("lenience=1.2214"),
    "lenience e^0.8": spec("lenience=2.2255"),
    "lenience e^1": spec("lenience=2.7183"),
    "lenience e^2": spec("lenience=7.3891"),
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
LENIENCE = {
    "strict": "1",
    "lenience e^0.2": "e^0.2",
    "fast": "e^0.5",
    "lenience e^0.8": "e^0.8",
    "lenience e^1": "e^1",
    "lenience e^2": "e^2",
}
"""Lenience of the variants that differ in nothing else."""
TREES = tuple(name for name in VARIANTS if name.startswith("faithful, trees"))
SHOWN = (PLAIN, *PRESETS, "plain, 3 of 8 rollouts")
GRIDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "short": (("sorting-64",), (PLAIN, "strict", "fast")),
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
    "lenience": (("sums-small-64", "sorting-64"), (PLAIN, *LENIENCE)),
    "trees": (("sorting-64", "sums-small-64-ppo"), (PLAIN, "lossless", "faithful", *TREES)),
}
