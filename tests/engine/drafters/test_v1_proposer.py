"""The tree proposer inside the real engine: what it is asked for, and what it counts."""

import pytest
import torch
from vllm.v1.sample.rejection_sampler import RejectionSampler

from nemo_specrl.engine.drafters import v1_proposer as module
from nemo_specrl.engine.drafters.counts import take_counts
from nemo_specrl.engine.vllm import sampler_memory
from nemo_specrl.engine.vllm.refit import refit
from tests.conftest import DictCache, weights_of
from tests.support.engines import LOSSLESS, PROMPT, VOCABULARY, distribution
from tests.support.lossless import EOS, KEY, made_with, params, rollouts, sample

ROOM = 192 - len(PROMPT)


@pytest.fixture
def llm(drafting_llm):
    return drafting_llm


class Watch:
    """What an engine in this process schedules, what its proposer has made, and what it yields."""

    def __init__(self, llm, proposer, monkeypatch):
        self.steps = self.row_steps = self.tokens = self.drafted = 0
        self.longest = self.most = 0
        self.foreign = []
        self._made = {}
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        schedule, update, propose = (
            scheduler.schedule, scheduler.update_from_output, proposer.propose
        )  # fmt: skip

        def scheduled(*args):
            output = schedule(*args)
            self.steps += output.total_num_scheduled_tokens > 0
            drafts = output.scheduled_spec_decode_tokens
            for name, tokens in drafts.items():
                made = self._made.get(name, [])
                if tokens != made[: len(tokens)]:
                    self.foreign.append((name, tokens, made))
            self.drafted += sum(map(len, drafts.values()))
            self.most = max(self.most, sum(map(len, drafts.values())))
            self.longest = max([self.longest, *map(len, drafts.values())])
            return output

        def updated(scheduled, output):
            sampled = output.sampled_token_ids
            update_outputs = update(scheduled, output)  # it cuts what lies behind a stop
            self.row_steps += sum(map(bool, sampled))
            self.tokens += sum(map(len, sampled))
            return update_outputs

        def proposed(*args, **kwargs):
            drafts = propose(*args, **kwargs)
            self._made |= zip(proposer.runner.input_batch.req_ids, drafts, strict=True)
            return drafts

        monkeypatch.setattr(scheduler, "schedule", scheduled)
        monkeypatch.setattr(scheduler, "update_from_output", updated)
        monkeypatch.setattr(proposer, "propose", proposed)


def check_counts(made, watch, outputs):
    """Metrics are those of the engine itself."""
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert made.metrics.tree_tokens == tokens == watch.tokens
    assert made.metrics.tree_steps == watch.row_steps
    assert made.metrics.tree_drafted_tokens == watch.drafted
    assert watch.foreign == []


def follow_trees(proposer, monkeypatch):
    """Check that each row's tree has its response, whenever drafts are made."""
    drafts = proposer._drafts

    def checked(rows):
        batch = proposer.runner.input_batch
        for i, row in enumerate(rows):
            if row is not None and not row.ended:
                assert row.start + row.row.length == batch.num_tokens_no_spec[i]
        return drafts(rows)

    monkeypatch.setattr(proposer, "_drafts", checked)


def test_rows_draft_up_to_the_models_limit(llm, proposer, monkeypatch, random_model):
    """NeMo-RL asks for as many tokens as the model may have, so that truncated rows end there."""
    cache, steps = DictCache(), []
    sure = [  # a policy that says much the same each time
        (name, 3 * weight if name == "model.norm.weight" else weight)
        for name, weight in weights_of(random_model)
    ]
    refit(llm, sure)
    for version in (1, 2):
        watch = Watch(llm, proposer, monkeypatch)
        follow_trees(proposer, monkeypatch)
        made = made_with(llm, cache, LOSSLESS, version=version)
        outputs, tokens = sample(made, 8, ROOM)
        assert [len(t) for t in tokens] == [ROOM] * 8
        check_counts(made, watch, outputs)
        assert watch.steps < ROOM
        steps.append(watch.row_steps)
        monkeypatch.undo()
        proposer.__init__(llm.llm_engine.vllm_config)
    assert steps[1] < steps[0]


