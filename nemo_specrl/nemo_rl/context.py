"""The plug-in's view of a NeMo-RL run, read from its MasterConfig when the run is set up.

``setup`` of NeMo-RL's algorithms has the whole recipe; the generation that it builds gets a part.
What the plug-in cannot do is refused here, before anything is started.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_specrl.config import SpecRLConfig, validated
from nemo_specrl.engine.drafters.method import drafting_method, engine_options
from nemo_specrl.errors import ConfigError
from nemo_specrl.files import step_folders

__all__ = [
    "BLOCK",
    "PROMPT_KEYS",
    "SAMPLE_INDICES",
    "RunContext",
    "current_run",
    "engine_arguments",
    "get_option",
    "setting_up",
]

BLOCK = "policy.generation.spec_rl"
SAMPLE_INDICES = "spec_rl_sample_indices"
"""Column of a batch for generation: the sample index of each row, int64 ``[rows]``. Without it,
rows are decoded plainly."""
PROMPT_KEYS = "spec_rl_prompt_keys"
"""Column of a batch for generation: the key of each row's prompt, a list of bytes."""

SPARSE_REFITS = ("vllm_s3_sparse", "vllm_zmq_sparse")
"""Refits that reach an engine through a server in a thread of the worker, and none of its methods
(NeMo-RL's models/generation/vllm/vllm_sparse_refit.py)."""

_current: RunContext | None = None


@dataclass(frozen=True)
class RunContext:
    """A run that reuses rollouts.

    Args:
        spec_rl: the ``spec_rl:`` block.
        seed: of the algorithm.
        name: of the run's folder on each node, different for each checkpoint folder.
        label: of the run in Prometheus, the name of its checkpoint folder.
        log_folder: NeMo-RL's ``logger.log_dir``.
        checkpoint: folder of the checkpoint from which the run resumes, or None.
        tokenizer_id: the tokenizer's identity in the cache.
    """

    spec_rl: SpecRLConfig
    seed: int
    name: str
    label: str
    log_folder: Path
    checkpoint: Path | None
    tokenizer_id: str

    @property
    def store_folder(self) -> Path:
        """Folder of the rollout store on each node."""
        assert self.spec_rl.cache.dir is not None
        return self.spec_rl.cache.dir / self.name

    @property
    def needs_records(self) -> bool:
        """Whether the driver needs a record of each rollout from the workers."""
        return self.spec_rl.monitor.enabled or self.spec_rl.clip_anchor == "birth"

    @classmethod
    def of(cls, master_config: Any, algorithm: str) -> RunContext | None:
        """Read the run from a recipe; None where ``spec_rl`` is absent or not enabled.

        Args:
            master_config: NeMo-RL's MasterConfig.
            algorithm: ``grpo`` or ``ppo``, the name of the algorithm's block.

        Raises:
            ConfigError: the recipe asks for something that the plug-in cannot do.
        """
        generation = master_config.policy["generation"]
        block = (generation or {}).get("spec_rl")
        if block is None:
            return None
        spec_rl = validated(SpecRLConfig, _plain(block), BLOCK)
        if not spec_rl.enabled:
            return None
        own = getattr(master_config, algorithm)
        checkpointing = master_config.checkpointing
        _refuse(master_config, spec_rl, algorithm)
        drafting_method(spec_rl)  # or a refusal, which would come from the workers minutes later
        folder = Path(checkpointing["checkpoint_dir"]).absolute()
        return cls(
            spec_rl=spec_rl,
            seed=int(get_option(own, "seed", 0) or 0),
            name=hashlib.sha256(str(folder).encode()).hexdigest()[:16],
            label=folder.name,
            log_folder=Path(master_config.logger["log_dir"]),
            checkpoint=next(reversed(step_folders(folder)), None)
            if checkpointing["enabled"]
            else None,
            tokenizer_id=str(master_config.policy["tokenizer"]["name"]),
        )


def engine_arguments(arguments: dict[str, Any], block: Any) -> dict[str, Any]:
    """Add what lossless drafting needs to the arguments of a vLLM engine.

    NeMo-RL's own ``vllm_kwargs.speculative_config`` stays empty: where it is set, NeMo-RL shortens
    responses near the model's limit, for drafters that read beyond it (vllm_worker.py,
    ``_spec_decode_max_tokens``). This one does not.

    Args:
        arguments: as NeMo-RL has made them.
        block: the recipe's ``spec_rl:`` block.

    Raises:
        ConfigError: ``tree.method: auto`` where nothing is faster than stock vLLM.
        IncompatibleVersion: ``tree.method: proposer`` on a vLLM that takes none, or the package was
            not compiled.
    """
    options = engine_options(validated(SpecRLConfig, _plain(block), BLOCK))
    if options:
        options["additional_config"] |= arguments.get("additional_config") or {}
    return {**arguments, **options}


