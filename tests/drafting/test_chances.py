"""Chances that are learned while rows run, where what is verified is chosen by them.

Rows of Markov chains, one per prompt and engine, draft from the trees of the V1 proposer, whose
cells are those of V2. In each step the tokens of all rows that are worth their time are verified,
as by vLLM's adaptive verification, with the costs of Qwen3-8B on an H100.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from nemo_specrl.drafting.chances import CHANCES, MOST_TRIES, PRIOR_TRIES, learned
from nemo_specrl.drafting.suffix_tree import DraftTrees
from nemo_specrl.drafting.uniform_length import GPUS
from nemo_specrl.engine.step_costs import costs_of

VOCABULARY, LENGTH, DRAFT, STEPS = 1024, 192, 11, 120
PROMPTS, SIBLINGS, EARLIER = 4, 8, 8
QWEN3_8B = SimpleNamespace(
    hidden_size=4096,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=12288,
    vocab_size=151936,
)
COSTS = costs_of(QWEN3_8B, GPUS["H100"], 1, weight_bytes=2, kv_bytes=2)


def drafts_of_rows(scale, rng):
    """By row and place: how many tokens of its draft are right, and their cells (-1: none).

    Also the mean probability of what was sampled.

    Args:
        scale: of the logits: the larger, the surer is the policy.
        rng: numpy's.
    """
    logits = rng.standard_normal((VOCABULARY, 64)) @ rng.standard_normal((64, VOCABULARY)) / 8
    p = np.exp(scale * (logits - logits.max(1, keepdims=True)))
    p /= p.sum(1, keepdims=True)
    sums, trees = p.cumsum(1), DraftTrees(1 << 28)
    right, cells, sampled = [], [], []
    for prompt in range(PROMPTS):
        first = last = np.full(SIBLINGS + EARLIER, rng.integers(VOCABULARY))
        tokens = np.zeros((len(last), LENGTH), np.int32)
        for t in range(LENGTH):
            drawn = (sums[last] < rng.random((len(last), 1))).sum(1)
            last = tokens[:, t] = drawn.clip(max=VOCABULARY - 1)
        sampled += p[np.stack([first, *tokens.T[:-1]]), tokens.T].ravel().tolist()
        history = list(enumerate(response.tobytes() for response in tokens[SIBLINGS:]))
        rows = [trees.open(b"%d" % prompt, 1000 + i, history) for i in range(SIBLINGS)]
        found = np.full((SIBLINGS, LENGTH, DRAFT), -1)
        same = np.zeros((SIBLINGS, LENGTH), int)
        for t in range(LENGTH):
            for i, row in enumerate(rows):
                draft, of_draft, _ = row.proposal(DRAFT, 0.0)
                followed = tokens[i, t : t + DRAFT]
                drafted = np.frombuffer(draft, np.int32)[: len(followed)]
                equal = drafted == followed[: len(drafted)]
                same[i, t] = np.append(equal, False).argmin()
                found[i, t, : len(of_draft)] = np.frombuffer(of_draft, np.uint8)
            for i, row in enumerate(rows):
                row.extend(tokens[i, t : t + 1].tolist())
        right.append(same)
        cells.append(found)
    return np.concatenate(right), np.concatenate(cells), float(np.mean(sampled))


def tokens_per_second(right, cells, rows, context, chances_of):
    """Tokens per second of a batch, relative to no drafts.

    Args:
        right: see :func:`drafts_of_rows`.
        cells: likewise.
        rows: rows of the batch.
        context: tokens of a row.
        chances_of: the chances by cell, given counts of what followed drafts.
    """
    rng, outcomes = np.random.default_rng(1), np.zeros((len(CHANCES), 2), np.int32)
    row, t = rng.integers(len(right), size=rows), rng.integers(LENGTH - 1, size=rows)
    tokens, seconds, place = 0, 0.0, np.arange(DRAFT)
    for _ in range(STEPS):
        of_row, good = cells[row, t], right[row, t]
        survival = np.where(of_row >= 0, chances_of(outcomes)[of_row], 0).cumprod(1)
        best = -np.sort(-survival.ravel())
        costs = COSTS.seconds(rows, np.arange(len(best) + 1) / rows, context)
        budget = int(((rows + np.append(0, best.cumsum())) / costs).argmax())
        verified = (survival >= best[budget - 1]).sum(1) if budget else np.zeros(rows, int)
        yielded = np.minimum(1 + np.minimum(good, verified), LENGTH - t)
        # As kernels.append counts: what followed, up to the first wrong token.
        tried = (of_row >= 0) & (place < yielded[:, None]) & (place <= good[:, None])
        np.add.at(outcomes, (of_row[tried], 0), 1)
        np.add.at(outcomes, (of_row[tried & (place < good[:, None])], 1), 1)
        tokens += int(yielded.sum())
        seconds += float(COSTS.seconds(rows, verified.sum() / rows, context))
        t = t + yielded
        ended = t >= LENGTH
        row[ended], t[ended] = rng.integers(len(right), size=int(ended.sum())), 0
    return tokens / seconds / (rows / float(COSTS.seconds(rows, 0, context)))


@pytest.mark.parametrize(("scale", "mean_p"), [(11.0, 0.69), (2.0, 0.03)])
def test_what_is_learned_pays(scale, mean_p):
    """Nearly what the frequencies of all of these drafts would bring, and more than the table."""
    right, cells, p = drafts_of_rows(scale, np.random.default_rng(0))
    assert p == pytest.approx(mean_p, abs=0.005)
    place = np.arange(DRAFT)
    tried = (cells >= 0) & (place <= right[:, :, None])
    all_tried = np.bincount(cells[tried], minlength=len(CHANCES))
    all_right = np.bincount(cells[tried & (place < right[:, :, None])], minlength=len(CHANCES))
    ideal = (all_right + CHANCES) / (all_tried + 1)
    for rows, context in ((64, 192), (64, 3000), (256, 3000)):
        of_batch = (right, cells, rows, context)
        static = tokens_per_second(*of_batch, lambda outcomes: CHANCES)
        best = tokens_per_second(*of_batch, lambda outcomes: ideal)
        real = tokens_per_second(*of_batch, lambda outcomes: learned(CHANCES, outcomes))
        print(
            f"{rows} rows of {context}: {static:.2f} static, {best:.2f} ideal, {real:.2f} learned"
        )
        assert real > 0.97 * best and real > 1.02 * static
        assert real > 0.98


def test_bounds():
    """Nothing counted: the table. Counts are halved, not cut off, and chances stay chances."""
    counts = np.zeros((len(CHANCES), 2), np.int32)
    assert (learned(CHANCES, counts) == CHANCES).all()
    counts[3] = MOST_TRIES + 1, MOST_TRIES + 1
    counts[4] = PRIOR_TRIES, 0
    chances = learned(CHANCES, counts)
    assert counts[3].tolist() == [MOST_TRIES // 2] * 2
    assert 0.9 < chances[3] < 1
    assert chances[4] == CHANCES[4] / 2
