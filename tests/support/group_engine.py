"""One engine of a data-parallel group of two, in its own process, and the calls made to it.

``run_group`` starts the two, as NeMo-RL does with the workers of a group: each has an ``LLM`` in
its process and finds the other one by ``VLLM_DP_MASTER_IP`` and ``VLLM_DP_MASTER_PORT``. What
engine 1 is asked is never what engine 0 is.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

LONG, SHORT = 24, 6
RANKS = 2
SECONDS = 540
"""Time limit for both processes. One that waits for the other in a collective would wait 30
minutes."""


def run_group(model, folder, method, module=__spec__.name, **variables):
    """Run the two engines, and return what they noted, by rank.

    Args:
        model: folder of a mixture of experts.
        folder: folder for what they note and print.
        method: one of ``METHODS``.
        module: what the processes run.
        variables: variables of their environment.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    try:
        for rank in range(RANKS):
            group = variables | {
                "VLLM_DP_SIZE": RANKS,
                "VLLM_DP_RANK": rank,
                "VLLM_DP_RANK_LOCAL": 0,
                "VLLM_DP_MASTER_IP": "127.0.0.1",
                "VLLM_DP_MASTER_PORT": port,
            }
            command = [sys.executable, "-m", module, str(model), str(folder), method]
            with (folder / f"printed-{rank}").open("w") as printed:
                started.append(
                    subprocess.Popen(
                        command,
                        env=os.environ | {name: str(value) for name, value in group.items()},
                        stdout=printed,
                        stderr=subprocess.STDOUT,
                    )
                )
        codes = [process.wait(SECONDS) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    printed = [(folder / f"printed-{rank}").read_text() for rank in range(RANKS)]
    assert codes == [0, 0], "\n".join(printed)
    noted = [pickle.loads((folder / f"noted-{rank}").read_bytes()) for rank in range(RANKS)]
    return [{name: Noted(**values) for name, values in one.items()} for one in noted]


def give_collectives():
    """Give vLLM's communicator for CPUs the two collectives by which experts get their tokens."""
    import torch
    import torch.distributed as dist
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def gathered(self, one, sizes):
        longest = torch.zeros(max(sizes), *one.shape[1:], dtype=one.dtype)
        longest[: len(one)] = one
        found = [torch.empty_like(longest) for _ in sizes]
        dist.all_gather(found, longest, group=self.cpu_group)
        return torch.cat([part[:size] for part, size in zip(found, sizes, strict=True)])

    def all_gatherv(self, input_, dim=0, sizes=None):
        several = isinstance(input_, list)
        tensors = input_ if several else [input_]
        sizes = sizes or [len(tensors[0])] * self.world_size
        made = [gathered(self, one.contiguous(), sizes) for one in tensors]
        return made if several else made[0]

    def reduce_scatterv(self, input_, dim=-1, sizes=None):
        total = input_.contiguous()
        dist.all_reduce(total, group=self.cpu_group)
        sizes = sizes or [len(total) // self.world_size] * self.world_size
        begin = sum(sizes[: self.rank_in_group])
        return total[begin : begin + sizes[self.rank_in_group]].clone()

    CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = all_gatherv, reduce_scatterv


@dataclasses.dataclass
class Noted:
    """The outcome of a call to an engine."""

    asked: int = 0
    """How often it asked whether there is more to do."""
    rows: list = dataclasses.field(default_factory=list)
    """Prompt, tokens and log-probs of each row."""
    metrics: dict = dataclasses.field(default_factory=dict)
    error: str = ""


class Asked:
    """Calls to an engine, and what it noted about each."""

    def __init__(self, llm):
        self.llm, self.noted = llm, {}
        self._count, ask = 0, llm.llm_engine.has_unfinished_requests

        def has_unfinished_requests():
            self._count += 1
            return ask()

        llm.llm_engine.has_unfinished_requests = has_unfinished_requests

    def note(self, name, call, made=None):
        """Make a call, and note its outcome."""
        self._count = 0
        noted = self.noted[name] = Noted()
        try:
            for output in call():
                row = output.outputs[0]
                given = [
                    entry[token].logprob
                    for token, entry in zip(row.token_ids, row.logprobs, strict=True)
                ]
                noted.rows.append((list(output.prompt_token_ids), list(row.token_ids), given))
        except Exception as error:
            noted.error = f"{type(error).__name__}: {error}"
        noted.asked = self._count
        if made is not None:
            noted.metrics = made.metrics.as_dict() | {"errors": made.metrics.cache_errors}


def prompts_and_params(rank, seed, rows=2):
    """Rows of the first engine are many and long, those of the second one few and short."""
    from tests.support.engines import PROMPT, sampling

    rows, length = (rows, LONG) if rank == 0 else (1, SHORT)
    params = [
        sampling(length + i, seed=1000 * seed + 10 * rank + i, ignore_eos=True) for i in range(rows)
    ]
    return [{"prompt_token_ids": [*PROMPT, 5 + i % 2]} for i in range(rows)], params


class Answers:
    """Answers each turn by one token."""

    def __init__(self, max_turns):
        self.max_turns = max_turns

    def observe(self, turn):
        return [7]


def reuse(llm, rank):
    """Prefix reuse, and everything that happens along with it."""
    from nemo_specrl import SpecRLConfig, SpeculativeLLM
    from nemo_specrl.engine.early_end import EarlyEnd
    from tests.conftest import DictCache
    from tests.support.engines import PROMPT, sampling

    asked = Asked(llm)
    made = SpeculativeLLM(
        llm, DictCache(), SpecRLConfig(enabled=True, preset="faithful", fresh_fraction=0.0)
    )

    def call(name, made, rows, params, **options):
        asked.note(name, lambda: made.generate(rows, params, use_tqdm=False, **options), made)

    call("first", made, *prompts_and_params(rank, 0))
    made.policy_version = 1
    call("second", made, *prompts_and_params(rank, 1))
    made.policy_version = 2
    call("no rows", made, *(prompts_and_params(0, 2) if rank == 0 else ([], None)))
    rows, params = prompts_and_params(rank, 3)
    asked.note("plain", lambda: llm.generate(rows, params, use_tqdm=False))
    # As an engine in bfloat16 does with its first rows; engine 1 has none to measure.
    noisy = SpeculativeLLM(llm, DictCache(), SpecRLConfig(enabled=True, preset="faithful"))
    noisy._noise.rows_left = 1
    call("noise", noisy, *(prompts_and_params(0, 4) if rank == 0 else ([], None)))
    tree = {"method": "rounds", "max_draft_tokens": 6, "adaptive": False}
    rounds = SpeculativeLLM(
        llm, DictCache(), SpecRLConfig(enabled=True, preset="lossless", tree=tree)
    )
    call("rounds, first", rounds, *prompts_and_params(rank, 5))
    call("rounds, second", rounds, *prompts_and_params(rank, 6))
    # Engine 0 ends with its short row, and engine 1 has a long one.
    ending = SpeculativeLLM(llm, DictCache(), SpecRLConfig(enabled=True, preset="faithful"))
    params = [sampling(n, seed=n, ignore_eos=True) for n in ((SHORT, LONG), (LONG,))[rank]]
    rows = [{"prompt_token_ids": PROMPT}] * len(params)
    end = EarlyEnd(group_size=1, groups=1) if rank == 0 else None
    call("early end", ending, rows, params, early_end=end)
    plainly = SpeculativeLLM(llm, DictCache(), SpecRLConfig(enabled=False))
    turn = sampling(1, seed=rank, stop_token_ids=[*range(3, 32)], ignore_eos=True)
    call("turns", plainly, [{"prompt_token_ids": PROMPT}], turn, environment=Answers(4 - 2 * rank))
    rows, params = prompts_and_params(rank, 8)
    call("failed", made, rows if rank == 0 else [{"prompt_token_ids": []}], params)
    call("after it", made, rows, params)
    return asked.noted


def drafts(llm, rank):
    """Drafts inside the engine: trees that grow from call to call."""
    from nemo_specrl import SpeculativeLLM
    from tests.conftest import DictCache

    asked = Asked(llm)
    made = SpeculativeLLM(llm, DictCache(), config_of(os.environ["TEST_METHOD"]))
    for version in range(3):
        made.policy_version = version
        empty = version == 1 and rank == 1
        rows, params = ([], None) if empty else prompts_and_params(rank, version)
        asked.note(
            f"version {version}",
            lambda rows=rows, params=params: made.generate(rows, params, use_tqdm=False),
            made,
        )
    return asked.noted


METHODS = {"reuse": reuse, "proposer": drafts, "v2": drafts}


def config_of(method):
    from nemo_specrl import SpecRLConfig

    tree = {"max_draft_tokens": 6, "adaptive": method == "v2", "method": method}
    return SpecRLConfig(enabled=True, preset="lossless", tree=tree)


def main(model, folder, method):
    if method == "v2":
        from tests.support import v2_cpu  # before vllm

        assert v2_cpu.READY
        from nemo_specrl.engine.drafters.v2 import arrays
        from tests.support import v2_numpy

        arrays.kernels = v2_numpy  # see v2_spawned
    from nemo_specrl.engine.drafters.method import engine_options
    from tests.conftest import make_engine

    give_collectives()
    os.environ["TEST_METHOD"] = method
    rank = int(os.environ["VLLM_DP_RANK"])
    options = {} if method == "reuse" else engine_options(config_of(method))
    llm = make_engine(
        model,
        max_num_seqs=8,
        enable_prefix_caching=True,
        distributed_executor_backend="uni",
        async_scheduling=False,
        **options,
    )
    config = llm.llm_engine.vllm_config
    assert llm.llm_engine.dp_group is not None and not config.scheduler_config.async_scheduling
    assert config.use_v2_model_runner == (method == "v2")
    if method == "v2":  # one length for all steps of both
        assert config.speculative_config.num_speculative_tokens == 3
        assert config.speculative_config.num_speculative_tokens_per_batch_size is None
    noted = {name: vars(values) for name, values in METHODS[method](llm, rank).items()}
    (Path(folder) / f"noted-{rank}").write_bytes(pickle.dumps(noted))


if __name__ == "__main__":
    main(*sys.argv[1:])
