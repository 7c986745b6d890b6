"""A site's program: answers the server's messages with this site's own data and code, and keeps a log.

Flower starts a process for each message and hands it over. There is always a reply: a node without one would be
stuck for good. Every request and the number of bytes that left the site are written to `log/asked.jsonl`, for the
people who are responsible for the data.
"""

import contextlib
import copy
import dataclasses
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ..core import __version__
from ..core.calls import SHA256, Call, Host, Reply, text_in
from ..core.errors import ConfigError, SoleraError
from ..core.plugins import code_allowed, is_path
from ..core.task import TASKS
from ..core.tensors import weights_of
from ..core.wire import Limits, Packed, WireError, decode, digest, safe_name
from ..data import Public
from ..data.dataset import Spec
from ..data.encodings import from_bytes
from ..data.public import Samples
from ..engines.serve import serve
from ..engines.states import ClientStates
from ..method import prepare_scoring
from ..models.hf import PREFIX
from ..place.devices import compute_of
from ..place.fingerprint import fingerprint
from ..place.placement import TRICKS, Placement
from ..runs.config import Config, load_config
from ..runs.sites import site_host, site_model, spec_of_site
from ..scenario.host import ClientHost
from .agreed import check_asked, noted
from .commands import settings_of
from .flower import PROTOCOL, pack, unpack
from .journal import write_line

log = logging.getLogger("solera")
LINGER_S = 10.0  # after its deadline a task that does not react ends with its process
MOST_RUNS, MOST_PUBLIC = 100, 20  # limits of runs and of sets of public samples: a server could fill the disk
PATHS = re.compile(r"""(?<=')/[^']*|(?<=")/[^"]*|(?<![\w./])/\S.*?(?=[:;,] |[()'"]|$)""")  # in an error's text


class Site(Protocol):
    """A site: one client."""

    name: str
    folder: Path

    @property
    def place(self) -> Placement:
        """The device on which it computes."""
        ...

    def host(self, run_seed: int) -> Host:
        """Its data and its model, as a run's seed initialises it."""
        ...

    def about(self, run_seed: int) -> Mapping[str, Any]:
        """Its facts for the server before a run: of its data only the sizes."""
        ...

    def hello(self, host: Any) -> str:
        """The digest of its hello."""
        ...

    def check(self, task: str, arguments: Mapping[str, Any], host: Any) -> None:
        """Refuse a task that it does not answer, and arguments that are out of bounds."""
        ...

    def public_of(self, samples: Samples) -> Public:
        """The public samples that the server sent, prepared by this site."""
        ...

    def lend(self, host: Any, public: Public) -> None:
        """Give its clients the public samples that the server sent."""
        ...


