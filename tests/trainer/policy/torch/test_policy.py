"""The policy in training: log-probs, training, files, and weights on their way to an engine."""

import gc
import resource
import weakref

import numpy as np
import pytest
import torch

from nemo_specrl.engine.refit import refit
from nemo_specrl.errors import CheckpointError
from nemo_specrl.trainer import checkpoint
from nemo_specrl.trainer.policy import Sample, build_policy, build_value_model
from nemo_specrl.trainer.policy.torch.model import load_model
from nemo_specrl.trainer.recipe import Recipe


def recipe_of(model, block="grpo", *, policy=None, spec_rl=None, **loss):
    estimator = "gae" if block == "ppo" else "grpo"
    return Recipe.model_validate(
        {
            block: {"num_prompts_per_step": 2, "adv_estimator": {"name": estimator}},
            "loss_fn": loss,
            "policy": {
                "model_name": str(model),
                "train_global_batch_size": 4,
                "train_micro_batch_size": 3,
                "generation": {"spec_rl": spec_rl or {}},
                **(policy or {}),
            },
        }
    )


def samples(count=5, seed=0):
    """Random prompts and responses of different lengths, with advantages."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        n = int(rng.integers(1, 12))
        made.append(
            Sample(
                prompt=rng.integers(3, 32, size=int(rng.integers(1, 6))).tolist(),
                response=rng.integers(3, 32, size=n).tolist(),
                advantages=np.full(n, (-1.0) ** i, dtype=np.float32),
            )
        )
    return made


def weights_of_policy(policy):
    return {name: tensor.clone() for name, tensor in policy.stream_weights()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_logprobs_are_those_of_the_model_in_the_order_of_the_samples(random_model):
    policy = build_policy(recipe_of(random_model))
    model = load_model(str(random_model))
    found = policy.logprobs(samples())
    for sample, logprobs in zip(samples(), found, strict=True):
        tokens = torch.tensor([sample.prompt + sample.response])
        with torch.no_grad():
            every = torch.log_softmax(model(input_ids=tokens).logits[0], -1)
        start = len(sample.prompt) - 1
        expected = [every[start + i, token].item() for i, token in enumerate(sample.response)]
        assert logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("penalty", [0.0, 0.1])
def test_the_reference_keeps_the_first_weights(random_model, penalty):
    policy = build_policy(recipe_of(random_model, reference_policy_kl_penalty=penalty))
    before = policy.logprobs(samples())
    policy.train(samples(), epochs=1)
    after, reference = policy.logprobs(samples()), policy.reference_logprobs(samples())
    assert np.concatenate(reference) == pytest.approx(np.concatenate(before), abs=1e-5)
    assert np.abs(np.concatenate(after) - np.concatenate(before)).max() > 1e-5


def test_training_raises_what_has_an_advantage(random_model):
    """Several passes over two optimizer steps each, with the anchor of the first weights."""
    policy = build_policy(recipe_of(random_model))
    trained = samples()
    before = policy.logprobs(trained)
    metrics = policy.train(trained, epochs=4)
    moved = [a.sum() - b.sum() for a, b in zip(policy.logprobs(trained), before, strict=True)]
    gains = [m * s.advantages[0] for m, s in zip(moved, trained, strict=True)]
    assert sum(gains) > 0
    assert metrics["grad_norm"] > 0
    for sample, logprobs in zip(trained, before, strict=True):
        assert sample.anchor == pytest.approx(logprobs, abs=1e-5)


@pytest.mark.parametrize("most", [None, 1.5])
def test_importance_is_relative_to_what_the_engine_reported(random_model, most):
    correction = {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_ratio": most,
    }
    found = []
    for factor in (1, 2):
        policy = build_policy(recipe_of(random_model, **correction))
        batch = samples(4)
        for sample, logprobs in zip(batch, policy.logprobs(batch), strict=True):
            sample.reported = logprobs - np.log(np.float32(factor))
        policy.train(batch, epochs=1)
        for sample in batch:
            assert sample.importance == pytest.approx(min(factor, most or 2), rel=1e-3)
        found.append(weights_of_policy(policy))
    without = build_policy(recipe_of(random_model))
    without.train(samples(4), epochs=1)
    for name, tensor in weights_of_policy(without).items():
        torch.testing.assert_close(found[0][name], tensor, atol=1e-5, rtol=1e-4)
    assert not same(*found)


@pytest.mark.parametrize("kind", ["policy", "value"])
def test_a_tools_tokens_have_no_gradient(random_model, kind):
    """Whatever advantage, return or old value they have, the same weights come out."""
    trained = []
    for silly in (0.0, 50.0):
        recipe = recipe_of(random_model, "ppo", reference_policy_kl_penalty=0.1)
        model = build_policy(recipe) if kind == "policy" else build_value_model(recipe)
        batch = samples(4)
        for sample in batch:
            n = len(sample.response)
            sample.trained = (np.arange(n) % 3 != 1).astype(np.float32)
            out = sample.trained == 0
            sample.old_values = np.zeros(n, np.float32)
            sample.returns = np.ones(n, np.float32)
            for values in (sample.advantages, sample.old_values, sample.returns):
                values[out] = -silly
        metrics = model.train(batch, **({"epochs": 1} if kind == "policy" else {}))
        weights = {name: p.detach().clone() for name, p in model.model.named_parameters()}
        trained.append((weights, metrics))
    (first, metrics), (second, others) = trained
    assert same(first, second) and metrics == others
    start = build_policy(recipe) if kind == "policy" else build_value_model(recipe)
    assert not same(first, dict(start.model.named_parameters()))


@pytest.mark.parametrize("kind", ["policy", "value"])
def test_a_saved_model_goes_on_exactly(random_model, tmp_path, kind):
    def build():
        if kind == "policy":
            return build_policy(recipe_of(random_model))
        return build_value_model(recipe_of(random_model, "ppo"))

    def train(model, seed):
        batch = samples(seed=seed)
        if kind == "policy":
            return model.train(batch, epochs=2)
        model.predict(batch)
        for sample in batch:
            sample.returns = sample.old_values + 1
        return model.train(batch)

    first = build()
    train(first, 1)
    first.offload()
    first.save(tmp_path / "model")
    first.reload()
    expected = train(first, 2)
    second = build()
    second.load(tmp_path / "model")
    assert train(second, 2) == expected


def test_offloading_frees_the_gradients_and_shutdown_the_weights(random_model):
    policy = build_policy(recipe_of(random_model))
    policy.train(samples(), epochs=1)
    alive = [weakref.ref(p) for p in policy.model.parameters()]
    assert any(p().grad is not None for p in alive)
    policy.offload()
    assert all(p().grad is None for p in alive)
    policy.shutdown()
    policy.shutdown()
    gc.collect()
    assert all(p() is None for p in alive)


def test_a_checkpoint_that_a_disk_does_not_take_leaves_the_one_before(random_model, tmp_path):
    """No file may grow beyond a part of the weights; torch's error is none of the system's."""
    policy = build_policy(recipe_of(random_model))

    def save(step):
        return checkpoint.save(tmp_path, checkpoint.Progress(step=step), policy.save, keep=None)

    first = save(1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"step_2: cannot be written: ") as caught:
            save(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [first]
    policy.load(first)
    assert checkpoint.latest(tmp_path)[0] == first


def test_an_engine_that_was_refitted_has_the_policys_logprobs(random_model, engine):
    """Real vLLM: streamed weights, and its prompt log-probs beside those of the policy."""
    from vllm import SamplingParams

    policy = build_policy(recipe_of(random_model, policy={"optimizer": {"kwargs": {"lr": 1e-2}}}))
    at_first = policy.logprobs(samples())
    policy.train(samples(), epochs=2)
    refit(engine, policy.stream_weights())
    outputs = engine.generate(
        [{"prompt_token_ids": s.prompt + s.response} for s in samples()],
        SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False),
        use_tqdm=False,
    )
    expected = policy.logprobs(samples())
    assert np.abs(np.concatenate(expected) - np.concatenate(at_first)).max() > 0.05
    for sample, output, logprobs in zip(samples(), outputs, expected, strict=True):
        entries = output.prompt_logprobs[len(sample.prompt) :]
        got = [e[t].logprob for e, t in zip(entries, sample.response, strict=True)]
        assert got == pytest.approx(logprobs, abs=1e-3)


def test_weights_are_cast_for_the_engine(random_model):
    policy = build_policy(recipe_of(random_model))
    own = weights_of_policy(policy)
    assert {t.dtype for t in own.values()} == {torch.float32}
    cast = dict(policy.stream_weights(torch.bfloat16))
    assert all(torch.equal(cast[name], t.to(torch.bfloat16)) for name, t in own.items())
