"""Engines move messages between the server and its clients; they differ in where clients run, never in results."""

import dataclasses
import os
import sys

from .base import Call, ClientInfo, Engine, Reply, Roster, Site, Version
from .inprocess import InProcess
from .processes import Processes
from .serve import serve
from .states import ClientStates, StateError
from .threads import Threads

ENGINES: dict[str, type] = {"inprocess": InProcess, "threads": Threads, "processes": Processes}


@dataclasses.dataclass(frozen=True)
class EngineInfo:
    """What `solera ls engines` prints."""

    name: str
    title: str
    crash: str


INFO = {
    "inprocess": EngineInfo("inprocess", "one client after another in this process; the reference", "ends the run"),
    "threads": EngineInfo("threads", "as many clients at once as workers, in threads", "ends the run"),
    "processes": EngineInfo("processes", "as many clients at once as workers, in forked processes", "one client"),
}


def default_engine(workers: int) -> str:
    """Processes where they can be forked safely: they repeat dropout in parallel and a crash costs one client."""
    if workers < 2:
        return "inprocess"
    return "processes" if sys.platform == "linux" else "threads"


def default_workers() -> int:
    """As many clients at once as cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


__all__ = [
    "ENGINES",
    "INFO",
    "Call",
    "ClientInfo",
    "ClientStates",
    "Engine",
    "EngineInfo",
    "InProcess",
    "Processes",
    "Reply",
    "Roster",
    "Site",
    "StateError",
    "Threads",
    "Version",
    "default_engine",
    "default_workers",
    "serve",
]
