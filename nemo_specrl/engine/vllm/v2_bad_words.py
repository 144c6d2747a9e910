"""Multi-token bad words with drafts: a patch for a defect of vLLM's V2 model runner.

To decide whether a token would complete a bad word, the sampler compares the tokens before it, the
last of which may be drafts. In 0.25.1 and 0.26.0 it reads each of those one place too early: the
first of the step's input tokens is not a draft but the last known token. A bad word whose beginning
was drafted was therefore missed, and other tokens could be mistaken for it. 0.29.0 reads the right
ones (v1/worker/gpu/sample/bad_words.py, ``_bad_words_kernel``).
"""

from __future__ import annotations

import inspect
from typing import Any

import xxhash

from nemo_specrl.engine.vllm.patches import wrap_functions

__all__ = ["patch_bad_words"]

DEFECTIVE = {"6b0e8fff8d3853c7": "0.25.1, 0.26.0"}
"""XXH3 of the source of vLLM's module, and the versions that have it."""
INPUT_IDS = 8
"""Position of the step's input tokens among the arguments of ``apply_bad_words``."""


def patch_bad_words() -> None:
    """Make the sampler read drafts at their right places. Does nothing with other versions."""
    from vllm.v1.worker.gpu.sample import bad_words

    source = xxhash.xxh3_64_hexdigest(inspect.getsource(bad_words).encode())
    if source not in DEFECTIVE:
        return

    def apply_bad_words(original: Any, *args: Any) -> None:
        # What it reads one place too early is then the right one. It never reads the last one.
        shifted = args[INPUT_IDS].roll(-1)
        original(*args[:INPUT_IDS], shifted, *args[INPUT_IDS + 1 :])

    wrap_functions([(bad_words, "apply_bad_words", apply_bad_words)])
