"""vLLM's own HTTP server on the V2 runner: its requests bring nothing and draft all the same."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from nemo_specrl import SpecRLConfig, engine_options
from tests.conftest import REPOSITORY
from tests.support.engines import PROMPT

SERVE = "from tests.support import v2_cpu; from vllm.entrypoints.cli.main import main; main()"


@pytest.fixture(scope="module")
def ask(random_model, tmp_path_factory):
    """A function that sends JSON to a server, or nothing, and returns what it answers."""
    config = SpecRLConfig(
        enabled=True,
        preset="lossless",
        tree={"max_draft_tokens": 4, "adaptive": False, "max_bytes": 8 << 20},
    )
    options = engine_options(config)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log.txt"
    command = [
        *(sys.executable, "-c", SERVE, "serve", str(random_model), "--port", str(port)),
        *("--host", "127.0.0.1", "--served-model-name", "policy", "--enforce-eager"),
        *("--max-model-len", "96", "--max-num-seqs", "8", "--block-size", "32"),
        *("--dtype", "float32", "--speculative-config", json.dumps(options["speculative_config"])),
        *("--additional-config", json.dumps(options["additional_config"])),
    ]
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    environment.pop("VLLM_ALLOW_INSECURE_SERIALIZATION", None)  # nothing here needs it

    def ask(path, body=None):
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        url = f"http://127.0.0.1:{port}/{path}"
        with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as answer:
            text = answer.read().decode()
        return text if path == "metrics" else json.loads(text or "{}")

    with log.open("w") as written:
        server = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=environment,
            stdout=written,
            stderr=written,
            start_new_session=True,
        )
    try:
        while True:
            assert server.poll() is None, log.read_text()[-6000:]
            try:
                ask("health")
                break
            except OSError:
                time.sleep(0.5)
        yield ask
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def accepted(ask):
    """Draft tokens that were accepted since the start, by vLLM's own counter."""
    lines = ask("metrics").splitlines()
    name = "vllm:spec_decode_num_accepted_tokens_total"
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


@pytest.mark.timeout(600)
def test_histories_are_sent_by_http(ask):
    def response(prompt):
        body = {"model": "policy", "prompt": prompt, "max_tokens": 24, "temperature": 0}
        # So that tokens do not repeat, and fillers of drafts are not accepted.
        body |= {"presence_penalty": 2.0, "frequency_penalty": 2.0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        return ask("v1/completions", body)["choices"][0]["token_ids"]

    later = [*PROMPT, 3, 4, 5]
    plain = [response(PROMPT), response(later)]
    assert [len(tokens) for tokens in plain] == [24, 24]
    before = accepted(ask)
    assert before < 12
    body = {"method": "spec_rl_add_histories", "args": [[[PROMPT, plain]]]}
    assert ask("collective_rpc", body) == {"results": [{"prompts": 1, "responses": 2}]}
    assert [response(PROMPT), response(later)] == plain
    assert accepted(ask) - before >= 2 * (24 - 24 / 5 - 2)
    body["args"] = [[[["one"], [[1]]]]]
    with pytest.raises(urllib.error.HTTPError, match="500"):
        ask("collective_rpc", body)
    assert response(PROMPT) == plain[0]  # and the engine goes on
