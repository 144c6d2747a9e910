"""An evaluation (NeMo-RL's run_eval.py), whose rows draft from each other and from those of earlier
evaluations.

Drafts are lossless: scores are those of the evaluated checkpoint. What an evaluation generates is
kept for the next one on the same data set, usually of a later checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from nemo_specrl.config import SpecRLConfig
from nemo_specrl.engine.vllm.environment import Engines
from nemo_specrl.errors import ConfigError
from nemo_specrl.nemo_rl import compat
from nemo_specrl.nemo_rl.context import RunContext, read_block, set_variables
from nemo_specrl.nemo_rl.recipe_checks import check_recipe

__all__ = ["BLOCK", "check_evaluation", "evaluation_run"]

BLOCK = "generation.spec_rl"
_PREFIX_REUSE = r"(set |take )?preset: faithful( without trees| \(prefix reuse, not exact\))?"
"""What some refusals of a training propose, but an evaluation does not support."""


def evaluation_run(master_config: Any, tokenizer: Any) -> RunContext | None:
    """The plug-in's view of an evaluation; None if ``spec_rl`` is absent or not enabled.

    Evaluations on a data set share a store if their models have the same vocabulary, as the
    checkpoints of a training do: their folders differ, so names say nothing.

    Args:
        master_config: MasterConfig of NeMo-RL's evaluation.
        tokenizer: as the script passes it to ``setup``: for a multi-modal data set it is a
            processor.

    Raises:
        ConfigError: the recipe asks for something that the plug-in cannot do.
    """
    generation = master_config.generation
    block = generation.get("spec_rl")
    if block is None:
        return None
    spec_rl = read_block(block, BLOCK)
    if not spec_rl.enabled:
        return None
    images = not hasattr(tokenizer, "get_vocab")
    set_variables(generation, check_evaluation(master_config, spec_rl, images=images))
    text = tokenizer.tokenizer if images else tokenizer
    vocabulary = json.dumps(sorted(text.get_vocab().items()))
    tokenizer_id = "vocabulary " + hashlib.sha256(vocabulary.encode()).hexdigest()[:16]
    data = str(master_config.data["dataset_name"])
    # There are no rewards of training that a drift monitor could compare.
    monitor = spec_rl.monitor.model_copy(update={"enabled": False})
    return RunContext(
        spec_rl=spec_rl.model_copy(update={"monitor": monitor}),
        seed=int(master_config.eval["seed"]),
        group=int(master_config.eval["num_tests_per_prompt"]),
        name=hashlib.sha256(f"evaluation {tokenizer_id} {data}".encode()).hexdigest()[:16],
        label="evaluation",
        log_folder=None,
        checkpoint=None,
        tokenizer_id=tokenizer_id,
        evaluates=True,
    )


def check_evaluation(
    master_config: Any,
    spec_rl: SpecRLConfig,
    *,
    images: bool = False,
    engines: Engines | None = None,
    model: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """Refuse what the plug-in cannot do in an evaluation, before anything is started.

    Args:
        master_config: MasterConfig of NeMo-RL's evaluation.
        spec_rl: its ``spec_rl:`` block.
        images: whether the data set has images, sounds or videos.
        engines: what is known about the recipe's engines; None: what can be seen from here.
        model: configuration of its model; None: as its name says.

    Returns:
        Variables that the engines' processes need in addition to those of the recipe.

    Raises:
        ConfigError: names the key, its value and what to set.
        IncompatibleVersion: the drafter that the block names does not run here.
    """
    generation: Mapping[str, Any] = master_config.generation
    engines = engines or compat.engines_of(generation)
    for wrong, line in _refused(spec_rl, engines):
        if wrong:
            raise ConfigError(f"{BLOCK}.{line}")
    # Its generation block is like a training's, in another place.
    as_training = SimpleNamespace(
        policy={"generation": generation, "model_name": generation["model_name"]},
        eval=master_config.eval,
        loss_fn=None,
        data=None,
    )
    try:
        return check_recipe(
            as_training, spec_rl, "eval", images=images, engines=engines, model=model
        )
    except ConfigError as error:
        line = str(error).replace("policy.generation.", "generation.")
        raise ConfigError(re.sub(_PREFIX_REUSE, "set enabled: false", line)) from None


def _refused(spec_rl: SpecRLConfig, engines: Engines) -> list[tuple[bool, str]]:
    """What an evaluation's block may not ask for, though a training's may."""
    key = "fresh_fraction" if spec_rl.preset == "lossless" else "preset"
    return [
        (
            not (engines.v2_speculators or engines.custom_proposers),
            f"enabled = true: vLLM {engines.version} takes no drafter of ours (0.25.1 and later "
            "do), and nothing else is faster in an evaluation; set false",
        ),
        (
            spec_rl.effective_fresh_fraction < 1,
            f"{key} = {getattr(spec_rl, key)}: a reused prefix is no sample of the checkpoint that "
            "is evaluated, and would bias its score; set preset: lossless, and leave "
            "fresh_fraction out",
        ),
        (
            not spec_rl.tree.enabled,
            "tree.enabled = false: nothing else drafts in an evaluation; set true, or enabled: "
            "false",
        ),
        (
            spec_rl.tree.method == "rounds",
            "tree.method = rounds: not tried in an evaluation; set auto, or enabled: false",
        ),
        (
            spec_rl.run_ahead.enabled,
            "run_ahead.enabled = true: the next prompts are not known in an evaluation; set false",
        ),
    ]
