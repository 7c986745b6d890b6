"""A server that lies to a site: what it asks beyond the agreed run is refused, and the site's log says what it was."""

import contextlib
import dataclasses
import json
import os

import pytest
import torch

from deployments import CODE, DIFFERENT, config_of
from grids import in_a_flower_task  # noqa: F401
from solera.core.errors import ConfigError
from solera.core.task import TASKS, Client, Task
from solera.core.wire import Limits, decode, encode
from solera.deploy import site as site_module
from solera.deploy.flower import PROTOCOL, pack, unpack
from solera.deploy.init import init
from solera.deploy.site import OwnSite, answer
from solera.methods.fedgkt import Extracted
from solera.train.fitting import Local

pytestmark = pytest.mark.usefixtures("in_a_flower_task")
LOCAL = "[method.local]\nepochs = 1\nbatch = 16\nlr = 0.05"
FEDDF = f'name = "feddf"\n{LOCAL}\n[method.fusion]\nsteps = 3'
FEDGKT = (
    f'name = "fedgkt"\nserver_rounds = []\nserver_epochs = []\n{LOCAL}\noptimizer = "sgd"\n[method.server]\nepochs = 1'
)
# The site's own model has a layer whose output is its input, as `body.flatten` is in a perceptron for images.
OPEN_LAYER = CODE.replace(
    'def split_wide():\n    return wrap(wide(), classifier="2"',
    'def split_wide():\n    return wrap(nn.Sequential(nn.Flatten(), *wide()), classifier="3"',
)


def east(home, method, code=OPEN_LAYER):
    home.mkdir(exist_ok=True)
    (home / "own.py").write_text(code)
    (home / "f.toml").write_text(config_of(method, DIFFERENT))
    init(home / "f.toml", home / "d", "127.0.0.1:8000")
    return OwnSite(home / "d" / "sites" / "east")


def ask(site, task, about=None, **arguments):
    """A call as a server sends it: what the site says, and what leaves it."""
    facts = {
        "protocol": PROTOCOL, "what": "call", "site": site.name, "nonce": "n", "run": "first", "task": task, "step": 1,
        "seed": 1, "run_seed": 5, "after": None, "keep": [], "keep_from": 0, **(about or {}),
    }  # fmt: skip
    told, blob = unpack(answer(pack(facts, encode(arguments)), site), Limits())
    return told, blob


def extraction(**changes):
    """What FedGKT asks of the 48 training samples of east, with a layer that gives the samples themselves."""
    first = {
        "local": Local(epochs=0, batch=16, lr=0.05), "teacher": torch.empty(0, 3), "alpha": 1.0, "temperature": 3.0,
        "layer": "body.0", "examples": 48, "shape": [8], "classes": 3,
    }  # fmt: skip
    return {**first, **changes}


def last(site):
    return json.loads((site.folder / "log" / "asked.jsonl").read_text().splitlines()[-1])


def test_a_server_cannot_take_the_samples_by_another_methods_task(tmp_path):
    """Without the list the whole training set leaves, equal bit for bit: that is what a list is for."""
    site = east(tmp_path, FEDDF)
    told, blob = ask(site, "train_and_extract", **extraction())
    assert "east does not answer train_and_extract" in told["error"]
    assert blob == b""
    line = last(site)
    assert line["outcome"].endswith(told["error"].removeprefix("WireError: "))
    assert (line["arguments"]["layer"], line["arguments"]["local.epochs"]) == ("body.0", 0)
    assert line["bytes_out"] == 0
    assert not (site.folder / "state" / "runs").exists()

    lists = {"tasks": ["train_and_extract"], "bounds": dict.fromkeys(line["arguments"], "*")}
    site.own = dataclasses.replace(site.own, **lists)  # what every site did before
    told, blob = ask(site, "train_and_extract", **extraction())
    taken = decode(blob, Extracted)
    own = site.host(5).client("east", 1, {}, site.place).train
    assert torch.equal(taken.features, own.inputs)
    assert torch.equal(taken.labels.long(), own.labels)


def test_layer_and_shape_of_a_method_that_names_them_are_the_sites_own(tmp_path):
    site = east(tmp_path, FEDGKT)
    agreed = extraction(layer="adapter", local=Local(epochs=1, batch=16, lr=0.05))
    assert "error" not in ask(site, "train_and_extract", **agreed)[0]
    for change, said in [
        ({"layer": "body.0"}, 'layer = "body.0": sites.east.bounds in its site.toml has "adapter"'),
        ({"shape": [16]}, "shape = 16: sites.east.bounds in its site.toml has 8"),
        ({"local": Local(epochs=0, batch=16, lr=0.05)}, "local.epochs = 0: sites.east.bounds in its site.toml has 1"),
        ({"local": Local(epochs=1, batch=1, lr=0.05)}, "local.batch = 1: sites.east.bounds in its site.toml has 16"),
        ({"local": Local(epochs=1, batch=16, lr=0.5)}, "local.lr = 0.5: sites.east.bounds in its site.toml has 0.05"),
        ({"local": Local(steps=9, batch=16, lr=0.05)}, "local.epochs = 5: "),
        ({"local": Local(epochs=1, steps=9, batch=16, lr=0.05)}, "local.steps = 9: sites.east.bounds in its site.toml "
         "has no such line"),
        ({"examples": 10**12}, "examples = 1000000000000: sites.east.bounds in its site.toml has 48"),
    ]:  # fmt: skip
        told, blob = ask(site, "train_and_extract", **{**agreed, **change})
        assert said in told.get("error", ""), change
        assert blob == b""
        assert said in last(site)["outcome"]


