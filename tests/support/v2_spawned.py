"""Sets up vLLM's V2 model runner in the processes that an engine on a CPU spawns.

A ``sitecustomize.py`` imports it when Python starts, before anything could import vLLM: that of
``v2_path``, which ``v2_cpu`` puts on the PYTHONPATH, or that of NeMo-RL's jobs.
"""

import os
import sys

if os.environ.get("NEMO_SPECRL_TEST_V2") and "--multiprocessing-fork" in sys.orig_argv:
    from tests.support import v2_cpu

    if v2_cpu.READY:
        # The kernels of drafting would take minutes; test_kernels has their like equal to them.
        from nemo_specrl.drafting import device_arrays
        from tests.support import v2_numpy

        device_arrays.kernels = v2_numpy
