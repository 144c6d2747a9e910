"""The patches that are ready to be sent to vLLM: each applies, and does what its text says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
import vllm
from scipy import stats

from tests.support.engines import needs_cpu_build
from tests.support.upstream import (
    SAMPLES,
    TEMPERATURES,
    UPSTREAM,
    apply,
    found_by,
    patched_copy,
)

VLLM = Path(importlib.util.find_spec("vllm").submodule_search_locations[0]).parent
FALSE_ALARMS = 1e-6
"""Chance that a right sampler fails a test, by temperature."""


@pytest.fixture
def copy_with(tmp_path):
    """Makes a copy of the installed vLLM with a patch, where the patch is for this version."""

    def make(name):
        text = (UPSTREAM / f"{name}.md").read_text()
        versions = re.search(r"^Applies to vLLM ([\d., and]+)\.$", text, re.M)[1]
        installed = vllm.__version__.partition("+")[0]
        if installed not in re.findall(r"\d+\.\d+\.\d+", versions):
            pytest.skip(f"{name}.patch is for vLLM {versions}, this is {vllm.__version__}")
        return patched_copy(VLLM, UPSTREAM / f"{name}.patch", tmp_path)

    return make


def test_each_proposal_is_a_text_and_a_patch():
    names = {path.stem for path in UPSTREAM.glob("*.patch")}
    assert names and names == {path.stem for path in UPSTREAM.glob("*.md")} - {"README"}
    listed = re.findall(r"\]\((\w+)\.md\)", (UPSTREAM / "README.md").read_text())
    assert sorted(listed) == sorted(names)


@pytest.fixture(scope="module")
def stock(random_model):
    """What an engine of the installed vLLM does."""
    return found_by("engine", random_model)


@needs_cpu_build
def test_rows_of_a_cpu_are_sampled_at_their_temperatures(copy_with, stock, random_model):
    copy = copy_with("vllm_cpu_expand_kernel")
    expected = [1.0, 1.0, 0.5, 0.5, 0.5, 2.0]
    assert stock["expanded"] != expected
    patched = found_by("engine", random_model, "sample", copy=copy)
    assert patched["expanded"] == expected
    for temperature, counts in zip(TEMPERATURES, patched["counts"], strict=True):
        odds = np.exp(np.array(patched["logits"]) / temperature)
        test = stats.chisquare(counts, SAMPLES * odds / odds.sum())
        assert test.pvalue > FALSE_ALARMS, (temperature, counts)


@needs_cpu_build
def test_rows_near_the_longest_length_leave_drafts_as_they_are(copy_with, stock, random_model):
    patched = found_by("engine", random_model, copy=copy_with("vllm_drafts_near_max_model_len"))
    zeros, drafts = (
        [draft for step in found["steps"] for draft in step] for found in (stock, patched)
    )
    assert zeros and all(set(draft) == {0} for draft in zeros)
    assert drafts and all(0 not in draft for draft in drafts)  # the model never says 0 here
    assert max(map(len, patched["steps"])) == 2  # the short row drafts beside the long one
    assert patched["rows"] == stock["rows"] and not any(0 in row for row in stock["rows"])


def test_each_step_finds_the_full_graph_of_its_length(copy_with):
    copy = copy_with("vllm_graph_candidates")
    stock, patched = found_by("graphs"), found_by("graphs", copy=copy)
    missed = [step for step in stock["steps"] if step[2] != "FULL"]
    assert [17, 2] in [step[:2] for step in missed]  # the text's example
    for rows, length, mode, tokens, graph_rows in patched["steps"]:
        assert mode == "FULL" and graph_rows >= rows and tokens == graph_rows * (1 + length)
        assert tokens < rows * (1 + length) + 8 + 1 + length  # the next size of its own
    assert patched["mixed"] == stock["mixed"] == ["PIECEWISE"]


def test_hybrid_models_have_graphs_of_each_length_and_prompts_behind_what_decodes(copy_with):
    copy = copy_with("vllm_hybrid_draft_lengths")
    stock, patched = found_by("hybrids"), found_by("hybrids", copy=copy)
    assert stock["captured"] == [3] and patched["captured"] == [0, 1, 2, 3]
    last = [order[-1] for order in stock["orders"]]
    assert last == ["decoding", "decoding"]
    behind = ["decoding", "prompt"]
    assert patched["orders"] == [behind, ["drafting", *behind]]


def test_a_patch_that_does_not_apply_is_told(tmp_path):
    """By git itself: this is what the tests above rely on."""
    patch = UPSTREAM / "vllm_cpu_expand_kernel.patch"
    file = tmp_path / "vllm/utils/cpu_triton_utils.py"
    file.parent.mkdir(parents=True)
    file.write_text("changed = True\n")
    assert apply(patch, tmp_path, "--check").returncode != 0
