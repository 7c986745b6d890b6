"""How long runs will take on one core, before they start: a training step of each model is timed, and counted.

Counted are the clients' training steps, the server's distillation steps, the teachers' predictions and the evaluation.
What a method does besides (matching, coefficients, messages) is small and left out, so an estimate says "about".
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
    """What a measured step depends on."""

    model: str
    norm: str
    head: str
    classes: int
    shape: tuple[int, ...]
    batch: int
    training: bool


class Clock:
    """Times steps of models, each once."""

    def __init__(self) -> None:
        self.seconds: dict[Shape, float] = {}

    def step(self, what: Shape) -> float:
        """The seconds of one step (or, without training, of one prediction) of a batch."""
        if what not in self.seconds:
            self.seconds[what] = _measured(what)
        return self.seconds[what]


def _measured(what: Shape) -> float:
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


class Work(NamedTuple):
    """The steps of a whole run: how many of which."""

    steps: list[tuple[float, Shape]]
    unknown: list[str]  # models that are not in the zoo: their steps are not counted


def work_of(config: Config) -> Work:
    """The steps of a run, from its configuration alone. No data is read."""
    method, models, data = config.method, config.models, config.data
    rows = rows_of(config) or (10_000, 2_000)
    info = SOURCES.get(data.name)
    classes, shape = (info.classes or CLASSES, tuple(info.shape)) if info else (CLASSES, (3, 32, 32))
    clients = config.partition.clients or 100
    public = _public(config, rows[0])
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
    return Work(steps, unknown)


def _public(config: Config, rows: int) -> int:
    public = config.public
    if public.source == "none":
        return 0
    info = SOURCES.get(public.name or "")
    whole = info.rows[0] if info and info.rows else int(HELD_OUT * rows)
    return int((public.size or whole) * public.fraction)


def cpu_seconds(configs: Iterable[Config], clock: Clock | None = None) -> tuple[list[float], list[str]]:
    """The seconds of each run on one core, and the models that could not be counted."""
    clock, seconds, unknown = clock or Clock(), [], []
    for config in configs:
        work = work_of(config)
        seconds.append(sum(count * clock.step(what) for count, what in work.steps if count))
        unknown += work.unknown
    return seconds, list(dict.fromkeys(unknown))


def estimated(texts: list[str]) -> dict[str, Any]:
    """The same from configurations as TOML, as JSON: for a process of its own."""
    clock = Clock()
    seconds, unknown = cpu_seconds([load_config(tomllib.loads(text)) for text in texts], clock)
    measured = [[w.model, w.batch, s] for w, s in clock.seconds.items() if w.training]
    return {"seconds": seconds, "unknown": unknown, "steps": measured}


__all__ = ["Clock", "Shape", "Work", "cpu_seconds", "estimated", "work_of"]
