"""Groups of runs as rows of numbers, and these rows as CSV and LaTeX. `groups` groups the runs, `results` sorts what
was measured by kind. A table holds only one kind of result."""

import csv
import dataclasses
import io
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from .groups import Group, between_methods, group_runs, grouping
from .read import Paths, Run, read_runs
from .results import Comparison, Lines, Result, compared_results, main_result, warnings_of
from .words import MARK, human_bytes, human_count, human_time, short, show


@dataclasses.dataclass(frozen=True)
class Spread:
    """Mean and standard deviation (of a sample, n - 1) over runs."""

    mean: float
    std: float | None  # None for a single run
    runs: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Spread | None":
        """The spread of the values that are not None; None if there are none."""
        there = [float(v) for v in values if v is not None]
        if not there:
            return None
        return cls(statistics.fmean(there), statistics.stdev(there) if len(there) > 1 else None, len(there))


@dataclasses.dataclass(frozen=True)
class Row:
    """One result of the runs of a group: a model, an ensemble, or the clients' own models."""

    group: Group
    kind: str  # as in `results`; "" if nothing was evaluated
    measured: str  # the label of the result; "" if nothing was evaluated
    last: Spread | None  # of clients' own models: each client counts the same
    last_weighted: Spread | None  # of clients' own models: each test sample counts the same
    best: Spread | None
    worst_decile: Spread | None  # of the clients' own models
    rounds_to_target: Spread | None
    bytes_to_target: Spread | None
    floats_to_target: Spread | None  # numbers sent, of any kind: Fed-ET's Table 3 counts parameters
    hours_to_target: Spread | None  # by the simulated clock
    reached: int  # how many runs reached the target
    down: Spread | None
    up: Spread | None
    seconds: Spread | None
    hours: Spread | None  # by the simulated clock
    failures: Spread | None

    @property
    def numbers(self) -> dict[str, Spread | None]:
        """Every figure by its name in JSON and CSV."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in OTHER}


OTHER = ("group", "kind", "measured", "reached")
SECTIONS = {  # the tables of a comparison: their titles and the kinds in them
    "models for everybody, on the whole test set": ("model", "mean"),
    "the server's own model, on the whole test set": ("server",),
    "one of several models of an architecture, or a part of one, each alone on the whole test set": ("part",),
    "several models that answer together, on the whole test set": ("ensemble",),
    "clients' own models, each on its client's test split (mean: each client counts the same; weighted: each sample)": (
        "own",
    ),
    "nothing evaluated yet": ("",),
}


def rows_of(groups: Sequence[Group], target: float | None = None) -> list[Row]:
    """The rows of a comparison: one for each group and result, in the order of SECTIONS."""
    return rows_in(compared_results(groups), target)


def rows_in(found: Comparison, target: float | None = None) -> list[Row]:
    """The same, from results that were already collected."""
    return [row for i, group in enumerate(found.groups) for row in _rows(group, found.lines[i], found.of(i), target)]


def _rows(group: Group, lines: Sequence[Lines], results: Sequence[Result], target: float | None) -> list[Row]:
    order = [kind for kinds in SECTIONS.values() for kind in kinds]
    shown = sorted((r for r in results if r.kind in order), key=lambda r: order.index(r.kind))
    rows = []
    for result in shown or [Result("", "")]:
        points = [found[result] for found in lines if found.get(result)]
        own = result.kind == "own"
        hits = [[q for q in p if target is not None and q.accuracy >= target] for p in points]
        there = [hit[0] for hit in hits if hit]  # where each run reached the target
        rows.append(
            Row(
                group,
                result.kind,
                result.label,
                last=Spread.of(p[-1].accuracy for p in points),
                last_weighted=_of_all([_personal(run, "weighted_mean") for run in group.runs]) if own else None,
                best=Spread.of(max(q.accuracy for q in p) for p in points),
                worst_decile=Spread.of(_personal(run, "worst_decile") for run in group.runs) if own else None,
                rounds_to_target=Spread.of(hit.round + 1 for hit in there),
                bytes_to_target=Spread.of(hit.bytes_so_far for hit in there),
                floats_to_target=Spread.of(hit.floats_so_far for hit in there),
                hours_to_target=Spread.of(hit.hours for hit in there),
                reached=len(there),
                down=Spread.of(run.bytes("down") for run in group.runs),
                up=Spread.of(run.bytes("up") for run in group.runs),
                seconds=Spread.of(run.seconds for run in group.runs),
                hours=Spread.of(_hours(run) for run in group.runs),
                failures=Spread.of(run.failures for run in group.runs),
            )
        )
    return rows


def _of_all(values: Sequence[float | None]) -> Spread | None:
    """None if one is missing: older runs have no weighted mean, and a mean over some seeds would mislead."""
    return None if None in values else Spread.of(values)


def _personal(run: Run, key: str) -> float | None:
    """A number about the clients' own models, from the last round that has it."""
    return next((r.own[key] for r in reversed(run.rounds) if key in r.own), None)


