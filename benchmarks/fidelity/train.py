"""``nemo-specrl train`` that also counts what rollouts take, for ``fidelity.py``.

    .venv/bin/python -m benchmarks.fidelity.train COUNTS.jsonl RECIPE [KEY=VALUE ...]

Appends a line for each batch of rollouts: steps of the engine, and processor seconds of this
process, in which the engine is. What else the machine does changes those less than a clock's.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from nemo_specrl.cli.main import main
from nemo_specrl.trainer.generation.in_process import InProcessEngine


def count_into(path: Path) -> None:
    """Have every batch of rollouts noted in ``path``."""
    original = InProcessEngine.rollouts

    def rollouts(self: InProcessEngine, prompts: Any, attempt: int = 0, *rest: Any) -> Any:
        engine, steps = self.llm.llm_engine, 0
        step = engine.step

        def counted() -> Any:
            nonlocal steps
            steps += 1
            return step()

        started = time.process_time()
        engine.step = counted  # type: ignore[method-assign]
        try:
            return original(self, prompts, attempt, *rest)
        finally:
            del engine.step
            line = {
                "step": self.policy_version + 1,
                "attempt": attempt,
                "rollout_cpu_s": time.process_time() - started,
                "engine_steps": steps,
            }
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")

    InProcessEngine.rollouts = rollouts  # type: ignore[method-assign]


if __name__ == "__main__":
    count_into(Path(sys.argv[1]))
    sys.argv[1:] = ["train", *sys.argv[2:]]
    main()
