"""One flag that ends a run. Training, distillation and evaluation check it at every step.

Python handles signals in the main thread only, and an exception raised there stops no other thread. The program would
wait until all of them are done. So the signal handler also sets a flag, and all long work checks it.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop; it can be resumed. It is not an `Exception`, like Ctrl-C: an `except Exception` that
    swallowed it would lose a reply and so change the result."""

    exit_code = 143


class Flag:
    """The request to stop a run, and the signal that made it."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def check(self) -> None:
        """Raise if the run was asked to stop."""
        if self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self.signal is not None:
            raise Interrupted(f"stopped by {signal.Signals(self.signal).name}")


class _Here(threading.local):
    """The flag of the run that this thread works for. A thread keeps its flag, so it ends even after its run."""

    flag: Flag | None = None


_HERE = _Here()


def check_stop() -> None:
    """Raise if the run that this thread works for was asked to stop."""
    if (flag := _HERE.flag) is not None and flag.signal is not None:
        flag.check()


def inherited(initializer: Callable[..., None]) -> Callable[..., None]:
    """A thread initializer: the new threads work for the same run as this thread."""
    flag = _HERE.flag

    def begin(*args: Any) -> None:
        _HERE.flag = flag
        initializer(*args)

    return begin


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM and Ctrl-C end the work in this block. They raise in the main thread. Python swallows exceptions in a
    destructor and in a fork; then the next check of the flag raises."""
    flag, outer = Flag(), _HERE.flag

    def stop(number: int, _: Any) -> None:
        flag.signal = number
        flag.check()

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before[signal.SIGTERM] = signal.signal(signal.SIGTERM, stop)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a program's own handler stays
            before[signal.SIGINT] = signal.signal(signal.SIGINT, stop)
    _HERE.flag = flag
    try:
        yield
    finally:
        _HERE.flag = outer
        for number, handler in before.items():
            signal.signal(number, handler)
