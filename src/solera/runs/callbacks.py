"""Callbacks follow a run and never change its training. Users write their own; displays and trackers are callbacks, and
so are the two here: `Stopping` ends a run early, `Notices` reports that it goes wrong. Both depend only on the
recorded rounds, so a resumed run does the same. This module does not import torch.
"""

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..core.errors import AT_ONCE, ConfigError, RunError, SoleraError
from .record import OWN, RoundRecord, Score, finite


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
            self.call(c, what, *args)

    def __enter__(self) -> None:
        """The run has a directory; leaving before `end` tells all that it ended early."""

    def __exit__(self, *_: object) -> None:
        for c in self.all:
            with contextlib.suppress(Exception):  # an error in `end` would hide the exception that ended the run
                c.end(None)

    def end(self, summary: Mapping[str, Any]) -> None:
        """Call `end` of every callback: the last one first, so that displays show the warnings of trackers."""
        for c in reversed(list(self.all)):
            try:
                self.call(c, "end", summary)
            finally:
                self.all = [other for other in self.all if other is not c]

    def call(self, callback: Callback, what: str, *args: Any) -> Any:
        """Call one method of a callback; that of `round` returns numbers by name."""
        try:
            found = getattr(callback, what)(*args)
            return {str(k): finite(float(v)) for k, v in (found or {}).items()} if what == "round" else found
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


# ---- ending early -----------------------------------------------------------------------------------

STOPPED = "stopped"  # the event of the round that ended the run early


class Stopping(Callback):
    """Ends a run at a target, or when nothing has improved for some rounds.

    `config` is `run.stop`, a StopConfig; `main` names the model that counts; without it, the mean over all models.
    """

    def __init__(self, config: Any, main: str | None):
        self.config, self.main = config, main
        self.best, self.best_round = math.inf, -1
        self.reason: str | None = None  # why a resumed run has already ended

    def begin(self, facts: Mapping[str, Any], before: Iterable[RoundRecord]) -> None:
        for record in before:
            self.round(record)
            # `Method.finish` may have changed the models, so the recorded scores are not those of the decision.
            said = next((e for e in record.events if e["kind"] == STOPPED), {})
            holds = "callback" in said or said.get("rule") == dataclasses.asdict(self.config)
            self.reason = said["reason"] if said and holds else None
        self.asked = None

    def round(self, record: RoundRecord) -> None:
        """Ask to stop if this round ends the run. A round that was not evaluated never does."""
        cfg, value = self.config, self.value(record.scores)
        if not cfg.active or value is None:
            return
        sign = -1 if cfg.metric == "accuracy" else 1
        if sign * value < self.best:
            self.best, self.best_round = sign * value, record.round
        what = f"the {cfg.metric} on the {cfg.split} set"
        if cfg.target is not None and sign * value <= sign * cfg.target:
            reason = f"{what} is {value:.4f}: the target of {cfg.target:g} is reached"
        elif cfg.patience is not None and record.round - self.best_round >= cfg.patience:
            best = f"{sign * self.best:.4f}, in round {self.best_round}"
            reason = f"{what} has not improved for {cfg.patience} rounds (best: {best})"
        else:
            return
        self.asked = {"value": value, "reason": reason, "rule": dataclasses.asdict(cfg)}

    def value(self, scores: Sequence[Score]) -> float | None:
        """The value of a round: of the main model, or the mean over models, or the mean over clients' own models."""
        kind = "validation" if self.config.split == "validation" else "model"
        found = {s.name: s.value for s in scores if (s.kind, s.metric) == (kind, self.config.metric)}
        if found:
            return found.get(self.main or "", statistics.fmean(found.values()))
        own = [s.value for s in scores if (s.kind, s.metric) == ("own", "mean")]
        return own[0] if own and (self.config.split, self.config.metric) == ("test", "accuracy") else None


# ---- runs that go wrong -----------------------------------------------------------------------------

LEARNED = 0.2  # share of the way from guessing to 100%: a model that never reached it cannot collapse
GROWTH = 10.0  # a loss or a variate that is this many times its smallest value so far grows without bound
ABOVE_GUESSING = 1.0  # a loss must also be this much above that of guessing: small losses vary by large factors
KINDS = ("collapsed", "loss_grows", "variates_grow", "diverged_at_once")  # the events of `Notices`
ADVICE = "a lower learning rate may help"

