"""Early stopping: a run ends at a target, or when nothing has improved for some rounds.

The decision depends only on the recorded rounds, so a resumed run stops at the same round. This module does not import
torch.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from ..core.settings import NonNegative, PositiveInt, Problem, settings
from .callback import Callback
from .record import RoundRecord, Score

STOPPED = "stopped"  # the event of the round that ended the run early


@settings
class StopConfig:
    """When to end a run early. `run.rounds` is always the limit; without a target and a patience the run reaches it."""

    target: NonNegative | None = None  # stop at or above this accuracy; at or below this loss
    patience: PositiveInt | None = None  # stop after so many rounds without a new best value
    metric: Literal["accuracy", "loss"] = "accuracy"  # which value is used
    split: Literal["validation", "test"] = "validation"  # on which data it is measured

    def problems(self) -> Iterator[Problem]:
        """Settings that contradict each other."""
        if self.target is not None and self.metric == "accuracy" and self.target > 1:
            yield f"target = {self.target:g}: an accuracy is a share, from 0 to 1"
        if not self.active and (self.metric, self.split) != ("accuracy", "validation"):
            yield "target and patience are not set, so metric and split have no effect: set one of the first two"

    @property
    def active(self) -> bool:
        """Whether the run may end early."""
        return self.target is not None or self.patience is not None


class Stopping(Callback):
    """Checks one round after another. `main` names the model that counts; without it, the mean over all models."""

    def __init__(self, config: StopConfig, main: str | None):
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
