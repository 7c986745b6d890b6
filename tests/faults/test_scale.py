"""What costs what: the rules of docs/scale.md, each with a number that would change if it were broken."""

import dataclasses
import subprocess
import sys
import time
import weakref

import pytest
import torch
from torch import nn

import solera.core.federation
from helpers import Site
from solera.core.federation import Federation, FederationConfig
from solera.core.task import Client, task
from solera.core.tensors import Weights
from solera.core.wire import Packed, leaves, like
from solera.data import PartitionConfig, from_tensors
from solera.engines import ClientStates, InProcess, Processes, Threads
from solera.engines.pool import Window
from solera.method import find_method
from solera.runs.config import EngineConfig, RunConfig
from solera.runs.directory import RunDirectory
from solera.runs.loop import simulate
from solera.scenario.scenario import Scenario
from solera.testing import small, toy
from solera.train.teachers import Cache, Ensemble


@dataclasses.dataclass(frozen=True)
class Reply:
    weights: Weights = like("weights")


@task("test_scale.scale_reply")
def scale_reply(client: Client, weights: Weights) -> Reply:
    return Reply({n: w + client.seed % 7 for n, w in weights.items()})


@task("test_scale.scale_slow_first")
def scale_slow_first(client: Client, weights: Weights) -> Reply:
    time.sleep(1.0 if client.id == "c000" else 0)
    return Reply({n: w + 1 for n, w in weights.items()})


@dataclasses.dataclass(frozen=True)
class Memory:
    kilobytes: float


@task("test_scale.scale_private_memory")
def scale_private_memory(client: Client) -> Memory:
    """What of this process's memory is its own, after it has looked at all of its data."""
    client.train.inputs.sum()
    with open("/proc/self/smaps_rollup") as f:
        own = next(line for line in f if line.startswith("Private_Dirty"))
    return Memory(float(own.split()[1]))


def federation(clients: int, tmp_path) -> Federation:
    return Federation(InProcess(Site((1,) * clients), ClientStates(tmp_path)), 0)


# ---- replies ----------------------------------------------------------------------------------------


@pytest.fixture
def most_alive(monkeypatch):
    """A function: how many replies have been in memory at once, at most."""
    alive, most = 0, 0

    def gone() -> None:
        nonlocal alive
        alive -= 1

    def counted(*args):
        nonlocal alive, most
        reply = decode(*args)
        weakref.finalize(reply.weights["w"], gone)
        alive += 1
        most = max(most, alive)
        return reply

    decode = solera.core.federation.decode
    monkeypatch.setattr(solera.core.federation, "decode", counted)
    return lambda: most


@pytest.mark.parametrize("clients", [10, 200])
def test_a_mean_holds_as_many_replies_for_ten_clients_as_for_two_hundred(clients, tmp_path, most_alive):
    fed = federation(clients, tmp_path)
    fed.mean(scale_reply, list(fed.clients), weights={"w": torch.ones(5)})
    assert most_alive() <= 2  # the one that is added, and the one before it until the loop lets go of it


@pytest.mark.parametrize("clients", [10, 200])
def test_individual_replies_are_held_all_at_once(clients, tmp_path, most_alive):
    fed = federation(clients, tmp_path)
    replies = fed.map(scale_reply, list(fed.clients), weights={"w": torch.ones(5)})
    assert most_alive() == len(replies) == clients


@pytest.mark.parametrize("kind", [Processes, Threads])
def test_behind_a_slow_client_a_window_of_replies_waits_in_memory(kind, tmp_path, most_alive):
    """The worst case of a mean: the first client answers last. Sums are made in the order of the clients."""
    engine = kind(Site((1,) * 200), ClientStates(tmp_path), 2)
    try:
        fed = Federation(engine, 0)
        mean = fed.mean(scale_slow_first, list(fed.clients), uniform=True, weights={"w": torch.ones(5)})
    finally:
        engine.close()
    assert len(fed.answered) == 200
    assert mean.weights["w"].tolist() == [2.0] * 5
    assert Window.SIZE // 2 < most_alive() <= Window.SIZE + 2


@pytest.mark.parametrize("clients", [10, 200])
def test_a_message_is_packed_once_however_many_clients_get_it(clients, tmp_path, monkeypatch):
    sent = []
    pack = Packed.__init__

    def counted(self, value, **options):
        sent.extend([value] if isinstance(value, dict) else [])  # a message; a reply is what its task declares
        pack(self, value, **options)

    monkeypatch.setattr(Packed, "__init__", counted)
    fed = federation(clients, tmp_path)
    fed.mean(scale_reply, list(fed.clients), weights={"w": torch.ones(5)})
    assert len(sent) == 1
    assert sum(way.messages for way in fed.down.values()) == clients


# ---- clients ----------------------------------------------------------------------------------------

