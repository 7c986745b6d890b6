"""The files of a run directory besides its metrics: run.json, partition.json, confusion.json and, for 2-d samples,
regions.json. Nothing here changes a result.
"""

import dataclasses
import functools
import hashlib
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.federation import FederationConfig
from ..core.task import Data
from ..data.catalogue import SOURCES
from ..data.transforms import step_name
from ..method import Method, Model, name_of
from ..models.hf import PREFIX, origins_of
from ..models.lora import base_digest, sizes_of
from ..place.devices import Compute
from ..scenario.scenario import Scenario
from ..scenario.server import EnsembleReport, Server
from ..train.fitting import logits_of
from .measure import answers
from .words import WHOLE, StandIns, dig

CLIENTS = 200  # limit of clients whose classes are recorded, evenly spaced among all
CELLS = 40_000  # limit of counts in partition.json
CLASSES = 100  # with more classes, only the correct predictions of each class are recorded, without a matrix
MATRICES = 24
PANELS = 6  # limit of ensemble members whose regions are recorded
GRID = 61  # points on a side
POINTS = 200  # limit of samples of each client


@dataclasses.dataclass(frozen=True)
class Facts:
    """Everything recorded of a run besides its rounds."""

    experiment: dict[str, Any]  # everything that determines the results, in a form that can be saved and compared
    clients: int
    takes: dict[str, Any]  # the models' input: shape, mean, std, vocabulary
    class_names: Sequence[str] | None
    partition: Callable[[], dict[str, Any]]  # partition.json
    regions: Callable[[int, Mapping[str, Model]], dict[str, Any] | None]  # regions.json, of the last round
    lora: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)  # by architecture, see `lora_facts`
    found: tuple[int, int] | None = None  # training and test rows of the data's files
    stand_ins: StandIns = dataclasses.field(default_factory=dict)  # settings that differ from a paper's row
    fingerprint: str = ""  # of this machine; computed after workers are forked, because computing it trains a model

    def model_card(self, architecture: str) -> dict[str, str]:
        """The inputs and outputs of a model, for the metadata of its file."""
        names = {"class_names": json.dumps(self.class_names)} if self.class_names else {}
        base = {"base": self.lora[architecture]["base"]} if architecture in self.lora else {}
        return {"input": json.dumps(self.takes), **names, **base}


def facts_of(
    scenario: Scenario, method: Method, federation: FederationConfig, compute: Compute | None = None, threads: int = 1
) -> Facts:
    """The facts of a simulated run. Optional facts that a run lacks are left out of run.json."""
    roster, data, server = scenario.roster, scenario.dataset, scenario.server
    experiment: dict[str, Any] = {
        "run.seed": scenario.seed,
        "method": {"name": name_of(method), **dataclasses.asdict(method)},
        "federation": dataclasses.asdict(federation),
        "data": {"name": data.name, "classes": data.classes, "shape": data.shape, "test_size": len(data.test)},
        "clients": {
            "count": len(roster),
            "examples": _short_hash(roster.sizes),
            "architectures": roster.architectures,
            "assigned": _short_hash(roster.architecture_of),
        },
        "server": server.large,
        "public": None if scenario.public is None else scenario.public.digest[:16],
    }
    takes: dict[str, Any] = {"shape": data.shape, "mean": data.mean, "std": data.std, "vocabulary": data.vocabulary}
    if scenario.sites:
        experiment["clients"]["sites"] = list(roster)
    if federation.availability is None:
        del experiment["federation"]["availability"]
    if scenario.augment:
        experiment["data"]["augment"] = [step_name(step) for step in scenario.augment]
    if how := (compute or Compute()).facts() | ({"threads": threads} if threads != 1 else {}):
        experiment["engine"] = how
    if data.task != "classification":
        experiment["data"]["task"] = data.task
    if data.columns:
        takes["encodings"] = [[c.encoding.name, c.length] for c in data.columns]
        told = [{"tokenizer": c.encoding.name, "length": c.length, "cut": c.cut} for c in data.columns]
        experiment["data"]["encodings"] = told
    if origins := {A: origin for A in server.builders for origin in origins_of(server.template(A))}:
        experiment["weights"] = origins
    if lora := lora_facts(scenario):
        experiment["lora"] = lora
    return Facts(
        experiment=json.loads(json.dumps(experiment, default=lambda o: type(o).__qualname__)),
        clients=len(roster),
        takes=takes,
        class_names=data.class_names,
        partition=lambda: partition_facts(scenario),
        regions=lambda t, models: region_facts(t, models, scenario.server, scenario),
        lora=lora,
        found=data.found,
    )


