"""Fingerprints of weights: equal for equal weights, different after any optimizer step."""

import torch

from nemo_specrl.engine.weight_fingerprint import SAMPLED, fingerprint


def weights():
    torch.manual_seed(0)
    return [
        ("a", torch.randn(30, 20).bfloat16()),
        ("b", torch.randn(2 * SAMPLED + 5)),
        ("c", torch.empty(0, 3)),
        ("d", torch.tensor(2.0)),
    ]


def test_equal_weights_have_one_and_order_does_not_count():
    assert fingerprint(weights()) == fingerprint(reversed(weights())) != 0
    strided = [(name, w.t().contiguous().t() if w.ndim == 2 else w) for name, w in weights()]
    assert fingerprint(strided) == fingerprint(weights())


def test_whatever_changes_it_is_another():
    seen = {fingerprint(weights())}
    for change in (
        lambda w: w.__setitem__(0, ("e", w[0][1])),
        lambda w: w.__setitem__(0, ("a", w[0][1].reshape(20, 30))),
        lambda w: w.__setitem__(0, ("a", w[0][1].half())),
        lambda w: w[0][1].view(-1)[599].add_(1),
        lambda w: w[1][1].mul_(1.0001),
        lambda w: w[3][1].add_(1e-3),
        lambda w: w.pop(),
    ):
        changed = weights()
        change(changed)
        seen.add(fingerprint(changed))
    assert len(seen) == 8
