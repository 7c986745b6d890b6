"""A stand-in for the Hugging Face hub on loopback: the few addresses that its library asks for, and every request
written down. It ends with its `with` block."""

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = (".safetensors", ".parquet")  # the hub keeps them elsewhere and redirects


class Hub:
    """Repositories by (kind, id): the files of each commit, and the commits of names such as main."""

    def __init__(self) -> None:
        self.files: dict[tuple[str, str, str], dict[str, bytes]] = {}
        self.refs: dict[tuple[str, str], dict[str, str]] = {}
        self.asked: list[tuple[str, str]] = []  # method and path of every request
        self.refused: dict[str, tuple[int, str]] = {}  # id -> status and error code of every answer
        self.moved: dict[str, str] = {}  # an old id -> the new one
        self.cut: dict[str, int] = {}  # owner/name/file -> the byte at which connections break
        self.cuts = 1 << 30  # so many times
        self.longer: dict[str, int] = {}  # owner/name/file -> bytes that are promised and never come
        self.url = ""

    def put(self, name: str, files: dict[str, bytes], revision: str = "main", kind: str = "models") -> str:
        """A new commit of a repository; returns its hash."""
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.files[kind, name, commit] = files
        self.refs.setdefault((kind, name), {}).update({revision: commit, commit: commit})
        return commit

    def got(self) -> list[str]:
        """The names of the files that were fetched, in alphabetical order."""
        return sorted({path.split("/resolve/")[1].split("/", 1)[1] for _, path in self.asked if "/resolve/" in path})

    def env(self, home: Path, **more: str) -> dict[str, str]:
        """The environment of a process that takes this for the hub and has its cache in `home`."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        return {**kept, "HF_ENDPOINT": self.url, "HF_HOME": str(home), **more}


def files_of(folder: Path) -> dict[str, bytes]:
    """What is in a folder, as the files of a repository."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@contextlib.contextmanager
def loopback_hub() -> Iterator[Hub]:
    """A hub on a free port of 127.0.0.1."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OfHub", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:  # which of some paths are there
        length = int(self.headers.get("Content-Length", 0))
        self.answer(unquote(self.rfile.read(length).decode()))

    def log_message(self, *args: object) -> None:
        pass

    def answer(self, body: str = "") -> None:
        path = urlsplit(self.path).path
        self.hub.asked.append((self.command, path))
        parts = path.strip("/").split("/")
        kind = "models"
        if parts[0] == "api":
            kind, parts = parts[1], parts[2:]
        elif parts[0] == "datasets":
            kind, parts = "datasets", parts[1:]
        elif parts[0] == "elsewhere":
            home, file = f"{parts[2]}/{parts[3]}", "/".join(parts[5:])
            return self.send_file(f"{home}/{file}", self.hub.files[parts[1], home, parts[4]][file])
        verbs = ("revision", "tree", "resolve", "paths-info")
        at = next((i for i, part in enumerate(parts) if part in verbs and i), len(parts))
        name, verb, rest = "/".join(parts[:at]), parts[at : at + 1], parts[at + 1 :]
        if name in self.hub.moved:
            return self.send(307, headers={"Location": self.path.replace(name, self.hub.moved[name])})
        if name in self.hub.refused:
            status, code = self.hub.refused[name]
            return self.send(status, {"error": code}, {"X-Error-Code": code} if code else {})
        if (kind, name) not in self.hub.refs:  # as the hub says it to those who are not logged in
            return self.send(401, {"error": "Invalid username or password."})
        commit = self.hub.refs[kind, name].get(unquote(rest[0]) if rest else "main")
        if commit is None:
            return self.send(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
        files = self.hub.files[kind, name, commit]
        if verb == ["resolve"]:
            return self.resolve(kind, name, commit, files, unquote("/".join(rest[1:])))
        if verb == ["tree"]:
            deep = parse_qs(urlsplit(self.path).query).get("recursive", [""])[0].lower() in ("1", "true")
            found = listing(files, unquote("/".join(rest[1:])), deep)
            return self.send(200 if found else 404, found, {} if found else {"X-Error-Code": "EntryNotFound"})
        if verb == ["paths-info"]:
            return self.send(200, [entry(f, b) for f, b in files.items() if f in body])
        told = [{"rfilename": f, "size": len(b)} for f, b in files.items()]
        self.send(200, {"id": name, "sha": commit, "siblings": told, "private": False, "tags": [], "downloads": 0})

    def resolve(self, kind: str, name: str, commit: str, files: dict[str, bytes], file: str) -> None:
        if file not in files:
            return self.send(404, headers={"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        digest = hashlib.sha256(files[file]).hexdigest()
        headers = {"ETag": f'"{digest}"', "X-Repo-Commit": commit}
        if not file.endswith(LARGE):
            return self.send_file(f"{name}/{file}", files[file], headers)
        size = str(len(files[file]) + self.hub.longer.get(f"{name}/{file}", 0))
        host = self.hub.url.replace("127.0.0.1", "localhost")  # another name: another server, to the library
        there = f"{host}/elsewhere/{kind}/{name}/{commit}/{file}"
        self.send(302, headers={**headers, "X-Linked-Etag": f'"{digest}"', "X-Linked-Size": size, "Location": there})

    def send_file(self, file: str, whole: bytes, headers: dict[str, str] | None = None) -> None:
        wanted = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")
        begin = int(wanted[0])
        end = int(wanted[1]) + 1 if wanted[1] else len(whole)
        more = {"Content-Range": f"bytes {begin}-{end - 1}/{len(whole)}"} if "Range" in self.headers else {}
        stop = None
        if file in self.hub.cut and self.hub.cuts and self.command == "GET":
            self.hub.cuts -= 1
            stop = max(0, self.hub.cut[file] - begin)
        self.send(206 if more else 200, whole[begin:end], {**(headers or {}), **more}, stop)

    def send(
        self, status: int, content: object = b"", headers: dict[str, str] | None = None, stop: int | None = None
    ) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:stop])
        if stop is not None:
            self.close_connection = True


def listing(files: dict[str, bytes], folder: str, deep: bool) -> list[dict[str, object]]:
    """What is in a folder: files and folders, or all files below it, too."""
    under = f"{folder}/" if folder else ""
    found: dict[str, dict[str, object]] = {}
    for file, content in files.items():
        if file.startswith(under):
            first, *rest = file.removeprefix(under).split("/")
            if rest:
                path = under + first
                found[path] = {
                    "type": "directory",
                    "path": path,
                    "oid": hashlib.sha1(path.encode()).hexdigest(),
                    "size": 0,
                }
            if deep or not rest:
                found[file] = entry(file, content)
    return list(found.values())


def entry(file: str, content: bytes) -> dict[str, object]:
    """A file as the hub lists it."""
    found = {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
    lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return {**found, "lfs": lfs} if file.endswith(LARGE) else found
