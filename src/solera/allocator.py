"""The C library's memory for tensors: what a step gives back is kept for the next one."""

import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # names of glibc's settings (malloc.h)
LARGEST = 32 << 20  # bytes of one block; glibc allows no more
KEPT = 256 << 20  # bytes that stay although nobody uses them


def keep_freed_memory() -> bool:
    """Ask the C library to keep freed memory instead of returning it to the system; False if it cannot be asked.

    A training step takes and frees the same megabytes again and again. As it comes, glibc returns large blocks at once,
    and the system clears every page of the next one: up to a tenth of the time of a step. For the whole process, until
    it ends; nothing but speed and the memory that it seems to use depends on it.
    """
    setting = getattr(ctypes.CDLL(None), "mallopt", None)
    if setting is None:  # not glibc
        return False
    return bool(setting(MMAP_THRESHOLD, LARGEST)) and bool(setting(TRIM_THRESHOLD, KEPT))
