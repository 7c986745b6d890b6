"""Commands that read run directories: `solera show`, `solera compare`, `solera report` and `solera watch`."""

import contextlib
import datetime
import shlex
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from typer import Argument, Option

from ..core.errors import ConfigError, RunError
from ..core.files import MOST_TOML, open_file, read_file
from ..core.plugins import label
from ..runs.compare import Printed, as_csv, as_latex, printed, rows_in
from ..runs.compare import compare as facts_of
from ..runs.groups import between_methods, companions, group_runs, grouping
from ..runs.read import Run, read_json, read_runs
from ..runs.record import WAYS, RoundRecord, read_records
from ..runs.results import Comparison, compared_results, main_result, warnings_of
from ..runs.words import KEY as STAND_INS
from ..runs.words import NOT_RUN, dig, human_bytes, human_time, listed, percent, read_stand_ins
from ..runs.words import show as shown
from .console import Json, RunDir, RunDirs, console, emit, facts, reported, resume_command, table

FAILURES_SHOWN = 8
DIFFERENCES_SHOWN = 6  # between methods; further ones are only counted
Target = Annotated[
    float | None, Option(min=0.0, max=1.0, help="Show rounds, bytes and hours to this accuracy, such as 0.7.")
]


# ---- show -------------------------------------------------------------------------------------------


@reported
def show(directory: RunDir, json: Json = False) -> None:
    """Show the settings, progress and results of a run, and how to continue it.

    Example: [bold]solera show runs/toy-feddf-s0[/bold]
    """
    try:
        found = look(directory)
        emit(found, json, lambda: _overview(found))
    except (KeyError, TypeError, AttributeError) as e:
        raise RunError(f"{directory} is damaged: {type(e).__name__} {e} in config.toml or metrics.jsonl") from e


def look(directory: Path) -> dict[str, Any]:
    """The facts about a run directory, whether its run is finished, running or stopped."""
    from ..report.loading import in_use

    if not (directory / "run.json").is_file():
        raise RunError(f"{directory} is not a run directory: it has no run.json")
    missing: list[str] = []
    settings: dict[str, Any] = {}  # a run started from Python has no config.toml
    try:
        settings = tomllib.loads(read_file(directory / "config.toml", MOST_TOML).decode())
    except FileNotFoundError:
        pass
    except (OSError, ValueError, RecursionError) as e:
        missing.append(f"config.toml cannot be read ({e.strerror if isinstance(e, OSError) else 'damaged'})")
    rounds = read_records(directory, missing)
    wanted = dig(settings, "run", "rounds")
    wanted = wanted if isinstance(wanted, int) else None
    summary = read_json(directory / "summary.json", missing) if (directory / "summary.json").is_file() else None
    summary = summary or {}
    early = summary.get("stopped") if summary.get("rounds") == len(rounds) else None
    finished = bool(summary) and (wanted is None or len(rounds) >= wanted or early is not None)
    status = "finished" if finished else "running" if in_use(directory) else "stopped"
    failures = Counter(f["client"] for r in rounds for f in r.failures)
    return {
        "out": str(directory),
        "status": status,
        "continue": resume_command(directory) if status == "stopped" else None,
        "rounds_done": len(rounds),
        "rounds": wanted,
        "ended_early": early,
        "settings": settings,
        STAND_INS: read_stand_ins(read_json(directory / "run.json", missing)),
        "models": _scores(rounds, "model"),
        "ensembles": _scores(rounds, "ensemble"),
        "personal": next((r.own for r in reversed(rounds) if r.own), None),
        "bytes": {way: sum(r.traffic.sent(way) for r in rounds) for way in WAYS},
        "seconds": round(sum(r.seconds.get("total", 0.0) for r in rounds), 3),
        "failures": dict(failures.most_common()),
        "missing": missing,
        "digest": summary.get("digest") if finished else None,
        "environment": summary.get("environment") if finished else None,
    }


def _scores(rounds: list[RoundRecord], kind: str) -> dict[str, Any]:
    """The last and the best accuracy of each model."""
    found: dict[str, Any] = {}
    for r in rounds:
        for name, score in r.of(kind).items():
            best = found.get(name, {"best_accuracy": -1.0, "best_round": r.round})
            if score["accuracy"] > best["best_accuracy"]:
                best = {"best_accuracy": score["accuracy"], "best_round": r.round}
            found[name] = {**score, "round": r.round} | {k: best[k] for k in ("best_accuracy", "best_round")}
    return found


