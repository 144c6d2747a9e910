"""The Megatron policy as the trainer has it: ranks in Ray actors, a refit, a rank that dies."""

import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from nemo_specrl.engine.refit import refit
from nemo_specrl.errors import CheckpointError, ConfigError, PolicyError
from nemo_specrl.trainer.policy import build_policy, build_value_model
from nemo_specrl.trainer.policy.megatron import ray_actors
from nemo_specrl.trainer.policy.megatron.weights import Layout
from nemo_specrl.trainer.policy.torch.policy import TorchPolicy
from nemo_specrl.trainer.recipe import load_recipe
from tests.conftest import REPOSITORY
from tests.support.trainer.ranks import samples, wait_until_gone
from tests.support.trainer.text_models import write_untied
from tests.trainer.policy.torch.test_policy import recipe_of

pytestmark = pytest.mark.usefixtures("own_ray")

DEMO = "examples/configs/grpo_sort_megatron_cpu.yaml"
PIPELINE = {
    "train_global_batch_size": 4,
    "train_micro_batch_size": 2,
    "max_grad_norm": 0.5,
    "optimizer": {"kwargs": {"lr": 1e-3, "eps": 1e-4}},
    "megatron_cfg": {"enabled": True, "pipeline_model_parallel_size": 2},
}


@pytest.fixture(scope="module")
def policy(random_model, own_ray):
    """A policy of two pipeline stages that has started its own Ray."""
    before = signal.getsignal(signal.SIGTERM)
    built = build_policy(recipe_of(random_model, policy=PIPELINE))
    assert signal.getsignal(signal.SIGTERM) is before
    yield built
    built.shutdown()


def test_it_trains_as_the_torch_policy_does(policy, random_model):
    """Two passes over two optimizer steps each, through the driver."""
    torch_policy = TorchPolicy(policy.config, policy.loss, policy.seed)
    for ours, theirs in zip(
        policy.logprobs(samples()), torch_policy.logprobs(samples()), strict=True
    ):
        assert ours == pytest.approx(theirs, abs=1e-5)
    metrics = policy.train(samples(), epochs=2)
    expected = torch_policy.train(samples(), epochs=2)
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert policy.updates == torch_policy.updates == 4
    ours = {name: weight.clone() for name, weight in policy.stream_weights()}
    theirs = dict(torch_policy.stream_weights())
    assert ours.keys() == theirs.keys()
    assert max(float((ours[n] - theirs[n]).abs().max()) for n in ours) < 1e-4
    first = policy.reference_logprobs(samples())
    expected = torch_policy.reference_logprobs(samples())
    assert np.concatenate(first) == pytest.approx(np.concatenate(expected), abs=1e-5)


CONNECT = """
import sys, ray
ray.init(sys.argv[1], log_to_driver=False)
print(ray.nodes()[0]["Alive"])
"""


def test_its_ray_asks_for_a_token_that_is_in_no_file(policy):
    address = ray.get_runtime_context().gcs_address
    token = os.environ["RAY_AUTH_TOKEN"]
    ours, wrong = (
        subprocess.run(
            [sys.executable, "-c", CONNECT, address],
            env=os.environ | {"RAY_AUTH_TOKEN": each, "RAY_AUTH_MODE": "token"},
            capture_output=True,
            text=True,
        )
        for each in (token, "0" * len(token))
    )
    assert ours.stdout.strip() == "True", ours.stderr
    assert wrong.returncode != 0 and "True" not in wrong.stdout
    written = [path for path in Path(os.environ["RAY_TMPDIR"]).rglob("*") if path.is_file()]
    assert written and not [path for path in written if token.encode() in path.read_bytes()]


def test_rows_without_advantage_make_no_step(policy):
    before = policy.logprobs(samples())
    idle, updates = samples(), policy.updates
    for sample in idle:
        sample.advantages = np.zeros_like(sample.advantages)
    assert policy.train(idle[:4], epochs=1)["grad_norm"] == 0
    assert policy.updates == updates + 1
    assert np.concatenate(policy.logprobs(samples())).tolist() == np.concatenate(before).tolist()


def test_weights_that_a_step_has_ruined_are_reported(policy, tmp_path):
    policy.save(tmp_path)
    assert policy.not_finite() is None
    ruinous = samples()[:4]
    for sample in ruinous:
        sample.advantages = np.full_like(sample.advantages, 1e38)
    metrics = policy.train(ruinous, epochs=1)
    assert not np.isfinite(metrics["grad_norm"])
    assert policy.not_finite().startswith("model.")
    policy.load(tmp_path)
    assert policy.not_finite() is None


