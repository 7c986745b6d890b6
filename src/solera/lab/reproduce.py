"""A table of a paper, run: every cell a configuration, our numbers beside the printed ones.

`plan_table` turns the [paper] table of a recipe into runs (cells with equal settings share one), `collect` reads the
numbers out of the run directories. The runs of a table are a sweep: `run_planned` runs them, and they are resumed,
compared and reported like one. A cell that was not run says why.
"""

import dataclasses
import json
import math
import re
import statistics
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from ..core.errors import ConfigError, RunError, SoleraError
from ..data.catalogue import SOURCES
from ..data.encodings import VOCABULARY
from ..models import MODELS, build
from ..runs.config import PAPER, Config, load_config, merged, recipe_text, to_toml, without_stand_ins
from ..runs.facts import sampled
from ..runs.groups import group_runs
from ..runs.read import Run, read_run
from ..runs.results import Lines, Result, compared_results, spent
from ..runs.words import NOT_RUN, StandIns, flat, listed
from ..scenario.scenario import Scenario
from ..train.distill import Distill
from ..train.fitting import Local
from .papers import NOT_PRINTED, PAPERS, Cell, Paper, load_paper, paper_names
from .scales import CLASSES, EMBEDDED, rows_of, scaled, scaled_round, told
from .sweep import Planned, apart, is_done, overrides_of, unfit, with_run

# ---- An estimate of the time that runs take on one core: a training step of each model is timed, and counted


MEASURE_S = 0.15  # time for one measurement, after a first step that does not count
HELD_OUT = 0.2  # of the training samples, where the public samples are held out and their number is unset


class Shape(NamedTuple):
    """All that the time of a step depends on."""

    model: str
    norm: str
    head: str
    classes: int
    shape: tuple[int, ...]
    batch: int
    training: bool


def _seconds_of_step(what: Shape) -> float:
    """The seconds of one training step (or, without training, of one prediction) of a batch."""
    text = MODELS[what.model].kind == "text"
    vocabulary = VOCABULARY if text else None
    model = build(what.model, what.classes, what.shape, what.norm, what.head, vocabulary=vocabulary)  # type: ignore[arg-type]
    g = torch.Generator().manual_seed(0)
    size = (what.batch, *what.shape)
    inputs = torch.randint(0, VOCABULARY, size, generator=g) if text else torch.randn(size, generator=g)
    labels = torch.randint(0, what.classes, (what.batch,), generator=g)
    model.train(what.training)

    def once() -> None:
        if what.training:
            model.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
        else:
            with torch.no_grad():
                model(inputs)

    once()
    began, count = time.perf_counter(), 0
    while not count or time.perf_counter() - began < MEASURE_S:
        once()
        count += 1
    return (time.perf_counter() - began) / count


def work_of(config: Config) -> tuple[list[tuple[float, Shape]], list[str]]:
    """The steps of a run, how many of which, and its models that are not in the zoo, whose steps are not counted.

    It follows from the configuration alone: no data is read."""
    method, models, data = config.method, config.models, config.data
    rows = rows_of(config) or (10_000, 2_000)
    info = SOURCES.get(data.name)
    classes, shape = (info.classes or CLASSES, tuple(info.shape)) if info else (CLASSES, (3, 32, 32))
    clients = config.partition.clients or 100
    public, open_info = 0, SOURCES.get(config.public.name or "")
    if config.public.source != "none":
        whole = open_info.rows[0] if open_info and open_info.rows else int(HELD_OUT * rows[0])
        public = int((config.public.size or whole) * config.public.fraction)
    held = public if config.public.source == "held-out" else 0
    private = max(1.0, rows[0] * (1 - data.validation) - held) / clients * (1 - data.kept_for_tests)
    private *= getattr(config.partition, "fraction", 1.0)
    cohort, rounds = config.federation.cohort(clients), config.run.rounds
    steps: list[tuple[float, Shape]] = []

    def add(count: float, model: str, batch: int, training: bool) -> None:
        steps.append((count, Shape(model, models.norm, models.head, classes, shape, batch, training)))

    def trained(model: str, local: Local, samples: float, times: float) -> None:
        each = local.steps if local.steps is not None else local.epochs * math.ceil(samples / local.batch)
        add(times * each, model, min(local.batch, max(1, math.ceil(samples))), True)

    known = [name for name in models.clients if name in MODELS]
    share = cohort * rounds / len(models.clients)
    local, distill, fusion = (getattr(method, name, None) for name in ("local", "distill", "fusion"))
    per_round = min(public, config.public.per_round or public)
    server = models.server if models.server in MODELS else None
    for name in known:
        if isinstance(local, Local):
            trained(name, local, private, share)
        if isinstance(distill, Local):
            trained(name, distill, per_round, share)
        if isinstance(fusion, Distill):
            asked = min(public, fusion.steps * fusion.batch)
            add(share * asked / fusion.batch, name, fusion.batch, False)
        if name != server:
            add(rounds / config.run.eval_every * rows[1] / 128 / len(known), name, 128, False)
    students = dict.fromkeys([server] if server else known)
    if isinstance(fusion, Distill):
        for name in students:
            add(rounds * fusion.steps, name, fusion.batch, True)
    if server:
        add(rounds / config.run.eval_every * rows[1] / 128, server, 128, False)
    unknown = [n for n in dict.fromkeys([*models.clients, models.server]) if n is not None and n not in MODELS]
    return steps, unknown


