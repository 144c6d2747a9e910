"""The plug-in's view of a NeMo-RL recipe: its ``spec_rl:`` block, and what cannot run with it.

What cannot run is refused in one line before anything is started; ``nemo-specrl check RECIPE`` asks
the same on a login node. The block reaches the engines as ``vllm_kwargs.additional_config``, where
a user may also have written it. There the vLLM plug-in reads it, whatever class a worker has.
"""

from __future__ import annotations

import difflib
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from nemo_specrl.config import SpecRLConfig, validated
from nemo_specrl.engine.v2_config import check_drafter
from nemo_specrl.errors import ConfigError
from nemo_specrl.files import step_folders
from nemo_specrl.nemo_rl.compat import option
from nemo_specrl.rollout import vocabulary_hash

__all__ = [
    "BLOCK",
    "OWN",
    "PLUGIN",
    "REUSED",
    "Run",
    "algorithm_of",
    "check_recipe",
    "current_run",
    "give_to_engines",
    "read_block",
    "run_of",
    "setting_up",
]

BLOCK = "policy.generation.spec_rl"
OWN = "_spec_rl"
"""Key of the generation block with what reuse workers need and no user writes."""
REUSED = "spec_rl_reused"
"""Column of a batch for generation, bool ``[rows]``, by which a reuse worker knows the rows of a
training."""
PLUGIN = "nemo_specrl"
"""Name of the entry point in ``vllm.general_plugins``."""
ENGINES = "vllm_kwargs.additional_config.spec_rl"
"""Where the engines read the block, below the generation block."""
IN_ENGINES = f"policy.generation.{ENGINES}"
DRAFTER = "vllm_kwargs.speculative_config"
"""Where a recipe has a drafter of its own, likewise."""
WITHOUT_DRAFTS = (
    *("spec_method", "spec_model", "spec_tokens", "scheduler_cls"),
    *("logits_processors", "enable_dbo", "enable_elastic_ep", "kv_sharing_fast_prefill"),
)
"""Keys of ``vllm_kwargs`` beside which an engine of the vLLM of any NeMo-RL here refuses to draft:
shorthands of ``speculative_config``, another scheduler, and what its V2 model runner lacks."""
RAW_PRECISIONS = (None, "auto", "bfloat16", "float16", "half", "float32", "float")
GRAPH_GIB = 1.5
"""What graphs for drafts took of an H100 with an 8B model, beside those of stock vLLM."""
LONGEST_RAY_TMPDIR = 39
"""Bytes: a Unix socket has 107, of which Ray takes the rest
(``/ray/session_DATE_TIME_PID/sockets/plasma_store``)."""

_current: Run | None = None


@dataclass(frozen=True)
class Run:
    """A training with the plug-in.

    Args:
        spec_rl: the ``spec_rl:`` block, with ``cache.vocabulary``.
        group: number of rows that a batch has for each of its prompts.
        prompts: number of prompts of a step.
        steps: number of steps after which the run ends, as far as the recipe says.
        epochs: how often the run passes over its data at most, ``inf`` if the recipe does not say.
        drawn: number of prompts that it draws from its data at most, likewise.
        label: label of the run in Prometheus, the name of its checkpoint folder.
        log_folder: NeMo-RL's ``logger.log_dir``.
        checkpoint: folder of the checkpoint from which the run resumes, or None.
        colocated: whether engines share their GPUs with the policy.
        first_version: policy version of prefix reuse before the first refit, later than those of
            all earlier processes: seconds since 1970.
    """

    spec_rl: SpecRLConfig
    group: int
    prompts: int
    steps: int
    epochs: float
    drawn: float
    label: str
    log_folder: Path
    checkpoint: Path | None
    colocated: bool
    first_version: int

    @property
    def summary(self) -> str:
        """What the plug-in does in this run, in one line."""
        cache, histories = self.spec_rl.cache, self.spec_rl.draft.max_bytes / 2**30
        said = f"preset {self.spec_rl.preset}, earlier responses in {cache.dir} on each node"
        if self.colocated:
            said += (
                f"; while the policy trains, an engine's GPU keeps {histories:.1f} GiB of histories"
                f" and some {GRAPH_GIB} GiB of CUDA graphs for drafts, even in sleep mode"
            )
        return said


