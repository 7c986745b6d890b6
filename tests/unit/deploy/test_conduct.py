"""The programs of the server and of its sites, on a grid inside this process: every folder as `solera deploy init`
wrote it, no network."""

import contextlib
import json
import pathlib
import shutil
import sys

import pytest
import tomli_w
import torch

from deployments import CODE, DIFFERENT, EQUAL, SITES, config_of
from grids import LocalGrid, LocalSite, Node, error, in_a_flower_task  # noqa: F401
from solera.core.errors import ConfigError, SoleraError
from solera.core.federation import QuorumNotMet
from solera.core.plugins import code_allowed
from solera.core.wire import Limits
from solera.deploy import site as deployed
from solera.deploy.conduct import conduct
from solera.deploy.flower import PROTOCOL, pack, unpack
from solera.deploy.init import init
from solera.deploy.site import OwnSite, answer, keep_site, site_of
from solera.models import hf
from solera.place.fingerprint import fingerprint
from solera.runs import loop
from solera.runs.config import load_config
from solera.runs.loop import scenario_of
from solera.runs.read import read_run
from solera.runs.rehearsal import rehearse_config
from text_sites import OWN, sentences, text_sites

ROOT = pathlib.Path(deployed.__file__).parents[1]
pytestmark = pytest.mark.usefixtures("in_a_flower_task")
LOCAL = "[method.local]\nepochs = 1\nbatch = 16\nlr = 0.05"
FEDDF = f'name = "feddf"\n{LOCAL}\n[method.fusion]\nsteps = 3\nbatch = 16'
DSFL = f'name = "dsfl"\n{LOCAL}\n[method.distill]\nepochs = 1\nbatch = 16\nlr = 0.05'
SCAFFOLD = f'name = "scaffold"\n{LOCAL}'


class KeyedGrid(LocalGrid):
    """Its nodes show the keys of their folders."""

    def get_nodes(self):
        return [
            Node(n, (s.folder / "node.pub").read_bytes()) for n, s in self.sites.items() if s.name not in self.offline
        ]


class Parties:
    """The folders of a server and three sites."""

    def __init__(self, home, config, code=CODE):
        self.home, self.server = home, home / "d" / "server"
        (home / "own.py").write_text(code)
        (home / "federation.toml").write_text(config)
        init(home / "federation.toml", home / "d", "127.0.0.1:8000")
        self.made = OwnSite  # how a message finds its site
        self.grid = KeyedGrid(OwnSite(self.site(k)) for k in SITES)

    def site(self, k):
        return self.home / "d" / "sites" / k

    def run(self, name="first"):
        for number, site in self.grid.sites.items():  # each message finds the files as they are now
            self.grid.sites[number] = self.made(site.folder)
        with contextlib.chdir(self.server):  # as its program is started
            return conduct(self.grid, self.server, name, "server.toml")

    def change(self, folder, *change):
        file = folder / ("server.toml" if folder == self.server else "site.toml")
        assert change[0] in file.read_text()
        file.write_text(file.read_text().replace(*change))

    def simulated(self):
        with code_allowed(self.home):
            config = load_config(self.home / "federation.toml", overrides=["engine.name='inprocess'"])
            return loop.run(config, self.home / "simulated").digest

    def asked(self, k):
        return [json.loads(line) for line in (self.site(k) / "log" / "asked.jsonl").read_text().splitlines()]


@pytest.fixture
def parties(tmp_path):
    return lambda method, models=DIFFERENT, rounds=2, **more: Parties(
        tmp_path, config_of(method, models, rounds, **more)
    )


@pytest.mark.parametrize(("method", "models"), [(FEDDF, DIFFERENT), (SCAFFOLD, EQUAL), (DSFL, DIFFERENT)])
def test_what_was_rehearsed_is_what_is_deployed(parties, method, models):
    p = parties(method, models)
    assert p.run().digest == p.simulated()


def test_sites_that_compute_other_bits_are_named(parties, caplog, monkeypatch):
    p = parties(SCAFFOLD, EQUAL, rounds=1)
    told = iter(["feedfacefeedface", fingerprint(), fingerprint()])  # as the sites are greeted
    monkeypatch.setattr("solera.deploy.site.fingerprint", lambda portable: next(told))
    p.run()
    (line,) = [r.getMessage() for r in caplog.records if "other bits" in r.getMessage()]
    assert f"than the server (fingerprint {fingerprint()})" in line
    assert line.count("feedfacefeedface") == 1


