"""The policy in training: its interface, its backends, and the choice between them.

The training loop uses :class:`Policy`. :func:`build_policy` chooses the backend that the recipe
requests; each backend is a package that is imported only then. PPO's value model is torch's with
both. Modules, each of which imports only from those below it::

    factory      the choice of a backend
    megatron/    Megatron-Core with tensor and pipeline parallelism, its ranks Ray actors
    torch/       plain torch and transformers in this process
    steps        the order of optimizer steps, the same in both
    base         the interface
"""

from nemo_specrl.trainer.policy.base import Policy, Sample
from nemo_specrl.trainer.policy.factory import build_policy, build_value_model

__all__ = ["Policy", "Sample", "build_policy", "build_value_model"]
