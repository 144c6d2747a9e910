"""Replays of recorded rollouts, and ``nemo-specrl simulate`` on runs of both kinds."""

import functools
import json
import re
import sys

import numpy as np
import pytest

from nemo_specrl.rollout import prompt_key
from nemo_specrl.simulation.prediction import predict
from nemo_specrl.simulation.recorded_run import RecordedRun, RecordedSample, read_run
from nemo_specrl.simulation.replays import acceptance_rates, phase, rows_of
from nemo_specrl.simulation.simulated_engine import FEATURES, SimulatedEngine
from tests.conftest import REPOSITORY

PROMPTS, GROUP, EPOCHS = 4, 4, 3
STEPS, ROWS = FEATURES.index("steps"), FEATURES.index("rows")


def step(epoch, *, alike=30, seed=0):
    """Groups whose responses share their beginning with one another and with other epochs."""
    rng = np.random.default_rng([seed, epoch])
    samples = []
    for prompt in range(PROMPTS):
        same = np.arange(alike) + 1000 * prompt
        for _ in range(GROUP):
            tokens = np.append(same, rng.integers(0, 900, size=rng.integers(5, 40)))
            tokens = tokens.astype(np.int32)
            key = prompt_key([1, prompt])
            samples.append(RecordedSample(key, 20, tokens, np.full(len(tokens), -0.1, np.float32)))
    return samples


@pytest.fixture
def simulate(command_line):
    return functools.partial(command_line, "simulate")


