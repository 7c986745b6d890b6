"""The round loop: begin, round, measure, commit; and resume, which is the same loop entered later.

Nothing but the method's state and the clients' own state is saved, because nothing else is needed: every random
choice follows from (seed, round, client, purpose).
"""

import contextlib
import dataclasses
import errno
import functools
import hashlib
import json
import logging
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..config import Config, EngineConfig, RunConfig, load_config, to_toml
from ..data.augment import step_name
from ..devices import TRICKS, Numerics, numerics
from ..engines import ENGINES, Call, ClientStates, Engine, Reply, Roster, default_engine, default_workers
from ..errors import ConfigError, RunError, SoleraError
from ..federation import Federation, FederationConfig, QuorumNotMet
from ..method import info_of, name_of, needs_of, personal_task
from ..models import require_split
from ..parts.chain import chain
from ..parts.norms import has_batchnorm
from ..randomness import seed_from, seeded
from ..runs.directory import RunDirectory
from ..runs.notice import Notices
from ..runs.record import RoundRecord
from ..scenario import Scenario, build_scenario
from ..server import Server
from ..task import Data
from ..track.display import Watcher
from ..track.export import TrackConfig, Tracking
from ..version import __version__
from . import facts as detail
from .measure import first_if_all_void, measure, not_finite, summarise, traffic, why_unusable
from .profile import Profile

log = logging.getLogger("solera")


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop; it can be resumed. Like Ctrl-C, it is nothing an `except Exception` may swallow:
    a reply lost that way would change the result."""

    exit_code = 143


class NothingLearned(SoleraError):
    """The run came to its end, and its directory is whole, but there is nothing in it that anybody could use."""

    exit_code = 6


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run leaves in the hand of whoever called it from Python."""

    summary: dict[str, Any]
    state: Any
    models: dict[str, Any]  # name -> method.Model
    out: pathlib.Path

    @property
    def digest(self) -> str:
        return self.summary["digest"]


def execute(
    config: Config,
    out: str | os.PathLike[str],
    resume: bool = False,
    watcher: Watcher | None = None,
    command: str | None = None,
    profile: bool = False,
) -> dict:
    """Run what a configuration describes and return the summary. `command` is noted, for the report."""
    for note in config.notes:
        log.warning(note)
    config.track.require()
    workers = config.engine.workers or default_workers()
    scenario = build_scenario(
        config.data, config.partition, config.public, config.models, config.run.seed, workers
    )  # fmt: skip
    return simulate(
        scenario,
        config.method,
        out,
        config.run,
        config.federation,
        config.engine,
        resume=resume,
        watcher=watcher,
        track=config.track,
        config_text=to_toml(config),
        command=command,
        profile=profile,
    ).summary


def resume_run(out: str | os.PathLike[str], watcher: Watcher | None = None) -> dict:
    """Continue the run in `out` from its last checkpoint, to the same end as if it had never stopped."""
    path = pathlib.Path(out)
    if not (path / "config.toml").is_file():
        if not (path / "run.json").is_file():
            raise RunError(f"{out} holds no run: there is neither run.json nor config.toml in it")
        raise RunError(
            f"{out} has no config.toml: it was started from Python; call solera.simulate(..., resume=True) there"
        )
    return execute(load_config(path / "config.toml"), path, resume=True, watcher=watcher)


