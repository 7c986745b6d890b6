"""`solera show`: an overview of a run directory."""

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from ..core.files import MOST_TOML, read_file
from ..core.plugins import label
from ..runs.dotted import dig
from ..runs.read import read_json
from ..runs.record import WAYS, RoundRecord, read_records
from ..runs.stand_ins import KEY as STAND_INS
from ..runs.stand_ins import NOT_RUN, listed, read_stand_ins
from ..runs.words import human_bytes, human_time, percent
from .errors import Debug, Json, reported, resume_command
from .output import console, print_json

FAILURES_SHOWN = 8


@reported
def show(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The run directory.")],
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show the settings, progress and results of a run, and how to continue it.

    Example: [bold]solera show runs/toy-feddf-s0[/bold]
    """
    from ..core.errors import RunError

    try:
        found = look(directory)
        if json:
            print_json(found)
        else:
            _print(found)
    except (KeyError, TypeError, AttributeError) as e:
        if debug:
            raise
        raise RunError(f"{directory} is damaged: {type(e).__name__} {e} in config.toml or metrics.jsonl") from None


def look(directory: Path) -> dict[str, Any]:
    """The facts about a run directory, whether its run is finished, running or stopped."""
    from ..core.errors import RunError
    from ..report.loading import in_use

    if not (directory / "run.json").is_file():
        raise RunError(f"{directory} is not a run directory: it has no run.json")
    missing: list[str] = []
    settings = _settings(directory, missing)
    rounds = read_records(directory, missing)
    wanted = dig(settings, "run", "rounds")
    wanted = wanted if isinstance(wanted, int) else None
    summary = read_json(directory / "summary.json", missing) if (directory / "summary.json").is_file() else None
    summary = summary or {}
    early = summary.get("stopped") if summary.get("rounds") == len(rounds) else None
    finished = bool(summary) and (wanted is None or len(rounds) >= wanted or early is not None)
    status = "finished" if finished else "running" if in_use(directory) else "stopped"
    failures = Counter(f["client"] for r in rounds for f in r.failures)
    found: dict[str, Any] = {
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
        "digest": None,
        "environment": None,
    }
    if finished:
        found["digest"], found["environment"] = summary.get("digest"), summary.get("environment")
    return found


def _settings(directory: Path, missing: list[str]) -> dict[str, Any]:
    """The tables of config.toml; none for a run started from Python, which has no such file."""
    import tomllib

    try:
        return tomllib.loads(read_file(directory / "config.toml", MOST_TOML).decode())
    except FileNotFoundError:
        pass
    except (OSError, ValueError, RecursionError) as e:
        missing.append(f"config.toml cannot be read ({e.strerror if isinstance(e, OSError) else 'damaged'})")
    return {}


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


def _print(found: dict[str, Any]) -> None:
    out, s = console(), found["settings"]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")

    def line(name: str, text: str) -> None:
        grid.add_row(name, escape(text))

    done = f"{found['rounds_done']} of {found['rounds']}" if found["rounds"] else str(found["rounds_done"])
    line("run", f"{dig(s, 'run', 'name') or Path(found['out']).name} ({found['status']})")
    try:
        for name, text in _told(s) if s else ():
            line(name, text)
    except (KeyError, TypeError, AttributeError, ValueError):
        found["missing"].append("config.toml lacks settings")
    if found[STAND_INS]:
        line("stand-ins", listed(found[STAND_INS]))
        line("paper's row", NOT_RUN)
    line("rounds", f"{done} in {human_time(found['seconds'])}")
    if found["ended_early"]:
        line("ended early", found["ended_early"])
    line("traffic", f"{human_bytes(found['bytes']['down'])} down, {human_bytes(found['bytes']['up'])} up")
    if found["personal"] and "mean" in found["personal"]:
        own = found["personal"]
        told = [f"{percent(own['mean'])} on average (each client counts the same)"]
        for key, words in (("weighted_mean", "{} weighted by test samples"), ("worst_decile", "worst tenth {}")):
            told += [words.format(percent(own[key]))] if key in own else []
        if "worst_decile" not in own:
            told.append("clients do not send their single scores")
        line("own models", ", ".join(told))
    if found["failures"]:
        named = [f"{k} ({n})" for k, n in list(found["failures"].items())[:FAILURES_SHOWN]]
        more = len(found["failures"]) - len(named)
        line("dropped replies", ", ".join(named) + (f" and of {more} more clients" if more else ""))
    for what in found["missing"]:
        line("missing", what)
    if found["digest"]:
        line("final state", found["digest"])
    if found["continue"]:
        line("continue", found["continue"])
    out.print(grid)

    scores = {**found["models"], **{f"ensemble {k}": v for k, v in found["ensembles"].items()}}
    if scores:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column("model", overflow="fold")
        for column in ("accuracy", "loss", "best", "at"):
            table.add_column(column, justify="right", no_wrap=True)
        for name, m in scores.items():
            best, at = percent(m["best_accuracy"]), f"{m['best_round'] + 1}/{found['rounds'] or found['rounds_done']}"
            table.add_row(escape(name), percent(m["accuracy"]), f"{m['loss']:.3f}", best, at)
        out.print()
        out.print(table)


def _told(s: dict[str, Any]) -> list[tuple[str, str]]:
    """The settings in the overview."""
    p, f, server = s["partition"], s["federation"], s["models"].get("server")
    skew = f" alpha {p['alpha']}" if p["kind"] in ("dirichlet", "quantity") else ""
    data = f"{label(s['data']['name'])}, {p['clients']} clients, {p['kind']}{skew}, {100 * f['fraction']:g}% a round"
    models = ", ".join(map(label, s["models"]["clients"])) + (f", server: {label(server)}" if server else "")
    return [("method", label(s["method"]["name"])), ("data", data), ("models", models)]
