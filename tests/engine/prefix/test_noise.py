"""How far decoding and prefill of the same weights disagree, measured on a real engine.

Its weights are float32, of which nothing is measured unasked; the tests ask. What is expected of
larger differences is computed from made-up log-probs.
"""

import numpy as np
import pytest

from nemo_specrl import Finish
from nemo_specrl.engine.metrics import EngineMetrics
from nemo_specrl.engine.prefix import verification
from nemo_specrl.engine.prefix.noise import PrefillNoise
from tests.conftest import DictCache
from tests.support.engines import draft, generate, sampling

LOGGED = "prefill and decoding of unchanged weights differ"


def test_a_prefix_ends_where_prefill_gives_its_tokens_less(caplog):
    noise, metrics = PrefillNoise(2, 192), EngineMetrics()
    assert noise.rows_left == PrefillNoise.ROWS
    assert "spec_rl/noise_prefix_tokens" not in metrics.as_dict()
    decoded = np.log(np.float32([0.5, 0.5, 0.5, 0.5]))
    prefilled = np.log(np.float32([0.5, 0.45, 0.9, 0.4]))  # rejected: 0, 0.1, 0, 0.2
    for _ in range(2 * PrefillNoise.ROWS):
        noise.add(prefilled, decoded, metrics)
    assert metrics.as_dict()["spec_rl/noise_prefix_tokens"] == pytest.approx(4 / 0.3, rel=1e-4)
    assert caplog.text.count(LOGGED) == 1 and "13.3 tokens" in caplog.text


def test_in_float32_nothing_is_measured(speculative):
    made = speculative()
    generate(made, rows=4)
    assert made._noise.rows_left == 0 and made.metrics.noise_tokens == 0


def test_the_first_rows_of_an_engine_are_measured(speculative, caplog):
    made = speculative(DictCache())
    made._noise = PrefillNoise(2, 192)
    first = generate(made, rows=6, params=[sampling(seed=i) for i in range(6)])
    assert made.metrics.noise_tokens == sum(len(o.outputs[0].token_ids) for o in first)
    assert made._noise.rows_left == 2 and LOGGED not in caplog.text
    second = generate(made, rows=6, params=[sampling(seed=9 + i) for i in range(6)])
    assert 0 < made.metrics.noise_tokens < sum(len(o.outputs[0].token_ids) for o in second)
    assert made.metrics.as_dict()["spec_rl/noise_prefix_tokens"] > 1e4  # float32 rounds finely
    generate(made, rows=6)
    assert made.metrics.noise_tokens == 0 and caplog.text.count(LOGGED) == 1


def test_drafts_of_the_very_weights_are_measured_as_they_come(speculative):
    """Those that an interrupt has left; they are judged by prefill in any case."""
    cache = DictCache()
    made = speculative(cache)
    made.fingerprint = 7
    generate(made, rows=4, params=[sampling(12, seed=i, ignore_eos=True) for i in range(4)])
    again = speculative(cache, version=1)
    again.fingerprint = 7
    generate(again, rows=4, params=[sampling(20, seed=i, ignore_eos=True) for i in range(4)])
    assert again.metrics.noise_tokens == again.metrics.draft_tokens == 48
    other = speculative(DictCache([draft([5, 6], finish=Finish.PARTIAL)]), version=1)
    other.fingerprint = 8
    generate(other)
    assert other.metrics.draft_tokens == 2 and other.metrics.noise_tokens == 0


@pytest.mark.parametrize("detokenize", [True, False])
def test_verification_detokenizes_nothing(speculative, monkeypatch, detokenize):
    """The texts of accepted tokens are there all the same, where the request wants them."""
    seen = []
    prefill_params = verification._prefill_params

    def watched(logprobs):
        seen.append(prefill_params(logprobs))
        return seen[-1]

    monkeypatch.setattr(verification, "_prefill_params", watched)
    made = speculative(DictCache([draft([5, 6, 7])]), version=1)
    params = sampling(8, detokenize=detokenize, ignore_eos=True, logprobs=2)
    (output,) = generate(made, params=params)
    assert [p.detokenize for p in seen] == [False]
    names = [e.decoded_token for at in output.outputs[0].logprobs for e in at.values()]
    assert len(names) >= 16 and all((name is not None) == detokenize for name in names)
    assert (output.outputs[0].text != "") == detokenize