def simulate(
    scenario: Scenario,
    method: Any,
    out: str | os.PathLike[str],
    config: RunConfig | None = None,
    federation: FederationConfig | None = None,
    engine: EngineConfig | None = None,
    *,
    resume: bool = False,
    watcher: Watcher | None = None,
    track: TrackConfig | None = None,
    config_text: str | None = None,
    command: str | None = None,
    profile: bool = False,
) -> Result:
    """Run `method` on `scenario` into the directory `out`.

    With `resume=True` the run in `out` is continued (or begun, if there is none); the scenario and the method must
    be the same. With `profile=True` one round is looked at more closely; that changes no bit.
    """
    config, federation, engine = config or RunConfig(), federation or FederationConfig(), engine or EngineConfig()
    track = track or TrackConfig()
    track.require()
    watcher = Tracking(track, watcher or Watcher())
    if config.seed not in (RunConfig.seed, scenario.seed):
        raise ConfigError(f"run.seed = {config.seed}: the scenario was made with seed {scenario.seed}, which counts")
    check_fit(method, scenario)
    TRICKS["cpu"].set_allocator()  # workers that are forked inherit it
    _check_quorum(federation, len(scenario.roster))
    resume = resume and (pathlib.Path(out) / "run.json").is_file()
    experiment = _experiment(scenario, method, federation)
    with (
        _sole_run(),
        numerics(engine.threads) as held,
        seeded(seed_from(scenario.seed, "run")),
        contextlib.closing(RunDirectory(out, __version__, resume, config_text, experiment, command)) as home,
        watcher,
        _stoppable() as check_stop,
    ):
        if held.found:
            watcher.warn(f"the program's settings of torch are set aside for the run: {_listed(held.found)}")
        if not (home.path / "partition.json").exists():
            home.write_facts("partition.json", detail.partition_facts(scenario))
        states = ClientStates(home.clients)
        start, state, ledger, damaged = home.latest(type(method).State, states.check) if resume else (0, None, {}, [])
        for text in damaged:
            watcher.warn(text)
        home.rewind(start)
        with contextlib.closing(_open_engine(engine, scenario, states)) as moving:
            if profile:
                watcher = Profile(watcher, moving, scenario, states, home, scenario.server.parallel)

            def progress(what: str, done: int, of: int) -> None:
                check_stop()
                watcher.progress(what, done, of)

            fed = Federation(moving, scenario.seed, federation, progress=progress, ledger=ledger)
            loop = _Loop(scenario, method, fed, home, states, config, watcher, held)
            watcher.begin(
                {
                    "name": config.name or home.path.name,
                    "method": name_of(method),
                    "rounds": config.rounds,
                    "start_round": start,
                    "clients": len(fed.clients),
                    "cohort": federation.cohort(len(fed.clients)),
                    "engine": type(moving).__name__.lower(),
                    "workers": getattr(moving, "count", getattr(moving, "workers", 1)),
                    "out": str(home.path),
                }
            )
            with _disk_errors():
                result = loop(start, state)
        watcher.end(result.summary)
        return result


def _experiment(scenario: Scenario, method: Any, federation: FederationConfig) -> dict[str, Any]:
    """All that determines the results, in a form that can be written down and compared."""
    roster = scenario.roster
    facts: dict[str, Any] = {
        "run.seed": scenario.seed,
        "method": {"name": name_of(method), **dataclasses.asdict(method)},
        "federation": dataclasses.asdict(federation),
        "data": {"name": scenario.dataset.name, "classes": scenario.dataset.classes, "shape": scenario.dataset.shape},
        "clients": {
            "count": len(roster),
            "examples": hashlib.sha256(roster.sizes.numpy().tobytes()).hexdigest()[:16],
            "architectures": roster.architectures,
            "assigned": hashlib.sha256(roster.architecture_of.numpy().tobytes()).hexdigest()[:16],
        },
        "server": scenario.server.large,
        "public": None if scenario.public is None else scenario.public.digest[:16],
    }
    if scenario.augment:  # named only where there are steps: what run.json says of other runs stays as it was
        facts["data"]["augment"] = [step_name(step) for step in scenario.augment]
    return json.loads(json.dumps(facts, default=lambda o: type(o).__qualname__))


def _listed(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in facts.items())


