"""The display of a run: live on a terminal, a line for each round elsewhere, or nothing."""

import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .callbacks import KINDS, Callback
from .record import RoundRecord
from .words import KEY as STAND_INS
from .words import human_bytes, human_time, percent, verdict

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


class Display(Callback):
    """Shows each warning of a round once, and counts those above a limit."""

    def __init__(self) -> None:
        self.warned: set[str] = set()  # in this round

    def warn(self, text: str) -> None:
        key = text[:200]  # the same warning may also come in a shortened form
        if key not in self.warned:
            self.warned.add(key)
            if len(self.warned) <= WARNINGS_A_ROUND:
                self.show_warning(text)

    def saved(self, record: RoundRecord) -> None:
        if len(self.warned) > WARNINGS_A_ROUND:
            self.show_warning(f"and {len(self.warned) - WARNINGS_A_ROUND} more")
        self.warned.clear()

    def show_warning(self, text: str) -> None:
        """Show one warning."""
        raise NotImplementedError


class QuietDisplay(Display):
    """Only warnings, on stderr: stdout is for JSON."""

    def __init__(self, file: TextIO | None = None):
        super().__init__()
        self.file = file or sys.stderr

    def show_warning(self, text: str) -> None:
        print(f"warning: {text}", file=self.file, flush=True)


class PlainDisplay(QuietDisplay):
    """One line for each round (without `every_round`, only the outcome), for files and pipes."""

    def __init__(self, every_round: bool = True, file: TextIO | None = None):
        super().__init__(file or sys.stdout)
        self.every_round, self.rounds = every_round, 0

    def begin(self, facts: Mapping[str, Any], before: Iterable[RoundRecord]) -> None:
        self.rounds = facts["rounds"]
        if self.every_round:
            self._say(headline(facts))

    def saved(self, record: RoundRecord) -> None:
        super().saved(record)
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

    def end(self, summary: Mapping[str, Any] | None) -> None:
        for line in outcome(summary) if summary else ():
            self._say(line)

    def _say(self, line: str) -> None:
        print(line, file=self.file, flush=True)


class LiveDisplay(Display):
    """Round, phase, clients done, accuracy, traffic and time left, redrawn in place; warnings appear above it."""

    def __init__(self, console: Console | None = None):
        super().__init__()
        self.console = console or Console()
        self.live: Live | None = None
        self.facts: Mapping[str, Any] = {}
        self.began = self.round_began = 0.0
        self.done, self.now, self.answered = 0, "", (0, 0)
        self.seconds: list[float] = []
        self.best: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.traffic = {"down": 0, "up": 0}
        self.dropped = 0

    def begin(self, facts: Mapping[str, Any], before: Iterable[RoundRecord]) -> None:
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

    def saved(self, record: RoundRecord) -> None:
        self.done = record.round + 1
        self.seconds.append(record.seconds["total"])
        self.dropped += len(record.failures)
        for way in self.traffic:
            self.traffic[way] += record.traffic.sent(way)
        for name, accuracy in record.accuracies().items():
            self.last[name] = accuracy
            self.best[name] = max(accuracy, self.best.get(name, 0.0))
        self.now = ""
        super().saved(record)

    def show_warning(self, text: str) -> None:
        self.console.print(f"warning: {text}", style="yellow", markup=False, highlight=False)

    def end(self, summary: Mapping[str, Any] | None) -> None:
        if self.live is not None:  # first restore the terminal
            self.live.stop()
            self.live = None
        for line in outcome(summary) if summary else ():
            self.console.print(line, markup=False, highlight=False)

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


def choose_display(json: bool = False, quiet: bool = False) -> Display:
    """A suitable display: only warnings with JSON, only the outcome, a live display, or plain lines."""
    if json:
        return QuietDisplay()
    if quiet:
        return PlainDisplay(every_round=False)
    console = Console()
    return LiveDisplay(console) if console.is_terminal and not console.is_dumb_terminal else PlainDisplay()


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
