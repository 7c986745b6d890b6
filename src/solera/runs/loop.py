"""The round loop: begin, round, measure, save. Resuming enters it later; a dry run (`rehearsal.py`) is the same loop
with the engine `dry`.

Only the method's state and the clients' own state are saved, because every random choice follows from (seed, round,
client, purpose).
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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from ..core import __version__
from ..core.calls import Version
from ..core.errors import ConfigError, RunError, SoleraError
from ..core.federation import Federation, FederationConfig, QuorumNotMet
from ..core.randomness import seed_from, seeded
from ..core.stopping import check_stop, stoppable
from ..core.task import Data
from ..core.tensors import Weights
from ..core.wire import Packed
from ..engines import ClientStates, Engine, EngineConfig, EngineSettings, default_workers, engine_of, require
from ..engines.dry import Dry
from ..method import Method, Traits, name_of, prepare_scoring
from ..methods.steps.low_bit import OFF as FULL
from ..models import require_split
from ..place.devices import compute_of, resolved
from ..place.fingerprint import fingerprint
from ..place.placement import TRICKS, Training, numerics
from ..scenario.scenario import Scenario
from ..scenario.server import Server
from ..train.aggregate import pairs_of
from ..train.chain import chain
from ..train.norms import has_batchnorm
from . import facts as detail
from .callbacks import STOPPED, Callback, Callbacks, Notices, Stopping
from .callbacks import name_of as called
from .config import Config, RunConfig, load_config, to_toml
from .directory import RunDirectory
from .facts import Facts
from .measure import first_if_all_void, kinds, measure, measure_validation, not_finite, summarise, traffic, why_unusable
from .record import RoundRecord, Score, Traffic
from .sites import build_sites
from .tracking import TrackConfig
from .trust import code_of_run, refuse_changed_files, refuse_sending
from .words import KEY as STAND_INS
from .words import percent, verdict

log = logging.getLogger("solera")
SUPPLIED = "public_sent"  # event of a round: which clients were sent the public samples


class NothingLearned(SoleraError):
    """The run completed and its directory is whole, but no model is usable."""

    exit_code = 6


@dataclasses.dataclass(frozen=True, repr=False)
class Result:
    """Return value of `run`, `resume` and `simulate`."""

    summary: dict[str, Any]  # the content of summary.json
    state: Any
    models: dict[str, Any]  # name -> method.Model
    out: pathlib.Path

    @property
    def digest(self) -> str:
        return self.summary["digest"]

    def __repr__(self) -> str:
        said = self.summary
        scores = [f"{name} {percent(s['accuracy'])}" for name, s in said["models"].items()]
        more = [f"and {len(scores) - 3} more models"] if len(scores) > 3 else []
        parts = [said["method"], f"{said['rounds']} rounds", *scores[:3], *more, f"digest {self.digest[:16]}"]
        return f"Result({', '.join([*parts, str(self.out)])})"


def run(
    config: Config | str | pathlib.Path | Mapping[str, Any],
    out: str | os.PathLike[str],
    *,
    callbacks: Sequence[Callback] = (),
    resume: bool = False,
    command: str | None = None,
) -> Result:
    """Run a configuration into the directory `out`: a Config, a recipe, a file or its tables.

    With `resume=True` the run in `out` is continued, if there is one. `command` is recorded for the report.
    """
    config = config if isinstance(config, Config) else load_config(config)
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
        callbacks=callbacks,
        track=config.track,
        config_text=to_toml(config),
        command=command,
    )


def scenario_of(config: Config) -> Scenario:
    """The clients and the server that a configuration describes."""
    for note in config.notes:
        log.warning(note)
    config.track.require()
    compute_of(config.engine)  # refuse a missing device before data is read
    workers = config.engine.workers or default_workers()
    if config.sites:
        return build_sites(config)
    return Scenario(config.data, config.models, config.partition, config.public, seed=config.run.seed, workers=workers)


def resume(out: str | os.PathLike[str], *, callbacks: Sequence[Callback] = (), trust_code: bool = False) -> Result:
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
        return run(config, path, resume=True, callbacks=callbacks)


def simulate(
    scenario: Scenario,
    method: Method,
    out: str | os.PathLike[str],
    config: RunConfig | None = None,
    federation: FederationConfig | None = None,
    engine: EngineSettings | type[EngineSettings] | str | None = None,
    *,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    track: TrackConfig | None = None,
    config_text: str | None = None,
    command: str | None = None,
    reach: Callable[[ClientStates], Engine] | None = None,
    states: ClientStates | None = None,
) -> Result:
    """Run `method` on `scenario` into the directory `out`.

    With `resume=True` the run in `out` is continued (or begun, if there is none); the scenario and the method must
    be the same. `engine` is an engine's name, its settings, or an engine class of your own. `config_text` and `command`
    are recorded. A deployment gives `reach`, which opens an engine whose clients are elsewhere, and `states`, if these
    keep their state themselves.
    """
    config, federation, track = config or RunConfig(), federation or FederationConfig(), track or TrackConfig()
    if config.seed not in (RunConfig.seed, scenario.seed):
        raise ConfigError(f"run.seed = {config.seed}: the scenario was made with seed {scenario.seed}, which counts")
    engine, server, test = resolved(engine_of(engine)), scenario.server, scenario.test
    if reach is None:
        require(engine)
        reach = functools.partial(engine.open, scenario)
    compute = compute_of(engine)
    check_fit(method, scenario)
    if isinstance(engine, EngineConfig):
        engine.check(scenario)
    TRICKS["cpu"].set_allocator()  # forked workers inherit it
    place = compute.place()
    track.require()
    stopping = Stopping(config.stop, server.large)
    notices = Notices(test.labels.flatten().bincount(minlength=server.num_classes).tolist())
    told = Callbacks([stopping, *callbacks, notices, *track.callbacks()])
    warn = functools.partial(told.tell, "warn")
    check_stop_rule(config, server)
    check_quorum(federation, len(scenario.roster))
    prepare_scoring()
    resume = resume and os.path.lexists(pathlib.Path(out) / "run.json")
    facts = detail.facts_of(scenario, method, federation, compute, engine.threads)
    stand_ins = detail.stand_ins_of(config.stand_ins, config_text, facts)
    facts = dataclasses.replace(facts, stand_ins=stand_ins)
    with (
        sole_run(),
        place.training(engine.threads) as held,
        seeded(seed_from(server.run_seed, "run")),
        contextlib.closing(
            RunDirectory(out, __version__, resume, config_text, facts.experiment, command, stand_ins)
        ) as here,
        told,
        stoppable(),
    ):
        if stand_ins:
            warn(verdict(stand_ins))
        for text in method.remarks(server):
            warn(text)
        if held.found:
            listed = ", ".join(f"{name} = {value}" for name, value in held.found.items())
            warn(f"the program's settings of torch are set aside for the run: {listed}")
        if not (here.path / "partition.json").exists():
            here.write_facts("partition.json", facts.partition())
        states = ClientStates(here.clients) if states is None else states
        found = here.latest(type(method).State, states.check, here.recorded()) if resume else (0, None, {}, [])
        start, state, ledger, damaged = found
        for text in damaged:
            warn(text)
        here.rewind(start)
        with contextlib.closing(reach(states)) as moving:  # before the server opens a device: this may fork
            place = getattr(moving, "place", place)  # clients in this process may have put data on it
            server.move(place)
            facts = dataclasses.replace(facts, fingerprint=fingerprint(compute.portable))
            if start < config.rounds and (moved := here.computed_on(facts.fingerprint)):
                warn(moved)

            def progress(what: str, done: int, of: int) -> None:
                check_stop()
                told.tell("progress", what, done, of)

            before = list(here.records())
            elapsed_s = next((r.simulated["end_s"] for r in reversed(before) if "end_s" in r.simulated), 0.0)
            holders = {k for r in before for e in r.events if e["kind"] == SUPPLIED for k in e["clients"]}
            fed = federation_of(moving, server, method, federation, progress, ledger, elapsed_s, holders)
            begun = {
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
            if sent := track.outside():
                warn(sent)
            told.tell("begin", begun, before)
            loop = Loop(method, fed, server, config, told, held, here, states, test.at(place), facts, stopping.reason)
            del before
            with _disk_errors():
                state = loop(start, state)
                records = list(here.records())
                if why := first_if_all_void(records):
                    raise QuorumNotMet(
                        f"none of the {len(records)} rounds had enough valid replies: nothing was learned; the first: "
                        f"{why}"
                    )
                result = _write_results(loop, records, here, state, facts)
                if why := why_unusable(records):
                    raise NothingLearned(f"{here.path}: nothing was learned: {why}")
        told.end(result.summary)
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


@dataclasses.dataclass
class Loop:
    """The rounds of a run. Without a run directory, test samples and facts: the rounds of a dry run, which evaluates
    nothing on the server and writes nothing."""

    method: Method
    fed: Federation
    server: Server
    config: RunConfig
    callbacks: Callbacks
    held: Training
    home: RunDirectory | None = None
    states: ClientStates | None = None
    test: Data | None = None
    facts: Facts | None = None
    stopped: str | None = None  # why the run has ended early
    commit_s: float = 0.0  # how long the last round took to save
    cpu: float = dataclasses.field(default_factory=time.process_time)  # when the last line was written

    def __call__(self, start: int, state: Any) -> Any:
        """Go through all rounds from `start` on and return the last state."""
        fed, server, rounds = self.fed, self.server, self.config.rounds
        if start == 0:
            fed.begin(0)
            state = self._sound("init", self.method.init(fed, server))
        stop = self.config.stop
        if stop.active and not self.method.models(state) and (stop.split, stop.metric) != ("test", "accuracy"):
            raise ConfigError(
                f"run.stop: the models of method {name_of(self.method)!r} are all on the clients, which report the "
                "accuracy on their own test splits and nothing else: set run.stop.split = 'test', metric = 'accuracy'"
            )
        empty = 0
        for t in range(start, rounds):
            if self.stopped:
                break
            began = time.monotonic()
            fed.begin(t, kept=self.home.ledgers() if self.home else ())
            server.begin()
            self.callbacks.tell("phase", t, "clients")
            fed.idle = functools.partial(self.callbacks.tell, "phase", t, "server")
            try:
                state, empty = self._sound("round", self.method.round(state, fed, server)), 0
            except QuorumNotMet as e:
                fed.void()
                empty += 1
                if empty >= fed.config.max_empty_rounds:
                    raise QuorumNotMet(f"{empty} rounds in a row were void; last: {e}") from None
                self._void("round_empty", e)
            if t == rounds - 1:  # also after a void last round
                state = self._finished(state)
            state = self._close_round(t, state, began)
        return state

    def _finished(self, state: Any) -> Any:
        """The state after the method's last step, `finish`."""
        self.fed.settle()
        try:
            return self._sound("finish", self.method.finish(state, self.fed, self.server))
        except QuorumNotMet as e:
            self.fed.void()
            self._void("finish_empty", e)
            return state

    def _sound(self, hook: str, state: Any) -> Any:
        """Return a state that `hook` of the method has made, if it is a State and its models fit their architectures.

        Loading would cast another dtype without a word."""
        cls = type(self.method)
        resizes = self.method.traits().split in ("chain", "cut")  # these cut neurons or add them
        if not isinstance(state, cls.State):
            found = "None" if state is None else f"a {type(state).__name__}"
            raise SoleraError(f"{cls.__name__}.{hook} returned {found}, not a {cls.__name__}.State")
        for name, m in self.method.models(state).items():
            expected = self.server.template(m.architecture).state_dict()
            its = f"{cls.__name__}.{hook}: models()[{name!r}]"
            if wrong := sorted(expected.keys() ^ m.weights.keys()):
                raise SoleraError(f"{its} {'lacks' if wrong[0] in expected else 'has an unknown tensor'} {wrong[0]}")
            for n, t in m.weights.items():
                if t.dtype != expected[n].dtype:
                    has, wanted = (str(x.dtype).removeprefix("torch.") for x in (t, expected[n]))
                    raise SoleraError(
                        f"{its} has {n} as {has}, the architecture has {wanted}: average only floating-point tensors"
                    )
                if t.shape != expected[n].shape and not resizes:
                    has, wanted = (str(list(x.shape)) for x in (t, expected[n]))
                    raise SoleraError(f"{its} has {n} of shape {has}, the architecture has {wanted}")
        return state

    def _void(self, kind: str, reason: QuorumNotMet) -> None:
        self.server.event(kind, reason=str(reason))
        self.callbacks.tell("warn", str(reason))

    def _close_round(self, t: int, state: Any, began: float) -> Any:
        """Measure, record and save a round. Return the state, changed by the method's last step if a callback ends the
        run here."""
        self.held.check()
        worked, last = time.monotonic(), t == self.config.rounds - 1
        judged = self._judge(t, state, last or (t + 1) % self.config.eval_every == 0)
        if last:
            self._look_closer(t, state)
        record = self._record(t, state, judged, began, worked)
        measured = time.monotonic()
        noted: list[dict[str, Any]] = []
        for callback in list(self.callbacks.all):
            if numbers := self.callbacks.call(callback, "round", record):
                record = dataclasses.replace(record, callbacks=record.callbacks | {called(callback): numbers})
            if callback.noted:
                noted += callback.noted
                record = dataclasses.replace(record, events=[*record.events, *callback.noted])
            asked, callback.asked = callback.asked, None
            if asked is not None and not last:  # later callbacks get the final record of the round
                last, self.stopped = True, asked["reason"]
                self.server.event(STOPPED, **asked)
                before, state = state, self._finished(state)
                if state is not before or not record.scores:
                    judged = self._judge(t, state, True)
                self._look_closer(t, state)
                record = dataclasses.replace(self._record(t, state, judged, began, worked), callbacks=record.callbacks)
        if bad := not_finite(record):
            self.callbacks.tell("warn", f"round {t}: the loss is not finite: {', '.join(bad)}")
        self.callbacks.tell("phase", t, "commit")
        if self.home is not None and self.states is not None:
            self.home.append(record)
            if last or (t + 1) % self.config.checkpoint_every == 0:
                saved = (self.home.ledgers() or [{}])[-1]
                self.states.flush({k: v for k, v in self.fed.ledger.items() if saved.get(k) != v})
                self.home.commit(t, state, self.fed.ledger)
        self.cpu += record.cpu_s or 0.0
        self.commit_s = time.monotonic() - measured
        for f in record.failures:
            self.callbacks.tell("warn", f"round {t}: {f['client']} dropped from {f['task']}: {f['reason']}")
        self.callbacks.tell("saved", record)
        for event in noted:  # after `saved`: a display counts warnings per round, and shows these for sure
            self.callbacks.tell("warn", f"round {t}: {event['reason']}")
        return state

    def _judge(self, t: int, state: Any, due: bool) -> tuple[Traffic, int, float, list[Score]]:
        """Traffic, number of replies and seconds of waiting, all without the scoring of own models; and the scores."""
        fed, stop = self.fed, self.config.stop
        counted = traffic(fed), len(fed.answered), fed.waited_s
        if not due:
            return *counted, []
        self.callbacks.tell("phase", t, "evaluate")
        scores = measure(self.method, state, fed, self.server, self.test, self.config.eval_clients)
        if self.test is not None and stop.active and stop.split == "validation":
            scores += measure_validation(self.method, state, self.server)
        return *counted, scores

    def _record(
        self, t: int, state: Any, judged: tuple[Traffic, int, float, list[Score]], began: float, worked: float
    ) -> RoundRecord:
        fed, (sent, cohort, clients_s, scores), measured = self.fed, judged, time.monotonic()
        seconds = {
            "clients": clients_s,
            "server": worked - began - clients_s,
            "evaluate": measured - worked,
            "commit": self.commit_s,  # of the previous round: this round is saved after its line is written
            "total": measured - began + self.commit_s,
        }
        events = list(self.server.events)
        if fed.supplied:
            events.append({"kind": SUPPLIED, "clients": fed.supplied})
        if fed.clock is not None:
            events.append({"kind": "timetable", "spans": fed.clock.timetable()})
        return RoundRecord(
            round=t,
            cohort=cohort,
            scores=scores,
            traffic=sent,
            seconds={phase: round(s, 4) for phase, s in seconds.items()},
            failures=fed.failures,
            events=events,
            simulated={} if fed.clock is None else fed.clock.facts(),
            kinds=kinds(self.method.models(state), self.server) if scores else {},
            cpu_s=round(time.process_time() - self.cpu, 4),  # since the last line, of this process alone
        )

    def _look_closer(self, t: int, state: Any) -> None:
        """Write the report's facts about the last round into separate files."""
        if self.home is None or self.test is None or self.facts is None:
            return
        models = self.method.models(state)
        if self.server.positions is None:  # a table of all tokens would be huge and of little use
            self.home.write_facts("confusion.json", detail.confusion_facts(t, models, self.server, self.test))
        if (regions := self.facts.regions(t, models)) is not None:
            self.home.write_facts("regions.json", regions)


