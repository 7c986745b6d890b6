"""One round of a run as it is recorded: the typed form of a line of metrics.jsonl, and the only code that writes and
reads such a line.

What was measured is a list of rows, (kind, name, metric, value). On the disk these are grouped under a key for each
kind, as docs/run-directory.md says, because other people's scripts read them there. Nothing here imports torch.
"""

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..files import open_file, read_file

FORMAT = 2  # of a run directory; 1: checkpoints did not say which client state belongs to them
FORMATS = (1, FORMAT)  # those of version 0.1 are read as well
FILE = "metrics.jsonl"
MAX_BYTES = 1 << 30  # a metrics.jsonl beyond this is not one of ours
WAYS = ("down", "up")
OWN = "own models"  # the name of the clients' own models, taken together
KEYS = {
    "model": "models",
    "ensemble": "ensembles",
    "average": "averages",
    "validation": "validation",
    "stage": "personal_stages",
}
JUDGED = ("model", "ensemble", "average", "validation")  # by the server: they have an accuracy and a loss


class Score(NamedTuple):
    """One measurement. Its kind is

    model      of a model that the method reports
    ensemble   of several models that answer together
    average    of an average of the clients' models before it was distilled
    validation of a model on the server's validation set, where the run may end by it
    own        of the clients' own models, each on its own test split: both means, the spread, how many were scored
    stage      the same at one stage of the round
    client     of one client's own model
    """

    kind: str
    name: str
    metric: str
    value: float


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What travelled in a round, "down" to the clients and "up" from them."""

    bytes: dict[str, dict[str, int]]  # by way and task
    floats: dict[str, int]  # by way
    integers: dict[str, int]

    def sent(self, *ways: str) -> int:
        """The bytes that went these ways; without any, both."""
        return sum(sum(self.bytes[way].values()) for way in ways or WAYS)


@dataclasses.dataclass(frozen=True)
class RoundRecord:
    """What is recorded of one round. A round that was not evaluated has no scores."""

    round: int  # counted from 0
    cohort: int  # how many clients gave a valid reply
    scores: list[Score]
    traffic: Traffic
    seconds: dict[str, float]  # by phase, and "total"
    failures: list[dict[str, Any]]  # client, task and reason of every lost reply
    events: list[dict[str, Any]]  # kind and facts
    privacy: dict[str, Any] = dataclasses.field(default_factory=dict)  # what was spent of a budget, if there is one
    cpu_s: float | None = None  # processor seconds of the server's process

    def of(self, kind: str) -> dict[str, dict[str, float]]:
        """The scores of one kind: name -> metric -> value."""
        found: dict[str, dict[str, float]] = {}
        for s in self.scores:
            if s.kind == kind:
                found.setdefault(s.name, {})[s.metric] = s.value
        return found

    @property
    def own(self) -> dict[str, float]:
        """What was measured of the clients' own models together, by metric."""
        return self.of("own").get(OWN, {})

    def accuracies(self) -> dict[str, float]:
        """Accuracy by the name that people are shown; of the clients' own models their mean."""
        found = {name: s["accuracy"] for name, s in self.of("model").items()}
        found |= {f"ensemble {name}": s["accuracy"] for name, s in self.of("ensemble").items()}
        if "mean" in self.own:
            found[OWN] = self.own["mean"]
        return found

    # -- on the disk --

    def to_line(self) -> str:
        """The round as a line of metrics.jsonl, without its end."""
        line: dict[str, Any] = {"round": self.round, **dataclasses.asdict(self.traffic), "cohort": self.cohort}
        if self.scores:
            line |= {KEYS[kind]: self.of(kind) for kind in ("model", "ensemble")}  # there whenever it was evaluated
            line |= {KEYS[kind]: found for kind in ("average", "validation") if (found := self.of(kind))}
            line |= {"personal": self.own} if self.own else {}
            line |= {KEYS["stage"]: found} if (found := self.of("stage")) else {}
            each = {name: s["accuracy"] for name, s in self.of("client").items()}
            line |= {"personal_accuracies": each} if each else {}
        line["seconds"] = self.seconds
        line |= {} if self.cpu_s is None else {"cpu_s": self.cpu_s}
        line |= {"privacy": self.privacy} if self.privacy else {}
        return json.dumps(line | {"failures": self.failures, "events": self.events})

    @classmethod
    def from_line(cls, text: str | bytes) -> "RoundRecord":
        """The round in a line of metrics.jsonl, of this version or of 0.1; a ValueError if it is something else.

        What an older version did not write is empty, and keys that are not known are left alone.
        """
        try:
            return cls._parse(json.loads(text))
        except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as e:
            raise ValueError(f"not a round's line: {type(e).__name__} {str(e)[:80]}") from None

    @classmethod
    def _parse(cls, line: dict[str, Any]) -> "RoundRecord":
        sent, cpu = line.get("bytes") or {}, line.get("cpu_s")
        return cls(
            round=whole(line["round"]),
            cohort=whole(line.get("cohort", 0)),
            scores=list(_scores(line)),
            traffic=Traffic(
                {way: {str(k): int(n) for k, n in (sent.get(way) or {}).items()} for way in WAYS},
                *({way: int((line.get(key) or {}).get(way, 0)) for way in WAYS} for key in ("floats", "integers")),
            ),
            seconds={str(k): duration(s) for k, s in (line.get("seconds") or {}).items()},
            failures=[f for f in line.get("failures") or [] if isinstance(f, dict)],
            events=[e for e in line.get("events") or [] if isinstance(e, dict)],
            privacy=dict(line.get("privacy") or {}),
            cpu_s=None if cpu is None else duration(cpu),
        )


