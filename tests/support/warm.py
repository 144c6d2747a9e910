"""The command line in processes that begin with torch and vLLM imported, which takes 10 s and more.

A process of the standard library's fork server has imported them, and each command runs in a copy
of it. All else is as in a process of the command's own: its signals, its exit code, what it leaves.
"""

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    [
        "nemo_specrl.trainer.loop",
        "vllm.entrypoints.llm",
        "vllm.model_executor.models.qwen3",
        "vllm.v1.engine.core",
        "vllm.v1.worker.cpu_worker",
    ]
)


class Command:
    """``python -m MODULE ARGUMENTS``; used like ``subprocess.Popen`` with text.

    Args:
        module: what is run.
        arguments: its arguments.
        folder: working folder.
        environment: all of its variables. What torch reads when it is imported comes too late.
    """

    def __init__(self, module, arguments, folder, environment):
        self._output = tempfile.TemporaryDirectory()
        self._process = _SERVER.Process(
            target=_run, args=(module, arguments, folder, dict(environment), self._output.name)
        )
        self._process.start()
        self.pid = self._process.pid

    def poll(self):
        return self._process.exitcode

    @property
    def stdout(self):
        """What it has printed so far."""
        return self._read("stdout")

    @property
    def stderr(self):
        return self._read("stderr")

    def _read(self, name):
        path = Path(self._output.name, name)
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("a command", timeout)
        return self.poll()

    def send_signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        self._process.kill()


def _run(module, arguments, folder, environment, output):
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(f"{output}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # of which multiprocessing runs none
