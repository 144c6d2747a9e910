"""One engine in the trainer's process, with a rollout cache that no other process uses."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from nemo_specrl.cache.metrics import StoreStats
from nemo_specrl.cache.run_folders import prepare, restore_checkpoint
from nemo_specrl.engine.weight_fingerprint import FingerprintedWeights
from nemo_specrl.errors import CacheError
from nemo_specrl.trainer.generation.engine import Engine, cache_folder, tokenizer_identity
from nemo_specrl.trainer.recipe import Recipe
from nemo_specrl.trainer.replay_journal import JournaledStore

if TYPE_CHECKING:
    import torch

__all__ = ["InProcessEngine"]

logger = logging.getLogger(__name__)


class InProcessEngine(Engine):
    """One engine in the trainer's process, with a cache of its own.

    Args:
        recipe: the whole recipe.
        store: the rollout cache, or None with speculation switched off.

    Raises:
        ConfigError: vLLM refuses the model or an argument.
    """

    def __init__(self, recipe: Recipe, store: JournaledStore | None) -> None:
        super().__init__(recipe, store)
        self.store = store
        self._saved = False  # whether the last checkpoint that was begun has the cache

    @classmethod
    def open(
        cls, recipe: Recipe, fixed: dict[str, Any], resume_from: Path | None
    ) -> InProcessEngine:
        """Build the engine, and restore the cache from the checkpoint; see build_generation."""
        with contextlib.ExitStack() as on_failure:
            store = _open_store(recipe, fixed, resume_from) if recipe.spec_rl.enabled else None
            if store is not None:
                on_failure.callback(store.close)
            built = cls(recipe, store)
            on_failure.pop_all()
            return built

    def fingerprint_initial_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Set the fingerprint of the initial weights, which the engine has loaded from the model.

        Args:
            weights: :meth:`Policy.stream_weights`, in the engine's data type.
        """
        stream = FingerprintedWeights(weights)
        for _ in stream:
            pass
        self.speculative.fingerprint = stream.fingerprint

    def set_fresh_fraction(self, fresh_fraction: float) -> None:
        """Set the share of rows that are decoded without a draft from the next batch on."""
        self.speculative.fresh_fraction = fresh_fraction

    def save(self, folder: Path) -> None:
        """Write the cache into a checkpoint. Call it between two steps.

        A run that resumes from a checkpoint without the cache starts cold, which costs only speed.
        """
        self._saved = False
        if self.store is None:
            return
        try:
            self.store.snapshot(folder, self.policy_version)
            self._saved = True
        except CacheError as error:
            logger.warning("rollout cache: %s; the checkpoint is without it", error)

    def on_checkpoint_complete(self) -> None:
        """Shorten the journal, once a checkpoint with what :meth:`save` wrote is complete.

        If it could not write the cache, the journal is left unchanged until the next checkpoint.
        """
        if self.store is None or not self._saved:
            return
        try:
            self.store.forget()
        except CacheError as error:  # what is left there belongs to steps that are not repeated
            logger.warning("rollout journal: %s", error)

    def stores(self) -> list[StoreStats]:
        """Return the statistics of the cache's store; empty if there is no cache.

        Raises:
            CacheError: they cannot be read.
        """
        return [] if self.store is None else [self.store.stats()]

    def shutdown(self) -> None:
        """Close the cache; what can no longer be committed is logged."""
        if self.store is not None:
            try:
                self.store.close()
            except CacheError as error:  # at worst, drafts are lost
                logger.warning("closing the rollout cache: %s", error)


def _open_store(recipe: Recipe, fixed: dict[str, Any], resume_from: Path | None) -> JournaledStore:
    """Open the cache of one engine, as the checkpoint has it.

    The journal is kept. It has the rollouts of the steps after the checkpoint, which will be
    repeated.
    """
    block, folder = recipe.spec_rl.cache, cache_folder(recipe)
    tokenizer_id = tokenizer_identity(recipe.policy.model_name)
    prepare(folder, tokenizer_id, block.max_bytes_per_node, fresh=resume_from is None)
    store = JournaledStore(
        folder,
        recipe.run_dir / "rollout_journal",
        run=xxhash.xxh3_64_hexdigest(json.dumps(fixed, sort_keys=True).encode()),
        max_bytes=block.max_bytes_per_node,
        tokenizer_id=tokenizer_id,
        groups_per_prompt=block.groups_per_prompt,
    )
    if resume_from is not None:
        restore_checkpoint(store.restore, resume_from, "it starts cold")
    return store