MILLION = """
import os, time, torch
from torch import nn
from solera.data import PartitionConfig, PublicConfig, from_tensors
from solera.engines import ClientStates, InProcess
from solera.core.federation import Federation, FederationConfig
from solera.scenario.scenario import Scenario

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

n = 1_000_000
x, y = torch.zeros(n, 2), torch.arange(n) % 2
data = from_tensors((x, y), (x[:10], y[:10]), classes=2, name="many")
before, began = resident(), time.monotonic()
split = PartitionConfig(kind="iid", clients=n)
site = Scenario(data, {"p": lambda: nn.Linear(2, 2)}, split, PublicConfig(source="none"))
fed = Federation(InProcess(site, ClientStates("nowhere")), 0, FederationConfig(fraction=1e-5))
cohort = fed.sample()
client = site.client(cohort[0], 0, {})
seconds = time.monotonic() - began
parts = [site.roster.sizes, site.roster.architecture_of]
parts += [t for p in (site.partition, site._train, site._test) for t in (p.order, p.offsets)]
storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in parts}
print(len(cohort), len(client.train), sum(storages.values()), resident() - before, seconds)
"""


def test_a_million_clients_cost_56_bytes_each(tmp_path):
    """Of clients with one sample each: seven arrays of int64."""
    done = subprocess.run([sys.executable, "-c", MILLION], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    cohort, samples, held, grown, seconds = map(float, done.stdout.split())
    assert (cohort, samples) == (10, 1)
    assert held <= 56.1e6, f"{held / 1e6:.1f} bytes a client"
    assert grown < 250e6, f"{grown / 1e6:.0f} MB while it is made"  # a dictionary for each client alone would be more
    assert seconds < 30


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_workers_share_the_data(tmp_path):
    inputs = torch.zeros(4000, 25_000, dtype=torch.uint8).random_(generator=torch.Generator().manual_seed(0))  # 100 MB
    labels = torch.arange(4000) % 2
    data = from_tensors((inputs, labels), (inputs[:4], labels[:4]), classes=2, name="large")
    split = PartitionConfig(kind="iid", clients=100)
    site = Scenario(data, {"p": lambda: nn.Linear(25_000, 2)}, split)
    engine = Processes(site, ClientStates(tmp_path), 2)
    try:
        fed = Federation(engine, 0)
        replies = fed.map(scale_private_memory, list(fed.clients)[:20])
    finally:
        engine.close()
    assert len(replies) == 20
    # Its own are one client's 40 samples as float32 (4 MB) and what Python and torch touch.
    assert max(r.kilobytes for r in replies.values()) < 60_000


# ---- state ------------------------------------------------------------------------------------------


def bytes_of(state) -> int:
    return sum(t.nbytes for t in leaves(state))


def big() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 400), nn.ReLU(), nn.Linear(400, 3))


def run(name: str, out, clients: int, rounds: int, fraction: float, **settings):
    method = small(find_method(name)(**settings))
    scenario = toy(models={"big": big}, clients=clients, samples=2400)
    how = RunConfig(rounds=rounds, eval_every=rounds), FederationConfig(fraction=fraction)
    return simulate(scenario, method, out, *how, EngineConfig(name="inprocess"))


MODEL = (8 * 400 + 400 + 400 * 3 + 3) * 4  # bytes of `big`


@pytest.mark.parametrize("clients", [8, 40])
def test_fedeeds_state_is_k_times_r_and_k_models_whatever_the_number_of_clients(clients, tmp_path):
    result = run("fedeed", tmp_path, clients, rounds=4, fraction=1.0, K=2, R=3)
    assert bytes_of(result.state.history) == 2 * 3 * MODEL
    assert bytes_of(result.state) == (2 * 3 + 2) * MODEL


@pytest.mark.parametrize("clients", [8, 40])
def test_fedavgs_state_is_one_model_whatever_the_number_of_clients(clients, tmp_path):
    assert bytes_of(run("fedavg", tmp_path, clients, rounds=1, fraction=0.5).state) == MODEL


def test_a_checkpoint_of_personal_models_writes_the_cohort(tmp_path, monkeypatch):
    """FedAMP's server keeps 40 models and four of them change in a round. A checkpoint shares no file with the one
    before, so it writes the models of two rounds."""
    written: list[int] = []
    write = RunDirectory._write

    def noted(self, name, content):
        if name.startswith("checkpoints/"):
            written.append(len(content))
        write(self, name, content)

    monkeypatch.setattr(RunDirectory, "_write", noted)
    result = run("fedamp", tmp_path, clients=40, rounds=24, fraction=0.1)
    known = len(result.state.models)
    assert known > 30
    whole = known * MODEL
    cohorts = [size for size in written[12:] if size < whole / 2]
    assert len(cohorts) >= 8, "everything is written anew now and then, not often"
    assert all(4 * MODEL < size < 10 * MODEL for size in cohorts)  # up to 8 models, and the names of all
    assert sum(written[12:]) < 12 * whole * 0.5


def test_client_state_is_written_for_the_cohort_only(tmp_path, monkeypatch):
    saved: list[int] = []
    save = ClientStates.save

    def noted(self, client, step, *rest):
        saved.append(step // 1000)
        return save(self, client, step, *rest)

    monkeypatch.setattr(ClientStates, "save", noted)
    run("scaffold", tmp_path, clients=40, rounds=3, fraction=0.1)
    assert saved == [0] * 4 + [1] * 4 + [2] * 4


# ---- public data ------------------------------------------------------------------------------------


@pytest.mark.parametrize("teachers", [1, 20])
def test_the_cache_of_answers_is_samples_times_classes_whatever_the_number_of_teachers(teachers):
    models = [nn.Linear(6, 10) for _ in range(teachers)]
    cache = Cache.of(Ensemble(models), torch.randn(300, 6), torch.arange(300))
    assert cache.targets[0].nbytes == 300 * 10 * 4
