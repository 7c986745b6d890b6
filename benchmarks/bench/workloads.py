"""The named workloads: what is done, in which sizes, and by whom.

A case has several sides that do the same work and take turns. The first one is ours, unless the case shows growth:
then all sides are ours, of different sizes, and what counts is the time for one unit of each.
"""

import dataclasses
import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from solera.core.errors import ConfigError
from solera.core.federation import Federation, FederationConfig
from solera.core.randomness import one_thread
from solera.core.tensors import Weights, weights_of
from solera.core.wire import encode
from solera.data import PublicConfig
from solera.engines import ClientStates, InProcess, default_workers
from solera.methods.fedavg import FedAvg
from solera.methods.feddf import FedDF
from solera.methods.fedeed import FedEED
from solera.methods.fedet import FedET
from solera.methods.mnfl import MNFL
from solera.methods.steps.fusion import fuse, public_indices
from solera.models.factory import Architecture, ModelsConfig
from solera.place.placement import keep_freed_memory
from solera.runs.callbacks import Callback
from solera.runs.config import EngineConfig, RunConfig
from solera.runs.loop import simulate
from solera.runs.record import RoundRecord
from solera.scenario.scenario import Scenario
from solera.train.distill import Distill, distill, visits
from solera.train.fitting import Local, evaluate
from solera.train.teachers import Ensemble

from . import made_up, plain
from .machine import Peak, answering_flops, training_flops
from .pace import Pace

Scale = Literal["full", "quick", "tiny"]  # tiny: to see that it works at all
Side = Callable[[Pace, int], None]  # (conversation, laps in all)
SCALES: tuple[Scale, ...] = ("full", "quick", "tiny")
LR = 0.05


