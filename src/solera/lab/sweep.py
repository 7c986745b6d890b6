"""Many runs from one file: a grid of settings, named cases, several seeds.

Every configuration is checked before anything runs. Each run has its own process, so a run that fails or is killed
does not stop the others. Finished runs are skipped, stopped runs are continued. The directory of a run is
`OUT/<case and settings>/s<seed>`, and `OUT/sweep.json` lists all runs.
"""

import contextlib
import ctypes
import dataclasses
import hashlib
import itertools
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import sys
import time
import tomllib
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..core import __version__
from ..core.errors import ConfigError, DataError, RunError, SoleraError
from ..core.files import read_file
from ..core.plugins import KEYS, allowed, code_allowed, paths_in
from ..core.stopping import Interrupted, stoppable
from ..engines import EngineConfig
from ..method import name_of
from ..place.devices import compute_of
from ..runs import loop
from ..runs.config import TABLES, Config, load_config, merged, recipe_names, refuse_outside, to_toml
from ..runs.display import QuietDisplay
from ..runs.groups import compared
from ..runs.loop import check_start
from ..runs.record import count_lines
from ..runs.words import flat, show
from ..scenario.scenario import Scenario

CASE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._ -]{0,63}")
LONGEST_NAME = 100  # characters of a folder's name; a checksum replaces the rest
MOST_RUNS = 10_000
INDEX = "sweep.json"
WAKE_S = 0.25  # interval of progress updates
GRACE_S = 1.0  # time for a run to stop before it is killed
PR_SET_PDEATHSIG = 1  # linux/prctl.h
# A fork starts quickly and shares loaded modules. Where it is not safe, start a new interpreter.
CONTEXT: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")


@dataclasses.dataclass(frozen=True)
class Planned:
    """One run of a sweep."""

    name: str  # its directory, relative to the sweep's
    case: str
    settings: dict[str, Any]  # settings from the case and the grid, by dotted key
    config: Config


@dataclasses.dataclass
class Progress:
    """The progress of a sweep, passed to the display several times a second."""

    total: int
    skipped: int  # finished earlier
    done: int = 0
    failed: dict[str, str] = dataclasses.field(default_factory=dict)  # name -> why
    running: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)  # name -> (rounds done, of)
    seconds: float = 0.0
    left: float | None = None  # seconds, if the next rounds take as long as those so far
    news: str | None = None  # the run that has just ended


Tell = Callable[[Progress], None]


# ---- from the file to the plan ----------------------------------------------------------------------


