"""The display of a run: live on a terminal, a line for each round elsewhere, or nothing."""

import sys
import time
from collections.abc import Mapping
from typing import Any, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .notice import KINDS
from .record import RoundRecord
from .stand_ins import KEY as STAND_INS
from .stand_ins import verdict
from .words import human_bytes, human_time, percent

WARNINGS_A_ROUND = 5  # further ones are only counted; all of them are in metrics.jsonl
MODELS_SHOWN = 12
IN_THE_CLEAR = "replies are summed in the clear: the server decodes each one before it adds it up"
NARROW = 50  # columns; a narrower display leaves out its bar and its third column
PHASES = {
    "clients": "clients train",
    "server": "the server works",
    "evaluate": "models are tested",
    "commit": "the round is saved",
}


class Watcher:
    """Gets the events of a run; the base class ignores them. A context manager: leaving it ends the display."""

    def begin(self, facts: Mapping[str, Any]) -> None:
        """The run starts. Facts: name, method, rounds, start_round, clients, cohort, replies, engine, workers, out."""

    def phase(self, round: int, name: str) -> None:
        """The round enters the phase "clients", "server", "evaluate" or "commit"."""

    def progress(self, what: str, done: int, of: int) -> None:
        """`done` of `of` clients have answered in the current exchange."""

    def round_done(self, record: RoundRecord) -> None:
        """A round has ended; `record` is its line in metrics.jsonl."""

    def warn(self, text: str) -> None:
        """Something went wrong that does not stop the run."""

    def end(self, summary: Mapping[str, Any]) -> None:
        """The run has finished; `summary` is the content of summary.json."""

    def close(self) -> None:
        """Restore the terminal, also after an error."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Warnings:
    """Shows each warning of a round once, up to a limit."""

    def __init__(self) -> None:
        self.said: set[str] = set()

    def is_new(self, text: str) -> bool:
        """Whether to show this warning."""
        key = text[:200]  # the same warning may also come in a shortened form
        if key in self.said:
            return False
        self.said.add(key)
        return len(self.said) <= WARNINGS_A_ROUND

    def round_done(self) -> int:
        """The number of warnings that were not shown; resets for the next round."""
        more = max(0, len(self.said) - WARNINGS_A_ROUND)
        self.said.clear()
        return more


class QuietWatcher(Watcher):
    """Only warnings, on stderr: stdout is for JSON."""

    def __init__(self, file: TextIO | None = None):
        self.file = file or sys.stderr
        self.warnings = _Warnings()

    def warn(self, text: str) -> None:
        if self.warnings.is_new(text):
            print(f"warning: {text}", file=self.file, flush=True)

    def round_done(self, record: RoundRecord) -> None:
        if more := self.warnings.round_done():
            print(f"warning: and {more} more", file=self.file, flush=True)


class PlainWatcher(QuietWatcher):
    """One line for each round (without `every_round`, only the outcome), for files and pipes."""

    def __init__(self, every_round: bool = True, file: TextIO | None = None):
        super().__init__(file or sys.stdout)
        self.every_round, self.rounds = every_round, 0

    def begin(self, facts: Mapping[str, Any]) -> None:
        self.rounds = facts["rounds"]
        if self.every_round:
            self._say(headline(facts))

    def round_done(self, record: RoundRecord) -> None:
        super().round_done(record)
        if not self.every_round:
            return
        width = len(str(self.rounds))
        parts = [f"[{record.round + 1:{width}}/{self.rounds}]", *scores(record)]
        parts.append(f"{human_bytes(record.traffic.sent('down'))} down, {human_bytes(record.traffic.sent('up'))} up")
        parts.append(human_time(record.seconds["total"]))
        if record.failures:
            parts.append(f"{len(record.failures)} dropped")
        parts += [f"{e['kind']}: {e['name']}" for e in record.events if e["kind"] in KINDS]
        self._say("  ".join(parts))

    def end(self, summary: Mapping[str, Any]) -> None:
        for line in outcome(summary):
            self._say(line)

    def _say(self, line: str) -> None:
        print(line, file=self.file, flush=True)


class LiveWatcher(Watcher):
    """Round, phase, clients done, accuracy, traffic and time left, redrawn in place; warnings appear above it."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console()
        self.warnings = _Warnings()
        self.live: Live | None = None
        self.facts: Mapping[str, Any] = {}
        self.began = self.round_began = 0.0
        self.done, self.now, self.answered = 0, "", (0, 0)
        self.seconds: list[float] = []
        self.best: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.traffic = {"down": 0, "up": 0}
        self.dropped = 0

    def begin(self, facts: Mapping[str, Any]) -> None:
        self.facts, self.done = facts, facts["start_round"]
        self.began = self.round_began = time.monotonic()
        self.console.print(headline(facts), style="bold", markup=False, highlight=False)
        self.live = Live(get_renderable=self.render, console=self.console, refresh_per_second=4, transient=True)
        self.live.start()

    def phase(self, round: int, name: str) -> None:
        self.now, self.answered = PHASES.get(name, name), (0, 0)
        if name == "clients":
            self.round_began = time.monotonic()

    def progress(self, what: str, done: int, of: int) -> None:
        self.answered = (done, of)

    def round_done(self, record: RoundRecord) -> None:
        self.done = record.round + 1
        self.seconds.append(record.seconds["total"])
        self.dropped += len(record.failures)
        for way in self.traffic:
            self.traffic[way] += record.traffic.sent(way)
        for name, accuracy in record.accuracies().items():
            self.last[name] = accuracy
            self.best[name] = max(accuracy, self.best.get(name, 0.0))
        self.now = ""
        if more := self.warnings.round_done():
            self._print(f"warning: and {more} more", "yellow")

    def warn(self, text: str) -> None:
        if self.warnings.is_new(text):
            self._print(f"warning: {text}", "yellow")

    def end(self, summary: Mapping[str, Any]) -> None:
        self.close()
        for line in outcome(summary):
            self.console.print(line, markup=False, highlight=False)

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def _print(self, text: str, style: str) -> None:
        self.console.print(text, style=style, markup=False, highlight=False)

    # -- rendering --

    def render(self) -> RenderableType:
        """The current display; redrawn several times a second."""
        return Group(self._bar(), self._state(), *([self._table()] if self.last else []))

    @property
    def narrow(self) -> bool:
        return self.console.width < NARROW

    def _bar(self) -> RenderableType:
        rounds, left = self.facts["rounds"], self.time_left()
        where = Text(f"round {min(self.done + 1, rounds)}/{rounds}", style="bold")
        clock = human_time(time.monotonic() - self.began) + (f", {human_time(left)} left" if left is not None else "")
        if self.narrow:
            return Group(where, Text(clock, style="cyan", no_wrap=True, overflow="ellipsis"))
        grid = Table.grid(padding=(0, 1), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True, justify="right")
        grid.add_row(where, ProgressBar(total=max(rounds, 1), completed=self.done), Text(clock, style="cyan"))
        return grid

    def _state(self) -> Text:
        done, of = self.answered
        parts = [self.now] if self.now else []
        if of:
            parts.append(f"{done}/{of} answered")
        parts.append(f"{human_bytes(self.traffic['down'])} down, {human_bytes(self.traffic['up'])} up")
        if self.dropped:
            parts.append(f"{self.dropped} replies dropped")
        return Text(" · ".join(parts), style="dim", no_wrap=True, overflow="ellipsis")

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 1), pad_edge=False)
        table.add_column("model", overflow="ellipsis", no_wrap=True)
        table.add_column("now" if self.narrow else "accuracy", justify="right", no_wrap=True, min_width=6)
        if not self.narrow:
            table.add_column("best", justify="right", no_wrap=True, style="dim")
        for name in list(self.last)[:MODELS_SHOWN]:
            cells = [percent(self.last[name]), percent(self.best[name])]
            table.add_row(escape(name), *cells[: 1 if self.narrow else 2])
        if len(self.last) > MODELS_SHOWN:
            table.add_row(f"... {len(self.last) - MODELS_SHOWN} more")
        return table

    def time_left(self) -> float | None:
        """Seconds until the end, if the next rounds take as long as the last few."""
        if not self.seconds:
            return None
        recent = self.seconds[-5:]
        expected = sum(recent) / len(recent) * (self.facts["rounds"] - self.done)
        return max(0.0, expected - (time.monotonic() - self.round_began if self.now else 0.0))