def run_of(
    recipe: Any, tokenizer: Any, *, images: bool = False, controller: bool = False
) -> Run | None:
    """Read a training from its recipe; None if ``spec_rl`` is absent or not enabled.

    Args:
        recipe: NeMo-RL's MasterConfig.
        tokenizer: as NeMo-RL's script passes it to ``setup``.
        images: whether the script also passed a processor of images, sounds or videos.
        controller: whether the run uses NeMo-RL's single controller.

    Raises:
        ConfigError: the recipe asks for something that the plug-in cannot do.
    """
    spec_rl = check_recipe(recipe, images=images, controller=controller)
    if spec_rl is None:
        return None
    text = getattr(tokenizer, "tokenizer", tokenizer)  # a processor has one
    vocabulary = spec_rl.cache.vocabulary or vocabulary_hash(text.get_vocab())
    cache = spec_rl.cache.model_copy(update={"vocabulary": vocabulary})
    algorithm = algorithm_of(recipe)
    folder = Path(option(recipe, "checkpointing.checkpoint_dir")).absolute()
    prompts = int(option(recipe, f"{algorithm}.num_prompts_per_step", 1))
    steps = int(option(recipe, f"{algorithm}.max_num_steps", 0))
    sampled_again = option(recipe, f"{algorithm}.use_dynamic_sampling", False)
    return Run(
        spec_rl=spec_rl.model_copy(update={"cache": cache}),
        group=int(option(recipe, f"{algorithm}.num_generations_per_prompt", 1)),
        prompts=prompts,
        steps=steps,
        epochs=_epochs(recipe, algorithm),
        drawn=math.inf if sampled_again or not steps else steps * prompts,
        label=folder.name,
        log_folder=Path(option(recipe, "logger.log_dir")).absolute(),
        colocated=bool(option(recipe, "policy.generation.colocated.enabled", False)),
        # NeMo-RL resumes from it even with checkpointing.enabled=false.
        checkpoint=next(reversed(step_folders(folder)), None),
        first_version=int(time.time()),
    )


def _epochs(recipe: Any, algorithm: str) -> float:
    if option(recipe, "data.use_multiple_dataloader", False):
        return math.inf  # they begin again, as often as it takes
    if option(recipe, "grpo.async_grpo.enabled", False):
        return 1.0  # whatever max_num_epochs says
    return float(option(recipe, f"{algorithm}.max_num_epochs", math.inf))


def algorithm_of(recipe: Any) -> str:
    """Return the name of the algorithm's block, the first that the recipe has."""
    # v0.8.0's single controller has either grpo or ppo; a distillation has no other block.
    return next((n for n in ("ppo", "distillation") if option(recipe, n) is not None), "grpo")


def read_block(generation: Any, where: str = BLOCK) -> SpecRLConfig | None:
    """Read the ``spec_rl:`` block of a generation block; None if it is absent or not enabled.

    It may stand where the engines read it; there it is enabled unless it says otherwise.

    Raises:
        ConfigError: names the first key that is wrong, or ``enabled`` where a block lacks it:
            what it sets would silently do nothing.
    """
    block, in_engines = option(generation, "spec_rl"), option(generation, ENGINES)
    if block is not None and in_engines is not None:
        raise ConfigError(f"{where} and {ENGINES} are the same block; keep one of them")
    if in_engines is not None:
        where = where.removesuffix("spec_rl") + ENGINES
        block = _plain(in_engines)
        block = {"enabled": True, **block} if isinstance(block, dict) else block
    if block is None:
        return None
    spec_rl = validated(SpecRLConfig, _plain(block), where)
    if "enabled" not in spec_rl.model_fields_set:
        raise ConfigError(f"{where}.enabled: not set; set true, or false for stock NeMo-RL")
    return spec_rl if spec_rl.enabled else None


def give_to_engines(generation: Any, spec_rl: SpecRLConfig) -> None:
    """Write the block where the vLLM plug-in of each engine reads it."""
    vllm_kwargs = generation["vllm_kwargs"] = dict(generation.get("vllm_kwargs") or {})
    others = dict(vllm_kwargs.get("additional_config") or {})
    block = spec_rl.model_dump(mode="json", exclude_none=True)
    vllm_kwargs["additional_config"] = others | {"spec_rl": block}


def check_recipe(
    recipe: Any, *, images: bool = False, controller: bool = False
) -> SpecRLConfig | None:
    """Refuse what the plug-in cannot do.

    Args:
        recipe: NeMo-RL's MasterConfig, or the mapping that its file holds.
        images: whether prompts have images, sounds or videos.
        controller: whether the run uses NeMo-RL's single controller.

    Returns:
        The ``spec_rl:`` block; None if it is absent or not enabled.

    Raises:
        ConfigError: names the key, its value and what to set.
    """
    for path in _keys_like(recipe, "specrl"):
        if path not in (BLOCK, IN_ENGINES):
            raise ConfigError(f"{path}: is read by nobody here; write {BLOCK}")
    beside = IN_ENGINES.removesuffix(".spec_rl")
    for name in ("cache", "draft"):
        if option(recipe, f"{beside}.{name}") is not None:
            raise ConfigError(f"{beside}.{name}: is read by nobody here; write {BLOCK}.{name}")
    for path in _keys_like(recipe, "partialrollout"):
        raise ConfigError(
            f"{path}: NeMo-RL's engines await all rows of a batch; leave it out (the embedded "
            "trainer has it)"
        )
    generation = option(recipe, "policy.generation")
    spec_rl = read_block(generation)
    if spec_rl is None:
        return None
    if spec_rl.preset == "reuse" and option(generation, ENGINES) is not None:
        raise ConfigError(
            f"{IN_ENGINES}.preset = 'reuse': engines by themselves draft "
            f"losslessly; write the block as {BLOCK}, which nemo-specrl run reads"
        )
    refused = _refused(generation, spec_rl)
    if not controller:
        refused |= _refused_when_asynchronous(recipe, generation)
    if spec_rl.preset == "reuse":
        refused |= _refused_with_reuse(recipe, generation, spec_rl, images, controller)
    if isinstance(drafter := option(generation, DRAFTER), Mapping):
        check_drafter(spec_rl.draft, drafter, f"policy.generation.{DRAFTER}")
    for line, wrong in refused.items():
        if wrong:
            raise ConfigError(line)
    return spec_rl


