"""Megatron ranks beside the torch policy: log-probs, gradients, steps, weights and checkpoints.

Real ranks over gloo, in every layout, with tied and untied embeddings. The model's vocabulary needs
padding and its query heads share KV heads.
"""

import contextlib
import os
import shutil
from importlib import metadata

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nemo_specrl.trainer.losses import token_weights
from nemo_specrl.trainer.policy.megatron.cpu import PATCHES, SINCE, megatron_on_cpu
from nemo_specrl.trainer.policy.megatron.weights import Layout
from nemo_specrl.trainer.policy.torch.policy import TorchPolicy
from nemo_specrl.trainer.recipe import LossConfig
from tests.support.trainer.ranks import (
    LAYOUTS,
    RanksFailed,
    make_model,
    policy_config,
    run_ranks,
    samples,
    whole,
)

without_cuda = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the shim does nothing where there is CUDA"
)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request, tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), tied=request.param)


def steps(count, first=0):
    """Samples of several optimizer steps with their weights."""
    made = []
    for seed in range(first, first + count):
        batch = samples(seed=seed)
        made.append((batch, token_weights([len(s.response) for s in batch], token_level=True)))
    return made


class Reference:
    """The torch policy's gradients at first, and its weights and metrics after each step."""

    def __init__(self, folder, count, loss=None):
        policy = TorchPolicy(policy_config(folder), loss or LossConfig(), 0)
        self.logprobs = policy.logprobs(samples())
        clip = torch.nn.utils.clip_grad_norm_
        self.gradients = {}

        def note(parameters, norm):
            if not self.gradients:
                named = policy.model.named_parameters()
                self.gradients = {name: p.grad.clone() for name, p in named}
            return clip(parameters, norm)

        self.metrics, self.weights = [], []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.utils, "clip_grad_norm_", note)
            for batch, _ in steps(count):
                self.metrics.append(policy._step(batch))
                self.weights.append({n: w.clone() for n, w in policy.stream_weights()})


@pytest.fixture(scope="module")
def reference(folder):
    return Reference(folder, 4)


def furthest(a, b):
    """Largest difference of two models' tensors."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def exported(rank):
    return [rank.shard(i, torch.float32).copy() for i in range(len(rank.parameters))]


def replica(rank, batch):
    """This rank's share of a batch."""
    dp = rank.layout.place(rank.rank)[2]
    return [items[dp :: rank.layout.dp] for items in batch]


def train(rank, batches):
    """Take an optimizer step for each batch; returns the metrics of each."""
    return [rank.train(*replica(rank, batch)) for batch in batches]


def everything(rank, batches):
    """The work of a rank from its start: log-probs, weights, gradients, steps, weights."""
    (scored,) = replica(rank, [samples()])
    logprobs = rank.logprobs(scored, False)
    at_first = exported(rank)
    rank.accumulate(*replica(rank, batches[0]))
    gradients = [parameter.main_grad.clone().numpy() for _, parameter in rank.parameters]
    return logprobs, at_first, gradients, train(rank, batches), exported(rank)


def summed(layout, metrics):
    """Metrics of a step, over the replicas."""
    reported = [metrics[layout.rank(pp=layout.pp - 1, dp=dp)] for dp in range(layout.dp)]
    norms = {m["grad_norm"] for m in reported}
    assert len(norms) == 1
    sums = {name: sum(m.get(name, 0.0) for m in reported) for name in reported[0]}
    return sums | {"grad_norm": norms.pop()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_does_what_the_torch_policy_does(folder, reference, name):
    """Log-probs within 1e-5, gradients and three clipped AdamW steps within 1e-4, exact weights."""
    layout = LAYOUTS[name]
    results = run_ranks(layout, policy_config(folder), everything, steps(3))
    logprobs, at_first, gradients, metrics, weights = zip(*results, strict=True)

    for dp in range(layout.dp):
        got = logprobs[layout.rank(pp=layout.pp - 1, dp=dp)]
        expected = reference.logprobs[dp :: layout.dp]
        assert np.concatenate(got) == pytest.approx(np.concatenate(expected), abs=1e-5)
    silent = [
        row for rank, row in enumerate(logprobs) if layout.place(rank)[:2] != (0, layout.pp - 1)
    ]
    assert all(row is None for row in silent)

    stored = {n: t.float() for n, t in load_file(folder / "model.safetensors").items()}
    found = whole(at_first, layout, folder)
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[n], stored[n]) for n in stored)

    if layout.dp == 1:  # replicas hold a share of the summed gradients each
        largest = max(float(g.abs().max()) for g in reference.gradients.values())
        assert largest > 0.1
        assert furthest(whole(gradients, layout, folder), reference.gradients) < 1e-5

    for step in range(3):
        got = summed(layout, [m[step] for m in metrics])
        assert got["grad_norm"] > 0.5  # so that it is clipped
        for key in ("loss", "grad_norm"):
            assert got[key] == pytest.approx(reference.metrics[step][key], abs=1e-4)
    assert furthest(whole(weights, layout, folder), reference.weights[2]) < 1e-5
    assert furthest(reference.weights[2], stored) > 1e-2