def choose_watcher(json: bool = False, quiet: bool = False) -> Watcher:
    """A suitable display: only warnings with JSON, only the outcome, a live display, or plain lines."""
    if json:
        return QuietWatcher()
    if quiet:
        return PlainWatcher(every_round=False)
    console = Console()
    return LiveWatcher(console) if console.is_terminal and not console.is_dumb_terminal else PlainWatcher()


# ---- text -------------------------------------------------------------------------------------------


def headline(facts: Mapping[str, Any]) -> str:
    """The run in one line; a second one where a method needs only sums of replies, which nothing hides."""
    start = f", continued after {facts['start_round']}" if facts["start_round"] else ""
    side = f" x {facts['workers']}" if facts["workers"] > 1 else ""
    return (
        f"{facts['name']}: {facts['method']}, {facts['rounds']} rounds{start}, {facts['cohort']} of "
        f"{facts['clients']} clients a round, engine {facts['engine']}{side}"
        + (f"\n  {IN_THE_CLEAR}" if facts.get("replies") == "means" else "")
    )


def outcome(summary: Mapping[str, Any]) -> list[str]:
    """The results of a finished run and its directory."""
    rounds = summary["rounds"]
    lines = [f"{rounds} rounds in {human_time(summary['seconds'])}, digest {summary['digest'][:16]}"]
    if "stopped" in summary:
        lines.append(f"  ended early: {summary['stopped']}")
    named = {**summary["models"], **{f"ensemble {k}": v for k, v in summary["ensembles"].items()}}
    for name, s in list(named.items())[:MODELS_SHOWN]:
        best = f"best {percent(s['best_accuracy'])} at {s['best_round'] + 1}/{rounds}"
        lines.append(f"  {name}: {percent(s['accuracy'])}, {best}")
    if len(named) > MODELS_SHOWN:
        lines.append(f"  ... {len(named) - MODELS_SHOWN} more")
    if "mean" in (own := summary.get("personal") or {}):
        weighted = f", {percent(own['weighted_mean'])} weighted by test samples" if "weighted_mean" in own else ""
        lines.append(f"  clients' own models: {percent(own['mean'])} on average of {own['clients']}{weighted}")
    if summary["failures"]:
        lines.append(f"  {sum(summary['failures'].values())} replies dropped, of {len(summary['failures'])} clients")
    if stand_ins := summary.get(STAND_INS):
        lines.append(f"  {verdict(stand_ins)}")
    return [*lines, f"run directory: {summary['out']}"]


def scores(record: RoundRecord) -> list[str]:
    """The accuracies of a round as short text."""
    found = record.accuracies()
    shown = [f"{name} {percent(a)}" for name, a in list(found.items())[:MODELS_SHOWN]]
    return shown + ([f"... {len(found) - MODELS_SHOWN} more"] if len(found) > MODELS_SHOWN else [])
