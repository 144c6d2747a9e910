"""The rollouts that tests put into stores, caches and drafts."""

import numpy as np

from nemo_specrl import Finish, Rollout, prompt_key

STEP = 2.0**-10  # a record keeps log-probs that are multiples of it exactly


def rollout(prompt, version=0, sample_index=0, n=20, *, salt=0, **fields):
    """Make the rollout that the arguments determine: equal arguments give equal rollouts.

    Its log-probs are such that a record keeps them exactly, and those at birth differ from them.

    Args:
        prompt: the prompt's number, its tokens, or its 16-byte key.
        version: policy version.
        sample_index: of the rollout.
        n: number of tokens; a record of them takes about ``6 * n`` bytes.
        salt: makes another rollout of the same prompt, version, sample index and length.
        **fields: fields of ``Rollout`` to set; ``birth_logprobs=None`` for those of a rollout
            that was born now.
    """
    if not isinstance(prompt, bytes):
        prompt = prompt_key([prompt] if isinstance(prompt, int) else prompt)
    seed = [int.from_bytes(prompt, "big"), version, sample_index, n, salt]
    rng = np.random.default_rng(seed)
    made = {
        "key": prompt,
        "sample_index": sample_index,
        "tokens": rng.integers(0, 60000, n),
        "logprobs": rng.integers(-5000, 1, n) * STEP,
        "finish": Finish.STOP,
        "policy_version": version,
        "birth_logprobs": rng.integers(-5000, 1, n) * STEP,
    }
    return Rollout(**(made | fields))
