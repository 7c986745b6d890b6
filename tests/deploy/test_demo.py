"""The tutorial of a deployment, at a small size, on a real network: a SuperLink with TLS and node keys and three
SuperNodes on the loopback interface. One deployment serves all tests of this file."""

import importlib.util
import json
import os
import pathlib
import ssl
import tomllib
import types

import pytest

from deployments import solera
from fleet import activate, heartbeat, key_of, signed
from solera.deploy.commands import registered
from solera.deploy.keys import make_authority, make_node_key

EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "examples" / "deploy" / "demo.py"
TIMES = 5  # each refusal is tried


@pytest.fixture(scope="module")
def demo():
    spec = importlib.util.spec_from_file_location("demo", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def net(demo, tmp_path_factory):
    """The demo has run, and its server and sites still do."""
    here = os.getcwd()
    deployment = demo.prepare(tmp_path_factory.mktemp("network") / "demo", small=True)
    try:
        with demo.running(deployment) as server:
            address = tomllib.loads((server / "deploy.toml").read_text())["address"]
            yield types.SimpleNamespace(
                digest=demo.learn(server), server=server, sites=deployment / "sites", address=address,
                out=deployment.parent, ca=server / "ca.crt",
            )  # fmt: skip
    finally:
        os.chdir(here)


pytestmark = [pytest.mark.rest, pytest.mark.timeout(600)]


def test_the_network_ends_in_the_digest_of_its_rehearsal(net, demo):
    assert net.digest == demo.rehearse()
    summary = json.loads((net.server / "runs" / "first" / "summary.json").read_text())
    assert set(summary["models"]) == {"fedet-cnn", "lenet5", "mlp", "slim"}


def test_the_report_has_the_sites_by_name(net):
    page = (net.out / "report.html").read_text()
    assert all(site in page for site in ("hospital-a", "hospital-b", "hospital-c"))


def test_status_knows_the_sites_by_name(net):
    found = json.loads(solera("deploy", "status", net.server, "--json"))
    assert {(n["site"], n["status"]) for n in found["nodes"]} == {
        ("hospital-a", "online"), ("hospital-b", "online"), ("hospital-c", "online"),
    }  # fmt: skip
    assert found["directories"] == {"first": 1}


def test_a_sites_people_see_what_left_it(net):
    lines = [json.loads(line) for line in (net.sites / "hospital-a" / "log" / "asked.jsonl").read_text().splitlines()]
    assert [line["task"] for line in lines] == ["hello", "local_update"]
    assert lines[0]["bytes_out"] == 0
    assert lines[1]["bytes_out"] == pytest.approx(797_480, rel=0.01), "the weights of its model, and little else"
    metrics = json.loads((net.server / "runs" / "first" / "metrics.jsonl").read_text())
    out = sum(json.loads((net.sites / s / "log" / "asked.jsonl").read_text().splitlines()[-1])["bytes_out"]
              for s in ("hospital-a", "hospital-b", "hospital-c"))  # fmt: skip
    assert out == metrics["bytes"]["up"]["local_update"], "what left the sites is what the server counted"


def test_no_site_holds_what_is_anothers(net):
    for site in ("hospital-a", "hospital-b", "hospital-c"):
        text = (net.sites / site / "site.toml").read_text()
        assert [s for s in ("hospital-a", "hospital-b", "hospital-c") if f"sites.{s}]" in text] == [site]
        assert not (net.sites / site / "server.key").exists()
    assert "data/hospital" not in (net.server / "server.toml").read_text(), "the server does not know where data is"


def test_who_does_not_belong_is_refused_every_time_and_the_server_goes_on(net, tmp_path):
    """With requests made by hand; `make deploy-faults` does it with Flower's own programs."""
    nodes = {k: int(node.id) for k, node in registered(net.server).items()}
    a, b = key_of(net.sites / "hospital-a"), key_of(net.sites / "hospital-b")
    (tmp_path / "other").mkdir()
    make_authority(tmp_path / "other")
    make_node_key(tmp_path / "other", "stranger")
    stranger = key_of(tmp_path / "other")
    log = net.server / "log" / "superlink.log"
    claims_a = {"flwr-public-key": signed(a)["flwr-public-key"]}
    for _ in range(TIMES):
        assert heartbeat(net.address, a, nodes["hospital-a"], ca=net.ca) == 200, "who belongs is let in"
        with pytest.raises((ConnectionError, OSError)):  # plain HTTP to a TLS port
            activate(net.address, a)
        with pytest.raises(ssl.SSLCertVerificationError):
            activate(net.address, a, ca=tmp_path / "other" / "ca.crt")
        before = log.read_text().count("No SuperNode found with the given public key")
        assert activate(net.address, stranger, ca=net.ca) == 412
        assert log.read_text().count("No SuperNode found with the given public key") == before + 1
        refused = [
            heartbeat(net.address, stranger, nodes["hospital-a"], ca=net.ca),  # a key that nobody knows
            heartbeat(net.address, b, nodes["hospital-a"], ca=net.ca),  # one site in the name of another
            heartbeat(net.address, b, nodes["hospital-a"], {**signed(b), **claims_a}, ca=net.ca),  # with its key, too
            heartbeat(net.address, a, nodes["hospital-a"], signed(a, age_s=310), ca=net.ca),  # recorded and sent again
            heartbeat(net.address, a, nodes["hospital-a"], {}, ca=net.ca),  # no proof at all
        ]  # fmt: skip
        assert refused == [401] * 5
    assert heartbeat(net.address, a, nodes["hospital-a"], ca=net.ca) == 200
