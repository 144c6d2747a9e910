"""Tokens a step of history beside a drafter, on rollouts that the demo's policy has made.

``data/rollouts.json``: by prompt and epoch, the tokens of six responses. A draft is verified by
what follows in the recorded response, which accepts each token as often as the policy has it. The
drafter is a stand-in that is right with a chance of its own at each place; index, chances and
choice are ours.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nemo_specrl.config import SpecRLConfig

EPOCHS = json.loads((Path(__file__).parent / "data" / "rollouts.json").read_text())
PROMPTS, GROUP, K = 4, len(EPOCHS[0][0]), 5
"""Prompts at once, rows of each, and tokens of a draft."""
ROWS, LONGEST, VOCABULARY = PROMPTS * GROUP, 170, 32
RIGHT = 0.63
"""Of an EAGLE-3 head's drafts, about."""


def vllm_config():
    block = SpecRLConfig(enabled=True, draft={"max_bytes": 16 << 20}).model_dump(mode="json")
    return SimpleNamespace(
        additional_config={"spec_rl": block},
        speculative_config=SimpleNamespace(num_speculative_tokens=K),
        model_config=SimpleNamespace(
            max_model_len=LONGEST, seed=0, get_vocab_size=lambda: VOCABULARY
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=ROWS),
    )


class Rollouts:
    """Rows that decode recorded responses, and draft from ``source``.

    Args:
        source: "history", "drafter", or "beside": the better of both.
    """

    def __init__(self, source):
        from nemo_specrl.engine import speculator  # needs Triton

        self.drafter = SimpleNamespace(propose=self.propose, init_cudagraph_manager=None)
        self.ours = speculator.HistoryBeside(self.drafter, vllm_config(), torch.device("cpu"))
        self.rng = np.random.default_rng(0)
        if source != "beside":
            always = torch.tensor(source == "history")
            self.ours.history_is_better = lambda rows: always.expand(rows)

    def propose(self, batch, *args, dummy_run):
        """The drafter's tokens, of which as many are right as its chances have it."""
        drafts = torch.zeros(batch.num_reqs, K, dtype=torch.int64)
        for i, row in enumerate(batch.idx_mapping_np):
            following = self.texts[row][self.done[row] :][:K]
            right = np.array([*following, *[0] * (K - len(following))])
            wrong = (right + 1) % VOCABULARY
            drafts[i] = torch.from_numpy(np.where(self.rng.random(K) < RIGHT, right, wrong))
        return drafts

    def decode(self, prompts):
        """Tokens a row and step.

        Args:
            prompts: number of a prompt, and its epoch. It brings the responses of those before.
        """
        self.texts = [text for prompt, epoch in prompts for text in EPOCHS[prompt][epoch]]
        self.done = [0] * ROWS
        all_tokens = torch.zeros(ROWS, LONGEST, dtype=torch.int32)
        total = torch.ones(ROWS, dtype=torch.int32)  # a token of the prompt
        self.ours.req_states = SimpleNamespace(
            all_token_ids=SimpleNamespace(gpu=all_tokens), total_len=SimpleNamespace(gpu=total)
        )
        for row, text in enumerate(self.texts):
            prompt, epoch = prompts[row // GROUP]
            before = [tokens for earlier in EPOCHS[prompt][:epoch] for tokens in earlier]
            history = [
                (1 + i, np.array(tokens, np.int32).tobytes()) for i, tokens in enumerate(before)
            ]
            self.ours.index.open_row(
                row, bytes([prompt]) * 16, 1000 + row, history, 1, most=len(text)
            )
        drafts, steps, running = {}, 0, list(range(ROWS))
        while running:
            for row in running:
                text, done = self.texts[row], self.done[row]
                followed = text[done : len(text) - 1]
                pairs = zip(drafts.get(row, []), followed, strict=False)
                right = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
                if right is None:
                    right = min(len(drafts.get(row, [])), len(followed))
                now = done + right + 1
                all_tokens[row, 1 + done : 1 + now] = torch.tensor(text[done:now])
                self.done[row] = now
                total[row] = 1 + now
                steps += 1
            for row in [row for row in running if self.done[row] == len(self.texts[row])]:
                self.ours.remove_request(row)
                running.remove(row)
            if running:
                last = torch.zeros(ROWS, dtype=torch.int64)
                of_step = self.drafter.propose(self.batch(running), *[None] * 6, last)
                drafts = dict(zip(running, of_step.tolist(), strict=True))
        return sum(map(len, self.texts)) / steps

    def batch(self, running):
        n = len(running)
        return SimpleNamespace(
            num_reqs=n,
            idx_mapping=torch.tensor(running),
            idx_mapping_np=np.array(running),
            num_computed_tokens_np=np.array([self.done[row] for row in running]),
            num_scheduled_tokens=np.ones(n, np.int64),
            prefill_len_np=np.ones(n, np.int64),
        )


CASES = {
    "first epoch": ([(0, 0), (1, 0), (2, 0), (3, 0)], 1.1),
    "second epoch": ([(0, 1), (1, 1), (2, 1), (3, 1)], 0.98),
    "half of the prompts are new": ([(0, 1), (1, 1), (4, 0), (5, 0)], 1.05),
}
"""What is decoded, and how many times as many tokens a step as by the better of the two alone at
least: rows differ where only some have a history, or where siblings have got further."""


@pytest.fixture(scope="module")
def sources():
    with pytest.MonkeyPatch.context() as patch:
        ranks = "nemo_specrl.engine.speculator.least_of_ranks"
        patch.setattr(ranks, lambda number: number)  # there are no others
        return {name: Rollouts(name) for name in ("history", "drafter", "beside")}


@pytest.mark.parametrize("case", CASES)
def test_history_beside_a_drafter_yields_no_less_than_the_better_one(sources, case, by_reference):
    prompts, least = CASES[case]
    found = {name: rollouts.decode(prompts) for name, rollouts in sources.items()}
    print(case, {name: round(value, 2) for name, value in found.items()})
    assert found["beside"] >= least * max(found["history"], found["drafter"])
