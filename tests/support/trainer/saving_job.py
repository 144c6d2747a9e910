"""``nemo-specrl train`` whose checkpoints are disturbed, for ``test_training``.

    python -m tests.support.trainer.saving_job kill|full|cache RECIPE [KEY=VALUE ...]

``kill``: the first checkpoint is not written before the rollouts of the next step are there, and
with the training of that step the process kills itself. ``full``: no file of the first checkpoint
may become larger than 50 kB. ``cache``: no file may be written while the cache commits, is copied
into a checkpoint or is closed.
"""

import os
import resource
import signal
import sys
import threading

from nemo_specrl.cache import store as store_module
from nemo_specrl.cli.main import main
from nemo_specrl.trainer.generation.in_process import InProcessEngine
from nemo_specrl.trainer.loop import Trainer
from nemo_specrl.trainer.policy.torch.policy import TorchPolicy
from nemo_specrl.trainer.replay_journal import JournaledStore


def kill_behind_the_first_checkpoint():
    rollouts, save, train = InProcessEngine.rollouts, TorchPolicy.save, Trainer._train
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

    InProcessEngine.rollouts, TorchPolicy.save, Trainer._train = noted, late, killed


def fill_the_disk():
    TorchPolicy.save = limited(TorchPolicy.save, 50_000)


def fill_the_disk_of_the_cache():
    store_module.FLUSH_SECONDS = 3600  # what the timer commits beside these calls would be there
    for name in ("sync", "snapshot", "close"):
        setattr(JournaledStore, name, limited(getattr(JournaledStore, name), 0))


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
    "cache": fill_the_disk_of_the_cache,
}

if __name__ == "__main__":
    HOW[sys.argv[1]]()
    sys.argv[1:] = ["train", *sys.argv[2:]]
    main()
