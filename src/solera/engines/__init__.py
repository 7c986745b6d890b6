"""Engines move messages between the server and its clients; they differ in where clients run, never in results."""

from ..core.calls import Call, ClientInfo, Engine, Host, Reply, Roster, Version
from .engine_settings import (
    ENGINES,
    EngineConfig,
    EngineInfo,
    EngineSettings,
    FlowerConfig,
    RayConfig,
    default_engine,
    default_workers,
    engine_info,
    engine_named,
    engine_of,
    register_engine,
    require,
)
from .processes import Processes
from .serve import serve
from .states import ClientStates, StateError
from .threads import InProcess, Threads

__all__ = [
    "ENGINES",
    "Call",
    "ClientInfo",
    "ClientStates",
    "Engine",
    "EngineConfig",
    "EngineInfo",
    "EngineSettings",
    "FlowerConfig",
    "Host",
    "InProcess",
    "Processes",
    "RayConfig",
    "Reply",
    "Roster",
    "StateError",
    "Threads",
    "Version",
    "default_engine",
    "default_workers",
    "engine_info",
    "engine_named",
    "engine_of",
    "register_engine",
    "require",
    "serve",
]