def _scores(line: Mapping[str, Any]) -> Iterator[Score]:
    for kind in JUDGED:
        for name, s in (line.get(KEYS[kind]) or {}).items():
            measured = {"accuracy": finite(s["accuracy"]), "loss": math.nan if s.get("loss") is None else s["loss"]}
            yield from scores(kind, str(name), {**s, **measured})
    yield from _spread("own", OWN, line.get("personal") or {})
    for stage, spread in (line.get(KEYS["stage"]) or {}).items():
        yield from _spread("stage", str(stage), spread)
    for client, accuracy in (line.get("personal_accuracies") or {}).items():
        yield Score("client", str(client), "accuracy", finite(accuracy))


def _spread(kind: str, name: str, spread: Mapping[str, Any]) -> Iterator[Score]:
    if "mean" in spread:  # the accuracy that stands for all of them
        finite(spread["mean"])
    return scores(kind, name, spread)


def scores(kind: str, name: str, measured: Mapping[str, float]) -> Iterator[Score]:
    """The rows of one thing that was measured: value by metric."""
    for metric, value in measured.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"{metric} of {name[:40]} is {str(value)[:40]!r}, no number")
        yield Score(kind, name, str(metric), value)


# ---- the file ---------------------------------------------------------------------------------------


def each_line(home: Path, most: int | None = MAX_BYTES) -> Iterator[RoundRecord | None]:
    """The lines of a run directory's metrics.jsonl one by one; None for one that is no round's. OSError as in `files`.

    A file that grows meanwhile is read as far as it was when it was opened.
    """
    with open_file(home / FILE, most) as file:
        left = os.fstat(file.fileno()).st_size
        while left > 0 and (line := file.readline(left)):
            left -= len(line)
            try:
                yield RoundRecord.from_line(line)
            except ValueError:
                yield None


def read_records(home: Path, missing: list[str]) -> list[RoundRecord]:
    """The rounds of a run directory in order, each once; `missing` says what cannot be read."""
    rounds: dict[int, RoundRecord] = {}
    bad = 0
    try:
        for record in each_line(home):
            if record is None:
                bad += 1
            else:
                rounds[record.round] = record  # a round that was run again counts once
    except FileNotFoundError:
        missing.append(f"{FILE} is not there: no round is done")
    except OSError as e:
        missing.append(f"{FILE} cannot be read ({e.strerror})")
    if bad:
        missing.append(f"{FILE} has {bad} line{'s' if bad > 1 else ''} that cannot be read")
    return [rounds[t] for t in sorted(rounds)]


def count_lines(home: Path) -> int:
    """How many lines there are, for whoever watches many runs and need not know what they say."""
    try:
        return read_file(home / FILE, None).count(b"\n")
    except OSError:
        return 0


def write_records(records: Iterable[RoundRecord]) -> bytes:
    """What a metrics.jsonl of these rounds holds."""
    return "".join(record.to_line() + "\n" for record in records).encode()


# ---- numbers that a file may hold -------------------------------------------------------------------


def whole(value: Any) -> int:
    """A count; a ValueError if it is none."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{str(value)[:40]!r} is no count")
    return value


def finite(value: Any) -> int | float:
    """What a run measures is a number; only a loss may be none (`nan`), when a model has diverged."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{str(value)[:40]!r} is no number")
    return value


def duration(value: Any) -> float:
    """Seconds; a ValueError if they are none."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not (value >= 0 and math.isfinite(value)):
        raise ValueError(f"{str(value)[:40]!r} is no time")
    return float(value)
