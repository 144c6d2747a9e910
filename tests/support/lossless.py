"""What the tests of lossless drafting share: rows of one prompt, and exact tests."""

import numpy as np

from nemo_specrl import Finish, Rollout, prompt_key
from tests.support.engines import PROMPT, VOCABULARY, chi_squared, distribution, params

KEY = prompt_key(PROMPT)
ERROR_RATE = 1e-4
ROWS = 4000


def rollouts(responses):
    return [Rollout(KEY, tokens, Finish.LENGTH) for tokens in responses]


def check_distribution(llm, tokens):
    """Pairs of first and second token, and the third after the commonest pair, against exact p."""
    counts = np.zeros((VOCABULARY, VOCABULARY))
    np.add.at(counts, (tokens[:, 0], tokens[:, 1]), 1)
    tests = [chi_squared(counts.sum(axis=1), len(tokens) * distribution(llm))]
    common = np.argsort(-counts.sum(axis=1))[:2]
    for token in common.tolist():
        p = distribution(llm, [token])
        tests.append(chi_squared(counts[token], counts[token].sum() * p))
    first, second = np.unravel_index(counts.argmax(), counts.shape)
    behind = tokens[(tokens[:, 0] == first) & (tokens[:, 1] == second), 2]
    p = distribution(llm, [int(first), int(second)])
    tests.append(chi_squared(np.bincount(behind, minlength=VOCABULARY), len(behind) * p))
    assert min(tests) > ERROR_RATE / len(tests)


def bent(rejection_sample):
    """A rejection sampler of vLLM's V1 runner that accepts the first draft token it should reject.

    A control for tests of distributions: a test that could not tell would pass with it, too.
    """

    def bent_sample(draft_token_ids, num_draft_tokens, *args, **kwargs):
        tokens = rejection_sample(draft_token_ids, num_draft_tokens, *args, **kwargs)
        begin = 0
        for row, drafted in zip(tokens, num_draft_tokens, strict=True):
            last = int((row >= 0).sum()) - 1
            if last < drafted:
                row[last] = draft_token_ids[begin + last]
            begin += drafted
        return tokens

    return bent_sample


def good_drafts(llm):
    """Responses of these very weights, plainly sampled."""
    outputs = llm.generate(
        [{"prompt_token_ids": PROMPT}] * 16,
        [params(3, seed=900 + i) for i in range(16)],
        use_tqdm=False,
    )
    return [list(o.outputs[0].token_ids) for o in outputs]


def unlikely(llm):
    """Responses that begin with the three least likely tokens."""
    worst = np.argsort(distribution(llm))[:3].tolist()
    return [[token, *worst] for token in worst]


def likely(llm):
    """The likeliest response, several times: a row has a draft from its first token on."""
    tokens = []
    for _ in range(6):
        tokens.append(int(distribution(llm, tokens).argmax()))
    return [tokens] * 8


DRAFTS_OF = {
    "siblings alone": lambda llm: [],
    "good": good_drafts,
    "unlikely": unlikely,
    "of other weights": good_drafts,
}
