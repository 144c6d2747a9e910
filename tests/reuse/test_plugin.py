"""Prefix reuse on an engine that drafts from history: one cache, and drafts behind the prefix."""

import contextlib

import numpy as np
import pytest

from nemo_specrl import RolloutStore, prompt_key
from nemo_specrl.cache.local import LocalCache
from nemo_specrl.engine.counts import counts
from nemo_specrl.engine.options import engine_options
from nemo_specrl.engine.refit import refit
from nemo_specrl.monitoring.names import DRAFTED_TOKENS
from nemo_specrl.reuse.llm import PrefixReuse
from nemo_specrl.rollout import vocabulary_hash
from tests.conftest import make_engine, weights_of
from tests.reuse.support import block, sampling
from tests.support.engines import PROMPT

ROWS = 32


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def drafting_engine(random_model, folder):
    options = engine_options(cache_dir=folder, adaptive=False)  # whatever else this machine does
    return make_engine(random_model, max_num_seqs=64, **options)


def test_lossless_drafting_goes_on_behind_the_prefix(drafting_engine, folder, random_model):
    vocabulary = vocabulary_hash(drafting_engine.get_tokenizer().get_vocab())
    with contextlib.closing(RolloutStore(folder, vocabulary=vocabulary)) as store:
        made = PrefixReuse(drafting_engine, block(1.0), LocalCache(store))
        params = [sampling(120, ignore_eos=True, seed=i) for i in range(ROWS)]
        for version, noise in enumerate((0.0, 0.01, 0.02)):
            refit(drafting_engine, weights_of(random_model, noise=noise, seed=3))
            made.policy_version = version
            before = counts(drafting_engine)
            outputs = made.generate([PROMPT] * ROWS, params)
            drafted = counts(drafting_engine)[DRAFTED_TOKENS] - before[DRAFTED_TOKENS]
            accepted = [o.outputs[0].spec_rl.accepted for o in outputs]
            assert made.metrics.drafts == (ROWS if version else 0)
            if version:
                assert drafted > 0 and 0 < sum(accepted) < 120 * ROWS
            # Each response is kept once, with log-probs, although the engine keeps its own.
            kept = store.get([prompt_key(PROMPT)])[prompt_key(PROMPT)]
            made_now = [r for r in kept if r.policy_version == version]
            assert len(made_now) == ROWS and all(r.logprobs is not None for r in made_now)
            assert len(kept) == min(64, ROWS * (version + 1))
            expected = {tuple(o.outputs[0].token_ids) for o in outputs}
            assert {tuple(r.tokens.tolist()) for r in made_now} == expected
            for output in outputs:
                values = output.outputs[0].spec_rl.policy_logprobs
                assert np.isfinite(values).all() and len(values) == 120
