"""Methods: one paper, one file. Importing this package puts them into the table of methods."""

from . import mnfl, mnfl_parameters, pfeddf, simpfl
from .baselines import Centralised, LocalOnly
from .fedavg import FedAvg, FedAvgM, FedProx
from .feddf import FedDF
from .fedet import FedET
from .fusionlarge import FusionLarge
from .scaffold import Scaffold

__all__ = [
    "Centralised",
    "FedAvg",
    "FedAvgM",
    "FedDF",
    "FedET",
    "FedProx",
    "FusionLarge",
    "LocalOnly",
    "Scaffold",
    "mnfl",
    "mnfl_parameters",
    "pfeddf",
    "simpfl",
]
