"""The report as one self-contained HTML file, and its live view on this machine.

The file holds style, script and data, and its policy forbids the browser to fetch anything: it allows only its own
script and style, by their hashes. Names come from run directories and may contain any text. The data are JSON in a
block that is never executed, without a "<" that could end it; the script inserts text only as text.

The live view listens only on 127.0.0.1. It accepts only requests whose Host header names this machine, so that no web
page can reach it through a domain of its own. It answers GET and HEAD for two paths, and writes nothing.
"""

import base64
import contextlib
import functools
import hashlib
import html
import http.server
import importlib.resources
import json
import os
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from ..core import __version__
from .figures import report_data
from .loading import in_use, read_all

LOOPBACK = "127.0.0.1"
RECORDS = ("run", "summary", "partition", "confusion", "regions")
WATCHED = ("config.toml", "metrics.jsonl", *(f"{name}.json" for name in RECORDS))
SCRIPTS = ("charts.js", "figures.js", "main.js")
EMPTY: dict[str, Any] = {
    "title": "Waiting",
    "subtitle": "",
    "notes": [],
    "main_shared": False,
    "groups": [],
    "runs": [],
    "targets": {"values": [], "shown": 0, "rows": []},
    "partitions": [],
}
GENERATOR = b'<meta name="generator" content="Solera '  # in the first lines of every report
PAGE = """<!doctype html>
<html lang="en" data-theme="light" data-live="{live}">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<meta name="generator" content="Solera {version}">
<title>{title} · Solera</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<a class="skip" href="#figures">to the figures</a>
<header class="top"><div class="wrap">
<div>
<p class="brand"><b>Solera</b> report <span id="live" class="live" data-state="off" hidden>connecting</span></p>
<h1 id="title">{title}</h1>
<p id="subtitle" class="subtitle"></p>
</div>
<button id="theme" type="button">dark</button>
</div></header>
<nav aria-label="figures"><div class="wrap">
<div id="links" class="links"></div>
<label hidden>details of <select id="focus"></select></label>
</div></nav>
<main><div class="wrap">
<noscript><p class="notes">The figures are drawn by the script in this file, which needs JavaScript.</p></noscript>
<div class="grid">
<div id="notes" class="notes" role="note" hidden></div>
<section id="overview" aria-label="results"></section>
</div>
<div id="figures" class="grid"></div>
</div></main>
<footer class="wrap">Made by Solera {version}{made}. Everything is in this file: it loads nothing from the network.
</footer>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def render(data: dict[str, Any], made: str = "", live: bool = False) -> str:
    """The page for the data of `figures.report_data`. With `live` it may also ask its own server for newer data."""
    style, script = _asset("report.css"), _script()
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src '{_hash(script)}'",
            f"style-src '{_hash(style)}'",
            "img-src data:",
            "connect-src 'self'" if live else "connect-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    return PAGE.format(
        live="true" if live else "false",
        policy=policy,
        version=html.escape(__version__),
        made=html.escape(f", {made}" if made else ""),
        title=html.escape(str(data["title"])),
        style=style,
        data=embedded(data),
        script=script,
    )


def embedded(data: Any) -> str:
    """JSON that is safe inside a script element: nothing in it can end the element or begin a comment."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


@functools.cache
def _script() -> str:
    parts = "\n".join(_asset(name) for name in SCRIPTS)
    return f'(() => {{\n"use strict";\n{parts}\n}})();\n'


@functools.cache
def _asset(name: str) -> str:
    text = (importlib.resources.files(__package__) / "static" / name).read_text("utf-8")
    if "</" in text or "<!--" in text:
        raise ValueError(f"{name} would end its element early")
    return text


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


# ---- the live view ----------------------------------------------------------------------------------


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
            stamps: list[Any] = []
            for file in (home / name for home in homes for name in WATCHED):
                with contextlib.suppress(OSError):
                    stat = file.stat()
                    stamps.append((str(file), stat.st_mtime_ns, stat.st_size))
            # The end of a run also changes the page.
            found[path] = (*stamps, *map(in_use, homes)) if stamps else ()
        return found


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


class _Handler(http.server.BaseHTTPRequestHandler):
    server: LiveView
    server_version, sys_version = "Solera", ""
    timeout = 30

    def do_GET(self) -> None:  # the name is given by http.server
        self._answer(body=True)

    def do_HEAD(self) -> None:  # the same
        self._answer(body=False)

    def _answer(self, body: bool) -> None:
        port = self.server.server_address[1]
        if self.headers.get("Host", "").lower() not in (f"{LOOPBACK}:{port}", f"localhost:{port}"):
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
            self._send(HTTPStatus.OK, render(data, live=True).encode(), "text/html; charset=utf-8", body)
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
