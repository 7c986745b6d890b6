"""The round loop: begin, round, measure, commit; and resume, which is the same loop entered later.

Nothing but the method's state and the clients' own state is saved, because nothing else is needed: every random
choice follows from (seed, round, client, purpose).
"""

import contextlib
import dataclasses
import errno
import functools
import logging
import os
import pathlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from ..core.calls import Version
from ..core.errors import ConfigError, RunError, SoleraError
from ..core.federation import Federation, FederationConfig, QuorumNotMet
from ..core.randomness import seed_from, seeded
from ..core.stopping import check_stop, stoppable
from ..core.task import Data
from ..core.version import __version__
from ..core.wire import Packed
from ..engines import ClientStates, Engine, EngineConfig, EngineSettings, default_workers, engine_of, require
from ..engines.dry import Dry
from ..method import Method, Traits, name_of, prepare_scoring
from ..methods.steps.low_bit import OFF as FULL
from ..models import require_split
from ..place.devices import Compute, compute_of, resolved
from ..place.fingerprint import fingerprint
from ..place.placement import TRICKS, Training, numerics
from ..scenario.scenario import Scenario
from ..scenario.server import Server
from ..train.aggregate import pairs_of
from ..train.chain import chain
from ..train.norms import has_batchnorm
from . import facts as detail
from .config import Config, RunConfig, load_config, to_toml
from .directory import RunDirectory
from .display import Watcher
from .facts import Facts
from .measure import first_if_all_void, kinds, measure, measure_validation, not_finite, summarise, traffic, why_unusable
from .notice import Notices
from .record import RoundRecord, Score
from .sites import build_sites
from .stand_ins import KEY as STAND_INS
from .stand_ins import verdict
from .stop import STOPPED, Stopping
from .tracking import TrackConfig, Tracking
from .trust import code_of_run, refuse_changed_files, refuse_sending

log = logging.getLogger("solera")
SUPPLIED = "public_sent"  # event of a round: which clients were sent the public samples


class NothingLearned(SoleraError):
    """The run completed and its directory is whole, but no model is usable."""

    exit_code = 6


@dataclasses.dataclass(frozen=True)
class Result:
    """Return value of `simulate`."""

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
) -> dict:
    """Run what a configuration describes and return the summary. `command` is noted, for the report."""
    config = dataclasses.replace(config, engine=resolved(config.engine))
    require(config.engine)
    return simulate(
        scenario_of(config),
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
    ).summary


def scenario_of(config: Config) -> Scenario:
    """The clients and the server that a configuration describes."""
    for note in config.notes:
        log.warning(note)
    config.track.require()
    compute_of(config.engine)  # refuses a device that is not here, before data is read
    workers = config.engine.workers or default_workers()
    if config.sites:
        return build_sites(config)
    return Scenario(config.data, config.models, config.partition, config.public, seed=config.run.seed, workers=workers)


def resume_run(out: str | os.PathLike[str], watcher: Watcher | None = None, trust_code: bool = False) -> dict:
    """Continue the run in `out` from its last checkpoint, to the same end as if it had never stopped.

    Code that its configuration names is imported, and results are sent where it says, if this user began the run, or
    else with `trust_code=True`.
    """
    path = pathlib.Path(out)
    if not (path / "config.toml").is_file():
        if not (path / "run.json").is_file():
            raise RunError(f"{out} holds no run: there is neither run.json nor config.toml in it")
        raise RunError(
            f"{out} has no config.toml: it was started from Python; call solera.simulate(..., resume=True) there"
        )
    with code_of_run(path, trust_code):
        refuse_changed_files(path)
        config = load_config(path / "config.toml", trusted=True)
        refuse_sending(path, config.track.mlflow, trust_code)
        return execute(config, path, resume=True, watcher=watcher)


