"""Advantages, GAE and losses against their definitions."""

import numpy as np
import pytest
import torch

from nemo_specrl.trainer.losses import (
    clipped_value_loss,
    gae,
    group_advantages,
    policy_loss,
    token_weights,
)
from nemo_specrl.trainer.recipe import LossConfig


def test_group_advantages():
    rewards = np.array([[1.0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 1, 1]])
    got = group_advantages(rewards, normalize=False, leave_one_out=False)
    assert got.tolist() == [[0.75, -0.25, -0.25, -0.25], [0] * 4, [-0.5, -0.5, 0.5, 0.5]]
    got = group_advantages(rewards, normalize=True, leave_one_out=False)
    assert got[2] == pytest.approx([-1, -1, 1, 1], abs=1e-5)
    got = group_advantages(rewards, normalize=False, leave_one_out=True)
    assert got[0] == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert got[1].tolist() == [0] * 4


def test_gae_with_lambda_one_is_the_reward_less_the_value():
    values = np.array([0.2, 0.5, 0.1], dtype=np.float32)
    assert gae(1.0, values, gamma=1.0, lam=1.0) == pytest.approx(1 - values)


def test_gae_by_hand():
    # deltas: 0.9*0.5-0.2 = 0.25, 1-0.5 = 0.5; advantages: 0.25 + 0.9*0.5*0.5, 0.5
    got = gae(1.0, np.array([0.2, 0.5], dtype=np.float32), gamma=0.9, lam=0.5)
    assert got == pytest.approx([0.475, 0.5])
    assert len(gae(1.0, np.zeros(0, dtype=np.float32), gamma=1, lam=1)) == 0


def test_token_weights_are_means():
    assert token_weights([1, 3], token_level=True) == [0.25, 0.25]
    assert token_weights([1, 3], token_level=False) == [0.5, 1 / 6]
    assert token_weights([0, 0], token_level=True) == [1.0, 1.0]


def loss_of(ratio, advantage, **options):
    logprobs = torch.tensor([[np.log(ratio)]], requires_grad=True)
    weights = torch.ones(1, 1)
    config = LossConfig(**options)
    loss, sums = policy_loss(
        logprobs, torch.zeros(1, 1), torch.tensor([[advantage]]), weights, config
    )
    loss.backward()
    return loss.item(), logprobs.grad.item(), sums


@pytest.mark.parametrize(
    ("ratio", "advantage", "options", "loss", "moves"),
    [
        (1.1, 1.0, {}, -1.1, True),
        (1.3, 1.0, {}, -1.2, False),  # far enough up
        (1.3, 1.0, {"ratio_clip_max": 0.4}, -1.3, True),  # clip-higher
        (0.7, -1.0, {}, 0.8, False),  # far enough down
        (0.7, 1.0, {}, -0.7, True),
        (1.3, -1.0, {}, 1.3, True),
        (20.0, -1.0, {"ratio_clip_c": 3.0}, 3.0, False),  # dual clip
    ],
)
def test_the_clipped_loss(ratio, advantage, options, loss, moves):
    got, gradient, sums = loss_of(ratio, advantage, **options)
    assert got == pytest.approx(loss, rel=1e-5)
    assert (gradient != 0) is moves
    if options.get("ratio_clip_c") is None:
        assert (sums["clip_fraction"].item() > 0) is not moves


def test_positions_outside_the_response_count_nothing():
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    anchor, weights = torch.tensor([[-1.0, 0.0]]), torch.tensor([[1.0, 0.0]])
    loss, _ = policy_loss(
        logprobs, anchor, torch.ones(1, 2), weights, LossConfig(), reference=anchor
    )
    loss.backward()
    assert logprobs.grad[0, 1] == 0
    assert loss.item() == -1


def test_importance_weights_scale_and_the_reference_pulls():
    logprobs = torch.tensor([[-1.0]])
    ones = torch.ones(1, 1)
    loss, _ = policy_loss(logprobs, logprobs, ones, ones, LossConfig(), importance=ones * 0.5)
    assert loss.item() == -0.5
    config = LossConfig(reference_policy_kl_penalty=0.1)
    reference = torch.tensor([[-2.0]])
    loss, sums = policy_loss(logprobs, logprobs, ones, ones, config, reference=reference)
    kl = np.exp(-1) + 1 - 1
    assert sums["kl"].item() == pytest.approx(kl)
    assert loss.item() == pytest.approx(-1 + 0.1 * kl)


def test_the_clipped_value_loss():
    values, old = torch.tensor([[0.9]]), torch.tensor([[0.0]])
    ones = torch.ones(1, 1)
    loss = clipped_value_loss(values, old, ones, ones, 0.2)
    assert loss.item() == pytest.approx(0.5 * 0.8**2)  # held at 0.2: the larger error
