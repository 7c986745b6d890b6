"""An estimate of the time that runs take on one core: a training step of each model is timed, and counted.

Counted are the clients' training steps, the server's distillation steps, the teachers' predictions and the evaluation.
The rest (matching, coefficients, messages) is small and left out, so an estimate says "about".
"""

import math
import time
import tomllib
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from ..data.catalogue import SOURCES
from ..data.encodings import VOCABULARY
from ..models import MODELS, build
from ..runs.config import Config, load_config
from ..train.distill import Distill
from ..train.fitting import Local
from .scales import CLASSES, rows_of

MEASURE_S = 0.15  # time for one measurement, after a first step that does not count
HELD_OUT = 0.2  # of the training samples, where the public samples are held out and their number is unset


class Shape(NamedTuple):
    """All that the time of a step depends on."""

    model: str
    norm: str
    head: str
    classes: int
    shape: tuple[int, ...]
    batch: int
    training: bool


def _measured(what: Shape) -> float:
    """The seconds of one training step (or, without training, of one prediction) of a batch."""
    text = MODELS[what.model].kind == "text"
    vocabulary = VOCABULARY if text else None
    model = build(what.model, what.classes, what.shape, what.norm, what.head, vocabulary=vocabulary)  # type: ignore[arg-type]
    g = torch.Generator().manual_seed(0)
    size = (what.batch, *what.shape)
    inputs = torch.randint(0, VOCABULARY, size, generator=g) if text else torch.randn(size, generator=g)
    labels = torch.randint(0, what.classes, (what.batch,), generator=g)
    model.train(what.training)

    def once() -> None:
        if what.training:
            model.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
        else:
            with torch.no_grad():
                model(inputs)

    once()
    began, count = time.perf_counter(), 0
    while not count or time.perf_counter() - began < MEASURE_S:
        once()
        count += 1
    return (time.perf_counter() - began) / count


def work_of(config: Config) -> tuple[list[tuple[float, Shape]], list[str]]:
    """The steps of a run, how many of which, and its models that are not in the zoo, whose steps are not counted.

    It follows from the configuration alone: no data is read."""
    method, models, data = config.method, config.models, config.data
    rows = rows_of(config) or (10_000, 2_000)
    info = SOURCES.get(data.name)
    classes, shape = (info.classes or CLASSES, tuple(info.shape)) if info else (CLASSES, (3, 32, 32))
    clients = config.partition.clients or 100
    public, open_info = 0, SOURCES.get(config.public.name or "")
    if config.public.source != "none":
        whole = open_info.rows[0] if open_info and open_info.rows else int(HELD_OUT * rows[0])
        public = int((config.public.size or whole) * config.public.fraction)
    held = public if config.public.source == "held-out" else 0
    private = max(1.0, rows[0] * (1 - data.validation) - held) / clients * (1 - data.kept_for_tests)
    private *= getattr(config.partition, "fraction", 1.0)
    cohort, rounds = config.federation.cohort(clients), config.run.rounds
    steps: list[tuple[float, Shape]] = []

    def add(count: float, model: str, batch: int, training: bool) -> None:
        steps.append((count, Shape(model, models.norm, models.head, classes, shape, batch, training)))

    def trained(model: str, local: Local, samples: float, times: float) -> None:
        each = local.steps if local.steps is not None else local.epochs * math.ceil(samples / local.batch)
        add(times * each, model, min(local.batch, max(1, math.ceil(samples))), True)

    known = [name for name in models.clients if name in MODELS]
    share = cohort * rounds / len(models.clients)
    local, distill, fusion = (getattr(method, name, None) for name in ("local", "distill", "fusion"))
    per_round = min(public, config.public.per_round or public)
    server = models.server if models.server in MODELS else None
    for name in known:
        if isinstance(local, Local):
            trained(name, local, private, share)
        if isinstance(distill, Local):
            trained(name, distill, per_round, share)
        if isinstance(fusion, Distill):
            asked = min(public, fusion.steps * fusion.batch)
            add(share * asked / fusion.batch, name, fusion.batch, False)
        if name != server:
            add(rounds / config.run.eval_every * rows[1] / 128 / len(known), name, 128, False)
    students = dict.fromkeys([server] if server else known)
    if isinstance(fusion, Distill):
        for name in students:
            add(rounds * fusion.steps, name, fusion.batch, True)
    if server:
        add(rounds / config.run.eval_every * rows[1] / 128, server, 128, False)
    unknown = [n for n in dict.fromkeys([*models.clients, models.server]) if n is not None and n not in MODELS]
    return steps, unknown


def estimated(texts: Iterable[str]) -> dict[str, Any]:
    """The seconds of runs on one core, from their configurations as TOML. The result is JSON: it comes from a process
    of its own. "unknown": models that are not counted; "steps": the measured training steps."""
    measured: dict[Shape, float] = {}
    seconds, unknown = [], []
    for text in texts:
        steps, strange = work_of(load_config(tomllib.loads(text)))
        unknown += strange
        measured |= {what: _measured(what) for what in dict.fromkeys(w for n, w in steps if n) if what not in measured}
        seconds.append(sum(count * measured[what] for count, what in steps if count))
    trained = [[w.model, w.batch, s] for w, s in measured.items() if w.training]
    return {"seconds": seconds, "unknown": list(dict.fromkeys(unknown)), "steps": trained}