def test_public_samples_are_sent_once_and_kept(parties):
    p = parties(DSFL)
    p.run()
    p.run("second")
    for k in SITES:
        sent = [line for line in p.asked(k) if line["task"] == "public"]
        assert len(sent) == 1
        assert sent[0]["bytes_in"] >= 60 * 8 * 4, "60 samples of 8 numbers"
        assert sent[0]["bytes_out"] == 0


def test_public_samples_are_counted_alike_by_a_dry_run_a_run_and_a_deployment(parties):
    p = parties(DSFL)
    p.run()
    p.simulated()
    with code_allowed(p.home):
        config = load_config(p.home / "federation.toml", overrides=["engine.name='inprocess'"])
        dry, message = rehearse_config(config), scenario_of(config).server.lent
    counted = [r.traffic for r in read_run(p.server / "runs" / "first").rounds]
    assert counted == [r.traffic for r in read_run(p.home / "simulated").rounds] == dry.rounds
    sent = {k: [line["bytes_in"] for line in p.asked(k) if line["task"] == "public"] for k in SITES}
    assert counted[0].content["down"]["data"] == 3 * 60 * 8 * 4, "60 samples of 8 numbers, for each of 3 sites"
    assert sent == {k: [message.size] for k in SITES}, "what is counted is what is sent"


LOCAL_TABLE = {"epochs": 1, "batch": 4, "lr": 0.05}
TEXT_METHODS = {
    "fusionlarge": {"name": "fusionlarge", "local": LOCAL_TABLE, "fusion": {"steps": 3, "batch": 8}},
    "mnfl": {"name": "mnfl", "local": LOCAL_TABLE},
}


def text_parties(home, method, where):
    """Three sites that read texts with three tokenizers, and a server with a larger model."""
    pytest.importorskip("transformers", reason="needs the extra text")
    tables = text_sites(home, TEXT_METHODS[method], where=where)
    tables["engine"] = {"name": "flower", "wait_s": 240}
    return Parties(home, tomli_w.dumps(tables), OWN)


@pytest.mark.parametrize(("method", "where"), [("fusionlarge", "server"), ("mnfl", "server"), ("mnfl", "everywhere")])
def test_sites_with_different_tokenizers_are_deployed_as_they_were_rehearsed(tmp_path, method, where):
    p = text_parties(tmp_path, method, where)
    assert p.run().digest == p.simulated()
    lines = (p.server / "runs" / "first" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["failures"] for line in lines] == [[], []]
    sent = {k: [line["bytes_in"] for line in p.asked(k) if line["task"] == "public"] for k in SITES}
    if method == "fusionlarge" or where == "everywhere":  # no site is asked about them, or each has them
        assert sent == {"east": [], "north": [], "west": []}
        return
    assert sent["east"] == sent["north"] == sent["west"], "all get the same texts, whatever their tokenizers"
    texts = [text for text, _ in sentences(24, 2)]
    assert sum(map(len, texts)) / 2 < sent["east"][0] < 2 * sum(map(len, texts)), "and no tokens"


def test_sites_that_are_kept_answer_run_after_run_as_new_ones(tmp_path, monkeypatch):
    p = text_parties(tmp_path, "mnfl", "server")
    wanted = p.run().digest
    for k in SITES:
        keep_site(p.site(k))
    made = set()
    plain = deployed.site_host
    monkeypatch.setattr(deployed, "site_host", lambda c, k, model: made.add((k, model is None)) or plain(c, k, model))
    p.made = site_of
    assert [p.run(name).digest for name in ("second", "third")] == [wanted, wanted]
    assert made == {("west", False)}, "its samples are given by code; its model is not built again"
    deployed._KEPT.clear()


def test_few_files_are_between_a_message_and_the_task_at_a_site_that_is_kept(tmp_path, monkeypatch):
    """Counted are those that pass it on, not the ground that all parts stand on: core, place, train and data."""
    p = text_parties(tmp_path, "mnfl", "server")
    p.run()
    for k in SITES:
        keep_site(p.site(k))
    p.made, passed = site_of, {}

    def counted(record, site):
        seen = []

        def look(frame, event, _):
            file = pathlib.Path(frame.f_code.co_filename)
            if event == "call" and file.is_relative_to(ROOT):
                name = "/".join(file.relative_to(ROOT).parts)
                if name.startswith("methods/"):
                    passed.setdefault(site.name, list(seen))
                elif name not in seen and name.partition("/")[0] not in ("core", "place", "train", "data"):
                    seen.append(name)

        sys.setprofile(look)
        try:
            return answer(record, site)
        finally:
            sys.setprofile(None)

    monkeypatch.setattr("grids.answer", counted)
    p.run("second")
    assert len(passed["east"]) <= 8, passed["east"]
    deployed._KEPT.clear()


