"""What the tests of both ways of lossless drafting share: rows of one prompt, and exact tests."""

import numpy as np
from vllm import SamplingParams

from nemo_specrl import Finish, Rollout, SpeculativeLLM, prompt_key
from tests.support.engines import PROMPT, VOCABULARY, chi_squared, distribution

KEY = prompt_key(PROMPT)
ERROR_RATE = 1e-4
ROWS = 6000
EOS = 2


def params(max_tokens, **options):
    return SamplingParams(
        **{
            "temperature": 1.0,
            "max_tokens": max_tokens,
            "logprobs": 0,
            "flat_logprobs": True,
            "detokenize": False,
            "ignore_eos": True,
            **options,
        }
    )


def made_with(llm, cache, config, *, version=1, seed=0):
    made = SpeculativeLLM(llm, cache, config, seed=seed)
    made.policy_version = version
    return made


def sample(made, rows, max_tokens, *, first_seed=0, **options):
    outputs = made.generate(
        [PROMPT] * rows,
        [params(max_tokens, **{"seed": first_seed + i, **options}) for i in range(rows)],
        use_tqdm=False,
    )
    return outputs, [list(o.outputs[0].token_ids) for o in outputs]


def rollouts(responses, version=0):
    return [
        Rollout(KEY, i, tokens, [-1.0] * len(tokens), Finish.LENGTH, version)
        for i, tokens in enumerate(responses)
    ]


def check_distribution(llm, tokens):
    """Pairs of first and second token, and the third after the commonest pair, against exact p."""
    counts = np.zeros((VOCABULARY, VOCABULARY))
    np.add.at(counts, (tokens[:, 0], tokens[:, 1]), 1)
    tests = [chi_squared(counts.sum(axis=1), len(tokens) * distribution(llm))]
    common = np.argsort(-counts.sum(axis=1))[:4]
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
        [{"prompt_token_ids": PROMPT}] * 16, [params(3, seed=900 + i) for i in range(16)],
        use_tqdm=False,
    )  # fmt: skip
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
