"""The part of this package that vLLM runs as a plug-in in each of its processes."""

from __future__ import annotations

import logging

from nemo_specrl.engine.vllm import v2_patches
from nemo_specrl.engine.vllm.cpu_sampler import fix_cpu_rejection_sampler, keep_cpu_seeds
from nemo_specrl.engine.vllm.environment import Engines, would_run_v2
from nemo_specrl.engine.vllm.patches import batch_cpu_prompt_logprobs, pad_cpu_linear_layers
from nemo_specrl.errors import IncompatibleVersion

__all__ = ["vllm_plugin"]

logger = logging.getLogger(__name__)


def vllm_plugin() -> None:
    """Entry point ``vllm.general_plugins`` (pyproject.toml).

    If vLLM would run its V2 model runner, this makes it able to draft from history; engines that
    were not built for that are not changed. An engine that asks for it when that is not possible
    has already been refused by ``engine_options``, in the process that built it.

    On a CPU, the rejection sampler is fixed, seeds are respected, and engines are made faster.
    Whatever of this is not possible is reported in one warning: without the first patch samples
    would be wrong, so ``check_other_processes`` refuses such a vLLM.
    """
    engines = Engines.here()
    if engines.in_this_process and would_run_v2(engines):
        try:
            v2_patches.install()
        except IncompatibleVersion as error:
            logger.debug("drafting in the V2 model runner is not possible: %s", error)
    if not engines.cpu:
        return
    failures = []
    of_a_cpu = (
        fix_cpu_rejection_sampler,
        keep_cpu_seeds,
        pad_cpu_linear_layers,
        batch_cpu_prompt_logprobs,
    )
    for patch in of_a_cpu:
        try:
            patch()
        except IncompatibleVersion as error:
            failures.append(str(error))
    if failures:
        logger.warning("nemo_specrl leaves parts of vLLM as they are: %s", "; ".join(failures))
