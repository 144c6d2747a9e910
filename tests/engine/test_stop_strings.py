"""Stop strings in the draft, in the continuation and across the seam between them."""

import numpy as np
import pytest

from nemo_specrl import Finish
from nemo_specrl.trainer.data.toy_tasks import EOS, encode
from tests.conftest import DictCache
from tests.support.engines import NEVER, STRICT, SURE, draft, generate, only, sampling


@pytest.mark.parametrize("include", [True, False])
def test_a_stop_string_across_the_seam(speculative, include):
    # The draft is accepted up to "...3"; any printable token after it completes a stop string.
    stops = ["3" + c for c in "0123456789+-=;#?"]
    tokens, old = encode("12+34"), np.array([SURE] * 4 + [NEVER], dtype=np.float32)
    for seed in range(6):
        made = speculative(DictCache([draft(tokens, old)]), version=1, lenience=STRICT)
        params = sampling(
            seed=seed, stop=stops, include_stop_str_in_output=include, ignore_eos=True
        )
        completion = only(generate(made, params=params))
        assert completion.finish_reason == "stop"
        assert completion.stop_reason in stops
        assert completion.text == ("12+" + completion.stop_reason if include else "12+")
        assert list(completion.token_ids)[:4] == tokens[:4]
        # Tokens without text may come in between; the last token completes the stop string.
        assert encode(completion.stop_reason[-1])[0] == completion.token_ids[-1]
        assert len(completion.logprobs) == len(completion.token_ids)
        assert made.cache.all()[0].finish is Finish.STOP_STRING


def test_a_stop_string_in_the_continuation_alone(speculative):
    """A seeded continuation, with and without a stop string."""
    tokens, old = encode("12+34"), np.array([SURE] * 3 + [NEVER] * 2, dtype=np.float32)

    def run(**options):
        made = speculative(DictCache([draft(tokens, old)]), version=1, lenience=STRICT)
        params = sampling(max_tokens=60, ignore_eos=True, seed=5, **options)
        return only(generate(made, params=params))

    free = run()
    stop = free.text[10:12]
    assert len(stop) == 2
    held = run(stop=[stop], include_stop_str_in_output=True)
    assert held.text == free.text[: free.text.index(stop, 2) + 2]
    assert list(held.token_ids) == list(free.token_ids)[: len(held.token_ids)]


def test_a_stop_string_within_the_draft_ends_it(speculative):
    made = speculative(DictCache([draft([*encode("12+34=46;#46"), EOS])]), version=1)
    completion = only(generate(made, params=sampling(stop=["=4"])))
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "=4")
    assert completion.text == "12+34"
    assert list(completion.token_ids) == encode("12+34=4")
    assert made.metrics.decoded_tokens == 0
