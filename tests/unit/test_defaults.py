"""Values of unset settings: the papers' values where a paper has one, otherwise ours, written down once.

A default that slips changes every run that does not name it, and no comparison of two runs would show it.
"""

import dataclasses

import pytest

from solera.core.federation import FederationConfig
from solera.data.partition import PartitionConfig
from solera.methods.decentralised import Decentralised
from solera.methods.feddf import FedDF
from solera.methods.fedeed import FedEED
from solera.methods.fedet import FedET
from solera.methods.fedftg import FineTune
from solera.methods.fedgen import LatentGenerator
from solera.methods.fedma import BBP
from solera.methods.framework.algorithm import Framework
from solera.methods.fusionlarge import FusionLarge
from solera.methods.hierarchical import Hierarchical
from solera.methods.mnfl import MNFL
from solera.methods.mnflparam import MNFLParameters
from solera.methods.pfeddf import FedDFPrevious, PFedDF
from solera.methods.pfedhn import Hypernet
from solera.methods.pfedme import Envelope
from solera.methods.steps.low_bit import LowBit, LowBitUpload
from solera.methods.steps.screen import Robust
from solera.methods.steps.teaching import ByAccuracy, LowEntropy, Memory, Several, Swag
from solera.models.factory import ModelsConfig
from solera.scenario.task_data import DataConfig
from solera.train.distill import Distill
from solera.train.fitting import Local

NO_DECAY = {"momentum": 0.0, "weight_decay": 0.0, "optimizer": "sgd", "clip": None}
LOCAL = {"epochs": 5, "steps": None, "batch": 64, "lr": 0.1, **NO_DECAY}
FEDDF_SERVER = {
    "steps": 500,  # the paper: 10,000
    "batch": 128,
    "optimizer": "adam",
    "lr": 1e-3,
    "momentum": 0.0,
    "weight_decay": 0.0,
    "schedule": "cosine",
    "temperature": 1.0,
    "t_squared": False,
    "clip": 5.0,
    "every": 100,
    "patience": 1000,
    "student_norm": "train",
    "keep_init_if_better": False,
    "swa_every": None,
    "swa_start": 0,
    "cache_dtype": "float32",
    "cache_on_disk": False,
}
FULL = {"bits": 32, "activations": 32, "training": "ste", "mask": True, "standardise": False, "skip_ends": False}
FEDEED_SERVER = {
    "batch": 256,
    "optimizer": "sgd",
    "lr": 0.1,
    "schedule": "constant",
    "temperature": 4.0,
    "t_squared": True,
    "clip": None,
    "patience": None,
}
C = {"lr": 0.01, "auto_lr": False, "steps": 1, "lam": 1.0, "rho": 0.7, "constraint": "simplex"}
SLOTS = {  # the kinds that do nothing
    "upload": {"kind": "whole"},
    "screen": {"kind": "all", "average": "weighted", "buffers": "mean"},
    "teaching": {"kind": "clients"},
}
FRAMEWORK = {
    "local_trainer": {"kind": "fedavg"},
    "ensemble_trainer": {"kind": "aggregated", "sharpen": None, "tune": LOCAL | {"epochs": 0, "lr": 0.01}},
    "global_trainer": {"kind": "designated", "early_stop": True, "label_weight": 0.0},
    "screen": SLOTS["screen"],
    "K": 2,
    "R": 1,
    "rule": "avg_logits",
    "group_sizes": None,
    "schedule": "random",
    "pipeline": False,
    "no_single_groups": False,
    "save_ensemble": False,
    "report_ensemble": True,
}
FEDDF = {
    "local": LOCAL,
    "fusion": FEDDF_SERVER,
    "mu": 0.0,
    "ensemble": "avg_logits",
    "report_ensemble": True,
    **SLOTS,
}

