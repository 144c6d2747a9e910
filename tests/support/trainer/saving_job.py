"""``nemo-specrl train`` whose checkpoints are disturbed, for ``tests.trainer.test_loop``.

    python -m tests.support.trainer.saving_job kill|full RECIPE [KEY=VALUE ...]

``kill``: the first checkpoint is not written before the rollouts of the next step are there, and
with the training of that step the process kills itself. ``full``: no file of the first checkpoint
may become larger than 50 kB.
"""

import os
import resource
import signal
import sys
import threading

from nemo_specrl.cli.main import main
from nemo_specrl.trainer.generation import Engine
from nemo_specrl.trainer.loop import Trainer
from nemo_specrl.trainer.policy.torch.policy import TorchPolicy


def kill_behind_the_first_checkpoint():
    rollouts, save, train = Engine.rollouts, TorchPolicy.save, Trainer._train
    saving, made = threading.Event(), threading.Event()

    def noted(self, *arguments):
        groups = rollouts(self, *arguments)
        if saving.is_set():
            made.set()
        return groups

    def late(self, folder):
        saving.set()
        assert made.wait(60), "no rollouts were made beside the checkpoint"
        save(self, folder)

    def killed(self, samples):
        if saving.is_set():
            os.kill(os.getpid(), signal.SIGKILL)
        return train(self, samples)

    Engine.rollouts, TorchPolicy.save, Trainer._train = noted, late, killed


def fill_the_disk():
    TorchPolicy.save = limited(TorchPolicy.save, 50_000)


def limited(method, size):
    def call(self, *arguments):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            return method(self, *arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    return call


HOW = {
    "kill": kill_behind_the_first_checkpoint,
    "full": fill_the_disk,
}

if __name__ == "__main__":
    HOW[sys.argv[1]]()
    sys.argv[1:] = ["train", *sys.argv[2:]]
    main()