def test_the_kl_penalty_is_towards_the_first_weights(tmp_path):
    folder = make_model(tmp_path, tied=True)
    loss = LossConfig(reference_policy_kl_penalty=0.1, use_importance_sampling_correction=True)
    expected = Reference(folder, 2, loss)
    layout = LAYOUTS["TP2xPP2"]
    results = run_ranks(layout, policy_config(folder), train_and_score, steps(2), loss=loss)
    metrics, current, first, weights = zip(*results, strict=True)
    got = summed(layout, [m[1] for m in metrics])
    assert got["kl"] == pytest.approx(expected.metrics[1]["kl"], abs=1e-4)
    assert got["kl"] > 1e-3
    assert furthest(whole(weights, layout, folder), expected.weights[1]) < 1e-5
    last = layout.rank(pp=1)
    assert np.concatenate(first[last]) == pytest.approx(np.concatenate(expected.logprobs), abs=1e-5)
    assert np.abs(np.concatenate(first[last]) - np.concatenate(current[last])).max() > 1e-2


def train_and_score(rank, batches):
    metrics = train(rank, batches)
    scored = samples()
    return metrics, rank.logprobs(scored, False), rank.logprobs(scored, True), exported(rank)


def test_the_first_weights_are_read_again_without_a_penalty(tmp_path):
    folder = make_model(tmp_path, tied=False)
    expected = TorchPolicy(policy_config(folder), LossConfig(), 0).logprobs(samples())
    results = run_ranks(LAYOUTS["PP2"], policy_config(folder), train_and_score, steps(1))
    assert np.concatenate(results[1][2]) == pytest.approx(np.concatenate(expected), abs=1e-5)


def test_a_llama(tmp_path):
    """No norms of queries and keys, and an output layer of its own."""
    folder = make_model(tmp_path, tied=False, kind="llama")
    expected = TorchPolicy(policy_config(folder), LossConfig(), 0).logprobs(samples())
    layout = LAYOUTS["TP2"]
    results = run_ranks(layout, policy_config(folder), score_and_export)
    assert np.concatenate(results[0][0]) == pytest.approx(np.concatenate(expected), abs=1e-5)
    stored = {n: t.float() for n, t in load_file(folder / "model.safetensors").items()}
    found = whole([weights for _, weights in results], layout, folder)
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[n], stored[n]) for n in stored)


def score_and_export(rank):
    return rank.logprobs(samples(), False), exported(rank)


def test_a_replica_without_samples_takes_part_in_the_step(tmp_path):
    folder = make_model(tmp_path, tied=True)
    policy = TorchPolicy(policy_config(folder), LossConfig(), 0)
    (batch, _), *_ = steps(1)
    policy._step(batch[:1])
    weights = token_weights([len(batch[0].response)], token_level=True)
    results = run_ranks(LAYOUTS["DP2"], policy_config(folder), only_the_first, batch[:1], weights)
    expected = {name: weight.clone() for name, weight in policy.stream_weights()}
    for weights in results:
        assert furthest(whole([weights], Layout(), folder), expected) < 1e-5


def only_the_first(rank, batch, weights):
    rank.train(*([batch, weights] if rank.rank == 0 else [[], []]))
    return exported(rank)


# --- checkpoints ------------------------------------------------------------------------------


def train_and_save(rank, batches, folder):
    train(rank, batches)
    rank.offload()  # as the training loop does before it saves
    rank.save(folder, updates=3)
    children = [p for p in os.listdir("/proc") if p.isdecimal() and parent(p) == os.getpid()]
    return exported(rank), children


def parent(pid):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def load_and_train(rank, folder, batches):
    updates = rank.load(folder)
    loaded = exported(rank)
    train(rank, batches)
    return updates, loaded, exported(rank)


@pytest.fixture(scope="module")
def saved(folder, reference, tmp_path_factory):
    """A checkpoint after three steps at TP2."""
    path = tmp_path_factory.mktemp("checkpoint") / "policy"
    path.mkdir()
    layout = LAYOUTS["TP2"]
    results = run_ranks(layout, policy_config(folder), train_and_save, steps(3), path)
    assert all(children == [] for _, children in results)  # of Megatron's writers
    return path, whole([weights for weights, _ in results], layout, folder)