DEFAULTS = [
    (Local(), LOCAL),
    (Distill(), FEDDF_SERVER),
    (LowBit(), FULL),
    (FedDF(), FEDDF),
    (FedDFPrevious(), {**FEDDF, "distill_absent": False}),
    (PFedDF(), {**FEDDF, "tune_epochs": 5}),
    (LowBitUpload(), {"kind": "low-bit", **FULL, "bits": 1}),
    (
        Robust(),
        {
            "kind": "robust",
            "average": "weighted",
            "buffers": "mean",
            "teachers_by": "all",
            "max_byzantine": 1,
            "drop_worst": False,
            "drop_threshold": 1.2,
            "drop_outliers": False,
            "update_clip": None,
        },
    ),
    (Several(), {"kind": "several", "parts": ()}),
    (Swag(), {"kind": "swag", "samples": 10, "scale": 0.5, "include_clients": True}),
    (Memory(), {"kind": "memory", "rounds": 1}),
    (ByAccuracy(), {"kind": "accuracy"}),
    (LowEntropy(), {"kind": "low-entropy", "top": 1000}),
    (
        Hierarchical(),
        {
            "local": LOCAL,
            "fusion": FEDDF_SERVER,
            "above": FEDDF_SERVER,
            "groups": 2,
            "grouping": "random",
            "every": 1,
            "exchange": "models",
            "mu": 0.0,
            "upload": SLOTS["upload"],
            "screen": SLOTS["screen"],
        },
    ),
    (
        Decentralised(),
        {
            "local": LOCAL,
            "distill": {
                "epochs": 5,
                "steps": None,
                "batch": 128,
                "lr": 1e-3,
                "momentum": 0.0,
                "weight_decay": 0.0,
                "optimizer": "adam",
                "clip": 5.0,
                "schedule": "cosine",
            },
            "temperature": 1.0,
            "student_norm": "train",
        },
    ),
    (
        FedET(),  # Table of appendix C: tau 30, b 64, eta 0.1; tau_s 128, b_s 64, eta_s 0.005, lambda 0.05
        {
            "local": LOCAL | {"steps": 30},
            "fusion": {
                "steps": 128,
                "batch": 64,
                "optimizer": "sgd",
                "lr": 0.005,
                "schedule": "constant",
                "clip": None,
            },
            "diversity": 0.05,
            "div_target": "raw",
            "screen": {**SLOTS["screen"], "average": "uniform"},
            "report_ensemble": True,
        },
    ),
    (
        FusionLarge(),
        {
            "local": LOCAL,
            "fusion": FEDDF_SERVER,
            "ensemble": "avg_logits",
            "targets": "soft",
            "client_models": "distilled",
            "head": "own",
            "screen": SLOTS["screen"],
            "report_ensemble": True,
        },
    ),
    (
        FedEED(),
        {
            "local": LOCAL,
            "fusion": FEDEED_SERVER,
            **FRAMEWORK,
            "K": 4,
            "global_trainer": FRAMEWORK["global_trainer"] | {"early_stop": False},
        },
    ),
    (
        Framework(),
        {
            "local": LOCAL,
            "fusion": FEDDF_SERVER,
            **FRAMEWORK,
        },
    ),
    (
        MNFL(),  # section 5.1: E = 20, R = 1, batches of 128 and 256, eta 0.01; rho and T of the authors' code
        {
            "local": {"epochs": 20, "steps": None, "batch": 128, "lr": 0.01, **NO_DECAY},
            "distill": {"epochs": 1, "steps": None, "batch": 256, "lr": 0.01, **NO_DECAY},
            "coefficients": C,
            "temperature": 10.0,
            "public_size": None,
            "rule": "learned",
            "c_loss": "kl",
            "grow_epochs": False,
            "student_norm": "train",
        },
    ),
    (
        MNFLParameters(),  # section 5.3: eta 0.005
        {
            "local": {"epochs": 20, "steps": None, "batch": 128, "lr": 0.005, **NO_DECAY},
            "coefficients": C,
            "order": "paper",
        },
    ),
    (Envelope(), {"steps": 20, "batch": 20, "lr": 0.005, "lam": 15.0, "inner_steps": 5, "inner_lr": 0.09}),
    (
        LatentGenerator(),
        {
            "noise": 32,
            "hidden": 256,
            "steps": 50,
            "batch": 32,
            "lr": 3e-4,
            "weight_decay": 0.01,
            "diversity": 1.0,
            "ensemble": "avg_logits",
        },
    ),
    (
        FineTune(),
        {
            "steps": 10,
            "batch": 50,
            "noise": 100,
            "features": 32,
            "generator_steps": 1,
            "generator_lr": 0.01,
            "student_steps": 5,
            "student_lr": 0.01,
            "decay": 0.998,
            "fidelity": 1.0,
            "hardness": 1.0,
            "diversity": 1.0,
            "student_norm": "frozen",
        },
    ),
    (
        Hypernet(),
        {
            "embedding": None,
            "layers": 3,
            "width": 100,
            "lr": 0.01,
            "momentum": 0.9,
            "weight_decay": 1e-3,
            "clip": 50.0,
        },
    ),
    (BBP(), {"sigma": 1.0, "sigma0": 1.0, "gamma": 7.0, "sweeps": 5, "width_cap": 700}),
    (
        FederationConfig(),
        {
            "fraction": 1.0,
            "sampling": "uniform",
            "replacement": False,
            "min_replies": 1,
            "deadline_s": None,
            "max_empty_rounds": 3,
        },
    ),
    (
        DataConfig(),
        {
            "name": "fashion-mnist",
            "path": None,
            "train_size": None,
            "test_size": None,
            "validation": 0.0,
            "client_test": 0.0,
            "image_size": None,
        },
    ),
    (ModelsConfig(), {"clients": ["lenet5"], "server": None, "norm": "batch", "head": "plain", "assign": "even"}),
    (
        PartitionConfig(),
        {
            "kind": "dirichlet",
            "clients": 20,
            "alpha": 0.1,
            "variant": "block",
            "classes_per_client": 2,
            "min_size": 1,
        },
    ),
]


def _of(settings: object, wanted: dict) -> dict:
    """The values of `settings` under the names in `wanted`, inner tables too."""
    values = {name: getattr(settings, name) for name in wanted}
    return {n: _of(v, wanted[n]) if dataclasses.is_dataclass(v) else v for n, v in values.items()}


@pytest.mark.parametrize(("settings", "expected"), DEFAULTS, ids=[type(s).__name__ for s, _ in DEFAULTS])
def test_defaults(settings, expected):
    assert _of(settings, expected) == expected
