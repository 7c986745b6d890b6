"""The conversation between the benchmark and a program it measures: lines of JSON on the standard streams.

The program says it is ready, waits for "go", does one lap, tells how long it took, and waits again. So programs that
are compared take turns, and nobody works while another is timed. Only the standard library is used: a copy of this
file is handed to the programs of other frameworks.
"""

import json
import os
import sys
import time
from typing import Any


class Pace:
    """The measured program's side. What the program itself prints goes to the standard error stream from now on."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._began = 0.0

    def ready(self) -> None:
        """All is set up: the next thing is the first lap."""
        self._say({"ready": True})

    def go(self) -> bool:
        """Wait for the start of a lap; False if there is none to come."""
        line = sys.stdin.readline()
        self._began = time.perf_counter()
        return line.strip() == "go"

    def lap(self, less: float = 0.0, **facts: Any) -> None:
        """A lap is done. `less` are seconds of it that were spent on something else."""
        self._say({"seconds": time.perf_counter() - self._began - less, **facts})

    def end(self, **facts: Any) -> None:
        """What is to be said after the last lap."""
        self._say({"end": True, **facts})

    def _say(self, what: dict[str, Any]) -> None:
        self._out.write(json.dumps(what) + "\n")
        self._out.flush()