def current_run() -> RunContext | None:
    """The run that is being set up in this process, or None."""
    return _current


@contextmanager
def setting_up(run: RunContext | None) -> Iterator[None]:
    """Make ``run`` the current one while NeMo-RL's ``setup`` builds the objects of the run."""
    global _current
    _current = run
    try:
        yield
    finally:
        _current = None


def _refuse(master_config: Any, spec_rl: SpecRLConfig, algorithm: str) -> None:
    generation = master_config.policy["generation"]
    vllm_cfg, vllm_kwargs = generation.get("vllm_cfg") or {}, generation.get("vllm_kwargs") or {}
    off = f"or {BLOCK}.enabled=false"
    drafter = vllm_kwargs.get("speculative_config") or {}
    threshold = get_option(getattr(master_config, algorithm), "seq_logprob_error_threshold", None)
    masked = f"{algorithm}.seq_logprob_error_threshold takes them for errors and masks such rows"
    refused: list[tuple[bool, str]] = [
        (
            generation["backend"] != "vllm",
            f"policy.generation.backend = {generation['backend']!r}: must be vllm, {off}",
        ),
        *_refused_sampling(generation, spec_rl),
        *_refused_engines(generation, off),
        (
            spec_rl.run_ahead.enabled,
            f"{BLOCK}.run_ahead.enabled = True: NeMo-RL asks for one batch at a time and does not "
            "say which prompts come next; set it to false",
        ),
        (
            generation.get("quant_cfg") is not None,
            f"policy.generation.quant_cfg: its workers cannot reuse rollouts; leave it out, {off}",
        ),
        (
            _enabled(master_config, "on_policy_distillation"),
            "on_policy_distillation.enabled = true: has not been tried with reused or drafted "
            f"rollouts; set false, {off}",
        ),
        (
            bool(vllm_cfg.get("expose_http_server")),
            "policy.generation.vllm_cfg.expose_http_server = true: requests of NeMo-Gym do not pass"
            f" through the plug-in; set false, {off}",
        ),
        (
            # NeMo-RL's setup turns the one into the other, after this.
            bool(vllm_kwargs.get("enable_return_routed_experts"))
            or bool(get_option(master_config.policy.get("router_replay"), "enabled", False)),
            "policy.router_replay.enabled = true: the routes of a reused prefix are not recorded; "
            f"switch router replay (enable_return_routed_experts) off, {off}",
        ),
        (
            spec_rl.tree.enabled and bool(drafter) and drafter.get("num_speculative_tokens") != 0,
            "policy.generation.vllm_kwargs.speculative_config: an engine has one drafter, and "
            f"{BLOCK}.tree.enabled = true asks for another; leave it out, or take preset: faithful "
            "without trees",
        ),
        (
            spec_rl.cache.dir is None,
            f"{BLOCK}.cache.dir: must name a folder on each node's own disk, such as /raid/specrl",
        ),
        (
            threshold is not None and spec_rl.reported_logprobs == "behaviour",
            f"{BLOCK}.reported_logprobs = 'behaviour': reused rows report other log-probs than the "
            f"policy's, {masked}; set it to null, or reported_logprobs to policy",
        ),
        (
            spec_rl.clip_anchor == "birth"
            and bool(get_option(master_config.loss_fn, "force_on_policy_ratio", False)),
            f"{BLOCK}.clip_anchor = 'birth': with loss_fn.force_on_policy_ratio there is no ratio "
            "to anchor; set that to false, or the anchor to current",
        ),
        (
            spec_rl.clip_anchor == "birth" and _enabled(master_config, "data_plane"),
            f"{BLOCK}.clip_anchor = 'birth': does not reach the data plane yet; set "
            "data_plane.enabled=false, or the anchor to current",
        ),
        *_refused_refits(master_config, algorithm, off),
    ]
    for wrong, line in refused:
        if wrong:
            raise ConfigError(line)
    if spec_rl.tree.enabled:  # its index is native code, which may be missing here, as in workers
        importlib.import_module("nemo_specrl.speculation.suffix_tree")


