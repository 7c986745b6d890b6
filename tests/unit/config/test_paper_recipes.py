"""The recipes of the papers' tables, value by value, against what the papers (or, where they are silent, their authors'
public code) state. The tables here were copied from the papers, not from the recipes.
"""

import tomllib
from collections.abc import Iterator

import pytest

from solera.lab.papers import load_paper, paper_names
from solera.runs.config import load_config, recipe_names, recipe_text

# ---- FedDF (Lin et al., NeurIPS 2020), section 4 and appendix -----------------------------------------

FEDDF = {
    "run.rounds": 100,
    "data.name": "cifar10",
    "data.validation": 0.1,  # "10 % of the training set"
    "partition.kind": "dirichlet",
    "partition.variant": "equal",  # code: each class by Dir(alpha 1); section 4.1: alpha = 100 is "identical" data
    "partition.clients": 20,
    "partition.alpha": 1.0,
    "public.source": "dataset",
    "public.name": "cifar100",
    "models.clients": ("resnet8",),
    "models.norm": "batch",
    "federation.fraction": 0.4,
    "federation.sampling": "uniform",
    "method.name": "feddf",
    "method.screen.average": "uniform",  # ablations and code; Algorithm 1 weighs by samples
    "method.ensemble": "avg_logits",
    "method.local.epochs": 40,
    "method.local.batch": 64,  # code
    "method.local.lr": 0.1,
    "method.local.momentum": 0.0,
    "method.local.weight_decay": 0.0,
    "method.local.optimizer": "sgd",
    "method.fusion.steps": 10_000,
    "method.fusion.batch": 128,
    "method.fusion.optimizer": "adam",
    "method.fusion.lr": 1e-3,
    "method.fusion.schedule": "cosine",
    "method.fusion.temperature": 1.0,
    "method.fusion.every": 100,  # code
    "method.fusion.patience": 1000,
    "method.fusion.clip": 5.0,  # code
}

FIGURE6 = FEDDF | {
    "data.name": "cifar100",
    "public.name": "imagenet32",
    "public.classes": "imagenet-without-cifar100:100",  # "only classes without overlap with CIFAR-100"
}

# ---- Fed-ET (Cho et al., IJCAI 2022), section 4 and appendix C ----------------------------------------

FEDET = {
    "run.rounds": 500,  # not stated; ours
    "run.eval_every": 1,  # "best test accuracy", rounds to a target
    "data.split": (0.7, 0.1, 0.2),
    "data.mean": (0.5, 0.5, 0.5),
    "data.std": (0.5, 0.5, 0.5),
    "partition.kind": "dirichlet",
    "partition.variant": "class",  # Dir_K(alpha)
    "partition.clients": 100,
    "partition.alpha": 0.1,
    "partition.min_size": 1,  # ours
    "public.source": "held-out",
    "public.augment": ("crop", "flip", "jitter", "gray"),
    "models.options": {"vgg19": {"hidden": [512, 512]}},
    "models.clients": ("resnet18", "resnet8-wide", "fedet-cnn"),
    "models.server": "vgg19",
    "models.norm": "none",  # "batchnorm=False"
    "models.head": "shared",
    "models.assign": "random",
    "federation.fraction": 0.1,  # m = 10 of 100
    "federation.sampling": "size",
    "method.name": "fedet",
    "method.diversity": 0.05,  # lambda
    "method.div_target": "raw",
    "method.report_ensemble": False,
    "method.local.steps": 30,  # tau
    "method.local.batch": 64,  # b
    "method.local.lr": 0.1,  # eta
    "method.local.momentum": 0.0,
    "method.local.weight_decay": 0.0,
    "method.local.optimizer": "sgd",
    "method.fusion.steps": 128,  # tau_s
    "method.fusion.batch": 64,  # b_s
    "method.fusion.lr": 0.005,  # eta_s
    "method.fusion.momentum": 0.0,
    "method.fusion.weight_decay": 0.0,
    "method.fusion.optimizer": "sgd",
    "method.fusion.schedule": "constant",  # "no decay"
    "method.fusion.clip": None,
}

