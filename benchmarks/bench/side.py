"""`python -m bench.side CASE SIDE SCALE LAPS`: one side of a case, in a process of its own."""

import sys

from .pace import Pace
from .workloads import Side, find, peak_side


def main(case: str, side: str, scale: str, laps: str) -> None:
    """Do what the case says its side does, at the pace of whoever asks."""
    pace = Pace()  # first: what is printed from here on is no answer
    chosen: Side = peak_side
    if side != PEAK:
        (found,) = (c for c in find([case], scale) if c.name == case)  # type: ignore[arg-type]
        chosen = found.sides[side]
    chosen(pace, int(laps))


PEAK = "peak"  # the side that every case has

if __name__ == "__main__":
    main(*sys.argv[1:])