@dataclasses.dataclass(frozen=True)
class Fleet:
    """A federation that every framework can run: equal clients, one model, one epoch a round."""

    model: str
    shape: tuple[int, int, int]
    clients: int
    samples: int  # of each client
    cohort: int
    batch: int = 32
    norm: Literal["batch", "group", "none"] = "batch"

    @property
    def steps(self) -> int:
        """Of a round, of all its clients together."""
        return self.cohort * -(-self.samples // self.batch)

    @property
    def threads(self) -> int:
        """Of torch, for programs that train one client after another: what is faster for them."""
        return 1 if self.model == "mlp" else default_workers()

    def scenario(self) -> Scenario:
        data = made_up.image_set(self.clients * self.samples, 1000, self.shape)
        split = made_up.equal_parts(self.clients * self.samples, self.clients)
        return Scenario(data, ModelsConfig(clients=[self.model], norm=self.norm), split, PublicConfig(source="none"))


@dataclasses.dataclass(frozen=True)
class Case:
    """One comparison: sides that take turns, each doing so many laps; the first of them are for warming up."""

    name: str  # "workload" or "workload/variant"
    title: str
    sides: Mapping[str, Side]
    laps: int
    warm_up: int = 1
    flops: Callable[[], float] | None = None  # of one lap of the first side
    fleet: Fleet | None = None  # what other frameworks can do as well
    same_digest: bool = False  # all sides must end with equal bits
    units: Mapping[str, float] | None = None  # a case of growth: how many units a lap of each side has

    @property
    def workload(self) -> str:
        return self.name.partition("/")[0]


def find(names: Sequence[str], scale: Scale) -> list[Case]:
    """The cases of these names (a workload, or one variant of it); without names, all that a scale has."""
    cases = every_case(scale)
    if not names:
        return [c for c in cases if scale == "full" or c.name in QUICK]
    for name in names:
        if not any(name in (c.name, c.workload) for c in cases):
            known = ", ".join(dict.fromkeys(c.workload for c in cases))
            raise ConfigError(f"no workload is called {name!r}; there are {known}")
    return [c for c in cases if c.name in names or c.workload in names]


# ---- sides that are whole runs ----------------------------------------------------------------------


class _Paced(Callback):
    """Makes a run wait before each of its rounds. Evaluation is not part of a lap: the others do none."""

    def __init__(self, pace: Pace, laps: int):
        self.pace, self.left = pace, laps

    def begin(self, facts: Mapping[str, Any], before: Iterable[RoundRecord]) -> None:
        self.pace.ready()
        self.pace.go()

    def saved(self, record: RoundRecord) -> None:
        self.pace.lap(less=record.seconds["evaluate"])
        self.left -= 1
        if self.left and not self.pace.go():
            raise KeyboardInterrupt


@dataclasses.dataclass(frozen=True)
class Setting:
    """All that `simulate` takes."""

    scenario: Scenario
    method: Any
    federation: FederationConfig = dataclasses.field(default_factory=FederationConfig)
    engine: EngineConfig = dataclasses.field(default_factory=partial(EngineConfig, device="cpu"))  # as the others


def run_side(make: Callable[[], Setting], steps: int, pace: Pace, laps: int) -> None:
    """A run of Solera, a round at a time: with its messages, checks, accounting, metrics and checkpoints."""
    setting = make()
    config = RunConfig(rounds=laps, eval_every=laps)
    with tempfile.TemporaryDirectory(prefix="solera-bench-") as folder:
        result = simulate(
            setting.scenario, setting.method, f"{folder}/run", config, setting.federation, setting.engine,
            callbacks=[_Paced(pace, laps)],
        )  # fmt: skip
    accuracy = [m["accuracy"] for m in result.summary["models"].values()]
    pace.end(digest=result.digest, steps=steps * laps, accuracy=accuracy[0] if accuracy else None)


# ---- fedavg -----------------------------------------------------------------------------------------


def _fedavg(fleet: Fleet) -> Setting:
    method = FedAvg(Local(epochs=1, batch=fleet.batch, lr=LR))
    return Setting(fleet.scenario(), method, FederationConfig(fraction=fleet.cohort / fleet.clients))


def _plain_fedavg(fleet: Fleet, pace: Pace, laps: int) -> None:
    """With torch's threads, the only way such a loop has of using a second core, and torch's usual memory layout."""
    torch.set_num_threads(fleet.threads)
    scenario = fleet.scenario()
    model = scenario.server.model(fleet.model, scenario.server.init(fleet.model))
    model = model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    parts, chance = _client_data(fleet, scenario), torch.Generator().manual_seed(0)
    pace.ready()
    steps = 0
    while pace.go():
        chosen = torch.randperm(fleet.clients, generator=chance)[: fleet.cohort].tolist()
        steps += plain.fedavg_round(model, [parts(k) for k in chosen], fleet.batch, LR)
        pace.lap()
    test = scenario.test
    pace.end(steps=steps, accuracy=evaluate(model, test.inputs, test.labels).accuracy)


def _client_data(fleet: Fleet, scenario: Scenario) -> Callable[[int], plain.Client]:
    stored = scenario.dataset.train

    def of(k: int) -> plain.Client:
        mine = slice(k * fleet.samples, (k + 1) * fleet.samples)
        return scenario.dataset.prepare(stored.inputs[mine]), stored.labels[mine]

    return of


def _bare_fedavg(fleet: Fleet, pace: Pace, laps: int) -> None:
    one_thread()
    scenario = fleet.scenario()
    model, data = scenario.server.template(fleet.model), _client_data(fleet, scenario)
    crew = plain.bare_steps(model, [data(k) for k in range(fleet.cohort)], fleet.batch, LR, default_workers())
    pace.ready()
    while pace.go():
        crew()
        pace.lap()
    crew.close()
    pace.end(steps=fleet.steps * laps)


def _fedavg_case(name: str, title: str, fleet: Fleet, laps: int) -> Case:
    def flops() -> float:
        scenario = fleet.scenario()
        inputs = scenario.dataset.prepare(scenario.dataset.train.inputs[: fleet.batch])
        one = training_flops(scenario.server.template(fleet.model), inputs, scenario.dataset.classes)
        return one * fleet.cohort * fleet.samples

    sides = {
        "ours": partial(run_side, partial(_fedavg, fleet), fleet.steps),
        "plain": partial(_plain_fedavg, fleet),
        "bare": partial(_bare_fedavg, fleet),
    }
    peers = fleet if fleet.shape == MNIST else None
    return Case(name, title, sides, laps, flops=flops, fleet=peers)


MNIST, CIFAR = (1, 28, 28), (3, 32, 32)


def _fedavg_cases(scale: Scale) -> list[Case]:
    clients, samples, cohort = {"full": (100, 600, 10), "quick": (20, 150, 10), "tiny": (4, 40, 2)}[scale]
    small = {"full": 600, "quick": 600, "tiny": 40}[scale]
    colour = {"full": 500, "quick": 100, "tiny": 40}[scale]
    laps = 11 if scale == "full" else 7

    def fleet(model: str, n: int, shape: tuple[int, int, int] = MNIST, **more: Any) -> Fleet:
        return Fleet(model, shape, clients, n, cohort, **more)

    return [
        _fedavg_case("fedavg-cnn", "FedAvg, McMahan's CNN, 28x28", fleet("mcmahan-cnn", samples), laps),
        _fedavg_case("fedavg-small/lenet5", "FedAvg, LeNet-5, 28x28", fleet("lenet5", small), laps),
        _fedavg_case("fedavg-small/mlp", "FedAvg, MLP, 28x28", fleet("mlp", small), laps),
        _fedavg_case(
            "resnet8-cifar/bn", "FedAvg, ResNet-8 with BatchNorm, 32x32x3", fleet("resnet8", colour, CIFAR), laps
        ),
        _fedavg_case(
            "resnet8-cifar/gn",
            "FedAvg, ResNet-8 with GroupNorm, 32x32x3",
            fleet("resnet8", colour, CIFAR, norm="group"),
            laps,
        ),
    ]


# ---- distillation -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Lesson:
    """Teachers, the public samples they are asked about, and their students (all of the teachers' architecture)."""

    model: str
    teachers: int
    students: int
    public: int
    steps: int
    batch: int = 128

    @property
    def method(self) -> FedDF:
        return FedDF(fusion=Distill(steps=self.steps, batch=self.batch), report_ensemble=False)

    def scenario(self) -> Scenario:
        models: dict[str, Architecture] = {f"student-{i}": self.model for i in range(self.students)}
        data = made_up.image_set(self.public + 2 * self.teachers * 10, 100, CIFAR)
        public = PublicConfig(source="held-out", size=self.public)
        split = made_up.equal_parts(2 * self.teachers * 10, self.teachers)
        return Scenario(data, models, split, public)


def _lesson_side(lesson: Lesson, recompute: bool, threads: int, pace: Pace, laps: int) -> None:
    """As FedDF distils; or with every teacher asked about every minibatch, for one student after another."""
    torch.set_num_threads(threads)
    keep_freed_memory()  # both sides: the ratio is to tell what asking once is worth
    scenario, method = lesson.scenario(), lesson.method
    server = scenario.server
    first = server.architectures[0]
    with tempfile.TemporaryDirectory(prefix="solera-bench-") as folder:
        fed = Federation(InProcess(scenario, ClientStates(folder)), scenario.seed)
        models = {
            fed.clients.id(i): server.model(first, server.init(first, 1 + i)) for i in range(lesson.teachers)
        }  # fmt: skip
        start = {P: server.init(P) for P in server.architectures}
        d = public_indices(method.fusion, fed.seed, server)
        ensemble = Ensemble(list(models.values()), method.ensemble, None, method.fusion.temperature)

        def recomputed() -> dict[str, Weights]:
            out = {}
            for P, x_0 in start.items():
                student = server.model(P, x_0)
                distill(student, server.public, ensemble, method.fusion, fed.seed("fusion"), indices=d)
                out[P] = weights_of(student)
            return out

        pace.ready()
        found: dict[str, Weights] = {}
        while pace.go():
            found = recomputed() if recompute else fuse(start, ensemble, d, method.fusion, fed.seed, server)
            pace.lap()
    pace.end(digest=hashlib.sha256(encode(found)).hexdigest(), steps=lesson.steps * lesson.students * laps)


def _lesson_flops(lesson: Lesson) -> float:
    model: nn.Module = dataclasses.replace(lesson, students=1).scenario().server.template("student-0")
    inputs = torch.rand(lesson.batch, *CIFAR)
    seen = len(visits(lesson.public, lesson.steps, lesson.batch, 0).unique())
    asked = lesson.teachers * seen * answering_flops(model, inputs)
    return asked + lesson.students * lesson.steps * lesson.batch * training_flops(model, inputs, made_up.CLASSES)


def _lesson_cases(scale: Scale) -> list[Case]:
    public, steps = {"full": (5000, 200), "quick": (1000, 40), "tiny": (60, 3)}[scale]
    laps, warm_up = (2, 0) if scale == "full" else (3, 1)  # minutes each: nothing is left to warm up
    cores, cases = default_workers(), []

    def add(name: str, title: str, lesson: Lesson, threads: int) -> None:
        sides = {
            "ours": partial(_lesson_side, lesson, False, 1),
            "recomputed": partial(_lesson_side, lesson, True, threads),
        }
        flops = partial(_lesson_flops, lesson)
        same = threads == 1  # their number changes the bits
        cases.append(Case(name, title, sides, laps, warm_up, flops, same_digest=same))

    for teachers in (10, 30):
        for model in ("lenet5", "resnet8"):
            for students in (1, 3):
                part = 5 if model == "resnet8" and scale == "full" else 1  # its reference would take an hour
                count = 3 if scale == "tiny" else teachers
                lesson = Lesson(model, count, students, public // part, steps // part)
                name = f"distil-{teachers}/{model}-{students}"
                title = f"{teachers} {model} teachers into {students} student{'s' * (students > 1)}"
                add(name, title, lesson, 1)
                if students == 1 and model == "lenet5":  # several students could be taught side by side anyway
                    add(f"{name}-threads", f"{title}; the reference with {cores} torch threads", lesson, cores)
    return cases


# ---- where clients run ------------------------------------------------------------------------------


def _run_in(engine: Literal["processes", "threads", "inprocess"], fleet: Fleet) -> Setting:
    workers = 1 if engine == "inprocess" else default_workers()
    return dataclasses.replace(_fedavg(fleet), engine=EngineConfig(name=engine, workers=workers, device="cpu"))


def _engine_cases(scale: Scale) -> list[Case]:
    clients, samples, cohort = {"full": (20, 600, 10), "quick": (20, 150, 10), "tiny": (4, 40, 2)}[scale]
    engines: dict[str, Literal["processes", "threads", "inprocess"]] = {
        "ours": "processes",
        "threads": "threads",
        "one process": "inprocess",
    }
    return [
        Case(
            f"engines/{model}",
            f"FedAvg, {model}: clients in worker processes, against other places",
            {side: partial(run_side, partial(_run_in, engine, Fleet(model, MNIST, clients, samples, cohort)), 0)
             for side, engine in engines.items()},
            6 if scale == "full" else 3,
            same_digest=True,
        )
        for model in ("mlp", "lenet5", "mcmahan-cnn")
    ]  # fmt: skip


# ---- whole rounds of other methods ------------------------------------------------------------------


def _mixed(clients: int, samples: int, public: int, workers: int, server: str | None = None) -> Scenario:
    """Three architectures with heads of one shape."""
    data = made_up.image_set(clients * samples + public, 500, MNIST)
    split = made_up.equal_parts(clients * samples, clients)
    models = ModelsConfig(clients=["lenet5", "mlp", "tiny-cnn"], server=server, head="shared")
    return Scenario(data, models, split, PublicConfig(source="held-out", size=public), client_test=0.2, workers=workers)


def _against_serial(name: str, title: str, make: Callable[[int], Setting], laps: int) -> Case:
    """A round on all cores against the same round on one: one client after another, and so the server's work."""
    sides = {
        "ours": partial(run_side, partial(make, default_workers()), 0),
        "serial": partial(run_side, partial(make, 1), 0),
    }
    return Case(name, title, sides, laps, same_digest=True)


def _engine(workers: int) -> EngineConfig:
    return EngineConfig("inprocess" if workers == 1 else "auto", workers, device="cpu")


def _fedet(clients: int, samples: int, public: int, steps: int, workers: int) -> Setting:
    method = FedET(Local(steps=steps, batch=64), Distill(steps=4 * steps, batch=64, optimizer="sgd", lr=0.005),
                   report_ensemble=False)  # fmt: skip
    scenario = _mixed(clients, samples, public, workers, server="fedet-cnn")
    return Setting(scenario, method, engine=_engine(workers))


def _mnfl(clients: int, samples: int, public: int, workers: int) -> Setting:
    method = MNFL(Local(epochs=1, batch=128, lr=0.01), Local(epochs=1, batch=256, lr=0.01))
    return Setting(_mixed(clients, samples, public, workers), method, engine=_engine(workers))


def _fedeed(pipeline: bool, clients: int, samples: int, epochs: int, steps: int) -> Setting:
    method = FedEED(Local(epochs=epochs, batch=32, lr=LR), Distill(steps=steps, batch=128), K=4, pipeline=pipeline,
                    report_ensemble=False)  # fmt: skip
    data = made_up.image_set(clients * samples + 1000, 500, MNIST)
    split = made_up.equal_parts(clients * samples, clients)
    scenario = Scenario(data, ["lenet5"], split, PublicConfig(source="held-out", size=1000), workers=2)
    return Setting(scenario, method, engine=EngineConfig(name="processes", workers=2, device="cpu"))


def _round_cases(scale: Scale) -> list[Case]:
    samples, public, steps = {"full": (300, 2000, 30), "quick": (200, 500, 10), "tiny": (20, 50, 2)}[scale]
    laps = 6 if scale == "full" else 3
    few, many = (4, 6) if scale == "tiny" else (20, 100)
    overlap = {"ours": True, "sequential": False}
    epochs, distilling = {"full": (5, 200), "quick": (3, 50), "tiny": (1, 3)}[scale]
    return [
        _against_serial(
            "fedet-round",
            f"a round of Fed-ET, {few} clients, three architectures",
            partial(_fedet, few, samples, public, steps),
            laps,
        ),
        *(
            _against_serial(
                f"mnfl-round/{n}",
                f"a round of MNFL, {n} clients, three architectures",
                partial(_mnfl, n, samples, public),
                laps,
            )
            for n in (few, many)
        ),
        Case(
            "fedeed-overlap",
            f"FedEED, distilling {distilling} steps while {few} clients train {epochs} epochs, on 2 workers",
            {
                side: partial(run_side, partial(_fedeed, pipeline, few, samples, epochs, distilling), 0)
                for side, pipeline in overlap.items()
            },
            laps,
            warm_up=2,  # the first round of the overlapping loop has nothing to distil
            same_digest=True,
        ),
    ]


# ---- growth -----------------------------------------------------------------------------------------


def _growing(clients: int, samples: int, cohort: int) -> Setting:
    fleet = Fleet("lenet5", MNIST, clients, samples, cohort)
    return _fedavg(fleet)


def _population(total: int, clients: int, cohort: int) -> Setting:
    data = made_up.vectors(total)
    scenario = Scenario(data, ["mlp"], made_up.equal_parts(total, clients), PublicConfig(source="none"))
    return Setting(scenario, FedAvg(Local(steps=5, batch=10, lr=LR)), FederationConfig(fraction=cohort / clients))


def _growth_cases(scale: Scale) -> list[Case]:
    cohorts = (2, 4, 8) if scale == "tiny" else (10, 100, 1000)
    crowds = {"full": (10**3, 10**5, 10**6), "quick": (10**3, 10**4, 10**5), "tiny": (20, 50, 100)}[scale]
    laps = 4 if scale == "full" else 3
    return [
        Case(
            "cohort",
            f"FedAvg, LeNet-5, a cohort of so many out of {cohorts[-1]:,} clients with 60 samples",
            {f"{n:,} a round": partial(run_side, partial(_growing, cohorts[-1], 60, n), 0) for n in cohorts},
            laps,
            units={f"{n:,} a round": n for n in cohorts},
        ),
        Case(
            "population",
            "FedAvg, MLP, ten clients a round out of so many, over the same data",
            {
                f"{n:,} clients": partial(run_side, partial(_population, crowds[-1], n, 10), 0)
                for n in crowds
            },
            laps,
            units={f"{n:,} clients": 1 for n in crowds},
        ),
    ]  # fmt: skip


# ---- start-up ---------------------------------------------------------------------------------------

FIRST_STEP = {
    "ours": """
import tempfile, torch, solera
from solera.methods.fedavg import FedAvg
from solera.train.fitting import Local
from solera.runs.callbacks import Callback
class First(Callback):
    def progress(self, what, done, of):
        if done: print("first step", flush=True)
data = solera.from_tensors((torch.rand(64, 1, 28, 28), torch.arange(64) % 10), (torch.rand(10, 1, 28, 28), range(10)))
scenario = solera.Scenario(data, ["mcmahan-cnn"], solera.PartitionConfig(kind="iid", clients=2))
method = FedAvg(Local(epochs=1, batch=32))
with tempfile.TemporaryDirectory() as folder:
    solera.simulate(scenario, method, folder + "/run", solera.RunConfig(rounds=1), callbacks=[First()])
""",
    "plain": """
import torch
torch.set_num_threads(1)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 32, 5, padding=2), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
    torch.nn.Conv2d(32, 64, 5, padding=2), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
    torch.nn.Flatten(), torch.nn.Linear(3136, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), 0.05)
loss = torch.nn.functional.cross_entropy(model(torch.rand(32, 1, 28, 28)), torch.arange(32) % 10)
loss.backward()
optimizer.step()
print("first step", flush=True)
""",
}


def _first_step(side: str, pace: Pace, laps: int) -> None:
    """A new interpreter each lap, until a model has made its first step."""
    pace.ready()
    while pace.go():
        with subprocess.Popen(  # noqa: S603  (our own interpreter, our own text)
            [sys.executable, "-c", FIRST_STEP[side]], stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            if child.stdout.readline().strip() != "first step":
                raise RuntimeError(f"the program {side!r} ended before its first step")
            pace.lap()
    pace.end()


def _start_cases(scale: Scale) -> list[Case]:
    sides = {side: partial(_first_step, side) for side in FIRST_STEP}
    return [Case("start-up", "from nothing to a client's first step", sides, 6 if scale == "full" else 3)]


# ---- the machine's peak, measured in turn with everybody else ---------------------------------------


def peak_side(pace: Pace, laps: int) -> None:
    """Each lap says how many operations a second the machine reaches now."""
    peak = Peak(default_workers())
    pace.ready()
    while pace.go():
        pace.lap(flops=peak())
    peak.close()
    pace.end()


QUICK = ("fedavg-cnn", "fedavg-small/lenet5", "fedavg-small/mlp", "resnet8-cifar/bn", "distil-10/lenet5-1")


def every_case(scale: Scale) -> list[Case]:
    """All cases of a scale, in the order of the page."""
    kinds = (_fedavg_cases, _engine_cases, _lesson_cases, _round_cases, _growth_cases, _start_cases)
    return [case for kind in kinds for case in kind(scale)]