def test_a_site_that_was_made_before_there_were_lists_refuses_with_a_way_out(tmp_path):
    from solera.deploy.commands import attend

    site = east(tmp_path, FEDDF)
    file = site.folder / "site.toml"
    text = file.read_text()
    file.write_text(text[: text.index("tasks = ")])
    told, blob = ask(OwnSite(site.folder), "local_update", weights={}, local=Local(), mu=0.0)
    assert "site.toml lacks sites.east.tasks" in told["error"]
    assert "solera deploy init" in told["error"]
    assert blob == b""
    with pytest.raises(ConfigError, match=r"site.toml lacks sites\.east\.tasks.*solera deploy init"):
        attend(site.folder)


def test_what_the_server_asked_is_in_the_log_and_never_fills_it(tmp_path):
    site = east(tmp_path, FEDDF)
    names = [f"layer-{i}-" + "x" * 500 for i in range(5000)]
    told, _ = ask(
        site, "train_part", weights={}, classes=torch.zeros(3), rows=names, local=Local(), rate=1.0, static=True
    )
    assert "east does not answer train_part" in told["error"]
    line = last(site)
    assert line["arguments"]["rate"] == 1.0
    assert line["arguments"]["rows"] == [f"layer-{i}-" + "x" * 56 for i in range(8)] + ["..."]
    assert len(json.dumps(line)) < 4000


@contextlib.contextmanager
def task_of_its_own(site, name, fn, returns, **takes):
    """A task in the site's installation that it answers."""
    TASKS[name] = Task(name, fn, takes, returns)
    site.own = dataclasses.replace(site.own, tasks=[name], bounds=dict.fromkeys(takes, "*"))
    try:
        yield
    finally:
        del TASKS[name]


@pytest.mark.parametrize("keeps_state", [False, True])
def test_a_reply_that_is_not_of_its_type_does_not_leave_the_site(tmp_path, keeps_state):
    """Whether or not the task has changed what the site keeps."""
    site = east(tmp_path, FEDDF)

    def slip(client: Client, examples: int) -> Extracted:
        if keeps_state:
            client.state["model"] = {"w": torch.ones(2)}
        return Extracted(client.train.inputs, torch.zeros(48, 3), client.train.labels.int())

    takes = {"examples": int, "shape": list[int], "classes": int}
    with task_of_its_own(site, "test.slip", lambda c, examples, shape, classes: slip(c, examples), Extracted, **takes):
        told, blob = ask(site, "test.slip", examples=48, shape=[4], classes=3)
    assert "features: (48, 8) torch.float32, expected (48, 4)" in told["error"]
    assert blob == b""
    assert last(site)["bytes_out"] == 0
    assert not list((site.folder / "state").rglob("*.safetensors"))


def test_an_error_does_not_tell_where_files_are(tmp_path):
    site = east(tmp_path, FEDDF)

    def fail(client: Client) -> None:
        raise FileNotFoundError(2, "No such file", f"{tmp_path}/my patients/of ward 7.csv")

    def explain(client: Client) -> None:
        raise ValueError(f"{tmp_path}/my patients/of ward 7.csv: row 3 has no label")

    with task_of_its_own(site, "test.explain", explain, type(None)):
        assert "ValueError: (a path): row 3 has no label" in ask(site, "test.explain")[0]["error"]
    with task_of_its_own(site, "test.fail", fail, type(None)):
        told, _ = ask(site, "test.fail")
        assert str(tmp_path) in last(site)["outcome"], "its own people are told"
        assert "FileNotFoundError" in told["error"]
        assert "(a path)" in told["error"]
        missing = ask(site, "test.fail", {"after": [1, "0" * 64], "run": "second"})[0]["error"]
    for text in (told["error"], missing):
        assert str(tmp_path) not in text
        assert "patients" not in text
        assert "/" not in text


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"step": -5}, "step = '-5'"),
        ({"step": 10**12}, "step = '1000000000000'"),
        ({"keep_from": -1}, "keep_from = '-1'"),
        ({"seed": -1}, "seed = '-1'"),
        ({"after": [-1, "0" * 64]}, "version"),
        ({"keep": [[10**12, "0" * 64]]}, "version"),
    ],
)
def test_steps_are_numbers_that_the_files_of_states_can_have(tmp_path, about, said):
    site = east(tmp_path, FEDDF)
    with task_of_its_own(site, "test.nothing", lambda client: None, type(None)):
        told, _ = ask(site, "test.nothing", about)
    assert said in told["error"]
    assert not (site.folder / "state" / "runs").exists()


def test_a_server_cannot_fill_a_site_with_runs_or_public_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(site_module, "MOST_RUNS", 3)
    monkeypatch.setattr(site_module, "MOST_PUBLIC", 1)
    site = east(tmp_path, FEDDF)

    def keep(client: Client) -> None:
        client.state["model"] = {"w": torch.ones(2)}

    with task_of_its_own(site, "test.keep", keep, type(None)):
        told = [ask(site, "test.keep", {"run": f"run-{i}"})[0] for i in range(5)]
        assert [told[i].get("error") for i in range(3)] == [None] * 3
        for refused in told[3:]:
            assert "this site keeps the state of 3 runs already" in refused["error"]
            assert "its people remove those of runs that are over from state/runs" in refused["error"]
        assert sorted(os.listdir(site.folder / "state" / "runs")) == ["run-0", "run-1", "run-2"]
        assert "error" not in ask(site, "test.keep", {"run": "run-1"})[0], "one that it knows goes on"
    for i, said in ((1, None), (2, "this site keeps 1 sets of public samples already")):
        samples = site_module.Samples(torch.full((3, 8), float(i)), None)
        sha256 = site.public_of(samples).digest
        told = {"error": None}
        try:
            site_module.keep_public(site, sha256, encode(samples))
        except site_module.SoleraError as e:
            told = {"error": str(e)}
        assert (told["error"] is None) if said is None else said in told["error"]
