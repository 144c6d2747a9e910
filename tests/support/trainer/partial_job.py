"""``nemo-specrl train`` that notes what each batch is made of, for ``test_partial_rollouts``.

    python -m tests.support.trainer.partial_job RECIPE [KEY=VALUE ...]

A line of ``batches.jsonl``, in the run's folder, is a step: the policy version; the prompts, and
those that were put off; how far the engine's log-probs of the batch are from those that the policy
has now.
"""

import json
import sys

import numpy as np

from nemo_specrl.cli.main import main
from nemo_specrl.trainer.loop import Trainer
from nemo_specrl.trainer.policy import Sample

collect = Trainer._collect


def noting(self):
    batch = collect(self)
    rows = [(group.problem.prompt, row) for group in batch.groups for row in group.generated]
    self._reload()
    now = self.policy.logprobs([Sample.to_score(prompt, row.tokens) for prompt, row in rows])
    self._offload()
    apart = [np.abs(a - row.logprobs).max() for a, (_, row) in zip(now, rows, strict=True)]
    noted = {
        "version": self.generation.policy_version,
        "prompts": batch.drawn,
        "put_off": self.progress.put_off,
        "ended": all(row.ended for _, row in rows),
        "apart": float(max(apart)),
    }
    with (self.folder / "batches.jsonl").open("a") as file:
        file.write(f"{json.dumps(noted)}\n")
    return batch


if __name__ == "__main__":
    Trainer._collect = noting
    sys.argv[1:] = ["train", *sys.argv[1:]]
    main()
