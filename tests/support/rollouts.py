"""The responses that tests put into stores, caches and drafts."""

import hashlib

import numpy as np

from nemo_specrl.rollout import Finish, Rollout, prompt_key

STEP = 2.0**-10  # a record keeps log-probs that are multiples of it exactly


def rollout(prompt, version=0, index=0, n=20, *, salt=0, scored=True, **fields):
    """Make the response that the arguments determine: equal arguments give equal responses.

    Its log-probs are such that a record keeps them exactly.

    Args:
        prompt: the prompt's number, its tokens, or its 16-byte key.
        version: policy version.
        index: which of the prompt's responses of this version.
        n: number of tokens.
        salt: makes another response of the same prompt, version, index and length.
        scored: whether it has log-probs.
        **fields: fields of ``Rollout`` to set.
    """
    if not isinstance(prompt, bytes):
        prompt = prompt_key([prompt] if isinstance(prompt, int) else prompt)
    name = f"{prompt.hex()} {version} {index} {n} {salt}".encode()
    seed = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")
    rng = np.random.default_rng(seed)
    made = {
        "key": prompt,
        "tokens": rng.integers(0, 60000, n),
        "finish": Finish.STOP,
        "policy_version": version,
        "logprobs": rng.integers(-5000, 1, n) * STEP if scored else None,
        "identity": seed % (2**63 - 1) + 1,
    }
    return Rollout(**(made | fields))
