"""The digest matrix: in one process, in several, and on a real network with TLS and authentication, the same bits.

`make deploy-matrix`; several minutes, because Flower starts a process for each message.
"""

import json
import os
import pathlib
import time

import pytest

from deployments import DIFFERENT, EQUAL, SITES, Deployment, config_of, solera

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
    network.reconfigure(method, config_for(method))
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
