"""The plug-in in the actor of NeMo-RL's single controller.

The driver builds engines, policy and data loader, and sends copies of them to an actor, which makes
logger, checkpoint manager and ``TimeoutChecker`` itself (algorithms/single_controller.py). What
:mod:`.steps` otherwise wraps on the driver is therefore wrapped in the actor's process, by a
subclass of the actor's class.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import ray

from nemo_specrl.monitoring import heartbeat
from nemo_specrl.nemo_rl import compat, job_state
from nemo_specrl.nemo_rl.save_deadline import bind_timeout_checker
from nemo_specrl.nemo_rl.steps import StepHooks

__all__ = ["ControllerStarter"]

PING_SECONDS = 10.0
"""How often the driver asks whether a step has ended, for heartbeats."""

Stock: Any = compat.lookup(*compat.CONTROLLER)  # also where its name is bound to the starter below


class SpecSingleControllerImpl(Stock.__ray_metadata__.modified_class):
    """The actor's methods, without Ray's decorator."""

    def __init__(self, *, actor_args: Any, **kwargs: Any) -> None:
        bind_timeout_checker()
        super().__init__(actor_args=actor_args, **kwargs)
        generation = actor_args.gen_handle
        run = getattr(generation, "run", None)
        if run is not None:
            # The event loop also starts rollouts and answers the driver.
            StepHooks(run, generation, in_thread=True).install(vars(self).values())


@ray.remote(num_cpus=1, num_gpus=0)
class SpecSingleController(SpecSingleControllerImpl):
    """The Ray actor."""


class ControllerStarter:
    """Stands in for ``SingleControllerActor`` in NeMo-RL's script."""

    def remote(self, **kwargs: Any) -> Any:
        """Start the actor, and return its handle."""
        actor = SpecSingleController.remote(**kwargs)
        threading.Thread(target=_send_heartbeats, args=(actor,), daemon=True).start()
        return actor

    def __getattr__(self, name: str) -> Any:
        return getattr(Stock, name)


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
