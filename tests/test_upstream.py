"""The patches that are ready to be sent to vLLM: each applies, and does what its text says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
import vllm
from scipy import stats
from vllm.platforms import current_platform

from tests.support.upstream import (
    SAMPLES,
    TEMPERATURES,
    UPSTREAM,
    apply,
    found,
    patched_copy,
)

pytestmark = pytest.mark.timeout(400)  # so that it begins early: see tests/conftest.py
VLLM = Path(importlib.util.find_spec("vllm").submodule_search_locations[0]).parent
FALSE_ALARMS = 1e-6
"""Chance that a right sampler fails a test, by temperature."""


JOBS = {
    "vllm_cpu_expand_kernel": "engine",
    "vllm_drafts_near_max_model_len": "engine",
    "vllm_graph_candidates": "graphs",
    "vllm_hybrid_draft_lengths": "hybrids",
}
"""What is run of each patch."""


def versions_of(name):
    text = (UPSTREAM / f"{name}.md").read_text()
    return re.search(r"^Applies to vLLM ([\d., and]+)\.$", text, re.M)[1]


HERE = [
    name
    for name, job in JOBS.items()
    if vllm.__version__.partition("+")[0] in re.findall(r"\d+\.\d+\.\d+", versions_of(name))
    and (job != "engine" or current_platform.is_cpu())
]
"""The patches that are for this vLLM."""


@pytest.fixture(scope="module")
def stock(random_model):
    """What the installed vLLM does."""
    return found(random_model, sorted({JOBS[name] for name in HERE}))


@pytest.fixture(scope="module")
def patched(random_model, tmp_path_factory):
    """What a copy of it does that has all of these patches."""
    patches = [UPSTREAM / f"{name}.patch" for name in HERE]
    copy = patched_copy(VLLM, patches, tmp_path_factory.mktemp("vllm"))
    return found(random_model, sorted({JOBS[name] for name in HERE}), copy)


def only_with(name):
    reason = f"{name}.patch is for vLLM {versions_of(name)}, this is {vllm.__version__}"
    return pytest.mark.skipif(name not in HERE, reason=reason)


def test_each_proposal_is_a_text_and_a_patch():
    names = {path.stem for path in UPSTREAM.glob("*.patch")}
    assert names == JOBS.keys() == {path.stem for path in UPSTREAM.glob("*.md")} - {"README"}
    listed = re.findall(r"\]\((\w+)\.md\)", (UPSTREAM / "README.md").read_text())
    assert sorted(listed) == sorted(names)


@pytest.mark.slow
@only_with("vllm_cpu_expand_kernel")
def test_rows_of_a_cpu_are_sampled_at_their_temperatures(stock, patched):
    found = patched["engine"]
    expected = [1.0, 1.0, 0.5, 0.5, 0.5, 2.0]
    assert stock["engine"]["expanded"] != expected
    assert found["expanded"] == expected
    for temperature, counts in zip(TEMPERATURES, found["counts"], strict=True):
        odds = np.exp(np.array(found["logits"]) / temperature)
        test = stats.chisquare(counts, SAMPLES * odds / odds.sum())
        assert test.pvalue > FALSE_ALARMS, (temperature, counts)


@pytest.mark.slow
@only_with("vllm_drafts_near_max_model_len")
def test_rows_near_the_longest_length_leave_drafts_as_they_are(stock, patched):
    zeros, drafts = (
        [draft for step in found["engine"]["steps"] for draft in step] for found in (stock, patched)
    )
    assert zeros and all(set(draft) == {0} for draft in zeros)
    assert drafts and all(0 not in draft for draft in drafts)  # the model never says 0 here
    # The short row drafts beside the long one.
    assert max(map(len, patched["engine"]["steps"])) == 2
    rows = stock["engine"]["rows"]
    assert patched["engine"]["rows"] == rows and not any(0 in row for row in rows)


@pytest.mark.slow
@only_with("vllm_graph_candidates")
def test_each_step_finds_the_full_graph_of_its_length(stock, patched):
    missed = [step for step in stock["graphs"]["steps"] if step[2] != "FULL"]
    assert [17, 2] in [step[:2] for step in missed]  # the text's example
    for rows, length, mode, tokens, graph_rows in patched["graphs"]["steps"]:
        assert mode == "FULL" and graph_rows >= rows and tokens == graph_rows * (1 + length)
        assert tokens < rows * (1 + length) + 8 + 1 + length  # the next size of its own
    assert patched["graphs"]["mixed"] == stock["graphs"]["mixed"] == ["PIECEWISE"]


@pytest.mark.slow
@only_with("vllm_hybrid_draft_lengths")
def test_hybrid_models_have_graphs_of_each_length_and_prompts_behind_what_decodes(stock, patched):
    assert stock["hybrids"]["captured"] == [3]
    assert patched["hybrids"]["captured"] == [0, 1, 2, 3]
    last = [order[-1] for order in stock["hybrids"]["orders"]]
    assert last == ["decoding", "decoding"]
    behind = ["decoding", "prompt"]
    assert patched["hybrids"]["orders"] == [behind, ["drafting", *behind]]


def test_a_patch_that_does_not_apply_is_told(tmp_path):
    """By git itself: this is what the tests above rely on."""
    patch = UPSTREAM / "vllm_cpu_expand_kernel.patch"
    file = tmp_path / "vllm/utils/cpu_triton_utils.py"
    file.parent.mkdir(parents=True)
    file.write_text("changed = True\n")
    assert apply(patch, tmp_path, "--check").returncode != 0
