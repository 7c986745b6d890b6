"""A search for hyper-parameters, fair to every method.

The rule is that of FedDF (appendix C.2): a grid of values, extended while the best lies at an edge. Every trial is
scored on validation samples: those of the server or, for methods with clients' own models, a part of each client's
training samples. Test samples are never looked at. All methods get as many trials as the one that needs most: the
others try values between the best ones. Trials are the runs of a sweep, so a search can be stopped and continued: which
trial comes next follows from the results so far.
"""

import dataclasses
import itertools
import json
import math
import random
import re
import statistics
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError, RunError
from ..core.files import read_file
from ..method import name_of
from ..runs.config import Config, load_config, to_toml
from ..runs.read import read_run
from ..runs.words import show
from .sweep import Planned, Tell, check_fits, check_unchanged, is_done, overrides_of, run_planned, with_run

CLIENT_VALIDATION = 0.2  # share of each client's training samples, for methods with own models
MOST_EXTENSIONS = 6  # steps beyond an edge
WINNERS = "tuned.json"
EDGE = 0.1  # of a random search: the outer part of a range, on a logarithmic scale
Point = tuple[tuple[str, Any], ...]  # the values of a trial, by key


@dataclasses.dataclass(frozen=True)
class Search:
    """The search for one method (or one row of a table)."""

    name: str
    set: dict[str, Any]  # its settings
    over: dict[str, list[Any]]  # key -> the values to begin with


@dataclasses.dataclass
class Found:
    """The trials of a search and their scores."""

    search: Search
    trials: dict[Point, float | None] = dataclasses.field(default_factory=dict)  # None: the trial failed
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def best(self) -> Point | None:
        """The best trial; of equal ones the first."""
        done = {p: s for p, s in self.trials.items() if s is not None}
        return max(done, key=lambda p: done[p]) if done else None


@dataclasses.dataclass(frozen=True)
class Tuning:
    """A search over several methods: all that determines it."""

    recipe: str | Path
    searches: tuple[Search, ...]
    changes: tuple[str, ...] = ()  # "key=value" for all trials
    seeds: tuple[int, ...] = (0,)
    draws: int | None = None  # a random search with so many trials to begin with; None: the grid


def tune(tuning: Tuning, out: Path, workers: int = 1, tell: Tell | None = None) -> list[Found]:
    """Search until the best value of every setting lies inside its range and every method had as many trials."""
    found = [Found(s) for s in tuning.searches]
    waiting = {f.search.name: _first(f.search, tuning.draws) for f in found}
    planned: dict[str, Planned] = {}
    while any(waiting.values()):
        new = [run for f in found for p in waiting[f.search.name] for run in _runs(tuning, f.search, p)]
        planned |= {run.name: run for run in new}
        check_unchanged(new, out)
        check_fits([run for run in new if not is_done(out / run.name)])
        run_planned(list(planned.values()), out, workers, tell, new)  # a trial that fails is a result: it has no score
        for f in found:
            for point in waiting[f.search.name]:
                f.trials[point] = _score([out / run.name for run in _runs(tuning, f.search, point)])
        waiting = {f.search.name: list(_further(f, tuning)) for f in found}
        if not any(waiting.values()):
            most = max(len(f.trials) for f in found)
            waiting = {f.search.name: list(_between(f, most - len(f.trials), tuning)) for f in found}
    for f in found:
        if len(f.trials) < max(len(other.trials) for other in found):
            f.notes.append("fewer trials than other methods: there is nothing between its values to try")
    return found


# ---- trials -----------------------------------------------------------------------------------------


def trial_config(tuning: Tuning, search: Search, point: Point, seed: int | None = None) -> Config:
    """The configuration of a trial: always scored on validation samples."""
    settings = overrides_of({**search.set, **dict(point)})
    seeded = [] if seed is None else [f"run.seed={seed}"]
    try:
        config = load_config(tuning.recipe, [*tuning.changes, *settings, *seeded])
    except ConfigError as e:
        raise ConfigError(f"{search.name}: {e}") from None
    data, patience = config.data, None
    if config.method.traits().personal:
        data = dataclasses.replace(data, client_validation=data.client_validation or CLIENT_VALIDATION)
    elif data.validation:  # a patience of all rounds never ends a run, and makes it score models on validation samples
        patience = config.run.rounds
    else:
        raise ConfigError(
            f"{search.name}: data.validation = 0: a search scores trials on the server's validation set, never on the "
            "test set; add --set data.validation=0.1"
        )
    stop = dataclasses.replace(config.run.stop, target=None, patience=patience, metric="accuracy", split="validation")
    return with_run(dataclasses.replace(config, data=data), stop=stop)


def _runs(tuning: Tuning, search: Search, point: Point) -> list[Planned]:
    told = ",".join(f"{key.removeprefix('method.')}={show(value)}" for key, value in point)
    folder = f"{safe(search.name)}/{safe(told)}"
    found = []
    for seed in tuning.seeds:
        config = trial_config(tuning, search, point, seed)
        config = with_run(config, name=config.run.name or safe(search.name))
        found.append(Planned(f"{folder}/s{seed}", search.name, {**search.set, **dict(point)}, config))
    return found


