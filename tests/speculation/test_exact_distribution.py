"""The distribution of reused rollouts, on a model small enough to enumerate.

The figures are in docs/evidence/laboratory.md.

Two tokens, responses of two tokens, one prompt; the policy is a table of logits, one for each
prefix. All responses, all accepted lengths and, where weights are trained on drafts, all drafts are
summed over, so that the statements are checked to rounding and not by sampling. One test samples,
with the product's own acceptance test, and shows that it has the enumerated distribution.
"""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from nemo_specrl import SpecRLConfig
from nemo_specrl.speculation.acceptance import accepted_lengths, offsets_of
from nemo_specrl.trainer.losses import group_advantages, policy_loss
from nemo_specrl.trainer.recipe import LossConfig

LENGTH = 2
RESPONSES = list(itertools.product((0, 1), repeat=LENGTH))
NODES = {prefix: i for i, prefix in enumerate([(), (0,), (1,)])}
REWARDS = np.array([0.0, 1.0, 0.0, 0.0])  # the right response is 0, 1
PAPER = math.exp(0.5)


def token_logprobs(logits, response):
    """Log-prob of each token of a response, [LENGTH]."""
    out = []
    for i, token in enumerate(response):
        logit = logits[NODES[response[:i]]]
        out.append(torch.nn.functional.logsigmoid(logit if token else -logit))
    return torch.stack(out)


def distribution(logits):
    """Probability of each response, [4]."""
    return np.array([token_logprobs(logits, r).sum().exp().item() for r in RESPONSES])


def outcomes(new, reference, draft, lenience):
    """All fates of a draft: (probability, response, accepted length), all that can be.

    Args:
        new: logits of the policy that judges and decodes.
        reference: log-probs that the draft's tokens are compared with.
        draft: a response.
        lenience: l.
    """
    accept = (token_logprobs(new, draft) - reference).exp().mul(lenience).clamp(max=1).numpy()
    for kept in range(LENGTH + 1):
        ends_here = accept[:kept].prod() * (1 - accept[kept] if kept < LENGTH else 1)
        for response in RESPONSES:
            if ends_here > 0 and response[:kept] == draft[:kept]:
                rest = token_logprobs(new, response)[kept:].sum().exp().item()
                yield ends_here * rest, response, kept


def reused(new, reference, draft, lenience):
    """Distribution of what becomes of a draft, [4]."""
    out = np.zeros(len(RESPONSES))
    for p, response, _ in outcomes(new, reference, draft, lenience):
        out[RESPONSES.index(response)] += p
    return out


def total_variation(p, q):
    return 0.5 * np.abs(p - q).sum()


@pytest.fixture
def weights():
    """Old weights, and new ones that owe nothing to any draft."""
    rng = np.random.default_rng(0)
    old = torch.tensor(rng.normal(0, 1, 3))
    return old, old + torch.tensor(rng.normal(0, 0.5, 3))


# --- weights that were not trained on the draft -----------------------------------------------


@pytest.mark.parametrize("lenience", [1.0, PAPER])
def test_untrained_the_distribution_is_stated_token_by_token(weights, lenience):
    """P(z) of reuse is a product over tokens of min(p_old, l p_new), cut off by a rejection."""
    old, new = weights
    mixture = sum(
        distribution(old)[i] * reused(new, token_logprobs(old, draft), draft, lenience)
        for i, draft in enumerate(RESPONSES)
    )
    assert mixture.sum() == pytest.approx(1)
    first = np.array([torch.sigmoid(-old[0]).item(), torch.sigmoid(old[0]).item()])
    first_new = np.array([torch.sigmoid(-new[0]).item(), torch.sigmoid(new[0]).item()])
    kept = np.minimum(first, lenience * first_new)
    expected = kept + (1 - kept.sum()) * first_new
    marginal = np.array([mixture[:2].sum(), mixture[2:].sum()])
    assert marginal == pytest.approx(expected)


def test_untrained_reuse_is_never_further_from_the_new_policy_than_the_old_policy_is(weights):
    """One token: TV(reuse, p_new) = r' <= TV(p_old, p_new), and it grows with the lenience."""
    old, new = weights
    p_old = torch.sigmoid(old[0]).item()
    p_new = torch.sigmoid(new[0]).item()
    distances = []
    for lenience in (1.0, 1.2, PAPER, 10.0):
        kept = np.minimum([1 - p_old, p_old], lenience * np.array([1 - p_new, p_new]))
        reuse = kept + (1 - kept.sum()) * np.array([1 - p_new, p_new])
        distances.append(total_variation(reuse, [1 - p_new, p_new]))
    assert distances == sorted(distances)
    assert 0 < distances[0] < distances[-1] <= abs(p_old - p_new) + 1e-12
    assert distances[-1] == pytest.approx(abs(p_old - p_new))  # l -> infinity: the old policy's