def _hours(run: Run) -> float | None:
    """Hours by the simulated clock, at the end of the last round."""
    ends = [r.simulated["end_s"] / 3600 for r in run.rounds if "end_s" in r.simulated]
    return ends[-1] if ends else None


# ---- as text ----------------------------------------------------------------------------------------


class Printed(NamedTuple):
    """Results of one kind as text cells; `first[i]` says whether row i begins a group."""

    title: str  # what kind of result this is
    heads: list[str]
    cells: list[list[str]]
    first: list[bool]
    words: int  # number of columns with text; the others hold numbers


class Column(NamedTuple):
    """A column of a table."""

    head: str
    cell: Callable[[Row], str]
    once: bool = False  # of a whole group: shown in its first row only


def printed(rows: Sequence[Row], target: float | None = None, columns: Iterable[str] | None = None) -> list[Printed]:
    """The rows with rounded numbers, one table for each kind of result.

    `columns` are the settings to show. Default: all that differ between groups.
    """
    told = columns if columns is not None else rows[0].group.settings if rows else ()
    settings = [k for k in told if k != "method.name"]
    tables = []
    for title, kinds in SECTIONS.items():
        if own := [row for row in rows if row.kind in kinds]:
            first = [i == 0 or own[i - 1].group is not row.group for i, row in enumerate(own)]
            shown = _columns(own, rows, target, settings)
            pairs = zip(own, first, strict=True)
            cells = [[c.cell(row) if begins or not c.once else "" for c in shown] for row, begins in pairs]
            tables.append(Printed(title, [c.head for c in shown], cells, first, len(settings) + 3))
    return tables


def _columns(own: Sequence[Row], rows: Sequence[Row], target: float | None, settings: Sequence[str]) -> list[Column]:
    """The columns of the table with the rows `own`; some are there only if one of all `rows` needs them."""
    each_client = own[0].kind == "own"
    hours, lost = any(row.hours for row in rows), any(row.failures and row.failures.mean for row in rows)
    numbers = any(row.floats_to_target and row.floats_to_target.mean for row in rows)  # older runs did not count them
    found = [
        Column("method", lambda r: r.group.method + MARK * bool(r.group.stand_ins), True),
        *(Column(short(k), lambda r, k=k: show(r.group.settings.get(k)), True) for k in settings),  # type: ignore[misc]
        Column("runs", lambda r: str(len(r.group.runs)), True),
        Column("measured", lambda r: r.measured),
        Column("mean %" if each_client else "last %", lambda r: percent(r.last)),
    ]
    if any(row.last_weighted for row in own):
        found.append(Column("weighted %", lambda r: percent(r.last_weighted)))
    found.append(Column("best mean %" if each_client else "best %", lambda r: percent(r.best)))
    if any(row.worst_decile for row in own):
        found.append(Column("worst tenth %", lambda r: percent(r.worst_decile)))
    if target is not None:
        to = f"to {100 * target:g}%"
        found.append(Column(f"rounds {to}", _rounds_to_target))
        found.append(Column(f"bytes {to}", lambda r: with_unit(r.bytes_to_target, human_bytes)))
        if numbers:
            found.append(Column(f"numbers {to}", lambda r: with_unit(r.floats_to_target, human_count)))
        if hours:
            found.append(Column(f"hours {to}", lambda r: with_unit(r.hours_to_target, _figure)))
    found.append(Column("down", lambda r: with_unit(r.down, human_bytes), True))
    found.append(Column("up", lambda r: with_unit(r.up, human_bytes), True))
    found.append(Column("time", lambda r: with_unit(r.seconds, human_time), True))
    if hours:
        found.append(Column("simulated hours", lambda r: with_unit(r.hours, _figure), True))
    if lost:
        found.append(Column("lost replies", lambda r: with_unit(r.failures, _figure), True))
    return found