def safe(text: str) -> str:
    """Text as the name of a folder."""
    return re.sub(r"[^A-Za-z0-9.+_,=-]+", "-", text).strip("-.,")[:100] or "-"


def _score(homes: Sequence[Path]) -> float | None:
    """The accuracy on validation samples after the last round, mean over seeds; None if a run failed."""
    scores = []
    for home in homes:
        if not is_done(home):
            return None
        last = next((r for r in reversed(read_run(home).rounds) if r.scores), None)
        judged = last.of("validation") if last else {}
        if judged:
            scores.append(statistics.fmean(s["accuracy"] for s in judged.values()))
        elif last and "mean" in last.own:
            scores.append(last.own["mean"])
        else:
            return None
    return statistics.fmean(scores)


# ---- which trials -----------------------------------------------------------------------------------


def _first(search: Search, draws: int | None) -> list[Point]:
    if draws is None:
        return [tuple(zip(search.over, values, strict=True)) for values in itertools.product(*search.over.values())]
    rng = random.Random(f"tune {search.name}")
    ranges = {key: (min(values), max(values)) for key, values in search.over.items()}

    def drawn(low: float, high: float) -> float:  # uniform in its logarithm where both are positive; three digits
        value = math.exp(rng.uniform(math.log(low), math.log(high))) if low > 0 else rng.uniform(low, high)
        return float(f"{value:.3g}")

    return [tuple((key, drawn(*ranges[key])) for key in search.over) for _ in range(draws)]


def _further(found: Found, tuning: Tuning) -> Iterator[Point]:
    """Trials beyond an edge at which the best lies. The other settings stay those of the best."""
    best = found.best
    if best is None:
        if not found.notes:
            found.notes.append("no trial ended with a score")
        return
    for key, value in best:
        values = sorted({dict(p)[key] for p in found.trials})
        begun = found.search.over[key]
        if len(values) < 2 or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
            continue
        edge = _edge(values, value, tuning.draws is not None)
        if edge == 0:
            continue
        beyond = sum(v < min(begun) if edge < 0 else v > max(begun) for v in values)
        new = extended(values, edge)
        point = tuple((k, new if k == key else v) for k, v in best)
        note = f"{key} = {show(value)} is best and at the edge of what was tried"
        if beyond >= MOST_EXTENSIONS:
            note += f"; {MOST_EXTENSIONS} values beyond the grid were tried"
        elif not _valid(tuning, found.search, point):
            note += f"; {show(new)} is not a valid value"
        else:
            if point not in found.trials:
                yield point
            continue
        if note not in found.notes:
            found.notes.append(note)


def _edge(values: Sequence[float], best: float, drawn: bool) -> int:
    """-1 or 1 if the best value lies at the lower or upper edge, else 0."""
    low, high = values[0], values[-1]
    if not drawn:
        return -1 if best == low else 1 if best == high else 0
    share = math.log(best / low) / math.log(high / low) if low > 0 else (best - low) / (high - low)
    return -1 if share < EDGE else 1 if share > 1 - EDGE else 0


def extended(values: Sequence[float], edge: int) -> float:
    """The next value beyond an edge: by the same difference if the values are equally far apart, else by the ratio."""
    ordered = sorted(values)
    inner, outer = (ordered[1], ordered[0]) if edge < 0 else (ordered[-2], ordered[-1])
    gaps = [b - a for a, b in itertools.pairwise(ordered)]
    even = len(gaps) > 1 and max(gaps) - min(gaps) <= 1e-9 * max(map(abs, ordered))
    if even or inner <= 0 or outer <= 0:
        new = outer + (outer - inner)
    else:
        new = outer * (outer / inner)
    if all(isinstance(v, int) for v in values):
        return round(new)
    return float(f"{new:.6g}")


def _between(found: Found, count: int, tuning: Tuning) -> Iterator[Point]:
    """Up to `count` trials between the best value of a setting and its neighbours, one setting after another."""
    best = found.best
    if best is None or count <= 0:
        return
    new: list[Point] = []
    for key, value in best:
        values = sorted({dict(p)[key] for p in found.trials if isinstance(dict(p)[key], int | float)})
        if isinstance(value, bool) or value not in values:
            continue
        at = values.index(value)
        for other in values[max(0, at - 1) : at + 2]:
            middle: float = math.sqrt(value * other) if value > 0 and other > 0 else (value + other) / 2
            whole = isinstance(value, int) and isinstance(other, int)
            middle = round(middle) if whole else float(f"{middle:.3g}")
            point = tuple((k, middle if k == key else v) for k, v in best)
            if middle not in values and point not in found.trials and _valid(tuning, found.search, point):
                new.append(point)
    yield from new[:count]


