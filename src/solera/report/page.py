"""One self-contained HTML file: it holds style, script and data, and its policy forbids the browser to fetch anything.

Names come from run directories and may contain any text. The data are JSON in a block that is never executed, without a
"<" that could end it; the script inserts text only as text. The page's policy allows only its own script and style, by
their hashes.
"""

import base64
import functools
import hashlib
import html
import importlib.resources
import json
from typing import Any

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
GENERATOR = b'<meta name="generator" content="Solera '  # what a report is known by, in its first lines
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


def render(data: dict[str, Any], version: str, made: str = "", live: bool = False) -> str:
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
        version=html.escape(version),
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
