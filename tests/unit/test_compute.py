"""Which devices a run takes: what a process that has used one may still do, and what "auto" leaves alone.

No accelerator is here. `torch.get_device_module` is replaced by a module that answers as CUDA's does.
"""

import os
from types import SimpleNamespace

import pytest
import torch

from solera.cli.info_commands import devices as doctors_lines
from solera.core.errors import PORTABLE, ConfigError, NotPortable
from solera.engines import EngineConfig
from solera.place import devices as compute
from solera.place.devices import Compute, Device, Finder, check_fork, compute_of, found
from solera.place.placement import numerics
from solera.testing import toy

FAKED = [Device("cuda:0", "a device", 8 << 30, ("float32", "tf32"))]


@pytest.fixture
def cuda(monkeypatch):
    """A CUDA device by what torch says of it: whether this process has `used` it, and which processes `looked`."""
    here = SimpleNamespace(used=False, looked=[], fails="")
    parent = os.getpid()

    def look():
        here.looked.append(os.getpid())
        if here.used and os.getpid() != parent:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
        if here.fails:
            raise RuntimeError(here.fails)
        return FAKED

    module = SimpleNamespace(
        is_initialized=lambda: False,  # torch says so of a program that only asked is_available()
        _is_in_bad_fork=lambda: here.used and os.getpid() != parent,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: module)
    monkeypatch.setattr(compute, "FINDERS", {"cuda": Finder(lambda: True, look)})
    compute._found.cache_clear()
    yield here
    compute._found.cache_clear()


def test_a_process_that_has_not_used_a_device_sends_a_child_to_look(cuda):
    assert found() == {"cuda": FAKED}
    assert cuda.looked == []  # not in this process
    check_fork(compute_of(EngineConfig(device="cuda")))


def test_a_program_that_asked_whether_cuda_is_there_keeps_its_device(cuda):
    cuda.used = True
    assert compute_of(EngineConfig(device="cuda")).devices == ("cuda:0",)
    assert cuda.looked == [os.getpid()]


def test_workers_are_not_forked_from_a_program_that_has_used_the_device(cuda):
    cuda.used = True
    several = EngineConfig(device="cuda", per_device=2)
    assert several._chosen()[0] == "inprocess"  # by itself
    with pytest.raises(ConfigError, match=r"torch\.cuda\.is_available\(\) is enough.*engine.name = 'inprocess'"):
        EngineConfig("processes", device="cuda", per_device=2).check(toy())
    cuda.used = False
    assert several._chosen()[0] != "inprocess"


def test_why_a_look_failed_is_said(cuda):
    cuda.fails = "the driver is too old"
    with pytest.raises(ConfigError, match="looking for a cuda device failed with RuntimeError: the driver is too old"):
        compute_of(EngineConfig(device="cuda"))


def test_auto_stays_on_the_cpu_and_says_how_to_use_the_device(cuda, caplog):
    assert compute_of(EngineConfig()) == Compute()
    hint = "this machine has cuda; engine.device = 'auto' stays on the CPU"
    assert dict(doctors_lines())["device 'auto'"].startswith(hint)
    assert compute.resolved(EngineConfig()).device == "cpu"
    assert [r.getMessage().startswith(hint) for r in caplog.records] == [True]
    assert "--set engine.device=cuda uses it" in caplog.text


@pytest.mark.parametrize("kind", list(compute.FINDERS))
def test_no_kind_is_taken_by_itself_before_a_run_on_it_was_reported(kind):
    assert not compute.FINDERS[kind].auto


def fit_for_portable(monkeypatch, capability="AVX2", machine="x86_64"):
    for name, value in PORTABLE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(compute.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)


def test_portable_is_part_of_what_a_run_is(monkeypatch):
    fit_for_portable(monkeypatch)
    found = compute_of(EngineConfig(portable=True))
    assert found.facts() == {"portable": True}
    with found.place().training() as held:
        assert not torch._C._get_mkldnn_enabled()
        assert not torch._C._get_nnpack_enabled()
    assert (held.needed["oneDNN"], held.needed["NNPACK"]) == (False, False)
    assert held.found == {}  # the program has set nothing
    assert torch._C._get_mkldnn_enabled()


def test_portable_without_its_environment_says_how_to_have_it(monkeypatch):
    fit_for_portable(monkeypatch)
    monkeypatch.delenv("MKL_CBWR")
    with pytest.raises(NotPortable, match="MKL_CBWR=COMPATIBLE and ATEN_CPU_CAPABILITY=avx2 in the environment before"):
        compute_of(EngineConfig(portable=True))


@pytest.mark.parametrize(
    ("here", "said"),
    [
        ({"capability": "AVX512"}, "torch computes with AVX512 here"),
        ({"machine": "aarch64"}, "only on an x86 processor"),
    ],
)
def test_portable_is_refused_where_it_cannot_be(here, said, monkeypatch):
    fit_for_portable(monkeypatch, **here)
    with pytest.raises(ConfigError, match=said):
        compute_of(EngineConfig(portable=True))


def test_portable_is_of_the_cpu(cuda, monkeypatch):
    fit_for_portable(monkeypatch)
    with pytest.raises(ConfigError, match=r'engine\.device = "cuda": only on the CPU'):
        compute_of(EngineConfig(device="cuda", portable=True))


def cuda_products() -> list[str]:
    return [torch._C._get_fp32_precision_getter("cuda", what) for what in ("matmul", "conv", "rnn")]


@pytest.mark.parametrize("foreign", ["highest", "high"])
def test_tf32_holds_for_a_whole_run_whatever_is_computed_on_the_cpu_meanwhile(foreign):
    torch.set_float32_matmul_precision(foreign)
    before = cuda_products(), torch.get_float32_matmul_precision()
    try:
        with numerics(1, "cuda", "tf32") as held:
            assert cuda_products() == ["tf32"] * 3
            held.check()
            with numerics(1) as inner:
                inner.check()
                assert torch.get_float32_matmul_precision() == "highest"
            assert cuda_products() == ["tf32"] * 3
            held.check()
        assert (cuda_products(), torch.get_float32_matmul_precision()) == before
    finally:
        torch.set_float32_matmul_precision("highest")