def load_sweep(file: str | os.PathLike[str], overrides: Sequence[str] = ()) -> list[Planned]:
    """The runs of a sweep file, all of them checked. `overrides` ("key=value") change all runs."""
    path = Path(file)
    try:
        given = tomllib.loads(path.read_text("utf-8"))
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"{file} is not valid TOML: {e}") from None
    except (OSError, ValueError) as e:
        why = e.strerror if isinstance(e, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the sweep {str(file)!r}: {why}") from None
    planned = plan(given, path.parent, path.stem, overrides)
    for run in planned:
        refuse_outside(run.config, str(file), overrides)
    return planned


def plan(given: Mapping[str, Any], folder: Path, stem: str, overrides: Sequence[str] = ()) -> list[Planned]:
    """The runs of a sweep from its tables. `folder` is the folder of a base that is a file."""
    unknown = set(given) - {"base", "sweep", "method", *TABLES}
    if unknown:
        raise ConfigError(f"[{min(unknown)}]: a sweep has base, [sweep] and the tables of a configuration")
    seeds, grid, cases = _sweep_table(given.get("sweep"))
    inline = {k: v for k, v in given.items() if k not in ("base", "sweep")}
    source = given.get("base")
    if not isinstance(source, str | None):
        raise ConfigError(f"base = {show(source)}: expected the name of a recipe or a .toml file")
    if source and source not in recipe_names() and source.endswith(".toml"):
        source = folder / source
    try:
        base = merged(inline) if source is None else merged(source, overrides_of(flat(inline)))
    except ConfigError as e:
        raise ConfigError(f"the base: {e}") from None
    asked = math.prod(map(len, [*grid.values(), cases, seeds or [0]]))
    if asked > MOST_RUNS:
        raise ConfigError(f"[sweep] has {asked} runs; the limit is {MOST_RUNS}: split it into several sweeps")
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    wanted = [(case, settings | point) for case, settings in cases.items() for point in points]
    names = _names([(case, {k: settings[k] for k in grid}) for case, settings in wanted])
    planned = []
    for (case, settings), name in zip(wanted, names, strict=True):
        for seeded in [[f"run.seed={seed}"] for seed in seeds] or [[]]:
            try:
                config = load_config(base, [*overrides, *overrides_of(settings), *seeded])
            except ConfigError as e:
                raise ConfigError(f"{name or 'the base'}: {e}") from None
            if not config.run.name:
                config = with_run(config, name=re.sub(r"[^\w.-]+", "-", stem, flags=re.A).strip("-._")[:64])
            home = f"{name or _safe(name_of(config.method))}/s{config.run.seed}"
            planned.append(Planned(home, case, settings, config))
    return planned


def _sweep_table(table: Any) -> tuple[list[int], dict[str, list[Any]], dict[str, dict[str, Any]]]:
    """Seeds, grid (dotted key -> values) and cases (name -> dotted key -> value; one named "" if none is given)."""
    if not isinstance(table, Mapping):
        raise ConfigError("[sweep] is missing: write it with seeds = [0, 1, 2], [sweep.grid] or [sweep.cases.NAME]")
    if unknown := set(table) - {"seeds", "grid", "cases"}:
        raise ConfigError(f"sweep.{min(unknown)}: there is no such setting; [sweep] has seeds, grid and cases")
    seeds, grid, cases = table.get("seeds", []), table.get("grid", {}), table.get("cases", {})
    whole = isinstance(seeds, list) and all(isinstance(s, int) and not isinstance(s, bool) for s in seeds)
    if not whole or len(set(seeds)) != len(seeds):
        raise ConfigError(f"sweep.seeds = {seeds}: expected a list of different integers, such as [0, 1, 2]")
    if not isinstance(grid, Mapping) or not isinstance(cases, Mapping):
        raise ConfigError("sweep.grid and sweep.cases are tables: write [sweep.grid] and [sweep.cases.NAME]")
    axes = flat(grid)
    for key, values in axes.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"sweep.grid.{key} = {show(values)}: expected a list of the values to try")
        if key == "run.seed":
            raise ConfigError("sweep.grid.run.seed: put seeds into sweep.seeds")
        if len({json.dumps(v, default=str) for v in values}) != len(values):
            raise ConfigError(f"sweep.grid.{key} = {show(values)}: a value occurs twice")
    named: dict[str, dict[str, Any]] = {}
    for name, settings in cases.items():
        if not CASE.fullmatch(name):
            raise ConfigError(
                f"sweep.cases.{name!r}: only letters, digits, spaces, '.', '_' and '-', at most 64 characters"
            )
        if not isinstance(settings, Mapping):
            raise ConfigError(f"sweep.cases.{name} = {show(settings)}: expected a table of settings")
        named[name] = flat(settings)
        if both := set(named[name]) & set(axes):
            raise ConfigError(f"sweep.cases.{name}.{min(both)}: the grid also sets it; leave it out in one of them")
    return seeds, axes, named or {"": {}}


def with_run(config: Config, **changes: Any) -> Config:
    """The configuration with other settings of [run]."""
    return dataclasses.replace(config, run=dataclasses.replace(config.run, **changes))