CONVERGED = {"run.stop.patience": 50, "data.validation": 0.1}  # "until convergence on the validation dataset"; ours

SENT140 = {  # appendix C
    "run.rounds": 300,  # not stated; ours
    "run.eval_every": 1,
    "data.name": "sentiment140",
    "data.length": 256,  # "Max-sequence length is set to 256"
    "data.user_min": 100,  # "remove users with less than 100 sentences"
    "data.test_users": 0.2,  # not stated; ours
    "partition.kind": "user",
    "public.source": "held-out",
    "public.users": 0.2,  # "carved out of the training set by removing 20% of the users"
    "models.clients": ("hf:prajjwal1/bert-tiny", "lstm"),
    "models.server": "hf:prajjwal1/bert-mini",
    "models.head": "shared",
    "models.assign": "random",
    "federation.fraction": 0.0943,  # 10 of 106
    "federation.sampling": "size",
    "method.name": "fedet",
    "method.diversity": 0.5,
    "method.div_target": "raw",
    "method.report_ensemble": False,
    "method.local.steps": 15,
    "method.local.batch": 5,
    "method.local.lr": 3e-4,
    "method.local.momentum": 0.0,
    "method.local.weight_decay": 0.0,
    "method.local.optimizer": "sgd",
    "method.fusion.steps": 10,
    "method.fusion.batch": 5,
    "method.fusion.lr": 0.001,
    "method.fusion.momentum": 0.0,
    "method.fusion.weight_decay": 0.0,
    "method.fusion.optimizer": "sgd",
    "method.fusion.schedule": "constant",
    "method.fusion.clip": None,
}

# ---- FedEED (anonymous ICLR submission), section 6 ----------------------------------------------------

GROUPS = {
    "run.rounds": 100,
    "data.name": "cifar10",
    "partition.kind": "dirichlet",
    "partition.variant": "equal",  # "followed Lin et al. (2020)"
    "partition.clients": 20,
    "partition.alpha": 1.0,
    "public.source": "dataset",
    "public.name": "cifar100",
    "models.clients": ("resnet20",),
    "models.norm": "batch",
    "federation.fraction": 0.4,  # 8 of 20
    "federation.sampling": "uniform",
    "method.K": 4,
    "method.local.epochs": 40,
    "method.local.batch": 64,
    "method.local.lr": 0.8,
    "method.local.momentum": 0.0,  # not stated
    "method.local.weight_decay": 0.0,
    "method.local.optimizer": "sgd",
}
SERVER = {
    "method.fusion.steps": 5000,
    "method.fusion.batch": 256,
    "method.fusion.optimizer": "sgd",
    "method.fusion.lr": 0.1,
    "method.fusion.schedule": "constant",
    "method.fusion.temperature": 4.0,
    "method.fusion.t_squared": True,  # not stated; ours
    "method.fusion.clip": None,
    "method.fusion.patience": None,  # "no early stop"
}
FEDEED = GROUPS | SERVER | {"method.name": "fedeed", "method.R": 1}
TABLE4 = FEDEED | {"method.pipeline": False}
FRAMEWORK = GROUPS | {
    "method.name": "framework",
    "method.local_trainer.kind": "fedavg",
    "method.ensemble_trainer.kind": "aggregated",
    "method.R": 1,
}

ENSEMBLES = FRAMEWORK | {
    "method.rule": "avg_logits",
    "method.global_trainer.kind": "none",
}
TIMES = TABLE4 | {  # A.7: four clients, a model for each, constant times; the speeds are ours: ten minutes each
    "run.rounds": 10,
    "partition.clients": 4,
    "federation.fraction": 1.0,
    "federation.availability.speed": (20.8,),
    "federation.availability.server_speed": 2133.0,
    "method.schedule": "fixed",  # "always maps the i-th model to the i-th client"
    "method.local.epochs": 1,
}

# ---- MNFL (KT-pFL, Zhang et al., NeurIPS 2021), section 5 ---------------------------------------------

