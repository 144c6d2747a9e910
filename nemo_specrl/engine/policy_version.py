"""Which weights an engine has: their policy version, their fingerprint, and the LoRA adapter.

vLLM's prefix cache identifies KV blocks by their tokens only, so new weights would read what old
ones have prefilled. A new policy version therefore begins with an empty prefix cache, or not at
all: the blocks are dropped when the version is set, and a reset that vLLM refuses is an error. This
also covers requests that do not pass through this package, such as those of a validation, which a
salt (``cache_salt``) of this package's own requests would not reach. If rows keep their old KV
blocks on purpose, at a refit in flight of an asynchronous engine (``in_flight``), only the salt
protects them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_specrl.errors import ConfigError

__all__ = [
    "RUNNING",
    "EngineWeights",
    "TokenVersions",
    "note_refit",
    "one_adapter",
    "refuse_kv_connector",
    "reset_caches",
    "reset_prefix_cache",
]

RUNNING = (
    "requests are still running, whose KV blocks are those of the old weights; let them end or "
    "abort them before the weights change"
)
_REFITS = "_nemo_specrl_refits"


def reset_prefix_cache(llm: Any) -> None:
    """Drop the KV blocks of a synchronous engine, and what its encoder computed from images.

    Raises:
        ConfigError: requests are running, in which case vLLM keeps all blocks.
    """
    if not llm.reset_prefix_cache():
        raise ConfigError(f"the prefix cache was not reset: {RUNNING}")
    if llm.llm_engine.vllm_config.model_config.is_multimodal_model:
        llm.llm_engine.reset_encoder_cache()


async def reset_caches(llm: Any, *, recompute_kv: bool = False) -> bool:
    """Drop the KV blocks of an asynchronous engine, and what its encoder computed from images.

    Args:
        llm: an ``AsyncLLM``, which takes no step in the meantime.
        recompute_kv: drop the KV blocks of running requests, too, and have them recomputed.

    Returns:
        Whether vLLM dropped the KV blocks. Without ``recompute_kv`` it does not do so while
        requests are running.
    """
    reset = bool(await llm.reset_prefix_cache(reset_running_requests=recompute_kv))
    if llm.vllm_config.model_config.is_multimodal_model:
        await llm.reset_encoder_cache()
    return reset


def refuse_kv_connector(vllm_config: Any) -> None:
    """Refuse an engine that also keeps KV blocks elsewhere.

    Raises:
        ConfigError: it has a KV connector; few of these can drop their blocks.
    """
    if getattr(vllm_config, "kv_transfer_config", None) is not None:
        raise ConfigError(
            "kv_transfer_config: what a KV connector keeps of the old weights would be read after "
            "a refit; build the engine without one"
        )


def note_refit(engine: Any) -> None:
    """Note that :func:`nemo_specrl.engine.vllm.refit.refit` has changed an engine's weights."""
    setattr(engine, _REFITS, _refits(engine) + 1)


def _refits(engine: Any) -> int:
    return int(getattr(engine, _REFITS, 0))


