"""The numeric fingerprint: of the kernels of a machine, and of nothing else."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from solera.fingerprint import fingerprint, numbers

OTHER_CPU = {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
ASK = "from solera.fingerprint import fingerprint; print(fingerprint())"


def in_another_process(ask=ASK, **variables):
    clean = {k: v for k, v in os.environ.items() if k not in OTHER_CPU}
    command = [sys.executable, "-c", ask]
    return subprocess.run(command, env=clean | variables, capture_output=True, text=True, check=True).stdout.split()


@pytest.fixture(scope="module")
def plain():
    """That of a process without any of the variables."""
    return in_another_process()[0]


def test_what_goes_in_comes_from_integers():
    def number(place):
        h = (place + 7919 * 3 + 1) * 2654435761 % 2**32
        h = (h // 2**16 ^ h) * 73244475 % 2**32
        return (h // 2**16 ^ h) % 2**16 / 2**15 - 1

    expected = np.array([number(i) for i in range(4 * 250)], np.float32).reshape(4, 250)
    assert np.array_equal(numbers(4, 250, seed=3).numpy(), expected)
    assert len(np.unique(expected)) > 980
    assert abs(expected.mean()) < 0.05


def test_processes_agree(plain):
    assert len(plain) == 16
    assert plain == in_another_process(OMP_NUM_THREADS="1")[0] == in_another_process(OMP_NUM_THREADS="3")[0]


def test_what_the_program_has_set_does_not_matter():
    before = fingerprint()
    drawn = torch.random.get_rng_state()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        fingerprint.cache_clear()
        with torch.autocast("cpu"), torch.no_grad():
            assert fingerprint() == before
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.random.get_rng_state(), drawn)


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="this CPU has no other kernels")
def test_other_kernels_have_another_fingerprint(plain):
    assert in_another_process(ATEN_CPU_CAPABILITY="default")[0] != plain


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch is built without MKL")
def test_other_products_have_another_fingerprint(plain):
    """Only MKL computes otherwise: torch names the same processor as before."""
    ask = f"{ASK}; import torch; print(torch.backends.cpu.get_cpu_capability())"
    there, capability = in_another_process(ask, MKL_CBWR="COMPATIBLE")
    assert there != plain
    assert in_another_process(ask) == [plain, capability]


@pytest.fixture(scope="module")
def other_maker(tmp_path_factory):
    """A library that tells MKL of the other maker: on AMD that the processor is Intel's, on Intel that it is not."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux" or not torch.backends.mkl.is_available():
        pytest.skip("needs Linux, a C compiler and MKL")
    with open("/proc/cpuinfo") as f:
        answer = "GenuineIntel" not in f.read()
    source = tmp_path_factory.mktemp("maker") / "maker.c"
    source.write_text(
        f"int mkl_serv_intel_cpu_true(void) {{return {answer:d};}} int mkl_serv_intel_cpu(void) {{return {answer:d};}}"
    )
    library = source.with_suffix(".so")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return str(library)


def test_a_processor_of_another_maker_has_another_fingerprint(plain, other_maker):
    assert in_another_process(LD_PRELOAD=other_maker)[0] != plain
