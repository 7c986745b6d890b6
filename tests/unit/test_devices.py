"""The program's global settings of torch: a run is not changed by them, and leaves them as they were."""

import contextlib
import json

import pytest
import torch
from torch import nn

from solera.core.errors import SoleraError
from solera.data import PartitionConfig, from_tensors
from solera.methods import FedDF
from solera.place.placement import Placement, numerics
from solera.runs.callbacks import Callback
from solera.runs.config import EngineConfig, RunConfig
from solera.runs.loop import simulate
from solera.scenario.scenario import Scenario
from solera.testing import ENGINES_TO_COMPARE, deep, small, toy, wide
from solera.train.fitting import Local, fit


@contextlib.contextmanager
def setting(get, put, value):
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


@contextlib.contextmanager
def flushing():
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextlib.contextmanager
def new_precision():
    """The newer way to say it, which makes torch refuse to answer about the older."""
    precision = torch.backends.mkldnn.matmul
    with setting(lambda: precision.fp32_precision, lambda v: setattr(precision, "fp32_precision", v), "bf16"):
        yield


FOREIGN = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "matmul precision": lambda: setting(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
    "newer precision": new_precision,
    "default dtype": lambda: setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "default device": lambda: setting(lambda: None, torch.set_default_device, "meta"),
    "device context": lambda: torch.device("meta"),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "flush denormals": flushing,
    "oneDNN off": lambda: torch.backends.mkldnn.flags(enabled=False, allow_tf32=None),
    "deterministic": lambda: setting(
        torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, "error"
    ),
    "threads": lambda: setting(torch.get_num_threads, torch.set_num_threads, 3),
}  # fmt: skip


def state():
    """All that the program may have set, as far as torch tells."""
    smallest = float.fromhex("0x1p-1070")
    try:
        matmul = torch.get_float32_matmul_precision()
    except RuntimeError:
        matmul = "mixed"
    return {
        "autocast": torch.is_autocast_enabled("cpu"),
        "matmul": matmul,
        "fp32": [torch._C._get_fp32_precision_getter("mkldnn", what) for what in ("all", "matmul", "conv", "rnn")],
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "flush": smallest * float("1") == 0,
        "onednn": torch.backends.mkldnn.enabled,
        "deterministic": torch.get_deterministic_debug_mode(),
        "threads": torch.get_num_threads(),
        "modes": torch._C._len_torch_function_stack(),
    }