def _refused(generation: Any, spec_rl: SpecRLConfig) -> dict[str, bool]:
    """What no engine does with drafts: a line for each, and whether the recipe asks for it."""
    backend = option(generation, "backend")
    stages = option(generation, "vllm_cfg.pipeline_parallel_size", 1)
    beside = [
        name
        for name in WITHOUT_DRAFTS
        if option(generation, f"vllm_kwargs.{name}") not in (None, False, [])
    ]
    drafter = option(generation, DRAFTER)
    off = f"or {BLOCK}.enabled=false"
    variables = option(generation, "vllm_cfg.env_vars", {})
    mapping = isinstance(variables, Mapping)
    environment = os.environ | {str(k): str(v) for k, v in (variables.items() if mapping else ())}
    plugins = environment.get("VLLM_PLUGINS")
    v2 = environment.get("VLLM_USE_V2_MODEL_RUNNER", "")
    ray_folder = environment.get("RAY_TMPDIR", "")
    place = BLOCK if option(generation, ENGINES) is None else IN_ENGINES
    return {
        f"policy.generation.backend = {backend!r}: must be vllm, {off}": backend != "vllm",
        f"{place}.cache.dir: must name a folder on each node's own disk, such as /raid/specrl": (
            spec_rl.cache.dir is None
        ),
        f"{BLOCK}.run_ahead.enabled = True: NeMo-RL's engines are not told the next prompts; leave "
        "it out (the embedded trainer has it)": spec_rl.run_ahead.enabled,
        f"policy.generation.vllm_kwargs.{', '.join(beside)}: an engine has one drafter, and "
        f"{BLOCK} brings one that does not work beside it; leave it out, {off}": bool(beside),
        f"policy.generation.{DRAFTER}: prefix reuse is not tested beside a "
        f"drafter; leave it out, or set {BLOCK}.preset=lossless": (
            bool(drafter) and spec_rl.preset == "reuse"
        ),
        f"policy.generation.vllm_cfg.pipeline_parallel_size = {stages}: vLLM's pipeline stages "
        f"take no drafter of ours; set 1, {off}": stages not in (1, "1"),
        "policy.generation.vllm_cfg.env_vars: must be a mapping of names to values": not mapping,
        f"VLLM_PLUGINS = {plugins!r}: vLLM's processes would not load nemo_specrl; add it, or "
        "leave VLLM_PLUGINS out": plugins is not None and PLUGIN not in plugins.split(","),
        f"VLLM_USE_V2_MODEL_RUNNER = {v2!r}: vLLM's V1 model runner takes no drafter of ours on "
        f"GPUs; leave it out, {off}": v2.strip().lower() not in ("", "1", "true"),
        f"RAY_TMPDIR = {ray_folder!r}: too long for Ray's sockets; name a folder of at most "
        f"{LONGEST_RAY_TMPDIR} bytes": len(os.fsencode(ray_folder)) > LONGEST_RAY_TMPDIR,
    }


def _refused_when_asynchronous(recipe: Any, generation: Any) -> dict[str, bool]:
    """What NeMo-RL itself refuses of asynchronous training, but only when its engines have
    started (``async_grpo_train``)."""
    algorithm = algorithm_of(recipe)
    key = f"{algorithm}.async_{algorithm}.enabled"
    wanted = bool(option(recipe, key, False))
    return {
        f"{key} = true: needs engines on GPUs of their own; set "
        "policy.generation.colocated.enabled=false": (
            wanted and bool(option(generation, "colocated.enabled", False))
        ),
        f"{key} = true: needs policy.generation.vllm_cfg.async_engine=true": (
            wanted and not option(generation, "vllm_cfg.async_engine", False)
        ),
        f"{key} = true: needs loss_fn.use_importance_sampling_correction=true": (
            wanted and not option(recipe, "loss_fn.use_importance_sampling_correction", False)
        ),
    }


