"""Refits of an engine in the caller's process: new weights, streamed tensor by tensor.

Host frameworks have their own refits (NeMo-RL's go through collectives and CUDA IPC); this one is
for the embedded trainer and for engines that are used on their own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from nemo_specrl.errors import ConfigError, IncompatibleVersion, RefitError

if TYPE_CHECKING:
    import torch
    from vllm import LLM

__all__ = ["RefitExtension", "refit"]


class RefitExtension:
    """Mixin of vLLM's worker (``worker_extension_cls``) that loads new weights while it runs.

    ``model.load_weights``, which GPU engines use, fails halfway on a CPU, where the packed GEMM has
    freed the parameters (model_executor/layers/utils.py). ``reload_weights`` packs them again, but
    silently leaves a tied output layer with its old packed copy
    (model_executor/layers/vocab_parallel_embedding.py).
    """

    def specrl_refit(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load ``weights``, named as in the checkpoint; tied output weights may be left out.

        Raises:
            IncompatibleVersion: the tied output layer of a CPU engine kept its old weights.
        """
        runner: Any = self.model_runner  # type: ignore[attr-defined]  # vLLM's worker has it
        runner.reload_weights(weights_iterator=iter(weights))
        if runner.device.type != "cpu":
            return
        model = runner.model
        head, body = getattr(model, "lm_head", None), getattr(model, "model", None)
        embedding = getattr(body, "embed_tokens", None)
        if head is None or embedding is None or not model.config.tie_word_embeddings:
            return
        head.weight = embedding.weight
        head.quant_method.process_weights_after_loading(head)
        _check_tied(head, embedding)


def _check_tied(head: Any, embedding: Any) -> None:
    """Raise unless the output layer computes with the weights of the embedding.

    Only evenly spaced rows are compared: in float32 all of them would take much memory.
    """
    import torch

    every = slice(None, None, -(-embedding.weight.shape[0] // 4096))
    probe = torch.ones(1, embedding.weight.shape[1], dtype=embedding.weight.dtype)
    expected = probe.float() @ embedding.weight[every].float().t()
    actual = head.quant_method.apply(head, probe).float()[:, : len(embedding.weight) : every.step]
    if not torch.allclose(actual, expected, rtol=0.05, atol=0.05 * float(expected.abs().max())):
        raise IncompatibleVersion(
            "refit: the tied output layer kept its old weights; this vLLM packs it in a way that "
            "nemo_specrl.engine.refit does not know"
        )


def refit(llm: LLM, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load new weights into a running engine and drop the KV blocks of the old ones.

    For engines in the caller's process, built with
    ``worker_extension_cls="nemo_specrl.engine.refit.RefitExtension"``. Host frameworks with
    their own refit do not need it.

    Args:
        llm: the engine.
        weights: name, as in the checkpoint, and tensor of each parameter. They are streamed.

    Raises:
        ConfigError: requests are still running, whose KV blocks are those of the old weights. The
            engine keeps the old weights.
        RefitError: an earlier refit of this engine was interrupted.
        Exception: whatever ``weights`` raised. vLLM can neither undo a refit that has begun nor
            begin another, so the engine accepts no request from then on.
    """
    engine: Any = llm.llm_engine
    if engine.has_unfinished_requests():
        raise ConfigError("refit: requests are still running; wait for them, or abort them")
    _refuse_if_incomplete(engine)
    engine.add_request = functools.partial(_refuse_if_incomplete, engine)
    llm.collective_rpc("specrl_refit", args=(iter(weights),))
    del engine.add_request
    if not llm.reset_prefix_cache():
        raise RefitError("refit: vLLM keeps KV blocks of the old weights; build a new engine")
    if engine.vllm_config.model_config.is_multimodal_model:
        engine.reset_encoder_cache()


def _refuse_if_incomplete(engine: Any, *args: Any, **kwargs: Any) -> None:
    """Raise RefitError if a refit has begun and not ended; replaces ``add_request`` until then."""
    if "add_request" in vars(engine):
        raise RefitError(
            "the engine's last refit broke off, so that its weights are incomplete; build a new "
            "engine, or resume the run from its last checkpoint"
        )