def _short_hash(numbers: Tensor) -> str:
    return hashlib.sha256(numbers.numpy().tobytes()).hexdigest()[:16]


def stand_ins_of(papers: Mapping[str, Any] | None, config_text: str | None, facts: Facts) -> StandIns:
    """Settings that differ from a paper's: setting -> the paper's value, the run's.

    `papers` are the stand-ins that its configuration names (None: it is no paper's row). Added are those that only the
    run itself shows: files with a part of a data set, and models that begin with random weights.
    """
    if papers is None:
        return {}
    tables = tomllib.loads(config_text or "")
    found = {key: (value, dig(tables, *key.split("."))) for key, value in papers.items()}
    return {
        **found,
        **sampled(found, tables, facts.experiment["data"]["name"], facts.found),
        **_at_random(found, facts),
    }


def sampled(found: StandIns, tables: Mapping[str, Any], name: str, rows: tuple[int, int] | None) -> StandIns:
    """The sizes of the data set `name`, if its files (`rows`) or the run's settings hold fewer samples than it has."""
    info = SOURCES.get(name)
    if "data.name" in found or info is None or info.rows is None or rows is None:
        return {}
    sizes = {}
    for key, whole, here in zip(("train_size", "test_size"), info.rows, rows, strict=True):
        papers, asked = found.get(f"data.{key}", (None, None))
        if papers == WHOLE:
            sizes[f"data.{key}"] = (whole, asked)
        elif 0 < here < whole and dig(tables, "data", key) is None:
            sizes[f"data.{key}"] = (whole, here)
    return sizes


def _at_random(found: StandIns, facts: Facts) -> StandIns:
    """Models with random weights, where the paper's models are pretrained ones."""

    def names(value: Any) -> list[str]:
        return [value] if isinstance(value, str) else list(value or ())

    papers = [name for key in ("models.clients", "models.server") for name in names(found.get(key, ("", None))[0])]
    if not any(name.startswith(PREFIX) for name in papers):
        return {}
    origins = facts.experiment.get("weights", {})
    ours = [*facts.experiment["clients"]["architectures"], *names(facts.experiment["server"])]
    begun = [A for A in ours if A not in papers and origins.get(A, {}).get("weights") != "pretrained"]
    return {"models.weights": ("pretrained", f"random ({', '.join(begun)})")} if begun else {}


def lora_facts(scenario: Scenario) -> dict[str, dict[str, Any]]:
    """For every architecture with LoRA: the digest of its frozen base, the bytes of the weights that are sent and of
    the whole model, and its number of clients."""
    found = {}
    of, names = scenario.roster.architecture_of, list(scenario.roster.architectures)
    for A in scenario.server.builders:
        model = scenario.server.template(A)
        if (base := base_digest(model)) is not None:
            sent, whole = sizes_of(model)
            clients = int((of == names.index(A)).sum()) if A in names else 0
            found[A] = {"base": base, "sent": sent, "whole": whole, "clients": clients}
    return found


