"""Processes that ``ft_launcher`` starts, for ``test_nvrx``.

    python -m tests.support.heartbeat_job learn FOLDER
    python -m tests.support.heartbeat_job steps

``learn`` prints, as a line of JSON, the timeouts that its monitor has when it connects and those
after a few sections; the first process then kills itself. ``steps`` is NeMo-RL's side of two steps
with the plug-in's hooks, after which the first process hangs.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from nemo_specrl.monitoring import heartbeat

FIRST = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"


def timeouts():
    found = heartbeat._monitor._client.section_timeouts
    return {**found.section, "outside": found.out_of_section}


def learn(folder):
    heartbeat.connect(Path(folder))
    before = dict(heartbeat._monitor._client.cfg.rank_section_timeouts)
    connected = timeouts()
    with heartbeat.section("rollout"), heartbeat.section("training"), heartbeat.section("unknown"):
        time.sleep(0.2)
    print(json.dumps({"monitor": before, "connected": connected, "after": timeouts()}), flush=True)
    if FIRST:
        os.kill(os.getpid(), signal.SIGKILL)


def steps():
    from tests.nemo_rl.test_steps import Trainer

    heartbeat.connect()  # as the plug-in does before NeMo-RL's setup
    trainer = Trainer(Path(os.devnull))  # no log is needed
    trainer.hooks._cache.stats = dict  # nor a cluster
    for step in (1, 2):
        time.sleep(0.5)
        trainer.log_metrics({}, step, prefix="timing/train")
    if FIRST:
        time.sleep(3600)
    os._exit(0)  # at once: no further heartbeat comes


if __name__ == "__main__":
    {"learn": learn, "steps": steps}[sys.argv[1]](*sys.argv[2:])
