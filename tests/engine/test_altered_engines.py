"""Engines with a real logits processor or LoRA adapters, synchronous and asynchronous."""

import asyncio
import math

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessor

from nemo_specrl import SpecRLConfig, SpeculativeLLM
from nemo_specrl.engine.async_engine import AsyncSpeculativeLLM
from nemo_specrl.engine.drafters.method import engine_options
from nemo_specrl.engine.outputs import rollout_info
from nemo_specrl.errors import ConfigError
from tests.conftest import DictCache, make_async_engine, make_engine
from tests.engine.test_async_engine import ClaimingCache
from tests.engine.test_policy_version import write_adapter
from tests.support.engines import LOSSLESS, PROMPT, needs_drafters, sampling

FORBIDDEN = 5
FAITHFUL = SpecRLConfig(enabled=True, preset="faithful", fresh_fraction=0.0)
ROUNDS = SpecRLConfig(enabled=True, preset="lossless", tree={"method": "rounds"})
OFF = SpecRLConfig(enabled=False)
REFUSED = r"^logits_processors = .*Forbidding: the engine samples from what they make of .*; leave"


class Forbidding(LogitsProcessor):
    """Lets no request sample FORBIDDEN."""

    def __init__(self, vllm_config, device, is_pin_memory):
        pass

    def apply(self, logits):
        logits[:, FORBIDDEN] = -math.inf
        return logits

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        pass


@pytest.fixture(scope="session")
def forbidding_engine(random_model):
    return make_engine(random_model, logits_processors=[Forbidding], max_num_seqs=16)


@pytest.fixture(scope="module")
def forbidding_async(random_model, loop):
    llm = make_async_engine(random_model, loop, max_num_seqs=16, logits_processors=[Forbidding])
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def lora_async(random_model, loop):
    options = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, "max_num_seqs": 16}
    llm = make_async_engine(random_model, loop, **options, **engine_options(LOSSLESS))
    yield llm
    llm.shutdown()


PARAMS = [sampling(40, seed=i, ignore_eos=True) for i in range(8)]


def test_a_logits_processor_at_work_is_refused(forbidding_engine):
    for config in (FAITHFUL, ROUNDS):
        with pytest.raises(ConfigError, match=REFUSED):
            SpeculativeLLM(forbidding_engine, DictCache(), config)
    made = SpeculativeLLM(forbidding_engine, DictCache(), OFF)
    outputs = made.generate([PROMPT] * 8, PARAMS, use_tqdm=False)
    tokens = [token for output in outputs for token in output.outputs[0].token_ids]
    assert len(tokens) == 320 and FORBIDDEN not in tokens  # 10 of them without it


async def rows(made, params, **options):
    async def one(i):
        stream = made.generate({"prompt_token_ids": PROMPT}, params[i], f"row {i}", **options)
        return [output async for output in stream][-1].outputs[0]

    return await asyncio.gather(*map(one, range(len(params))))


def test_a_logits_processor_at_work_is_refused_by_the_asynchronous_class(forbidding_async, loop):
    for config in (FAITHFUL, ROUNDS):
        with pytest.raises(ConfigError, match=REFUSED):
            AsyncSpeculativeLLM(forbidding_async, ClaimingCache(), config)
    made = AsyncSpeculativeLLM(forbidding_async, ClaimingCache(), OFF)
    completions = loop.run_until_complete(rows(made, PARAMS))
    tokens = [token for completion in completions for token in completion.token_ids]
    assert len(tokens) == 320 and FORBIDDEN not in tokens


@needs_drafters
def test_one_adapter_for_each_version_of_an_asynchronous_engine(lora_async, loop, tmp_path):
    """Two adapters; rows of the second draft from the first one's rollouts."""
    from vllm.lora.request import LoRARequest

    first, second = (
        LoRARequest(name, i, write_adapter(tmp_path / name, i)) for i, name in ((1, "a"), (2, "b"))
    )
    made = AsyncSpeculativeLLM(lora_async, ClaimingCache(), LOSSLESS)
    params = [sampling(12, seed=i, ignore_eos=True) for i in range(4)]

    async def scored(tokens):
        """Log-probs of a response under the second adapter, by one prefill."""
        prompt = {"prompt_token_ids": [*PROMPT, *tokens]}
        asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        stream = lora_async.generate(prompt, asked, f"score {tokens}", lora_request=second)
        positions = [output async for output in stream][-1].prompt_logprobs[len(PROMPT) :]
        return [p[t].logprob for t, p in zip(tokens, positions, strict=True)]

    async def run():
        await rows(made, params, lora_request=first)
        for other in (second, None):
            with pytest.raises(ConfigError, match=r"version 0 has generated with 'a' .*; raise"):
                await rows(made, params[:1], lora_request=other)
        await made.set_policy_version(1)
        completions = await rows(made, params, lora_request=second)
        return completions, [await scored(list(c.token_ids)) for c in completions]

    completions, expected = loop.run_until_complete(run())
    assert len(made.cache.all()) == 4
    for completion, values in zip(completions, expected, strict=True):
        reported = [next(iter(p.values())).logprob for p in completion.logprobs]
        assert np.abs(np.array(reported) - values).max() < 2e-3
        assert rollout_info(completion).rollout.policy_version == 1
