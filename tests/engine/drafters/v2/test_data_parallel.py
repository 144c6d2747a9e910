"""Drafts in vLLM's V2 runner in a data-parallel group of two engines, each in its own process."""

import pytest

from tests.engine.test_data_parallel import check_drafts, exact, mixture  # noqa: F401
from tests.support.group_engine import run_group


@pytest.mark.timeout(600)
def test_engines_of_a_group_draft_the_same_number_of_tokens(mixture, exact, tmp_path):  # noqa: F811
    check_drafts(run_group(mixture, tmp_path, "v2"), exact)