def partition_facts(scenario: Scenario) -> dict[str, Any]:
    """partition.json: the number of training samples of each class on each client."""
    roster, classes = scenario.roster, scenario.dataset.classes
    K = len(roster)
    shown = _spread(K, max(1, min(CLIENTS, CELLS // classes)))
    sizes = roster.sizes.double()
    return {
        "clients": K,
        "classes": classes,
        "samples": int(roster.sizes.sum()),
        "sizes": {
            "min": int(sizes.min()),
            "median": int(sizes.median()),
            "max": int(sizes.max()),
            "empty": int((sizes == 0).sum()),
        },
        "shown": [
            {"client": roster.id(i), "model": roster[roster.id(i)].architecture, "counts": scenario.held(i).tolist()}
            for i in shown
            if not scenario.elsewhere
        ],
    }


def confusion_facts(t: int, models: Mapping[str, Model], server: Server, test: Data) -> dict[str, Any]:
    """confusion.json: for each reported model, how many samples of a class (row) it predicts as which (column)."""
    classes = server.num_classes
    reported: list[tuple[str, str, Model | EnsembleReport]] = [("models", n, m) for n, m in models.items()]
    reported += [("ensembles", e.name, e) for e in server.ensembles]
    found: dict[str, Any] = {
        "round": t,
        "classes": classes,
        "total": test.labels.bincount(minlength=classes).tolist(),
        "models": {},
        "ensembles": {},
    }

    def first_choice(what: Model | EnsembleReport) -> Tensor:
        if isinstance(what, Model):
            return logits_of(server.model(what.architecture, what.weights), test.inputs).argmax(-1)
        return answers(server, what, test.inputs).argmax(-1)

    jobs = [functools.partial(first_choice, what) for _, _, what in reported[:MATRICES]]
    for (group, name, _), said in zip(reported, server.parallel(jobs, range(len(jobs))), strict=False):
        cells = torch.bincount(test.labels * classes + said, minlength=classes * classes).reshape(classes, classes)
        found[group][name] = {"right": cells.diagonal().tolist()}
        if classes <= CLASSES:
            found[group][name]["matrix"] = cells.tolist()
    return found


def region_facts(t: int, models: Mapping[str, Model], server: Server, scenario: Scenario) -> dict[str, Any] | None:
    """regions.json: the prediction of every model on a grid of points, in percent for each class. None unless samples
    are two-dimensional points."""
    if scenario.dataset.shape != (2,) or scenario.dataset.vocabulary:
        return None
    test = scenario.test.inputs
    low, high = test.amin(0), test.amax(0)
    low, high = low - 0.1 * (high - low), high + 0.1 * (high - low)
    xs, ys = (torch.linspace(float(a), float(b), GRID) for a, b in zip(low, high, strict=True))
    grid = torch.stack([xs.repeat(GRID), ys.repeat_interleave(GRID)], 1)  # row by row, from the lowest y
    panels: list[tuple[str, str, Model | EnsembleReport]] = []
    for e in server.ensembles:
        named = e.names or [f"member {i + 1}" for i in range(len(e.members))]
        panels += [("client", k, Model(A, w)) for k, (A, w) in zip(named[:PANELS], e.members, strict=False)]
    panels += [("average", A, Model(A, w)) for A, w in server.averages.items()]
    panels += [("ensemble", e.name, e) for e in server.ensembles]
    panels += [("model", name, m) for name, m in models.items()]
    shown = [] if scenario.elsewhere else [scenario.roster.id(i) for i in range(min(PANELS, len(scenario.roster)))]
    public = scenario.public
    return {
        "round": t,
        "x": [round(float(xs[0]), 4), round(float(xs[-1]), 4)],
        "y": [round(float(ys[0]), 4), round(float(ys[-1]), 4)],
        "size": GRID,
        "classes": server.num_classes,
        "panels": [
            {"kind": kind, "name": name, "percent": (100 * answers(server, what, grid)).round().int().tolist()}
            for kind, name, what in panels
        ],
        "points": {k: _points(scenario.client(k, 0, {}).train) for k in shown},
        "public": [] if public is None else _rounded(public[torch.tensor(_spread(len(public), POINTS))]),
    }


def _points(data: Data) -> list[list[float]]:
    """[x, y, class] of some samples."""
    some = torch.tensor(_spread(len(data), POINTS), dtype=torch.int64)
    pairs = zip(_rounded(data.inputs[some]), data.labels[some].tolist(), strict=True)
    return [[*place, label] for place, label in pairs]


def _rounded(inputs: Tensor) -> list[list[float]]:
    return [[round(x, 3) for x in row] for row in inputs.tolist()]


def _spread(total: int, count: int) -> list[int]:
    """`count` evenly spaced numbers below `total`; all of them if `total` is smaller."""
    count = min(total, count)
    return [i * total // count for i in range(count)]