class _Loop:
    def __init__(
        self,
        scenario: Scenario,
        method: Any,
        fed: Federation,
        home: RunDirectory,
        states: ClientStates,
        config: RunConfig,
        watcher: Watcher,
        held: Numerics,
    ):
        self.scenario, self.method, self.fed, self.home, self.states = scenario, method, fed, home, states
        self.held = held
        self.config, self.watcher, self.server = config, watcher, scenario.server
        self.test: Data = scenario.test
        labels = self.test.labels.bincount(minlength=self.server.num_classes)
        self.notices = Notices(labels.tolist(), home.records())
        self.commit_s = 0.0
        self.cpu = time.process_time()

    def __call__(self, start: int, state: Any) -> Result:
        fed, server, rounds = self.fed, self.server, self.config.rounds
        if start == 0:
            fed.begin(0)
            state = self.method.init(fed, server)
        empty = 0
        for t in range(start, rounds):
            began = time.monotonic()
            fed.begin(t, kept=self.home.ledgers())
            server.begin()
            self.watcher.phase(t, "clients")
            fed.idle = functools.partial(self.watcher.phase, t, "server")
            try:
                state, empty = self.method.round(state, fed, server), 0
            except QuorumNotMet as e:
                fed.void()
                empty += 1
                if empty >= fed.config.max_empty_rounds:
                    raise QuorumNotMet(f"{empty} rounds in a row were void; last: {e}") from None
                self._void("round_empty", e)
            if t == rounds - 1 and hasattr(self.method, "finish"):  # also after a void last round
                fed.settle()
                try:
                    state = self.method.finish(state, fed, server)
                except QuorumNotMet as e:
                    fed.void()
                    self._void("finish_empty", e)
            self._close_round(t, state, began)
        records = list(self.home.records())
        if why := first_if_all_void(records):
            raise QuorumNotMet(
                f"none of the {rounds} rounds had enough valid replies: nothing was learned; the first: {why}"
            )
        result = self._finish(state)
        if why := why_unusable(records):
            raise NothingLearned(f"{self.home.path}: nothing was learned: {why}")
        return result

    def _void(self, kind: str, reason: QuorumNotMet) -> None:
        self.server.event(kind, reason=str(reason))
        self.watcher.warn(str(reason))

    def _close_round(self, t: int, state: Any, began: float) -> None:
        fed, server = self.fed, self.server
        self.held.check()
        worked = time.monotonic()
        sent, cohort, clients_s = traffic(fed), len(fed.answered), fed.waited_s  # before own models are scored
        last = t == self.config.rounds - 1
        scores = []
        if last or (t + 1) % self.config.eval_every == 0:
            self.watcher.phase(t, "evaluate")
            scores = measure(self.method, state, fed, server, self.test, self.config.eval_clients)
        if last:
            self._look_closer(t, state)
        measured = time.monotonic()
        seconds = {
            "clients": clients_s,
            "server": worked - began - clients_s,
            "evaluate": measured - worked,
            "commit": self.commit_s,  # of the round before: this one's comes after its line is written
            "total": measured - began + self.commit_s,
        }
        cpu = time.process_time()
        record = RoundRecord(
            round=t,
            cohort=cohort,
            scores=scores,
            traffic=sent,
            seconds={phase: round(s, 4) for phase, s in seconds.items()},
            failures=fed.failures,
            events=server.events,
            cpu_s=round(cpu - self.cpu, 4),  # since the last line, of this process alone
        )
        self.cpu = cpu
        if bad := not_finite(record):
            self.watcher.warn(f"round {t}: the loss is not finite: {', '.join(bad)}")
        noticed = self.notices.look(record)
        record = dataclasses.replace(record, events=[*server.events, *noticed])
        self.watcher.phase(t, "commit")
        self.home.append(record)
        if last or (t + 1) % self.config.checkpoint_every == 0:
            saved = (self.home.ledgers() or [{}])[-1]
            self.states.flush({k: v for k, v in fed.ledger.items() if saved.get(k) != v})
            self.home.commit(t, state, fed.ledger)
        self.commit_s = time.monotonic() - measured
        for f in fed.failures:
            self.watcher.warn(f"round {t}: {f['client']} dropped from {f['task']}: {f['reason']}")
        for event in noticed:
            self.watcher.warn(f"round {t}: {event['reason']}")
        self.watcher.round_done(record)

    def _look_closer(self, t: int, state: Any) -> None:
        """What the last round leaves for the report, in files of their own."""
        models = self.method.models(state)
        self.home.write_facts("confusion.json", detail.confusion_facts(t, models, self.server, self.test))
        if (regions := detail.region_facts(t, models, self.server, self.scenario)) is not None:
            self.home.write_facts("regions.json", regions)

    def _finish(self, state: Any) -> Result:
        models = self.method.models(state)
        data = self.scenario.dataset
        takes = {"shape": data.shape, "mean": data.mean, "std": data.std, "vocabulary": data.vocabulary}
        facts = {"classes": str(self.server.num_classes), "input": json.dumps(takes), "solera": __version__}
        if data.class_names:
            facts["class_names"] = json.dumps(data.class_names)
        for name, m in models.items():
            self.home.write_model(name, m.weights, facts | {"architecture": m.architecture})
        ensemble = self.method.ensemble_models(state) if hasattr(self.method, "ensemble_models") else []
        rule = getattr(self.method, "ensemble_rule", "avg_logits")
        for i, (m, share) in enumerate(ensemble):
            member = {"architecture": m.architecture, "share": str(share), "rule": rule}
            self.home.write_model(f"ensemble-{i}", m.weights, facts | member)
        summary = summarise(self.home, self.method, state, self.fed, self.config)
        summary["environment"] |= {"numerics": self.held.needed, "set_aside": self.held.found}
        self.home.write_summary(summary)
        return Result(summary, state, models, self.home.path)


