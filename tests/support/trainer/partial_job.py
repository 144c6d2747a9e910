"""``nemo-specrl train`` that notes what each batch is made of, for ``test_partial_rollouts``.

    python -m tests.support.trainer.partial_job RECIPE [KEY=VALUE ...]

A line of ``batches.jsonl``, in the run's folder, is a step: the policy version; the prompts, and
those that were put off; how far the engine's log-probs of the batch are from those that the policy
has now; the versions that the cache has of its rows and of their tokens' births.
"""

import json
import sys

import numpy as np

from nemo_specrl.cli.main import main
from nemo_specrl.rollout import prompt_key
from nemo_specrl.trainer.loop import Trainer
from nemo_specrl.trainer.policy import Sample

collect = Trainer._collect


def noting(self):
    batch = collect(self)
    rows = [(group.problem.prompt, k, row) for group in batch.groups
            for k, row in enumerate(group.generated)]  # fmt: skip
    self._reload()
    now = self.policy.logprobs([Sample.to_score(prompt, row.tokens) for prompt, _, row in rows])
    self._offload()
    apart = [np.abs(a - row.policy_logprobs).max() for a, (*_, row) in zip(now, rows, strict=True)]
    cached = [self.generation.store.get([prompt_key(prompt)]) for prompt, *_ in rows]
    newest = [
        next(r for r in group if r.sample_index == k)
        for (_, k, _), found in zip(rows, cached, strict=True)
        for group in found.values()
    ]
    for rollout, (*_, row) in zip(newest, rows, strict=True):
        assert rollout.tokens.tolist() == row.tokens
    noted = {
        "version": self.generation.policy_version,
        "prompts": batch.drawn,
        "put_off": self.progress.put_off,
        "ended": all(row.ended for *_, row in rows),
        "apart": float(max(apart)),
        "versions": sorted({r.policy_version for r in newest}),
        "births": sorted({int(v) for r in newest for v in r.birth_versions}),
    }
    with (self.folder / "batches.jsonl").open("a") as file:
        file.write(f"{json.dumps(noted)}\n")
    return batch


if __name__ == "__main__":
    Trainer._collect = noting
    sys.argv[1:] = ["train", *sys.argv[1:]]
    main()
