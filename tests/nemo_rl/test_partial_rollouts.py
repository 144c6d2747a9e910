"""Active partial rollouts: the loader's batches, the count of complete groups, and real jobs.

The loader and the jobs need an unmodified checkout of NeMo-RL in NEMO_RL_HOME and its environment:
`make test-nemo`.
"""

import json
import random
import resource
import time
from collections import Counter

import pytest
import ray
import torch

from nemo_specrl.config import PartialRolloutsConfig
from nemo_specrl.nemo_rl.partial_rollouts import PartialRollouts
from nemo_specrl.nemo_rl.phase_end import Phase, PhaseEnd, start_counter
from nemo_specrl.rollout import prompt_key
from nemo_specrl.trainer.data.toy_tasks import EOS
from tests.nemo_rl.test_lossless import PROPOSER
from tests.support.nemo_rl.jobs import FAITHFUL, GROUP, TOTAL, Job, marks

PROMPTS, BATCH = 24, 4
"""Of an epoch; and of a batch of the loader."""
LONGEST = 160
"""Tokens of a response of a job."""
ENDED = 0.7
"""Share of the groups that are complete when a generation ends, where it does not wait for them."""


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return PROMPTS

    def __getitem__(self, i):
        return {"message_log": [{"token_ids": torch.tensor([i, 7])}], "idx": i}


def collate(rows):
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    return BatchedDataDict({name: [row[name] for row in rows] for name in rows[0]})


def loader_of(over_provision=1.5, max_put_off=1):
    from torchdata.stateful_dataloader import StatefulDataLoader

    torch.manual_seed(7)
    loader = StatefulDataLoader(Numbers(), batch_size=BATCH, shuffle=True, collate_fn=collate)
    config = PartialRolloutsConfig(
        enabled=True, over_provision=over_provision, max_put_off=max_put_off
    )
    return PartialRollouts(loader, config, GROUP, lambda prompts: None)


class Run:
    """Steps of a trainer whose groups end by chance."""

    def __init__(self, partial, counter, seed=3):
        self.partial, self.random = partial, random.Random(seed)
        partial._counter = counter
        self.completed, self.asked = [], []

    def step(self, batch):
        rows = [index for index in batch["idx"] for _ in range(GROUP)]
        self.asked.append(batch["idx"])
        phase = self.partial.begin(len(rows))
        done = [True] * batch.size
        if phase is not None:
            awaited = phase.put_off if self.partial._config.max_put_off == 1 else 0
            done = [g < awaited or self.random.random() < ENDED for g in range(batch.size)]
            ended = torch.tensor(done).repeat_interleave(GROUP)
            self.partial.settle(ended, torch.ones(len(rows), dtype=torch.int64))
        kept, column = self.partial.completed(
            type(batch)({"idx": rows}), torch.tensor(rows, dtype=torch.float32)
        )
        assert column.tolist() == kept["idx"]
        self.completed += kept["idx"][::GROUP]
        assert sorted(kept["idx"]) == sorted(kept["idx"][::GROUP] * GROUP)


@pytest.fixture(scope="module")
def counter():
    ray.init("local", num_cpus=2, include_dashboard=False, logging_level="ERROR")
    yield start_counter()
    ray.shutdown()


@pytest.fixture
def nemo_rl():
    pytest.importorskip("nemo_rl", reason="needs NeMo-RL: make test-nemo")