PERSONAL = {
    "run.rounds": 30,  # code
    "data.name": "fashion-mnist",
    "data.client_test": 0.25,
    "partition.clients": 20,
    "federation.fraction": 1.0,
    "method.local.epochs": 20,  # E
    "method.local.batch": 128,
    "method.coefficients.rho": 0.7,  # code
}
MIXTURE = PERSONAL | {
    "partition.kind": "classes",
    "public.source": "dataset",
    "public.name": "mnist",
    "models.clients": ("lenet5", "alexnet-small", "resnet18", "shufflenetv2"),
    "method.name": "mnfl",
    "method.temperature": 10.0,  # code
    "method.distill.epochs": 1,  # R
    "method.distill.batch": 256,
    "method.coefficients.steps": 1,
}

TABLE1 = MIXTURE | {
    "partition.classes_per_client": 2,
    "public.per_round": 3000,
    "models.norm": "batch",
    "method.rule": "learned",
    "method.c_loss": "kl",
    "method.c_reduction": "sum",  # eq. (2)
    "method.c_batch": 256,  # as large as a batch of the distillation
    "method.local.lr": 0.01,  # eta_1 = eta_2 = eta_3
    "method.distill.lr": 0.01,
    "method.coefficients.lr": 0.01,
    "method.coefficients.lam": 1.0,  # not stated; ours
    "method.coefficients.constraint": "simplex",  # ours
}
TABLE2 = PERSONAL | {
    "partition.kind": "dirichlet",  # "each client contains all labels"
    "partition.variant": "class",
    "partition.alpha": 1.0,  # not stated; ours
    "partition.min_per_class": 2,  # "each client contains all labels"
    "public.source": "none",
    "models.clients": ("mcmahan-cnn",),
    "method.name": "mnflparam",
    "method.c_reduction": "sum",  # no division by the number of parameters
    "method.order": "paper",
    "method.local.lr": 0.005,
    "method.coefficients.lr": 0.01,
    "method.coefficients.lam": 1.0,  # ours
}
AVERAGING = {k: v for k, v in FEDDF.items() if not k.startswith("method.")} | {
    "method.name": "fedavg",
    "method.average": "uniform",
    **{k: v for k, v in FEDDF.items() if k.startswith("method.local.")},
}