@pytest.mark.parametrize("lenience", [1.0, PAPER])
def test_the_acceptance_test_has_the_enumerated_distribution(weights, lenience):
    """Chi-squared with 20,000 drafts; error rate 1e-4."""
    old, new = weights
    rng = np.random.default_rng(1)
    picks = rng.choice(len(RESPONSES), size=20_000, p=distribution(old))
    lengths = accepted_lengths(
        np.concatenate([token_logprobs(new, r).numpy() for r in RESPONSES])[
            (picks[:, None] * LENGTH + np.arange(LENGTH)).ravel()
        ],
        np.concatenate([token_logprobs(old, r).numpy() for r in RESPONSES])[
            (picks[:, None] * LENGTH + np.arange(LENGTH)).ravel()
        ],
        1.0 - rng.random(len(picks) * LENGTH),
        offsets_of([LENGTH] * len(picks)),
        lenience,
    )
    counts = np.zeros(len(RESPONSES))
    for pick, kept in zip(picks, lengths, strict=True):
        response = list(RESPONSES[pick][:kept])
        while len(response) < LENGTH:
            p_one = torch.sigmoid(new[NODES[tuple(response)]]).item()
            response.append(int(rng.random() < p_one))
        counts[RESPONSES.index(tuple(response))] += 1
    expected = sum(
        distribution(old)[i] * reused(new, token_logprobs(old, draft), draft, lenience)
        for i, draft in enumerate(RESPONSES)
    )
    assert stats.chisquare(counts, len(picks) * expected).pvalue > 1e-4
    assert stats.chisquare(counts, len(picks) * distribution(new)).pvalue < 1e-6  # it can tell


# --- weights that were trained on the draft ----------------------------------------------------

GROUP = 2


@dataclasses.dataclass
class Row:
    """A rollout in the cache: last and birth log-probs of its tokens."""

    response: tuple[int, ...]
    last: torch.Tensor
    birth: torch.Tensor


@dataclasses.dataclass
class State:
    """Weights and cache, with the probability of having come to them."""

    p: float
    logits: torch.Tensor
    rows: list[Row | None]


def rows_of(state, sample_index, method):
    """All that a sample index can become: (probability, Row).

    A lossless draft becomes what a fresh row would have been, so that both are one case.
    """
    old = state.rows[sample_index]
    fresh = 1.0 if old is None or method == "lossless" else method.fresh_fraction
    if fresh < 1:
        reference = old.birth if method.acceptance_reference == "birth" else old.last
        for p, response, kept in outcomes(state.logits, reference, old.response, method.lenience):
            last = token_logprobs(state.logits, response)
            birth = torch.cat([old.birth[:kept], last[kept:]])
            yield (1 - fresh) * p, Row(response, last, birth)
    if fresh > 0:
        for p, response in zip(distribution(state.logits), RESPONSES, strict=True):
            last = token_logprobs(state.logits, response)
            yield fresh * p, Row(response, last, last)


def trained(logits, rows, method, rate):
    """Weights after a step of the product's loss on a group."""
    rewards = np.array([[REWARDS[RESPONSES.index(row.response)] for row in rows]])
    advantages = group_advantages(rewards, normalize=True, leave_one_out=False)[0]
    if not advantages.any():
        return logits
    weights = logits.clone().requires_grad_(True)
    logprobs = torch.stack([token_logprobs(weights, row.response) for row in rows])
    birth = method != "lossless" and method.clip_anchor == "birth"
    anchors = torch.stack([row.birth if birth else row.last for row in rows])
    loss, _ = policy_loss(
        logprobs,
        anchors,
        torch.tensor(advantages)[:, None].expand(-1, LENGTH),
        torch.full((GROUP, LENGTH), 1 / (GROUP * LENGTH)),
        LossConfig(),
    )
    loss.backward()
    return (weights - rate * weights.grad).detach()


def merged(states):
    """States that are the same put together: rounded, they are few."""
    found = {}
    for state in states:
        key = [state.logits.numpy().round(9).tobytes()]
        for row in state.rows:
            numbers = torch.cat([row.last, row.birth]).numpy()
            key.append((row.response, numbers.round(9).tobytes()))
        if tuple(key) in found:
            found[tuple(key)].p += state.p
        else:
            found[tuple(key)] = state
    return list(found.values())