def estimated(texts: Iterable[str]) -> dict[str, Any]:
    """The seconds of runs on one core, from their configurations as TOML. The result is JSON: it comes from a process
    of its own. "unknown": models that are not counted; "steps": the measured training steps."""
    measured: dict[Shape, float] = {}
    seconds, unknown = [], []
    for text in texts:
        steps, strange = work_of(load_config(tomllib.loads(text)))
        unknown += strange
        measured |= {
            what: _seconds_of_step(what) for what in dict.fromkeys(w for n, w in steps if n) if what not in measured
        }
        seconds.append(sum(count * measured[what] for count, what in steps if count))
    trained = [[w.model, w.batch, s] for w, s in measured.items() if w.training]
    return {"seconds": seconds, "unknown": list(dict.fromkeys(unknown)), "steps": trained}


ALL = "all"
RESULT = "table.json"
AVERAGE = "average"  # measured: the average of clients' models, before distillation
CONTENTS = ("data", "parameters", "predictions")  # of megabytes
RUN = "run"  # the verdict on a cell with the paper's settings and data; otherwise NOT_RUN
KINDS = {"model": ("mean", "model", "part"), "server": ("server",), "ensemble": ("ensemble",), "own": ("own",)}


@dataclasses.dataclass(frozen=True)
class PlannedCell:
    """A cell, and the runs that give its number."""

    cell: Cell
    at: str | int  # the cell's, at this scale
    config: Config | None  # of the first seed; None: it cannot be run
    runs: tuple[str, ...] = ()  # names of the runs, one for each seed
    reason: str = ""  # why it is not run
    changed: bool = False  # whether its settings are not the paper's


@dataclasses.dataclass(frozen=True)
class PlannedTable:
    """A table at a scale, with all of its runs."""

    paper: Paper
    scale: str
    cells: tuple[PlannedCell, ...]
    runs: tuple[Planned, ...]
    changes: dict[str, tuple[Any, Any]]  # of the recipe itself: key -> the paper's value, ours
    stand_ins: dict[str, str]

    def without(self, reasons: Mapping[str, str]) -> "PlannedTable":
        """The table without the runs in `reasons` (run -> why)."""
        cells = []
        for c in self.cells:
            why = next((reasons[name] for name in c.runs if name in reasons), None)
            cells.append(c if why is None else dataclasses.replace(c, runs=(), reason=why))
        kept = {name for c in cells for name in c.runs}
        return dataclasses.replace(self, cells=tuple(cells), runs=tuple(r for r in self.runs if r.name in kept))


def items(name: str) -> list[str]:
    """The recipes that `name` stands for: a table or figure, all of a paper, or all."""
    known = paper_names()
    if name == ALL:
        return known
    if name in known:
        return [name]
    papers = [load_paper(n) for n in known]
    if found := [p.recipe for p in papers if name == p.paper or name in p.names]:
        return found
    load_paper(name)  # raises: it is none
    return []


