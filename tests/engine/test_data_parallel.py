"""A data-parallel group of two engines of a mixture of experts, each in a process of its own.

Each engine has a part of each expert, so that a step of one without the other would wait until the
test's time is up. (With two of the four experts each, vLLM's CPU kernel of experts crashes.)
"""

import pytest

from tests.conftest import save_random_model
from tests.support.engines import needs_drafters, needs_free_workers
from tests.support.group_engine import LONG, SHORT, run_group

pytestmark = [pytest.mark.timeout(600), needs_free_workers]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    from transformers import Qwen3MoeConfig

    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    folder = tmp_path_factory.mktemp("mixture")
    return save_random_model(folder, Qwen3MoeConfig, norm_topk_prob=True, **sizes)


@pytest.fixture(scope="module")
def exact(mixture):
    """Log-probs of a row's tokens by the model alone, in one process."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32).eval()

    def of(prompt, tokens):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0].float()
        logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        return logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()

    return of


@pytest.fixture(scope="module")
def reuse(mixture, tmp_path_factory):
    return run_group(mixture, tmp_path_factory.mktemp("reuse"), "reuse")


def check(noted, name, exact):
    """Both engines have asked equally often, and all log-probs are the model's."""
    first, second = (one[name] for one in noted)
    assert first.error == second.error == ""
    assert first.asked == second.asked
    for prompt, tokens, given in first.rows + second.rows:
        assert given == pytest.approx(exact(prompt, tokens), abs=1e-3)
    return first, second


def test_unchanged_weights_accept_all_of_a_draft(reuse, exact):
    check(reuse, "first", exact)
    again = check(reuse, "second", exact)
    for epoch, before in zip(again, (noted["first"] for noted in reuse), strict=True):
        assert [row[:2] for row in epoch.rows] == [row[:2] for row in before.rows]
        assert epoch.metrics["spec_rl/draft_coverage"] == 1
        assert epoch.metrics["spec_rl/accepted_fraction"] == 1
    assert [len(epoch.rows) for epoch in again] == [2, 1]
    assert again[0].asked < reuse[0]["first"].asked  # which is what it is for


@pytest.mark.parametrize("name", ["no rows", "plain", "noise", "rounds, first", "rounds, second"])
def test_an_engine_without_rows_runs_empty_batches(reuse, exact, name):
    first, second = check(reuse, name, exact)
    assert [len(tokens) for _, tokens, _ in first.rows] == [LONG, LONG + 1]
    assert len(second.rows) == (0 if name in ("no rows", "noise") else 1)
    if name == "noise":
        assert ["spec_rl/noise_prefix_tokens" in one.metrics for one in (first, second)] == [1, 0]


def test_an_engine_that_ends_early_goes_along(reuse, exact):
    first, second = check(reuse, "early end", exact)
    assert len(first.rows[0][1]) == SHORT <= len(first.rows[1][1]) < LONG
    assert len(second.rows[0][1]) == LONG


def test_conversations_without_drafts_go_along(reuse):
    first, second = (noted["turns"] for noted in reuse)
    assert first.error == second.error == ""
    assert first.asked == second.asked
    assert [len(one.rows[0][1]) for one in (first, second)] == [7, 3]  # turns and answers


def test_a_failed_call_of_one_engine_ends_those_of_all(reuse):
    first, second = (noted["failed"] for noted in reuse)
    assert second.error.startswith("ConfigError: prompts[0]")
    assert first.error.startswith("EngineError: another engine of the data-") and not first.rows
    for noted in reuse:
        assert noted["after it"].error.startswith("EngineError: this engine has left its data-par")


@needs_drafters
def test_lossless_drafts(mixture, exact, tmp_path):
    check_drafts(run_group(mixture, tmp_path, "proposer"), exact)


def check_drafts(noted, exact):
    """Versions of a group that drafts inside its engines; engine 1 has no rows in the second."""
    versions = [check(noted, f"version {version}", exact) for version in range(3)]
    assert [len(second.rows) for _, second in versions] == [1, 0, 1]
    for first, second in versions:
        assert first.metrics["errors"] == second.metrics["errors"] == 0
    assert all(first.metrics["spec_rl/tree_drafted_tokens"] > 0 for first, _ in versions[1:])
    assert any(first.metrics["spec_rl/tree_accepted_fraction"] > 0 for first, _ in versions)