@pytest.fixture
def nemo_rl(tmp_path):
    """A log folder of NeMo-RL's logger: a list of one for each value of a row, padded tokens."""
    for epoch in range(EPOCHS):
        lines = []
        for i, sample in enumerate(step(epoch)):
            n, pad = len(sample.tokens), 80 - len(sample.tokens)
            prompt = [1, int(sample.tokens[0]) // 1000, *[7] * 18]
            row = {
                "content": ["..."],
                "input_lengths": [20 + n],
                "token_ids": [[*prompt, *sample.tokens.tolist(), *[0] * pad]],
                "token_loss_mask": [[0.0] * 20 + [1.0] * n + [0.0] * pad],
                "generation_logprobs": [[0.0] * 20 + sample.logprobs.tolist() + [0.0] * pad],
                "idx": i,
            }
            lines.append(json.dumps(row))
        (tmp_path / f"train_data_step{epoch + 9}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_plain_rows_are_decoded_as_recorded():
    samples = step(0)
    [counts] = phase("plain", rows_of("plain", samples, {}), SimulatedEngine(8))
    tokens = sum(len(s.tokens) for s in samples)
    assert counts[ROWS] == tokens and tokens / 8 <= counts[STEPS] <= tokens


def test_engines_share_the_rows():
    rows = rows_of("plain", step(0), {})
    counts = phase("plain", rows, SimulatedEngine(8), engines=3)
    assert counts[:, ROWS].sum() == phase("plain", rows, SimulatedEngine(8))[0, ROWS]
    assert (counts[:, ROWS] > 0).all()


def test_drafts_of_earlier_epochs_save_steps_and_drop_no_token():
    samples = step(1)
    history = {key: [group] for key, group in _by_key(step(0)).items()}
    engine = SimulatedEngine(8)
    steps = []
    for known in ({}, history):
        rows = rows_of("lossless", samples, known)
        replayed = phase("lossless", rows, engine, history=known)
        assert [sum(y for _, y in row.trace) for row in rows] == [len(s.tokens) for s in samples]
        np.testing.assert_array_equal(phase("lossless", rows, engine), replayed)  # the traces
        steps.append(replayed[0, FEATURES.index("drafting_steps")])
    plain = phase("plain", rows_of("plain", samples, {}), engine)[0, STEPS]
    assert steps[1] < steps[0] < plain


def test_prefix_reuse_decodes_what_is_not_accepted():
    samples = step(1)
    history = {key: [group] for key, group in _by_key(step(0)).items()}
    for chance, left in ((1.0, 0), (0.0, 1)):
        rows = rows_of("reuse", samples, history, np.full(7, chance))
        drafted = [row for row in rows if row.draft is not None]
        assert len(drafted) > len(rows) / 2
        phase("reuse", rows, SimulatedEngine(8), history=history)
        for row in drafted:
            assert row.accepted == (len(row.draft.tokens) if chance else 0)
            assert sum(y for _, y in row.trace) == left * len(row.sample.tokens)
    everything = rows_of("reuse", samples, history, np.ones(7), seed=3)
    verified = sum(len(row.draft.tokens) + 20 for row in everything if row.draft is not None)
    fresh = [row for row in everything if row.draft is None]
    [counts] = phase("reuse", everything, SimulatedEngine(8), history=history)
    assert fresh and counts[FEATURES.index("verified_tokens")] == verified
    assert counts[FEATURES.index("tokens")] >= verified + sum(len(row.trace) for row in fresh)


def _by_key(samples):
    groups = {}
    for sample in samples:
        groups.setdefault(sample.key, []).append(sample)
    return groups


@pytest.mark.parametrize("lenience", [1.0, 1.5])
def test_acceptance_is_estimated_without_bias(lenience):
    """Two tokens, p_old 0.5 each, p_new 0.9 and 0.1: min(1, l p_new/p_old) = 1 and l 0.2."""
    rng = np.random.default_rng(5)
    old, new = np.log([0.5, 0.5]), np.log([0.9, 0.1])

    def group(p, n=4):
        drawn = rng.choice(2, p=np.exp(p), size=n)
        return [
            RecordedSample(b"", 1, np.array([t], np.int32), np.array([p[t]], np.float32))
            for t in drawn
        ]

    estimates = []
    for _ in range(15):
        rates = acceptance_rates([(group(old), group(new)) for _ in range(100)], lenience)
        estimates.append(rates[np.searchsorted(np.log([0.05, 0.2, 0.5]), np.float32(old[0]))])
    expected = (1 + lenience * 0.2) / 2
    error = np.std(estimates) / np.sqrt(len(estimates))
    assert abs(np.mean(estimates) - expected) < 4 * error + 0.003  # a ratio of means: bias ~ 1/n


def test_tokens_too_unlikely_to_be_seen_again_are_accepted_like_the_next_likelier_ones():
    def sample(token, p):
        return RecordedSample(
            b"", 1, np.array([token], np.int32), np.log(np.array([p], np.float32))
        )

    old = [sample(0, 0.99), sample(1, 0.1), sample(2, 0.01)]  # the last is in no newer rollout
    new = [sample(0, 0.99), sample(1, 0.05)]
    very_unlikely, unlikely, *others = acceptance_rates([(old, new)] * 100, 1.0)
    assert very_unlikely == unlikely == pytest.approx(0.5, abs=0.02)
    assert min(others) > 0.95


def test_the_interval_of_prefix_reuse_allows_for_more_rejections_than_estimated():
    rng = np.random.default_rng(3)

    def drifted(epoch):  # half of the tokens have become half as likely
        return [
            s._replace(logprobs=s.logprobs - epoch * np.log(2) * (rng.random(len(s.tokens)) < 0.5))
            for s in step(epoch, alike=60)
        ]

    costs = np.eye(len(FEATURES))[[STEPS]] + np.eye(len(FEATURES))[[STEPS + 1]]
    predictions, assumed = predict(
        RecordedRun([drifted(0), drifted(1)], np.full(2, np.nan)), SimulatedEngine(8), costs=costs
    )
    reuse = next(p for p in predictions if p.preset == "reuse")
    assert reuse.low < reuse.speed_up and reuse.high > 1.1 * reuse.low
    assert "from 0.7 to 2 times as many rejections" in assumed[-1]


def test_without_log_probs_only_lossless_is_predicted():
    steps = [[sample._replace(logprobs=None) for sample in step(epoch)] for epoch in range(2)]
    costs = np.eye(len(FEATURES))[[STEPS]] + np.eye(len(FEATURES))[[STEPS + 1]]
    run = RecordedRun(steps, np.full(2, np.nan))
    predictions, assumed = predict(run, SimulatedEngine(8), costs=costs)
    assert [(p.preset, p.later) for p in predictions] == [("lossless", False), ("lossless", True)]
    assert "recorded without log-probs" in assumed[-1]


def test_a_log_folder_of_nemo_rl(nemo_rl, simulate):
    run = read_run(nemo_rl)
    assert len(run.steps) == 2  # one epoch, and the newest step besides
    assert run.preset == "plain" and np.isnan(run.seconds).all()
    for read, made in zip(run.steps[1], step(EPOCHS - 1), strict=True):
        np.testing.assert_array_equal(read.tokens, made.tokens)
        np.testing.assert_array_equal(read.logprobs, made.logprobs)
        assert read.prompt == 20
    printed = simulate(nemo_rl, "--max-num-seqs", 8, "--engines", 2)
    assert "2 engines, 8 rows at once in each" in printed and "costs are not known" in printed
    for preset in ("lossless │ first", "lossless │ later", "reuse │ later"):
        speed_up, low, high = map(
            float, re.search(rf"{preset} │ ([\d.]+) │ ([\d.]+) to ([\d.]+)", printed).groups()
        )
        assert low <= high and (speed_up > 1 or preset != "lossless │ later")


@pytest.mark.parametrize(
    ("tag", "preset"),
    [
        ("timing/train/total_step_time", "plain"),
        ("train/spec_rl/reused_token_fraction", "reuse"),
        ("train/spec_rl/tokens_per_step", "lossless"),
        ("generation_metrics/vllm/spec_acceptance_length", "lossless"),
    ],
)
def test_seconds_and_preset_of_a_run_of_nemo_rl_are_in_tensorboards_files(nemo_rl, tag, preset):
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(nemo_rl / "tensorboard"))
    for name, value in (("timing/train/generation", 2.5), (tag, 1.0)):
        scalar = Summary.Value(tag=name, simple_value=value)
        writer.add_event(Event(step=10, wall_time=0, summary=Summary(value=[scalar])))
    writer.close()
    run = read_run(nemo_rl)
    assert run.preset == preset
    # Of a run that drafted, a whole epoch has drafts that are known.
    assert len(run.steps) == (2 if preset == "plain" else 3)
    assert run.seconds[-2] == 2.5 and np.isnan(run.seconds[-1])


def test_costs_decide_whether_drafting_pays(nemo_rl, simulate, tmp_path):
    costs = tmp_path / "costs.json"
    seconds = []
    for drafting in (0.01, [0.09, 0.11]):
        costs.write_text(json.dumps({"steps": 0.01, "drafting_steps": drafting, "tokens": 1e-6}))
        printed = simulate(nemo_rl, "--max-num-seqs", 8, "--costs", costs)
        seconds.append(float(re.search(r"lossless │ later │ ([\d.]+)", printed)[1]))
    assert seconds[0] > 1 > seconds[1]


def test_seconds_of_a_run_are_what_costs_are_fitted_to():
    steps = [step(e, alike=10 * (e + 1)) for e in range(4)]
    engine = SimulatedEngine(8)
    costs = np.array([1e-4, 0, 2e-3, 0, 0, 0])
    seconds = [phase("plain", rows_of("plain", s, {}), engine)[0] @ costs for s in steps]
    run = RecordedRun(steps, np.array(seconds))
    predictions, assumed = predict(run, engine)
    assert "costs are fitted to the seconds of 4 plain steps" in assumed[0]
    # Drafted tokens may be free, or each may cost what a row does: both are in the interval.
    known = costs + np.array([[0, 1e-4, 0, 0, 0, 0], [0, 1e-4, -2e-3, 2e-3, 0, 0]])
    free, paid = (_lossless(predict(run, engine, costs=cost[None])[0]).speed_up for cost in known)
    assert paid < 0.95 * free
    lossless = _lossless(predictions)
    assert lossless.low == pytest.approx(paid, rel=0.15)
    assert lossless.high == pytest.approx(free, rel=0.15)


def _lossless(predictions):
    return next(p for p in predictions if p.preset == "lossless" and p.later)


def test_bad_input_is_one_line(nemo_rl, simulate, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "neither train_data_step<N>.jsonl of NeMo-RL" in simulate(empty, code=2)
    assert "no such folder" in simulate(tmp_path / "none", code=2)
    assert "cannot be read (Is a directory)" in simulate(nemo_rl, "--costs", empty, code=2)
    costs = tmp_path / "costs.json"
    for wrong, said in (
        ('{"step": 1}', "not for step"),
        ("[]", "not a JSON object"),
        ("[" * 10**5, "not a JSON object"),
        ('{"steps": Infinity, "drafting_steps": 1}', "must have seconds"),
        ('{"steps": [2, 1], "drafting_steps": 1}', "must have seconds"),
        ('{"steps": "a", "drafting_steps": 1}', "must have seconds"),
        ('{"steps": [1, 2, 3], "drafting_steps": 1}', "must have seconds"),
        ('{"steps": 1}', "steps and drafting_steps must cost something"),
    ):
        costs.write_text(wrong)
        assert said in simulate(nemo_rl, "--costs", costs, code=2)
    assert "kv_tokens = 64: must hold" in simulate(nemo_rl, "--kv-tokens", 64, code=2)
    file = nemo_rl / "train_data_step10.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[2]["token_loss_mask"][0][25] = 0.0
    file.write_text("\n".join(map(json.dumps, rows)))
    assert "train_data_step10.jsonl: 1 rows have several turns" in simulate(nemo_rl, code=2)
    for path in nemo_rl.glob("train_data_step*.jsonl"):
        path.write_text('{"token_ids": []}\n')
    assert "line 1: not a row with token_ids" in simulate(nemo_rl, code=2)


def test_a_bad_row_costs_that_row(nemo_rl, simulate, caplog):
    """Of no response, of other columns, of too few log-probs, and one that is cut off."""
    file = nemo_rl / "train_data_step10.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[3]["token_loss_mask"] = [[0.0] * 80]
    rows[5] = {"token_ids": []}
    rows[6]["generation_logprobs"] = [[0.0] * 21]
    rows[7]["generation_logprobs"][0][20] = float("nan")
    lines = ["", *map(json.dumps, rows)]
    lines[-1] = lines[-1][:100]
    file.write_text("\n".join(lines))
    assert "lossless │ later" in simulate(nemo_rl)
    [said] = caplog.messages
    assert said == f"{nemo_rl}: 5 lines are left out ({file.name}, line 5: no response, ...)"
    assert [len(samples) for samples in read_run(nemo_rl).steps] == [11, 16]
    (nemo_rl / "train_data_step11.jsonl").write_text("")  # killed before it wrote a row
    assert [len(samples) for samples in read_run(nemo_rl).steps] == [16, 11]


def test_a_run_whose_preset_cannot_be_told_is_refused(nemo_rl, simulate, monkeypatch):
    (nemo_rl / "events.out.tfevents.1.host").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_accumulator", None)
    assert "needs tensorboard to be read: pip install tensorboard" in simulate(nemo_rl, code=2)


def test_a_run_of_the_embedded_trainer(tmp_path, simulate, command_line):
    run = tmp_path / "run"
    command_line(
        *("train", REPOSITORY / "examples/configs/grpo_sort_cpu.yaml", "grpo.max_num_epochs=2"),
        *("data.num_prompts=4", "grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=4"),
        *("grpo.val_at_start=false", "grpo.val_at_end=false", "policy.train_global_batch_size=16"),
        *(f"checkpointing.checkpoint_dir={run}", f"logger.log_dir={run}"),
    )
    recorded = read_run(run)
    assert recorded.preset == "lossless" and recorded.max_num_seqs == 8
    assert recorded.max_draft_tokens == 40
    assert [len(s) for s in recorded.steps] == [16] * 2 and (recorded.seconds > 0).all()
    assert all(sample.prompt > 8 for sample in recorded.steps[0])
    printed = simulate(run)
    assert "1 engine, 8 rows at once" in printed and "lossless │ later" in printed
    assert simulate(run, "--max-draft-tokens", 40) == printed
    assert simulate(run, "--max-draft-tokens", 2) != printed
    progress = run / "step_2" / "progress.json"
    noted = json.loads(progress.read_text())
    noted["recipe"]["policy"]["generation"]["spec_rl"]["enabled"] = False
    progress.write_text(json.dumps(noted))
    assert "a plain run keeps no rollouts" in simulate(run, code=2)
    progress.parent.rename(run / "other")
    assert "no checkpoint here" in simulate(run, code=2)
