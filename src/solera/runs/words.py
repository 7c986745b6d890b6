"""Numbers and lists as people read them."""

from collections.abc import Mapping, Sequence
from typing import Any


def percent(share: float) -> str:
    """0.7123 as 71.2%."""
    return f"{100 * share:.1f}%"


def human_bytes(n: float) -> str:
    """12345678 as 12.3 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 999.5:
            return f"{n:.0f} {unit}" if unit == "B" or n >= 99.95 else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"


def human_count(n: float) -> str:
    """12345678 as 12.3 M."""
    for unit in ("", " k", " M"):
        if n < 999.5:
            return f"{n:.0f}{unit}" if not unit or n >= 99.95 else f"{n:.1f}{unit}"
        n /= 1000
    return f"{n:.1f} G"


def human_time(seconds: float) -> str:
    """75 as 1 min 15 s."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60} s"
    return f"{total // 3600} h {total % 3600 // 60} min"


def some(names: Sequence[str], most: int = 3) -> str:
    """The first names; further ones are only counted."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# ---- Settings by dotted keys, and their values as short text -------------------------------------


def dig(tree: Any, *path: str) -> Any:
    """The value at this path in nested tables; None if there is none."""
    for name in path:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def flat(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """The leaves of nested tables by their dotted keys."""
    out: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{path}.{name}" if path else str(name)
        out |= flat(value, key) if isinstance(value, dict) else {key: value}
    return out


def short(key: str) -> str:
    """A shorter key for display: method.local.lr becomes local.lr, partition.alpha becomes alpha."""
    table, _, rest = key.partition(".")
    return rest if table in ("method", "partition", "run") else key


def show(value: Any) -> str:
    """A setting's value as short text."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ",".join(show(v) for v in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


# ---- Stand-ins: settings with other values than a paper's. A run with stand-ins does not reproduce the paper's row


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