@numerics()
def check_fit(method: Any, scenario: Scenario) -> None:
    """Refuse, before any work, a scenario that lacks what the method needs."""
    name, info = name_of(method), info_of(method)
    steps = getattr(getattr(method, "fusion", None), "steps", None)  # 0: averaging only, nothing to distil on
    if info.public != "none" and scenario.public is None and steps != 0:
        raise ConfigError(f"method {name!r} needs public data: set public.source (it is 'none')")
    if info.models == "one architecture" and len(scenario.server.architectures) > 1:
        raise ConfigError(
            f"method {name!r} needs clients of one architecture, models.clients has "
            f"{', '.join(scenario.server.architectures)}"
        )
    if personal_task(method) and not scenario.client_test:
        raise ConfigError(
            f"method {name!r} is judged by each client's own test split: set data.client_test, for example 0.2"
        )
    _check_models(name, needs_of(method), scenario.server)
    if "labels" in needs_of(method) and scenario.server.public is not None and scenario.server.public.labels is None:
        raise ConfigError(f"method {name!r} needs the labels of the public samples: set public.labels = true")
    if hasattr(method, "check"):
        method.check(scenario.server)


def check_start(method: Any, scenario: Scenario, federation: FederationConfig) -> None:
    """Refuse all that a run would refuse before its first exchange, without any client and without a run directory."""
    check_fit(method, scenario)
    _check_quorum(federation, len(scenario.roster))
    with contextlib.suppress(_Asked):
        method.init(Federation(_Nobody(scenario.roster), scenario.seed, federation), scenario.server)


class _Asked(Exception):
    """A method's start asks clients; how it goes on is not known without them."""


@dataclasses.dataclass(frozen=True)
class _Nobody:
    """An engine that knows who the clients are and reaches none of them."""

    roster: Roster

    def start(self, calls: Sequence[Call]) -> Callable[[], Iterator[Reply]]:
        raise _Asked

    def close(self) -> None:
        """Nothing was opened."""