class EngineWeights:
    """The weights of a running engine, as far as its user has specified them.

    Args:
        engine: ``LLMEngine`` or ``AsyncLLM``.
        policy_version: policy version of the weights that it has now.
    """

    def __init__(self, engine: Any, policy_version: int = 0) -> None:
        self._engine = engine
        self.begin(policy_version)

    def begin(self, policy_version: int, fingerprint: int = 0) -> None:
        """Note the weights that the engine has from now on. Its prefix cache must be empty.

        The old fingerprint is dropped with the old weights, and so is the old adapter.
        """
        self.policy_version = policy_version
        self._fingerprint = fingerprint
        self._adapter: tuple[Any, ...] | None = None
        self._refits = _refits(self._engine)

    @property
    def fingerprint(self) -> int:
        """Fingerprint of these weights; 0 if not known."""
        return self._fingerprint

    @fingerprint.setter
    def fingerprint(self, fingerprint: int) -> None:
        if self._fingerprint not in (0, fingerprint):
            raise ConfigError(
                f"fingerprint = {fingerprint:x}: policy version {self.policy_version} has weights "
                f"of fingerprint {self._fingerprint:x}; raise policy_version with every refit, "
                "then set the fingerprint"
            )
        self._fingerprint = fingerprint

    def check(self, adapter: Any) -> None:
        """Check that rollouts are made by the weights that the policy version stands for.

        An adapter is part of the weights: the first call of a policy version determines it.

        Args:
            adapter: vLLM's ``LoRARequest``, or None.

        Raises:
            ConfigError: the engine was refitted, or made rollouts with another adapter, since the
                policy version was set.
        """
        if self._refits != _refits(self._engine):
            raise ConfigError(
                f"policy_version = {self.policy_version}: the engine was refitted since it was "
                "set; raise it after every refit"
            )
        identity, reloads = _identity(adapter), getattr(adapter, "load_inplace", False)
        if self._adapter is not None and (reloads or self._adapter != identity):
            raise ConfigError(
                f"lora_request = {_name(identity)}: policy version {self.policy_version} has "
                f"generated with {_name(self._adapter)}; raise policy_version when the adapter "
                "changes or is loaded again"
            )
        self._adapter = identity


class TokenVersions:
    """Which weights made which tokens of a response.

    Only an asynchronous engine notes this; elsewhere the engine's present weights make a response.
    """

    def __init__(self) -> None:
        self._runs: list[tuple[int, int]] = []

    def begin(self, start: int, policy_version: int) -> None:
        """Note that tokens from position ``start`` on are made by other weights."""
        while self._runs and self._runs[-1][0] >= start:
            self._runs.pop()
        self._runs.append((start, policy_version))

    @property
    def single(self) -> bool:
        """Whether everything noted is of one policy version."""
        return len({version for _, version in self._runs}) <= 1

    def of(self, tokens: int, policy_version: int) -> npt.NDArray[np.int64]:
        """The policy version of each token, int64 ``[tokens]``.

        Args:
            tokens: number of tokens of the response.
            policy_version: policy version of all of them if nothing was noted.
        """
        versions = np.full(tokens, policy_version, dtype=np.int64)
        for start, version in self._runs:
            versions[start:] = version
        return versions

    def at_end(self, tokens: int, policy_version: int) -> int:
        """The policy version of the last of that many tokens, or of the request if it made none.

        Args:
            tokens: number of tokens of the response.
            policy_version: returned if nothing was noted.
        """
        made = [version for start, version in self._runs if start < max(tokens, 1)]
        return made[-1] if made else policy_version


def one_adapter(lora_request: Any, prompts: int) -> Any:
    """Return the adapter that all prompts of a call share, or None.

    Args:
        lora_request: as ``vllm.LLM.generate`` takes it: one for all, one for each prompt, or None.
        prompts: number of prompts.

    Raises:
        ConfigError: the adapters differ, or there is not one for each prompt.
    """
    if not isinstance(lora_request, Sequence):
        return lora_request
    if len(lora_request) != prompts:
        raise ConfigError(f"lora_request: {len(lora_request)} of them for {prompts} prompts")
    adapters = list(dict.fromkeys(map(_identity, lora_request)))
    if len(adapters) > 1:
        raise ConfigError(
            f"lora_request: {' and '.join(map(_name, adapters))} in one call, whose rollouts must "
            "all be of one policy; make a call for each adapter, and raise policy_version before it"
        )
    return lora_request[0] if lora_request else None


def _identity(adapter: Any) -> tuple[Any, ...]:
    """What distinguishes adapters; empty for the weights without one."""
    if adapter is None:
        return ()
    return adapter.lora_name, adapter.lora_int_id, adapter.lora_path


def _name(identity: tuple[Any, ...]) -> str:
    return f"{identity[0]!r} ({identity[2]})" if identity else "no adapter"
