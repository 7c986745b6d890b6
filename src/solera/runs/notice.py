"""Detects that a run goes wrong while every number is still finite: a model that falls back to guessing, a loss or
control variates (SCAFFOLD) that grow without bound, clients that diverge with the model that they are sent. The run
continues; the round and the report show an event.

The events of a round depend only on its metrics and the earlier ones, so a resumed run shows the same events.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..core.errors import AT_ONCE
from .callback import Callback
from .record import OWN, RoundRecord

LEARNED = 0.2  # share of the way from guessing to 100%: a model that never reached it cannot collapse
GROWTH = 10.0  # a loss or a variate that is this many times its smallest value so far grows without bound
ABOVE_GUESSING = 1.0  # a loss must also be this much above that of guessing: small losses vary by large factors
KINDS = ("collapsed", "loss_grows", "variates_grow", "diverged_at_once")  # the events of this module
ADVICE = "a lower learning rate may help"

Finding = tuple[str, str, bool, dict[str, Any]]  # kind, name of the model, whether it is the case, facts


class Notices(Callback):
    """Checks one round after another. `labels` are the numbers of test samples of each class."""

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
            best = self.best.get(name, 0.0)  # before this round: a model cannot fall from what it only reaches now
            self.best[name] = max(accuracy, best)
            luck = self.chance + self.noise  # what guessing reaches; a model that was never above it cannot fall to it
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
