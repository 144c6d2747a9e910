"""The plug-in in the actor of NeMo-RL main's single controller.

The driver builds engines, policy and data loader, and sends copies of them to an actor, which makes
logger, checkpoint manager and ``TimeoutChecker`` itself (algorithms/single_controller.py). What
:mod:`.hooks` otherwise wraps on the driver is therefore wrapped in the actor's process here, by a
subclass of the actor's class. The cache stays with the driver, which opens and closes it; the actor
has a client of it, like the engines.

The actor's event loop also starts rollouts and answers the driver. Whatever waits for engines, the
cache or the data plane is done in threads, as NeMo-RL does for its own work.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from pathlib import Path
from typing import Any

import ray
from nemo_rl.algorithms.single_controller import SingleControllerActor

from nemo_specrl.config import CACHE_FOLDER
from nemo_specrl.monitoring import heartbeat
from nemo_specrl.nemo_rl import job_state
from nemo_specrl.nemo_rl.context import RunContext
from nemo_specrl.nemo_rl.hooks import Hooks, make_hooks
from nemo_specrl.nemo_rl.save_deadline import bind_timeout_checker

__all__ = ["ControllerStarter"]

COLUMNS = ("input_ids", "input_lengths", "token_mask", "generation_logprobs", "total_reward")
"""The columns that the plug-in reads of the batch in the data plane, in addition to
``prev_logprobs`` if the policy has computed them."""
PING_SECONDS = 10.0
"""How often the driver asks whether a step has ended, for heartbeats."""

Stock: Any = SingleControllerActor  # also where NeMo-RL's name is bound to the starter below


class SpecSingleControllerImpl(Stock.__ray_metadata__.modified_class):
    """The actor's methods, without Ray's decorator."""

    _spec_rl: Hooks | None = None

    def __init__(self, master_config: Any, actor_args: Any, setup_timing_metrics: Any) -> None:
        bind_timeout_checker()
        super().__init__(master_config, actor_args, setup_timing_metrics)
        run = _run_of(actor_args)
        if run is None:
            return
        self._counted = _Counted(actor_args.gen_handle)
        self._spec_rl = make_hooks(
            run,
            self._counted,
            loader_length=max(1, len(actor_args.dataloader)),
            total_steps=master_config.grpo.max_num_steps,
            rewards_in_batch=True,
        )
        self._looks_at_rows = run.needs_records
        self._spec_rl.install_logger(self._logger)
        self._save_cache_in(self._checkpointer)

    def _save_cache_in(self, checkpointer: Any) -> None:
        """Write the cache into each checkpoint as soon as it has a folder.

        NeMo-RL makes the folder in a thread, and calls the method that renames it on the event
        loop.
        """
        original, hooks = checkpointer.init_tmp_checkpoint, self._spec_rl
        assert hooks is not None

        @functools.wraps(original)
        def init_tmp_checkpoint(*args: Any, **kwargs: Any) -> Any:
            folder = original(*args, **kwargs)
            hooks.save(Path(folder).absolute() / CACHE_FOLDER)
            return folder

        checkpointer.init_tmp_checkpoint = init_tmp_checkpoint

    async def _advantage_stage(self, meta: Any) -> Any:
        """Compute advantages, and look at the rows, on which the policy is trained next."""
        meta, trainable = await super()._advantage_stage(meta)
        if self._spec_rl is not None and self._looks_at_rows:
            await asyncio.to_thread(self._look_at_rows, self._spec_rl, meta)
        return meta, trainable

    def _look_at_rows(self, hooks: Hooks, meta: Any) -> None:
        columns = [*COLUMNS, *(["prev_logprobs"] if self._policy_logprobs_required else [])]
        batch = self._trainer.read_from_dataplane(meta, select_fields=sorted(columns))
        batch["rewards"] = batch["total_reward"].flatten()
        anchored = hooks.take_part(batch)
        if anchored is not None:
            self._trainer.write_to_dataplane(meta, {"prev_logprobs": anchored})

    async def _sync_weights(self, **kwargs: Any) -> int:
        """Refit the engines, after all rows of a step, and ask for the step's metrics."""
        aborted: int = await super()._sync_weights(**kwargs)
        if self._spec_rl is not None:
            await asyncio.to_thread(self._spec_rl.end_batch)
            await asyncio.to_thread(self._counted.collect)
        return aborted


@ray.remote(num_cpus=1, num_gpus=0)
class SpecSingleController(SpecSingleControllerImpl):
    """The Ray actor."""


class ControllerStarter:
    """Stands in for ``SingleControllerActor`` in NeMo-RL's script."""

    def remote(self, master_config: Any, actor_args: Any, setup_timing_metrics: Any) -> Any:
        """Start the actor, and return its handle."""
        actor = SpecSingleController.remote(master_config, actor_args, setup_timing_metrics)
        if _run_of(actor_args) is not None:
            threading.Thread(target=_send_heartbeats, args=(actor,), daemon=True).start()
        return actor

    def __getattr__(self, name: str) -> Any:
        return getattr(Stock, name)


class _Counted:
    """A generation whose metrics are requested before they are logged."""

    def __init__(self, generation: Any) -> None:
        self._generation = generation
        self._taken: Any = None

    def collect(self) -> None:
        """Ask engines and cache, which may take seconds."""
        self._taken = self._generation.take_metrics()

    def take_metrics(self) -> Any:
        """Return what :meth:`collect` obtained."""
        return self._taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generation, name)


def _run_of(actor_args: Any) -> RunContext | None:
    """The run whose rollouts are reused, if reuse is on."""
    return getattr(actor_args.gen_handle, "run", None)


def _send_heartbeats(actor: Any) -> None:
    """Tell this process's monitor, and a batch script, about each step that the actor has ended.

    ``ft_launcher`` watches the driver, which it started, and not the actor.
    """
    steps = None
    while ray.is_initialized():
        try:
            now = ray.get(actor.ping.remote(), timeout=PING_SECONDS)["train_steps"]
        except ray.exceptions.GetTimeoutError:  # as while it starts
            continue
        except ray.exceptions.ActorUnavailableError:  # the connection was lost, and will return
            time.sleep(PING_SECONDS)
            continue
        except Exception:  # it has ended, or Ray has
            return
        if now != steps:
            steps = now
            heartbeat.heartbeat()
            job_state.heartbeat()
        time.sleep(PING_SECONDS)
