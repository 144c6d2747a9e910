"""Engines in processes of their own: vLLM's OpenAI server, and a script that runs an ``LLM``."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

from tests.conftest import KV_BLOCKS, REPOSITORY

START_SECONDS = 600


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


class Server:
    """An unmodified ``vllm serve`` on a port of this machine.

    Args:
        model: folder.
        spec_rl: the block in ``additional_config``; None: no plug-in.
        log: file for its output.
    """

    def __init__(self, model, spec_rl, log, *, seed=0):
        self.port, self.log = free_port(), log
        options = [f"--{name.replace('_', '-')}={value}" for name, value in KV_BLOCKS.items()]
        if spec_rl is not None:
            options.append("--additional-config=" + json.dumps({"spec_rl": spec_rl}))
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
            *("--served-model-name", "model", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--dtype", "float32", "--max-model-len", "192", "--max-num-seqs", "16"),
            *("--enforce-eager", "--seed", str(seed), *options),
        ]
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command,
                env=environment,
                cwd=REPOSITORY,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self._get("/health")
                return
            except (urllib.error.URLError, ConnectionError):
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.stop()
                    raise AssertionError(log.read_text()[-3000:]) from None
                time.sleep(0.5)

    def complete(self, prompt, **options):
        """The choices of a completion; prompts are lists of token ids."""
        body = {"model": "model", "prompt": prompt, "temperature": 1.0, **options}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["choices"]

    def metrics(self):
        """Counts of drafts, vLLM's own."""
        found = {}
        for line in self._get("/metrics").splitlines():
            if line.startswith("vllm:spec_decode_num") and "per_pos" not in line:
                name, value = line.rsplit(" ", 1)
                name = name.split("{")[0].removeprefix("vllm:spec_decode_num_")
                found[name] = found.get(name, 0.0) + float(value)
        return found

    def _get(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            return answer.read().decode()

    def engine_core(self):
        """Process id of the engine core."""
        cores = [
            child
            for child in children_of(self.process.pid)
            if b"EngineCore" in open(f"/proc/{child}/cmdline", "rb").read()  # noqa: SIM115
            or b"EngineCore" in open(f"/proc/{child}/comm", "rb").read()  # noqa: SIM115
        ]
        [core] = cores
        return core

    def stop(self, how=signal.SIGTERM):
        if self.process.poll() is None:
            self.process.send_signal(how)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(60)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


def children_of(pid):
    """Process ids of all descendants."""
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children") as file:
            for child in map(int, file.read().split()):
                found += [child, *children_of(child)]
    return found
