"""Lets test jobs import an unmodified NeMo-RL with other versions of Python and transformers.

NeMo-RL needs Python 3.13 and transformers below 5.12. ``nemo_rl.models.policy`` asserts the latter,
so transformers reports 5.11 while that module is imported. Before Python 3.12, pydantic accepts
only the TypedDict of typing_extensions. This folder is on the PYTHONPATH of the jobs.
"""

import importlib.abc
import importlib.machinery
import sys

if sys.version_info < (3, 12):
    import typing

    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict


class _Loader(importlib.abc.Loader):
    def __init__(self, inner):
        self.inner = inner

    def create_module(self, spec):
        return self.inner.create_module(spec)

    def exec_module(self, module):
        import transformers

        version, transformers.__version__ = transformers.__version__, "5.11.99"
        try:
            self.inner.exec_module(module)
        finally:
            transformers.__version__ = version


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "nemo_rl.models.policy":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