def test_a_site_whose_tokenizer_differs_is_named_before_any_work(tmp_path):
    p = text_parties(tmp_path, "fusionlarge", "server")
    file = p.site("east") / "encoder" / "tokenizer.json"
    known = json.loads(file.read_text())
    ids = known["model"]["vocab"]
    ids["good"], ids["bad"] = ids["bad"], ids["good"]
    file.write_text(json.dumps(known))
    for kept in (hf.encoding, hf._tokenizer):  # a site answers each message in a process of its own
        kept.cache_clear()
    said = r"site east: tokenizer is wordpiece-\w+ there and wordpiece-\w+ here: the tokenizer of sites\.east\.model"
    with pytest.raises(ConfigError, match=said):
        p.run()
    assert {line["task"] for k in SITES for line in p.asked(k)} == {"hello"}


def test_public_texts_that_are_none_are_not_kept(tmp_path):
    from solera.core.errors import DataError
    from solera.core.wire import encode
    from solera.deploy.site import Samples, keep_public

    site = OwnSite(text_parties(tmp_path, "mnfl", "server").site("north"))
    letters = torch.tensor(list(b"good film"), dtype=torch.uint8)
    kept = site.public_of(Samples(letters, None, torch.tensor([[4], [5]])))
    assert kept.texts == ("good", " film")
    with pytest.raises(DataError, match="do not have the lengths"):
        keep_public(site, kept.digest, encode(Samples(letters, None, torch.tensor([[4], [6]]))))
    assert keep_public(site, kept.digest, encode(Samples(letters, None, torch.tensor([[4], [5]]))))


def test_a_run_goes_on_where_it_was(parties):
    p = parties(SCAFFOLD, EQUAL, rounds=3)
    expected = p.simulated()
    p.grid.faults["west"] = stop_at(p.grid, 2)
    with pytest.raises(KeyboardInterrupt):
        p.run()
    p.grid.faults.clear()
    assert p.run().digest == expected


def stop_at(grid, count):
    """Behave for some messages, then interrupt the server."""
    from flwr.app import Message

    seen = []

    def behave(message):
        seen.append(message)
        if len(seen) > count:
            raise KeyboardInterrupt
        return Message(answer(message.content, grid.sites[message.metadata.dst_node_id]), reply_to=message)

    return behave


def test_a_site_that_has_changed_in_the_middle_of_a_run_is_named(parties):
    p = parties(FEDDF, rounds=2)

    def other_data(message):
        from flwr.app import Message

        file = p.site("north") / "site.toml"
        if json.loads(message.content["facts"]["json"])["what"] == "call":
            file.write_text(file.read_text().replace("own.py:north", "own.py:west"))
        return Message(answer(message.content, OwnSite(p.site("north"))), reply_to=message)

    p.grid.faults["north"] = other_data
    p.run()
    lines = (p.server / "runs" / "first" / "metrics.jsonl").read_text().splitlines()
    failures = [f for line in lines for f in json.loads(line)["failures"]]
    assert {f["client"] for f in failures} == {"north"}
    assert "north is not as it was when the run began" in failures[0]["reason"]


def test_a_site_that_has_changed_between_two_parts_of_a_run_is_named(parties):
    p = parties(SCAFFOLD, EQUAL, rounds=2)
    p.grid.faults["west"] = stop_at(p.grid, 1)
    with pytest.raises(KeyboardInterrupt):
        p.run()
    p.grid.faults.clear()
    p.change(p.site("north"), "own.py:north", "own.py:west")
    with pytest.raises(ConfigError, match=r"site north is not as it was when the run began \(it had 40 examples"):
        p.run()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("own.py:split_deep", "own.py:split_slim"), "site north: architecture is split_slim there and split_deep"),
        (('classes = [\n    "a",\n    "b",\n    "c",\n]', 'classes = ["c", "b", "a"]'), "site north: form"),
    ],
)
def test_a_site_that_is_set_up_for_another_run_is_named(parties, change, said):
    p = parties(FEDDF)
    p.change(p.site("north"), *change)
    with pytest.raises(ConfigError, match=said):
        p.run()


