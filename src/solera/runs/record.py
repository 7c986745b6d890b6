"""The record of one round: the typed form of a line of metrics.jsonl, and the only code that writes and reads such a
line.

Measurements are a list of rows, (kind, name, metric, value). On disk they are grouped under one key for each kind, as
docs/run-directory.md documents it for other programs. This module does not import torch.
"""

import dataclasses
import errno
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..core.files import open_file, read_file

FORMAT = 2  # of a run directory; 1: checkpoints did not say which client state belongs to them
FILE = "metrics.jsonl"
MAX_BYTES = 1 << 28  # of a metrics.jsonl that is shown
MAX_LINE = 1 << 26  # a round with ten thousand clients takes a few megabytes
MAX_MODELS = 4096  # in one round: each is a row of a table
WAYS = ("down", "up")
OWN = "own models"  # the name for all clients' own models together
KEYS = {
    "model": "models",
    "ensemble": "ensembles",
    "average": "averages",
    "validation": "validation",
    "stage": "personal_stages",
    "diversity": "diversity",
}
JUDGED = ("model", "ensemble", "average", "validation")  # evaluated by the server: with accuracy and loss

FAILURE = {"client": str, "task": str, "reason": str}
EVENT = {"kind": str}
EVENTS: dict[str, dict[str, Any]] = {  # the fields of events that a resumed run reads
    "public_sent": EVENT | {"clients": list},
    "variates": EVENT | {"architecture": str, "norm": int | float},
    "stopped": EVENT | {"reason": str},
    "round_empty": EVENT | {"reason": str},
}


class Score(NamedTuple):
    """One measurement. Its kind is

    model      of a model that the method reports
    ensemble   of an ensemble of several models
    average    of an average of the clients' models before distillation
    validation of a model on the server's validation set, if run.stop uses it
    diversity  of the members of an ensemble: how often two of them disagree, and their KL divergence
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
    """The traffic of a round, "down" to the clients and "up" from them."""

    bytes: dict[str, dict[str, int]]  # by way and task
    floats: dict[str, int]  # by way
    integers: dict[str, int]
    content: dict[str, dict[str, int]] = dataclasses.field(  # bytes by way and kind: data, parameters, predictions
        default_factory=lambda: {way: {} for way in WAYS}
    )

    def sent(self, *ways: str) -> int:
        """The bytes sent in these directions; without arguments, in both."""
        return sum(sum(self.bytes[way].values()) for way in ways or WAYS)


@dataclasses.dataclass(frozen=True)
class RoundRecord:
    """The record of one round. A round that was not evaluated has no scores."""

    round: int  # counted from 0
    cohort: int  # how many clients gave a valid reply
    scores: list[Score]
    traffic: Traffic
    seconds: dict[str, float]  # by phase, and "total"
    failures: list[dict[str, Any]]  # client, task and reason of every lost reply
    events: list[dict[str, Any]]  # kind and facts
    privacy: dict[str, Any] = dataclasses.field(default_factory=dict)  # the privacy budget spent, if there is one
    simulated: dict[str, float] = dataclasses.field(default_factory=dict)  # by the simulated clock, if any
    cpu_s: float | None = None  # processor seconds of the server's process
    callbacks: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)  # numbers by callback and name
    kinds: dict[str, str] = dataclasses.field(default_factory=dict)  # models that are not one for all: part, server

    def of(self, kind: str) -> dict[str, dict[str, float]]:
        """The scores of one kind: name -> metric -> value."""
        found: dict[str, dict[str, float]] = {}
        for s in self.scores:
            if s.kind == kind:
                found.setdefault(s.name, {})[s.metric] = s.value
        return found

    @property
    def own(self) -> dict[str, float]:
        """The scores of all clients' own models together, by metric."""
        return self.of("own").get(OWN, {})

    def accuracies(self) -> dict[str, float]:
        """Accuracy by display name; of the clients' own models, the mean."""
        found = {name: s["accuracy"] for name, s in self.of("model").items()}
        found |= {f"ensemble {name}": s["accuracy"] for name, s in self.of("ensemble").items()}
        if "mean" in self.own:
            found[OWN] = self.own["mean"]
        return found

    # -- on disk --

    def to_line(self) -> str:
        """The round as a line of metrics.jsonl, without the line break."""
        line: dict[str, Any] = {"round": self.round, **dataclasses.asdict(self.traffic), "cohort": self.cohort}
        if not any(self.traffic.content.values()):
            del line["content"]
        if self.scores:
            line |= {KEYS[kind]: self.of(kind) for kind in ("model", "ensemble")}  # present in every evaluated round
            line |= {KEYS[kind]: found for kind in ("average", "validation", "diversity") if (found := self.of(kind))}
            line |= {"personal": self.own} if self.own else {}
            line |= {"kinds": self.kinds} if self.kinds else {}
            line |= {KEYS["stage"]: found} if (found := self.of("stage")) else {}
            each = {name: s["accuracy"] for name, s in self.of("client").items()}
            line |= {"personal_accuracies": each} if each else {}
        line["seconds"] = self.seconds
        line |= {"simulated": self.simulated} if self.simulated else {}
        line |= {} if self.cpu_s is None else {"cpu_s": self.cpu_s}
        line |= {"privacy": self.privacy} if self.privacy else {}
        line |= {"callbacks": self.callbacks} if self.callbacks else {}
        return json.dumps(line | {"failures": self.failures, "events": self.events})

    @classmethod
    def from_line(cls, text: str | bytes) -> "RoundRecord":
        """The round in a line of metrics.jsonl. Raises ValueError for anything else.

        Fields that an older version did not write are empty, and unknown keys are ignored.
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
                _by_way(sent),
                _totals(line.get("floats") or {}),
                _totals(line.get("integers") or {}),
                _by_way(line.get("content") or {}),
            ),
            seconds={str(k): duration(s) for k, s in (line.get("seconds") or {}).items()},
            failures=[_with(row, FAILURE) for row in line.get("failures") or ()],
            events=[_with(row, EVENTS.get(row["kind"], EVENT)) for row in line.get("events") or ()],
            privacy=dict(line.get("privacy") or {}),
            simulated={str(k): duration(s) for k, s in (line.get("simulated") or {}).items()},
            cpu_s=None if cpu is None else duration(cpu),
            callbacks={
                str(name): {str(key): finite(value) for key, value in numbers.items()}
                for name, numbers in (line.get("callbacks") or {}).items()
            },
            kinds={str(name): kind for name, kind in (line.get("kinds") or {}).items() if kind in ("part", "server")},
        )


def _with(row: dict[str, Any], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a line, if its required values are present and have the right type."""
    for key, kind in kinds.items():
        if not isinstance(row[key], kind):
            raise ValueError(f"{key} = {str(row[key])[:40]!r} of a failure or an event is of the wrong kind")
    return row