def overrides_of(settings: Mapping[str, Any]) -> list[str]:
    """Settings in the form of the command line's --set."""
    try:
        return [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    except TypeError as e:
        raise ConfigError(f"a value in the sweep is not a number, string, list or boolean: {e}") from None


def _names(points: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """A readable folder name for each (case, grid point). The names also differ on case-insensitive file systems."""
    keys = list(points[0][1]) if points else []
    leaves = [k.rpartition(".")[2] for k in keys]
    told = {k: leaf if leaves.count(leaf) == 1 else k for k, leaf in zip(keys, leaves, strict=True)}
    names = []
    for case, point in points:
        parts = [f"{told[k]}={_safe(show(v))}" for k, v in point.items() if k != "method.name"]
        first = [_safe(case)] if case else []
        first += [_safe(show(point["method.name"]))] if "method.name" in point else []
        names.append(",".join(first + parts))
    lower = [n.lower() for n in names]
    out = []
    for name, low, (case, point) in zip(names, lower, points, strict=True):
        if lower.count(low) > 1 or len(name) > LONGEST_NAME:
            tag = hashlib.sha256(json.dumps([case, point], default=str).encode()).hexdigest()[:8]
            name = f"{name[: LONGEST_NAME - 9]}-{tag}"
        out.append(name)
    return out


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+_-]+", "-", text) or "-"


# ---- existing runs ----------------------------------------------------------------------------------


def is_done(home: Path) -> bool:
    """True if the run in a directory has finished."""
    return (home / "summary.json").is_file()


def check_unchanged(planned: Sequence[Planned], out: Path) -> None:
    """Raise RunError if a run in `out` was started with other settings than those of the sweep now."""
    for run in planned:
        file = out / run.name / "config.toml"
        if not file.is_file():
            continue
        now = tomllib.loads(to_toml(run.config))
        then = tomllib.loads(to_toml(_begun_with(file, now)))
        _refuse_changes(out / run.name, flat(then), flat(now))


def _refuse_changes(home: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for key in {**now, **then}:
        if compared(key) and then.get(key) != now.get(key):
            raise RunError(
                f"{home} was started with {key} = {show(then.get(key))}, not {show(now.get(key))}: "
                "choose another --out for the changed sweep, or move that run to another folder"
            )


def _begun_with(file: Path, now: Mapping[str, Any]) -> Config:
    """The configuration in a run directory. Code that the sweep does not name is a change, and is not imported."""
    tables = merged(file)
    engine = tables.get("engine")
    threads = engine.get("threads", EngineConfig.threads) if isinstance(engine, Mapping) else EngineConfig.threads
    tables["engine"] = {"name": "inprocess", "threads": threads}  # no other setting of an engine counts
    if set(paths_in(tables)) - set(paths_in(now)):
        _refuse_changes(file.parent, *({k: v for k, v in flat(t).items() if k in KEYS} for t in (tables, now)))
    return load_config(tables)


def notes(planned: Sequence[Planned]) -> list[str]:
    """The notes of the configurations of a sweep, each once for a case."""
    return list(dict.fromkeys(f"{_case_of(run)}: {note}" for run in planned for note in run.config.notes))


def _case_of(run: Planned) -> str:
    """The folder of the runs of all seeds."""
    return run.name.rpartition("/")[0]


def check_fits(planned: Sequence[Planned]) -> None:
    """Refuse, before anything runs, a sweep with a case whose method does not fit its data, models or clients."""
    found = unfit(planned)
    if found:
        name, (message, code) = next(iter(found.items()))
        more = f" (and {len(found) - 1} more cases are refused)" if len(found) > 1 else ""
        error = SoleraError(f"{name}: {message}{more}")
        error.exit_code = code
        raise error


def unfit(planned: Sequence[Planned]) -> dict[str, tuple[str, int]]:
    """The cases that cannot run: run -> reason and exit code. It checks one run of each case: seeds do not matter."""
    seen: dict[str, Planned] = {}
    for run in planned:
        seen.setdefault(_case_of(run), run)
    if not seen:
        return {}
    found = apart(_check_all, [(r.name, to_toml(r.config)) for r in seen.values()])
    return {name: (message, code) for name, message, code in found}


def apart(work: Callable[..., Any], *args: Any) -> Any:
    """The result of `work(*args)`, which must be JSON, computed in a process of its own: so this one computes nothing
    before it forks."""
    mine, theirs = CONTEXT.Pipe(duplex=False)
    child = CONTEXT.Process(target=_answer, args=(work, args, theirs, os.getpid(), allowed()))
    child.start()
    theirs.close()
    try:
        try:
            return json.loads(mine.recv_bytes())
        except EOFError:
            child.join()
            raise RunError(f"the process of {work.__name__} ended with exit code {child.exitcode}") from None
    finally:
        if child.is_alive() and sys.exc_info()[0] is not None:
            child.terminate()
        child.join()


def _answer(work: Callable[..., Any], args: tuple[Any, ...], answer: Any, parent: int, beside: Path | None) -> None:
    _end_with(parent)
    torch.set_num_threads(1)
    with contextlib.nullcontext() if beside is None else code_allowed(beside):
        answer.send_bytes(json.dumps(work(*args)).encode())


def _check_all(runs: list[tuple[str, str]]) -> list[tuple[str, str, int]]:
    found = []
    absent: dict[tuple[Any, ...], tuple[str, int]] = {}  # data that cannot be read is not looked for again
    for name, text in runs:
        try:
            config = load_config(tomllib.loads(text))
            data = (config.data.name, config.data.path, config.public.name, config.public.path)
            if data in absent:
                found.append((name, *absent[data]))
                continue
            config.track.require()
            scenario = Scenario(
                config.data, config.models, config.partition, config.public, seed=config.run.seed, workers=1
            )
            check_start(config.method, scenario, config.federation)
        except SoleraError as e:
            found.append((name, str(e), e.exit_code))
            if isinstance(e, DataError):
                absent[data] = (str(e), e.exit_code)
    return found


# ---- running ----------------------------------------------------------------------------------------


def run_planned(
    planned: Sequence[Planned],
    out: Path,
    workers: int = 1,
    tell: Tell | None = None,
    new: Sequence[Planned] | None = None,
) -> Progress:
    """Run what is not done, and keep `sweep.json` up to date. `new`: only these of the planned runs."""
    _write_index(planned, out, {})

    def told(progress: Progress) -> None:
        if tell is not None:
            tell(progress)
        if progress.news is not None:
            _write_index(planned, out, progress.failed)

    ended = run_all({run.name: run.config for run in (planned if new is None else new)}, out, workers, told)
    _write_index(planned, out, ended.failed)
    return ended


def run_all(runs: Mapping[str, Config], out: Path, workers: int = 1, tell: Tell | None = None) -> Progress:
    """Run every configuration into `out`/its name, `workers` in parallel, and return the final progress.

    With one worker a run uses its configured engine; with more, each run has one core (the results are the same).
    Finished runs are skipped, stopped runs are continued. A run that fails leaves its reason in `out`/its name.log.
    """
    if workers < 1:
        raise ConfigError(f"--workers {workers}: at least 1 is needed")
    tell = tell or (lambda progress: None)
    todo = [name for name in runs if not is_done(out / name)]
    for name in todo:
        if getattr(runs[name].engine, "portable", False):
            compute_of(runs[name].engine)  # a process forked later cannot set what it needs of the environment
    state = Progress(len(runs), len(runs) - len(todo))
    waiting = list(todo)
    running: dict[str, Any] = {}  # name -> its process
    began, before = time.monotonic(), {name: count_lines(out / name) for name in todo}
    due = sum(max(0, runs[n].run.rounds - before[n]) for n in todo)

    def report(news: str | None) -> None:
        """Tell the progress, with the time that is left if a round takes as long as those so far."""
        over = {name for name in todo if is_done(out / name) or name in state.failed}
        rounds = {n: runs[n].run.rounds for n in over} | {n: r for n, (r, _) in state.running.items() if n not in over}
        done = sum(max(0, r - before[n]) for n, r in rounds.items())
        state.seconds, state.news = time.monotonic() - began, news
        state.left = state.seconds / done * (due - done) if done and due else None
        tell(state)

    with stoppable():
        try:
            while waiting or running:
                while waiting and len(running) < workers:
                    name = waiting.pop(0)
                    config = runs[name] if workers == 1 else _one_core(runs[name])
                    job = CONTEXT.Process(target=_one, args=(to_toml(config), str(out / name), os.getpid(), allowed()))
                    job.start()
                    running[name] = job
                multiprocessing.connection.wait([job.sentinel for job in running.values()], WAKE_S)
                for name in [name for name, job in running.items() if not job.is_alive()]:
                    running.pop(name).join()
                    if is_done(out / name):
                        state.done += 1
                    else:
                        state.failed[name] = _reason(out / name)
                    state.running.pop(name, None)
                    report(name)
                state.running = {n: (count_lines(out / n), runs[n].run.rounds) for n in running}
                report(None)
        finally:  # after an interrupt, stop the runs: a run directory is consistent at every moment
            deadline = time.monotonic() + GRACE_S
            for job in running.values():
                job.terminate()
            for job in running.values():
                job.join(max(0.0, deadline - time.monotonic()))
                if job.is_alive():
                    job.kill()
                    job.join()
    return state


def _one_core(config: Config) -> Config:
    engine = config.engine
    if not isinstance(engine, EngineConfig):  # an engine of another package has other settings
        engine = EngineConfig(threads=engine.threads, portable=getattr(engine, "portable", False))
    return dataclasses.replace(config, engine=dataclasses.replace(engine, name="inprocess", workers=1))


def _end_with(parent: int) -> None:
    """Make the system kill this process when the sweep ends. This may happen at any moment, because a run directory is
    always consistent. On systems other than Linux, `_ChildDisplay` checks for it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(Interrupted.exit_code)


class _ChildDisplay(QuietDisplay):
    """Writes warnings to the log, and ends the run if the sweep was killed."""

    def __init__(self, file: Any, parent: int):
        super().__init__(file)
        self.parent = parent

    def phase(self, round: int, name: str) -> None:
        self.progress(name, 0, 0)

    def progress(self, what: str, done: int, of: int) -> None:
        if os.getppid() != self.parent:
            raise Interrupted("the sweep has ended")


def _one(text: str, home: str, parent: int, beside: Path | None) -> None:
    """One run, in its own process. Its output goes into a log file beside its directory."""
    _end_with(parent)
    path = Path(home)
    path.parent.mkdir(parents=True, exist_ok=True)
    log = path.with_name(path.name + ".log")
    torch.set_num_threads(1)
    with open(log, "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = file  # the sweep's own streams would redraw its display at every line
        try:
            with contextlib.nullcontext() if beside is None else code_allowed(beside):
                config = load_config(tomllib.loads(text))
            loop.run(config, path, callbacks=[_ChildDisplay(file, parent)], resume=True)
            code = 0
        except SoleraError as e:
            print(" ".join(str(e).split()), file=file)
            code = e.exit_code
        except KeyboardInterrupt as e:
            print(str(e) or "interrupted", file=file)
            code = getattr(e, "exit_code", 130)
        except BaseException:
            print(traceback.format_exc(), file=file)
            code = 1
    if code:  # threads that are still training must not keep the process alive
        os._exit(code)
    if log.stat().st_size == 0:
        log.unlink()
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # the log is closed


def _reason(home: Path) -> str:
    """The reason of a failure, in one line."""
    log = home.with_name(home.name + ".log")
    try:
        lines = read_file(log).decode("utf-8", "replace").split("\n")
    except OSError:
        lines = []
    last = next((line.strip() for line in reversed(lines) if line.strip()), "killed, and left no message")
    return f"{last[:300]} (log: {log})"


# ---- the index --------------------------------------------------------------------------------------


def index_of(planned: Sequence[Planned], out: Path, failed: Mapping[str, str]) -> dict[str, Any]:
    """The content of `sweep.json`: every run of the sweep, its settings and its status."""

    def status(name: str) -> str:
        home = out / name
        return "done" if is_done(home) else "failed" if name in failed else "begun" if count_lines(home) else "waiting"

    runs = [
        {
            "out": run.name,
            "case": run.case,
            "method": name_of(run.config.method),
            "seed": run.config.run.seed,
            "settings": run.settings,
            "status": status(run.name),
            **({"error": failed[run.name]} if run.name in failed else {}),
        }
        for run in planned
    ]
    return {"format": 1, "solera": __version__, "runs": runs}


def _write_index(planned: Sequence[Planned], out: Path, failed: Mapping[str, str]) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        draft = out / f"{INDEX}.draft"
        draft.write_text(json.dumps(index_of(planned, out, failed), indent=1))
        draft.replace(out / INDEX)
    except OSError as e:
        raise RunError(f"{out / INDEX} cannot be written: {e.strerror}") from None
