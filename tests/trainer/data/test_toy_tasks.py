"""The embedded trainer's tasks: what is asked, what is right, and what a slip is."""

import random

import pytest

from nemo_specrl.trainer.data.toy_tasks import (
    EOS,
    TASKS,
    VOCABULARY,
    Sorting,
    Sum,
    decode,
    encode,
    problems,
    solution,
)


@pytest.mark.parametrize("task", TASKS)
def test_problems_are_distinct_and_always_the_same(task):
    found = problems(task, 300, 5)
    assert len(set(found)) == len({p.question for p in found}) == 300
    assert problems(task, 100, 5) == found[:100]
    assert problems(task, 100, 6) != found[:100]


@pytest.mark.parametrize("task", TASKS)
def test_worked_solutions_are_rewarded_and_slips_are_not(task):
    rng = random.Random(0)
    slipped = 0
    for problem in problems(task, 200, 1):
        assert problem.reward([*encode(solution(problem)), EOS]) == 1.0
        wrong = solution(problem, rng, error_rate=1.0)
        earned = problem.reward([*encode(wrong), EOS])
        assert earned == float(wrong.rpartition("#")[2] == problem.answer)
        slipped += earned == 0.0
        assert max(problem.prompt) < len(VOCABULARY)
    assert slipped > 150


def test_a_sum_and_a_sorting():
    problem = Sum((23, 45, -17))
    assert problem.question == "23+45-17=?"
    assert solution(problem) == "23+45=68;68-17=51;#51"
    problem = Sorting("cabm")
    assert problem.question == "cabm=?"
    assert solution(problem) == "c;ac;abc;abcm;#abcm"


@pytest.mark.parametrize(
    ("text", "ended", "earned"),
    [
        ("#51", True, 1.0),
        ("#50", True, 0.0),
        ("#50#51", True, 1.0),
        ("#51#", True, 0.0),
        ("51", True, 0.0),
        ("#51", False, 0.0),
        ("#051", True, 0.0),
    ],
)
def test_only_an_ended_response_with_the_answer_behind_the_last_mark_is_right(text, ended, earned):
    assert Sum((23, 45, -17)).reward(encode(text) + [EOS] * ended) == earned


def test_characters_and_tokens():
    assert decode([1, *encode("a+1"), EOS, 99]) == "a+1"
    with pytest.raises(KeyError):
        encode("z")
    assert Sum((23, 45, -17)).reward([]) == 0.0