def _check_quorum(federation: FederationConfig, clients: int) -> None:
    asked = federation.cohort(clients)
    if federation.min_replies > asked:
        raise ConfigError(
            f"federation.min_replies = {federation.min_replies}: a round asks {asked} of {clients} clients "
            f"(federation.fraction = {federation.fraction})"
        )


def _check_models(name: str, needs: set[str], server: Server) -> None:
    """Refuse models that are not what the method `needs` (the keys are those of method.NEEDS)."""
    if "large" in needs and server.large is None:
        raise ConfigError(
            f"method {name!r} trains a model of the server's own, which is not set: set models.server, say to 'vgg19'"
        )
    if "large" in needs and server.large in server.architectures:
        raise ConfigError(f"models.server = {server.large!r}: it is a client's architecture too; choose a larger one")
    for P in server.architectures if "no BatchNorm" in needs else ():
        if has_batchnorm(server.template(P)):
            raise ConfigError(
                f"method {name!r} cannot pass on the running statistics of BatchNorm, which {P!r} has: set "
                "models.norm = 'group' (or 'none'), or choose another architecture"
            )
    for P in server.architectures if "chain" in needs else ():
        try:
            chain(server.template(P))
        except ValueError as e:
            raise ConfigError(f"method {name!r} takes plain chains of layers, and {P!r} is none: {e}") from None
    if not needs & {"split", "shared head"}:
        return
    heads = {}
    for P in server.builders:
        head = require_split(server.template(P), f"method {name!r}", P).head
        heads[P] = [f"{n} {tuple(t.shape)}" for n, t in head.state_dict().items()]
    first, *others = heads
    for P in others if "shared head" in needs else ():
        if heads[P] != heads[first]:
            raise ConfigError(
                f"method {name!r} passes one head between all models, but the head of {P!r} ({', '.join(heads[P])}) "
                f"differs from that of {first!r} ({', '.join(heads[first])}): set models.head = 'shared', and split "
                "models of your own with solera.models.wrap or as_split and head='shared'"
            )


def _open_engine(config: EngineConfig, scenario: Scenario, states: ClientStates) -> Engine:
    workers = config.workers or default_workers()
    name = default_engine(workers) if config.name == "auto" else config.name
    return ENGINES[name](scenario, states, workers)


class _Running:
    """Whether this process is in the middle of a run; a forked child is not."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


_RUNNING = _Running()
os.register_at_fork(after_in_child=_RUNNING.__init__)  # type: ignore[misc]


@contextlib.contextmanager
def _sole_run() -> Iterator[None]:
    """Two runs in one process would share torch's generator and settings: neither result could be repeated."""
    if not _RUNNING.lock.acquire(blocking=False):
        raise RunError(
            "another run is going on in this process, and the two would share torch's random generator and settings: "
            "wait for its end, or start this one in a process of its own (`solera run` or multiprocessing)"
        )
    try:
        yield
    finally:
        _RUNNING.lock.release()


DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG}


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    """A full or broken disk ends a run wherever it shows: in the temporary directory, too."""
    try:
        yield
    except OSError as e:
        if e.errno not in DISK:
            raise
        where = f"{e.filename}: " if e.filename else ""
        raise RunError(f"{where}{e.strerror}; the last checkpoint is unharmed: make room, then resume the run") from e


@contextlib.contextmanager
def _stoppable() -> Iterator[Callable[[], None]]:
    """Turn SIGTERM into an exception, so that workers end and the lock is given free.

    The exception is raised at once, but Python swallows it where it happens to hit a destructor or a fork: so the
    run also asks, between replies.
    """
    asked = False

    def check() -> None:
        if asked:
            raise Interrupted("stopped by SIGTERM")

    def stop(*_: Any) -> None:
        nonlocal asked
        asked = True
        check()

    if threading.current_thread() is not threading.main_thread():
        yield check
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield check
    finally:
        signal.signal(signal.SIGTERM, before)
