"""Reading files that somebody else may have put there: regular ones only, and no more than a reader bears.

A run directory comes from anywhere. Opened like any file, a named pipe in it would wait for ever for a writer, and a
link to a device would fill the memory. Nothing here imports torch.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

MOST = 100_000_000  # bytes of a file that is read whole, unless its reader says otherwise; few of ours come near it


def read_file(path: str | os.PathLike[str], most: int | None = MOST) -> bytes:
    """What is in a regular file of at most so many bytes (None: as many as there are); an OSError otherwise.

    Of a file that is being written to, what was there when it was opened.
    """
    with open_file(path, most) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def check_file(path: str | os.PathLike[str], most: int | None = None) -> None:
    """Refuse, with an OSError, what `read_file` would: for files that another library opens by their name."""
    with open_file(path, most):
        pass


@contextmanager
def open_file(path: str | os.PathLike[str], most: int | None = MOST) -> Iterator[BinaryIO]:
    """A regular file of at most so many bytes, open for reading; an OSError for anything else."""
    # Not blocking: opening a named pipe would wait for somebody to write into it. A regular file does not mind.
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
