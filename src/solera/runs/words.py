"""Numbers and lists as people read them."""

from collections.abc import Sequence


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
