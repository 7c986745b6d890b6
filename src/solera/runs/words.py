"""Numbers of a run in words: shares, bytes, seconds."""

from collections.abc import Mapping
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


def accuracies(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Accuracy by name in one round's metrics; empty if the round was not evaluated."""
    found = {name: s["accuracy"] for name, s in metrics.get("models", {}).items()}
    found |= {f"ensemble {name}": s["accuracy"] for name, s in metrics.get("ensembles", {}).items()}
    if "mean" in metrics.get("personal", {}):
        found["own models"] = metrics["personal"]["mean"]
    return found
