"""The look ahead at NeMo-RL's own kind of data loader, and run-ahead in real jobs.

The jobs need an unmodified checkout of NeMo-RL in NEMO_RL_HOME and its environment: `make
test-nemo`.
"""

import copy

import pytest
import torch

from nemo_specrl.nemo_rl.look_ahead import LookAhead
from tests.nemo_rl.test_lossless import PROPOSER
from tests.support.nemo_rl.jobs import BATCH, Job, marks

stateful = pytest.importorskip(
    "torchdata.stateful_dataloader", reason="needs torchdata, which NeMo-RL's environment has"
)
PROMPTS, EPOCHS = 10, 3
AHEAD_PROMPTS, AHEAD_STEPS, GROUP = 24, 6, 2
"""Of the jobs: prompts of an epoch, its steps, and rows of a prompt, which draft for each other."""


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return PROMPTS

    def __getitem__(self, i):
        ids = torch.tensor([i, i + 1])
        return [{"token_ids": ids[:1]}, {"token_ids": ids[1:]}]


def loader_of(workers=0):
    torch.manual_seed(7)
    return stateful.StatefulDataLoader(
        Numbers(),
        batch_size=3,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        collate_fn=lambda logs: {"message_log": logs},
    )


def numbers(batch):
    return [int(log[0]["token_ids"][0]) for log in batch["message_log"]]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_and_saved_states_are_those_of_the_loader_itself(workers):
    """After any batch of any epoch, and what comes behind a state that was loaded."""
    plain = loader_of(workers)
    expected = []
    for _ in range(EPOCHS):
        for batch in plain:
            torch.rand(1)  # a trainer's own random numbers
            expected.append((numbers(batch), copy.deepcopy(plain.state_dict())))
    told = []
    ahead = LookAhead(loader_of(workers), told.append)
    assert len(ahead) == len(plain) and ahead.batch_size == 3
    given = []
    for _ in range(EPOCHS):
        for batch in ahead:
            torch.rand(1)
            given.append((numbers(batch), copy.deepcopy(ahead.state_dict())))
    assert [batch for batch, _ in given] == [batch for batch, _ in expected]
    for step in range(len(given)):
        last = (step + 1) % len(plain) == 0
        assert told[step] == ([] if last else [[i, i + 1] for i in given[step + 1][0]])
        resumed = LookAhead(loader_of(workers), told.append)
        torch.manual_seed(11)
        resumed.load_state_dict(given[step][1])
        theirs = loader_of(workers)
        torch.manual_seed(11)
        theirs.load_state_dict(expected[step][1])
        rest = [numbers(b) for b in resumed]
        assert rest == [numbers(b) for b in theirs]
        if not last:
            assert rest == [b for b, _ in given[step + 1 :]][: len(rest)] != []


def ahead_job(out, steps, *, ahead, **overrides):
    spec_rl = {
        "enabled": "true",
        "preset": "lossless",
        "tree": "{adaptive:false,max_draft_tokens:6}",
        "run_ahead": f"{{enabled:{str(ahead).lower()}}}",
    }
    return Job(
        out,
        steps=steps,
        spec_rl=spec_rl,
        **{
            "++env.prompts": AHEAD_PROMPTS,
            "grpo.num_prompts_per_step": AHEAD_PROMPTS // AHEAD_STEPS,
            "grpo.num_generations_per_prompt": GROUP,
            "++policy.generation.vllm_kwargs.max_num_seqs": BATCH // 2,
            **overrides,
        },
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ahead")


@pytest.fixture(scope="module")
def jobs(folder):
    if not PROPOSER:
        pytest.skip("this vLLM (0.20) takes no drafter, which run-ahead needs")
    return {
        ahead: ahead_job(folder / f"ahead-{ahead}", AHEAD_STEPS, ahead=ahead).wait()
        for ahead in (False, True)
    }


def first_turns(job):
    return [call["prompts"][::GROUP] for call in job.calls()]


class TestJobs:
    """An epoch of six steps with two engines, each of which has places for its rows alone."""

    pytestmark = marks

    def test_rows_of_the_first_epoch_draft_from_what_was_run_ahead(self, jobs):
        """Drafts are checked by the engine, and one batch knows of the next."""
        without, with_it = jobs[False].train(), jobs[True].train()
        assert sorted(without) == sorted(with_it) == list(range(1, AHEAD_STEPS + 1))
        for step, record in with_it.items():
            assert "spec_rl/run_ahead_rows" not in without[step] or (
                without[step]["spec_rl/run_ahead_rows"] == 0
            )
            assert record["spec_rl/cache_errors"] == record["spec_rl/refused_drafts"] == 0
            assert record["spec_rl/decoded_tokens"] == record["spec_rl/response_tokens"]
            assert record["gen_kl_error"] < 1e-4
            assert (record["spec_rl/run_ahead_rows"] > 0) is (step < AHEAD_STEPS)  # the epoch ends
        assert without[1]["spec_rl/tree_tokens_per_step"] > 0
        rates = [
            sum(
                record["spec_rl/tree_tokens_per_step"] for step, record in steps.items() if step > 1
            )
            for steps in (without, with_it)
        ]
        print(f"tokens a step, steps 2 to {AHEAD_STEPS}: {rates}")
        assert rates[1] > rates[0]

    def test_batches_are_those_without_it(self, jobs):
        assert first_turns(jobs[True]) == first_turns(jobs[False])
        for job in jobs.values():
            manifest = job.out / "checkpoints" / f"step_{AHEAD_STEPS}" / "rollout_cache"
            assert (manifest / "manifest.json").is_file()
        assert len(first_turns(jobs[True])) == AHEAD_STEPS

    def test_killed_and_resumed_it_gets_the_same_batches(self, folder, jobs):
        out = folder / "killed"
        killed = ahead_job(out, AHEAD_STEPS, ahead=True, **{"++env.killed_in_step": 4})
        killed.wait_for_kill()
        before = first_turns(killed)
        assert len(before) == 4
        (out / "rows.jsonl").unlink()
        resumed = ahead_job(out, AHEAD_STEPS, ahead=True).wait()
        expected = first_turns(jobs[True])
        assert before == expected[:4]
        assert first_turns(resumed) == expected[2:]  # from the checkpoint of step 2
