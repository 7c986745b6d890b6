"""A client whose training blows up is dropped and named, whatever the method; what it would have sent goes nowhere."""

import pytest

from solera.core.federation import Federation, FederationConfig
from solera.core.task import Data
from solera.core.wire import digest
from solera.engines import ClientStates, InProcess
from solera.method import METHODS, find_method
from solera.methods.centralised import Centralised
from solera.methods.fedavg import FedAvg
from solera.testing import small, toy, toy_for, wide
from solera.train.fitting import Local

VICTIM = "c03"
TRAINED_BY_CLIENTS = sorted(set(METHODS) - {"centralised"})


def wild(scenario, victim: str, factor: float = 1e38):
    """The scenario with samples at one client that no training survives: far too large."""
    original = scenario.client

    def client(k, *args, **options):
        made = original(k, *args, **options)
        if k == victim:
            made.train = Data(made.train.inputs * factor, made.train.labels)
        return made

    scenario.client = client
    return scenario


def federation(scenario, tmp) -> Federation:
    return Federation(InProcess(scenario, ClientStates(tmp)), 0, FederationConfig())


@pytest.mark.parametrize("name", TRAINED_BY_CLIENTS)
def test_the_client_is_dropped_and_named(name, tmp_path):
    method = small(find_method(name)())
    scenario = wild(toy_for(method), VICTIM)
    fed = federation(scenario, tmp_path)
    assert VICTIM in fed.clients
    state = method.init(fed, scenario.server)
    told = set()
    for t in range(2):
        fed.begin(t)
        scenario.server.begin()
        state = method.round(state, fed, scenario.server)
        assert {f["client"] for f in fed.failures} <= {VICTIM}
        told |= {f["reason"].split(":")[1].strip() for f in fed.failures if f["reason"].startswith("Diverged")}
    if hasattr(method, "finish"):
        method.finish(state, fed, scenario.server)
        assert fed.failures[-1]["client"] == VICTIM
    assert told == {"training diverged"}


def test_what_blew_up_before_the_last_step_is_not_averaged_either(tmp_path):
    """A loss above 1,000 stops a training whose weights are still finite: no check of the upload would find them."""
    method = FedAvg(Local(epochs=2, batch=8, lr=0.1))
    ends = []
    one = {"wide": wide}
    for case, scenario in (("blown up", wild(toy(one), VICTIM, 1e6)), ("absent", toy(one))):
        fed = federation(scenario, tmp_path / case)
        state = method.init(fed, scenario.server)
        fed.begin(0)
        asked = [k for k in fed.sample() if case == "blown up" or k != VICTIM]
        fed.sample = asked.copy
        ends.append(digest(method.round(state, fed, scenario.server)))
    assert ends[0] == ends[1]


def test_centralised_training_that_blows_up_is_noted(tmp_path):
    method = Centralised(Local(epochs=1, batch=16, lr=1e30))
    scenario = toy()
    fed = federation(scenario, tmp_path)
    state = method.init(fed, scenario.server)
    fed.begin(0)
    scenario.server.begin()
    assert digest(method.round(state, fed, scenario.server)) == digest(state)
    events = [e for e in scenario.server.events if e["kind"] == "server_diverged"]
    assert {e["architecture"] for e in events} == {"wide", "deep"}
    assert all("training diverged" in e["reason"] for e in events)