def _rounds_to_target(row: Row) -> str:
    s = row.rounds_to_target
    if s is None:
        return "not reached" if row.measured else ""
    n = len(row.group.runs)
    part = "" if row.reached == n else f" ({row.reached} of {n})"
    return f"{s.mean:.3g}" + (f" ± {s.std:.1f}" if s.std is not None else "") + part


def _figure(value: float) -> str:
    return f"{value:.3g}"


def percent(value: Spread | None) -> str:
    """An accuracy as 71.2 ± 0.3 (in percent)."""
    if value is None:
        return ""
    return f"{100 * value.mean:.1f}" + (f" ± {100 * value.std:.1f}" if value.std is not None else "")


def with_unit(value: Spread | None, unit: Callable[[float], str]) -> str:
    """The mean, formatted by `unit`."""
    return "" if value is None else unit(value.mean)


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as plain, unrounded values."""
    return [
        {
            "method": row.group.method,
            "settings": row.group.settings,
            "runs": [str(r.path) for r in row.group.runs],
            "seeds": [r.seed for r in row.group.runs],
            "stand_ins": row.group.stand_ins,
            "kind": row.kind or None,
            "measured": row.measured or None,
            "reached": row.reached,
            **{name: None if s is None else dataclasses.asdict(s) for name, s in row.numbers.items()},
        }
        for row in rows
    ]


def compare(paths: Paths, target: float | None = None, by: Sequence[str] | None = None) -> dict[str, Any]:
    """The runs in these directories and their subfolders side by side, over seeds: the content of `solera compare
    --json`. `target` is an accuracy, `by` are the settings to group by."""
    runs = read_runs([paths] if isinstance(paths, str | os.PathLike) else list(paths))
    wanted = grouping(runs, by)
    results = compared_results(group_runs(runs, wanted))
    return {
        "target": target,
        "by": wanted,
        "main_result": main_result(results),
        "rows": as_json(rows_in(results, target)),
        "between_methods": between_methods(runs),
        "warnings": warnings_of(runs, results),
    }


def as_csv(rows: Sequence[Row]) -> str:
    """One line for each row, with repeated group columns and unrounded numbers: for spreadsheets and pandas."""
    settings = [k for k in (rows[0].group.settings if rows else {}) if k != "method.name"]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    numbers = list(rows[0].numbers) if rows else []
    figures = [f"{n}{end}" for n in numbers for end in ("", "_std")]
    writer.writerow(["method", *settings, "runs", "kind", "measured", "reached", *figures])
    for row in rows:
        told = [plain_cell(row.group.settings.get(k)) for k in settings]
        values = [v for s in row.numbers.values() for v in ((s.mean, s.std) if s else (None, None))]
        plain = ["" if v is None else repr(v) for v in values]
        what = [len(row.group.runs), row.kind, plain_cell(row.measured), row.reached]
        writer.writerow([plain_cell(row.group.method), *told, *what, *plain])
    return out.getvalue()


def plain_cell(value: Any) -> str:
    """A cell that a spreadsheet does not take for a formula."""
    text = "" if value is None else show(value)
    if text[:1] not in ("=", "+", "-", "@", "\t", "\r"):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "<": r"\textless{}", ">": r"\textgreater{}",
}  # fmt: skip


def latex_text(text: str) -> str:
    """Text with LaTeX's special characters escaped."""
    return "".join(LATEX.get(c, c if c.isprintable() else " ") for c in text)


def as_latex(tables: Sequence[Printed]) -> str:
    """The tables for a paper, each with its kind of result as a title; they need \\usepackage{booktabs}."""

    def row(cells: Sequence[str]) -> str:
        return " & ".join(map(latex_text, cells)) + r" \\"

    found = []
    for t in tables:
        columns = "l" * t.words + "r" * (len(t.heads) - t.words)
        title = rf"\multicolumn{{{len(t.heads)}}}{{l}}{{\emph{{{latex_text(t.title)}}}}} \\"
        lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", title, r"\midrule", row(t.heads), r"\midrule"]
        for i, cells in enumerate(t.cells):
            lines += [*([r"\addlinespace"] if i and t.first[i] else []), row(cells)]
        found.append("\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n")
    return "\n".join(found)