def test_one_row_near_the_limit_takes_no_drafts_from_the_others(llm, proposer, monkeypatch):
    """A prompt within the longest draft of the limit, beside rows that have just begun."""
    long = [1, *(3 + i % 12 for i in range(192 - 5))]
    likely = []
    for _ in range(6):
        likely.append(int(distribution(llm, likely).argmax()))
    watch = Watch(llm, proposer, monkeypatch)
    made = made_with(llm, DictCache(rollouts([likely * 4] * 4)), LOSSLESS)
    prompts = [{"prompt_token_ids": p} for p in (long, *[PROMPT] * 4)]
    outputs = made.generate(
        prompts, [params(200, seed=i) for i in range(5)], use_tqdm=False
    )  # fmt: skip
    assert len(outputs[0].outputs[0].token_ids) == 192 - len(long)
    check_counts(made, watch, outputs)
    assert watch.steps < ROOM and watch.drafted > 100


@pytest.mark.parametrize("ending", ["eos", "stop token", "budget"])
def test_what_lies_behind_an_end_is_neither_counted_nor_learned(llm, proposer, monkeypatch, ending):
    options = {
        "eos": {"ignore_eos": False},
        "stop token": {"stop_token_ids": [EOS, 5, 6]},
        "budget": {},
    }[ending]
    budget = 9 if ending == "budget" else 60
    cache = DictCache()
    for version in (1, 2, 3):
        watch = Watch(llm, proposer, monkeypatch)
        made = made_with(llm, cache, LOSSLESS, version=version)
        outputs, tokens = sample(made, 48, budget, **options)
        check_counts(made, watch, outputs)
        monkeypatch.undo()
    assert made.metrics.tree_accepted_tokens > 10
    kept = {tuple(r.tokens.tolist()) for r in cache.all()}
    stops = {"eos": {EOS}, "stop token": {EOS, 5, 6}, "budget": set()}[ending]
    for row in proposer._rows.values():
        assert row is None or row.row.length <= budget
    assert all(stops.isdisjoint(t[:-1]) for t in kept)
    for stop in sorted(stops):
        row = proposer.trees.open(KEY, 10**6 + stop, [])
        row.extend([*tokens[0][:-1], stop])
        assert row.draft(6) == []  # nothing has ever followed it


def test_what_lies_behind_a_stop_string_is_not_counted(llm, proposer):
    """Such ends are seen by the engine's client."""
    cache = DictCache()
    for version in (1, 2):
        made = made_with(llm, cache, LOSSLESS, version=version)
        outputs, tokens = sample(made, 48, 60, stop=["1", "3"], detokenize=True)
        assert made.metrics.tree_tokens == sum(map(len, tokens))
    assert made.metrics.tree_accepted_tokens > 0
    assert any(o.outputs[0].finish_reason == "stop" for o in outputs)


def test_rows_that_were_preempted_go_on_in_step_with_their_trees(llm, proposer, monkeypatch):
    """The scheduler takes rows out of the engine and back in at a later step."""
    cache = DictCache()
    sample(made_with(llm, cache, LOSSLESS, version=1), 8, 100)
    core = llm.llm_engine.engine_core.engine_core
    scheduler, preempted = core.scheduler, []
    watch = Watch(llm, proposer, monkeypatch)
    follow_trees(proposer, monkeypatch)
    schedule = scheduler.schedule

    def with_preemption(*args):
        if watch.steps % 5 == 4 and len(scheduler.running) > 2:
            row = scheduler.running.pop()
            scheduler._preempt_request(row, 0.0)
            preempted.append(row.request_id)
        return schedule(*args)

    monkeypatch.setattr(scheduler, "schedule", with_preemption)
    made = made_with(llm, cache, LOSSLESS, version=2)
    outputs, tokens = sample(made, 8, 100)
    assert len(preempted) > 3 and [len(t) for t in tokens] == [100] * 8
    check_counts(made, watch, outputs)


