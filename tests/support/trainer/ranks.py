"""Shared by the tests of the Megatron policy: ranks without Ray, and models and samples for them.

The ranks are real ones in processes of their own, forked from one that has imported Megatron, which
takes several seconds.
"""

from __future__ import annotations

import functools
import multiprocessing
import queue
import shutil
import time
import traceback

import numpy as np
import torch

from nemo_specrl.trainer.policy import Sample
from nemo_specrl.trainer.policy.megatron import cpu
from nemo_specrl.trainer.policy.megatron.weights import Architecture, Layout, assemble, parameters
from nemo_specrl.trainer.policy.megatron.worker import MegatronRank
from nemo_specrl.trainer.policy_config import PolicyConfig
from nemo_specrl.trainer.recipe import LossConfig
from tests.conftest import SHIPPED_MODEL

WAIT_S = 120.0

LAYOUTS = {
    "TP1": Layout(),
    "TP2": Layout(tp=2),
    "PP2": Layout(pp=2),
    "TP2xPP2": Layout(tp=2, pp=2),
    "DP2": Layout(dp=2),
}


@functools.cache
def context():
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(
        [
            "megatron.core",
            "megatron.core.models.gpt",
            "megatron.core.optimizer",
            "megatron.core.dist_checkpointing",
            "tests.support.trainer.ranks",
        ]
    )
    return server


class RanksFailed(AssertionError):
    """A rank raised an error."""


def _process(rank, layout, config, loss, port, function, arguments, without, results):
    try:
        torch.set_num_threads(1)
        for name in without:
            del cpu.PATCHES[name]
        worker = MegatronRank(rank, layout, config, loss)
        if rank == 0:
            port.put(worker.listen("127.0.0.1"))
            worker.start("127.0.0.1", 0)
        else:
            number = port.get(timeout=WAIT_S)
            port.put(number)  # for the next rank
            worker.start("127.0.0.1", number)
        results.put((rank, function(worker, *arguments), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))


def run_ranks(layout, config, function, *arguments, loss=None, without=()):
    """Call ``function(rank, *arguments)`` with every rank of a layout at once.

    Patches of the CPU shim whose names are in ``without`` are left out. Returns what the function
    returned on each rank, in order.
    """
    loss = loss or LossConfig()
    port, results = context().Queue(), context().Queue()
    processes = [
        context().Process(
            target=_process,
            args=(rank, layout, config, loss, port, function, arguments, without, results),
        )
        for rank in range(layout.size)
    ]
    for process in processes:
        process.start()
    found = {}
    try:
        deadline = time.monotonic() + WAIT_S
        while len(found) < layout.size:
            rank, value, error = results.get(timeout=max(0.0, deadline - time.monotonic()))
            if error is not None:
                raise RanksFailed(f"{layout.describe(rank)}:\n{error}")
            found[rank] = value
    except queue.Empty:
        raise AssertionError(f"ranks {set(range(layout.size)) - set(found)} hang") from None
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [found[rank] for rank in range(layout.size)]


def make_model(folder, *, tied, kind="qwen3", vocabulary=33, layers=2):
    """Write a tiny model of random weights: grouped heads, and a vocabulary that needs padding."""
    import transformers

    torch.manual_seed(0)
    config = {"qwen3": transformers.Qwen3Config, "llama": transformers.LlamaConfig}[kind](
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # norms that are all 1 would hide which is which
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED_MODEL / name, folder)
    return folder


def policy_config(folder, **changes):
    return PolicyConfig.model_validate(
        {
            "model_name": str(folder),
            "train_global_batch_size": 6,
            "train_micro_batch_size": 2,
            "max_grad_norm": 0.5,
            "optimizer": {"kwargs": {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4}},
        }
        | changes
    )


def samples(count=6, seed=0):
    """Prompts and responses of different lengths; the gradient of one row is 0."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        n = int(rng.integers(1, 14))
        made.append(
            Sample(
                prompt=rng.integers(3, 32, size=int(rng.integers(1, 7))).tolist(),
                response=rng.integers(3, 32, size=n).tolist(),
                advantages=np.full(n, (i % 3) - 1.0, dtype=np.float32),
            )
        )
    return made


def whole(results, layout, folder):
    """Put together what each rank returned for each of its parameters, by Hugging Face name."""
    model = Architecture.read(str(folder))
    found = {}
    for stage in range(layout.pp):
        for index, entry in enumerate(parameters(model, layout, stage)):
            parts = [results[layout.rank(tp=i, pp=stage)][index] for i in range(layout.tp)]
            tensors = assemble(entry, [torch.as_tensor(p) for p in parts], model)
            for name, tensor in zip(entry.tensors, tensors, strict=True):
                if entry.copy:
                    assert torch.equal(tensor, found[name]), name
                found[name] = tensor
    return found


def wait_until_gone(pids, seconds=30):
    until = time.monotonic() + seconds
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < until, f"{left} are still there"
        time.sleep(0.05)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
