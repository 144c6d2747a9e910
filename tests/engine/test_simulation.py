"""The simulated engine beside the real one: the same steps for the same responses."""

import numpy as np

from nemo_specrl.simulation.simulated_engine import (
    FEATURES,
    SimulatedEngine,
    SimulatedRequest,
    drafting,
    run,
)
from nemo_specrl.speculation.suffix_tree import DraftTrees
from tests.conftest import DictCache
from tests.support.engines import LOSSLESS, PROMPT
from tests.support.lossless import KEY, made_with, params, rollouts, sample

PLACES, BLOCK, MAX_DRAFT = 64, 32, LOSSLESS.tree.max_draft_tokens
BUDGET = 64 * 192


def _replay(trees, identity, response, history=(), key=KEY):
    tokens = np.array(response, np.int32)
    return drafting(trees, key, identity, history, tokens, MAX_DRAFT)


class Steps:
    """Rows and tokens of each step that computes any."""

    def __init__(self, llm, monkeypatch):
        self.all = []
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        schedule = scheduler.schedule

        def noted(*args, **kwargs):
            output = schedule(*args, **kwargs)
            if output.total_num_scheduled_tokens:
                self.all.append(
                    (len(output.num_scheduled_tokens), output.total_num_scheduled_tokens)
                )
            return output

        monkeypatch.setattr(scheduler, "schedule", noted)


def test_plain_decoding_takes_the_very_steps(drafting_llm, monkeypatch):
    steps = Steps(drafting_llm, monkeypatch)
    lengths = [3 + 7 * i % 29 for i in range(100)]
    drafting_llm.generate(
        [{"prompt_token_ids": PROMPT}] * 100, [params(n, seed=n) for n in lengths], use_tqdm=False
    )
    counts = run(
        SimulatedEngine(PLACES, BUDGET),
        [SimulatedRequest(len(PROMPT), iter([(0, 1)] * n)) for n in lengths],
    )
    rows, tokens = np.sum(steps.all, axis=0)
    assert counts[:4].tolist() == [len(steps.all), 0, rows, tokens]


def test_a_replay_of_trees_takes_as_many_steps(drafting_llm, proposer, monkeypatch):
    """Not to the last one: the order in which rows extend their tree is not quite the engine's."""
    earlier = [sample(made_with(drafting_llm, DictCache(), LOSSLESS), 8, 40, first_seed=90)[1]]
    proposer.__init__(drafting_llm.llm_engine.vllm_config)
    steps = Steps(drafting_llm, monkeypatch)
    cache = DictCache(rollouts(earlier[0]))
    _, responses = sample(made_with(drafting_llm, cache, LOSSLESS), 100, 40)
    trees = DraftTrees(2**24)
    history = [(10**6 + i, np.array(r, np.int32).tobytes()) for i, r in enumerate(earlier[0])]
    requests = [
        SimulatedRequest(len(PROMPT), _replay(trees, i, response, history))
        for i, response in enumerate(responses)
    ]
    counts = run(SimulatedEngine(PLACES, BUDGET, drafts=True), requests)
    rows, _ = np.sum(steps.all, axis=0)
    got = dict(zip(FEATURES, counts, strict=True))
    assert rows < 0.95 * 100 * 40  # drafts were accepted
    assert abs(got["rows"] - rows) <= 0.01 * rows
    assert abs(got["drafting_steps"] - len(steps.all)) <= 2