def test_an_engine_that_was_refitted_has_its_logprobs(policy, engine):
    """Real vLLM; a tensor that arrives wrong is noticed."""
    from vllm import SamplingParams

    def difference():
        outputs = engine.generate(
            [{"prompt_token_ids": s.prompt + s.response} for s in samples()],
            SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False),
            use_tqdm=False,
        )
        errors = []
        for sample, output, logprobs in zip(
            samples(), outputs, policy.logprobs(samples()), strict=True
        ):
            entries = output.prompt_logprobs[len(sample.prompt) :]
            engines = [e[t].logprob for e, t in zip(entries, sample.response, strict=True)]
            errors += np.abs(logprobs - engines).tolist()
        return np.mean(errors)

    refit(engine, policy.stream_weights())
    assert difference() < 1e-4
    wrong = "model.layers.1.self_attn.k_proj.weight"
    refit(engine, ((n, w.flip(0) if n == wrong else w) for n, w in policy.stream_weights()))
    assert difference() > 1e-2


def test_weights_are_cast_for_the_engine(policy):
    cast = {name: weight.clone() for name, weight in policy.stream_weights(torch.bfloat16)}
    own = policy.stream_weights()
    assert all(torch.equal(cast[name], weight.to(torch.bfloat16)) for name, weight in own)


def test_weights_are_gathered_when_they_are_asked_for(policy):
    """No more is alive than what one of Megatron's parameters is made of, and the one before."""
    alive = []
    for _, tensor in policy.stream_weights():
        alive.append(weakref.ref(tensor))
        assert sum(reference() is not None for reference in alive) <= 4
    assert len(alive) > 20


def test_it_is_saved_while_it_is_offloaded(policy, tmp_path):
    policy.offload()
    policy.offload()
    policy.save(tmp_path / "policy")
    policy.reload()
    before, updates = policy.logprobs(samples()), policy.updates
    expected = policy.train(samples(), epochs=1)
    policy.load(tmp_path / "policy")
    assert policy.updates == updates
    assert np.concatenate(policy.logprobs(samples())).tolist() == np.concatenate(before).tolist()
    assert policy.train(samples(), epochs=1) == expected
    with pytest.raises(CheckpointError, match=r"no checkpoint of a Megatron policy; resume with"):
        policy.load(tmp_path)


def test_a_rank_that_dies_in_a_step_ends_the_call(policy, monkeypatch):
    """One rank waits for the other, which is stopped, and killed while the driver waits.

    The rank that lives would wait for longer than a test may take.
    """
    pids = policy.pids()
    os.kill(pids[1], signal.SIGSTOP)
    wait = ray.wait

    def kill_first(*args, **kwargs):
        if os.path.exists(f"/proc/{pids[1]}"):
            os.kill(pids[1], signal.SIGKILL)
        return wait(*args, **kwargs)

    monkeypatch.setattr(ray, "wait", kill_first)
    with pytest.raises(PolicyError, match=r"^rank 1 \(TP 0, PP 1, DP 0\) of .* died; .* resumed"):
        policy.train(samples(), epochs=1)
    assert ray.is_initialized()  # others may be using it, in another thread
    wait_until_gone(pids)
    with pytest.raises(
        PolicyError, match=r"^rank 0 .* has ended: by a shutdown, or because another one failed"
    ):
        policy.logprobs(samples())
    policy.shutdown()
    assert not ray.is_initialized()  # it was the policy's own


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_rank_that_hangs_in_a_step_ends_the_call(random_model, monkeypatch, shared):
    """In a Ray of the policy's own, and in one that was there before."""
    monkeypatch.setattr(ray_actors, "SILENT_SECONDS", 12.0)  # the others must answer in time
    if shared:
        ray.init("local", include_dashboard=False, log_to_driver=False)
    try:
        policy = build_policy(recipe_of(random_model, policy=PIPELINE))
        pids = policy.pids()
        os.kill(pids[1], signal.SIGSTOP)
        with pytest.raises(PolicyError, match=r"^rank 1 \(TP 0, PP 1, DP 0\) .* has not a"):
            policy.train(samples(), epochs=1)
        wait_until_gone(pids)
        policy.shutdown()
        assert ray.is_initialized() is shared
    finally:
        ray.shutdown()


