"""A method talks to the federation through its verbs; the round's state is the federation's own."""

import ast
import dataclasses
import pathlib

import pytest

import solera
import solera.methods
from run_directories import lines_of
from solera.core.federation import Federation, FederationConfig, QuorumNotMet
from solera.core.task import TASKS
from solera.method import METHODS, MeanScore, find_method, scoring
from solera.testing import run_toy, small
from solera.train.fitting import Score
from toys import World

SRC = pathlib.Path(solera.__file__).parent
CHANGES = {"append", "add", "discard", "remove", "pop", "clear", "update", "extend", "insert", "setdefault"}


def written_to(source: str) -> list[str]:
    """Where a source file assigns to an attribute of `fed`, deletes one, or changes one in place."""

    def of_fed(node: ast.AST) -> bool:
        while isinstance(node, ast.Attribute | ast.Subscript):
            if isinstance(node, ast.Attribute) and (
                (isinstance(node.value, ast.Name) and node.value.id == "fed")
                or (isinstance(node.value, ast.Attribute) and node.value.attr == "fed")
            ):
                return True
            node = node.value
        return False

    found = []
    for node in ast.walk(ast.parse(source)):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = [
                t for target in node.targets for t in (target.elts if isinstance(target, ast.Tuple) else [target])
            ]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            targets = [node.func.value]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("setattr", "delattr") and node.args:
            targets = [ast.Attribute(node.args[0], "any")]
        found += [f"line {node.lineno}: {ast.unparse(node)}" for t in targets if of_fed(t)]
    return found


@pytest.mark.parametrize(
    "line",
    [
        "fed.quorum = 0", "self.fed.quorum = 0", "fed.answered.discard(k)", "fed.failures.append({})",
        "del fed.copies[k]", "fed.copies[k] = 1", "fed.answered |= {k}", "x, fed.quorum = 1, 2",
        "setattr(fed, 'quorum', 0)", "fed.round: int = 1",
    ],
)  # fmt: skip
def test_the_walker_sees_it(line):
    assert written_to(line)
    assert not written_to("x = fed.quorum; y[fed.round] = 1; fed.map(t, S); z = dict(fed.copies); self.fed = fed")


@pytest.mark.parametrize(
    "path",
    sorted([*(SRC / "methods").rglob("*.py"), SRC / "runs/measure.py", SRC / "testing/contracts.py"]),
    ids=lambda p: p.stem,
)
def test_nobody_writes_into_the_round_state(path):
    assert written_to(path.read_text()) == []


# ---- the quorum after rejections --------------------------------------------------------------------


def spoiled(tmp_path, quorum):
    """A round in which the uploads of two of five clients answer with infinite numbers."""
    from toys import Conv, Data, images, mlp

    world = World(
        tmp_path,
        {"c": lambda: Conv(0), "m": lambda: mlp(1)},
        [(P, Data(*images(n, n))) for n, P in ((5, "c"), (12, "m"), (9, "c"), (20, "m"), (7, "c"))],
        public=images(40, 9)[0],
    )
    world.fed.config = FederationConfig(min_replies=quorum)
    ask = world.fed.map

    def huge(*args, **payload):
        replies = ask(*args, **payload)
        for k in ("c1", "c3"):
            for t in replies[k].weights.values():
                if t.is_floating_point():
                    t.mul_(1e38)
        return replies

    world.fed.map = huge
    return world


def test_rejected_uploads_count_against_the_quorum(tmp_path):
    method = small(find_method("feddf")())
    world = spoiled(tmp_path / "a", quorum=3)
    world.run(method)
    assert [f["client"] for f in world.fed.failures] == ["c1", "c3"]
    assert world.fed.answered == {"c0", "c2", "c4"}
    with pytest.raises(QuorumNotMet, match=r"3 of 5 clients .*min_replies is 4; first reason: non-finite logits"):
        spoiled(tmp_path / "b", quorum=4).run(method)


# ---- scores of clients' own models ------------------------------------------------------------------

OURS = {n: cls for n, cls in METHODS.items() if cls.__module__.startswith("solera.methods.")}
PERSONAL = sorted(n for n, cls in OURS.items() if cls().traits().personal)


@pytest.mark.parametrize("name", PERSONAL)
def test_single_scores_leave_only_where_single_replies_do(name, tmp_path, monkeypatch):
    """What the server gets to see of the scores, and what it writes down."""
    method = small(find_method(name)())
    alone = method.traits().replies == "individual"
    single = {t.name for t in TASKS.values() if t.returns is Score}
    used, submit = [], Federation.submit

    def noted(self, task, clients, /, **payload):
        used.append(task.name)
        return submit(self, task, clients, **payload)

    monkeypatch.setattr(Federation, "submit", noted)
    result = run_toy(method, tmp_path, rounds=1)
    (metrics,) = lines_of(tmp_path)
    assert metrics["personal"]["clients"] in (metrics["cohort"], 8)  # some score only who has a model of its own
    assert bool(single & set(used)) == alone, "scores came one by one"
    assert ("personal_accuracies" in metrics) == alone
    assert ("worst_decile" in metrics["personal"]) == alone
    assert "personal" in result.summary


def test_means_of_scores_are_those_of_the_single_ones(tmp_path, monkeypatch):
    """The same run, once as it is and once as if the method saw single replies."""
    method = small(find_method("ditto")())
    means = run_toy(method, tmp_path / "a", rounds=1).summary["personal"]
    as_declared = method.traits()
    monkeypatch.setattr(type(method), "traits", lambda self: dataclasses.replace(as_declared, replies="individual"))
    single = run_toy(method, tmp_path / "b", rounds=1).summary["personal"]
    each = lines_of(tmp_path / "b")[0]["personal_accuracies"].values()
    assert means["mean"] == pytest.approx(sum(each) / len(each), abs=1e-4)
    assert means["mean"] == pytest.approx(single["mean"], abs=1e-12)
    assert means["std"] == pytest.approx(single["std"], abs=1e-9)
    assert means["clients"] == single["clients"] == 8


def test_a_client_counts_once_in_a_mean_of_scores_however_often_it_was_drawn(tmp_path):
    from solera.runs.measure import _measure_mean

    method = small(find_method("ditto")())
    from solera.engines import ClientStates, InProcess
    from solera.testing import toy_for

    scenario = toy_for(method)
    config = FederationConfig(sampling="size", replacement=True)
    fed = Federation(InProcess(scenario, ClientStates(tmp_path)), 0, config)
    asked = scoring(method, method.init(fed, scenario.server), fed)
    assert asked.task.returns is MeanScore
    once = _measure_mean(asked, fed, list(fed.clients))
    fed.begin(0)
    fed.sample()
    assert max(fed.copies.values()) > 1
    assert _measure_mean(asked, fed, list(fed.clients)) == once
