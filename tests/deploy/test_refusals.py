"""Who does not belong is refused, with Flower's own programs on a real network; a reverse proxy in front of it.

`make deploy-faults`. After each attempt the run that follows ends in the digest of the simulation.
"""

import contextlib
import http.client
import http.server
import io
import json
import os
import shutil
import signal
import ssl
import subprocess
import threading
import zipfile

import pytest

from deployments import SITES, SOLERA, Deployment, config_of, solera, until
from fleet import activate, key_of, start_run, unregister
from solera.deploy.commands import registered
from solera.deploy.flower_inside import CONNECTION, program
from solera.deploy.keys import make_authority, make_node_key, make_server_certificate
from solera.deploy.programs import environment
from solera.deploy.templates import APP

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
FEDAVG = 'name = "fedavg"\n[method.local]\nepochs = 1\nbatch = 16\nlr = 0.05'


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    with Deployment(tmp_path_factory.mktemp("refusals"), config_of(FEDAVG)) as d:
        d.start_server()
        d.start_sites()
        d.expected = d.simulated()
        yield d


@contextlib.contextmanager
def intruder(network, folder, *options):
    """`solera deploy client` from another folder; its output file and its process."""
    out = folder / "intruder.out"
    with out.open("wb") as f:
        p = subprocess.Popen(
            [*SOLERA, "deploy", "client", str(folder), *options], stdout=f, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield out, p
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(p.pid, signal.SIGTERM)
        p.wait(60)


@pytest.fixture
def folder(network, tmp_path):
    """A copy of a site's folder, without its state: to change it."""
    return shutil.copytree(network.site("west"), tmp_path / "west", ignore=shutil.ignore_patterns("state", "log"))


def test_a_plain_client_gets_no_answer(network, folder):
    with intruder(network, folder, "--insecure") as (out, p):
        until(lambda: "no answer from the server" in out.read_text(), 120)
        assert p.poll() is None
        assert "connected" not in out.read_text()


def test_a_server_of_another_authority_is_left_alone(network, folder, tmp_path):
    (tmp_path / "other").mkdir()
    make_authority(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "ca.crt", folder / "ca.crt")
    with intruder(network, folder) as (out, p):
        assert p.wait(120) == 1
        assert "no certificate for it that this site's ca.crt trusts" in out.read_text()


def test_a_server_whose_certificate_has_expired_is_left_alone(network, folder, tmp_path):
    make_server_certificate(network.root / "ca", tmp_path, ["127.0.0.1"], until=-1.0)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    with (
        serving(http.server.BaseHTTPRequestHandler, context) as port,
        intruder(network, folder, "--server", f"127.0.0.1:{port}") as (out, _),
    ):
        until(lambda: "the server's certificate has expired" in out.read_text(), 120)


def test_a_key_that_is_not_registered_is_refused_and_logged_on_both_sides(network, folder):
    for name in ("node.key", "node.pub"):
        (folder / name).unlink()
    make_node_key(folder, "west")  # the name is in it; that helps nobody
    log = network.server / "log" / "superlink.log"
    before = log.read_text().count("No SuperNode found with the given public key")
    with intruder(network, folder) as (out, _):
        until(lambda: "the server refuses this site's key: node.pub was not among its keys" in out.read_text(), 120)
    assert log.read_text().count("No SuperNode found with the given public key") > before


def test_an_app_with_code_runs_nowhere(network, tmp_path):
    """Whoever reaches the control interface can submit an app. It gets no further than the gate."""
    canary = tmp_path / "canary"
    app = tmp_path / "evil"
    (app / "evil").mkdir(parents=True)
    (app / "pyproject.toml").write_text(
        APP.replace("solera.deploy.serverapp", "evil.server").replace("solera.deploy.clientapp", "evil.client")
    )
    for side, kind in (("server", "serverapp import ServerApp"), ("client", "clientapp import ClientApp")):
        code = f"import pathlib\nfrom flwr.{kind}\npathlib.Path({str(canary)!r}).touch()\napp = {kind.split()[-1]}()\n"
        (app / "evil" / f"{side}.py").write_text(code)
    env = environment(network.server)
    run = [program("flwr"), "run", str(app), CONNECTION, "--stream"]
    with contextlib.suppress(subprocess.TimeoutExpired):  # it streams until the run has ended
        subprocess.run(run, env=env, capture_output=True, timeout=60, stdin=subprocess.DEVNULL)
    assert not canary.exists()


def test_an_app_of_a_kind_that_no_deployment_has_runs_nowhere(network, tmp_path):
    """Flower has a program of its own for agents, and its SuperExec starts it, too."""
    canary, fab = tmp_path / "canary", io.BytesIO()
    tables = APP.replace('serverapp = "solera.deploy.serverapp:app"', 'agentapp = "evil.agent:app"')
    code = (
        f"import pathlib\nfrom flwr.agentapp import AgentApp\npathlib.Path({str(canary)!r}).touch()\napp = AgentApp()\n"
    )
    with zipfile.ZipFile(fab, "w") as z:
        z.writestr("pyproject.toml", tables)
        z.writestr("evil/__init__.py", "")
        z.writestr("evil/agent.py", code)
    log = network.server / "log" / "superexec.log"
    before = log.read_text().count("a deployment has no use for flwr-agentapp: refused")
    assert start_run(network.address, fab.getvalue(), network.server / "ca.crt") == 200
    until(lambda: log.read_text().count("a deployment has no use for flwr-agentapp: refused") > before, 60)
    assert not canary.exists()


def test_a_site_that_an_outsider_has_locked_out_is_named_and_comes_back_with_a_new_key(network):
    """One call without a login does it, and Flower never takes the key again."""
    node = registered(network.server)["west"].id
    assert unregister(network.address, int(node), network.server / "ca.crt") == 200
    until(lambda: "west is locked out" in network.said("server"), 120)  # the server looks now and then

    network.stop("west")
    for name in ("registered", "again"):
        before = len(network.log("server"))
        network.stop("server")
        network.start_server()
        said = network.said("server", before)
        assert said.count("west is locked out: its key was taken off the list") == 1, name
        assert "west is registered" not in said
    network.start_sites("west")
    until(lambda: "or the key was taken off the list" in network.output("west"), 120)
    network.stop("west")
    status = json.loads(solera("deploy", "status", network.server, "--json"))
    assert {n["site"]: n["status"] for n in status["nodes"]}["west"] == "unregistered"
    assert "locked out" in solera("deploy", "status", network.server)

    assert "has a new key" in solera("deploy", "rekey", network.site("west"))
    shutil.copy(network.site("west") / "node.pub", network.server / "keys" / "west.pub")
    network.stop("server")
    network.start_server()
    network.start_sites("west")
    assert network.finish("recovered") == network.expected
    assert network.failures("recovered") == []
    assert registered(network.server)["west"].id != node


def test_a_stolen_key_is_worth_nothing_after_a_new_one(network, folder, tmp_path):
    """And the node that has it, though Flower knew it, is off the list."""
    thief = shutil.copytree(folder, tmp_path / "thief")
    network.stop("west")
    solera("deploy", "rekey", network.site("west"))
    shutil.copy(network.site("west") / "node.pub", network.server / "keys" / "west.pub")
    old = registered(network.server)
    network.stop("server")
    network.start_server()
    network.start_sites("west")
    assert "west" not in old, "the old key is not that of a site any more"
    with intruder(network, thief) as (out, _):
        until(lambda: "the server refuses this site's key" in out.read_text(), 120)
    assert network.finish("rekeyed") == network.expected


def test_a_copied_key_is_refused_while_its_site_is_there_and_told_why(network, folder):
    with intruder(network, folder) as (out, _):
        until(lambda: "another node is there with a copy of the key" in out.read_text(), 120)
        assert network.finish("beside") == network.expected


def test_after_all_that_the_server_goes_on(network):
    assert network.finish("after") == network.expected
    assert network.failures("after") == []


@contextlib.contextmanager
def serving(handler, context):
    """A TLS server on the loopback interface; its port."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.handle_error = lambda *_: None  # clients that hang up
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def proxy_to(network):
    """What the page on deployment tells people to put in front of the server: the fleet's paths, nothing else."""

    class Proxy(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        passed: set[str] = set()  # noqa: RUF012
        refused: set[str] = set()  # noqa: RUF012

        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            if not self.path.startswith("/v1/fleet/"):
                self.refused.add(self.path)
                self.send_error(403)
                return
            self.passed.add(self.path)
            context = ssl.create_default_context(cafile=str(network.server / "ca.crt"))
            host, _, port = network.address.partition(":")
            behind = http.client.HTTPSConnection(host, int(port), timeout=60, context=context)
            behind.request("POST", self.path, body, {k: v for k, v in self.headers.items() if k.lower() != "host"})
            answer = behind.getresponse()
            content = answer.read()
            self.send_response(answer.status)
            for k, v in answer.getheaders():
                if k.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                    self.send_header(k, v)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            behind.close()

        def log_message(self, *_):
            pass

    return Proxy


def test_behind_a_reverse_proxy_sites_need_the_fleets_paths_and_nothing_else(network):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(network.server / "server.crt", network.server / "server.key")
    proxy = proxy_to(network)
    network.stop("west")
    with serving(proxy, context) as port:
        network._start("west", "deploy", "client", network.site("west"), "--server", f"127.0.0.1:{port}")
        try:
            assert network.finish("proxied") == network.expected
            assert proxy.passed
            assert proxy.refused == set(), "a site asks for nothing that the proxy does not pass on"
            connection = http.client.HTTPSConnection(
                "127.0.0.1", port, context=ssl.create_default_context(cafile=str(network.server / "ca.crt"))
            )
            for path in ("/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/pull-messages"):
                connection.request("POST", path, b"", {"content-length": "0"})
                answer = connection.getresponse()
                answer.read()
                assert answer.status == 403
            assert activate(f"127.0.0.1:{port}", key_of(network.site("east")), {}, ca=network.server / "ca.crt") == 401
        finally:
            network.stop("west")
    network.start_sites("west")
    assert set(SITES) == set(network.processes) - {"server"}