def plan_table(
    paper: Paper,
    scale: str = "full",
    seeds: int | None = None,
    tuned: Mapping[str, Mapping[str, Any]] | None = None,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
) -> PlannedTable:
    """The cells of a table and their runs. `tuned` are settings of rows that a search found; `rows` and `columns`
    choose cells by a part of their names."""
    count = seeds or (paper.seeds if scale == "full" else 1)
    chosen = _choose(paper, rows, columns)
    extra = paper.scales.get(scale)
    recipe = merged(paper.recipe)  # read once
    base = scaled(load_config(recipe), scale, extra)
    stand_ins, cells = dict(base.stand_ins), []
    runs: dict[str, Planned] = {}
    folders: dict[str, str] = {}  # a configuration -> the folder of its runs
    for cell in paper.cells():
        reason = cell.skip or (extra.skip if extra else "")
        if (cell.row, cell.column) not in chosen:
            reason = "not asked for"
        if reason:
            cells.append(PlannedCell(cell, cell.at, None, (), reason))
            continue
        setting = cell.set | dict((tuned or {}).get(cell.tuned_as, {}))
        try:
            whole = load_config(recipe, overrides_of(setting))
            shrunk = scaled(whole, scale, extra)
        except ConfigError as e:
            raise ConfigError(f"{paper.recipe}: {cell.row}, {cell.column}: {e}") from None
        stand_ins |= shrunk.stand_ins
        if extra is not None and extra.target is not None and cell.target is not None:
            cell = dataclasses.replace(cell, target=extra.target)
        at = cell.at
        if isinstance(at, int):
            at = scaled_round(at, whole.run.rounds, shrunk.config.run.rounds)
        config = shrunk.config
        if not config.run.name:
            config = with_run(config, name=paper.recipe.replace("/", "-"))
        text = to_toml(with_run(without_stand_ins(config), seed=0))  # two cells may have one run at a smaller scale
        folder = folders.setdefault(text, _folder(cell, set(folders.values())))
        names = []
        for seed in range(count) if paper.trains else ():
            run = Planned(f"{folder}/s{seed}", f"{cell.row}, {cell.column}", setting, with_run(config, seed=seed))
            runs.setdefault(run.name, run)
            names.append(run.name)
        changed = any(not key.startswith("engine.") for key in shrunk.changes) or bool(shrunk.stand_ins)
        cells.append(PlannedCell(cell, at, config, tuple(names), changed=changed))
    return PlannedTable(paper, scale, tuple(cells), tuple(runs.values()), base.changes, stand_ins)


def _choose(paper: Paper, rows: Sequence[str], columns: Sequence[str]) -> set[tuple[str, str]]:
    """The cells whose row and column have one of these texts in their names."""
    chosen: list[list[str]] = []
    for what, parts, wanted in (("row", paper.rows, rows), ("column", paper.columns, columns)):
        names = [p.name for p in parts]
        for text in wanted:
            if not any(text.lower() in name.lower() for name in names):
                raise ConfigError(f"{paper.recipe} has no {what} {text!r}; there are: {'; '.join(names)}")
        chosen.append([n for n in names if not wanted or any(text.lower() in n.lower() for text in wanted)])
    return {(row, column) for row in chosen[0] for column in chosen[1]}


def _folder(cell: Cell, taken: set[str]) -> str:
    """A readable name for the runs of a cell, unlike the others'."""
    plain = cell.row if cell.column == "result" else f"{cell.row},{cell.column}"
    stem = re.sub(r"[^A-Za-z0-9.+_,=-]+", "-", plain.replace("α", "a").replace(" = ", "=")).strip("-,.")[:80]
    name, n = stem, 1
    while name.lower() in {t.lower() for t in taken}:
        n += 1
        name = f"{stem}-{n}"
    return name


# ---- running ----------------------------------------------------------------------------------------


def missing(table: PlannedTable, out: Path) -> dict[str, str]:
    """The runs that cannot be run, with the reason: data or weights that are not there, settings that do not fit. Runs
    that are done are not looked at."""
    todo = [run for run in table.runs if not is_done(out / run.name)]
    folders = {name.rpartition("/")[0]: why for name, (why, _) in unfit(todo).items()}
    return {run.name: folders[f] for run in todo if (f := run.name.rpartition("/")[0]) in folders}


class Plan(NamedTuple):
    """The runs to be done, before they start."""

    runs: list[int]  # of each table
    hours: list[float]  # of each table, on one core
    unknown: list[str]  # models whose steps could not be timed
    steps: list[tuple[str, int, float]]  # measured: model, batch, seconds of a training step


