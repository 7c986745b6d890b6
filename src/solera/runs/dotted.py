"""Settings by dotted keys, and their values as short text."""

from collections.abc import Mapping
from typing import Any


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