def _write_results(loop: Loop, records: Sequence[RoundRecord], home: RunDirectory, state: Any, facts: Facts) -> Result:
    """Write the final models and summary.json."""
    models, sha256 = loop.method.models(state), {}
    files: dict[str, tuple[str, Weights, dict[str, str]]] = {}
    kind = kinds(models, loop.server)
    for name, m in models.items():
        files[name] = (m.architecture, m.weights, {"kind": kind[name]} if name in kind else {})
    if (e := loop.method.ensemble_of(state)) is not None:
        shares = [1 / len(e.members)] * len(e.members) if e.weights is None else e.weights
        for i, ((architecture, weights), share) in enumerate(zip(e.members, shares, strict=True)):
            files[f"ensemble-{i}"] = (architecture, weights, {"share": str(share), "rule": e.rule})
    for name, (architecture, weights, member) in files.items():
        card = {"classes": str(loop.server.num_classes), "solera": __version__, **facts.model_card(architecture)}
        sha256[name] = home.write_model(name, weights, card | {"architecture": architecture} | member)
    summary = summarise(records, home.path, loop.method, state, loop.fed, loop.config) | {"sha256": sha256}
    if loop.stopped:
        summary["stopped"] = loop.stopped
    if facts.lora:
        summary["lora"] = facts.lora
    if facts.stand_ins:
        summary[STAND_INS] = facts.stand_ins
    how = {"numerics": loop.held.needed, "set_aside": loop.held.found}
    summary["environment"] |= {"fingerprint": facts.fingerprint, **how}
    home.write_summary(summary)
    return Result(summary, state, models, home.path)


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
    """Refuse a server that lacks what the method needs. `method.fits` is called only if its traits fit."""
    if found := list(_misfits(name_of(method), method.traits(), server)) or list(method.fits(server)):
        raise ConfigError("; ".join(found))