def _overview(found: dict[str, Any]) -> RenderableType:
    s = found["settings"]
    lines = [("run", f"{dig(s, 'run', 'name') or Path(found['out']).name} ({found['status']})")]
    try:
        lines += _settings_told(s) if s else []
    except (KeyError, TypeError, AttributeError, ValueError):
        found["missing"].append("config.toml lacks settings")
    if found[STAND_INS]:
        lines += [("stand-ins", listed(found[STAND_INS])), ("paper's row", NOT_RUN)]
    done = f"{found['rounds_done']} of {found['rounds']}" if found["rounds"] else str(found["rounds_done"])
    lines.append(("rounds", f"{done} in {human_time(found['seconds'])}"))
    if found["ended_early"]:
        lines.append(("ended early", found["ended_early"]))
    sent = found["bytes"]
    lines.append(("traffic", f"{human_bytes(sent['down'])} down, {human_bytes(sent['up'])} up"))
    own = found["personal"]
    if own and "mean" in own:
        told = [f"{percent(own['mean'])} on average (each client counts the same)"]
        for key, words in (("weighted_mean", "{} weighted by test samples"), ("worst_decile", "worst tenth {}")):
            told += [words.format(percent(own[key]))] if key in own else []
        told += [] if "worst_decile" in own else ["clients do not send their single scores"]
        lines.append(("own models", ", ".join(told)))
    if found["failures"]:
        some = [f"{k} ({n})" for k, n in list(found["failures"].items())[:FAILURES_SHOWN]]
        more = len(found["failures"]) - len(some)
        lines.append(("dropped replies", ", ".join(some) + (f" and of {more} more clients" if more else "")))
    lines += [("missing", what) for what in found["missing"]]
    if found["digest"]:
        lines.append(("final state", found["digest"]))
    if found["continue"]:
        lines.append(("continue", found["continue"]))

    scores = {**found["models"], **{f"ensemble {k}": v for k, v in found["ensembles"].items()}}
    if not scores:
        return facts(lines)
    rows = []
    for name, m in scores.items():
        best, at = percent(m["best_accuracy"]), f"{m['best_round'] + 1}/{found['rounds'] or found['rounds_done']}"
        rows.append((name, percent(m["accuracy"]), f"{m['loss']:.3f}", best, at))
    return Group(facts(lines), "", table(("model", "accuracy", "loss", "best", "at"), rows, right=4))


def _settings_told(s: dict[str, Any]) -> list[tuple[str, str]]:
    p, f, server = s["partition"], s["federation"], s["models"].get("server")
    skew = f" alpha {p['alpha']}" if p["kind"] in ("dirichlet", "quantity") else ""
    data = f"{label(s['data']['name'])}, {p['clients']} clients, {p['kind']}{skew}, {100 * f['fraction']:g}% a round"
    models = ", ".join(map(label, s["models"]["clients"])) + (f", server: {label(server)}" if server else "")
    return [("method", label(s["method"]["name"])), ("data", data), ("models", models)]


# ---- compare ----------------------------------------------------------------------------------------


@reported
def compare(
    directories: RunDirs,
    target: Target = None,
    by: Annotated[
        list[str] | None, Option(metavar="KEY", help="Group by these settings only, such as method.name. Repeatable.")
    ] = None,
    json: Json = False,
    csv: Annotated[bool, Option("--csv", help="Print the rows as CSV, with unrounded numbers.")] = False,
    latex: Annotated[bool, Option("--latex", help="Print the table for LaTeX (booktabs).")] = False,
) -> None:
    """Compare runs: accuracy (mean ± standard deviation over seeds), traffic, time, and settings that differ.

    Example: [bold]solera compare runs/toy-feddf-s0 runs/toy-fedavg-s0 --target 0.5[/bold]
    """
    if json + csv + latex > 1:
        raise ConfigError("--json, --csv and --latex cannot be used together")
    if json:
        emit(facts_of(directories, target, by), json, lambda: None)
        return
    runs = read_runs(directories)
    wanted = grouping(runs, by)
    groups = group_runs(runs, wanted)
    results = compared_results(groups)
    rows = rows_in(results, target)
    warnings = warnings_of(runs, results)
    for text in warnings if csv or latex else ():
        typer.echo(f"warning: {text}", err=True)
    if csv:
        typer.echo(as_csv(rows), nl=False)
        return
    together = companions(groups) if wanted is None else dict.fromkeys(wanted, ())
    if latex:
        typer.echo(as_latex(printed(rows, target, together)), nl=False)
        return
    print_comparison(printed(rows, target, together), results, runs, warnings, together)


