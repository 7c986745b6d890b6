"""Stand-ins in the output of a run, in its directory, and wherever it is read."""

import json

import pytest
from typer.testing import CliRunner

from solera.cli.main import app
from solera.runs.facts import Facts, stand_ins_of
from solera.runs.read import read_run
from solera.runs.words import listed, read_stand_ins, verdict

FILE = """
[run]
rounds = 1
seed = 0
{stand_ins}
[data]
name = "toy-text"
length = 8
train_size = 60
test_size = 20

[partition]
clients = 2

[models]
clients = ["text-bag"]

[engine]
name = "inprocess"

[method]
name = "fedavg"
"""
NAMED = '[run.stand_ins]\ndata.name = "ag-news"\nmodels.clients = ["hf:distilbert-base-uncased"]\n'
SAID = (
    "the paper's row is not run, for there are stand-ins: data.name = toy-text (the paper's: ag-news); "
    "models.clients = text-bag (the paper's: hf:distilbert-base-uncased); "
    "models.weights = random (text-bag) (the paper's: pretrained)"
)
PAIRS = {
    "data.name": ["ag-news", "toy-text"],
    "models.clients": [["hf:distilbert-base-uncased"], ["text-bag"]],
    "models.weights": ["pretrained", "random (text-bag)"],
}


def solera(*args):
    return CliRunner().invoke(app, [*map(str, args)], env={"COLUMNS": "1000"})


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs: one with stand-ins, and one that is no paper's."""
    home = tmp_path_factory.mktemp("two")
    (home / "named.toml").write_text(FILE.format(stand_ins=NAMED))
    (home / "plain.toml").write_text(FILE.format(stand_ins=""))
    said = {}
    for name in ("named", "plain"):
        said[name] = solera("run", home / f"{name}.toml", "--out", home / name)
        assert said[name].exit_code == 0
    return home, said


def test_the_output_says_so_at_the_start_and_at_the_end(runs):
    _, said = runs
    lines = said["named"].stdout.splitlines()
    assert lines[0] == f"warning: {SAID}"
    assert lines[-2] == f"  {SAID}"
    assert "the paper" not in said["plain"].stdout


def test_it_is_in_the_run_directory(runs):
    home, _ = runs
    for file in ("run.json", "summary.json"):
        assert json.loads((home / "named" / file).read_text())["stand_ins"] == PAIRS
        assert "stand_ins" not in json.loads((home / "plain" / file).read_text())
    assert read_run(home / "named").stand_ins == {key: tuple(pair) for key, pair in PAIRS.items()}
    assert read_run(home / "plain").stand_ins == {}


def test_the_digest_is_the_same_without_a_word_about_a_paper(runs):
    home, _ = runs
    digests = {json.loads((home / name / "summary.json").read_text())["digest"] for name in ("named", "plain")}
    assert len(digests) == 1


def test_show_tells_it(runs):
    home, _ = runs
    told = solera("show", home / "named").stdout
    assert f"stand-ins    {SAID.partition('stand-ins: ')[2]}" in told
    assert "paper's row  not run" in told
    assert json.loads(solera("show", home / "named", "--json").stdout)["stand_ins"] == PAIRS
    assert "paper" not in solera("show", home / "plain").stdout


def test_compare_marks_it_and_says_why(runs):
    home, _ = runs
    told = solera("compare", home / "named").stdout
    assert "fedavg*  " in told
    assert f"warning: * fedavg: {SAID}" in told
    assert r"fedavg* &" in solera("compare", home / "named", "--latex").stdout
    assert json.loads(solera("compare", home / "named", "--json").stdout)["rows"][0]["stand_ins"] == PAIRS
    plain = solera("compare", home / "plain").stdout
    assert "*" not in plain
    assert "the paper" not in plain


def test_stand_ins_do_not_make_two_runs_different_cases(runs):
    home, _ = runs
    rows = json.loads(solera("compare", home / "named", home / "plain", "--json").stdout)["rows"]
    assert [len(row["runs"]) for row in rows] == [2]


def test_the_report_tells_it(runs, tmp_path):
    home, _ = runs
    assert solera("report", home / "named", "-o", tmp_path / "named.html").exit_code == 0
    assert "the paper's row is not run, for there are stand-ins: data.name" in (tmp_path / "named.html").read_text()
    solera("report", home / "plain", "-o", tmp_path / "plain.html")
    assert "stand-ins" not in (tmp_path / "plain.html").read_text()


def test_a_dry_run_tells_it(runs):
    home, _ = runs
    assert SAID in (result := solera("run", home / "named.toml", "--dry-run")).stdout + result.stderr