class OwnSite:
    """A site as its folder describes it: site.toml, and the code and data that it names."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.name = settings_of(folder, "site")["name"]
        with code_allowed(folder):
            self.config = load_config(folder / "site.toml")
        prepare_scoring()
        self.seed: int | None = None  # seed of the run for which it is kept
        self.kept: ClientHost | None = None
        self.model: nn.Module | None = None
        if set(self.config.sites) != {self.name}:
            raise ConfigError(
                f"{folder / 'site.toml'} describes {', '.join(sorted(self.config.sites)) or 'no site'}, deploy.toml "
                f"says that this is {self.name}"
            )
        self.own = self.config.sites[self.name]

    @cached_property
    def place(self) -> Placement:
        """The device on which it computes. Only for the process that computes: one that forks must not open it."""
        return compute_of(self.config.engine).place()

    @cached_property
    def spec(self) -> Spec:
        """The spec of its samples."""
        with code_allowed(self.folder):
            return spec_of_site(self.config, self.name)

    def keep(self) -> None:
        """Build its model and read its samples, for later messages. The seed is that of the last run.

        Samples from the site's own code are loaded for each message: they may have changed.
        """
        seed = self.config.run.seed
        with contextlib.suppress(OSError, ValueError):
            seed = int(self._seed_file.read_text())
        if seed == self.seed:
            return
        compute = compute_of(self.config.engine)
        place = Placement("cpu", 1.0, compute.precision, compute.deterministic, compute.portable)
        with place.training(threads=1), code_allowed(self.folder):
            config = self._seeded(seed)
            self.seed, self.kept, self.model = None, None, site_model(config, self.name)
            _ = self.spec
            public = self.config.public
            if not (is_path(self.own.data) or (public.where == "everywhere" and is_path(public.name))):
                self.kept = site_host(config, self.name, self.model)
                self.kept.hello()  # computes digests of its model and public samples, which copies share
            self.seed = seed

    def host(self, run_seed: int) -> ClientHost:
        """Its own data and model; a copy of a kept host, so that no call sees another's changes."""
        if run_seed == self.seed and self.kept is not None:
            return copy.copy(self.kept)
        if run_seed != self.seed:
            with contextlib.suppress(OSError):
                if not self._seed_file.is_file() or self._seed_file.read_bytes() != str(run_seed).encode():
                    self._seed_file.write_text(str(run_seed))
        with code_allowed(self.folder):
            return site_host(self._seeded(run_seed), self.name, self.model if run_seed == self.seed else None)

    def _seeded(self, run_seed: int) -> Config:
        return dataclasses.replace(self.config, run=dataclasses.replace(self.config.run, seed=run_seed))

    @property
    def _seed_file(self) -> Path:
        return self.folder / "state" / "seed"

    def watched(self) -> list[Path]:
        """The files and folders that its host is built from, except code."""
        model = self.config.models.variant(self.own.model or "").model
        found = [self.own.data, self.config.data.path, self.config.public.path, model.removeprefix(PREFIX)]
        return [self.folder / name for name in found if name and not is_path(name)]

    def about(self, run_seed: int) -> dict[str, Any]:
        """The hello of its host, and the versions of its software."""
        host = self.host(run_seed)
        told = dataclasses.asdict(host.hello())
        weights = digest(weights_of(host.template()))
        versions = {"solera": __version__, "torch": torch.__version__}
        return {**told, "weights": weights, **versions, "fingerprint": fingerprint(self.place.portable)}

    def hello(self, host: ClientHost) -> str:
        """The digest of its current host."""
        return host.hello().digest

    def check(self, task: str, arguments: Mapping[str, Any], host: ClientHost) -> None:
        """Check by the tasks and bounds in its file."""
        check_asked(self.name, self.own.tasks, self.own.bounds or {}, task, arguments, host)

    def public_of(self, samples: Samples) -> Public:
        """The samples, normalised and augmented by its own file; texts are read with its own model's tokenizer."""
        spec, public = self.spec, self.config.public
        texts = None if samples.lengths is None else from_bytes(samples.raw, samples.lengths)
        raw = samples.raw if texts is None else spec.tokens(texts)
        steps = public.augment if public.fresh else ()
        return Public(raw, spec.mean, spec.std, samples.labels, steps, texts=texts)

    def lend(self, host: ClientHost, public: Public) -> None:
        """Attach the server's public samples."""
        host.public = public


# ---- a site that is kept between messages -------------------------------------------------------------

_KEPT: dict[Path, OwnSite] = {}  # by folder


def site_of(folder: Path) -> OwnSite:
    """The site of this folder: the one that this process keeps, or a new one."""
    return _KEPT.get(folder) or OwnSite(folder)


def keep_site(folder: Path) -> Callable[[], bool]:
    """Make the site of this folder ready for `site_of`. Returns a function to call before each message: True if
    the site's files, data or code have changed, so that this process cannot serve any longer.

    If the site cannot be built, each message builds it and reports the error.
    """
    before, watched = set(sys.modules), [folder / "site.toml", folder / "deploy.toml"]
    stamps = _stamps(watched)

    def keep() -> None:
        try:
            with contextlib.chdir(folder):
                site = _KEPT.pop(folder, None) or OwnSite(folder)
                new = [path for path in site.watched() if path not in stamps]
                watched.extend(new)
                stamps.update(_stamps(new))
                site.keep()
            _KEPT[folder] = site
        except (Exception, SystemExit) as e:
            log.warning("%s is not ready for messages: %s", folder, e)

    def changed() -> bool:
        if _stamps(watched) != stamps:
            return True
        if folder in _KEPT:
            keep()  # if the seed has changed
        return False

    keep()
    code = [Path(file) for name in set(sys.modules) - before if (file := getattr(sys.modules[name], "__file__", None))]
    watched += code
    stamps |= _stamps(code)
    return changed


