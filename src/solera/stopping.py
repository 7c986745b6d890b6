"""One flag that ends a run. Training, distillation and evaluation look at it at every step.

A signal is handled in the main thread alone, and an exception raised there stops no other thread: a program that has
been told to stop would wait until the last of them is done. So the handler sets a flag as well, and work asks for it.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop; it can be resumed. Like Ctrl-C, it is nothing an `except Exception` may swallow:
    a reply lost that way would change the result."""

    exit_code = 143


class Flag:
    """Whether one run has been asked to stop, and by what."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def check(self) -> None:
        """Raise if it has."""
        if self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self.signal is not None:
            raise Interrupted(f"stopped by {signal.Signals(self.signal).name}")


class _Here(threading.local):
    """The flag of the run that this thread works for. Threads keep theirs: one that outlives its run still ends."""

    flag: Flag | None = None


_HERE = _Here()


def check_stop() -> None:
    """Raise if the run that this thread works for has been asked to stop."""
    if (flag := _HERE.flag) is not None and flag.signal is not None:
        flag.check()


def inherited(initializer: Callable[..., None]) -> Callable[..., None]:
    """An initializer of new threads that makes them work for the same run as this one."""
    flag = _HERE.flag

    def begin(*args: Any) -> None:
        _HERE.flag = flag
        initializer(*args)

    return begin


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM and Ctrl-C end what is done in here. They raise in the main thread, wherever it is; Python swallows that
    in a destructor or a fork, and then the next look at the flag raises."""
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