def test_a_stand_in_that_was_replaced_is_no_longer_told(runs, tmp_path):
    home, _ = runs
    given = ["--set", 'run.stand_ins.models.clients=["text-bag"]', "--set", "run.stand_ins.data.name=toy-text"]
    result = solera("run", home / "named.toml", *given, "--out", tmp_path / "run")
    assert "the paper" not in result.stdout
    assert "stand_ins" not in json.loads((tmp_path / "run/run.json").read_text())


# ---- what only the run itself shows -------------------------------------------------------------------


def facts(found=None, name="ag-news", **experiment):
    known = {"data": {"name": name}, "clients": {"architectures": ["lstm"]}, "server": None, **experiment}
    return Facts(known, 2, {}, None, dict, lambda t, models: None, found=found)


@pytest.mark.parametrize(
    ("papers", "text", "found", "told"),
    [
        ({}, "", (120_000, 7_600), {}),
        ({}, "", (20_000, 7_600), {"data.train_size": (120_000, 20_000)}),
        ({}, "", (120_000, 600), {"data.test_size": (7_600, 600)}),
        ({}, "", (120_000, 0), {}),  # a part of the training rows becomes the test set
        ({}, "", None, {}),  # data of the user's own
        ({"data.train_size": "none"}, "[data]\ntrain_size = 50", (120_000, 7_600), {"data.train_size": (120_000, 50)}),
        ({}, "[data]\ntrain_size = 50", (20_000, 7_600), {}),  # the paper's own size, and there is enough
        ({"data.train_size": 90}, "[data]\ntrain_size = 50", (20_000, 7_600), {"data.train_size": (90, 50)}),
        ({"data.name": "sst2"}, '[data]\nname = "ag-news"', (9, 9), {"data.name": ("sst2", "ag-news")}),
    ],
)
def test_files_with_a_part_of_the_data_are_stand_ins(papers, text, found, told):
    assert stand_ins_of(papers, text, facts(found)) == told


def test_of_a_run_that_is_no_papers_nothing_is_told():
    assert stand_ins_of(None, "", facts((10, 10))) == {}


def test_random_weights_in_place_of_pretrained_ones():
    papers = {"models.clients": ["hf:prajjwal1/bert-tiny", "lstm"], "models.server": "hf:prajjwal1/bert-mini"}
    clients = {"architectures": ["minilm-l1", "transformer", "lstm"]}
    weights = {"minilm-l1": {"weights": "pretrained"}, "bert-mini": {"weights": "random"}}
    found = stand_ins_of(papers, "", facts(clients=clients, server="bert-mini", weights=weights))
    assert found["models.weights"] == (
        "pretrained",
        "random (transformer, bert-mini)",
    )  # the paper's LSTM begins so, too
    images = stand_ins_of({"models.clients": ["resnet8"]}, "", facts(clients=clients, weights=weights))
    assert images == {"models.clients": (["resnet8"], None)}


def test_the_sample_of_the_package_is_found():
    from solera.data import load

    assert load("fashion-mnist", train_size=20, test_size=10).found == (10_000, 2_000)
    assert load("toy-text", train_size=20).found == (1_600, 400)


def test_a_sample_on_the_disk_is_no_papers_row(shared_data, tmp_path):
    """The whole of SST-2 and a part of AG News: only the second is a stand-in."""
    result = solera(
        "run", "feddf/fig3-agnews", "--dry-run", "--rounds", "1", "--set", f"data.path={shared_data / 'ag_news'}",
        "--set", 'models.clients=["text-bag"]', "--set", "public.size=100",
    )  # fmt: skip
    said = result.stdout + result.stderr
    assert "data.train_size = 20000 (the paper's: 120000)" in said
    assert "public.size = 100 (the paper's: 58200)" in said
    assert "models.weights = random (text-bag) (the paper's: pretrained)" in said
    result = solera(
        "run", "feddf/fig3-sst2", "--dry-run", "--rounds", "1", "--set", f"data.path={shared_data / 'sst2'}",
        "--set", 'models.clients=["text-bag"]',
    )  # fmt: skip
    assert "data.train_size" not in (said := result.stdout + result.stderr)
    assert "the paper's row is not run" in said


# ---- words, and files of others -----------------------------------------------------------------------


def test_words():
    found = {"data.train_size": ("none", 800), "data.user_min": ("none", 3), "models.server": ("vgg19", None)}
    assert listed(found) == (
        "data.train_size = 800 (the paper's: all); data.user_min = 3 (the paper's: not set); "
        "models.server (the paper's: vgg19)"
    )
    assert verdict(found) == f"the paper's row is not run, for there are stand-ins: {listed(found)}"


@pytest.mark.parametrize("facts", [None, {}, {"stand_ins": 3}, {"stand_ins": {"data.name": "x", "a": [1], "b": None}}])
def test_a_damaged_record_is_left_out(facts):
    assert read_stand_ins(facts) == {}
