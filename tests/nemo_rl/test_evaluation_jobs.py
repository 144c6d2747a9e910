"""NeMo-RL's evaluation on a CPU with two vLLM engines, whose rows draft from earlier evaluations.

They need an unmodified checkout of NeMo-RL in NEMO_RL_HOME and its environment: `make test-nemo`.
"""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from nemo_specrl.engine.vllm.environment import has_custom_proposers
from tests.support.nemo_rl.jobs import Job, marks
from tests.support.vision_models import vision_model

pytestmark = [
    *marks,
    pytest.mark.skipif(not has_custom_proposers(), reason="this vLLM (0.20) takes no drafter"),
]
LOSSLESS = {"enabled": "true", "preset": "lossless"}
SAMPLED = {"generation.temperature": "1.0", "eval.num_tests_per_prompt": "4"}


class Evaluation(Job):
    """A run of tests/support/nemo_rl/evaluation.py that has ended well."""

    module = "tests.support.nemo_rl.evaluation"
    block = "generation.spec_rl"

    def __init__(self, out, spec_rl=LOSSLESS, **overrides):
        super().__init__(out, None, spec_rl, "eval", **overrides)
        self.wait()
        saved = json.loads((out / "saved" / "evaluation_data.json").read_text())
        rows = saved["evaluation_data"]
        self.prompts = [row["prompt"] for row in rows]
        self.responses = [row["response"] for row in rows]
        [self.score] = re.findall(r"score=([\d.]+)", self.log.read_text())

    def drafted(self):
        """What the line at its end says: tokens a step for each row, and the share accepted."""
        [line] = re.findall(r"^spec_rl: .*", self.log.read_text(), re.MULTILINE)
        assert "errors" not in line
        return [float(re.search(text, line)[1]) for text in (r"([\d.]+) per row", r"(\d+)% of")]


def test_a_later_evaluation_drafts_from_earlier_ones_and_answers_as_without_drafts(tmp_path):
    """Greedily, as NeMo-RL's recipes evaluate."""
    plain = Evaluation(tmp_path / "plain", {"enabled": "false"})
    first = Evaluation(tmp_path / "first")
    second = Evaluation(tmp_path / "second")
    assert len(plain.responses) == 4 and all(plain.responses)
    for job in (first, second):
        assert job.prompts == plain.prompts
        assert job.responses == plain.responses and job.score == plain.score
    assert "spec_rl" not in plain.log.read_text().partition("SETUP COMPLETE")[2]
    tokens, accepted = second.drafted()
    assert tokens >= 2 > first.drafted()[0] and accepted > 50


@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_sampled_evaluations_draft(tmp_path, asynchronous):
    engine = {"generation.vllm_cfg.async_engine": asynchronous}
    first, second = (
        Evaluation(tmp_path / name, **SAMPLED, **engine) for name in ("first", "second")
    )
    assert len(second.responses) == 4 * 4
    assert first.prompts == second.prompts
    assert second.drafted()[0] >= 1.5


def test_prompts_with_images_draft_from_earlier_evaluations(tmp_path):
    """Greedily; what an asynchronous engine has kept is drafted from in a synchronous one."""
    torchvision = importlib.util.find_spec("torchvision")
    if torchvision is None:
        pytest.skip("needs torchvision, by which transformers prepares images for NeMo-RL")
    (tmp_path / "model").mkdir()
    seeing = {
        "environment": {"PYTHONPATH": str(Path(torchvision.origin).parents[1])},
        "++env.vision": vision_model(tmp_path / "model", "qwen2_5_vl"),
        "generation.max_new_tokens": "40",
        "++generation.vllm_kwargs.limit_mm_per_prompt": "{image:1,video:0}",
    }
    engine = {"generation.vllm_cfg.async_engine": "true"}
    plain = Evaluation(tmp_path / "plain", {"enabled": "false"}, **seeing)
    first = Evaluation(tmp_path / "first", **seeing, **engine)
    second = Evaluation(tmp_path / "second", **seeing)
    assert len(set(plain.responses)) == 4 == len(set(plain.prompts)) + 1
    for job in (first, second):
        assert job.prompts == plain.prompts
        assert job.responses == plain.responses and job.score == plain.score
    tokens, accepted = second.drafted()
    assert tokens >= 2 > first.drafted()[0] and accepted > 50
