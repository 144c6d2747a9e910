"""Drafts, a cache in a dictionary, and calls."""

import threading
from collections import Counter

import numpy as np
from vllm import SamplingParams

from nemo_specrl import Finish, Rollout, SpecRLConfig, prompt_key
from tests.support.engines import PROMPT

SURE = -60.0  # an old log-prob that makes acceptance certain
NEVER, STRICT = 0.0, 1e-9  # an old log-prob and a lenience that reject (accepted with p < 1e-8)


class DictCache:
    """A cache in a dictionary, of the interface of ``nemo_specrl.cache.HistoryCache``."""

    def __init__(self, rollouts=()):
        self.rollouts = {}
        self.taken = Counter()
        self._lock = threading.Lock()
        self.put(rollouts)

    def put(self, rollouts):
        with self._lock:
            for rollout in rollouts:
                self.rollouts.setdefault(rollout.key, []).append(rollout)
        return len(rollouts)

    def take_drafts(self, wanted, policy_version, timeout):
        with self._lock:
            return {key: self._take(key, policy_version, rows) for key, rows in wanted.items()}

    def _take(self, key, policy_version, rows):
        others = [r for r in self.rollouts.get(key, ()) if r.policy_version != policy_version]
        newest = max((r.policy_version for r in others), default=0)
        drafts = [r for r in others if r.policy_version == newest and r.logprobs is not None]
        begin = self.taken[key, policy_version]
        self.taken[key, policy_version] += len(drafts[begin : begin + rows])
        return drafts[begin : begin + rows]

    def all(self):
        return [r for rollouts in self.rollouts.values() for r in rollouts]

    def of(self, version):
        return [r for r in self.all() if r.policy_version == version]


def block(lenience=1.65, fresh_fraction=0.0, **options):
    reuse = {"lenience": lenience, "fresh_fraction": fresh_fraction, **options}
    return SpecRLConfig(preset="reuse", reuse=reuse)


def sampling(max_tokens=24, **options):
    options = {"seed": 7, "logprobs": 0, **options}
    return SamplingParams(temperature=1.0, max_tokens=max_tokens, **options)


def draft(tokens, logprobs=SURE, *, finish=Finish.STOP, version=0, prompt=PROMPT):
    logprobs = np.broadcast_to(np.float32(logprobs), (len(tokens),))
    return Rollout(prompt_key(prompt), tokens, finish, version, logprobs)


def generate(made, prompt=PROMPT, params=None, rows=1):
    params = sampling() if params is None else params
    return made.generate([{"prompt_token_ids": list(prompt)}] * rows, params)


def only(outputs):
    (output,) = outputs
    (completion,) = output.outputs
    return completion
