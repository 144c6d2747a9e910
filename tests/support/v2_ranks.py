"""One of two tensor-parallel ranks, in a process of its own, of which the second has less memory.

Prints how many pages, prompts and listed pages its index may have::

    python -m tests.support.v2_ranks RANK FILE
"""

import math
import os
import subprocess
import sys

from tests.support import v2_cpu  # before vllm

assert v2_cpu
RANKS, MAX_BYTES, ALLOWED = 2, 1 << 20, 100_000
"""Ranks, bytes that each asks for, and tokens that the second one has memory for at once."""


def sizes_of_ranks(folder):
    """What each rank has printed. The ranks find each other by a file in the folder."""
    command = [sys.executable, "-m", "tests.support.v2_ranks"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(folder / "ranks")], stdout=subprocess.PIPE, text=True
        )
        for rank in range(RANKS)
    ]
    try:
        printed = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * RANKS, printed
    return [list(map(int, text.split("sizes")[1].split())) for text in printed]


def main(rank, file):
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    from nemo_specrl.drafting.chances import CHANCES
    from nemo_specrl.drafting.device_index import DeviceIndex
    from nemo_specrl.engine.speculator import least_of_ranks

    os.environ["VLLM_DIST_IDENT"] = "ranks"  # as vLLM's executor sets it
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(RANKS, rank, f"file://{file}", rank, "gloo")
        parallel_state.initialize_model_parallel(RANKS)
    if rank:  # no CPU runs out of memory as a GPU does
        empty = torch.empty

        def limited(*sizes, **options):
            if math.prod(sizes) > ALLOWED:
                raise torch.OutOfMemoryError
            return empty(*sizes, **options)

        torch.empty = limited
    index = DeviceIndex("cpu", 8, 640, 40, MAX_BYTES, 3, CHANCES, agree=least_of_ranks)
    print("sizes", len(index.pool), len(index.links), *index.table.shape)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
