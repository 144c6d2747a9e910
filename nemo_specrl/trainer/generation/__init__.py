"""The engine that makes rollouts for the embedded trainer, in the trainer's process.

Modules, each of which imports only from those below it::

    engine       the engine: rollouts, held-out responses, refits, the cache of a run
    rows         the loop that drives it
"""

from nemo_specrl.trainer.generation.engine import Engine
from nemo_specrl.trainer.generation.rows import Response

__all__ = ["Engine", "Response"]
