"""The live page of a run, served by the command and looked at by a real browser."""

import base64
import contextlib
import http.client
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
from PIL import Image

from nemo_specrl.monitoring.live_page import state_of, warnings_of
from tests.conftest import REPOSITORY
from tests.monitoring.test_report import metrics_row

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")


def write_steps(folder, steps, torn=""):
    """The metrics of a run of ten steps, of which so many are done."""
    rows = [metrics_row(s, speculative=True) | {"total_steps": 10} for s in range(1, steps + 1)]
    text = "".join(json.dumps(row) + "\n" for row in rows) + torn
    temporary = folder / "metrics.tmp"
    temporary.write_text(text)
    os.replace(temporary, folder / "metrics.jsonl")


@contextlib.contextmanager
def following(folder, *options, **environment):
    """The command, until it is interrupted, with the address that it prints."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "nemo_specrl", "report", str(folder)),
            *("--follow", "--port", "0", *options),
        ],
        env=os.environ | {"COLUMNS": "200", **environment},
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        line = process.stdout.readline()
        port = int(re.match(r"http://127\.0\.0\.1:(\d+)/", line)[1])
        yield port, line
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")


def get(port, path="/", method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


class Browser:
    """A headless Chromium, spoken to by the DevTools protocol over pipes, and its one page."""

    def __init__(self, program, profile):
        commands, self._to = os.pipe()
        self._from, answers = os.pipe()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        self._process = subprocess.Popen(
            # It reads commands from descriptor 3, and writes answers to 4.
            ["bash", "-c", f'exec "$@" 3<&{commands} 4>&{answers}', "browser", program, *options,
             f"--user-data-dir={profile}", "--window-size=1440,2000"],
            pass_fds=(commands, answers),
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(commands)
        os.close(answers)
        self._sent, self._read, self._session = 0, b"", {}
        page = self.tell("Target.createTarget", url="about:blank")["targetId"]
        attached = self.tell("Target.attachToTarget", targetId=page, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}

    def tell(self, method, **parameters):
        """Send a command, and return its result; events in between are passed over."""
        self._sent += 1
        command = {"id": self._sent, "method": method, "params": parameters, **self._session}
        os.write(self._to, json.dumps(command).encode() + b"\0")
        while True:
            while b"\0" not in self._read:
                more = os.read(self._from, 1 << 20)
                assert more, "the browser has ended"
                self._read += more
            message, _, self._read = self._read.partition(b"\0")
            answer = json.loads(message)
            if answer.get("id") == self._sent:
                assert "error" not in answer, answer
                return answer["result"]

    def evaluate(self, script):
        return self.tell("Runtime.evaluate", expression=script)["result"].get("value")

    def until(self, script, seconds=60):
        """Wait until a script yields something true."""
        deadline = time.monotonic() + seconds
        while not (value := self.evaluate(script)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return value

    def close(self):
        self._process.terminate()
        self._process.wait(timeout=60)
        os.close(self._to)
        os.close(self._from)


@pytest.fixture
def browser(tmp_path):
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip("no browser is installed (Debian: apt-get install chromium-headless-shell)")
    opened = Browser(program, tmp_path / "profile")
    yield opened
    opened.close()


def test_the_page_of_a_run_that_starts_grows_and_ends(tmp_path):
    run = tmp_path / "<sort>"
    run.mkdir()
    with following(run) as (port, _):

        def shown():
            answer, body = get(port, "/content")
            assert answer.status == 200
            return body.decode()

        assert 'class="state waiting">waiting<' in shown() and "&lt;sort&gt;" in shown()
        assert get(port, "/picture.png")[0].status == 404
        write_steps(run, 2, torn='{"step": 3, "epo')
        assert "<b>2</b><small>of 10</small>" in shown() and 'class="state running"' in shown()
        first = get(port, "/picture.png")[1]
        assert first.startswith(b"\x89PNG")
        assert get(port, "/picture.png")[1] == first
        write_steps(run, 7)
        assert "<b>7</b><small>of 10</small>" in shown()
        assert get(port, "/picture.png")[1] != first
        write_steps(run, 4)  # killed, and resumed from the checkpoint of step 4
        assert "<b>4</b><small>of 10</small>" in shown()
        (run / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
        assert "1 line is left out (line 2: not a step&#x27;s JSON object)" in shown()
        assert "<b>2</b>" in shown()
        (run / "metrics.jsonl").write_text('{"step": 1, "total_steps": "many"}\n')
        assert "total_steps must be a number" in shown()
        write_steps(run, 10)
        assert 'class="state done"' in shown()
        (run / "metrics.jsonl").unlink()
        assert 'class="state waiting"' in shown()
    assert list(run.iterdir()) == []  # nothing was written


STEP = "document.querySelector('.tile b').innerText === '{}'"
DRAWN = "document.querySelector('img').complete && document.querySelector('img').naturalWidth"


def test_a_browser_sees_steps_come_in(browser, tmp_path):
    run = tmp_path / "sort"
    run.mkdir()
    write_steps(run, 3)
    with following(run, NEMO_SPECRL_TOKEN="secret") as (_, line):
        browser.tell("Page.navigate", url=line.split()[0])
        assert browser.until(STEP.format(3))
        assert browser.evaluate("location.search") == ""  # the token is in a cookie now
        assert browser.until(DRAWN) == 1400
        picture = browser.evaluate("document.querySelector('img').src")
        write_steps(run, 5, torn='{"step": 6')
        assert browser.until(STEP.format(5))  # the page asks by itself
        assert browser.until(DRAWN) == 1400
        assert browser.evaluate("document.querySelector('img').src") != picture
        shot = browser.tell("Page.captureScreenshot")["data"]
        colours = Image.open(io.BytesIO(base64.b64decode(shot))).convert("RGB").getcolors(1 << 24)
        assert len(colours) > 100, "the plots are not there"
        assert browser.evaluate("document.getElementById('lost').hidden") is True
    assert browser.until("document.getElementById('lost').hidden === false")
    assert browser.evaluate(STEP.format(5))


def test_without_its_token_nothing_is_served(tmp_path):
    write_steps(tmp_path, 2)
    with following(tmp_path, NEMO_SPECRL_TOKEN="secret") as (port, line):
        assert line.split()[0].endswith("/?token=secret")
        for path in ("/", "/content", "/picture.png", "/?token=", "/?token=secre", "/nowhere"):
            answer, body = get(port, path)
            assert answer.status == 401 and b"<b>" not in body
        for wrong in ("Bearer secre", "Bearer", "Basic secret", "secret"):
            assert get(port, Authorization=wrong)[0].status == 401
        for cookie in ("nemo_specrl_token=secret", "nemo_specrl_token=", 'a="; b'):
            assert get(port, Cookie=cookie)[0].status == 401
        assert get(port, Authorization="Bearer secret")[0].status == 200
        answer, _ = get(port, "/?token=secret")
        assert (answer.status, answer.headers["Location"]) == (303, "/")
        cookie, *attributes = answer.headers["Set-Cookie"].split("; ")
        assert {"HttpOnly", "SameSite=Strict"} <= set(attributes)
        assert get(port, Cookie=cookie)[0].status == 200


def test_names_that_point_here_and_other_requests_are_refused(tmp_path):
    write_steps(tmp_path, 1)
    (tmp_path / "secret.txt").write_text("not for the page")
    with following(tmp_path) as (port, _):
        for host in ("localhost", f"localhost:{port}", "127.0.0.1:9"):
            assert get(port, Host=host)[0].status == 200
        for host in ("rebound.example", f"rebound.example:{port}", "127.0.0.1.example", ""):
            assert get(port, Host=host)[0].status == 403
        for path in ("/secret.txt", "/metrics.jsonl", "/../secret.txt", "/content/"):
            assert get(port, path)[0].status == 404
        for method in ("POST", "PUT", "DELETE"):
            assert get(port, method=method)[0].status == 501
        with socket.socket() as other, pytest.raises(ConnectionRefusedError):
            other.connect(("127.0.0.2", port))
        policy = get(port)[0].headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert policy != get(port)[0].headers["Content-Security-Policy"]  # a nonce of its own


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("{here}/none", "--follow"), "none: no such folder"),
        (("{here}", "--follow", "--port", "{taken}"), "--port {taken}: cannot be listened on"),
        (("{here}", "--follow", "--token", ""), "--token must not be empty"),
        (("{here}", "--port", "1234"), "--port 1234: needs --follow"),
    ],
)
def test_bad_input_is_one_line(tmp_path, options, message):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = {"here": tmp_path, "taken": taken.getsockname()[1]}
        done = subprocess.run(
            [sys.executable, "-m", "nemo_specrl", "report", *(o.format(**words) for o in options)],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 2 and done.stdout == ""
    assert message.format(**words) in done.stderr and done.stderr.count("\n") == 1


def test_a_run_is_stalled_after_five_of_its_steps_and_half_an_hour():
    rows = [{"step": 1, "step_s": 600.0}]
    assert state_of([], 1e6)[0] == "waiting"
    assert [state_of(rows, age)[0] for age in (0, 2900, 3100)] == ["running", "running", "stalled"]
    quick = [{"step": 1, "step_s": 1.0, "total_steps": 2}]
    assert [state_of(quick, age)[0] for age in (1700, 1900)] == ["running", "stalled"]
    assert state_of([*quick, {"step": 2, "total_steps": 2}], 1900)[0] == "done"


def test_warnings_name_what_has_changed():
    healthy = {"loss": 0.1, "spec_rl/reward_drifts": 0.0, "spec_rl/corrupt_records": 0}
    rows = [
        healthy | {"step": 1},
        healthy | {"step": 2, "spec_rl/reward_drifts": 1.0, "spec_rl/cache_errors": 3.0},
        healthy | {"step": 3, "spec_rl/reward_drifts": 1.0, "spec_rl/corrupt_records": 2},
        healthy | {"step": 4, "spec_rl/corrupt_records": 2, "spec_rl/disk_used_fraction": 0.95},
        healthy | {"step": 5, "spec_rl/corrupt_records": 2, "spec_rl/disk_used_fraction": 0.96},
        {"step": 6, "loss": None},
    ]
    assert warnings_of(rows) == [
        (6, "the loss is no finite number"),
        (4, "the cache's disk is used to more than 90 %"),
        (3, "the cache skipped 2 damaged records"),
        (2, "3 calls of the cache failed"),
        (2, "reused rows drift from fresh ones: reward"),
    ]
