"""Logs of a deployment: one JSON object a line with a UTC timestamp, in files that other programs can read."""

import contextlib
import datetime
import json
import logging
import os
from pathlib import Path
from typing import Any

ENDED = {"ended": True}  # `extra` of the line that is the last one of a run


def now() -> str:
    """The current time in the form of log lines."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def write_line(file: Path, line: dict[str, Any]) -> None:
    """Append one line in one write: several processes may write."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"time": now(), **line}, ensure_ascii=False, default=str) + "\n"
    fd = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


class Journal(logging.Handler):
    """Writes log records to a file, each as one line of JSON."""

    def __init__(self, file: Path, **facts: Any):
        super().__init__(logging.INFO)
        self.file, self.facts = file, facts

    def emit(self, record: logging.LogRecord) -> None:
        line = {"level": record.levelname.lower(), "pid": record.process, **self.facts, "says": record.getMessage()}
        if getattr(record, "ended", False):
            line["ended"] = True
        if record.exc_info and record.exc_info[1] is not None:
            line["error"] = f"{type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
        try:
            write_line(self.file, line)
        except OSError:  # a full disk must not end the program
            self.handleError(record)


def keep_journal(file: Path, **facts: Any) -> None:
    """Write the library's log to `file`, from INFO on."""
    log = logging.getLogger("solera")
    log.setLevel(min(log.level or logging.INFO, logging.INFO))
    if not any(isinstance(h, Journal) and h.file == file for h in log.handlers):
        log.addHandler(Journal(file, **facts))


def read_lines(file: Path, last: int) -> list[dict[str, Any]]:
    """The last lines of a journal."""
    return lines_from(file, 0)[0][-last:]


def lines_from(file: Path, place: int) -> tuple[list[dict[str, Any]], int]:
    """The whole lines of a journal from a position in the file on, and the position after them. Text that is not JSON
    (a torn line) is left out."""
    try:
        with file.open("rb") as f:
            f.seek(place)
            new = f.read()
    except FileNotFoundError:
        return [], place
    new = new[: new.rfind(b"\n") + 1]
    found = []
    for line in new.decode("utf-8", "replace").splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return [line for line in found if isinstance(line, dict)], place + len(new)
