"""Steps that end with enough complete groups: what is trained on, and in which order."""

import itertools
import json
import random

import pytest

from nemo_specrl.errors import ConfigError
from nemo_specrl.monitoring.metrics_file import read_metrics
from nemo_specrl.trainer.partial_rollouts import (
    asked_for,
    chosen_of,
    end_of_phase,
    put_off_after,
)
from nemo_specrl.trainer.recipe import Algorithm, load_recipe
from tests.conftest import REPOSITORY
from tests.trainer.test_loop import DEMO, start, train, wait_for_steps

ON = "grpo.partial_rollouts.enabled=true"
PARTIAL = (
    ON,
    "grpo.partial_rollouts.over_provision=1.5",
    "data.num_prompts=16",
    "grpo.max_num_epochs=2",
)


def config(**block):
    return Algorithm(
        num_prompts_per_step=block.pop("needed", 4),
        num_generations_per_prompt=3,
        partial_rollouts={"enabled": True, **block},
    )


@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("factor", [1.1, 1.5, 2.0])
def test_each_prompt_of_an_epoch_is_trained_on_once_and_put_off_at_most_so_often(factor, most):
    """Whichever rows end first."""
    rng = random.Random(most)
    for needed, steps in ((1, 7), (4, 5), (5, 3)):
        algorithm = config(needed=needed, over_provision=factor, max_put_off=most)
        order = rng.sample(range(needed * steps), needed * steps)
        trained, put_off, seen = [], [], 0
        for _ in range(steps):
            asked = asked_for(order, len(trained), put_off, algorithm)
            assert asked[: len(put_off)] == [index for index, _ in put_off]
            assert needed <= len(asked) <= 2 * needed and len(set(asked)) == len(asked)
            reached, ended = end_of_phase(put_off, algorithm), set()
            rows = rng.sample(range(3 * len(asked)), 3 * len(asked))
            while not reached(ended):
                ended.add(rows.pop())
            complete = [{3 * k, 3 * k + 1, 3 * k + 2} <= ended for k in range(len(asked))]
            chosen = chosen_of(complete, needed)
            assert len(chosen) == needed and all(complete[k] for k in chosen)
            trained += [asked[k] for k in chosen]
            put_off = put_off_after(put_off, asked, chosen)
            assert all(times <= most for _, times in put_off)
            assert [t for _, t in put_off] == sorted((t for _, t in put_off), reverse=True)
            seen = max([seen, *(times for _, times in put_off)])
        assert sorted(trained) == sorted(order) and not put_off
        assert seen > 0


def test_the_first_complete_groups_are_taken_not_the_first_to_be_complete():
    assert chosen_of([True, False, True, True], 2) == [0, 2]
    assert chosen_of([True, False, False, False], 2) == [0, 1]  # vLLM has given up the others


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("policy.generation.spec_rl.enabled=false", r"drafted from; set .*enabled: true"),
        ("policy.generation.spec_rl.preset=reuse", r"drafted from; .*with preset: lossless"),
        ("grpo.use_dynamic_sampling=true", r"set use_dynamic_sampling: false"),
    ],
)
def test_what_does_not_go_with_partial_rollouts_is_refused(override, message):
    with pytest.raises(ConfigError, match=rf"^grpo\.partial_rollouts\.enabled = True: .*{message}"):
        load_recipe(REPOSITORY / DEMO, [ON, override])


def test_conversations_are_refused_with_partial_rollouts():
    turns = ("grpo.max_rollout_turns=3", "env.tools=[calculator]")
    data = ("data.dataset_name=reasoning_gym:basic_arithmetic",)
    with pytest.raises(ConfigError, match=r"partial_rollouts.*set max_rollout_turns: 1"):
        load_recipe(REPOSITORY / DEMO, [ON, *turns, *data])


@pytest.mark.parametrize("value", ["1", "2.01", "0.5"])
def test_a_factor_that_asks_for_too_few_or_too_many_is_refused(value):
    key = "grpo.partial_rollouts.over_provision"
    with pytest.raises(ConfigError, match=rf"^{key} = .*: must be"):
        load_recipe(REPOSITORY / DEMO, [f"{key}={value}"])


@pytest.mark.timeout(400)
def test_all_tokens_are_those_of_the_policy_that_is_trained(tmp_path):
    """What was put off is decoded anew, and drafts."""
    train(tmp_path, *PARTIAL, program=("tests.support.trainer.partial_job",))
    batches = [json.loads(line) for line in (tmp_path / "batches.jsonl").read_text().splitlines()]
    assert [b["version"] for b in batches] == list(range(8))
    for batch in batches:
        assert batch["ended"] and batch["apart"] < 1e-3
        assert all(times == 1 for _, times in batch["put_off"])
    for epoch in (batches[:4], batches[4:]):
        assert sorted(p for b in epoch for p in b["prompts"]) == list(range(16))
        assert any(b["put_off"] for b in epoch) and not epoch[-1]["put_off"]
    for before, after in itertools.pairwise(batches):
        again = [index for index, _ in before["put_off"]]
        assert after["prompts"][: len(again)] == again  # they come first, and are not put off again
    steps = read_metrics(tmp_path / "metrics.jsonl")
    assert sum(r["put_off_tokens"] for r in steps) > 0


@pytest.mark.timeout(400)
def test_a_killed_run_goes_on_with_the_prompts_that_were_put_off(tmp_path):
    process = start(tmp_path, *PARTIAL, "checkpointing.save_period=3")
    wait_for_steps(process, tmp_path, 5)
    process.kill()
    process.wait()
    before = read_metrics(tmp_path / "metrics.jsonl")
    survived = max(int(p.name[5:]) for p in tmp_path.glob("step_*"))
    at = tmp_path / f"step_{survived}" / "progress.json"
    kept = json.loads(at.read_text())["put_off"]
    assert len(kept) == before[survived - 1]["put_off_prompts"]
    train(tmp_path, *PARTIAL, "checkpointing.save_period=3")
    after = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in after] == list(range(1, 9))
    assert after[survived]["prompts"][: len(kept)] == [index for index, _ in kept]
    for epoch in range(2):
        prompts = [p for r in after if r["epoch"] == epoch for p in r["prompts"]]
        assert sorted(prompts) == list(range(16))
    assert sum(r["put_off_prompts"] for r in after) > 0
