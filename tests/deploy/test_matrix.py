"""The digest matrix: in one process, in several, and on a real network with TLS and authentication, the same bits.

`make deploy-matrix`; several minutes, because Flower starts a process for each message.
"""

import json
import os
import pathlib
import time

import pytest
import tomli_w

from deployments import DIFFERENT, EQUAL, SITES, Deployment, config_of, solera
from text_sites import OWN, text_sites

LOCAL = "[method.local]\nepochs = 1\nbatch = 16\nlr = 0.05"
FUSION = "[method.fusion]\nsteps = 6\nbatch = 16"
METHODS = {  # the method's table, the sites' models, what [models] says
    "fedavg": (f'name = "fedavg"\n{LOCAL}', EQUAL, ""),
    "scaffold": (f'name = "scaffold"\n{LOCAL}', EQUAL, ""),
    "feddf": (f'name = "feddf"\n{LOCAL}\n{FUSION}', DIFFERENT, ""),
    "fedet": (
        f'name = "fedet"\n[method.local]\nsteps = 5\nbatch = 16\nlr = 0.05\n{FUSION}',
        DIFFERENT,
        'server = "own.py:large"',
    ),
    "fedeed": (f'name = "fedeed"\nK = 2\npipeline = true\n{LOCAL}\n{FUSION}', EQUAL, ""),
    "mnfl": (f'name = "mnfl"\n{LOCAL}\n[method.distill]\nepochs = 1\nbatch = 16\nlr = 0.05', DIFFERENT, ""),
}
ROUNDS = 2
SMALL = {"epochs": 1, "batch": 4, "lr": 0.05}
TEXT_METHODS = {  # of sites with three tokenizers; in the second they predict public texts that the server sends
    "text-fusionlarge": {"name": "fusionlarge", "local": SMALL, "fusion": {"steps": 6, "batch": 8}},
    "text-mnfl": {"name": "mnfl", "local": SMALL, "distill": {"epochs": 1, "batch": 8, "lr": 0.05}},
}


def config_for(method):
    table, models, server = METHODS[method]
    return config_of(table, models, ROUNDS, server=server)


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    with Deployment(tmp_path_factory.mktemp("matrix"), config_for("fedavg")) as d:
        d.start_server()
        d.start_sites()
        yield d


@pytest.fixture(scope="module")
def outcome():
    """What happened, for SOLERA_MATRIX: a file that the matrix is written to."""
    rows = {}
    yield rows
    if (file := os.environ.get("SOLERA_MATRIX")) and rows:
        about = {"command": "make deploy-matrix", "sites": len(SITES), "rounds": ROUNDS, "tls": True, "node_keys": True}
        pathlib.Path(file).write_text(json.dumps({**about, "methods": rows}, indent=1) + "\n")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("method", METHODS)
def test_the_network_ends_in_the_digest_of_the_simulation(network, outcome, method):
    compare(network, outcome, method, config_for(method))


@pytest.fixture(scope="module")
def text_network(tmp_path_factory):
    pytest.importorskip("transformers", reason="needs the extra text")
    home = tmp_path_factory.mktemp("texts")
    with Deployment(home, text_config(home, "text-fusionlarge"), OWN) as d:
        d.start_server()
        d.start_sites()
        yield d


def text_config(home, method):
    tables = text_sites(home, TEXT_METHODS[method], ROUNDS, "server")
    return tomli_w.dumps({**tables, "engine": {"name": "flower", "wait_s": 240, "grace_s": 60}})


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("method", TEXT_METHODS)
def test_sites_with_different_tokenizers_end_in_the_digest_of_their_simulation(text_network, outcome, method):
    compare(text_network, outcome, method, text_config(text_network.home, method))
    sent = [line["task"] for line in text_network.asked("north")].count("public")
    assert sent == (method == "text-mnfl"), "public texts go to sites that predict them, once"


def compare(network, outcome, method, config):
    """A run on the network, and in one and several processes of one machine."""
    network.reconfigure(method, config)
    begun = time.monotonic()
    deployed = network.finish(method, f"{method}.toml", timeout=800)
    seconds = time.monotonic() - begun
    found = {"flower": deployed}
    for engine in ("inprocess", "processes"):
        out = network.home / f"{method}-{engine}"
        solera("run", network.home / f"{method}.toml", "--out", out, "--engine", engine, "--quiet")
        found[engine] = json.loads((out / "summary.json").read_text())["digest"]
    outcome[method] = {**found, "equal": len(set(found.values())) == 1, "seconds_on_the_network": round(seconds, 1)}
    assert network.failures(method) == []
    assert len(set(found.values())) == 1, found