def _stamps(paths: Iterable[Path]) -> dict[Path, Any]:
    """Sizes, times and identities of files, and of all files in folders."""
    found: dict[Path, Any] = {}
    for path in paths:
        inside = [Path(home, name) for home, _, names in os.walk(path, followlinks=True) for name in names]
        for file in (path, *inside):
            found[file] = None
            with contextlib.suppress(OSError):
                seen = file.stat()
                found[file] = (seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns)
    return found


def answer(record: Any, site: Site, limits: Limits | None = None) -> Any:
    """The reply to a message, always. `record` and the result are Flower's records."""
    begun, size = time.monotonic(), 0
    facts: dict[str, Any] = {}
    asked: dict[str, Any] = {}  # the arguments of a task that were read so far
    try:
        facts, blob = unpack(record, limits or Limits())
        size = len(blob)
        with site.place.training(threads=1):  # as on every engine: the number of threads changes the bits of a sum
            told, body = _act(facts, blob, site, asked)
    except (Exception, SystemExit, KeyboardInterrupt) as e:
        told, body = {"error": f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"}, None
    said = {"protocol": PROTOCOL, "site": site.name, "nonce": facts.get("nonce"), **told}
    _note(site, facts, noted(asked), size, said, body, time.monotonic() - begun)
    if "error" in said:  # the log has the full text; the server must not see paths
        said["error"] = PATHS.sub("(a path)", said["error"].replace(str(site.folder), "(a path)"))
    return pack(said, body)


def _act(
    facts: Mapping[str, Any], blob: bytes, site: Site, asked: dict[str, Any]
) -> tuple[dict[str, Any], bytes | None]:
    """Do what the message requests, if it is for this site."""
    if facts.get("what") == "who":
        return {}, None  # its name is in every reply
    if (name := text_in(facts, "site")) != site.name:
        raise WireError(f"asked of {name!r}, this is {site.name!r}: the server has another key under that name")
    what = text_in(facts, "what")
    if what == "hello":
        seed, public = facts.get("run_seed"), _digest_in(facts)
        if type(seed) is not int:
            raise WireError(f"run_seed = {str(seed)[:20]!r}")
        return {**site.about(seed), "has_public": public is None or _public_file(site, public).is_file()}, None
    if what == "public":
        return {"has_public": keep_public(site, _digest_in(facts), blob)}, None
    if what != "call":
        raise WireError(f"{what!r} is not something that can be asked")
    reply = _call(facts, blob, site, asked)
    if reply.error is not None:
        return {"error": reply.error, "fatal": reply.fatal, "seconds": reply.seconds}, None
    assert isinstance(reply.message, Packed)
    return {"version": reply.version, "seconds": reply.seconds}, reply.message.blob


def _call(facts: Mapping[str, Any], blob: bytes, site: Site, asked: dict[str, Any]) -> Reply:
    task = text_in(facts, "task")
    if task not in TASKS:
        raise WireError(f"unknown task {task!r}: it is not part of solera {__version__}, nor of this site's own code")
    inbox = decode(blob, TASKS[task].inbox)
    asked.update((a, getattr(inbox, a)) for a in TASKS[task].takes)
    message = Packed(asked)
    message.memo[task] = inbox
    call = Call.of({**facts, "client": site.name}, message)
    run = site.folder / "state" / "runs" / safe_name(text_in(facts, "run"), "run name")
    _check_room(run, MOST_RUNS, "the state of {} runs")
    TRICKS["cpu"].set_allocator()
    with _time_limit(call):
        host = site.host(call.run_seed)
        if (hello := _digest_in(facts, "hello")) is not None and hello != site.hello(host):
            raise SoleraError(
                f"{site.name} is not as it was when the run began: its data, its model or [data] in its file has "
                "changed; put it back, or begin a new run"
            )
        if (public := _digest_in(facts)) is not None:
            site.lend(host, _read_public(site, public))
        site.check(task, asked, host)
        reply = serve(call, host, ClientStates(run), site.place)
        if reply.error is None and reply.version == call.after:  # without new state `serve` does not check the reply
            decode(reply.message, TASKS[task].returns, asked)
        return reply


def _check_room(path: Path, most: int, what: str) -> None:
    """Refuse a new name in a folder that has enough of them: names come from the server."""
    if not path.exists() and path.parent.is_dir() and len(os.listdir(path.parent)) >= most:
        raise SoleraError(
            f"this site keeps {what.format(most)} already: its people remove those of runs that are over from "
            f"state/{path.parent.name}"
        )


# ---- public samples that come from the server ---------------------------------------------------------


def _digest_in(facts: Mapping[str, Any], name: str = "public") -> str | None:
    found = facts.get(name)
    if found is not None and not (isinstance(found, str) and SHA256.fullmatch(found)):
        raise WireError(f"{name} = {str(found)[:80]!r}")
    return found


def _public_file(site: Site, sha256: str) -> Path:
    return site.folder / "state" / "public" / f"{sha256}.safetensors"


def keep_public(site: Site, sha256: str | None, blob: bytes) -> bool:
    """Store public samples for later calls, if they have the stated digest."""
    if sha256 is None:
        raise WireError("public samples without a digest")
    found = site.public_of(decode(blob, Samples))
    if found.digest != sha256:
        raise WireError(
            f"the public samples are {found.digest[:16]}... here and {sha256[:16]}... on the server: "
            "data.mean, data.std and public.augment must be the same in both files"
        )
    file = _public_file(site, sha256)
    _check_room(file, MOST_PUBLIC, "{} sets of public samples")
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(f".{os.getpid()}.draft")
    draft.write_bytes(blob)
    draft.replace(file)
    return True


def _read_public(site: Site, sha256: str) -> Public:
    try:
        blob = _public_file(site, sha256).read_bytes()
    except OSError as e:
        raise SoleraError(
            f"the public samples {sha256[:16]}... are not here ({e.strerror}): submit the run again"
        ) from e
    found = site.public_of(decode(blob, Samples))
    if found.digest != sha256:
        raise SoleraError(
            f"the public samples in {_public_file(site, sha256)} are damaged: remove the file, submit again"
        )
    return found


# ---- time ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _time_limit(call: Call) -> Iterator[None]:
    """End a task at its deadline. It is interrupted, and if it does not react (it may be anywhere inside a library),
    the process ends: a node does one thing at a time, and an abandoned call must not keep it from the next."""
    if call.deadline_s is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"no reply within the deadline of {call.deadline_s:g} s")

    def end() -> None:
        log.error("%s does not react %g s after its deadline: its process ends", call.task, LINGER_S)
        os._exit(1)

    before = signal.signal(signal.SIGALRM, late)
    last = threading.Timer(call.deadline_s + LINGER_S, end)
    last.daemon = True
    last.start()
    signal.setitimer(signal.ITIMER_REAL, call.deadline_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        last.cancel()


def _note(
    site: Site,
    facts: Mapping[str, Any],
    arguments: Mapping[str, Any],
    size: int,
    said: Mapping[str, Any],
    body: bytes | None,
    seconds: float,
) -> None:
    """One line for the site's operator."""
    line = {
        "site": site.name,
        "run": str(facts.get("run"))[:64],
        "task": str(facts.get("task") or facts.get("what"))[:64],
        "step": str(facts.get("step"))[:20] if type(facts.get("step")) is not int else facts["step"],
        "arguments": arguments,
        "bytes_in": size,
        "bytes_out": len(body or b""),
        "seconds": round(seconds, 3),
        "outcome": said.get("error") or "answered",
    }
    try:
        write_line(site.folder / "log" / "asked.jsonl", line)
    except OSError as e:
        raise SoleraError(f"the log of {site.name} cannot be written: {e.strerror}; nothing leaves without it") from e
