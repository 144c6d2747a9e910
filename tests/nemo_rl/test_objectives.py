"""What else a policy is trained on in real NeMo-RL jobs: other losses, judges, and a teacher.

GSPO with a reward model's scores, asynchronous CISPO, and on-policy distillation in GRPO with a
judge that is the policy itself. They need an unmodified checkout of NeMo-RL in NEMO_RL_HOME and its
environment: `make test-nemo`.
"""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from nemo_specrl import prompt_key
from nemo_specrl.cache.inspection import open_source
from nemo_specrl.engine.vllm.environment import has_custom_proposers
from nemo_specrl.trainer.data.toy_tasks import EOS
from tests.conftest import REPOSITORY
from tests.nemo_rl.test_gym import LOSSLESS as SERVED
from tests.nemo_rl.test_gym import TALKING, rows_of
from tests.nemo_rl.test_jobs import launched
from tests.nemo_rl.test_lossless import LOSSLESS
from tests.support.nemo_rl.jobs import (
    ACCEPTED,
    ASYNCHRONOUS,
    FAITHFUL,
    GROUP,
    STEPS_PER_EPOCH,
    Job,
    check_drafted,
    check_talks,
    marks,
)

pytestmark = marks
STEPS = 2 * STEPS_PER_EPOCH
TEACHER = REPOSITORY / "examples" / "models" / "qwen3-arith"


def logprobs_of(model, ids):
    """The log-prob of each token but the first, which has 0 as in NeMo-RL's columns."""
    with torch.no_grad():
        logits = model(torch.from_numpy(ids)[None]).logits[0, :-1].float()
    chosen = torch.log_softmax(logits, -1).gather(-1, torch.from_numpy(ids)[1:, None])[:, 0]
    return np.concatenate([[0.0], chosen.numpy()])


def test_gspo_with_a_reward_model(tmp_path):
    """Ratios of whole responses, which start from where reused tokens were born."""
    judge = {
        "++env.scored": "true",
        "cluster.gpus_per_node": "3",  # one of them the reward model's
        "env.reward_model.model_name": TEACHER,
        "env.reward_model.precision": "float32",
        "++env.reward_model.tokenizer.chat_template": "null",
    }
    gspo = {
        "loss_fn.sequence_level_importance_ratios": "true",
        "loss_fn.token_level_loss": "false",
    }
    spec_rl = FAITHFUL | {"fresh_fraction": 0, "clip_anchor": "birth"}
    job = Job(tmp_path / "job", steps=STEPS, spec_rl=spec_rl, **judge, **gspo).wait()
    steps = job.train()
    assert sorted(steps) == list(range(1, STEPS + 1))
    torch.manual_seed(0)  # as tests.support.nemo_rl.models.SmallRewardModel is made
    scorer = AutoModelForSequenceClassification.from_pretrained(
        TEACHER, num_labels=1, dtype=torch.float32
    )
    for (step, record), call in zip(sorted(steps.items()), job.calls(), strict=True):
        reused = step > STEPS_PER_EPOCH
        assert record["spec_rl/cache_errors"] == record["spec_rl/refused_drafts"] == 0
        assert record["spec_rl/draft_coverage"] == float(reused)
        assert not reused or record["spec_rl/accepted_fraction"] > ACCEPTED
        assert (abs(record["probs_ratio_max"] - 1) > 1e-4) is reused

        rows = job.batch(step)
        for row, prompt, output in zip(rows, call["prompts"], call["outputs"], strict=True):
            ids = row["token_ids"]  # with what the environment says behind the response
            assert ids[: len(output)].tolist() == output
            made = np.isin(np.arange(len(ids)), np.arange(len(prompt), len(output)))
            assert ((row["token_loss_mask"] > 0) == made).all()
            error = row["generation_logprobs"] - row["prev_logprobs"]
            assert np.abs(error[made]).max() < 1e-3
            judged = output if output[-1] == EOS else [*output, EOS]
            with torch.no_grad():
                [[score]] = scorer(torch.tensor([judged])).logits.tolist()
            assert row["reward"] == pytest.approx(score, abs=1e-3)
        for group in (rows[first : first + GROUP] for first in range(0, len(rows), GROUP)):
            rewards = np.array([row["reward"] for row in group])
            above = rewards - (rewards.sum() - rewards) / (GROUP - 1)
            given = np.array([row["advantages"][row["token_loss_mask"] > 0][0] for row in group])
            assert (np.sign(given) == np.sign(above))[np.abs(above) > 1e-3].all()


@pytest.mark.skipif(
    not has_custom_proposers(),
    reason="vLLM 0.20 takes no drafter, and its log-probs of prompts have some rounds refused",
)
def test_asynchronous_cispo(tmp_path):
    """Two updates in a step, so that the second one has ratios to clip."""
    cispo = {
        "loss_fn.use_cispo": "true",
        "loss_fn.ratio_clip_min": "1.0",
        "loss_fn.ratio_clip_max": "5.0",
        "policy.train_global_batch_size": "4",
    }
    job = Job(
        tmp_path / "job", steps=STEPS + 1, spec_rl=LOSSLESS, **{**ASYNCHRONOUS, **cispo}
    ).wait()
    steps = job.train()
    assert sorted(steps) == list(range(1, STEPS + 2))
    check_drafted([record for _, record in sorted(steps.items())])
    made = {tuple(output) for call in job.rollouts() for output in call["outputs"]}
    for step, record in steps.items():
        assert record["probs_ratio_min"] < 1 - 1e-4 and record["probs_ratio_max"] > 1 + 1e-4
        rows = job.batch(step)
        assert {tuple(row["token_ids"].tolist()) for row in rows} <= made
        errors = np.concatenate(
            [
                (row["generation_logprobs"] - row["prev_logprobs"])[row["token_loss_mask"] > 0]
                for row in rows
            ]
        )
        if step == 1:  # of the weights that the job began with
            assert np.abs(errors).max() < 1e-3
        else:  # of one version before at most
            assert np.abs(errors).mean() < 0.05


