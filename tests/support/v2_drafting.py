"""What the tests of V2 drafting share: rows replayed through an index, without an engine."""

import numpy as np
import torch

from nemo_specrl.drafting.chances import CHANCES
from nemo_specrl.drafting.device_index import DeviceIndex
from nemo_specrl.drafting.suffix_tree import DraftTrees

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where the index is; vLLM's arrays are there, too."""


def as_bytes(tokens):
    return np.array(tokens, np.int32).tobytes()


class Rows:
    """Rows that an index drafts for, and vLLM's arrays as the index sees them."""

    def __init__(
        self, *, rows=8, longest=640, vocabulary=40, length=5, max_bytes=4 << 20, learning=False
    ):
        self.index = DeviceIndex(
            DEVICE, rows, longest, vocabulary, max_bytes, length, CHANCES, learning
        )
        self.tokens = torch.zeros(rows, longest, dtype=torch.int32, device=DEVICE)
        self.totals = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        self.last = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
        self.responses = {}
        self.start = 3

    def open(self, row, key=b"a", history=(), identity=None, brought=(), **options):
        identity = 1000 + row if identity is None else identity
        sent = [(number, as_bytes(tokens)) for number, tokens in history]
        self.index.open_row(row, key, identity, sent, self.start, len(brought), **options)
        self.responses[row] = list(brought)
        self.tokens[row, : self.start] = 1

    def step(self, new, length=None):
        """Append tokens by row, and the drafts of these rows, int64 ``[rows, length]``."""
        for row, tokens in new.items():
            self.responses[row] += tokens
            response = self.responses[row]
            self.totals[row] = total = self.start + len(response)
            filled = torch.tensor(response, dtype=torch.int32, device=DEVICE)
            self.tokens[row, self.start : total] = filled
            self.last[row] = response[-1]
        batch = np.array(list(new), np.int32)
        bounds = np.array([self.start + len(self.responses[row]) + 2 for row in new])
        arrays = (self.tokens, self.totals, self.last, length)
        return self.index.draft(torch.from_numpy(batch).to(DEVICE), batch, bounds, *arrays).cpu()


def accepted(draft, tokens):
    """How many of a draft's tokens are those that follow."""
    n = 0
    while n < min(len(draft), len(tokens)) and draft[n] == tokens[n]:
        n += 1
    return n


def steps_with_index(responses, history, length, vocabulary):
    """Steps of rows of one prompt that yield these responses, all side by side."""
    longest = max(map(len, responses)) + 8
    rows = Rows(rows=len(responses), longest=longest, vocabulary=vocabulary, length=length)
    for row in range(len(responses)):
        rows.open(row, history=list(enumerate(history)) if row == 0 else ())
    return steps_of(rows, responses)


def steps_of(rows, responses):
    """Steps in which the rows of an index, opened in this order, yield these responses."""
    done, steps = [0] * len(responses), 0
    drafts = [[] for _ in responses]
    while running := [r for r, tokens in enumerate(responses) if done[r] < len(tokens)]:
        new = {}
        for r in running:
            left = responses[r][done[r] :]
            new[r] = left[: accepted(drafts[r], left) + 1]
            done[r] += len(new[r])
        steps += len(new)
        for r, draft in zip(new, rows.step(new).tolist(), strict=True):
            drafts[r] = draft
    return steps


def steps_with_trees(responses, history, length):
    """The same with the trees of the V1 proposer, whose drafts end at ``length`` alone."""
    trees = DraftTrees(1 << 26)
    sent = [(number, as_bytes(tokens)) for number, tokens in enumerate(history)]
    rows = [trees.open(b"a", 1000 + r, sent) for r in range(len(responses))]
    done, steps = [0] * len(responses), 0
    drafts = [[] for _ in responses]
    while running := [r for r, tokens in enumerate(responses) if done[r] < len(tokens)]:
        for r in running:
            left = responses[r][done[r] :]
            new = left[: accepted(drafts[r], left) + 1]
            rows[r].extend(new)
            done[r] += len(new)
        steps += len(running)
        for r in running:
            drafts[r] = np.frombuffer(rows[r].proposal(length, 0.0)[0], np.int32).tolist()
    return steps