def _misfits(name: str, traits: Traits, server: Server) -> Iterator[str]:
    """The requirements of the traits that the server does not meet."""
    own = server.architectures
    if traits.public != "none" and server.public is None:
        yield f"method {name!r} needs public data: set public.source (it is 'none')"
    if traits.architectures == "one" and len(own) > 1:
        yield f"method {name!r} needs clients of one architecture, models.clients has {', '.join(own)}"
    if server.positions is not None and not traits.next_token:
        yield (
            f"method {name!r} works with one prediction for each sample, not for each token (traits: "
            "next_token); for data.task = 'causal-lm' choose another, such as fedavg, feddf or fusionlarge"
        )
    if traits.server_model == "larger" and server.large is None:
        yield f"method {name!r} trains a model of the server's own, which is not set: set models.server, say to 'vgg19'"
    elif traits.server_model == "larger" and server.large in own:
        yield f"models.server = {server.large!r}: it is a client's architecture too; choose a larger one"
    low = [A for A, of in server.precision.items() if any(bits != FULL for bits in of.values())]
    if low and traits.precision == "full":
        yield (
            f"method {name!r} trains models in full precision, but models.options gives {', '.join(low)} fewer bits: "
            "leave that out, or choose feddf with method.upload.kind = 'low-bit' (with method.fusion.steps = 0 it is "
            "FedAvg)"
        )
    for A in own:
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
    heads: dict[str, list[str]] = {}
    for A in server.builders if traits.split in ("split", "shared features", "shared head") else ():
        try:
            head = require_split(server.template(A), f"method {name!r}", A).head
        except ConfigError as e:
            yield str(e)
        else:
            heads[A] = [f"{n} {tuple(t.shape)}" for n, t in head.state_dict().items()]
    first, *others = heads if traits.split == "shared head" and heads else [""]
    for A in others:
        if heads[A] != heads[first]:
            yield (
                f"method {name!r} passes one head between all models, but the head of {A!r} ({', '.join(heads[A])}) "
                f"differs from that of {first!r} ({', '.join(heads[first])}): set models.head = 'shared', and split "
                "models of your own with solera.models.wrap or as_split and head='shared'"
            )
    if traits.public_labels == "needed" and server.public is not None and server.public.labels is None:
        yield f"method {name!r} needs the labels of the public samples: set public.labels = true"