@pytest.mark.usefixtures("nemo_rl")
class TestLoader:
    def test_each_prompt_of_an_epoch_is_completed_once(self, counter):
        run = Run(loader_of(), counter)
        for epoch in range(1, 4):
            for batch in run.partial:
                run.step(batch)
            assert Counter(run.completed) == dict.fromkeys(range(PROMPTS), epoch)
        assert max(map(len, run.asked)) > BATCH  # some were put off
        times = Counter(i for asked in run.asked for i in asked)
        assert max(times.values()) <= 3 * 2  # once an epoch at most

    def test_a_saved_run_goes_on_with_the_prompts_that_were_put_off(self, counter, tmp_path):
        run = Run(loader_of(), counter)
        states = []
        for batch in run.partial:
            run.step(batch)
            folder = tmp_path / str(len(states))
            run.partial.save(folder)
            states.append((folder, run.partial.state_dict(), list(run.completed)))
        assert any(json.loads((folder / "put_off.json").read_text()) for folder, *_ in states)
        for i, (folder, state, completed) in enumerate(states[:-1]):
            resumed = Run(loader_of(), counter)
            resumed.partial.load_state_dict(state)
            resumed.partial.restore(folder)
            for batch in resumed.partial:
                resumed.step(batch)
            assert resumed.asked[0] == run.asked[i + 1]
            assert Counter(completed + resumed.completed) == dict.fromkeys(range(PROMPTS), 1)

    @pytest.mark.parametrize("index", [3, PROMPTS])  # another prompt, and none
    def test_other_data_than_was_saved_is_not_mixed_in(self, tmp_path, caplog, index):
        (tmp_path / "put_off.json").write_text(
            json.dumps([{"index": index, "key": "00" * 16, "put_off": 1}])
        )
        partial = loader_of()
        partial.restore(tmp_path)
        assert "the data set has other prompts" in caplog.text
        assert [batch.size for batch in partial] == [BATCH] * (PROMPTS // BATCH)

    @pytest.mark.parametrize("text", ["", "[{", '{"index": 3}', '[{"index": 3}]'])
    def test_a_damaged_file_ends_no_run(self, tmp_path, caplog, text):
        (tmp_path / "put_off.json").write_text(text)
        partial = loader_of()
        partial.restore(tmp_path)
        assert "put_off.json: damaged" in caplog.text
        assert [batch.size for batch in partial] == [BATCH] * (PROMPTS // BATCH)

    def test_a_full_disk_leaves_no_part_of_the_file(self, counter, tmp_path):
        run = Run(loader_of(), counter)
        for batch in run.partial:
            run.step(batch)
            if run.partial._put_off is not None:
                break
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                run.partial.save(tmp_path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert list(tmp_path.iterdir()) == []


class TestPhaseEnd:
    def begin(self, counter, groups, awaited):
        number = ray.get(counter.begin.remote(2, groups, awaited))
        phase = Phase(counter, number, awaited)
        # Two engines have a row each of four groups.
        return [PhaseEnd(phase, [0, 1, 2, 3]) for _ in range(2)]

    def within_seconds(self, end, ended):
        for _ in range(500):
            if end.reached(ended):
                return True
            time.sleep(0.02)
        return False

    def test_engines_end_when_enough_groups_are_complete_over_all_of_them(self, counter):
        first, second = self.begin(counter, groups=2, awaited=1)
        assert first.first_rows == 1
        assert not first.reached([]) and not first.reached([1, 2, 3])
        assert not second.reached([1, 2])  # two are complete, but not the one that is awaited
        time.sleep(0.2)
        assert not first.reached([1, 2, 3]) and not second.reached([1, 2])
        assert not second.reached([0, 1, 2])
        assert self.within_seconds(first, [0, 1, 2, 3])
        assert self.within_seconds(second, [0, 1, 2])

    def test_rows_of_an_earlier_generation_do_not_count(self, counter):
        late, _ = self.begin(counter, groups=1, awaited=0)
        first, second = self.begin(counter, groups=1, awaited=0)
        late.reached([0, 1, 2, 3])
        first.reached([0])
        time.sleep(0.2)
        assert not first.reached([0])
        second.reached([0])
        assert self.within_seconds(first, [0])

    def test_more_engines_than_ray_answers_at_once_by_itself(self, counter):
        number = ray.get(counter.begin.remote(1, 1, 0))
        ends = [counter.reached.remote(number) for _ in range(1100)]
        ray.get(counter.ended.remote(number, [0]), timeout=60)
        ray.get(ends, timeout=60)

    def test_without_the_counter_no_row_is_given_up(self, caplog):
        mortal = start_counter()
        end, _ = self.begin(mortal, groups=2, awaited=0)
        assert not end.reached([0])
        ray.kill(mortal)
        for _ in range(500):
            assert not end.reached([0])
            if end._lost:
                break
            time.sleep(0.02)
        assert end._lost and "actor that counts complete groups died" in caplog.text
        assert not end.reached([0, 1, 2, 3])


STEPS = 8
OVERRIDES = {
    "++env.prompts": PROMPTS,
    "grpo.use_dynamic_sampling": "true",
    "grpo.batch_multiplier": BATCH / 2,
    "grpo.dynamic_sampling_max_gen_batches": 20,
    "grpo.val_at_start": "false",
    "grpo.val_period": 0,
    "++grpo.partial_rollouts": "{enabled:true,over_provision:1.5}",
}
PRESETS = {"lossless": {"enabled": "true", "preset": "lossless"}, "faithful": FAITHFUL}


def complete_groups(call):
    """Of each group of a call, whether all of its rows have ended."""
    ended = [
        output[-1] == EOS or len(output) == TOTAL or len(output) - len(prompt) == LONGEST
        for prompt, output in zip(call["prompts"], call["outputs"], strict=True)
    ]
    return [all(ended[i : i + GROUP]) for i in range(0, len(ended), GROUP)]


class TestJobs:
    """Steps of two prompts, of which a batch has four, and two engines."""

    pytestmark = marks

    @pytest.mark.parametrize("preset", PRESETS)
    def test_a_batch_ends_early_and_the_next_begins_with_what_it_has_put_off(
        self, tmp_path, preset
    ):
        if preset == "lossless" and not PROPOSER:
            pytest.skip("this vLLM (0.20) takes no drafter")
        job = Job(tmp_path / preset, STEPS, PRESETS[preset], **OVERRIDES).wait()
        steps = job.train()
        assert sorted(steps) == list(range(1, STEPS + 1))
        for record in steps.values():
            assert record["spec_rl/cache_errors"] == record["spec_rl/refused_drafts"] == 0
            assert record["gen_kl_error"] < 1e-4  # no token is of older weights
        waiting, completed, put_off = [], Counter(), 0
        for i, call in enumerate(job.rollouts(), 1):
            prompts = [tuple(prompt) for prompt in call["prompts"][::GROUP]]
            assert prompts[: len(waiting)] == waiting
            assert len(prompts) == len(waiting) + BATCH
            complete = complete_groups(call)
            assert all(complete[: len(waiting)])  # none is put off twice
            last = i % (PROMPTS // BATCH) == 0
            assert sum(complete) >= len(prompts) - (0 if last else BATCH // 2)
            waiting = [p for p, done in zip(prompts, complete, strict=True) if not done]
            completed.update(p for p, done in zip(prompts, complete, strict=True) if done)
            put_off += len(waiting)
            if last:
                assert not waiting and set(completed.values()) == {i * BATCH // PROMPTS}
        assert put_off >= 2  # or nothing has ended early
        assert sum(r["spec_rl/put_off_prompts"] for r in steps.values()) == put_off
        assert sum(r["spec_rl/put_off_tokens"] for r in steps.values()) > 0

    def test_a_resumed_run_asks_for_the_prompts_that_were_put_off(self, tmp_path):
        preset = "lossless" if PROPOSER else "faithful"
        settings = OVERRIDES | {"++env.prompts": 2 * PROMPTS}
        job = Job(tmp_path / "run", 2, PRESETS[preset], **settings).wait()
        folder = job.out / "checkpoints" / "step_2" / "rollout_cache"
        keys = [record["key"] for record in json.loads((folder / "put_off.json").read_text())]
        calls = job.rollouts()
        complete = complete_groups(calls[-1])
        left = [
            prompt_key(prompt).hex()
            for prompt, done in zip(calls[-1]["prompts"][::GROUP], complete, strict=True)
            if not done
        ]
        assert keys == left
        resumed = Job(tmp_path / "run", 3, PRESETS[preset], **settings).wait()
        first = resumed.rollouts()[len(calls)]
        prompts = [prompt_key(prompt).hex() for prompt in first["prompts"][::GROUP]]
        assert prompts[: len(keys)] == keys and len(prompts) == len(keys) + BATCH
        assert resumed.train()[3]["spec_rl/cache_errors"] == 0