def simulate(
    scenario: Scenario,
    method: Method,
    out: str | os.PathLike[str],
    config: RunConfig | None = None,
    federation: FederationConfig | None = None,
    engine: EngineSettings | type[EngineSettings] | str | None = None,
    *,
    resume: bool = False,
    watcher: Watcher | None = None,
    track: TrackConfig | None = None,
    config_text: str | None = None,
    command: str | None = None,
) -> Result:
    """Run `method` on `scenario` into the directory `out`.

    With `resume=True` the run in `out` is continued (or begun, if there is none); the scenario and the method must
    be the same. `engine` is an engine's name, its settings, or an engine class of your own.
    """
    config, federation, engine = config or RunConfig(), federation or FederationConfig(), engine_of(engine)
    if config.seed not in (RunConfig.seed, scenario.seed):
        raise ConfigError(f"run.seed = {config.seed}: the scenario was made with seed {scenario.seed}, which counts")
    engine = resolved(engine)
    require(engine)
    compute = compute_of(engine)
    check_fit(method, scenario)
    if isinstance(engine, EngineConfig):
        engine.check(scenario)
    TRICKS["cpu"].set_allocator()  # workers that are forked inherit it
    return run(
        scenario.server,
        scenario.test,
        functools.partial(engine.open, scenario),
        method,
        out,
        config,
        federation,
        facts=detail.facts_of(scenario, method, federation, compute, engine.threads),
        threads=engine.threads,
        compute=compute,
        resume=resume,
        watcher=watcher,
        track=track,
        config_text=config_text,
        command=command,
    )


def run(
    server: Server,
    test: Data,
    engine: Callable[[ClientStates], Engine],
    method: Method,
    home: str | os.PathLike[str],
    config: RunConfig,
    federation: FederationConfig,
    *,
    facts: Facts,
    threads: int = 1,
    compute: Compute | None = None,
    resume: bool = False,
    watcher: Watcher | None = None,
    track: TrackConfig | None = None,
    config_text: str | None = None,
    command: str | None = None,
    states: ClientStates | None = None,
) -> Result:
    """Run `method` on whatever clients `engine` reaches, into the directory `home`.

    This is all of a run that does not depend on where the clients are: `simulate` calls it with an engine of this
    machine, a deployment with one that reaches its sites. `engine` is called with the place of the clients' state once
    the directory is there; who the clients are is fixed by then. `test` is what models are judged on. `compute` says on
    which device the server works; it goes there once the engine is open. `states` is given where clients keep their
    state themselves; otherwise it is in the run directory.
    """
    track, compute = track or TrackConfig(), compute or Compute()
    place = compute.place()
    track.require()
    watcher = Tracking(track, watcher or Watcher())
    _check_stop_rule(config, server)
    check_quorum(federation, facts.clients)
    prepare_scoring()
    resume = resume and os.path.lexists(pathlib.Path(home) / "run.json")
    stand_ins = detail.stand_ins_of(config.stand_ins, config_text, facts)
    facts = dataclasses.replace(facts, stand_ins=stand_ins)
    with (
        sole_run(),
        place.training(threads) as held,
        seeded(seed_from(server.run_seed, "run")),
        contextlib.closing(
            RunDirectory(home, __version__, resume, config_text, facts.experiment, command, stand_ins)
        ) as here,
        watcher,
        stoppable(),
    ):
        if stand_ins:
            watcher.warn(verdict(stand_ins))
        for text in method.remarks(server):
            watcher.warn(text)
        if held.found:
            watcher.warn(f"the program's settings of torch are set aside for the run: {_listed(held.found)}")
        if not (here.path / "partition.json").exists():
            here.write_facts("partition.json", facts.partition())
        states = ClientStates(here.clients) if states is None else states
        found = here.latest(type(method).State, states.check, here.recorded()) if resume else (0, None, {}, [])
        start, state, ledger, damaged = found
        for text in damaged:
            watcher.warn(text)
        here.rewind(start)
        with contextlib.closing(engine(states)) as moving:  # before the server opens a device: this may fork
            place = getattr(moving, "place", place)  # clients in this process have put their data there
            server.move(place)
            facts = dataclasses.replace(facts, fingerprint=fingerprint(compute.portable))
            if start < config.rounds and (moved := here.computed_on(facts.fingerprint)):
                watcher.warn(moved)

            def progress(what: str, done: int, of: int) -> None:
                check_stop()
                watcher.progress(what, done, of)

            elapsed_s = _elapsed(here) if federation.availability else 0.0
            fed = federation_of(moving, server, method, federation, progress, ledger, elapsed_s, _holders(here))
            loop = _Loop(server, test.at(place), method, fed, here, states, config, watcher, held, facts)
            watcher.begin(
                {
                    "name": config.name or here.path.name,
                    "method": name_of(method),
                    "rounds": config.rounds,
                    "start_round": start,
                    "clients": len(fed.clients),
                    "cohort": federation.cohort(len(fed.clients)),
                    "replies": method.traits().replies,
                    "engine": type(moving).__name__.lower(),
                    "workers": getattr(moving, "count", getattr(moving, "workers", 1)),
                    "device": ", ".join(compute.devices),
                    "out": str(here.path),
                }
            )
            with _disk_errors():
                result = loop(start, state)
        watcher.end(result.summary)
        return result