def check_start(method: Method, scenario: Scenario, federation: FederationConfig) -> None:
    """Refuse everything that a run refuses before its first exchange; needs no client and no run directory."""
    check_fit(method, scenario)
    check_quorum(federation, len(scenario.roster))
    with numerics(dry=True):
        method.init(federation_of(Dry(scenario.roster), scenario.server, method, federation), scenario.server)


def check_stop_rule(config: RunConfig, server: Server) -> None:
    """Refuse a stop rule on samples that do not exist."""
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


_RUNNING = threading.Lock()  # held while this process is in the middle of a run


def _not_running() -> None:
    """A forked child is not in the middle of its parent's run."""
    global _RUNNING
    _RUNNING = threading.Lock()


os.register_at_fork(after_in_child=_not_running)


@contextlib.contextmanager
def sole_run() -> Iterator[None]:
    """Allow one run per process: two would share torch's generator and settings, and could not be repeated."""
    running = _RUNNING
    if not running.acquire(blocking=False):
        raise RunError(
            "another run is going on in this process, and the two would share torch's random generator and settings: "
            "wait for its end, or start this one in a process of its own (`solera run` or multiprocessing)"
        )
    try:
        yield
    finally:
        running.release()


DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG}


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    """Turn a full or broken disk, also in the temporary directory, into a RunError."""
    try:
        yield
    except OSError as e:
        if e.errno not in DISK:
            raise
        where = f"{e.filename}: " if e.filename else ""
        raise RunError(f"{where}{e.strerror}; the last checkpoint is unharmed: make room, then resume the run") from e