Finding = tuple[str, str, bool, dict[str, Any]]  # kind, name of the model, whether it is the case, facts


class Notices(Callback):
    """Detects that a run goes wrong while every number is still finite: a model that falls back to guessing, a loss or
    control variates (SCAFFOLD) that grow without bound, clients that diverge with the model that they are sent.

    The run continues; the round and the report show an event. `labels` are the numbers of test samples of each class.
    """

    def __init__(self, labels: Iterable[int]):
        counts = [n for n in labels if n]
        total = max(sum(counts), 1)
        self.chance = max(counts, default=0) / total  # the accuracy of always predicting the most frequent class
        self.noise = 2 * math.sqrt(self.chance * (1 - self.chance) / total)
        self.guessing = math.log(max(len(counts), 1))  # the loss of equal probabilities
        self.best: dict[str, float] = {}
        self.least: dict[tuple[str, str], float] = {}
        self.said: set[tuple[str, str]] = set()  # problems that are the case now, to report each only once

    def begin(self, facts: Mapping[str, Any], before: Iterable[RoundRecord]) -> None:
        for record in before:
            self.round(record)

    def round(self, record: RoundRecord) -> None:
        """Note the events of the next round. A problem gives an event when it begins, not in every round."""
        found = []
        for kind, name, is_so, facts in self._findings(record):
            if is_so and (kind, name) not in self.said:
                found.append({"kind": kind, "name": name, **facts})
            (self.said.add if is_so else self.said.discard)((kind, name))
        self.noted = tuple(found)

    def _findings(self, record: RoundRecord) -> Iterator[Finding]:
        for name, accuracy, loss in _scores(record):
            best = self.best.get(name, 0.0)  # before this round: the current value is no fall
            self.best[name] = max(accuracy, best)
            luck = self.chance + self.noise  # accuracy of guessing; a model that never beat it cannot collapse to it
            had_learned = best - self.chance >= LEARNED * (1 - self.chance) and best > luck
            fell = had_learned and accuracy <= luck
            said = f"fell from {100 * best:.1f}% to {100 * accuracy:.1f}%, which is guessing: {ADVICE}"
            yield "collapsed", name, fell, {"accuracy": accuracy, "best": best, "reason": f"{name} {said}"}
            if loss is not None:
                yield self._growth("loss_grows", name, f"the loss of {name}", loss, self.guessing + ABOVE_GUESSING)
        at_once = len({str(f.get("client")) for f in record.failures if AT_ONCE in str(f.get("reason"))})
        said = f"{at_once} clients diverged at step 1 and {record.cohort} did not: "
        facts = {"clients": at_once, "reason": f"{said}was the model that was sent poisoned? See docs/robustness.md"}
        yield "diverged_at_once", "clients", at_once > 1 and at_once >= record.cohort, facts
        for event in record.events:
            if event["kind"] == "variates":
                P = event["architecture"]
                yield self._growth("variates_grow", P, f"the control variate of {P}", event["norm"], 0.0)

    def _growth(self, kind: str, name: str, what: str, value: float, above: float) -> Finding:
        least = self.least.get((kind, name), math.inf)
        grows = not math.isfinite(value) or (value > GROWTH * least and value > above)
        if value < least:
            self.least[kind, name] = value
        start = f" from {least:.3g}" if math.isfinite(least) else ""
        facts = {"least": least, "now": value}
        facts = {k: v for k, v in facts.items() if math.isfinite(v)}  # JSON has no nan and no infinity
        return kind, name, grows, {**facts, "reason": f"{what} has grown{start} to {value:.3g}: {ADVICE}"}


def _scores(record: RoundRecord) -> Iterator[tuple[str, float, float | None]]:
    """Name, accuracy and loss of every model that was evaluated in a round; of personal models, the mean."""
    for kind, word in (("model", ""), ("ensemble", "ensemble ")):
        for name, s in record.of(kind).items():
            yield f"{word}{name}", s["accuracy"], s["loss"]
    if "mean" in record.own:
        yield OWN, record.own["mean"], None
