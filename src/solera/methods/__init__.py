"""Methods: one paper, one file. Importing this package registers them."""

from .centralised import Centralised
from .cronus import Cronus
from .decentralised import Decentralised
from .ditto import Ditto
from .dsfl import DSFL
from .fd import FD
from .fedamp import FedAMP
from .fedavg import FedAvg, FedAvgM, FedProx
from .fedavgft import FedAvgFT
from .fedbe import FedBE, FedDistill
from .feddf import FedDF
from .fedeed import Codistillation, FedEED, FedEnsemble
from .fedet import FedET
from .fedfomo import FedFomo
from .fedftg import FedFTG
from .fedgems import FedGEMS
from .fedgen import FedGen
from .fedgkt import FedGKT
from .fedma import FedMA
from .fedmd import FedMD
from .framework.algorithm import Framework
from .framework.ensemble_trainers import EnsembleTrainer
from .framework.global_trainers import GlobalTrainer
from .framework.local_trainers import LocalTrainer
from .fusionlarge import FusionLarge
from .heterofl import HeteroFL
from .hierarchical import Hierarchical
from .ifca import IFCA
from .local import LocalOnly
from .mnfl import MNFL, MNFLCode, MNFLTwice
from .mnflparam import MNFLParameters
from .moon import MOON
from .perfedavg import PerFedAvg
from .pfeddf import FedDFPrevious, PFedDF
from .pfedhn import PFedHN
from .pfedme import PFedMe
from .scaffold import Scaffold, ScaffoldUp
from .simpfl import SimPFL, TopKPFL

__all__ = [
    "DSFL",
    "FD",
    "IFCA",
    "MNFL",
    "MOON",
    "Centralised",
    "Codistillation",
    "Cronus",
    "Decentralised",
    "Ditto",
    "EnsembleTrainer",
    "FedAMP",
    "FedAvg",
    "FedAvgFT",
    "FedAvgM",
    "FedBE",
    "FedDF",
    "FedDFPrevious",
    "FedDistill",
    "FedEED",
    "FedET",
    "FedEnsemble",
    "FedFTG",
    "FedFomo",
    "FedGEMS",
    "FedGKT",
    "FedGen",
    "FedMA",
    "FedMD",
    "FedProx",
    "Framework",
    "FusionLarge",
    "GlobalTrainer",
    "HeteroFL",
    "Hierarchical",
    "LocalOnly",
    "LocalTrainer",
    "MNFLCode",
    "MNFLParameters",
    "MNFLTwice",
    "PFedDF",
    "PFedHN",
    "PFedMe",
    "PerFedAvg",
    "Scaffold",
    "ScaffoldUp",
    "SimPFL",
    "TopKPFL",
]
