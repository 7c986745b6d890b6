"""The numeric fingerprint: of the kernels of a machine, and of nothing else."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from solera.core.errors import PORTABLE
from solera.place.fingerprint import fingerprint, numbers

OTHER_CPU = {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
ASK = "from solera.place.fingerprint import fingerprint; print(fingerprint())"


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


# ---- engine.portable ------------------------------------------------------------------------------------

needs_portable = pytest.mark.skipif(
    not torch.backends.mkl.is_available() or torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="needs an x86 processor with AVX2, and a torch with MKL",
)


def portable(**variables):
    code = "from solera.place.fingerprint import fingerprint; print(fingerprint(True))"
    return in_another_process(code, **variables)[0]


@needs_portable
@pytest.mark.parametrize(
    "other",
    [
        {"ONEDNN_MAX_CPU_ISA": "SSE41"},
        {"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
        {"GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-AVX512F"},
    ],
)
@pytest.mark.rest
def test_portable_runs_have_one_fingerprint_on_other_processors(plain, other):
    """As far as the libraries can be told to take this processor for another one."""
    here = portable(**PORTABLE)
    assert here == portable(**PORTABLE, **other)
    assert here != plain


@pytest.mark.rest
@needs_portable
def test_portable_runs_have_one_fingerprint_on_processors_of_either_maker(other_maker):
    here = portable(**PORTABLE)
    assert here == portable(**PORTABLE, LD_PRELOAD=other_maker)
    assert here == portable(**PORTABLE, LD_PRELOAD=other_maker, MKL_ENABLE_INSTRUCTIONS="SSE4_2")
    assert portable() != portable(LD_PRELOAD=other_maker), "without the environment it is not portable"


SMALL = ["run.rounds=1", "data.train_size=300", "data.test_size=50", "public.size=40", "method.fusion.steps=2"]


def run_toy(out, engine, **variables):
    """What a run of the command line ended with; it begins without the variables that it needs."""
    settings = [word for s in (*SMALL, "engine.portable=true") for word in ("--set", s)]
    command = ["-m", "solera.cli.main", "run", "toy", *settings, "--engine", engine, "--out", str(out), "--json"]
    clean = {k: v for k, v in os.environ.items() if k not in OTHER_CPU}
    done = subprocess.run([sys.executable, *command], env=clean | variables, capture_output=True, text=True, check=True)
    assert "set aside" not in done.stderr, "the program has set nothing"
    return json.loads(done.stdout)


@pytest.mark.rest
@needs_portable
def test_a_portable_run_ends_in_one_digest_on_processors_of_either_maker(tmp_path, other_maker):
    """The command line puts itself into the environment that it needs."""
    here = run_toy(tmp_path / "here", "processes")
    there = run_toy(tmp_path / "there", "inprocess", LD_PRELOAD=other_maker, ONEDNN_MAX_CPU_ISA="SSE41")
    assert here["digest"] == there["digest"]
    assert here["environment"]["fingerprint"] == there["environment"]["fingerprint"] == portable(**PORTABLE)
    assert json.loads((tmp_path / "here" / "run.json").read_text())["experiment"]["engine"] == {"portable": True}


def test_a_program_that_has_loaded_torch_without_the_environment_is_told_what_to_do():
    ask = (
        "import solera.testing as t, solera.engines as e, solera.place.devices as c, solera.core.errors\n"
        "try: c.compute_of(e.EngineConfig(portable=True))\n"
        "except solera.core.errors.ConfigError as error: print(type(error).__name__)"
    )
    (told,) = in_another_process(ask)
    assert told == ("NotPortable" if torch.backends.mkl.is_available() else "ConfigError")