PAPERS = {
    "feddf/fig2": FEDDF,
    "feddf/fig9": FEDDF,
    "feddf/fig10": FEDDF | {"data.name": "cifar100", "public.name": "imagenet32"},
    "feddf/fig11": {
        "run.rounds": 10,
        "data.name": "ag-news",
        "partition.kind": "dirichlet",
        "partition.variant": "equal",
        "partition.clients": 10,
        "partition.alpha": 1.0,
        "public.source": "held-out",
        "public.size": 60_000,  # "the left 50 %"
        "models.clients": ("text-bag",),  # any: nothing is trained
        "federation.fraction": 1.0,
        "method.name": "feddf",
    },
    "feddf/fig12": AVERAGING,
    "feddf/fig13": FEDDF,
    "feddf/fig15": FEDDF | {"partition.alpha": 100.0},
    "feddf/fig16": FEDDF,
    "feddf/fig17": FEDDF | {"partition.alpha": 0.01},
    "feddf/table1": FEDDF
    | {
        "run.rounds": 700,  # the largest number is 546 +- 191
        "run.stop.target": 0.8,
        "run.stop.split": "test",
    },
    "feddf/table1-centralised": {
        "run.rounds": 100,  # of one epoch; not stated, ours
        **{k: v for k, v in AVERAGING.items() if k.startswith(("data.", "partition.", "models.", "method.local."))},
        "public.source": "none",
        "method.name": "centralised",
        "method.local.epochs": 1,
    },
    "feddf/table2": FEDDF,
    "feddf/table3": FEDDF  # VGG-9 has no normalisation and a rate of its own
    | {
        "models.clients": ("vgg9-fedma",),  # appendix C.2: "9-layer VGG (same as the one used in [74])", FedMA's
        "models.norm": "none",
        "method.local.lr": 0.05,
        "method.screen.kind": "robust",
        "method.screen.drop_worst": True,
        "method.screen.drop_threshold": 1.2,  # code
    },
    "feddf/table4": FEDDF
    | {"method.upload.kind": "low-bit", "method.upload.bits": 1, "method.upload.training": "ste"}
    | {"method.upload.mask": True},
    "feddf/table5": FEDDF,
    "feddf/table6": FEDDF | {"method.local.optimizer": "adam", "method.local.lr": 1e-3},
    "feddf/table7": FEDDF  # "all client models + 10 samples"
    | {"method.teaching.kind": "swag", "method.teaching.samples": 10, "method.teaching.scale": 0.5}
    | {"method.teaching.include_clients": True},
    "feddf/table8": FEDDF | {"method.mu": 0.01},  # of 0.001, 0.01, 0.1, 1; the choice is not stated
    "feddf/fig4-cifar10": FEDDF
    | {
        "run.rounds": 30,
        "partition.clients": 21,
        "models.clients": ("resnet20", "resnet32", "shufflenetv2"),
        "method.local.epochs": 80,
        "method.report_ensemble": True,
    },
    "feddf/fig5-noise": FEDDF
    | {"public.source": "noise", "public.name": None, "public.noise": "uniform", "public.size": 50_000},
    "feddf/fig5-generator": FEDDF | {"public.source": "generator", "public.name": None, "public.size": 50_000},
    "feddf/fig6a": FIGURE6,
    "feddf/fig6b": FIGURE6,
    "feddf/fig6c": FIGURE6,
    "fedet/table2-cifar10": FEDET | CONVERGED | {"data.name": "cifar10"},
    "fedet/table2-cifar100": FEDET | CONVERGED | {"data.name": "cifar100"},
    **{f"fedet/{name}": FEDET | CONVERGED | {"data.name": "cifar10"} for name in ("table3", "table4", "table5")},
    "fedet/table6": FEDET | {"data.name": "cifar10"},  # nothing is trained
    "fedet/fig2": FEDET | {"data.name": "cifar10", "run.rounds": 1},  # nothing is trained
    **{f"fedet/{name}-sent140": SENT140 | CONVERGED for name in ("table2", "table3", "table4")},
    "fedet/table6-sent140": SENT140,
    "fedeed/table1": ENSEMBLES,
    "fedeed/table2": FRAMEWORK
    | SERVER
    | {
        "method.global_trainer.kind": "designated",
        "method.global_trainer.early_stop": False,
    },
    "fedeed/table4-cifar10": TABLE4,
    "fedeed/table4-cifar100": TABLE4 | {"data.name": "cifar100", "public.name": "imagenet32"},
    "fedeed/table3": TABLE4 | {"run.rounds": 1, "method.local.epochs": 1, "method.fusion.steps": 1},  # one step tells
    "fedeed/table5": TABLE4 | {"method.local_trainer.kind": "fedavg"},
    "fedeed/table6": TABLE4,
    "fedeed/table7": TABLE4,
    "fedeed/table8": TABLE4,
    "fedeed/table9": TABLE4 | {"data.validation": 0.1},  # "10 % of the training data"
    "fedeed/fig2": ENSEMBLES,
    "fedeed/fig3": TIMES,
    "fedeed/fig4": TIMES | {"federation.availability.period_s": 3600.0},  # "roughly uniform"; the hour is ours
    "mnfl/table1": TABLE1,
    "mnfl/table3": TABLE1,
    "mnfl/table4": TABLE1,
    "mnfl/table5": TABLE1,
    "mnfl/table6": TABLE1,
    "mnfl/fig1": {k: v for k, v in TABLE1.items() if k != "partition.classes_per_client"}
    | {
        "partition.kind": "dirichlet",  # the caption: "each client contains all labels"
        "partition.variant": "class",
        "partition.alpha": 1.0,  # not stated; ours
        "partition.min_per_class": 2,
    },
    "mnfl/fig2": TABLE2,
    "mnfl/fig3": TABLE1 | {"public.where": "server"},  # "the public dataset is stored on the server"
    "mnfl/official-code": MIXTURE
    | {
        "run.rounds": 60,  # the loop runs twice the 30 of its configuration
        "partition.classes_per_client": 4,
        "public.per_round": 5000,
        "method.c_loss": "mse",
        "method.c_reduction": "mean",
        "method.c_batch": 5000,  # all of a round's
        "method.name": "mnfl-code",
        "method.grow_epochs": True,
        "method.local.epochs": 10,
        "method.local.batch": 16,
        "method.local.lr": 0.02,
        "method.distill.lr": 0.002,  # 0.02 on a loss that is a mean over ten classes too
        "method.coefficients.auto_lr": True,
        "method.coefficients.constraint": "softmax5",
    },
    "mnfl/table2": TABLE2,
}
# ---- language: Figure 3 of FedDF, Sent140 of Fed-ET ---------------------------------------------------