def test_a_checkpoint_that_a_disk_does_not_take_is_one_line(random_model, tmp_path):
    """A rank may not let a file grow beyond a part of its weights."""
    policy = build_policy(recipe_of(random_model, policy=PIPELINE))
    for pid in policy.pids():
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (50_000, hard))
    with pytest.raises(CheckpointError, match=r"a: cannot be written: ") as caught:
        policy.save(tmp_path / "a")
    assert "\n" not in str(caught.value)
    wait_until_gone(policy.pids())
    policy.shutdown()


def test_the_reason_is_the_rank_that_died_and_not_those_that_noticed():
    """Ray's own errors, without ranks."""
    layout, ranks = Layout(tp=2), object.__new__(ray_actors.Actors)
    ranks._name = lambda rank: f"{layout.describe(rank)} of the Megatron policy"
    ranks._error = PolicyError

    def raised(error):
        return ray.exceptions.RayTaskError("train", f"Traceback\n{error!r}", error)

    def reason(*errors):
        return ranks._reason(dict(enumerate(errors)))

    lost = raised(RuntimeError("Connection closed by peer"))
    died = ray.exceptions.ActorDiedError()
    assert str(reason(lost, died)).startswith("rank 1 (TP 1, PP 0, DP 0) of the Megatron policy d")
    wrong = ConfigError("policy.model_name: no")
    assert reason(lost, raised(wrong)) is wrong
    failed = reason(lost)
    assert isinstance(failed, PolicyError)
    assert str(failed) == (
        "rank 0 (TP 0, PP 0, DP 0) of the Megatron policy failed: "
        "RuntimeError('Connection closed by peer')"
    )


def test_a_layout_that_does_not_fit_is_refused_before_anything_is_started(random_model):
    wide = PIPELINE | {"megatron_cfg": {"enabled": True, "tensor_model_parallel_size": 2}}
    with pytest.raises(
        ConfigError,
        match=r"^policy\.megatron_cfg\.tensor_model_parallel_size = 2: must divide .* 1 KV heads$",
    ):
        build_policy(recipe_of(random_model, policy=wide))
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("module", "package"), [("megatron.core", "megatron-core"), ("ray", "ray")]
)
def test_a_package_that_is_missing_is_named(random_model, monkeypatch, module, package):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == module else find(name)
    )
    with pytest.raises(ConfigError, match=rf"{package} is not installed; pip install"):
        build_policy(recipe_of(random_model, policy=PIPELINE))


def test_the_value_model_of_ppo_is_a_torch_model(random_model):
    value = build_value_model(recipe_of(random_model, "ppo", policy=PIPELINE))
    value.predict(batch := samples())
    assert all(len(s.old_values) == len(s.response) for s in batch)


@pytest.fixture(scope="module")
def untied_model(tmp_path_factory):
    """The demo's model with an output layer of its own."""
    folder = tmp_path_factory.mktemp("untied")
    write_untied(REPOSITORY / load_recipe(REPOSITORY / DEMO).policy.model_name, folder)
    return folder


def test_a_run_of_the_recipe(untied_model, tmp_path):
    """Two steps at TP2, with an untied output layer, in a Ray that was there before."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.support.trainer.megatron_job", DEMO),
            f"policy.model_name={untied_model}",
            "policy.generation.colocated.enabled=true",
            "policy.generation.vllm_kwargs.max_num_seqs=8",
            "grpo.num_prompts_per_step=4",
            "grpo.num_generations_per_prompt=4",
            "policy.train_global_batch_size=16",
            "policy.optimizer.kwargs.lr=1e-3",
            "data.num_prompts=8",
            "grpo.max_num_steps=2",
            "grpo.val_at_start=false",
            "grpo.val_at_end=false",
            "policy.generation.spec_rl.cache.max_bytes_per_node=4MiB",
            f"checkpointing.checkpoint_dir={tmp_path}",
            f"logger.log_dir={tmp_path}",
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert [record["step"] for record in result["records"]] == [1, 2]
    assert result["records"][0]["grad_norm"] > 0  # the second refit brings other weights
    assert len(result["differences"]) == 2
    assert max(result["differences"]) < 1e-3
    assert result["shared"]  # the policy left Ray as it found it
    assert len(result["pids"]) == 2
    wait_until_gone(result["pids"])
    assert (tmp_path / "step_2" / "policy" / "metadata.json").is_file()
