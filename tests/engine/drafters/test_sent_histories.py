"""Histories sent ahead, on their way to the workers; ``v2/test_async`` has them arrive."""

import json

import numpy as np
import pytest

from nemo_specrl import send_histories
from nemo_specrl.engine.drafters.sent_histories import received
from nemo_specrl.errors import ConfigError

PROMPT, RESPONSES = [1, 5, 9], [[4, 4, 2], [7], []]


class Workers:
    """What an engine's workers would be sent, by method."""

    def collective_rpc(self, method, timeout=None, args=()):
        self.method, self.args = method, args
        return ["answer"]


@pytest.mark.parametrize("of", [list, np.array, lambda tokens: np.array(tokens, np.int64)])
def test_workers_take_what_is_sent(of):
    workers = Workers()
    histories = [(of(PROMPT), [of(tokens) if tokens else [] for tokens in RESPONSES])]
    assert send_histories(workers, histories) == ["answer"]
    assert workers.method == "spec_rl_add_histories"
    ((tokens, history),) = received(*workers.args, vocabulary=10)
    assert tokens.tolist() == PROMPT
    assert [np.frombuffer(data, np.int32).tolist() for _, data in history] == RESPONSES
    # By HTTP they come as lists; a response is known by its tokens.
    ((tokens, same),) = received(json.loads(json.dumps([[PROMPT, RESPONSES]])), vocabulary=10)
    assert tokens.tolist() == PROMPT and same == history
    assert len({identity for identity, _ in history}) == 3
    assert all(0 <= identity < 2**63 for identity, _ in history)


@pytest.mark.parametrize(
    ("histories", "line"),
    [
        ([PROMPT], "histories: must be pairs of a prompt and its responses"),
        ([(PROMPT, 5)], "histories: must be pairs of a prompt and its responses"),
        ([("1 5 9", [])], "histories[0], prompt: must be a sequence of token ids"),
        ([(PROMPT, []), (PROMPT, [[1], [0.5]])], "histories[1], response 1: must be a sequence"),
        ([(PROMPT, [[[1]]])], "histories[0], response 0: must be a sequence of token ids"),
        ([(PROMPT, [[1, 2**31]])], "histories[0], response 0: must be a sequence of token ids"),
        ([(PROMPT, [b"123"])], "histories[0], response 0: must be a sequence of token ids"),
        ([(PROMPT, [[True]])], "histories[0], response 0: must be a sequence of token ids"),
    ],
)
def test_what_is_no_history_is_refused_in_one_line(histories, line):
    for take in (lambda: send_histories(Workers(), histories), lambda: received(histories, 10)):
        with pytest.raises(ConfigError) as refused:
            take()
        assert str(refused.value).startswith(line) and "\n" not in str(refused.value)


@pytest.mark.parametrize("prompt", [[], [10], [-1, 2]])
def test_workers_refuse_prompts_that_no_request_can_have(prompt):
    with pytest.raises(ConfigError, match=r"histories\[1\], prompt: must have token ids of 0 to 9"):
        received([(PROMPT, []), (prompt, [[1]])], 10)
    with pytest.raises(ConfigError, match="histories: must be a list of pairs"):
        received({"prompt": PROMPT}, 10)
