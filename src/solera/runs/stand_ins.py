"""Stand-ins: settings with other values than a paper's. A run with stand-ins does not reproduce the paper's row."""

from collections.abc import Mapping
from typing import Any

from .dotted import show

StandIns = Mapping[str, tuple[Any, Any]]  # setting -> the paper's value, the run's (None: not known)
KEY = "stand_ins"  # in run.json and summary.json
NOT_RUN = "not run"  # the status of the paper's row
MARK = "*"  # follows the name of a method whose run has stand-ins
WHOLE = "none"  # the value of a setting that the paper does not set


def listed(found: StandIns) -> str:
    """The stand-ins in words: data.name = toy-text (the paper's: ag-news); ..."""
    return "; ".join(_told(key, *pair) for key, pair in found.items())


def verdict(found: StandIns) -> str:
    """The line about a run with stand-ins."""
    return f"the paper's row is {NOT_RUN}, for there are stand-ins: {listed(found)}"


def read_stand_ins(facts: Any) -> dict[str, tuple[Any, Any]]:
    """The stand-ins in the content of run.json. Malformed entries are left out."""
    found = facts.get(KEY) if isinstance(facts, dict) else None
    pairs = found.items() if isinstance(found, dict) else ()
    return {key: (pair[0], pair[1]) for key, pair in pairs if isinstance(pair, list) and len(pair) == 2}


def _told(key: str, paper: Any, ours: Any) -> str:
    said = key if ours is None else f"{key} = {show(ours)}"
    unset = "all" if key.endswith("_size") else "not set"
    return f"{said} (the paper's: {unset if paper == WHOLE else show(paper)})"
