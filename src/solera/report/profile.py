"""The time profiles of runs, as plain data for the page. Rounds are counted from 1, as in `figures`."""

from collections.abc import Sequence
from typing import Any

from ..runs.profile import Cost, Profile, ProfiledTask
from .read import Record

RUNS = 12  # limit of profiles
TASKS = 12  # limit of tasks of one run
ROWS = 10  # limit of functions or operators in a table
LETTERS = 160  # limit of characters of a name: some functions have a whole template signature in their name


def profiles(records: Sequence[Record]) -> dict[str, Any]:
    """The profiles, each with the index of its run in the records, and how many are left out."""
    found = [(number, r.profile) for number, r in enumerate(records) if r.profile is not None]
    return {
        "shown": [{"run": number, **_profile(profile)} for number, profile in found[:RUNS]],
        "left_out": len(found[RUNS:]),
    }


def _profile(profile: Profile) -> dict[str, Any]:
    return {
        "round": profile.round + 1,
        "seconds": _without_total(profile.seconds),
        "before": None if profile.seconds_before is None else _without_total(profile.seconds_before),
        "functions": _rows(profile.functions),
        "tasks": [_task(task) for task in profile.tasks[:TASKS]],
        "tasks_left_out": len(profile.tasks[TASKS:]),
    }


def _task(task: ProfiledTask) -> dict[str, Any]:
    return {
        "task": _cut(task.task),
        "client": _cut(task.client),
        "seconds": task.seconds,
        "operators": _rows(task.operators),
        "functions": [] if task.operators else _rows(task.functions),  # only for a task without a trace
        "trace": task.trace,
        "trace_bytes": task.trace_bytes,
        "untraced": _cut(task.untraced),
        "error": _cut(task.error),
    }


def _without_total(seconds: dict[str, float]) -> list[list[Any]]:
    """[phase, seconds] in the order of drawing; the bar is their sum."""
    return [[_cut(phase), s] for phase, s in seconds.items() if phase != "total"]


def _rows(costs: Sequence[Cost]) -> list[list[Any]]:
    """[name, where, calls, own seconds, total seconds]"""
    return [[_cut(c.name), _cut(c.where), c.calls, c.own_s, c.total_s] for c in costs[:ROWS]]


def _cut(text: str) -> str:
    return text if len(text) <= LETTERS else f"{text[: LETTERS - 1]}…"