def test_drafts_of_a_step_fit_into_the_samplers_memory(llm, proposer, monkeypatch):
    of_token = module.DRAFT_LOGIT_BYTES * VOCABULARY
    assert proposer.max_drafted == module.SAMPLER_BYTES // of_token
    cache = DictCache()
    sample(made_with(llm, cache, LOSSLESS, version=1), 32, 60)
    monkeypatch.setattr(module, "SAMPLER_BYTES", 20 * of_token)
    for adaptive in (False, True):
        llm.llm_engine.vllm_config.additional_config["spec_rl"]["adaptive"] = adaptive
        proposer.__init__(llm.llm_engine.vllm_config)
        watch = Watch(llm, proposer, monkeypatch)
        made = made_with(llm, cache, LOSSLESS, version=2)
        sample(made, 32, 60)
        assert 10 < watch.most <= 20
    llm.llm_engine.vllm_config.additional_config["spec_rl"]["adaptive"] = False


def test_where_the_sampler_pads_its_logprobs_drafts_are_shorter(llm, proposer, monkeypatch, caplog):
    """That is, in a vLLM whose sampler has another source than those that are known."""

    def _get_logprobs_tensors(self, *args):
        raise AssertionError

    monkeypatch.setattr(RejectionSampler, "_get_logprobs_tensors", _get_logprobs_tensors)
    monkeypatch.setattr(module, "SAMPLER_BYTES", 4 * 64 * VOCABULARY * module.PADDED_LOGIT_BYTES)
    proposer.__init__(llm.llm_engine.vllm_config)
    assert proposer.longest == 3
    assert "has a source" in caplog.text and "at most 3 tokens" in caplog.text


@pytest.mark.parametrize("at_once", [512, 7])
@pytest.mark.parametrize("logprobs", [0, 3])
def test_logprobs_of_sampled_tokens_are_vllms(llm, proposer, monkeypatch, at_once, logprobs):
    """Ragged drafts, plain rows among them; part by part, and padded as vLLM does it."""
    monkeypatch.setattr(sampler_memory, "SAMPLED_TOKENS_AT_ONCE", at_once)
    bounded = RejectionSampler._get_logprobs_tensors
    seen = []

    def both(self, *args):
        found, expected = bounded(self, *args), bounded.__wrapped__(self, *args)
        metadata, sampled = args[1], args[5]
        valid = sampled.flatten() >= 0
        seen.append(metadata.num_draft_tokens)
        for name in ("logprob_token_ids", "logprobs", "selected_token_ranks"):
            torch.testing.assert_close(getattr(found, name)[valid], getattr(expected, name)[valid])
        assert found.logprobs.shape == expected.logprobs.shape
        return found

    cache = DictCache()
    sample(made_with(llm, cache, LOSSLESS, version=1), 12, 30)
    monkeypatch.setattr(RejectionSampler, "_get_logprobs_tensors", both)
    sample(made_with(llm, cache, LOSSLESS, version=2), 12, 30, logprobs=logprobs)
    assert any(0 in drafts and max(drafts) > 2 for drafts in seen)


def test_only_the_rank_whose_drafts_count_makes_any(llm, proposer, monkeypatch):
    """Rank 1 of two is played by this process; nothing but its rank is different."""
    worker = llm.llm_engine.model_executor.driver_worker.worker
    assert take_counts(worker) is not None
    monkeypatch.setattr("vllm.distributed.parallel_state.get_tensor_model_parallel_rank", lambda: 1)
    proposer.__init__(llm.llm_engine.vllm_config)
    made = made_with(llm, DictCache(rollouts([[5, 6, 7]] * 4)), LOSSLESS)
    _, tokens = sample(made, 4, 20)
    assert [len(t) for t in tokens] == [20] * 4
    assert len(proposer.trees) == 0 and take_counts(worker) is None
    monkeypatch.setattr(worker.model_runner, "drafter", None)  # as in the first pipeline stage
    assert take_counts(worker) is None


def test_counts_that_cannot_be_had_are_missed_once_and_aloud(llm, proposer, monkeypatch, caplog):
    def refused(*args, **kwargs):
        raise TypeError("Object of type function is not serializable")

    monkeypatch.setattr(llm, "collective_rpc", refused)
    made = made_with(llm, DictCache(), LOSSLESS)
    for _ in range(2):
        sample(made, 2, 3)
    assert caplog.text.count("spec_rl/tree_* metrics are missing") == 1
