"""`solera compare`: the table, its other forms, and what it warns of."""

import csv
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from made_runs import line, make_run
from solera.cli.main import app
from solera.cli.read_commands import table_of
from solera.runs.compare import printed, rows_of
from solera.runs.groups import group_runs
from solera.runs.read import read_run


def solera(*args: Any) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args], catch_exceptions=False, prog_name="solera")


@pytest.fixture
def runs(tmp_path) -> Path:
    """Two methods, two seeds each."""
    for m, rise in (("feddf", 0.2), ("fedavg", 0.0)):
        for s in (0, 1):
            make_run(tmp_path / f"{m}-{s}", [0.3, 0.4, 0.5 + rise + s / 10], method__name=m, run__seed=s)
    return tmp_path


def test_the_table(runs):
    result = solera("compare", runs, "--target", 0.6)
    assert result.exit_code == 0
    title, *lines = result.stdout.splitlines()
    assert title == "models for everybody, on the whole test set"
    head, first, second, *rest = [re.split(r"\s{2,}", text.strip()) for text in lines]
    assert head[:5] == ["method", "runs", "measured", "last %", "best %"]
    assert head[5:] == ["rounds to 60%", "bytes to 60%", "down", "up", "time"]
    assert first == ["fedavg", "2", "mlp", "55.0 ± 7.1", "55.0 ± 7.1", "3 (1 of 2)", "450 B", "300 B", "150 B", "6.0 s"]
    assert second[:4] == ["feddf", "2", "mlp", "75.0 ± 7.1"]
    assert rest == [[""], ["main result (all cases have it): mlp"]]


def test_the_example_of_the_help(runs, monkeypatch):
    (runs / "runs").mkdir()
    for m in ("feddf", "fedavg"):
        make_run(runs / f"runs/toy-{m}-s0", method__name=m)
    monkeypatch.chdir(runs)
    text = solera("compare", "--help").stdout
    example = re.search(r"Example: (solera compare .*?)\n\s*\n", re.sub(r"[│╭╮╰╯─]", "", text), re.DOTALL)[1]
    result = solera(*shlex.split(example)[1:])
    assert result.exit_code == 0, result.output
    assert "bytes to 50%" in result.stdout


def test_settings_that_differ_are_columns(tmp_path):
    for a in (0.1, 1.0):
        make_run(tmp_path / f"a{a}", partition__alpha=a)
    out = solera("compare", tmp_path).stdout
    assert out.splitlines()[1].split()[:3] == ["method", "alpha", "runs"]
    assert "warning: different partition.alpha" in out


def test_settings_that_go_together_are_one_column(tmp_path):
    for name in ("mnist", "cifar10"):
        for a in (0.1, 1.0):
            data = {"data__name": name, "data__path": f"files/{name}"}
            make_run(tmp_path / f"{name}{a}", partition__alpha=a, **data)
    out = solera("compare", tmp_path).stdout
    assert out.splitlines()[1].split()[:4] == ["method", "data.name", "alpha", "runs"]
    assert "data.name changes together with data.path" in out
    by_both = solera("compare", tmp_path, "--by", "data.name,data.path").stdout
    assert by_both.splitlines()[1].split()[:4] == ["method", "data.name", "data.path", "runs"]
    assert "data.path" in solera("compare", tmp_path, "--csv").stdout


def test_what_differs_between_methods_is_told_below(tmp_path):
    make_run(tmp_path / "a", method__name="fedavg", method__local={"lr": 0.05})
    make_run(tmp_path / "b", method__name="feddf", method__local={"lr": 0.1})
    assert "method.local.lr: 0.05 (fedavg), 0.1 (feddf)" in solera("compare", tmp_path).stdout


def test_mixed_data_sets_are_warned_of_in_every_form(tmp_path):
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", data__name="cifar10")
    assert "warning: different data sets" in solera("compare", tmp_path).stdout
    assert any("different data sets" in w for w in json.loads(solera("compare", tmp_path, "--json").stdout)["warnings"])
    for form in ("--csv", "--latex"):
        result = solera("compare", tmp_path, form)
        assert "warning" not in result.stdout
        assert "warning: different data sets" in result.stderr


def test_json(runs):
    found = json.loads(solera("compare", runs, "--json", "--target", 0.6).stdout)
    row = found["rows"][1]
    assert (row["method"], row["measured"], row["seeds"], row["reached"]) == ("feddf", "mlp", [0, 1], 2)
    assert row["last"]["mean"] == pytest.approx(0.75)
    assert row["last"]["runs"] == 2
    assert row["rounds_to_target"] == {"mean": 3.0, "std": 0.0, "runs": 2}
    assert found["warnings"] == []


def test_csv(runs):
    rows = list(csv.DictReader(io.StringIO(solera("compare", runs, "--csv").stdout)))
    assert [r["method"] for r in rows] == ["fedavg", "feddf"]
    assert float(rows[1]["last"]) == pytest.approx(0.75)
    assert float(rows[1]["last_std"]) == pytest.approx(0.0707, abs=1e-4)
    assert rows[1]["rounds_to_target"] == ""


