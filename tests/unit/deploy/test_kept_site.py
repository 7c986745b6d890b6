"""A site that is kept between messages: its files are read once, a changed one is read again, and nothing of one
message is left for the next."""

import json
import os
import subprocess
import sys

import pytest
import torch

from helpers import ask_standby, wait
from solera.data import Public
from solera.deploy import site as deployed
from solera.deploy.gate import write_programs
from solera.deploy.handover import SOCKET
from solera.deploy.site import keep_site, site_of
from solera.place.placement import Placement

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks safely")
SITE = """
[run]
seed = 5

[data]
name = "table"
shape = [2]
classes = ["a", "b"]
client_test = 0.25

[public]
source = "none"

[sites.east]
data = "east.csv"
model = "{model}"
tasks = []

[method]
name = "fedavg"
"""
OWN = """
from torch import nn


def small():
    return nn.Linear(2, 2)


def data():
    return [[float(i), 1.0] for i in range(8)], [i % 2 for i in range(8)]
"""
# The standby, and in the place of Flower's program one that says what it read to make the site's host.
PROGRAM = """
import json, os, pathlib, sys
from solera.deploy import standby

def program(name):
    opened = []
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
    from solera.deploy.site import site_of
    site = site_of(pathlib.Path(os.environ[standby.FOLDER]))
    host = site.host(int(sys.argv[1]))
    read = sorted({pathlib.Path(f).name for f in opened} & {"site.toml", "deploy.toml", "east.csv", "own.py"})
    print(json.dumps({"read": read, "rows": len(host.train) + len(host.test), "parent": os.getppid()}))

standby.behind_the_gate, standby.LOAD, standby.AGAIN = program, ("solera.deploy.site",), (__file__,)
standby.main(*sys.argv[1:])
"""


@pytest.fixture
def folder(tmp_path):
    home = tmp_path / "east"
    (home / "state").mkdir(parents=True)
    (home / "deploy.toml").write_text('role = "site"\nname = "east"\naddress = "127.0.0.1:1"\n')
    (home / "site.toml").write_text(SITE.format(model="mlp"))
    write_rows(home, 12)
    yield home
    deployed._KEPT.clear()


def write_rows(home, count):
    (home / "east.csv").write_text("x,y,label\n" + "".join(f"{i},1,{'ab'[i % 2]}\n" for i in range(count)))


@pytest.fixture
def reads(monkeypatch):
    """How often a configuration is read, samples are, and a model is built."""
    counts = dict.fromkeys(("load_config", "site_host"), 0)
    for name in counts:
        plain = getattr(deployed, name)

        def counted(*args, plain=plain, name=name):
            counts[name] += 1
            return plain(*args)

        monkeypatch.setattr(deployed, name, counted)
    return counts


def test_two_messages_read_the_files_once(folder, reads):
    changed = keep_site(folder)
    assert reads == {"load_config": 1, "site_host": 1}
    first, second = (site_of(folder).host(5) for _ in range(2))
    assert reads == {"load_config": 1, "site_host": 1}
    assert len(first.train) + len(second.test) == 12
    assert not changed()


def test_what_a_message_changes_is_gone_in_the_next(folder):
    keep_site(folder)
    first = site_of(folder).host(5)
    site_of(folder).lend(first, Public(torch.zeros(3, 2), (), ()))
    model = first.client("east", 0, {}, Placement()).model()
    with torch.no_grad():
        next(model.parameters()).zero_()
    second = site_of(folder).host(5)
    assert second.public is None
    assert all(p.abs().sum() > 0 for p in list(second.template().parameters())[:1])


@pytest.mark.parametrize("file", ["site.toml", "deploy.toml", "east.csv"])
def test_a_file_that_changes_is_noticed(folder, file):
    changed = keep_site(folder)
    assert not changed()
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content)
    assert changed(), "the same bytes, written anew"


def test_another_run_s_seed_makes_another_host_which_is_kept_from_then_on(folder, reads):
    changed = keep_site(folder)
    assert site_of(folder).host(6).seed == 6
    assert reads["site_host"] == 2
    assert not changed(), "before the next message"
    assert reads["site_host"] == 3
    assert site_of(folder).host(6).seed == 6
    assert reads == {"load_config": 1, "site_host": 3}


@pytest.mark.parametrize("content", [b"", b"x", b"\xff", b"9" * 5000])
def test_a_damaged_note_of_the_seed_does_no_harm(folder, content):
    (folder / "state" / "seed").write_bytes(content)
    assert not keep_site(folder)()
    assert site_of(folder).host(5).seed == 5


def test_a_site_that_cannot_be_made_is_left_to_the_message_and_made_once_it_can_be(folder):
    (folder / "east.csv").unlink()
    changed = keep_site(folder)
    assert not deployed._KEPT
    write_rows(folder, 12)
    assert changed()


def test_data_that_own_code_gives_is_asked_for_with_each_message(folder, reads):
    (folder / "own.py").write_text(OWN)
    text = SITE.format(model="own.py:small").replace("east.csv", "own.py:data")
    (folder / "site.toml").write_text(text)
    changed = keep_site(folder)
    first, second = (site_of(folder).host(5) for _ in range(2))
    assert reads == {"load_config": 1, "site_host": 2}
    assert first.template() is second.template(), "the model is not built again"
    (folder / "own.py").write_text(OWN + "\n")
    assert changed()


def test_the_standby_reads_a_site_once_and_again_when_it_has_changed(folder):
    bin_ = folder / "state" / "bin"
    write_programs(bin_, standby=True)
    env = {**os.environ, "SOLERA_DEPLOYMENT": str(folder), "MINE": "yes"}
    (folder / "program.py").write_text(PROGRAM)
    p = subprocess.Popen([sys.executable, folder / "program.py", bin_], env=env, cwd=folder)

    def ask():
        copy = ask_standby(bin_, folder, "5", env=env)
        out, _ = copy.communicate("", timeout=120)
        assert copy.returncode == 0, out
        return json.loads(out.splitlines()[-1])

    try:
        wait(lambda: (bin_ / SOCKET).exists())
        assert [ask(), ask()] == [{"read": [], "rows": 12, "parent": p.pid}] * 2
        write_rows(folder, 20)
        assert ask() == {"read": [], "rows": 20, "parent": p.pid}, "the same process, started anew"
    finally:
        p.kill()
        p.wait()