@pytest.mark.parametrize("name", ["PP2", "DP2"])
def test_a_checkpoint_goes_on_in_another_layout(folder, reference, saved, name):
    """Weights are exact; the next step, which needs moments and their count, is torch's."""
    path, weights = saved
    layout = LAYOUTS[name]
    results = run_ranks(layout, policy_config(folder), load_and_train, path, steps(1, first=3))
    updates, loaded, after = zip(*results, strict=True)
    assert set(updates) == {3}
    found = whole(loaded, layout, folder)
    assert all(torch.equal(found[n], weights[n]) for n in weights)
    assert furthest(whole(after, layout, folder), reference.weights[3]) < 1e-5
    assert furthest(reference.weights[3], reference.weights[2]) > 1e-3


def test_checkpoints_that_are_damaged_or_of_another_model(saved, tmp_path):
    path, _ = saved
    other = make_model(tmp_path / "model", tied=True, layers=1)
    with pytest.raises(RanksFailed, match=r"CheckpointError: .*: not a checkpoint of this model: "):
        run_ranks(Layout(), policy_config(other), load_and_train, path, [])
    damaged = tmp_path / "damaged"
    shutil.copytree(path, damaged)
    for file in damaged.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    model = make_model(tmp_path / "same", tied=True)
    with pytest.raises(RanksFailed, match=r"CheckpointError: .*: not a checkpoint of this model: "):
        run_ranks(Layout(), policy_config(model), load_and_train, damaged, [])


def test_a_disk_that_fails_is_no_fault_of_the_checkpoint(saved, tmp_path):
    path, _ = saved
    shutil.copytree(path, tmp_path / "unreadable")
    for file in (tmp_path / "unreadable").glob("*.distcp"):
        file.unlink()
        file.symlink_to("/proc/self/mem")  # its first page is not mapped: EIO
    model = make_model(tmp_path / "model", tied=True)
    with pytest.raises(RanksFailed, match=r"RuntimeError: .*: cannot be read: .*Errno 5"):
        run_ranks(Layout(), policy_config(model), load_and_train, tmp_path / "unreadable", [])


# --- the CPU shim -----------------------------------------------------------------------------


NEEDED_BY = {
    "current_device": ("TP1", r"megatron/core/.*CUDA"),
    "literals": ("TP1", r"megatron/core/.*CUDA"),
    "synchronize": ("PP2", r"p2p_communication\.py.*CUDA"),
    "current_stream": ("TP1", r"param_and_grad_buffer\.py.*CUDA"),
    "tensor_cuda": ("PP2", r"language_module\.py.*CUDA"),
    "tensor_type": ("TP1", r"megatron/core/.*torch\.cuda\.FloatTensor"),
    "random_state": ("TP1", r"tensor_parallel/random\.py.*CUDA"),
}
"""A layout in which each patch is needed, and what fails without it."""


@without_cuda
def test_each_patch_has_a_test():
    assert NEEDED_BY.keys() == PATCHES.keys() >= SINCE.keys()


@without_cuda
@pytest.mark.parametrize("patch", NEEDED_BY)
def test_a_patch_is_still_needed(tied_folder, patch):
    """A test that fails here says that megatron runs without the patch, or that an older version
    than SINCE has needs it."""
    layout, failure = NEEDED_BY[patch]
    version = tuple(map(int, metadata.version("megatron-core").split(".")[:2]))
    needed = version >= SINCE.get(patch, version)
    fails = pytest.raises(RanksFailed, match=rf"(?s){failure}")
    with fails if needed else contextlib.nullcontext():
        run_ranks(
            LAYOUTS[layout], policy_config(tied_folder), everything, steps(1), without=[patch]
        )


@pytest.fixture(scope="module")
def tied_folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("tied"), tied=True)


def test_the_shim_ends_and_does_nothing_beside_cuda(monkeypatch):
    before = torch.cuda.current_device, torch.Tensor.type, torch.Tensor.cuda
    with megatron_on_cpu():
        if not torch.cuda.is_available():
            assert torch.cuda.current_device is not before[0]
            assert torch.zeros(2, device="cuda").device.type == "cpu"
            assert torch.zeros(2).type() == "torch.cuda.FloatTensor"
    assert before == (torch.cuda.current_device, torch.Tensor.type, torch.Tensor.cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with megatron_on_cpu():
        assert before == (torch.cuda.current_device, torch.Tensor.type, torch.Tensor.cuda)
