"""Rewards of responses that are text."""

from __future__ import annotations

import logging

import pytest

from nemo_specrl.trainer.data.rewards import WARNINGS, Scorer, build_reward


@pytest.mark.parametrize(
    ("name", "response", "answer", "earned"),
    [
        ("exact", "I think\n 42 ", "42", 1),
        ("exact", "42.", "42", 0),
        ("exact", "<answer> 42 </answer> or so", "42", 1),
        ("exact", r"so \boxed{\frac{1}{2}}", r"\frac{1}{2}", 1),
        ("exact", "because\n#### 7", "7", 1),
        ("exact", "", "7", 0),
        ("numeric", "It is $1,234.50.", "1234.5", 1),
        ("numeric", "first 3, then -4", "-4", 1),
        ("numeric", "none", "4", 0),
        ("numeric", "<answer>5</answer> 6", "5", 1),
        ("numeric", "4", "four", 0),
        ("numeric", "0.00001", "1e-05", 1),
        ("numeric", "-5", "1e-05", 0),
        ("numeric", "16", "1e+16", 0),
        ("numeric", "1E16", "10000000000000000", 1),
        ("numeric", "121932631136585269462", "121932631136585269461", 0),
        ("numeric", "121932631136585269461", "121932631136585269461", 1),
        ("numeric", "0.1000000000000000000001", "0.1", 0),
        ("numeric", "2", "1/2", 0),
        ("numeric", "0.5", "1/2", 1),
        ("numeric", "2", r"\frac{1}{2}", 0),
        ("numeric", r"so -\dfrac{1}{2}", "-2 / 4", 1),
        ("numeric", ".5", "5", 0),
        ("numeric", "\u22125", "5", 0),
        ("numeric", "3,4", "34", 0),
        ("numeric", "12,345", "12345", 1),
        ("numeric", "It is 42.", "42", 1),
        ("numeric", "1/0", "0", 0),
        ("numeric", "1e999999999", "9", 0),
        ("numeric", "9" * 5000, "9", 0),
        ("math", r"\boxed{\frac{2}{4}}", "0.5", 1),
        ("math", r"The answer is $\frac{1}{3}$.", "0.5", 0),
        ("math", "", "1", 0),
    ],
)
def test_a_response_is_scored(name, response, answer, earned):
    assert build_reward(name, None)(response, {"answer": answer}) == earned


def test_a_reward_of_the_user_sees_the_response_and_the_whole_row(tmp_path, monkeypatch):
    (tmp_path / "my_own_reward.py").write_text(
        "def short(response, row):\n    return row['most'] - len(response)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert build_reward("my_own_reward:short", None)("abc", {"answer": "", "most": 10}) == 7


def test_a_reward_that_fails_counts_as_zero_and_names_its_row(caplog):
    class Timeout(BaseException):
        """As math-verify's, which no `except Exception` catches."""

    def reward(response, row):
        if response == "late":
            raise Timeout
        return {"nan": float("nan"), "inf": float("inf"), "text": "x", "good": 1}[response]

    scorer = Scorer("mine", reward)
    with caplog.at_level(logging.WARNING):
        scores = [scorer.score(r, {}, "a.jsonl:7") for r in ("nan", "inf", "text", "late", "?")]
        scores += [scorer.score("nan", {}, "a.jsonl:8"), scorer.score("good", {}, "a.jsonl:9")]
    assert scores == [0.0] * 6 + [1.0]
    assert scorer.failures == 6
    assert len(caplog.records) == WARNINGS
    said = [record.getMessage() for record in caplog.records]
    assert all("mine" in s and "a.jsonl:7" in s and "counted as 0" in s for s in said)
    assert "gave nan" in said[0] and "raised Timeout" in said[3] and "KeyError" in said[4]


def test_an_interrupt_is_no_failed_reward():
    def interrupted(response, row):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Scorer("mine", interrupted).score("", {}, "")
