"""Solera: federated learning across different models, by ensemble distillation.

    import solera
    result = solera.run("quickstart/feddf", "runs/mine")
    result = solera.simulate(scenario, solera.methods.FedDF(), "runs/mine")

These names are for running methods, those of `solera.method` for writing one. Everything else is in a documented module
or begins with an underscore. Names are loaded when they are first used, so `import solera` is quick.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .core import __version__

if TYPE_CHECKING:
    from . import data, engines, method, methods, models, testing
    from .core.accounting import Availability
    from .core.errors import ConfigError, DataError, RunError, SoleraError
    from .core.federation import FederationConfig
    from .data import PartitionConfig, PublicConfig, from_tensors, from_torch
    from .engines import EngineConfig
    from .models.factory import ModelsConfig
    from .runs.callbacks import Callback
    from .runs.compare import compare
    from .runs.config import Config, RunConfig, StopConfig, load_config
    from .runs.loop import Result, resume, run, simulate
    from .runs.read import frame
    from .runs.tracking import TrackConfig
    from .scenario.scenario import Scenario
    from .scenario.task_data import DataConfig

_NAMES = {
    "": ("data", "engines", "method", "methods", "models", "testing"),  # modules
    "core.accounting": ("Availability",),
    "core.errors": ("ConfigError", "DataError", "RunError", "SoleraError"),
    "core.federation": ("FederationConfig",),
    "data": ("PartitionConfig", "PublicConfig", "from_tensors", "from_torch"),
    "engines": ("EngineConfig",),
    "runs.callbacks": ("Callback",),
    "runs.compare": ("compare",),
    "runs.config": ("Config", "RunConfig", "StopConfig", "load_config"),
    "runs.loop": ("Result", "resume", "run", "simulate"),
    "runs.read": ("frame",),
    "runs.tracking": ("TrackConfig",),
    "models.factory": ("ModelsConfig",),
    "scenario.scenario": ("Scenario",),
    "scenario.task_data": ("DataConfig",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
__all__ = [
    "Availability", "Callback", "Config", "ConfigError", "DataConfig", "DataError", "EngineConfig", "FederationConfig",
    "ModelsConfig", "PartitionConfig", "PublicConfig", "Result", "RunConfig", "RunError", "Scenario", "SoleraError",
    "StopConfig", "TrackConfig", "__version__", "compare", "data", "engines", "frame", "from_tensors", "from_torch",
    "load_config", "method", "methods", "models", "resume", "run", "simulate", "testing",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'solera' has no attribute {name!r}")
    if not _HOME[name]:
        return importlib.import_module(f".{name}", __name__)
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
