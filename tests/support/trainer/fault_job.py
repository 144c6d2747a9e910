"""``nemo-specrl train`` whose engine fails, for ``test_resilience``.

    python -m tests.support.trainer.fault_job RECIPE [KEY=VALUE ...]

Under ``ft_launcher``: the engine of the first process hangs in a forward pass of step 3, that of
the second one is killed in step 5. It is in the process of the driver.
"""

import os
import signal
import sys
import time

from nemo_specrl.cli.main import main
from nemo_specrl.trainer.generation import Engine

HANGS, DIES = 3, 5


def fail_in_the_middle_of_rollouts():
    rollouts = Engine.rollouts
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    def failing(self, *arguments):
        step = self.llm.llm_engine.step
        number = self.policy_version + 1

        def failing_step():
            if (start, number) == (0, HANGS):
                time.sleep(3600)
            if (start, number) == (1, DIES):
                os.kill(os.getpid(), signal.SIGKILL)
            return step()

        self.llm.llm_engine.step = failing_step
        try:
            return rollouts(self, *arguments)
        finally:
            self.llm.llm_engine.step = step

    Engine.rollouts = failing


if __name__ == "__main__":
    fail_in_the_middle_of_rollouts()
    sys.argv[1:] = ["train", *sys.argv[1:]]
    main()
