"""The live view: loopback only, read only, current."""

import http.client
import json
import threading

import pytest

from run_directories import write_run
from solera.report.page import LiveView, Source


@pytest.fixture
def served(tmp_path):
    """(ask, directory): ask(method, path, **headers) -> (status, headers, body)"""
    directory = tmp_path / "run"
    view = LiveView(Source([directory]))
    thread = threading.Thread(target=view.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    port = view.server_address[1]

    def ask(method="GET", path="/data.json", **headers):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.putrequest(method, path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value.format(port=port))
        connection.endheaders()
        answer = connection.getresponse()
        found = answer.status, dict(answer.getheaders()), answer.read()
        connection.close()
        return found

    yield ask, directory
    view.shutdown()
    view.server_close()
    thread.join()


def test_it_listens_on_this_machine_only():
    view = LiveView(Source([]))
    assert view.server_address[0] == "127.0.0.1"
    view.server_close()


def test_the_page_and_its_data(served):
    ask, directory = served
    write_run(directory)
    status, headers, body = ask(path="/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b'data-live="true"' in body
    status, headers, body = ask()
    assert status == 200
    assert json.loads(body)["runs"][0]["done"] == 10
    assert ask("HEAD")[0::2] == (200, b"")
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "Access-Control-Allow-Origin" not in headers


def test_it_waits_for_a_run_that_has_not_begun_and_follows_it(served):
    ask, directory = served
    assert json.loads(ask()[2])["runs"] == []
    write_run(directory, rounds=3, finished=False)
    whole = (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    (directory / "metrics.jsonl").write_text(whole[0])
    assert json.loads(ask()[2])["runs"][0]["done"] == 1
    with open(directory / "metrics.jsonl", "a") as f:
        f.write(whole[1] + whole[2][:50])  # the third is being written
    data = json.loads(ask()[2])
    assert data["runs"][0]["done"] == 2
    with open(directory / "metrics.jsonl", "a") as f:
        f.write(whole[2][50:])
    assert json.loads(ask()[2])["runs"][0]["done"] == 3


def test_what_has_not_changed_is_not_sent_again(served):
    ask, directory = served
    write_run(directory)
    tag = ask()[1]["ETag"]
    assert ask(If_None_Match=tag)[0::2] == (304, b"")
    (directory / "summary.json").unlink()
    assert ask(If_None_Match=tag)[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "[::1]:{port}", ""]
)
def test_other_hosts_are_refused(served, host):
    """A web page whose name was pointed at 127.0.0.1 (DNS rebinding) sends its own name."""
    status, _, body = served[0](Host=host)
    assert status == 421
    assert b"{" not in body


@pytest.mark.parametrize("host", ["127.0.0.1:{port}", "localhost:{port}", "LOCALHOST:{port}"])
def test_its_own_names_are_accepted(served, host):
    assert served[0](Host=host)[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_but_reading(served, method):
    assert served[0](method)[0] == 501


@pytest.mark.parametrize("path", ["/x", "/../etc/passwd", "/config.toml", "/data.json/", "/%2e%2e/run.json"])
def test_there_are_two_addresses(served, path):
    status, _, body = served[0](path=path)
    assert status == 404
    assert path.encode() not in body


def test_a_directory_that_cannot_be_read_is_told_on_the_page(served):
    ask, directory = served
    write_run(directory)
    (directory / "metrics.jsonl").unlink()
    (directory / "metrics.jsonl").mkdir()
    status, _, body = ask()
    assert status == 200
    assert json.loads(body)["notes"]


def test_a_folder_of_runs_is_a_comparison(tmp_path):
    for method in ("fedavg", "feddf"):
        write_run(tmp_path / method, method=method)
    assert [g["label"] for g in Source([tmp_path]).data()["groups"]] == ["fedavg", "feddf"]
