"""Reading files from untrusted places: regular files only, up to a size limit.

A run directory may come from another machine. Opening a named pipe in it would wait forever for a writer, and reading
a link to a device would fill the memory. This module does not import torch.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

MOST = 100_000_000  # default limit, in bytes, of a file that is read whole; the library's own files are far smaller
MOST_TOML = 4_000_000  # of a configuration, whose parser takes seconds for each megabyte


def read_file(path: str | os.PathLike[str], most: int | None = MOST) -> bytes:
    """The content of a regular file of at most `most` bytes (None: no limit). Raises OSError otherwise.

    If the file is being written to, the result is its content at the time of opening.
    """
    with open_file(path, most) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def check_file(path: str | os.PathLike[str], most: int | None = None) -> None:
    """Raise the OSError that `read_file` would raise: for files that another library opens by name."""
    with open_file(path, most):
        pass


@contextmanager
def open_file(path: str | os.PathLike[str], most: int | None = MOST) -> Iterator[BinaryIO]:
    """A regular file of at most `most` bytes, open for reading. Raises OSError for anything else."""
    # Non-blocking: opening a named pipe would wait for a writer. For a regular file it makes no difference.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        found = os.fstat(handle)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
        if most is not None and found.st_size > most:
            raise OSError(errno.EFBIG, f"larger than {most / 1e6:,.0f} MB", os.fspath(path))
        yield file