def print_comparison(
    tables: Sequence[Printed],
    results: Comparison,
    runs: Sequence[Run],
    warnings: Sequence[str],
    together: Mapping[str, Sequence[str]],
) -> None:
    """Print a table for each kind of result, then other settings that differ, then warnings."""
    out = console()

    def line(text: str, style: str | None = None) -> None:
        out.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    for i, found in enumerate(tables):
        line(("\n" if i else "") + found.title, "italic")
        out.print(table_of(found))
    if len(results.groups) > 1 and (main := main_result(results)):
        line(f"\nmain result (all cases have it): {main}")
    for key, others in together.items():
        if others:
            line(f"{key} changes together with {', '.join(others)}")
    apart = between_methods(runs)
    if apart:
        line("\nother settings that differ between methods:")
    for key, values in list(apart.items())[:DIFFERENCES_SHOWN]:
        line(f"  {key}: " + ", ".join(f"{shown(v)} ({m})" for m, v in values.items()))
    if len(apart) > DIFFERENCES_SHOWN:
        line(f"  ... and {len(apart) - DIFFERENCES_SHOWN} more settings (--json lists them)")
    for text in warnings:
        line(f"warning: {text}", "yellow")


def table_of(found: Printed) -> Table:
    """Results of one kind as a table for the terminal."""
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for i, head in enumerate(found.heads):
        left = i < found.words and head != "runs"
        made.add_column(escape(head), overflow="fold", justify="left" if left else "right")
    for cells, begins in zip(found.cells, found.first, strict=True):
        if begins and made.row_count:
            made.add_section()
        made.add_row(*map(escape, cells))
    return made


# ---- report and watch -------------------------------------------------------------------------------


@reported
def report(
    directories: RunDirs,
    out: Annotated[Path, Option("--out", "-o", help="The file to write.")] = Path("report.html"),
    target: Target = None,
    force: Annotated[bool, Option("--force", help="Overwrite a file that is not a report.")] = False,
) -> None:
    """Make a report of one or more runs: figures, tables and settings in one HTML file.

    Example: [bold]solera report runs/toy-feddf-s0 runs/toy-fedavg-s0 -o report.html[/bold]
    """
    from ..report.figures import report_data
    from ..report.loading import read_all
    from ..report.page import GENERATOR, render

    begins = b""
    with contextlib.suppress(OSError), open_file(out, None) as file:  # there is none, or writing will say what is wrong
        begins = file.read(4096)
    if begins and GENERATOR not in begins and not force:
        raise ConfigError(f"{out} exists and is not a report of Solera: choose another --out, or add --force")
    records = read_all(directories)
    data = report_data(records, target)
    made = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"
    content = render(data, made).encode()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(content)
    except OSError as e:
        raise RunError(f"{out} cannot be written: {e.strerror}; choose another --out") from None
    for note in data["notes"]:
        typer.echo(f"note: {note}", err=True)
    runs = f"{len(records)} runs" if len(records) > 1 else "1 run"
    typer.echo(f"{shlex.quote(str(out))}: {runs}, {len(content) / 1e6:.1f} MB; open it in a browser")


@reported
def watch(
    directories: Annotated[
        list[Path], Argument(metavar="DIR...", help="Run directories, or folders that contain run directories.")
    ],
    port: Annotated[int, Option(min=0, max=65535, help="The port on 127.0.0.1; 0: any free port.")] = 0,
    target: Target = None,
    for_parent: Annotated[bool, Option("--for-parent", hidden=True)] = False,
) -> None:
    """Show a run in the browser and update it while the run continues. On this machine only; Ctrl-C ends it.

    Example: [bold]solera watch runs/toy-feddf-s0 --port 8000[/bold]
    """
    from ..report.page import LiveView, Source, end_with_parent

    for directory in () if for_parent else directories:
        if not directory.is_dir():
            raise RunError(f"{directory} is not a folder; give the run directory that `solera run` printed")
    try:
        view = LiveView(Source(directories, target), port)
    except OSError as e:
        raise ConfigError(f"--port {port} cannot be used: {e.strerror}; leave it out to use any free port") from None
    with contextlib.closing(view.socket):
        typer.echo(view.url if for_parent else f"{view.url} shows {', '.join(map(str, directories))}; Ctrl-C ends it")
        sys.stdout.flush()
        if for_parent:
            end_with_parent(view)
        with contextlib.suppress(KeyboardInterrupt):
            view.serve_forever(poll_interval=0.2)


@contextlib.contextmanager
def live_view(out: Path) -> Iterator[None]:
    """Serve the live view of a run that is about to start, and after the run until Ctrl-C.

    It is a separate process, because it must not disturb the run: a thread would be unsafe when workers are forked,
    and would slow the run down.
    """
    command = [sys.executable, "-m", "solera.cli.main", "watch", str(out), "--for-parent"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603  (this program)
    try:
        url = child.stdout.readline().strip() if child.stdout else ""
        typer.echo(f"watch it at {url}" if url else "the live view did not start; the run continues", err=True)
        yield
        if child.poll() is None:
            typer.echo(f"the run has ended; {url} shows it until Ctrl-C", err=True)
            with contextlib.suppress(KeyboardInterrupt):
                child.wait()
    finally:
        child.terminate()
        child.wait()