@pytest.mark.skipif(
    not has_custom_proposers(), reason="vLLM 0.20 takes no drafter, so that NeMo-Gym is refused"
)
def test_on_policy_distillation_with_the_policy_as_judge(tmp_path):
    """Teachers judge the tokens of NeMo-Gym's conversations in the trajectory collector."""
    teacher = (
        f"{{enabled:true,teacher_model_by_agent_name:{{sums:{TEACHER}}},"
        "non_colocated_teachers:{enabled:true,"
        "default_teacher_cfg:{num_nodes:1,gpus_per_node:1}}}"
    )
    distilled = {  # as in NeMo-RL's recipes, which are named mopd
        "++on_policy_distillation": teacher,
        "++grpo.adv_estimator": "{name:opd}",
        "++grpo.seq_logprob_error_threshold": "2.0",
        "loss_fn.disable_ppo_ratio": "true",
        "loss_fn.truncated_importance_sampling_type": "icepop",
        "loss_fn.truncated_importance_sampling_ratio": "5.0",
        "loss_fn.truncated_importance_sampling_ratio_min": "0.2",
        "loss_fn.use_on_policy_kl_approximation": "true",
        "cluster.num_nodes": "2",
        "++env.judged": "true",
        "policy.optimizer.kwargs.lr": "3e-6",
    }
    job = Job(
        tmp_path / "job", steps=STEPS, spec_rl=SERVED, **{**TALKING, **ASYNCHRONOUS, **distilled}
    ).wait()
    steps = check_talks(job, STEPS)

    model = AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.float32)
    rewards = set()
    for step in steps:
        for row in job.batch(step):
            made = row["token_loss_mask"] > 0
            gap = logprobs_of(model, row["token_ids"]) - row["prev_logprobs"]
            np.testing.assert_allclose(row["advantages"], gap * made, atol=1e-3)
            assert np.abs((row["generation_logprobs"] - row["prev_logprobs"])[made]).mean() < 0.05
            rewards.add(row["reward"])
    assert rewards == {0.0, 1.0}  # the judge's

    # What the policy has said as a judge comes into no conversation, and so not into the cache.
    [folder] = job.out.glob(f"checkpoints/step_{STEPS}/rollout_cache")
    with open_source(folder) as source:
        kept = {(rollout.key, tuple(rollout.tokens.tolist())) for rollout in source.rollouts}
    trained = {row for step in steps for row in rows_of(job, step)}
    assert kept and kept <= {(prompt_key(root), said) for root, said, _ in trained}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_quantized_generation(tmp_path, asynchronous):
    """NeMo-RL's workers with modelopt's fake quantization: drafts are judged by what it makes."""
    modelopt = importlib.util.find_spec("modelopt")
    if modelopt is None:
        pytest.skip("nvidia-modelopt is not installed")
    quantized = {
        "++policy.generation.quant_cfg": "FP8_DEFAULT_CFG",
        "++policy.generation.real_quant": "false",
        "policy.generation.vllm_cfg.async_engine": str(asynchronous).lower(),
    }
    found = {"PYTHONPATH": str(Path(modelopt.origin).parents[1])}
    job = Job(
        tmp_path / "job", steps=STEPS, spec_rl=LOSSLESS, environment=found, **quantized
    ).wait()
    assert "quantizing model..." in job.log.read_text()
    steps = job.train()
    assert sorted(steps) == list(range(1, STEPS + 1))
    for record in steps.values():
        assert record["spec_rl/cache_errors"] == record["spec_rl/refused_drafts"] == 0
        assert record["spec_rl/decoded_tokens"] == record["spec_rl/response_tokens"]
        # What engines report is the quantized policy's, which is near the trained one.
        assert 1e-6 < record["gen_kl_error"] < 1e-1
    drafted = [record["spec_rl/tree_tokens_per_step"] for record in steps.values()]
    print(f"tokens a step: {drafted}")
    assert max(drafted[STEPS_PER_EPOCH:]) > 1.5


def test_workers_of_quantized_generation_add_what_nemo_rls_add(tmp_path):
    """NeMo-RL's own are these two methods, and statistics that nobody asks for but its tests."""
    done = launched(
        tmp_path,
        "from nemo_rl.modelopt.models.generation import vllm_quant_worker as theirs\n"
        "from nemo_specrl.nemo_rl import quantized_workers as ours\n"
        "for name in ('', 'Async'):\n"
        "    actor = getattr(theirs, f'VllmQuant{name}GenerationWorker')\n"
        "    own = vars(actor.__ray_metadata__.modified_class.__ray_actor_class__)\n"
        "    print('OWN', *sorted(k for k, v in own.items() if callable(v)))\n"
        "    worker = getattr(ours, f'SpecVllmQuant{name}GenerationWorkerImpl')\n"
        "    print('OURS', *(c.__name__ for c in worker.__mro__ if '_create_engine' in vars(c)))\n",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    statistics = ["get_quantizer_stats", "get_weight_snapshot"]
    for line in (line for line in lines if line[:1] == ["OWN"]):
        assert line[1:] == ["__init__", "_create_engine", *statistics]
    makers = [line[1:4] for line in lines if line[:1] == ["OURS"]]
    assert makers == [
        ["_Quantized", "DraftingWorker", f"Vllm{name}GenerationWorkerImpl"]
        for name in ("", "Async")
    ]
