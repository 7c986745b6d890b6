"""`solera run --profile`: where the seconds of one round go, on the server and in a client's task.

It only looks: a profiled run ends with the bits of any other. The server's round is run under cProfile, and work that
the server would do side by side is done one after another, because cProfile sees one thread. Clients may be anywhere,
so one call of each task of the round is run once more, here, and what comes of it is thrown away: a call
can be repeated (see `engines.serve`).
"""

import cProfile
import dataclasses
import os
import pstats
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as traced

from ..devices import Placement
from ..engines import Call, ClientStates, Engine, Host, Reply, Version, serve
from ..randomness import Parallel, one_thread
from ..runs.directory import RunDirectory
from ..runs.record import RoundRecord
from ..tensors import Weights
from ..track.display import Watcher

FOLDER = "profile"
SHOWN = 40  # functions and operators of each
TRACE_S = 5.0  # a task that takes longer is not traced: every operator is an event, and a trace has to be opened


class _Borrowed(ClientStates):
    """The clients' state, to look at."""

    def save(
        self,
        client: str,
        step: int,
        state: dict[str, Weights],
        keep: Collection[Version] = (),
        keep_from: int = 0,
    ) -> Version:
        """Not here: the call that counts has saved it."""
        return Version(step, "")


class Profile(Watcher):
    """Passes on what a run tells its watcher, and profiles one round: the second, as the first one warms up."""

    def __init__(
        self,
        inner: Watcher,
        engine: Engine,
        host: Host,
        states: ClientStates,
        home: RunDirectory,
        parallel: Parallel,
    ):
        self.inner, self.host, self.home, self.parallel = inner, host, home, parallel
        self._alone = parallel.alone
        self._before: Mapping[str, float] | None = None  # seconds of the round before, which nobody disturbed
        self.states = _Borrowed(states.root)
        self.round = -1
        self.calls: dict[str, Call] = {}  # the first of each task
        self._server = cProfile.Profile()
        self._on = False
        self._start = engine.start
        engine.start = self._noted  # type: ignore[method-assign]  # on this object alone: it stays the engine it is

    def _noted(self, calls: Sequence[Call]) -> Callable[[], Iterator[Reply]]:
        if self._on and calls:
            self.calls.setdefault(calls[0].task, calls[0])
        return self._start(calls)

    def begin(self, facts: Mapping[str, Any]) -> None:
        self.inner.begin(facts)
        self.round = min(facts["start_round"] + 1, facts["rounds"] - 1)

    def phase(self, round: int, name: str) -> None:
        self.inner.phase(round, name)
        if round == self.round and name == "clients" and not self._on:
            self._on, self._alone, self.parallel.alone = True, self.parallel.alone, True
            self._server.enable()

    def progress(self, what: str, done: int, of: int) -> None:
        self.inner.progress(what, done, of)

    def warn(self, text: str) -> None:
        self.inner.warn(text)

    def round_done(self, record: RoundRecord) -> None:
        if self._on:
            self._server.disable()
            self._on, self.parallel.alone = False, self._alone
            self._write(record)
        self._before = record.seconds
        self.inner.round_done(record)

    def end(self, summary: Mapping[str, Any]) -> None:
        self.inner.end(summary)

    # -- what is written --

    def _write(self, record: RoundRecord) -> None:
        folder = self.home.path / FOLDER
        folder.mkdir(exist_ok=True)
        threads = torch.get_num_threads()
        one_thread()  # as every task runs
        try:
            tasks = [self._task(name, call, folder) for name, call in self.calls.items()]
        finally:
            torch.set_num_threads(threads)
        facts = {
            "round": record.round,
            "seconds": record.seconds,
            "seconds_before": self._before,
            "server": {"functions": functions_of(self._server)},
            "tasks": tasks,
        }
        self.home.write_facts(f"{FOLDER}/profile.json", facts)
        (folder / "summary.txt").write_text(in_words(facts))

    def _task(self, name: str, call: Call, folder: Path) -> dict[str, Any]:
        call = dataclasses.replace(call, deadline_s=None)
        place = Placement()
        reply = serve(call, self.host, self.states, place)  # once for the clock, undisturbed
        facts: dict[str, Any] = {"task": name, "client": call.client, "seconds": round(reply.seconds, 4)}
        if reply.error is not None:
            return facts | {"error": reply.error}
        watched = cProfile.Profile()
        watched.runcall(serve, call, self.host, self.states, place)
        facts["functions"] = functions_of(watched)
        if reply.seconds > TRACE_S:
            return facts | {"trace": None, "why": f"it takes more than {TRACE_S:.0f} s"}
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would announce itself in the middle of the display
        with traced(activities=[ProfilerActivity.CPU]) as seen:
            serve(call, self.host, self.states, place)
        seen.export_chrome_trace(str(folder / f"{name}.json.gz"))
        return facts | {"operators": _operators(seen), "trace": f"{FOLDER}/{name}.json.gz"}


def functions_of(profile: cProfile.Profile) -> list[dict[str, Any]]:
    """The Python functions that took most time themselves; `total_s` has what they called."""
    rows = [
        {
            "function": name,
            "file": "/".join(Path(file).parts[-3:]),
            "line": line,
            "calls": calls,
            "own_s": round(own, 5),
            "total_s": round(total, 5),
        }
        for (file, line, name), (_, calls, own, total, _) in pstats.Stats(profile).stats.items()  # type: ignore[attr-defined]
    ]
    return sorted(rows, key=lambda r: -r["own_s"])[:SHOWN]


def _operators(seen: Any) -> list[dict[str, Any]]:
    """Torch's operators that took most time themselves."""
    rows = [
        {"operator": e.key, "calls": e.count, "own_ms": round(e.self_cpu_time_total / 1000, 3)}
        for e in seen.key_averages()
    ]
    return sorted(rows, key=lambda r: -r["own_ms"])[:SHOWN]


def in_words(facts: Mapping[str, Any]) -> str:
    """The same to read."""
    lines = []
    for what, seconds in (("the round before", facts["seconds_before"]), ("under the profiler", facts["seconds"])):
        if seconds is not None:
            lines.append(f"seconds, {what}: " + ", ".join(f"{k} {v:.3f}" for k, v in seconds.items()))

    def functions(rows: Sequence[Mapping[str, Any]]) -> None:
        lines.append(f"{'own s':>9} {'total s':>9} {'calls':>9}  function")
        for r in rows[:15]:
            where = f"{r['file']}:{r['line']}"
            lines.append(f"{r['own_s']:9.4f} {r['total_s']:9.4f} {r['calls']:9}  {r['function']} ({where})")

    lines += ["", "the server's process, under cProfile"]
    functions(facts["server"]["functions"])
    for task in facts["tasks"]:
        lines += ["", f"task {task['task']} of {task['client']}, {task['seconds']:.3f} s undisturbed"]
        if "error" in task:
            lines.append(task["error"])
            continue
        functions(task["functions"])
        if task.get("operators"):
            lines += ["", f"{'own ms':>9} {'calls':>9}  operator (all of them: {task['trace']})"]
            lines += [f"{r['own_ms']:9.2f} {r['calls']:9}  {r['operator']}" for r in task["operators"][:15]]
    return "\n".join(lines) + "\n"