def learn(method, epochs, *, rate=1.0, on_drafts=True):
    """Exact expectations by epoch, over every way that a run can go.

    Args:
        method: "lossless", or a configuration.
        epochs: how many.
        rate: learning rate.
        on_drafts: train on the rows that are drafted next; else on others, drawn for the purpose.

    Returns:
        for each epoch, before its update: value of the policy, mean reward of the rows, and total
        variation between the rows' distribution given the weights and the policy's own.
    """
    states = [State(1.0, torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64), [None] * GROUP)]
    seen = []
    for epoch in range(epochs):
        value = reward = 0.0
        totals, after = {}, []
        for state in states:
            own = distribution(state.logits)
            value += state.p * own @ REWARDS
            options = [list(rows_of(state, sample_index, method)) for sample_index in range(GROUP)]
            for option in options:
                made = np.zeros(len(RESPONSES))
                for p, row in option:
                    made[RESPONSES.index(row.response)] += p
                assert made.sum() == pytest.approx(1)
                reward += state.p * made @ REWARDS / GROUP
                weights = state.logits.numpy().round(9).tobytes()
                p, total = totals.get(weights, (0.0, 0.0))
                totals[weights] = (p + state.p / GROUP, total + state.p / GROUP * (made - own))
            if epoch == epochs - 1:
                continue
            for choice in itertools.product(*options):
                p = state.p * math.prod(p for p, _ in choice)
                rows = [row for _, row in choice]
                groups = [(1.0, rows)]
                if not on_drafts:
                    fresh = list(rows_of(State(1.0, state.logits, [None]), 0, method))
                    groups = [(a * b, [one, two]) for a, one in fresh for b, two in fresh]
                for share, group in groups:
                    if p * share > 0:
                        moved = trained(state.logits, group, method, rate)
                        after.append(State(p * share, moved, rows))
        distance = sum(0.5 * np.abs(total).sum() for _, total in totals.values())
        seen.append((value, reward, distance))
        states = merged(after)
    return np.array(seen)


PLAIN = SpecRLConfig(enabled=True, preset="faithful", fresh_fraction=1.0)
FAITHFUL = SpecRLConfig(enabled=True, preset="faithful")
FAST = SpecRLConfig(enabled=True, preset="fast")
VALUE, REWARD, DISTANCE = range(3)


@pytest.fixture(scope="module")
def learned():
    return {
        "plain": learn(PLAIN, 3),
        "lossless": learn("lossless", 3),
        "faithful": learn(FAITHFUL, 3),
        "fast": learn(FAST, 3),
    }


def test_fresh_randomness_is_exact_whatever_was_trained_on(learned):
    """Lossless: given the weights, rows have the policy's distribution; learning is plain's."""
    assert learned["lossless"][:, DISTANCE] == pytest.approx(0, abs=1e-12)
    assert learned["lossless"][:, REWARD] == pytest.approx(learned["lossless"][:, VALUE])
    assert learned["lossless"] == pytest.approx(learned["plain"])


@pytest.mark.parametrize("method", [FAITHFUL, FAST], ids=["faithful", "fast"])
def test_unchanged_weights_make_any_reuse_exact(method):
    assert learn(method, 3, rate=0.0)[:, DISTANCE] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("method", [FAITHFUL, FAST], ids=["faithful", "fast"])
def test_most_of_the_distance_comes_from_training_on_the_draft(method):
    """Weights that moved by other rows leave reuse close; weights that moved by the draft do not.

    The second is what a reused row is: its distribution given the weights is mostly the draft
    itself, since the weights tell which draft they were trained on.
    """
    apart = learn(method, 2, on_drafts=False)[1, DISTANCE]
    together = learn(method, 2)[1, DISTANCE]
    assert 0 < apart < 0.1 * together


def test_presets_are_ordered_by_their_distance(learned):
    for epoch in (1, 2):
        plain, faithful, fast = (
            learned[name][epoch, DISTANCE] for name in ("plain", "faithful", "fast")
        )
        assert plain == pytest.approx(0, abs=1e-12)
        assert 0 < faithful < 0.9 * fast


def test_rewards_of_reused_rows_are_not_those_of_the_policy(learned):
    """The monitor looks for this: fast lags behind its policy, faithful by less."""
    gap = {name: seen[2, VALUE] - seen[2, REWARD] for name, seen in learned.items()}
    assert gap["plain"] == pytest.approx(0, abs=1e-12)
    assert abs(gap["faithful"]) < abs(gap["fast"])
    assert abs(gap["fast"]) > 0.01