def _refused_with_reuse(
    recipe: Any, generation: Any, spec_rl: SpecRLConfig, images: bool, controller: bool
) -> dict[str, bool]:
    """The same for prefix reuse, which compares log-probs of one policy, in workers of ours."""
    algorithm = algorithm_of(recipe)
    asynchronous = f"{algorithm}.async_{algorithm}"
    in_flight = f"{asynchronous}.in_flight_weight_updates"
    threshold = f"{algorithm}.seq_logprob_error_threshold"
    sampling = {
        name: option(generation, name)
        for name, raw in (
            ("temperature", (1, None)),
            ("top_p", (1, None)),
            ("top_k", (-1, 0, None)),
        )
        if option(generation, name) not in raw
    }
    rounded = {
        name: value
        for name in (
            *("vllm_cfg.precision", "vllm_cfg.kv_cache_dtype"),
            *("vllm_kwargs.quantization", "vllm_kwargs.quantization_config"),
            *("vllm_kwargs.kv_cache_dtype", "vllm_kwargs.hf_overrides.quantization_config"),
        )
        if (value := option(generation, name)) not in RAW_PRECISIONS and value
    }
    experts, tensor = (
        option(generation, f"vllm_cfg.{kind}_parallel_size", 1) for kind in ("expert", "tensor")
    )
    transport = option(generation, "refit_transport")
    with_keys = {
        "async_rl (the single controller), under which weights change while rows run": controller,
        f"{in_flight} = true, under which weights change while rows run": (
            option(recipe, f"{asynchronous}.enabled", False) and option(recipe, in_flight, False)
        ),
        "env.should_use_nemo_gym = true, whose requests come over HTTP": (
            option(recipe, "env.should_use_nemo_gym", False)
        ),
        "policy.generation.vllm_cfg.expose_http_server = true": (
            option(generation, "vllm_cfg.expose_http_server", False)
        ),
        "data_plane.enabled = true, where validation cannot be told from training": (
            option(recipe, "data_plane.enabled", False)
        ),
        f"policy.generation.refit_transport = {transport}": transport not in (None, "nccl_reshard"),
        f"{_named(sampling)}: drafts are judged by the log-probs of raw sampling (temperature 1, "
        "top_p 1, no top_k)": bool(sampling),
        f"{_named(rounded)}, whose rounding ends prefixes": bool(rounded),
        "policy.generation.quant_cfg": option(generation, "quant_cfg") is not None,
        "policy.generation.worker_extension_cls_fqn": (
            option(generation, "worker_extension_cls_fqn") is not None
        ),
        "policy.generation.vllm_cfg.enable_prefix_caching = false": (
            option(generation, "vllm_cfg.enable_prefix_caching") is False
        ),
        f"policy.generation.vllm_cfg.expert_parallel_size = {experts}, above that of tensors": (
            experts > tensor
        ),
        "policy.router_replay.enabled = true": option(
            recipe, "policy.router_replay.enabled", False
        ),
        "images, sounds or videos": images,
        f"reported_logprobs: behaviour, since {threshold} masks rows that report other log-probs "
        "than the policy's": (
            option(recipe, threshold) is not None
            and spec_rl.reuse is not None
            and spec_rl.reuse.reported_logprobs == "behaviour"
        ),
    }
    return {
        f"{BLOCK}.preset = 'reuse': does not work with {key}; set preset: lossless": bool(wrong)
        for key, wrong in with_keys.items()
    }


def _named(keys: Mapping[str, Any]) -> str:
    """Keys of the generation block with their values, for a message."""
    return ", ".join(f"policy.generation.{name} = {value}" for name, value in keys.items())


def _keys_like(block: Any, name: str, above: str = "") -> Iterator[str]:
    """Yield the paths of all keys of a recipe that are ``name``, but for a slip."""
    if isinstance(block, Mapping | BaseModel):
        for key, value in block.items() if isinstance(block, Mapping) else block:
            path = f"{above}{key}"
            plain = str(key).lower().replace("_", "").replace("-", "")
            if value is not None and difflib.get_close_matches(plain, [name], cutoff=0.9):
                yield path
            else:
                yield from _keys_like(value, name, f"{path}.")


def current_run() -> Run | None:
    """The run that is being set up in this process, or None."""
    return _current


@contextmanager
def setting_up(run: Run | None) -> Iterator[None]:
    """Make ``run`` the current one while NeMo-RL's ``setup`` builds the objects of the run."""
    global _current
    _current = run
    try:
        yield
    finally:
        _current = None


def _plain(block: Any) -> Any:
    """Copy OmegaConf's containers into plain dicts."""
    if isinstance(block, Mapping):
        return {str(name): _plain(value) for name, value in block.items()}
    return block