def federation_of(
    engine: Engine,
    server: Server,
    method: Method,
    config: FederationConfig,
    progress: Callable[[str, int, int], None] | None = None,
    ledger: Mapping[str, Version] | None = None,
    elapsed_s: float = 0.0,
    holders: Collection[str] = (),
) -> Federation:
    """The federation that `method` sees, in a run and in a dry run; and its clock, for the server."""
    seed, lent = server.run_seed, lent_by(method, server)
    fed = Federation(engine, seed, config, None, progress, ledger, None, elapsed_s, lent, holders)
    server.clock = fed.clock
    return fed


def lent_by(method: Method, server: Server) -> Packed | None:
    """The public samples as each client is sent them, once in a run; None if clients hold or need none."""
    return server.lent if method.traits().public == "everywhere" else None


def _holders(home: RunDirectory) -> set[str]:
    """The clients that were sent the public samples in the recorded rounds."""
    return {k for r in home.records() for e in r.events if e["kind"] == SUPPLIED for k in e["clients"]}


def _elapsed(home: RunDirectory) -> float:
    """The simulated time at which the last recorded round ended."""
    return next((r.simulated["end_s"] for r in reversed(list(home.records())) if "end_s" in r.simulated), 0.0)


def _listed(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in facts.items())


class _Loop:
    def __init__(
        self,
        server: Server,
        test: Data,
        method: Method,
        fed: Federation,
        home: RunDirectory,
        states: ClientStates,
        config: RunConfig,
        watcher: Watcher,
        held: Training,
        facts: Facts,
    ):
        self.server, self.test, self.method, self.fed, self.home, self.states = server, test, method, fed, home, states
        self.config, self.watcher, self.held, self.facts = config, watcher, held, facts
        labels = test.labels.flatten().bincount(minlength=server.num_classes)
        self.notices = Notices(labels.tolist(), home.records())
        self.stopping = Stopping(config.stop, server.large, home.records())
        self.commit_s = 0.0
        self.cpu = time.process_time()

    def __call__(self, start: int, state: Any) -> Result:
        fed, server, rounds = self.fed, self.server, self.config.rounds
        if start == 0:
            fed.begin(0)
            state = self.method.init(fed, server)
        self._check_stop_rule(state)
        empty = 0
        for t in range(start, rounds):
            if self.stopping.reason:
                break
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
            if t == rounds - 1:  # also after a void last round
                state = self._finished(state)
            state = self._close_round(t, state, began)
        records = list(self.home.records())
        if why := first_if_all_void(records):
            raise QuorumNotMet(
                f"none of the {len(records)} rounds had enough valid replies: nothing was learned; the first: {why}"
            )
        result = self._finish(state)
        if why := why_unusable(records):
            raise NothingLearned(f"{self.home.path}: nothing was learned: {why}")
        return result

    def _check_stop_rule(self, state: Any) -> None:
        stop = self.config.stop
        if not stop.active or self.method.models(state) or (stop.split, stop.metric) == ("test", "accuracy"):
            return
        raise ConfigError(
            f"run.stop: the models of method {name_of(self.method)!r} are all on the clients, which report the "
            "accuracy on their own test splits and nothing else: set run.stop.split = 'test', metric = 'accuracy'"
        )

    def _finished(self, state: Any) -> Any:
        """The state after what a method does once, at the end."""
        self.fed.settle()
        try:
            return self.method.finish(state, self.fed, self.server)
        except QuorumNotMet as e:
            self.fed.void()
            self._void("finish_empty", e)
            return state

    def _void(self, kind: str, reason: QuorumNotMet) -> None:
        self.server.event(kind, reason=str(reason))
        self.watcher.warn(str(reason))

    def _close_round(self, t: int, state: Any, began: float) -> Any:
        """Measure, record and save a round. The state, which is another one where the run ends here and the method has
        something to do at the end."""
        fed, server = self.fed, self.server
        self.held.check()
        worked = time.monotonic()
        sent, cohort, clients_s = traffic(fed), len(fed.answered), fed.waited_s  # before own models are scored
        last = t == self.config.rounds - 1
        scores = self._measured(t, state) if last or (t + 1) % self.config.eval_every == 0 else []
        if not last and (stopped := self.stopping.look(t, scores)) is not None:
            last = True
            server.event(STOPPED, **stopped)
            before, state = state, self._finished(state)
            if state is not before:
                sent, cohort, clients_s = traffic(fed), len(fed.answered), fed.waited_s
                scores = self._measured(t, state)
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
        if fed.supplied:
            server.event(SUPPLIED, clients=fed.supplied)
        if fed.clock is not None:
            server.event("timetable", spans=fed.clock.timetable())
        record = RoundRecord(
            round=t,
            cohort=cohort,
            scores=scores,
            traffic=sent,
            seconds={phase: round(s, 4) for phase, s in seconds.items()},
            failures=fed.failures,
            events=server.events,
            simulated={} if fed.clock is None else fed.clock.facts(),
            kinds=kinds(self.method.models(state), server) if scores else {},
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
        self.watcher.round_done(record)
        for event in noticed:  # after it, so that a display does not leave them out for the number of the others
            self.watcher.warn(f"round {t}: {event['reason']}")
        return state

    def _measured(self, t: int, state: Any) -> list[Score]:
        self.watcher.phase(t, "evaluate")
        found = measure(self.method, state, self.fed, self.server, self.test, self.config.eval_clients)
        if self.config.stop.active and self.config.stop.split == "validation":
            found += measure_validation(self.method, state, self.server)
        return found

    def _look_closer(self, t: int, state: Any) -> None:
        """What the last round leaves for the report, in files of their own."""
        models = self.method.models(state)
        if self.server.positions is None:  # a table of all tokens would be huge and say little
            self.home.write_facts("confusion.json", detail.confusion_facts(t, models, self.server, self.test))
        if (regions := self.facts.regions(t, models)) is not None:
            self.home.write_facts("regions.json", regions)

    def _finish(self, state: Any) -> Result:
        models, sha256 = self.method.models(state), {}
        facts = {"classes": str(self.server.num_classes), "solera": __version__}
        kind = kinds(models, self.server)
        for name, m in models.items():
            card = self.facts.model_card(m.architecture) | {"architecture": m.architecture}
            card |= {"kind": kind[name]} if name in kind else {}
            sha256[name] = self.home.write_model(name, m.weights, facts | card)
        if (e := self.method.ensemble_of(state)) is not None:
            shares = [1 / len(e.members)] * len(e.members) if e.weights is None else e.weights
            for i, ((architecture, weights), share) in enumerate(zip(e.members, shares, strict=True)):
                member = {"architecture": architecture, "share": str(share), "rule": e.rule}
                card = self.facts.model_card(architecture)
                sha256[f"ensemble-{i}"] = self.home.write_model(f"ensemble-{i}", weights, facts | card | member)
        summary = summarise(self.home, self.method, state, self.fed, self.config) | {"sha256": sha256}
        if self.stopping.reason:
            summary["stopped"] = self.stopping.reason
        if self.facts.lora:
            summary["lora"] = self.facts.lora
        if self.facts.stand_ins:
            summary[STAND_INS] = self.facts.stand_ins
        how = {"numerics": self.held.needed, "set_aside": self.held.found}
        summary["environment"] |= {"fingerprint": self.facts.fingerprint, **how}
        self.home.write_summary(summary)
        return Result(summary, state, models, self.home.path)


@numerics()
def check_fit(method: Method, scenario: Scenario) -> None:
    """Refuse, before any work, a scenario that lacks what the method needs: with every reason, not only the first."""
    if method.traits().personal and not scenario.tested:
        raise ConfigError(
            f"method {name_of(method)!r} is judged by each client's own test split: set data.client_test, "
            "for example 0.2"
        )
    check_server(method, scenario.server)


def check_server(method: Method, server: Server) -> None:
    """Refuse a server that lacks what the method needs. The method itself is asked once its traits fit."""
    if found := list(_misfits(name_of(method), method.traits(), server)) or list(method.fits(server)):
        raise ConfigError("; ".join(found))


def _misfits(name: str, traits: Traits, server: Server) -> Iterator[str]:
    """What the traits ask for and the server has not."""
    if traits.public != "none" and server.public is None:
        yield f"method {name!r} needs public data: set public.source (it is 'none')"
    if traits.architectures == "one" and len(server.architectures) > 1:
        yield (
            f"method {name!r} needs clients of one architecture, models.clients has {', '.join(server.architectures)}"
        )
    if server.positions is not None and not traits.next_token:
        yield (
            f"method {name!r} works with one prediction for each sample, not for each token (traits: "
            "next_token); for data.task = 'causal-lm' choose another, such as fedavg, feddf or fusionlarge"
        )
    yield from _server_misfits(name, traits, server)
    yield from _model_misfits(name, traits, server)
    if traits.public_labels == "needed" and server.public is not None and server.public.labels is None:
        yield f"method {name!r} needs the labels of the public samples: set public.labels = true"


def check_start(method: Method, scenario: Scenario, federation: FederationConfig) -> None:
    """Refuse all that a run would refuse before its first exchange, without any client and without a run directory."""
    check_fit(method, scenario)
    check_quorum(federation, len(scenario.roster))
    with numerics(dry=True):
        method.init(federation_of(Dry(scenario.roster), scenario.server, method, federation), scenario.server)


def _check_stop_rule(config: RunConfig, server: Server) -> None:
    """Refuse to look for the end of a run on samples that are not there."""
    if config.stop.active and config.stop.split == "validation" and server.validation is None:
        raise ConfigError(
            "run.stop looks at the server's validation set, and there is none: set data.validation, for example 0.1, "
            "or run.stop.split = 'test', which makes the test set a part of the training"
        )


def check_quorum(federation: FederationConfig, clients: int) -> None:
    """Refuse a quorum that no round can meet."""
    asked = federation.cohort(clients)
    if federation.min_replies > asked:
        raise ConfigError(
            f"federation.min_replies = {federation.min_replies}: a round asks {asked} of {clients} clients "
            f"(federation.fraction = {federation.fraction})"
        )


def _server_misfits(name: str, traits: Traits, server: Server) -> Iterator[str]:
    if traits.server_model == "larger" and server.large is None:
        yield f"method {name!r} trains a model of the server's own, which is not set: set models.server, say to 'vgg19'"
    elif traits.server_model == "larger" and server.large in server.architectures:
        yield f"models.server = {server.large!r}: it is a client's architecture too; choose a larger one"


def _model_misfits(name: str, traits: Traits, server: Server) -> Iterator[str]:
    """Models that are not what the method takes."""
    low = [A for A, own in server.precision.items() if any(bits != FULL for bits in own.values())]
    if low and traits.precision == "full":
        yield (
            f"method {name!r} trains models in full precision, but models.options gives {', '.join(low)} fewer bits: "
            "leave that out, or choose feddf with method.upload.kind = 'low-bit' (with method.fusion.steps = 0 it is "
            "FedAvg)"
        )
    for A in server.architectures:
        if not traits.products and pairs_of(server.template(A).state_dict()):
            yield (
                f"method {name!r} does not average whole models, so {A!r} cannot have models.lora.average = 'product': "
                "leave it out, set models.lora.freeze_a = true, or choose a method that does, such as fedavg or feddf"
            )
        if not traits.batchnorm and has_batchnorm(server.template(A)):
            yield (
                f"method {name!r} cannot pass on the running statistics of BatchNorm, which {A!r} has: set "
                "models.norm = 'group' (or 'none'), or choose another architecture"
            )
        if traits.split == "chain":
            try:
                chain(server.template(A))
            except ValueError as e:
                yield f"method {name!r} takes plain chains of layers, and {A!r} is none: {e}"
    if traits.split in ("split", "shared features", "shared head"):
        yield from _head_misfits(name, traits, server)


def _head_misfits(name: str, traits: Traits, server: Server) -> Iterator[str]:
    heads = {}
    for A in server.builders:
        try:
            head = require_split(server.template(A), f"method {name!r}", A).head
        except ConfigError as e:
            yield str(e)
        else:
            heads[A] = [f"{n} {tuple(t.shape)}" for n, t in head.state_dict().items()]
    if traits.split != "shared head" or not heads:
        return
    first, *others = heads
    for A in others:
        if heads[A] != heads[first]:
            yield (
                f"method {name!r} passes one head between all models, but the head of {A!r} ({', '.join(heads[A])}) "
                f"differs from that of {first!r} ({', '.join(heads[first])}): set models.head = 'shared', and split "
                "models of your own with solera.models.wrap or as_split and head='shared'"
            )


class _Running:
    """Whether this process is in the middle of a run; a forked child is not."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


_RUNNING = _Running()
os.register_at_fork(after_in_child=_RUNNING.__init__)  # type: ignore[misc]


@contextlib.contextmanager
def sole_run() -> Iterator[None]:
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