def effort(tables: Sequence[tuple[PlannedTable, Path]]) -> Plan:
    """The planned CPU hours of the runs that are not done, from a measured step of each model. Each table comes with
    the folder of its runs."""
    todo = [[run for run in table.runs if not is_done(out / run.name)] for table, out in tables]
    alike: dict[tuple[int, str], list[Planned]] = {}  # the seeds of a case take equally long
    for i, runs in enumerate(todo):
        for run in runs:
            alike.setdefault((i, run.name.rpartition("/")[0]), []).append(run)
    hours, counts = [0.0] * len(tables), [len(runs) for runs in todo]
    if not alike:
        return Plan(counts, hours, [], [])
    found = apart(estimated, [to_toml(runs[0].config) for runs in alike.values()])
    for ((i, _), runs), seconds in zip(alike.items(), found["seconds"], strict=True):
        hours[i] += seconds * len(runs) / 3600
    return Plan(counts, hours, found["unknown"], [tuple(s) for s in found["steps"]])


# ---- the numbers ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Filled:
    """A cell with our numbers, one for each seed. Without any, `reason` says why."""

    row: str
    column: str
    printed: str
    values: tuple[float, ...]
    reason: str = ""
    runs: tuple[str, ...] = ()
    verdict: str = NOT_RUN  # on the paper's cell: "run", if there are numbers and its settings are the paper's
    stand_ins: StandIns = dataclasses.field(default_factory=dict)  # that its runs have recorded

    @property
    def ours(self) -> str:
        """The mean over seeds, as the paper would print it."""
        if not self.values:
            return ""
        mean = statistics.fmean(self.values)
        digits = 2 if mean < 1000 else 0
        text = f"{mean:.{digits}f}" if mean < 1e6 else f"{mean:.3g}"
        return f"{text} ± {statistics.stdev(self.values):.2f}" if len(self.values) > 1 else text


def collect(table: PlannedTable, out: Path, failed: Mapping[str, str] | None = None) -> list[Filled]:
    """The numbers of all cells, as far as their runs are done."""
    filled: list[Filled] = []
    read: dict[str, Run] = {}
    for planned in table.cells:
        values: list[float] = []
        partial: StandIns = {}  # of a number without a run: files with a part of the data
        reason = planned.reason
        if not reason and not table.paper.trains:
            assert planned.config is not None
            found = apart(_computed, to_toml(planned.config), table.paper.value, planned.cell.measure)
            values = [found["value"]] if "value" in found else []
            reason, partial = found.get("reason", ""), found.get("stand_ins", {})
        for name in planned.runs:
            if not is_done(out / name):
                reason = reason or (failed or {}).get(name) or "not run yet"
                continue
            if name not in read:
                read[name] = read_run(out / name)
            value, why = _value(planned, read[name])
            reason = reason or why
            values += [] if value is None else [value]
        c = planned.cell
        stand_ins = next((read[n].stand_ins for n in planned.runs if n in read and read[n].stand_ins), partial)
        said = RUN if values and not (planned.changed or stand_ins) else NOT_RUN
        why = "" if values else reason
        filled.append(Filled(c.row, c.column, c.printed, tuple(values), why, planned.runs, said, stand_ins))
    if table.paper.value != "relative":
        return filled
    first: dict[str, float] = {}  # of each column: the number of its first row
    for f in filled:
        if f.values:
            first.setdefault(f.column, statistics.fmean(f.values))
    return [dataclasses.replace(f, values=tuple(v / first[f.column] for v in f.values)) for f in filled]