def _valid(tuning: Tuning, search: Search, point: Point) -> bool:
    try:
        trial_config(tuning, search, point)
    except ConfigError:
        return False
    return True


# ---- the winners ------------------------------------------------------------------------------------


def write_winners(tuning: Tuning, found: Sequence[Found], out: Path) -> list[Path]:
    """Write each winner as a recipe, and all of them into tuned.json, which `solera reproduce --tuned` reads."""
    written, facts = [], {}
    try:
        for f in found:
            if f.best is None:
                continue
            settings = overrides_of({**f.search.set, **dict(f.best)})
            config = load_config(tuning.recipe, [*tuning.changes, *settings])
            told = ", ".join(f"{key} = {show(value)}" for key, value in f.best)
            score = f.trials[f.best]
            head = (
                f"# {f.search.name}: {told}, the best of {len(f.trials)} trials on validation samples "
                f"({100 * (score or 0):.2f} %).\n# Found by `solera tune {tuning.recipe}`.\n"
            )
            file = out / f"{safe(f.search.name)}.toml"
            file.write_text(head + to_toml(config), "utf-8")
            written.append(file)
            facts[f.search.name] = dict(f.best)
        index = {"recipe": str(tuning.recipe), "rows": facts}
        (out / WINNERS).write_text(json.dumps(index, indent=1, ensure_ascii=False), "utf-8")
    except OSError as e:
        raise RunError(f"{out} cannot be written: {e.strerror}") from None
    return written


def read_tuned(folder: Path, recipe: str) -> dict[str, dict[str, Any]]:
    """The settings that a search has found for the rows of a recipe."""
    file = folder / WINNERS
    try:
        index = json.loads(read_file(file))
        rows = {str(row): dict(settings) for row, settings in index["rows"].items()}
    except OSError:
        raise ConfigError(f"--tuned {folder}: there is no {WINNERS} in it; `solera tune {recipe}` writes one") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"--tuned {folder}: {WINNERS} was not written by `solera tune`") from None
    if index.get("recipe") != recipe:
        raise ConfigError(f"--tuned {folder}: this search was over {index.get('recipe')}, not {recipe}")
    return rows


# ---- from the command line and from [paper] ---------------------------------------------------------


def searches_of_paper(recipe: str, rows: Sequence[str], column: str | None) -> list[Search]:
    """The searches of a recipe's table: of every row (or those named) whose settings the paper does not state."""
    from .papers import load_paper

    paper = load_paper(recipe)
    columns = [c.name for c in paper.columns]
    if column is None:
        column = columns[0]
    elif column not in columns:
        near = [c for c in columns if column.lower() in c.lower()]
        if not near:
            raise ConfigError(f"{recipe} has no column {column!r}; there are: {'; '.join(columns)}")
        column = near[0]
    found = [Search(c.row, c.set, c.tune) for c in paper.cells() if c.column == column and c.tune]
    if not found:
        raise ConfigError(f"{recipe}: no row has settings to search for; name them: --over method.local.lr=0.01,0.1,1")
    wanted = [s for s in found if not rows or any(text.lower() in s.name.lower() for text in rows)]
    if not wanted:
        raise ConfigError(
            f"{recipe}: no row to tune is named {', '.join(rows)}; there are: {'; '.join(s.name for s in found)}"
        )
    return wanted


def searches_of(over: Sequence[str], methods: Sequence[str], recipe: str | Path) -> list[Search]:
    """The searches of --over KEY=V1,V2 for each of the methods."""
    axes: dict[str, list[Any]] = {}
    for text in over:
        key, equals, values = (part.strip() for part in text.partition("="))
        try:
            axes[key] = tomllib.loads(f"v = [{values}]")["v"]
        except tomllib.TOMLDecodeError:
            axes[key] = [v.strip() for v in values.split(",")]
        if not equals or len(axes[key]) < 2 or len({json.dumps(v) for v in axes[key]}) < len(axes[key]):
            raise ConfigError(f"--over {text}: expected KEY=V1,V2,... with at least two different values")
    if not methods:
        return [Search(name_of(load_config(recipe).method), {}, axes)]
    return [Search(name, {"method.name": name}, axes) for name in methods]


def as_json(found: Sequence[Found]) -> list[dict[str, Any]]:
    """The searches for programs."""
    return [
        {
            "name": f.search.name,
            "best": None if f.best is None else dict(f.best),
            "score": None if f.best is None else f.trials[f.best],
            "trials": [{"settings": dict(p), "score": s} for p, s in f.trials.items()],
            "notes": f.notes,
        }
        for f in found
    ]


def check_tuning(tuning: Tuning) -> None:
    """Refuse a search that cannot work, before any trial."""
    if tuning.draws is not None:
        for search in tuning.searches:
            for key, values in search.over.items():
                if not all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
                    raise ConfigError(f"--random: {key} = {show(values)} are not numbers; leave out --random")
    for search in tuning.searches:
        for point in _first(search, tuning.draws):
            trial_config(tuning, search, point)
