"""The live view: the report's page on this machine only, and the data that the page requests repeatedly.

It listens only on 127.0.0.1. It accepts only requests whose Host header names this machine, so that no web page can
reach it through a domain of its own. It answers GET and HEAD for two paths, and writes nothing.
"""

import hashlib
import http.server
import json
import os
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from ..core.version import __version__
from .figures import report_data
from .loading import in_use, read_all
from .page import EMPTY, render

LOOPBACK = "127.0.0.1"
WATCHED = (
    "run.json",
    "config.toml",
    "metrics.jsonl",
    "summary.json",
    "partition.json",
    "confusion.json",
    "regions.json",
)


class Source:
    """The current content of the run directories; they are read again only if a file has changed."""

    def __init__(self, paths: Sequence[Path], target: float | None = None):
        self.paths, self.target = list(paths), target
        self._lock = threading.Lock()
        self._seen: Any = None
        self._data: dict[str, Any] = EMPTY

    def data(self) -> dict[str, Any]:
        """The report's data. A directory may have no run yet."""
        with self._lock:
            seen = self._state()
            if seen != self._seen:
                there = [p for p in self.paths if seen[p]]
                self._data = report_data(read_all(there), self.target) if there else EMPTY
                self._seen = seen
            return self._data

    def _state(self) -> dict[Path, tuple[Any, ...]]:
        found: dict[Path, tuple[Any, ...]] = {}
        for path in self.paths:
            homes = [path, *sorted(p.parent for p in path.rglob("run.json") if p.parent != path)]
            found[path] = tuple(s for home in homes for name in WATCHED if (s := _stamp(home / name)) is not None)
            if found[path]:
                found[path] += tuple(in_use(home) for home in homes)  # the end of a run also changes the page
        return found


def _stamp(path: Path) -> tuple[str, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return str(path), stat.st_mtime_ns, stat.st_size


class LiveView(http.server.ThreadingHTTPServer):
    """The server of the live view."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, source: Source, port: int = 0):
        self.source = source
        super().__init__((LOOPBACK, port), _Handler)

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.server_address[1]}/"

    @property
    def hosts(self) -> set[str]:
        """The allowed Host headers."""
        port = self.server_address[1]
        return {f"{LOOPBACK}:{port}", f"localhost:{port}"}


class _Handler(http.server.BaseHTTPRequestHandler):
    server: LiveView
    server_version, sys_version = "Solera", ""
    timeout = 30

    def do_GET(self) -> None:  # the name is given by http.server
        self._answer(body=True)

    def do_HEAD(self) -> None:  # the same
        self._answer(body=False)

    def _answer(self, body: bool) -> None:
        if self.headers.get("Host", "").lower() not in self.server.hosts:
            self._send(HTTPStatus.MISDIRECTED_REQUEST, b"this view is for this machine only\n", "text/plain", body)
            return
        path = self.path.partition("?")[0]
        if path not in ("/", "/data.json"):
            self._send(HTTPStatus.NOT_FOUND, b"there is only / and /data.json\n", "text/plain", body)
            return
        try:
            data = self.server.source.data()
        except Exception as e:  # a directory was removed or cannot be read: the page says so and asks again
            data = {**EMPTY, "title": "Nothing to read", "notes": [f"{type(e).__name__}: {e}"]}
        if path == "/":
            content = render(data, __version__, live=True).encode()
            self._send(HTTPStatus.OK, content, "text/html; charset=utf-8", body)
            return
        content = json.dumps(data, allow_nan=False, separators=(",", ":")).encode()
        tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        if self.headers.get("If-None-Match") == tag:
            self._send(HTTPStatus.NOT_MODIFIED, b"", "application/json", False, tag)
        else:
            self._send(HTTPStatus.OK, content, "application/json", body, tag)

    def _send(self, status: HTTPStatus, content: bytes, kind: str, body: bool, tag: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        if tag is not None:
            self.send_header("ETag", tag)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""


def end_with_parent(server: LiveView, parent: int | None = None) -> threading.Thread:
    """Stop serving when the parent process has ended."""
    parent = os.getppid() if parent is None else parent

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        server.shutdown()

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    return thread