def _by_way(table: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    return {way: {str(k): int(n) for k, n in (table.get(way) or {}).items()} for way in WAYS}


def _totals(table: Mapping[str, Any]) -> dict[str, int]:
    return {way: int(table.get(way, 0)) for way in WAYS}


def _scores(line: Mapping[str, Any]) -> Iterator[Score]:
    for kind in JUDGED:
        if len(judged := line.get(KEYS[kind]) or {}) > MAX_MODELS:
            raise ValueError(f"{len(judged)} {KEYS[kind]}: at most {MAX_MODELS} are read")
        for name, s in judged.items():
            measured = {"accuracy": finite(s["accuracy"]), "loss": math.nan if s.get("loss") is None else s["loss"]}
            yield from scores(kind, str(name), {**s, **measured})
    for name, s in (line.get(KEYS["diversity"]) or {}).items():
        yield from scores("diversity", str(name), {metric: finite(value) for metric, value in s.items()})
    yield from _spread("own", OWN, line.get("personal") or {})
    for stage, spread in (line.get(KEYS["stage"]) or {}).items():
        yield from _spread("stage", str(stage), spread)
    for client, accuracy in (line.get("personal_accuracies") or {}).items():
        yield Score("client", str(client), "accuracy", finite(accuracy))


def _spread(kind: str, name: str, spread: Mapping[str, Any]) -> Iterator[Score]:
    if "mean" in spread:  # the accuracy that is reported for all of them
        finite(spread["mean"])
    return scores(kind, name, spread)


def scores(kind: str, name: str, measured: Mapping[str, float]) -> Iterator[Score]:
    """The rows for one model or group of models, from its values by metric."""
    for metric, value in measured.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"{metric} of {name[:40]} is {str(value)[:40]!r}, not a number")
        yield Score(kind, name, str(metric), value)


# ---- the file ---------------------------------------------------------------------------------------


def each_line(home: Path, most: int | None = MAX_BYTES) -> Iterator[RoundRecord | None]:
    """The lines of metrics.jsonl one by one; None for an invalid line. Raises OSError as `files` does.

    If the file grows meanwhile, it is read up to its size at the time of opening.
    """
    with open_file(home / FILE, most) as file:
        left = os.fstat(file.fileno()).st_size
        while left > 0 and (line := file.readline(min(left, MAX_LINE))):
            left -= len(line)
            if len(line) == MAX_LINE and not line.endswith(b"\n"):
                raise OSError(errno.EFBIG, f"a line of more than {MAX_LINE / 1e6:.0f} MB", str(home / FILE))
            try:
                yield RoundRecord.from_line(line)
            except ValueError:
                yield None


def read_records(home: Path, missing: list[str]) -> list[RoundRecord]:
    """The rounds of a run directory in order, each once. What cannot be read is added to `missing`."""
    rounds: dict[int, RoundRecord] = {}
    bad = 0
    try:
        for record in each_line(home):
            if record is None:
                bad += 1
            else:
                rounds[record.round] = record  # a round that was re-run counts once
    except FileNotFoundError:
        missing.append(f"{FILE} does not exist: no round is finished")
    except OSError as e:
        missing.append(f"{FILE} cannot be read ({e.strerror})")
    if bad:
        missing.append(f"{FILE} has {bad} line{'s' if bad > 1 else ''} that cannot be read")
    return [rounds[t] for t in sorted(rounds)]


def count_lines(home: Path) -> int:
    """The number of lines, without parsing them: for watching many runs."""
    try:
        return read_file(home / FILE, None).count(b"\n")
    except OSError:
        return 0


def write_records(records: Iterable[RoundRecord]) -> bytes:
    """The content of a metrics.jsonl with these rounds."""
    return "".join(record.to_line() + "\n" for record in records).encode()


# ---- numbers in a file ------------------------------------------------------------------------------


def whole(value: Any) -> int:
    """Return a count; raise ValueError if it is not one."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{str(value)[:40]!r} is not a count")
    return value


def finite(value: Any) -> int | float:
    """Return a finite number; raise ValueError otherwise. (Only a loss may be `nan`, when a model has diverged.)"""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{str(value)[:40]!r} is not a number")
    return value


def duration(value: Any) -> float:
    """Return seconds; raise ValueError if they are invalid."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not (value >= 0 and math.isfinite(value)):
        raise ValueError(f"{str(value)[:40]!r} is not a duration")
    return float(value)