def _value(planned: PlannedCell, run: Run) -> tuple[float | None, str]:
    """The number of a run, or the reason why it is missing."""
    cell = planned.cell
    if cell.value == "hours":
        ends = [r.simulated["end_s"] / 3600 for r in run.rounds if "end_s" in r.simulated]
        return (ends[-1], "") if ends else (None, "the run has no simulated clock: set federation.availability")
    if cell.value == "megabytes":
        kinds = [of for r in run.rounds for of in r.traffic.content.values()]
        part = sum(of.get(cell.measure, 0) for of in kinds)  # of one kind of content
        return (part if cell.measure in CONTENTS else run.bytes("down") + run.bytes("up")) / 1e6, ""
    if cell.value == "relative":  # to the first row: see `collect`
        return float(sum(sum(r.traffic.floats.values()) for r in run.rounds)), ""
    lines = compared_results(group_runs([run])).lines[0][0]
    result = _measured(cell.measure, lines)
    points = lines[result] if result else []
    if cell.measure == AVERAGE:  # of clients' models, before distillation: the mean over architectures
        found = (([s["accuracy"] for s in r.of("average").values()], at) for r, at in spent(run))
        points = [at._replace(accuracy=statistics.fmean(own)) for own, at in found if own]
    if not points:
        there = ", ".join(r.label for r in lines) or "nothing"
        return None, f"the run did not measure {cell.measure!r}; it measured {there}"
    if cell.value != "accuracy":
        assert cell.target is not None  # checked when the table was read
        first = next((p for p in points if p.accuracy >= cell.target), None)
        if first is None:
            best = max(p.accuracy for p in points)
            return None, f"{100 * cell.target:g} % not reached in {len(run.rounds)} rounds (best {100 * best:.1f} %)"
        if cell.value == "rounds":
            return first.round + 1, ""
        if cell.value == "bytes":
            return first.bytes_so_far, ""
        sent = [r.traffic.floats for r in run.rounds if r.round <= first.round]
        return sum(sum(floats.values()) for floats in sent), ""
    if planned.at == "best":
        return 100 * max(p.accuracy for p in points), ""
    if planned.at == "last":
        return 100 * points[-1].accuracy, ""
    until = [p for p in points if p.round < int(planned.at)]
    return (100 * until[-1].accuracy, "") if until else (None, f"not evaluated by round {planned.at}")


def _measured(measure: str, lines: Lines) -> Result | None:
    """The result that a cell asks for."""
    if measure == "main":
        order = ("server", "own", "mean", "model", "ensemble")
        return next((r for kind in order for r in lines if r.kind == kind), None)
    if measure in KINDS:
        return next((r for kind in KINDS[measure] for r in lines if r.kind == kind), None)
    return next((r for r in lines if r.name == measure), None)


def _computed(text: str, value: str, measure: str) -> dict[str, Any]:
    """The number of a cell that needs no training, or the reason why there is none; and the sizes of its data where
    files hold only a part."""
    tables = tomllib.loads(text)
    try:
        config = load_config(tables)
        made = Scenario(config.data, config.models, config.partition, config.public, seed=config.run.seed, workers=1)
        if value == "size":  # million parameters of a model
            found = sum(p.numel() for p in made.server.template(measure).parameters()) / 1e6
        else:  # the mean number of classes of which a client has samples
            found = statistics.fmean(int((made.held(i) > 0).sum()) for i in range(len(made.roster)))
    except SoleraError as e:
        return {"reason": str(e)}
    partial = sampled(config.run.stand_ins or {}, tables, made.dataset.name, made.dataset.found)
    return {"value": found, "stand_ins": partial}


# ---- the table --------------------------------------------------------------------------------------


UNITS = {
    "accuracy": "Test accuracy in percent",
    "rounds": "Rounds until the target accuracy",
    "parameters": "Numbers sent, both ways, until the target accuracy",
    "bytes": "Bytes sent, both ways, until the target accuracy",
    "megabytes": "Megabytes sent, both ways",
    "relative": "Numbers sent, both ways, relative to the first row",
    "hours": "Simulated hours",
    "size": "Million parameters",
    "partition": "Classes of which a client has samples, mean over clients",
}


def as_markdown(table: PlannedTable, filled: Sequence[Filled]) -> str:
    """The paper's table, in each cell our number and the printed one; below, missing cells and all differences."""
    paper = table.paper
    printed = any(c.printed != NOT_PRINTED for c in paper.cells())
    unit = UNITS[paper.value] + (": ours (the paper's)." if printed else "; the paper prints no numbers.")
    lines = [f"## {paper.item} of {PAPERS[paper.paper]}: {paper.title}", ""]
    lines += [f"`solera reproduce {paper.recipe} --scale {table.scale}`. {unit}", ""]
    marks: dict[str, str] = {}
    columns = [c.name for c in paper.columns]
    lines += ["| | " + " | ".join([*columns, "the paper's row"]) + " |", "|---" * (len(columns) + 2) + "|"]
    cells = {(f.row, f.column): f for f in filled}
    for row in paper.rows:
        own = [cells[row.name, column] for column in columns]
        shown = []
        for cell in own:
            ours = cell.ours or marks.setdefault(cell.reason, f"[{_letters(len(marks))}]")
            shown.append(ours + (f" ({cell.printed})" if cell.printed != NOT_PRINTED else ""))
        done = sum(c.verdict == RUN for c in own)  # with the paper's settings and data
        verdict = RUN if done == len(own) else f"{done} of {len(own)} {RUN}" if done else NOT_RUN
        lines.append(f"| {row.name} | " + " | ".join([*shown, verdict]) + " |")
    lines.append("")
    for reason, mark in marks.items():  # with its stars and brackets, such as those of train-*.parquet
        lines.append(f"- {mark} {NOT_RUN}: " + re.sub(r"([*<])", r"\\\1", " ".join(reason.split())))
    if any(f.values and f.verdict == NOT_RUN for f in filled):
        lines.append(f"- The paper's row is {NOT_RUN} where settings, data or models are not the paper's: see below")
    lines += [f"- The paper: {paper.said}"] if paper.said else []
    lines += [f"- Open in the paper: {text}" for text in paper.open]
    if table.stand_ins:
        lines.append("- Stand-ins: " + "; ".join(f"{new} for {old}" for old, new in table.stand_ins.items()))
    elif not table.changes:  # found by the runs themselves, such as files with a part of the data
        lines += dict.fromkeys(f"- Stand-ins: {listed(f.stand_ins)}" for f in filled if f.stand_ins)
    if table.changes:
        lines.append("- Scaled: " + "; ".join(told(table.changes)))
    return "\n".join(lines) + "\n"


