"""The errors that the library explains in one line. `exit_code` is the exit code of the command line."""

import re

# In the reason of a training that diverged before it changed a weight: the learning rate cannot be the cause.
AT_ONCE = "no weight has changed yet: look at the model it began with (a poisoned average?) and the samples, not lr"


class SoleraError(Exception):
    """An error that the user can understand and act on."""

    exit_code = 1


class ConfigError(SoleraError):
    """A setting that is unknown, of the wrong type, or impossible."""

    exit_code = 2


# With these in the environment MKL and torch's own kernels compute the same bits on any x86 processor that has AVX2.
# Both read them once, so they must be there before torch is loaded.
PORTABLE = {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "avx2"}


class NotPortable(ConfigError):
    """`engine.portable` without `PORTABLE` in the environment; the command line restarts with it."""


class DataError(SoleraError):
    """Data that is missing or not as expected."""

    exit_code = 3


class RunError(SoleraError):
    """A run directory that is in use, damaged, or written by another version."""

    exit_code = 4


def without_addresses(text: str) -> str:
    """The text of another library's error without the addresses in it, which may hold passwords."""
    return re.sub(r"\S+://\S+", "...", text)


def one_line(e: BaseException, longest: int = 300) -> str:
    """The text of another library's error as one line; if that is too long, its last line, which names the cause."""
    lines = [" ".join(line.split()) for line in str(e).splitlines() if line.strip()]
    whole = " ".join(lines) or type(e).__name__
    return whole if len(whole) <= longest else lines[-1][:longest]
