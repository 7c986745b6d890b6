"""Sides of a case taking turns: A B C, A B C, ... each in processes of its own, and what comes out of it."""

import contextlib
import dataclasses
import json
import os
import pathlib
import select
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from solera.core.errors import RunError

from .machine import MARK, family, memory
from .side import PEAK
from .workloads import Case, Scale

SAMPLE_S = 0.25  # between two looks at the memory: each costs the kernel milliseconds for every process
PATIENCE_S = 7200.0  # for one lap
FAREWELL_S = 30.0  # for a program that was told to end
ROUNDS_IN_ALL = 10  # of which the total with start-up is told
ACCURACY_RANGE = 0.1  # accuracies that differ by more are not of the same training

IMPORTED_FROM = os.pathsep.join(filter(None, [str(pathlib.Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))

Command = Sequence[str]


class Dropped(Exception):
    """A side that cannot go on, with the reason."""


class Runner:
    """One side: its processes, and the conversation with them."""

    def __init__(self, name: str, command: Command, folder: pathlib.Path, environment: Mapping[str, str] | None = None):
        self.name, self.mark = name, uuid.uuid4().hex
        self.laps: list[dict[str, Any]] = []
        self.memory = self.server_memory = 0
        self._errors = folder / f"{name.replace(' ', '-').replace('/', '-')}.log"
        self._text = b""
        began = time.perf_counter()
        with open(self._errors, "wb") as log:
            self._process = subprocess.Popen(  # noqa: S603  (our own programs)
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": IMPORTED_FROM, **(environment or {}), MARK: self.mark},
                start_new_session=True,  # Ctrl-C is for the benchmark: it ends its programs itself
            )
        try:
            self._hear("ready", sample=True)
        except BaseException:
            self.close()
            raise
        self.startup_s = time.perf_counter() - began

    def lap(self, sample: bool) -> dict[str, Any]:
        """Let it do one lap. Looking at its memory disturbs it a little, so that is not done when it counts."""
        self._tell("go")
        self.laps.append(self._hear("seconds", sample))
        return self.laps[-1]

    def finish(self) -> dict[str, Any]:
        """What it has to say at the end."""
        with contextlib.suppress(Dropped):  # it may have said it already, and gone
            self._tell("end")
        said = self._hear("end", sample=False)
        self.close()
        return said

    def close(self) -> None:
        """End it and whatever it started."""
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                stream.close()  # type: ignore[union-attr]
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(FAREWELL_S if self._process.poll() is None and self.laps else 0)
        until = time.monotonic() + FAREWELL_S
        while left := family(self.mark):  # a framework may leave servers of its own behind
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > until:
                break
            time.sleep(0.01)  # they must be gone before the next one is measured
        self._process.wait()

    def _tell(self, word: str) -> None:
        try:
            self._process.stdin.write(f"{word}\n".encode())  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]
        except OSError:
            raise Dropped(self._reason()) from None

    def _hear(self, key: str, sample: bool) -> dict[str, Any]:
        """Its next line, which must have this key."""
        line = self._line(sample)
        if sample:
            self._weigh()
        try:
            said = json.loads(line)
        except ValueError:
            raise Dropped(f"it said {line[:100]!r}") from None
        if key not in said:
            raise Dropped(f"it said {line[:100]!r} where {key!r} was expected")
        return said

    def _line(self, sample: bool) -> bytes:
        source = self._process.stdout.fileno()  # type: ignore[union-attr]
        until = time.monotonic() + PATIENCE_S
        while b"\n" not in self._text:
            ready, _, _ = select.select([source], [], [], SAMPLE_S if sample else 1.0)
            if ready:
                more = os.read(source, 1 << 16)
                if not more:
                    raise Dropped(self._reason())
                self._text += more
            elif sample:
                self._weigh()
            if time.monotonic() > until:
                raise Dropped(f"no answer within {PATIENCE_S:.0f} s")
        line, _, self._text = self._text.partition(b"\n")
        return line

    def _weigh(self) -> None:
        first = self._process.pid
        main = memory([first])
        self.server_memory = max(self.server_memory, main)
        self.memory = max(self.memory, main + memory([pid for pid in family(self.mark) if pid != first]))

    def _reason(self) -> str:
        """The last thing it complained of."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        lines = [t.strip() for t in self._errors.read_text(errors="replace").splitlines() if t.strip()]
        return f"it ended with code {self._process.poll()}: {lines[-1][:300] if lines else 'no message'}"


def own_command(case: Case, side: str, scale: Scale, laps: int) -> Command:
    """How a side of ours is started."""
    return [sys.executable, "-m", "bench.side", case.name, side, scale, str(laps)]


def hold(
    case: Case,
    scale: Scale,
    folder: pathlib.Path,
    laps: int | None = None,
    others: Mapping[str, tuple[Command, Mapping[str, str]] | str] | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Run a case and return what was found. `others` are sides of other frameworks, or why there are none."""
    count = case.warm_up + (case.laps - case.warm_up if laps is None else laps)
    first = next(iter(case.sides))
    runners: dict[str, Runner] = {}
    absent: dict[str, str] = {}
    ends: dict[str, dict[str, Any]] = {}

    def attempt(name: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Dropped as e:
            if name in (first, PEAK):
                raise RunError(f"{case.name}: the side {name!r} failed: {e}") from None
            absent[name] = f"not measured: {e}"
            tell(f"{case.name}: {name} {absent[name]}")
            if name in runners:
                runners.pop(name).close()

    def begin(name: str, command: Command, environment: Mapping[str, str] | None = None) -> None:
        tell(f"{case.name}: {name} starts")
        runners[name] = Runner(name, command, folder, environment)

    try:
        for side in [*case.sides, *([PEAK] if case.flops else [])]:
            attempt(side, partial(begin, side, own_command(case, side, scale, count)))
        for name, how in (others or {}).items():
            if isinstance(how, str):
                absent[name] = f"not measured: {how}"
            else:
                attempt(name, partial(begin, name, *how))
        for i in range(count):
            tell(f"{case.name}: lap {i + 1} of {count}")
            for name, runner in list(runners.items()):
                attempt(name, partial(runner.lap, sample=i == 0))
        for name, runner in list(runners.items()):
            said = attempt(name, runner.finish)
            if said is not None:
                ends[name] = said
    finally:
        for runner in runners.values():
            runner.close()
    return outcome(case, {n: measured(r, ends[n]) for n, r in runners.items()}, absent, scale)


@dataclasses.dataclass(frozen=True)
class Measured:
    """What is known of one side, warm-up included."""

    seconds: list[float]
    startup_s: float = 0.0
    memory: int = 0
    server_memory: int = 0
    flops: tuple[float, ...] = ()  # of the peak
    end: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def measured(runner: Runner, end: Mapping[str, Any]) -> Measured:
    """The side as numbers."""
    return Measured(
        [lap["seconds"] for lap in runner.laps],
        runner.startup_s,
        runner.memory,
        runner.server_memory,
        tuple(lap["flops"] for lap in runner.laps if "flops" in lap),
        end,
    )


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    if len(values) < 2:
        return {"median": values[0], "q1": values[0], "q3": values[0]}
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3}


def outcome(case: Case, sides: Mapping[str, Measured], absent: Mapping[str, str], scale: Scale) -> dict[str, Any]:
    """Seconds, ratios, shares and checks of a case.

    A ratio compares laps of the same turn, so what slows the machine down for minutes slows down both.
    """
    names = [n for n in sides if n != PEAK]
    first = names[0]
    units = case.units or dict.fromkeys(names, 1.0)
    timed = {n: sides[n].seconds[case.warm_up :] for n in names}
    found: dict[str, Any] = {"case": case.name, "title": case.title, "growth": case.units is not None}
    found["sides"] = {n: _facts(sides[n], timed[n], case.warm_up) for n in names} | {
        n: {"not_measured": why} for n, why in absent.items()
    }
    found["ratios"] = {
        n: spread([b / units[n] / (a / units[first]) for a, b in zip(timed[first], timed[n], strict=True)])
        for n in names
        if n not in (first, "bare")
    }
    if case.fleet is not None:
        total = {n: found["sides"][n]["total_s"] for n in names if n != "bare"}
        found["total_ratios"] = {n: s / total[first] for n, s in total.items() if n != first}
    if case.flops is not None and PEAK in sides:
        work, peak = case.flops(), sides[PEAK].flops[case.warm_up :]
        found["peak_gflops"] = spread([p / 1e9 for p in peak])
        found["peak_share"] = spread([work / s / p for s, p in zip(timed[first], peak, strict=True)])
    if "bare" in timed:
        found["framework_share"] = spread([1 - b / a for a, b in zip(timed[first], timed["bare"], strict=True)])
    found["checks"] = checks(case, {n: sides[n].end for n in names}, scale)
    return found


def _facts(side: Measured, timed: list[float], warm_up: int) -> dict[str, Any]:
    steady = spread(timed)
    later = (ROUNDS_IN_ALL - 1) * steady["median"]
    return {
        "seconds": steady,
        "laps": [round(s, 5) for s in timed],
        "startup_s": side.startup_s,
        "first_lap_s": side.seconds[0],
        "total_s": side.startup_s + side.seconds[0] + later,
        "memory_mb": side.memory / 2**20,
        "server_memory_mb": side.server_memory / 2**20,
        **{k: side.end[k] for k in ("steps", "accuracy", "digest") if side.end.get(k) is not None},
    }


def checks(case: Case, ends: Mapping[str, Mapping[str, Any]], scale: Scale) -> dict[str, str]:
    """Whether the sides did the same thing: check -> "ok", or what is wrong.

    At the quick size equal steps are the check of equal work: after so few of them accuracies say nothing.
    """
    out = {}
    first = next(iter(ends))
    if case.same_digest:
        other = [n for n in ends if ends[n].get("digest") != ends[first].get("digest")]
        out["equal bits"] = f"differ: {', '.join(other)}" if other else "ok"
    steps = {n: e["steps"] for n, e in ends.items() if e.get("steps")}
    if len(steps) > 1:
        out["equal steps"] = "ok" if len(set(steps.values())) == 1 else f"differ: {steps}"
    reached = {n: round(e["accuracy"], 3) for n, e in ends.items() if e.get("accuracy") is not None}
    if len(reached) > 1 and case.units is None and scale == "full":  # sides of different sizes learn different things
        close = max(reached.values()) - min(reached.values()) <= ACCURACY_RANGE
        out["accuracy in one range"] = "ok" if close else f"differ: {reached}"
    return out