def _letters(n: int) -> str:
    return chr(97 + n) if n < 26 else f"{_letters(n // 26 - 1)}{chr(97 + n % 26)}"


def as_json(table: PlannedTable, filled: Sequence[Filled]) -> dict[str, Any]:
    """The table for programs."""
    return {
        "recipe": table.paper.recipe,
        "paper": table.paper.paper,
        "item": table.paper.item,
        "value": table.paper.value,
        "scale": table.scale,
        "stand_ins": table.stand_ins,
        "changes": {key: list(change) for key, change in table.changes.items()},
        "cells": [dataclasses.asdict(f) for f in filled],
    }


def write_table(table: PlannedTable, filled: Sequence[Filled], out: Path) -> None:
    """Write table.json and table.md into the folder of the runs."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / RESULT).write_text(json.dumps(as_json(table, filled), indent=1, ensure_ascii=False), "utf-8")
        (out / "table.md").write_text(as_markdown(table, filled), "utf-8")
    except OSError as e:
        raise RunError(f"{out / RESULT} cannot be written: {e.strerror}") from None


def write_summary(tables: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Write the numbers of several tables into one small file: recipe -> row -> column -> ours and the paper's."""
    found: dict[str, Any] = {}
    for table in tables:
        rows: dict[str, dict[str, Any]] = {}
        for c in table["cells"]:
            mean = round(statistics.fmean(c["values"]), 2) if c["values"] else None
            rows.setdefault(c["row"], {})[c["column"]] = [c["reason"] if mean is None else mean, c["printed"]]
        found[table["recipe"]] = {"item": table["item"], "value": table["value"], "scale": table["scale"], "rows": rows}
    try:
        file.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")
    except OSError as e:
        raise RunError(f"{file} cannot be written: {e.strerror}") from None


# ---- what is needed ---------------------------------------------------------------------------------


def needs(paper: Paper, scale: str = "full") -> list[str]:
    """The data sets and pretrained weights of all cells, each once. It reads settings only, and checks none of them."""
    tables = tomllib.loads(recipe_text(paper.recipe))
    base = flat({k: v for k, v in tables.items() if k != PAPER})
    extra = paper.scales.get(scale)
    found = [
        n for c in paper.cells() if not c.skip for n in _needs({**base, **c.set, **(extra.set if extra else {})}, scale)
    ]
    spared = {f"weights {model}" for model in extra.models} if extra else set()
    return [need for need in dict.fromkeys(found) if need not in spared]


def _needs(setting: Mapping[str, Any], scale: str) -> Iterator[str]:
    name = setting.get("data.name", EMBEDDED)
    if scale == "tiny":
        info = SOURCES.get(name)
        yield name if info and info.made else EMBEDDED
        return
    yield f"{name} (all of it)" if name == EMBEDDED else name
    if setting.get("public.source") == "dataset":
        yield f"public {setting.get('public.name')}"
    if setting.get("public.source") == "generator":
        yield f"generator {setting.get('public.path')}"
    for model in [*setting.get("models.clients", []), setting.get("models.server")]:
        if isinstance(model, str) and model.startswith("hf:"):
            yield f"weights {model}"
