"""The engines that make rollouts for the embedded trainer.

Modules, each of which imports only from those below it::

    factory        builds what a recipe asks for
    in_process     one engine in the trainer's process
    ray_engines    several engines, each a Ray actor
    engine         an engine with a rollout cache: rollouts, held-out responses, refits
"""

from nemo_specrl.trainer.generation.factory import build_generation
from nemo_specrl.trainer.generation.in_process import InProcessEngine

__all__ = ["InProcessEngine", "build_generation"]
