"""Prompts, drafts and calls that the engine's tests share."""

import numpy as np
from vllm import SamplingParams

from nemo_specrl import Finish, Rollout, prompt_key
from nemo_specrl.trainer.task import encode

PROMPT = [1, *encode("12+34=?")]
SURE = -60.0  # an old log-prob that makes acceptance certain
NEVER, STRICT = 0.0, 1e-9  # an old log-prob and a lenience that reject (accepted with p < 1e-8)


def sampling(max_tokens=24, **options):
    options = {"seed": 7, "logprobs": 0, **options}
    return SamplingParams(temperature=1.0, max_tokens=max_tokens, **options)


def draft(tokens, logprobs=SURE, *, sample_index=0, finish=Finish.STOP, version=0, prompt=PROMPT):
    logprobs = np.broadcast_to(np.float32(logprobs), (len(tokens),))
    return Rollout(prompt_key(prompt), sample_index, tokens, logprobs, finish, version)


def generate(made, prompt=PROMPT, params=None, rows=1, **options):
    params = sampling() if params is None else params
    prompts = [{"prompt_token_ids": list(prompt)} for _ in range(rows)]
    return made.generate(prompts, params, use_tqdm=False, **options)


def only(outputs):
    (output,) = outputs
    (completion,) = output.outputs
    return completion