def convolutional() -> nn.Module:
    """Convolutions and products large enough for the settings to show; dropout and BatchNorm besides."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 16, 3, padding=1), nn.BatchNorm1d(16), nn.ReLU(), nn.Flatten(),
        nn.Dropout(0.2), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 3),
    )  # fmt: skip


def federation(data):
    split = PartitionConfig(clients=6, alpha=1.0, variant="class", min_size=4)
    return Scenario(data, {"conv": convolutional, "deep": deep, "wide": wide}, split, client_test=0.25, workers=2)


def run(data, out, engine):
    method = small(FedDF())
    return simulate(federation(data), method, out, RunConfig(rounds=2), engine=EngineConfig(engine, workers=2))


@pytest.fixture(scope="module")
def data():
    return toy().dataset


@pytest.fixture(scope="module")
def clean(data, tmp_path_factory):
    return run(data, tmp_path_factory.mktemp("clean") / "run", "inprocess")


@pytest.mark.parametrize("engine", ENGINES_TO_COMPARE)
@pytest.mark.parametrize("foreign", FOREIGN)
def test_a_run_is_not_changed_by_what_the_program_has_set(data, clean, tmp_path, foreign, engine):
    with FOREIGN[foreign]():
        before = state()
        result = run(data, tmp_path / "run", engine)
        assert state() == before
    assert result.digest == clean.digest
    seen = {k: m["accuracy"] for k, m in result.summary["models"].items()}
    assert seen == {k: m["accuracy"] for k, m in clean.summary["models"].items()}


@pytest.mark.parametrize("foreign", [name for name in FOREIGN if name != "threads"])
def test_what_was_set_aside_is_said_and_recorded(data, tmp_path, foreign):
    class Listener(Callback):
        def warn(self, text):
            said.append(text)

    said: list[str] = []
    with FOREIGN[foreign]():
        simulate(
            federation(data), small(FedDF()), tmp_path / "run", RunConfig(rounds=1),
            engine=EngineConfig("inprocess"), callbacks=[Listener()],
        )  # fmt: skip
    environment = json.loads((tmp_path / "run" / "summary.json").read_text())["environment"]
    assert environment["numerics"]["default dtype"] == "torch.float32"
    assert environment["numerics"]["threads"] == 1
    assert environment["set_aside"]
    told = [text for text in said if "set aside" in text]
    assert len(told) == 1
    assert all(name in told[0] for name in environment["set_aside"])


@pytest.mark.parametrize("foreign", FOREIGN)
def test_all_is_put_back_after_an_error(foreign):
    with FOREIGN[foreign]():
        before = state()
        with contextlib.suppress(ZeroDivisionError), numerics(threads=1):
            assert state() == state() | {
                "autocast": False, "matmul": "highest", "dtype": torch.float32, "device": torch.device("cpu"),
                "grad": True, "inference": False, "flush": False, "onednn": True, "deterministic": 0, "threads": 1,
            }  # fmt: skip
            assert set(state()["fp32"]) <= {"none", "ieee"}  # full precision, by default or because it was said
            raise ZeroDivisionError
        assert state() == before


@pytest.mark.parametrize("kind", ["cpu", "cuda", "mps"])
def test_autocast_is_set_aside_on_every_kind_of_device(kind):
    with setting(lambda: torch.is_autocast_enabled(kind), lambda on: torch.set_autocast_enabled(kind, on), True):
        with numerics() as held:
            assert not torch.is_autocast_enabled(kind)
            assert list(held.found) == [f"autocast on {kind}"]
            assert held.needed["autocast"] == "off"
        assert torch.is_autocast_enabled(kind)


def test_every_step_of_mixed_precision_sees_the_weights_of_the_last():
    """With torch's own autocast, whose cache would give all steps the weights of the first."""
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    found = []
    for precision in ("float32", "bf16"):
        torch.manual_seed(0)
        model = wide()
        with Placement("cpu", precision=precision).training():
            done = fit(model, x, x[:, :3].argmax(1), Local(epochs=10, batch=16, lr=0.3), 0)
        found.append((done.loss, torch.cat([p.detach().flatten() for p in model.parameters()])))
    (loss, weights), (half_loss, half_weights) = found
    assert 0 < abs(half_loss - loss) < 0.01  # with the cache 1.15 instead of 0.64
    assert 0 < (half_weights - weights).abs().max() < 0.05


def test_under_default_settings_nothing_is_set_aside():
    with numerics() as held:
        assert held.found == {}
        held.check()


def test_data_made_under_inference_mode_can_be_learned_from(tmp_path, clean):
    with torch.inference_mode():
        made = toy().dataset
        copied = from_tensors((made.train.inputs, made.train.labels), (made.test.inputs, made.test.labels), classes=3)
        assert run(copied, tmp_path / "run", "inprocess").digest == clean.digest


def test_a_setting_changed_during_the_run_stops_it(data, tmp_path):
    class Meddling(nn.Sequential):
        def forward(self, x):
            torch.set_default_dtype(torch.float64)
            return super().forward(x)

    scenario = Scenario(data, {"wide": lambda: Meddling(*wide())}, toy().partition)
    try:
        with pytest.raises(SoleraError, match=r"'default dtype' was changed to torch.float64 during the run"):
            simulate(scenario, small(FedDF()), tmp_path / "run", RunConfig(rounds=2), engine=EngineConfig("inprocess"))
        assert torch.get_default_dtype() == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
