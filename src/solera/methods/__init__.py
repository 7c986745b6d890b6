"""Methods: one paper, one file. Importing this package puts them into the table of methods."""

from . import mnfl, mnfl_parameters, pfeddf, simpfl
from .baselines import Centralised, LocalOnly
from .codistillation import Codistillation
from .ensembles import EnsembleTrainer
from .fedavg import FedAvg, FedAvgM, FedProx
from .fedbe import FedBE, FedDistill
from .feddf import FedDF
from .fedeed import FedEED
from .fedensemble import FedEnsemble
from .fedet import FedET
from .framework import Framework
from .fusionlarge import FusionLarge
from .global_trainers import GlobalTrainer
from .scaffold import Scaffold
from .trainers import LocalTrainer

__all__ = [
    "Centralised",
    "Codistillation",
    "EnsembleTrainer",
    "FedAvg",
    "FedAvgM",
    "FedBE",
    "FedDF",
    "FedDistill",
    "FedEED",
    "FedET",
    "FedEnsemble",
    "FedProx",
    "Framework",
    "FusionLarge",
    "GlobalTrainer",
    "LocalOnly",
    "LocalTrainer",
    "Scaffold",
    "mnfl",
    "mnfl_parameters",
    "pfeddf",
    "simpfl",
]
