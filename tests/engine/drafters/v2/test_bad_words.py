"""Bad words of several tokens beside drafts, in the kernel of vLLM's V2 sampler."""

import itertools

import pytest
import torch

PROMPT, SAID, DRAFT = [1, 2], [5, 6], [7, 8, 9]
VOCABULARY = 16
NONE = frozenset()
CASES = {
    "of one token": ([4], [{4}, {4}, {4}, {4}]),
    "begun by what was said": ([5, 6, 4], [{4}, NONE, NONE, NONE]),
    "begun by the last token said, and a draft": ([6, 7, 4], [NONE, {4}, NONE, NONE]),
    "begun by drafts": ([7, 8, 4], [NONE, NONE, {4}, NONE]),
    "begun by the last drafts": ([8, 9, 4], [NONE, NONE, NONE, {4}]),
    "drafted": ([7, 8, 9], [NONE, NONE, {9}, NONE]),
    "begun by the prompt": ([2, 5, 6], [NONE, NONE, NONE, NONE]),
}
"""Words, and the tokens that each position of the step must not yield."""


@pytest.mark.parametrize("case", CASES)
def test_drafts_are_read_where_they_are(case):
    """As a step has them: the last token that was said, and three drafts behind it; two rows."""
    from vllm.v1.worker.gpu.sample import bad_words

    from nemo_specrl.engine.vllm.v2_bad_words import patch_bad_words
    from tests.support.v2_drafting import DEVICE

    patch_bad_words()
    word, forbidden = CASES[case]
    rows, step = 2, [SAID[-1], *DRAFT]

    def array(values, dtype=torch.int32):
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    logits = torch.zeros(rows * len(step), VOCABULARY, device=DEVICE)
    bad_words.apply_bad_words(
        logits,
        array([row for row in range(rows) for _ in step]),
        array([word] * rows),
        array([[0, len(word)]] * rows),
        array([1] * rows),
        array([PROMPT + SAID + [0] * len(DRAFT)] * rows),
        array([len(PROMPT)] * rows),
        array([len(PROMPT + SAID)] * rows),
        array(step * rows),
        array([*range(len(step))] * rows),
        1,
    )
    for position, expected in zip(logits, itertools.cycle(forbidden), strict=False):
        assert set(torch.isinf(position).nonzero().flatten().tolist()) == expected
