"""The policy in training: its interface, its backends, and the choice between them.

:class:`Policy` and :class:`ValueModel` are what the training loop uses, :func:`build_policy` and
:func:`build_value_model` choose a backend by the recipe. A backend is a module of its own and is
imported when a recipe asks for it.
"""

from nemo_specrl.trainer.policy.base import Policy, Sample, ValueModel
from nemo_specrl.trainer.policy.factory import build_policy, build_value_model

__all__ = ["Policy", "Sample", "ValueModel", "build_policy", "build_value_model"]