def _refused_sampling(generation: Any, spec_rl: SpecRLConfig) -> list[tuple[bool, str]]:
    """Kinds of sampling and numbers that drafts cannot be verified under.

    A proposer's drafts are verified against the distribution that is sampled from, whatever its
    temperature and top-p; those of prefix reuse and of rounds by prompt log-probs.
    """
    reuse = spec_rl.effective_fresh_fraction < 1
    by_proposer = spec_rl.tree.enabled and spec_rl.tree.method != "rounds"
    by_prompt = reuse or not by_proposer
    judge = "prefix reuse" if reuse else "tree.method: rounds"
    why = f"{judge} verifies drafts by prompt log-probs, which are those of raw sampling"
    off = f"or {BLOCK}.enabled=false"
    way = f"or {BLOCK}.preset: lossless without rounds, {off}"
    vllm_cfg = generation.get("vllm_cfg") or {}
    precision, kv = str(vllm_cfg.get("precision")), str(vllm_cfg.get("kv_cache_dtype"))
    noise = "its noise in the log-probs by which drafts are verified has not been measured"
    return [
        (
            by_prompt and generation["temperature"] != 1,
            f"policy.generation.temperature = {generation['temperature']}: {why}; set 1.0, {way}",
        ),
        (
            by_prompt and generation["top_p"] != 1,
            f"policy.generation.top_p = {generation['top_p']}: {why}; set 1.0, {way}",
        ),
        (
            generation["top_k"] not in (None, -1, 0),
            f"policy.generation.top_k = {generation['top_k']}: {why}; set null, {way}"
            if by_prompt
            else f"policy.generation.top_k = {generation['top_k']}: vLLM fails with it in steps "
            f"that have no draft (seen on a CPU); set null, {off}",
        ),
        (
            bool(generation.get("bad_words")),
            f"policy.generation.bad_words: not tried with drafts; leave them out, {off}",
        ),
        (
            by_prompt and precision.startswith("fp8"),
            f"policy.generation.vllm_cfg.precision = {precision}: {noise}; set bfloat16, {way}",
        ),
        (
            by_prompt and kv.startswith("fp8"),
            f"policy.generation.vllm_cfg.kv_cache_dtype = {kv}: {noise}; set auto, {way}",
        ),
    ]


def _refused_engines(generation: Any, off: str) -> list[tuple[bool, str]]:
    """What makes of the engines something else than one engine of ours for each worker."""
    vllm_cfg, vllm_kwargs = generation.get("vllm_cfg") or {}, generation.get("vllm_kwargs") or {}
    experts = vllm_cfg.get("expert_parallel_size") or 1
    tensor = vllm_cfg.get("tensor_parallel_size") or 1
    engines = vllm_kwargs.get("data_parallel_size") or 1
    together = "the engines of such a group step together, and those of the plug-in do not"
    own = generation.get("worker_extension_cls_fqn")
    return [
        (
            experts > tensor,
            f"policy.generation.vllm_cfg.expert_parallel_size = {experts}: more than "
            f"tensor_parallel_size = {tensor} makes vLLM's data-parallel groups, and {together}; "
            f"set at most {tensor}, {off}",
        ),
        (
            engines > 1,
            f"policy.generation.vllm_kwargs.data_parallel_size = {engines}: {together}; leave it "
            f"out, {off}",
        ),
        (
            own is not None,
            f"policy.generation.worker_extension_cls_fqn = {own}: it would take the place of the "
            f"worker that drafts; leave it out, {off}",
        ),
    ]


def _enabled(master_config: Any, block: str) -> bool:
    """Whether an optional block of the recipe is there and switched on."""
    return bool(get_option(getattr(master_config, block, None), "enabled", False))


def _refused_refits(master_config: Any, algorithm: str, off: str) -> Iterator[tuple[bool, str]]:
    """Refits after which the policy version or the KV blocks would be those of the old weights."""
    generation = master_config.policy["generation"]
    name = f"{algorithm}.async_{algorithm}"
    asynchronous = get_option(getattr(master_config, algorithm), f"async_{algorithm}", None)
    yield (
        bool(get_option(asynchronous, "enabled", False))
        and bool(get_option(asynchronous, "in_flight_weight_updates", False)),
        f"{name}.in_flight_weight_updates = true: a row that is running at a refit would be made "
        f"by two policies, on KV blocks of the old one; set it to false, {off}",
    )
    transport = generation.get("refit_transport")
    yield (
        transport in SPARSE_REFITS,
        f"policy.generation.refit_transport = {transport!r}: its refits pass by the plug-in, which "
        f"would not know of new weights; set null, nccl_reshard or nixl, {off}",
    )
    yield (
        bool((generation.get("vllm_kwargs") or {}).get("kv_transfer_config")),
        "policy.generation.vllm_kwargs.kv_transfer_config: what a KV connector keeps of the old "
        f"weights would be read after a refit; leave it out, {off}",
    )


def _plain(block: Any) -> Any:
    """Copy OmegaConf's containers into plain dicts."""
    if isinstance(block, Mapping):
        return {str(name): _plain(value) for name, value in block.items()}
    return block


def get_option(block: Any, name: str, default: Any) -> Any:
    """Read a key of a block, which is a dict in some versions of NeMo-RL and a model in others."""
    if block is None:
        return default
    if isinstance(block, Mapping):
        return block.get(name, default)
    return getattr(block, name, default)