def test_a_site_that_is_not_there_at_the_beginning(parties):
    p = parties(FEDDF)
    p.change(p.server, "wait_s = 240", "wait_s = 0.3")
    p.grid.offline.add("east")
    with pytest.raises(QuorumNotMet, match=r"east did not say hello within 0\.3 s; submit again"):
        p.run()
    p.change(p.server, "wait_s = 0.3", 'wait_s = 0.3\nabsent = "skip"')
    result = p.run()
    assert sorted(json.loads((p.server / "runs" / ".first.sites.json").read_text())) == ["north", "west"]
    assert result.digest


def test_the_name_of_a_site_is_what_its_key_says(parties):
    """West presents itself as east, files and all; its key is still its own."""
    p = parties(FEDDF)
    shutil.copy(p.site("east") / "site.toml", p.site("west") / "site.toml")
    text = (p.site("west") / "deploy.toml").read_text()
    (p.site("west") / "deploy.toml").write_text(text.replace('"west"', '"east"'))
    p.change(p.server, "wait_s = 240", 'wait_s = 0.3\nabsent = "skip"')
    p.run()
    assert next(line["outcome"] for line in p.asked("west")).startswith(
        "WireError: asked of 'west', this is 'east': the server has another key under that name"
    )
    assert sorted(json.loads((p.server / "runs" / ".first.sites.json").read_text())) == ["east", "north"]


def test_without_keys_nodes_are_asked_who_they_are(parties):
    """On a server that was started with --insecure, on the loopback interface."""
    p = parties(SCAFFOLD, EQUAL)
    p.grid.get_nodes = lambda: [Node(n, b"") for n in p.grid.sites]
    p.grid.sites[999] = LocalSite("stranger", p.home / "stranger", None)
    with contextlib.chdir(p.server):
        digest = conduct(p.grid, p.server, "first", "server.toml", insecure=True).digest
    assert digest == p.simulated()
    assert [line["task"] for line in p.asked("east")][:2] == ["who", "hello"]
    assert sum(m.metadata.dst_node_id == 999 for m in p.grid.sent) == 1, "it was asked who it is, and nothing else"


def test_two_sites_with_one_key_are_refused(parties):
    p = parties(FEDDF)
    shutil.copy(p.server / "keys" / "east.pub", p.server / "keys" / "west.pub")
    with pytest.raises(ConfigError, match="sites east and west have the same key"):
        p.run()


def test_a_run_is_a_name_and_its_configuration_a_file_of_the_server(parties):
    p = parties(FEDDF)
    with pytest.raises(ConfigError, match="only lower-case letters"):
        conduct(p.grid, p.server, "../other", "server.toml")
    with pytest.raises(ConfigError, match="a file in the server's folder"):
        conduct(p.grid, p.server, "first", "../federation.toml")


def ask(asked, **facts):
    told, _ = unpack(answer(pack({"protocol": PROTOCOL, "site": asked.name, "nonce": "n", **facts}), asked), Limits())
    return told.get("error", "")


def test_a_site_answers_whatever_it_is_asked(parties):
    site = OwnSite(parties(FEDDF).site("east"))
    for facts, said in [
        ({}, "what = 'None'"),
        ({"what": "shell"}, "'shell' is not something that can be asked"),
        ({"what": "hello"}, "run_seed = 'None'"),
        ({"what": "public", "public": "../x"}, "public = '../x'"),
        ({"what": "public", "public": None}, "public samples without a digest"),
        ({"what": "call", "task": "os.system"}, "unknown task 'os.system'"),
        ({"what": "call", "task": "local_update", "run": "../x"}, "Error"),
        ({"what": "hello", "run_seed": 1, "site": "west"}, "asked of 'west', this is 'east'"),
    ]:
        assert said in ask(site, **facts), facts
    assert len((site.folder / "log" / "asked.jsonl").read_text().splitlines()) == 8, "all of it is in the log"


def test_other_public_samples_than_the_server_says_are_not_kept(parties):
    from solera.core.wire import WireError, encode
    from solera.deploy.site import Samples, keep_public

    site = OwnSite(parties(DSFL).site("east"))
    blob = encode(Samples(torch.zeros(3, 8), None))
    with pytest.raises(WireError, match="the public samples are"):
        keep_public(site, "0" * 64, blob)
    assert not list((site.folder / "state").rglob("*.safetensors"))


def test_an_error_of_flower_at_hello_names_the_site(parties):
    p = parties(FEDDF)
    p.grid.faults["north"] = error(1, "no module")
    with pytest.raises(SoleraError, match="north did not say hello"):
        p.run()
