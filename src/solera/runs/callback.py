"""Callbacks follow a run and never change its training. Displays, trackers, the stop rule and the warnings about a run
that goes wrong are callbacks; users write their own. This module does not import torch."""

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

from ..core.errors import ConfigError, RunError, SoleraError
from .record import RoundRecord, finite


class Callback:
    """Follows a run: `begin`, for every round `round` and `saved`, and `end`. The base class ignores everything.

    An error in a callback ends the run, which can be resumed; an `optional` callback is switched off with a warning.
    """

    name = ""  # in the lines of metrics.jsonl and in errors; the name of the class, unless set
    optional = False
    asked: dict[str, Any] | None = None  # to stop: the facts of the event in the last round's line
    noted: tuple[dict[str, Any], ...] = ()  # of built-in callbacks: events for the line of the current round

    def begin(self, facts: Mapping[str, Any], before: Iterable[RoundRecord]) -> None:
        """The run starts or is resumed. `before` are the rounds that a resumed run has recorded. The facts are name,
        method, rounds, start_round, clients, cohort, replies, engine, workers, device and out (the run directory)."""

    def phase(self, round: int, name: str) -> None:
        """The round enters the phase "clients", "server", "evaluate" or "commit"."""

    def progress(self, what: str, done: int, of: int) -> None:
        """`done` of `of` clients have answered in the current exchange."""

    def round(self, record: RoundRecord) -> Mapping[str, float] | None:
        """A round has ended; its line is not written yet. Return numbers to add to the line, under this callback's
        name."""

    def saved(self, record: RoundRecord) -> None:
        """The line of the round is in metrics.jsonl, with the numbers of all callbacks."""

    def warn(self, text: str) -> None:
        """Something went wrong that does not stop the run. It may come before `begin`."""

    def end(self, summary: Mapping[str, Any] | None) -> None:
        """The run has finished, with the content of summary.json; None: it was stopped or has failed."""

    def stop(self, reason: str) -> None:
        """Ask that the current round be the last one. The reason is recorded."""
        self.asked = {"reason": reason, "callback": name_of(self)}


def name_of(callback: Callback) -> str:
    """The callback's name in records and errors."""
    return callback.name or type(callback).__name__


class Callbacks:
    """The callbacks of one run, in order."""

    def __init__(self, given: Iterable[Callback]):
        self.all = list(given)
        for c in self.all:
            if not isinstance(c, Callback):
                raise ConfigError(f"callbacks: {c!r} is no solera.Callback; derive its class from that one")
        names = [name_of(c) for c in self.all]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"callbacks: two are named {twice[0]!r}; set the attribute `name` of one of them")

    def tell(self, what: str, *args: Any) -> None:
        """Call the method `what` of every callback."""
        for c in list(self.all):
            self._call(c, what, *args)

    def numbers(self, callback: Callback, record: RoundRecord) -> dict[str, float]:
        """The numbers that a callback adds to a round."""
        told = self._call(callback, "round", record) or {}
        try:
            return {str(key): finite(float(value)) for key, value in told.items()}
        except (ValueError, TypeError, AttributeError) as e:
            raise RunError(
                f"callback {name_of(callback)}, round {record.round}: {e}; `round` returns finite numbers by name"
            ) from None

    def __enter__(self) -> None:
        """The run has a directory; leaving before `end` tells all that it ended early."""

    def __exit__(self, *_: object) -> None:
        for c in self.all:
            with contextlib.suppress(Exception):  # an error now would hide the reason
                c.end(None)

    def end(self, summary: Mapping[str, Any]) -> None:
        """Tell all that the run has finished: the last one first, so that displays hear the warnings of trackers."""
        for c in reversed(list(self.all)):
            try:
                self._call(c, "end", summary)
            finally:
                self.all = [other for other in self.all if other is not c]

    def _call(self, callback: Callback, what: str, *args: Any) -> Any:
        try:
            return getattr(callback, what)(*args)
        except Exception as e:
            text = f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
            if callback.optional:
                self.all.remove(callback)
                self.tell("warn", f"{name_of(callback)} is off for the rest of this run: {text}")
                return None
            if isinstance(e, SoleraError):
                raise
            raise RunError(
                f"callback {name_of(callback)} failed in `{what}`: {text}; the last checkpoint is unharmed: correct "
                "the callback or leave it out, then resume the run"
            ) from e
