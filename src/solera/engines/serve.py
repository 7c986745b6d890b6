"""The client's side of every engine: one call in, one reply out; and the client state that survives rounds."""

import contextlib
import hashlib
import os
import pathlib
import re
import time
import traceback
from typing import Any

from torch import Tensor

from ..devices import numerics
from ..randomness import SharedGenerator, repeatable
from ..task import TASKS
from ..wire import OWN_FILES, Packed, SoleraError, Weights, WireError, decode, encode, safe_name
from .base import Call, Reply, Site

VERSION = re.compile(r"(\d{12})\.safetensors")


class InputModified(SoleraError):
    """A task wrote into a message it shares with other clients."""


def serve(call: Call, site: Site, states: "ClientStates", seed_global: bool = True) -> Reply:
    """Run one call. Whatever goes wrong in it becomes the reply's error; nothing is raised.

    State is loaded as it was before this step and saved only if the task returned what it declares, so a call can be
    repeated, and a client whose reply will be refused is left as it was.
    `seed_global=False` is for threads, which share the global generators.
    """
    begun = time.monotonic()
    try:
        task = TASKS.get(call.task)
        if task is None:
            raise WireError(f"unknown task {call.task!r}")
        inbox = call.message.memo.get(call.task)
        if inbox is None:  # many clients share one message: look at it once
            inbox = call.message.memo[call.task] = decode(call.message, task.inbox)
        versions = call.message.versions
        arguments = {a: getattr(inbox, a) for a in task.takes}

        def work() -> tuple[Any, dict[str, Weights], Snapshot]:
            loaded = states.load(call.client, call.step)
            client = site.client(call.client, call.seed, loaded)
            before = _snapshot(loaded)
            with numerics():  # what a task sets is not left to the next one
                return task.fn(client, **arguments), client.state, before

        outbox, state, before = repeatable(call.seed, work) if seed_global else work()
        if call.message.versions != versions:
            raise InputModified(f"task {call.task} writes into its arguments; clone them first (t.clone())")
        reply = Packed(outbox)
        seconds = time.monotonic() - begun
        if call.deadline_s is not None and seconds > call.deadline_s:
            raise TimeoutError(f"took {seconds:.1f} s, the deadline is {call.deadline_s} s")
        if _changed(state, before):
            decode(reply, task.returns, arguments)  # the server will look as closely
            states.save(call.client, call.step, state, call.keep_from)
        return Reply(call.client, reply, seconds=seconds)
    except (InputModified, SharedGenerator) as e:
        return Reply(call.client, error=str(e), fatal=True)
    except (Exception, SystemExit) as e:
        return Reply(call.client, error=_reason(e), seconds=time.monotonic() - begun)


Snapshot = dict[str, dict[str, tuple[Tensor, int]]]


def _snapshot(state: dict[str, Weights]) -> Snapshot:
    """What a client's state is now. It holds on to the tensors: an identity says nothing once its object is gone."""
    return {name: {n: (t, t._version) for n, t in weights.items()} for name, weights in state.items()}


def _changed(state: dict[str, Weights], before: Snapshot) -> bool:
    """Whether anything was assigned, removed or written to."""
    if {k: list(v) for k, v in state.items()} != {k: list(v) for k, v in before.items()}:
        return True
    return any(
        t is not old or t._version != version
        for name, weights in before.items()
        for (old, version), t in zip(weights.values(), state[name].values(), strict=True)
    )


def _reason(e: BaseException) -> str:
    """One line that finds the place: the error, and where in whose code it was raised."""
    where = traceback.extract_tb(e.__traceback__)[-1]
    text = " ".join(str(e).split())
    return f"{type(e).__name__}: {text[:300]} ({pathlib.Path(where.filename).name}:{where.lineno})"


class ClientStates:
    """Client state in versioned files, `root/<client>/<step>.safetensors`.

    `load` returns the newest version *older than* the step asked for, so a run that falls back to an earlier round
    finds every client as it was then, and a repeated call sees what it saw the first time.
    """

    def __init__(self, root: str | os.PathLike[str]):
        self.root = pathlib.Path(root)

    def _versions(self, client: str) -> list[int]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return sorted(int(m[1]) for m in map(VERSION.fullmatch, os.listdir(self.root / client)) if m)
        return []

    def _path(self, client: str, step: int) -> pathlib.Path:
        return self.root / safe_name(client, "client id") / f"{step:012d}.safetensors"

    def load(self, client: str, step: int) -> dict[str, Weights]:
        """The client's state as it was before `step`; empty if it never had one."""
        older = [s for s in self._versions(client) if s < step]
        if not older:
            return {}
        path = self._path(client, older[-1])
        try:
            return decode(path.read_bytes(), dict[str, Weights], limits=OWN_FILES)
        except WireError as e:
            raise WireError(f"state of {client} at step {older[-1]} is damaged ({path}): {e}") from None

    def save(self, client: str, step: int, state: dict[str, Weights], keep_from: int = 0) -> None:
        """Store the state after `step`, and drop versions that no run can fall back to any more."""
        path = self._path(client, step)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}.draft")
        draft.write_bytes(encode(state))
        draft.replace(path)
        usable = [s for s in self._versions(client) if s < keep_from]
        for s in usable[:-1]:
            with contextlib.suppress(FileNotFoundError):
                self._path(client, s).unlink()

    def rewind(self, step: int) -> None:
        """Forget what was written at `step` and later: those steps are about to be run again."""
        if self.root.is_dir():
            for k in os.listdir(self.root):
                for s in self._versions(k):
                    if s >= step:
                        self._path(k, s).unlink()

    def digest(self, server_state: Any) -> str:
        """sha256 of all there is at the end of a run: the server's state and the newest state of every client."""
        whole = hashlib.sha256(encode(server_state))
        for k in sorted(os.listdir(self.root)) if self.root.is_dir() else ():
            if versions := self._versions(k):
                whole.update(k.encode() + self._path(k, versions[-1]).read_bytes())
        return whole.hexdigest()

    def flush(self, clients: Any, steps: range) -> None:
        """Make what was written in `steps` survive a power cut."""
        for k in clients:
            for s in self._versions(k):
                if s in steps:
                    fd = os.open(self._path(k, s), os.O_RDONLY)
                    try:
                        os.fsync(fd)
                    finally:
                        os.close(fd)
