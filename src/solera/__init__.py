"""Solera: federated learning across different models, by ensemble distillation.

    import solera
    result = solera.simulate(scenario, solera.methods.FedDF(), "runs/mine")

Names are loaded when they are first used, so that `import solera` (and `solera --help`) is quick.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .core.version import __version__

if TYPE_CHECKING:
    from . import methods, models, testing
    from .core.errors import ConfigError, DataError, RunError, SoleraError
    from .core.federation import Federation, FederationConfig, per_client
    from .core.task import Client, Data
    from .core.tensors import Weights
    from .core.wire import like
    from .data import (
        Dataset,
        Partition,
        PartitionConfig,
        Public,
        PublicConfig,
        from_folder,
        from_hf,
        from_tensors,
        from_texts,
        from_torch,
        load,
    )
    from .method import About, Exchange, Method, Model, Traits, register
    from .models.factory import ModelsConfig
    from .runs.config import Config, EngineConfig, RunConfig, load_config
    from .runs.loop import Result, resume_run, simulate
    from .runs.read import frame
    from .runs.tracking import TrackConfig
    from .scenario.scenario import Scenario
    from .scenario.server import Server
    from .scenario.task_data import DataConfig

_HOME = {
    "methods": "", "models": "", "testing": "",
    "Config": "runs.config", "EngineConfig": "runs.config", "RunConfig": "runs.config", "load_config": "runs.config",
    "Dataset": "data", "Partition": "data", "PartitionConfig": "data", "Public": "data", "PublicConfig": "data",
    "from_folder": "data", "from_hf": "data", "from_tensors": "data", "from_texts": "data", "from_torch": "data",
    "load": "data",
    "Federation": "core.federation", "FederationConfig": "core.federation", "per_client": "core.federation",
    "About": "method", "Exchange": "method", "Method": "method", "Model": "method", "Traits": "method",
    "register": "method",
    "Result": "runs.loop", "resume_run": "runs.loop", "simulate": "runs.loop",
    "frame": "runs.read",
    "DataConfig": "scenario.task_data", "ModelsConfig": "models.factory",
    "Scenario": "scenario.scenario", "Server": "scenario.server",
    "Client": "core.task", "Data": "core.task",
    "TrackConfig": "runs.tracking",
    "ConfigError": "core.errors", "DataError": "core.errors", "RunError": "core.errors", "SoleraError": "core.errors",
    "Weights": "core.tensors",
    "like": "core.wire",
}  # fmt: skip


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


__all__ = [
    "About",
    "Client",
    "Config",
    "ConfigError",
    "Data",
    "DataConfig",
    "DataError",
    "Dataset",
    "EngineConfig",
    "Exchange",
    "Federation",
    "FederationConfig",
    "Method",
    "Model",
    "ModelsConfig",
    "Partition",
    "PartitionConfig",
    "Public",
    "PublicConfig",
    "Result",
    "RunConfig",
    "RunError",
    "Scenario",
    "Server",
    "SoleraError",
    "TrackConfig",
    "Traits",
    "Weights",
    "__version__",
    "frame",
    "from_folder",
    "from_hf",
    "from_tensors",
    "from_texts",
    "from_torch",
    "like",
    "load",
    "load_config",
    "methods",
    "models",
    "per_client",
    "register",
    "resume_run",
    "simulate",
    "testing",
]