FIGURE3 = {k: v for k, v in FEDDF.items() if k not in ("public.name", "models.norm", "data.validation")} | {
    "run.rounds": 10,
    "data.length": 128,  # code for texts, as all that is marked so: exps/test.sh beside the one for images
    "partition.clients": 10,
    "public.source": "held-out",  # "the left 50% is used as the unlabeled distillation dataset"
    "models.clients": ("hf:distilbert-base-uncased",),
    "federation.fraction": 1.0,
    "method.report_ensemble": True,
    "method.local.lr": 1e-5,
    "method.local.optimizer": "adam",  # code; Algorithm 2: "arbitrary optimizers (e.g. Adam)"
    "method.fusion.steps": 5000,  # code
    "method.fusion.batch": 64,  # code
    "method.fusion.lr": 1e-5,  # code
    "method.fusion.schedule": "constant",  # code
    "method.fusion.every": 20,  # code
    "method.fusion.patience": 200,  # code
}
PAPERS |= {
    "feddf/fig3-agnews": FIGURE3
    | {
        "data.name": "ag-news",
        "data.validation": 0.015,  # no set is named; code, for SST-2: 3 % of the half that is not the clients'
        "public.size": 58_200,
        "method.local.epochs": 10,
    },
    "feddf/fig3-sst2": FIGURE3
    | {
        "data.name": "sst2",
        "data.validation": 0.01,  # "holding out ... 1% of the original training samples"
        "public.size": 33_674,
        "method.local.epochs": 1,
    },
}
UNPINNED = {"run.seed", "public.path"}  # any seed; a file of the user's own


def _settings(table: dict, above: str = "") -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        if isinstance(value, dict) and above + key != "models.options":  # one setting
            yield from _settings(value, f"{above}{key}.")
        else:
            yield above + key, tuple(value) if isinstance(value, list) else value


def _effective(config, key: str) -> object:
    """What a run would use, however it is written down."""
    value = config
    for part in key.split("."):
        value = getattr(value, part)
    return tuple(value) if isinstance(value, list) else value


@pytest.mark.parametrize("name", PAPERS)
def test_a_recipe_has_the_papers_values(name):
    config = load_config(name)
    expected = dict(PAPERS[name])
    assert tomllib.loads(recipe_text(name))["method"]["name"] == expected.pop("method.name")
    assert {key: _effective(config, key) for key in expected} == expected


@pytest.mark.parametrize("name", PAPERS)
def test_no_value_of_a_recipe_is_left_out_here(name):
    tables = tomllib.loads(recipe_text(name))
    tables.pop("paper", None)  # of `solera reproduce`; no settings of the run
    written = {key for key, _ in _settings(tables)}
    assert written - UNPINNED <= set(PAPERS[name])


@pytest.mark.parametrize("name", [n for n in paper_names() if n.startswith(("feddf/", "fedeed/"))])
def test_the_literal_partition_is_named_as_an_open_point(name):
    assert any("--set partition.variant=client" in text for text in load_paper(name).open)


def test_alpha_means_alpha_itself_in_every_recipe():
    """The letter of FedDF's text, Dir(alpha p), is far more skewed at the same alpha: an option that no recipe has."""
    parts = {name: tomllib.loads(recipe_text(name)).get("partition", {}) for name in recipe_names()}
    assert len(parts) > 70
    assert [name for name, of in parts.items() if of.get("variant") == "client"] == []


def test_every_recipe_of_a_papers_table_is_here():
    ours = {n for n in recipe_names() if n.endswith("laptop") or n.startswith("quickstart/") or "/" not in n}
    assert set(recipe_names()) - ours == set(PAPERS)
