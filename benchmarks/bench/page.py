"""What was measured as tables: for the terminal, and for docs/performance.md."""

import pathlib
from typing import Any

from solera.core.errors import ConfigError

from .peers import PEERS

Table = tuple[list[str], list[list[str]]]
NAMES = {name: peer.title for name, peer in PEERS.items()}
MARKS = ("ratios", "sides")


def ratio_table(found: dict[str, Any]) -> Table:
    """How many times as long the others take; how much of the machine is used."""
    heads = ["workload", "against", "ratio", "with start-up, 10 rounds", "share of peak", "framework share", "checks"]
    rows = []
    for case in found["cases"]:
        share, around = case.get("peak_share"), case.get("framework_share")
        wrong = [f"{check}: {said}" for check, said in case["checks"].items() if said != "ok"]
        common = [_percent(share), _percent(around), "; ".join(wrong) or ("ok" if case["checks"] else "")]
        for side, ratio in case["ratios"].items():
            label = "growth, " if case["growth"] else ""
            total = case.get("total_ratios", {}).get(side)
            with_start = "" if total is None else f"{total:.2f}"
            rows.append([case["case"], label + NAMES.get(side, side), _spread(ratio, 2), with_start, *common])
        for side, facts in case["sides"].items():
            if "not_measured" in facts:
                rows.append([case["case"], NAMES.get(side, side), facts["not_measured"], "", "", "", ""])
    return heads, rows


def side_table(found: dict[str, Any]) -> Table:
    """Seconds and memory of every side."""
    heads = [
        "workload",
        "side",
        "seconds a lap",
        "first lap",
        "start-up",
        "memory, MB",
        "of it the main process",
        "accuracy",
    ]
    rows = []
    for case in found["cases"]:
        for side, facts in case["sides"].items():
            if "not_measured" in facts:
                continue
            rows.append(
                [
                    case["case"],
                    NAMES.get(side, side),
                    _spread(facts["seconds"], 3),
                    f"{facts['first_lap_s']:.2f}",
                    f"{facts['startup_s']:.1f}",
                    f"{facts['memory_mb']:.0f}",
                    f"{facts['server_memory_mb']:.0f}",
                    f"{facts['accuracy']:.3f}" if "accuracy" in facts else "",
                ]
            )
    return heads, rows


def machine_line(found: dict[str, Any]) -> str:
    """On what, when and with which versions."""
    m = found["machine"]
    return (
        f"Scale `{found['scale']}`, {found['date']}, solera {found['solera']}, torch {m['torch']}, "
        f"Python {m['python']}; {m['cores']} cores ({m['cpu']}), {m['memory_gb']} GB."
    )


def write(found: dict[str, Any], page: pathlib.Path) -> None:
    """Put the tables between the marks of a page."""
    for mark, table in zip(MARKS, (ratio_table(found), side_table(found)), strict=True):
        put(page, mark, f"{machine_line(found)}\n\n{markdown(table)}")


def put(page: pathlib.Path, mark: str, content: str) -> None:
    """Put something between a mark's two lines of a page, in place of what is there."""
    text = page.read_text()
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ConfigError(f"{page} has no place for a table: it needs the lines {begin} and {end}, once each")
    head, rest = text.split(begin)
    page.write_text(f"{head}{begin}\n\n{content}\n\n{end}{rest.split(end)[1]}")


def markdown(table: Table) -> str:
    """A table as it is written in a page."""
    heads, rows = table
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _spread(values: dict[str, float], digits: int) -> str:
    return f"{values['median']:.{digits}f} ({values['q1']:.{digits}f}–{values['q3']:.{digits}f})"


def _percent(values: dict[str, float] | None) -> str:
    return "" if values is None else f"{100 * values['median']:.0f} %"
