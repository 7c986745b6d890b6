"""The Ray engine, as far as no Ray has to run: its settings, its refusals, and what becomes of tensors on the way."""

import copy
import hashlib
import importlib.util
import signal
import socket
import sys
import sysconfig
import threading
import time
import types

import pytest
import torch
from torch import nn

import fresh
import ray_tasks
from solera.core.errors import PORTABLE, ConfigError
from solera.core.plugins import code_allowed, files_of_code, load, take_over
from solera.core.randomness import Parallel
from solera.core.task import TASKS
from solera.core.tensors import from_bytes, to_bytes
from solera.core.wire import encode
from solera.engines import Version, engine_info, engine_named, engine_settings
from solera.engines.engine_settings import RayConfig
from solera.engines.states import Carried, StateError
from solera.place import devices
from solera.place.devices import Compute

engine_ray = pytest.importorskip("solera.engines.ray", reason="needs the extra 'ray'")


@pytest.fixture
def closed_port():
    """A port of this machine at which nobody listens."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        yield s.getsockname()[1]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"address": "ray://head:10001"}, "start the run on a machine of the cluster"),
        ({"address": "head"}, "expected 'HOST:PORT'"),
        ({"address": "head:99999"}, "expected 'HOST:PORT'"),
        ({"device": "cuda:0,1"}, "Ray chooses the devices"),
        ({"device": "mps"}, "write 'cpu' or 'cuda'"),
        ({"workers": -1}, "workers = -1"),
    ],
)
def test_wrong_settings(given, says):
    with pytest.raises(ConfigError, match=says):
        RayConfig(**given)


def test_it_is_an_engine_by_name():
    assert engine_named("ray", workers=3, address="auto") == RayConfig(workers=3, address="auto")
    assert "cluster" in engine_info("ray").title


def test_without_the_package_it_says_what_to_install(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else find(name))
    with pytest.raises(ConfigError, match=r"needs the package ray: pip install 'solera\[ray\]'"):
        RayConfig().require()


def test_an_address_at_which_nobody_answers_ends_the_command_at_once(closed_port, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(f'[method]\nname = "fedavg"\n\n[engine]\nname = "ray"\naddress = "127.0.0.1:{closed_port}"\n')
    done = fresh.run("-m", "solera.cli.main", "run", file, "--out", tmp_path / "run")
    assert done.returncode == 2
    (said,) = done.stderr.splitlines()
    assert f'engine.address = "127.0.0.1:{closed_port}": no Ray cluster answers there (Connection refused)' in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""], ids=["another server", "nothing"])
def test_something_else_at_the_address_is_refused(answer, monkeypatch):
    monkeypatch.setattr(engine_settings, "ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def reply():
            line, _ = server.accept()
            with line:
                line.recv(100)
                line.sendall(answer)
                time.sleep(0 if answer else 1)

        thread = threading.Thread(target=reply)
        thread.start()
        with pytest.raises(ConfigError, match=r"no Ray cluster answers there \((what answers is something|timed out)"):
            RayConfig(address=f"127.0.0.1:{server.getsockname()[1]}").require()
        thread.join()


def test_a_cluster_of_another_version_is_refused_in_one_line(monkeypatch):
    """As Ray says it, in several lines."""
    said = "Version mismatch: The cluster was started with:\n    Ray: 2.40.0\n    Python: 3.12.1\nThis process on node "
    said += "10.0.0.2 was started with:\n    Ray: 2.55.1\n    Python: 3.11.7\n"

    def init(**given):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise RuntimeError(said)

    fake = types.SimpleNamespace(init=init, is_initialized=lambda: False, shutdown=lambda: None)
    monkeypatch.setattr(engine_ray, "ray", fake)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ConfigError) as refused:
        engine_ray.connect("10.0.0.1:6379", 1)
    assert "was started with: Ray: 2.40.0 Python: 3.12.1 This process" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert signal.getsignal(signal.SIGTERM) is before


def test_how_many_workers_a_cluster_has_room_for(monkeypatch):
    small, large = {"CPU": 4.0, "memory": 1e9}, {"CPU": 16.0, "GPU": 2.0}

    def room(need, *machines):
        nodes = [{"Alive": True, "Resources": m} for m in machines] + [{"Alive": False, "Resources": large}]
        monkeypatch.setattr(engine_ray, "ray", types.SimpleNamespace(nodes=lambda: nodes))
        return engine_ray.room(need, 0)

    assert room({"CPU": 1.0}, small, large) == 20
    assert room({"CPU": 3.0}, small, large) == 6
    assert room({"CPU": 1.0, "GPU": 0.25}, small, large) == 8
    assert room({"CPU": 1.0, "GPU": 1 / 3}, large) == 6
    assert room({"CPU": 8.0, "GPU": 0.25}, small, large) == 2


class Opened(Exception):
    """What an engine would have been opened with."""


@pytest.mark.parametrize("here", [0, 2], ids=["a head without GPU", "a head with two"])
def test_devices_are_asked_of_the_cluster_and_not_of_this_machine(here, monkeypatch):
    there = [devices.Device(f"cuda:{i}", "a", precisions=("float32", "bf16")) for i in range(here)]
    monkeypatch.setattr(devices, "found", lambda: {"cuda": there} if there else {})
    nodes = [{"Alive": True, "Resources": {"CPU": 8.0}}, {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 2.0}}]
    monkeypatch.setattr(engine_ray, "ray", types.SimpleNamespace(nodes=lambda: nodes))
    monkeypatch.setattr(RayConfig, "require", lambda self: None)
    monkeypatch.setattr(engine_ray, "connect", lambda address, cpus: lambda: None)

    def opened(*given):
        raise Opened(*given)

    monkeypatch.setattr(engine_ray, "luggage", opened)
    asked = RayConfig(address="auto", device="cuda", per_device=4, precision="bf16")
    with pytest.raises(Opened) as given:
        asked.open(None, None)
    compute = given.value.args[1]
    assert (compute.devices, compute.precision) == (("cuda:0",), "bf16")
    server = devices.compute_of(asked)
    assert server.devices == (("cuda:0", "cuda:1") if here else ("cpu",))
    assert server.facts()["device"] == "cuda"
    assert server.place().precision == ("bf16" if here else "float32")
    with pytest.raises(ConfigError, match=r"has room for 8 workers with 1 CPU, 0\.25 GPU each"):
        RayConfig(address="auto", device="cuda", per_device=4, workers=9).open(None, None)


def test_the_environment_of_workers(monkeypatch):
    monkeypatch.setattr(sys, "path", ["", "/own", sysconfig.get_path("purelib")])
    cuda = Compute(("cuda:0",))
    assert engine_ray.environment(cuda) == {"PYTHONPATH": "/own:${PYTHONPATH}", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert engine_ray.environment(Compute(portable=True)) == {"PYTHONPATH": "/own:${PYTHONPATH}", **PORTABLE}


def test_how_torch_was_built_is_no_other_version(monkeypatch):
    told = []
    for version in ("2.13.0+cpu", "2.13.0+cu130", "2.13.0", "2.12.0"):
        monkeypatch.setattr(torch, "__version__", version)
        told.append(engine_ray.versions()["torch"])
    assert told == ["2.13.0"] * 3 + ["2.12.0"]


TENSORS = {
    "plain": torch.arange(24.0).reshape(2, 3, 4),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": torch.arange(6).reshape(2, 3).t(),
    "with gaps": torch.arange(20)[::3],
    "expanded": torch.ones(1, 4).expand(3, 4),
    "of no size": torch.zeros(0, 3),
    "one number": torch.tensor(2.5, dtype=torch.float64),
    "bool": torch.tensor([True, False]),
    "bfloat16": torch.randn(7).bfloat16(),
    "large": torch.randn(100, 1000),
    "of length one": torch.randn(1, 3, 1, 4).to(memory_format=torch.channels_last),
    "sparse": torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_is_the_same_after_the_journey(name):
    t = TENSORS[name]
    back = from_bytes(to_bytes(t))
    assert (back.dtype, back.shape) == (t.dtype, t.shape)
    if name == "sparse":
        assert torch.equal(back.to_dense(), t.to_dense())
        return
    assert torch.equal(back, t)
    if name not in ("with gaps", "expanded"):  # the order in memory decides in which order kernels add up
        assert back.stride() == t.stride()
    shared = t.numel() > 0 and back.data_ptr() == t.data_ptr()
    assert shared == (name == "large"), "large tensors are shared, small ones copied"


def test_a_tensor_keeps_its_gradient_flag():
    assert from_bytes(to_bytes(torch.ones(2, requires_grad=True))).requires_grad
    assert not from_bytes(to_bytes(torch.ones(2))).requires_grad


def test_state_of_a_call_is_in_memory_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = encode({"a": {"b": torch.ones(2)}})
    version = Version(7, hashlib.sha256(content).hexdigest())
    states = Carried(content)
    assert torch.equal(states.load("c00", version)["a"]["b"], torch.ones(2))
    assert states.save("c00", 7, {"a": {"b": torch.ones(2)}}) == version
    assert states.left == content
    assert Carried(None).load("c00", None) == {}
    with pytest.raises(StateError, match="c00 did not come"):
        Carried(None).load("c00", version)
    assert not any(tmp_path.iterdir())


def test_a_worker_of_another_version_unpacks_nothing():
    told = engine_ray.Worker({**engine_ray.versions(), "solera": "9.9"}, ["no_such_module"], {}, []).about()
    assert "has solera" in told
    assert "this machine 9.9" in told


def test_a_worker_that_lacks_a_module_says_which():
    told = engine_ray.Worker(engine_ray.versions(), ["no_such_module"], {}, []).about()
    assert "ModuleNotFoundError: No module named 'no_such_module'" in told
    assert "install on every machine" in told


def test_modules_of_tasks_are_named_for_the_workers(monkeypatch):
    store = types.SimpleNamespace(put=lambda value: value)
    monkeypatch.setattr(engine_ray, "register_serializer", lambda *a, **b: None)
    monkeypatch.setattr(engine_ray, "deregister_serializer", lambda *a: None)
    monkeypatch.setattr(engine_ray, "ray", store)
    named = engine_ray.luggage(None, Compute(), 1)[1]
    assert ray_tasks.__name__ in named
    assert "__main__" not in named
    assert TASKS["ray_tasks.back"].fn.__module__ == "ray_tasks"


def test_files_of_code_can_be_taken_over_where_the_file_is_not(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("from torch import nn\n\nclass Net(nn.Linear):\n    pass\n")
    with code_allowed(tmp_path):
        net = load("own.py:Net", "a test")
    files = {f: source for f, source in files_of_code().items() if f.startswith(str(tmp_path))}
    assert list(files) == [str(file)]
    assert files[str(file)] == file.read_bytes()
    file.unlink()
    module = sys.modules.pop(net.__module__)  # as in another process
    take_over(files)
    again = sys.modules[net.__module__]
    assert again is not module
    assert issubclass(again.Net, nn.Linear)


def test_what_runs_server_work_in_threads_can_be_copied():
    assert copy.deepcopy(Parallel(3)).workers == 3
