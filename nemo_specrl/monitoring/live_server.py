"""Serves the live page of one run on the local machine: `nemo-specrl report --follow`.

It reads only the run's metrics.jsonl and writes nothing. It serves the page, the page's content and
its picture; if there is a token, requests need it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import threading
import time
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from nemo_specrl.errors import ConfigError
from nemo_specrl.monitoring import live_page
from nemo_specrl.monitoring.drawing import canvas
from nemo_specrl.monitoring.metrics_file import METRICS
from nemo_specrl.monitoring.report import run_columns
from nemo_specrl.monitoring.run_plot import run_picture
from nemo_specrl.monitoring.run_steps import run_steps

__all__ = ["LivePage"]

HOSTS = ("127.0.0.1", "localhost")
COOKIE = "nemo_specrl_token"


class _Run:
    """The steps and the picture of a run, read again when its file has changed.

    Args:
        folder: folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.name = folder.resolve().name
        self._folder, self._mutex = folder, threading.Lock()
        self._read_as = ""
        self._rows: list[dict[str, Any]] = []
        self._columns: dict[str, list[float | None]] = {}
        self._problem = ""
        self._drawn: tuple[str, bytes] = "", b""

    def content(self) -> str:
        """The changing part of the page."""
        with self._mutex:
            age = self._refresh()
            return live_page.content(
                self.name, self._rows, age, version=self._read_as, problem=self._problem
            )

    def picture(self) -> bytes | None:
        """The picture of the steps so far; None before the first one."""
        with self._mutex:
            self._refresh()
            if not self._rows:
                return None
            if self._drawn[0] != self._read_as:
                self._drawn = self._read_as, run_picture(self._columns, "")
            return self._drawn[1]

    def _refresh(self) -> float:
        """Read the file if it has changed; return the time since the last write to it, seconds.

        If something is wrong with the file, ``_problem`` says so: damaged lines are left out, and a
        file without a complete step has no rows.
        """
        try:
            status = (self._folder / METRICS).stat()
        except OSError:
            self._read_as, self._rows, self._problem = "", [], ""
            return 0.0
        now = f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"
        if now != self._read_as:
            self._read_as, self._rows, self._problem = now, [], ""
            try:
                rows, self._problem = run_steps(self._folder)
                self._columns = run_columns(rows)
                self._rows = rows
            except ConfigError as error:
                self._problem = str(error)
        return max(0.0, time.time() - status.st_mtime)


class LivePage:
    """The page of a run, on the loopback address.

    Args:
        folder: folder of the run; it need not have a step yet.
        port: port to listen on; 0: a free one.
        token: access token, which requests carry as ``?token=...``, in the cookie that is set then,
            or as ``Authorization: Bearer``. None: requests need no token.

    Attributes:
        url: address of the page, with the token.

    Raises:
        ConfigError: there is no such folder, the port cannot be used, or matplotlib is missing.
    """

    def __init__(self, folder: Path, port: int, token: str | None = None) -> None:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such folder; give the folder of a run")
        if token is not None and not token:
            raise ConfigError("--token must not be empty")
        with canvas():  # raises if matplotlib is missing
            pass
        run = _Run(folder)
        handler = type("Handler", (_Handler,), {"run": run, "token": token or ""})
        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        except OSError as error:
            raise ConfigError(
                f"--port {port}: cannot be listened on ({error.strerror}); give another, or 0 for "
                "any that is free"
            ) from None
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        if token is not None:
            self.url += f"?token={token}"

    def serve(self) -> None:
        """Answer requests until the process is interrupted."""
        with self._server:
            self._server.serve_forever()


class _Handler(BaseHTTPRequestHandler):
    """Answers GET for the page, its content and its picture.

    Attributes:
        run: the run.
        token: what requests need; empty: they need none.
    """

    run: _Run
    token: str
    server_version, sys_version = "nemo-specrl", ""

    def do_GET(self) -> None:  # http.server calls this name
        """Answer a request."""
        # Against DNS rebinding: a foreign page whose name resolves to this address sends that name.
        if self.headers.get("Host", "").partition(":")[0] not in HOSTS:
            self._answer(403, "text/plain", b"ask for 127.0.0.1 or localhost\n")
            return
        address = urlsplit(self.path)
        given = parse_qs(address.query).get("token", [""])[0]
        if self._is_token(given):
            cookie = f"{COOKIE}={self._cookie()}; HttpOnly; SameSite=Strict; Path=/"
            self._answer(303, "text/plain", b"", {"Location": "/", "Set-Cookie": cookie})
        elif not self._allowed():
            self._answer(401, "text/plain", b"this page needs its token: /?token=...\n")
        elif address.path == "/":
            nonce = secrets.token_urlsafe(16)
            body = live_page.page(self.run.name, self.run.content(), nonce)
            self._answer(200, "text/html; charset=utf-8", body, nonce=nonce)
        elif address.path == "/content":
            self._answer(200, "text/html; charset=utf-8", self.run.content().encode())
        elif address.path == "/picture.png" and (picture := self.run.picture()) is not None:
            self._answer(200, "image/png", picture)
        else:
            self._answer(404, "text/plain", b"not here\n")

    def _allowed(self) -> bool:
        if not self.token:
            return True
        kind, _, given = self.headers.get("Authorization", "").partition(" ")
        if kind == "Bearer" and self._is_token(given.strip()):
            return True
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(COOKIE)
        except CookieError:
            return False
        return cookie is not None and hmac.compare_digest(
            cookie.value.encode(), self._cookie().encode()
        )

    def _is_token(self, given: str) -> bool:
        """Whether there is a token, and ``given`` is it."""
        return bool(self.token) and hmac.compare_digest(given.encode(), self.token.encode())

    def _cookie(self) -> str:
        """The cookie's value: a hash, since a token may have characters that a cookie may not."""
        return hashlib.sha256(b"nemo_specrl cookie " + self.token.encode()).hexdigest()

    def _answer(
        self,
        code: int,
        kind: str,
        body: bytes,
        headers: dict[str, str] | None = None,
        *,
        nonce: str = "",
    ) -> None:
        policy = (
            "default-src 'none'; img-src 'self'; connect-src 'self'; style-src 'unsafe-inline'; "
            f"script-src 'nonce-{nonce}'; frame-ancestors 'none'; base-uri 'none'"
        )
        self.send_response(code)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": policy,
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        with contextlib.suppress(ConnectionError):  # the browser has gone
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests, which may contain the token."""
