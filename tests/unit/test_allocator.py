"""Freed memory is kept, so that a step does not have to ask the system for it again."""

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, resource, sys
if "keep" in sys.argv:
    from solera.place.placement import keep_freed_memory
    print(keep_freed_memory())
else:
    print()
c = ctypes.CDLL(None)
c.malloc.restype = ctypes.c_void_p
c.free.argtypes = [ctypes.c_void_p]
c.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
size = 24 << 20

def take():
    held = [c.malloc(size) for _ in range(8)]
    for block in held:
        c.memset(block, 1, size)
    for block in held:
        c.free(block)

take()
take()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
take()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*words: str) -> tuple[str, int]:
    said = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=True)
    answer, count = said.stdout.splitlines()
    return answer, int(count)


@pytest.mark.skipif(sys.platform != "linux", reason="the setting is glibc's")
def test_blocks_are_used_again_without_asking_the_system() -> None:
    answer, kept = faults("keep")
    if answer == "False":
        pytest.skip("this C library has no such setting")
    returned = max(faults()[1] for _ in range(4))  # where something lies above the blocks, they stay as well
    assert kept < 100
    assert returned > 1000