def test_latex(tmp_path):
    make_run(tmp_path / "a", rounds=[line(0, {"my_net & co": 0.5})])
    out = solera("compare", tmp_path, "--latex").stdout
    assert out.startswith("\\begin{tabular}{lllrrrrr}\n\\toprule\n")
    assert r"my\_net \& co" in out
    assert r"last \%" in out
    assert out.endswith("\\bottomrule\n\\end{tabular}\n")
    title, *rest = [text for text in out.splitlines() if text.endswith(r"\\")]
    assert title == r"\multicolumn{8}{l}{\emph{models for everybody, on the whole test set}} \\"
    assert all(text.count(" & ") == 7 for text in rest)


def test_names_with_markup_are_shown_as_they_are(tmp_path):
    make_run(tmp_path / "a", rounds=[line(0, {"[red]x[/red]": 0.5, "[/]": 0.1})])
    out = solera("compare", tmp_path).stdout
    assert "[red]x[/red]" in out
    assert "[/]" in out


def test_grouping_by_a_key(runs):
    out = json.loads(solera("compare", runs, "--by", "method,seed", "--json").stdout)
    assert out["by"] == ["method.name", "run.seed"]
    assert len(out["rows"]) == 4
    one = json.loads(solera("compare", runs, "--by", "data.name", "--json").stdout)
    assert [r["method"] for r in one["rows"]] == ["fedavg, feddf"]


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["nowhere"], 4, "is not a folder"),
        (["."], 4, "holds no run"),
        ([], 2, "Missing argument"),
        (["feddf-0", "--by", "partition.alfa"], 2, "did you mean 'partition.alpha'?"),
        (["feddf-0", "--json", "--csv"], 2, "cannot be used together"),
        (["feddf-0", "--target", "70"], 2, "--target"),
    ],
)
def test_mistakes(runs, monkeypatch, args, code, words):
    (runs / "empty").mkdir()
    monkeypatch.chdir(runs / "empty" if args == ["."] else runs)
    result = solera("compare", *args)
    assert result.exit_code == code
    assert words in result.stderr


def test_unfinished_and_damaged_runs_are_counted_as_far_as_they_are(tmp_path):
    make_run(tmp_path / "a", [0.3, 0.4], finished=False)
    home = make_run(tmp_path / "b", run__seed=1)
    (home / "metrics.jsonl").write_text('{"round": 0, "mod')
    result = solera("compare", tmp_path)
    assert result.exit_code == 0
    assert "1 line that cannot be read" in result.stdout
    assert "not finished" in result.stdout


def test_nothing_evaluated_is_a_row_without_numbers(tmp_path):
    make_run(tmp_path / "a", rounds=[{"round": 0}], finished=False)
    assert solera("compare", tmp_path, "--target", 0.5).exit_code == 0


@pytest.mark.parametrize("width", [40, 60, 80])
def test_no_number_is_cut_in_a_narrow_terminal(runs, width):
    console = Console(width=width, file=io.StringIO())
    rows = rows_of(group_runs([read_run(runs / "feddf-0"), read_run(runs / "feddf-1")]))
    (found,) = printed(rows)
    console.print(table_of(found))
    text = console.file.getvalue()
    assert "…" not in text
    if width >= 60:
        assert "75.0" in text


def test_it_is_quick():
    code = "import sys, solera.cli.read_commands; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture
def mixed(tmp_path) -> Path:
    """A method with a model for everybody, and one with clients' own models."""
    make_run(tmp_path / "a", method__name="fedavg")
    own = {"mean": 0.744, "weighted_mean": 0.793, "std": 0.1, "worst_decile": 0.2, "clients": 4}
    rounds = [line(t, {}, personal=own) for t in range(3)]
    make_run(tmp_path / "b", rounds=rounds, method__name="mnfl", data__client_test=0.2)
    return tmp_path


def test_personal_and_global_accuracies_are_in_tables_of_their_own(mixed):
    result = solera("compare", mixed)
    everybody, own = result.stdout.split("\nclients' own models, each on its client's test split")
    assert "models for everybody, on the whole test set" in everybody
    assert "mnfl" not in everybody
    assert "fedavg" not in own.split("\n\n")[0].split("warning")[0]
    assert "74.4" in own
    assert "79.3" in own
    assert "main result (" not in result.stdout
    assert "warning: no main result that all cases have: mlp (fedavg); own models (mnfl)" in result.stdout
    assert "warning: different data.client_test: 0 (fedavg); 0.2 (mnfl)" in result.stdout


def test_every_form_names_the_kind_and_warns(mixed):
    latex = solera("compare", mixed, "--latex")
    assert latex.stdout.count(r"\begin{tabular}") == 2
    assert r"\emph{models for everybody" in latex.stdout
    assert r"weighted \%" in latex.stdout.split(r"\emph{clients' own models")[1]
    assert "no main result that all cases have" in latex.stderr
    table = solera("compare", mixed, "--csv")
    rows = list(csv.DictReader(io.StringIO(table.stdout)))
    assert [(r["kind"], r["last_weighted"]) for r in rows] == [("model", ""), ("own", "0.793")]
    assert "no main result that all cases have" in table.stderr
    found = json.loads(solera("compare", mixed, "--json").stdout)
    assert [r["kind"] for r in found["rows"]] == ["model", "own"]
    assert found["main_result"] is None
    assert any("no main result that all cases have" in w for w in found["warnings"])


def test_the_main_result_is_named(runs):
    assert json.loads(solera("compare", runs, "--json").stdout)["main_result"] == "mlp"
