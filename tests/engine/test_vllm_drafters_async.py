"""Prefix reuse beside n-grams on a real AsyncLLM, whose drafter lies in another process."""

import asyncio
import os
import sys
import tomllib

import numpy as np
import pytest

from nemo_specrl import Finish, Rollout, SpecRLConfig, prompt_key
from nemo_specrl.engine.async_engine import AsyncSpeculativeLLM
from nemo_specrl.engine.outputs import rollout_info
from nemo_specrl.errors import ConfigError
from tests.conftest import REPOSITORY, make_async_engine
from tests.engine.test_async_engine import ClaimingCache
from tests.support.engines import PROMPT, VOCABULARY, chi_squared, needs_drafters, sampling

pytestmark = needs_drafters
START = [*PROMPT, *range(3, VOCABULARY), *range(VOCABULARY - 1, 2, -1)]
KEY = prompt_key(START)
ROWS = 800
ERROR_RATE = 1e-4
CONFIG = SpecRLConfig(enabled=True, preset="faithful", fresh_fraction=0.0)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Files that pip installs beside the package: entry points of this tree's pyproject.toml."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    folder = tmp_path_factory.mktemp("site")
    info = folder / "nemo_specrl-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(folder))
        paths = [str(folder), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
        patched.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        yield folder


@pytest.fixture(scope="module")
def async_llm(random_model, installed, loop):
    llm = make_async_engine(
        random_model,
        loop,
        max_num_seqs=64,
        max_num_batched_tokens=64 * 192,
        max_logprobs=VOCABULARY,
        speculative_config={
            "method": "ngram",
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 2,
            "num_speculative_tokens": 3,
        },
    )
    sys.modules.pop("llvmlite.binding.ffi", None)  # as in test_drafters
    yield llm
    llm.shutdown()


def replaced_in(worker):
    """To be run in the worker: which function its rejection sampler calls."""
    from vllm.v1.sample import rejection_sampler

    return rejection_sampler.expand_batch_to_tokens.__module__


def test_the_other_process_fixes_its_rejection_sampler(async_llm, loop):
    (where,) = loop.run_until_complete(async_llm.collective_rpc(replaced_in))
    assert where == "nemo_specrl.engine.vllm.cpu_sampler"


@pytest.mark.parametrize("allowed", ["another_plugin", ""])
def test_where_the_package_is_no_plugin_it_is_refused_in_one_line(async_llm, monkeypatch, allowed):
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    with pytest.raises(ConfigError, match="installed by pip") as raised:
        AsyncSpeculativeLLM(async_llm, ClaimingCache(), CONFIG)
    line = str(raised.value)
    assert "speculative_config" in line and "VLLM_PLUGINS" in line and "\n" not in line
    monkeypatch.setenv("VLLM_PLUGINS", "another_plugin,nemo_specrl")
    assert AsyncSpeculativeLLM(async_llm, ClaimingCache(), CONFIG)
    # With speculation off, the engine is the user's alone.
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    assert AsyncSpeculativeLLM(async_llm, ClaimingCache(), SpecRLConfig(enabled=False))


def test_fresh_rows_and_continuations_have_the_policys_distribution(async_llm, loop):
    """Half of the rows behind an accepted prefix of one token, half without a draft."""

    async def next_tokens(prefix):
        params = sampling(1, logprobs=VOCABULARY, flat_logprobs=True, detokenize=False)
        prompt = {"prompt_token_ids": [*START, *prefix]}
        async for output in async_llm.generate(prompt, params, f"exact-{prefix}"):
            logprobs = output.outputs[0].logprobs
        p = np.zeros(VOCABULARY)
        p[np.asarray(logprobs.token_ids)] = np.exp(logprobs.logprobs)
        return p / p.sum()

    exact = loop.run_until_complete(next_tokens([]))
    first = int(exact.argmax())
    old = np.float32([np.log(exact[first]) - 1e-3])  # accepted for certain
    cache = ClaimingCache([Rollout(KEY, i, [first], old, Finish.PARTIAL, 0) for i in range(ROWS)])
    made = AsyncSpeculativeLLM(async_llm, cache, CONFIG, policy_version=1)

    async def row(i):
        params = sampling(4, seed=i, ignore_eos=True, flat_logprobs=True, detokenize=False)
        prompt = {"prompt_token_ids": START}
        outputs = [o async for o in made.generate(prompt, params, f"row-{i}")]
        return outputs[-1].outputs[0]

    async def rows():
        return await asyncio.gather(*(row(i) for i in range(2 * ROWS)))

    completions = loop.run_until_complete(rows())
    assert made.metrics.cache_errors == 0
    reused = np.array([c.token_ids for c in completions if rollout_info(c).accepted == 1])
    fresh = np.array([c.token_ids for c in completions if rollout_info(c).fresh])
    assert len(reused) == len(fresh) == ROWS and (reused[:, 0] == first).all()

    tests = []

    def check(tokens, prefix):
        p = loop.run_until_complete(next_tokens(prefix))
        counts = np.bincount(tokens, minlength=VOCABULARY).astype(float)
        tests.append(chi_squared(counts, len(tokens) * p))
        return int(counts.argmax())

    common = check(fresh[:, 0], [])
    check(fresh[fresh[:, 0] == common, 1], [common])
    common = check(reused[:, 1], [first])
    check(reused[reused[:, 1] == common, 2], [first, common])
    assert min(tests) > ERROR_RATE / len(tests)
