"""Which tasks and arguments a site's file lists. That they let a run through: unit/runner/test_dry.py, every method."""

import tomllib
from unittest import mock

import pytest
import torch

from deployments import CODE, DIFFERENT, EQUAL, config_of
from grids import in_a_flower_task  # noqa: F401
from solera.core.calls import ClientInfo, Roster
from solera.core.errors import ConfigError, SoleraError
from solera.core.task import TASKS
from solera.core.wire import WireError
from solera.deploy.agreed import check_asked, noted, scalars
from solera.deploy.init import init
from solera.deploy.site import OwnSite
from solera.train.fitting import Local

LOCAL = "[method.local]\nepochs = 2\nbatch = 16\nlr = 0.05"
OWN_METHOD = (
    CODE
    + """
from dataclasses import dataclass
from typing import ClassVar

from solera.core.task import Client, task
from solera.core.wire import sized
from solera.method import About, Method, Model, Traits


@dataclass(frozen=True)
class Told:
    numbers: torch.Tensor = sized("size")


@task("own.peek")
def peek(client: Client, layer: str, size: int, share: float, again: bool | None, sizes: list[int]) -> Told:
    return Told(torch.zeros(size))


@task("own.late")
def late(client: Client, seed: int) -> None:
    return None


@dataclass(frozen=True)
class Mine(Method):
    about: ClassVar[About] = About("Mine", "none", "a vector", "nothing")

    @dataclass(frozen=True)
    class State:
        t: int

    def init(self, fed, server):
        return self.State(0)

    def round(self, state, fed, server):
        S = fed.sample()
        fed.map(peek, S, layer="body", size=7 + state.t, share=0.5, again=None, sizes=[2, 9, 4])
        if state.t == 2:
            fed.map(late, S, seed=fed.seed("late"))
        return self.State(state.t + 1)

    def models(self, state):
        return {}
"""
)


@pytest.fixture(autouse=True)
def tasks_of_one_test():
    with mock.patch.dict(TASKS):
        yield


def site_table(home, method, models=DIFFERENT, code=CODE, rounds=1):
    home.mkdir(exist_ok=True)
    (home / "own.py").write_text(code)
    (home / "f.toml").write_text(config_of(method, models, rounds))
    init(home / "f.toml", home / "d", "127.0.0.1:8000")
    return tomllib.loads((home / "d" / "sites" / "east" / "site.toml").read_text())["sites"]["east"]


@pytest.mark.parametrize(
    ("method", "models", "tasks"),
    [
        (f'name = "feddf"\n{LOCAL}', DIFFERENT, ["local_update"]),
        (f'name = "dsfl"\n{LOCAL}', DIFFERENT, ["distil_locally", "score_own.mean", "train_and_answer"]),
        ('name = "fedgkt"', DIFFERENT, ["score_with_tower", "train_and_extract"]),
        (f'name = "fedavgft"\n{LOCAL}', EQUAL, ["fine_tune", "local_update", "score_tuned.mean"]),
        (f'name = "framework"\n{LOCAL}', EQUAL, ["local_update"]),
        (f'name = "framework"\n[method.local_trainer]\nkind = "scaffold"\n{LOCAL}', EQUAL, ["grouped_update"]),
        (f'name = "hierarchical"\ngroups = 2\n{LOCAL}', EQUAL, ["local_update"]),
    ],
    ids=lambda v: "",
)
def test_the_file_of_a_site_lists_what_the_configuration_asks(tmp_path, method, models, tasks):
    assert site_table(tmp_path, method, models)["tasks"] == tasks


def test_a_method_of_ones_own_needs_no_word_more(tmp_path):
    """Also of a task that a run of one round never asks; the seed may be any, what is left out is not listed."""
    table = site_table(tmp_path, 'name = "own.py:Mine"', EQUAL, OWN_METHOD)
    assert table["tasks"] == ["own.late", "own.peek"]
    assert table["bounds"] == {"layer": "body", "seed": "*", "share": 0.5, "size": [7, 9], "sizes": [2, 9]}


def test_settings_are_exact_and_learned_numbers_open(tmp_path):
    table = site_table(tmp_path, f'name = "fedavgft"\n{LOCAL}', EQUAL)
    assert table["bounds"]["local.epochs"] == 2
    assert table["bounds"]["local.lr"] == 0.05
    assert table["bounds"]["local.optimizer"] == "sgd"
    assert table["bounds"]["tuned"] == [False, True]
    assert "local.clip" not in table["bounds"]
    learned = site_table(tmp_path / "b", f'name = "fedamp"\n{LOCAL}', EQUAL, rounds=3)["bounds"]["mu"]
    assert learned == [-(1 << 32), 1 << 32], "how far a client is pulled follows from what all have learned"


def test_what_the_configuration_lists_itself_stays(tmp_path):
    (tmp_path / "own.py").write_text(CODE)
    text = config_of(f'name = "dsfl"\n{LOCAL}', DIFFERENT, 1)
    narrow = 'data = "own.py:east"\ntasks = ["train_and_answer"]'
    (tmp_path / "f.toml").write_text(text.replace('data = "own.py:east"', narrow))
    init(tmp_path / "f.toml", tmp_path / "d", "127.0.0.1:8000")
    tasks = {
        k: tomllib.loads((tmp_path / "d" / "sites" / k / "site.toml").read_text())["sites"][k]["tasks"]
        for k in ("east", "west")
    }
    assert tasks == {"east": ["train_and_answer"], "west": ["distil_locally", "score_own.mean", "train_and_answer"]}


def test_no_data_of_a_site_is_needed(tmp_path):
    code = CODE.replace("def east():\n", 'def east():\n    raise FileNotFoundError("it is at the site")\n')
    assert site_table(tmp_path, f'name = "feddf"\n{LOCAL}', code=code)["tasks"] == ["local_update"]


def test_a_reply_without_a_limit_is_refused_before_anything_is_written(tmp_path):
    code = OWN_METHOD.replace('numbers: torch.Tensor = sized("size")', 'numbers: str = ""')
    with pytest.raises(SoleraError, match=r"the task own\.peek cannot be deployed: .*str.*: its size cannot be known"):
        site_table(tmp_path, 'name = "own.py:Mine"', EQUAL, code)
    assert not (tmp_path / "d").exists()


@pytest.mark.usefixtures("in_a_flower_task")
def test_a_site_knows_how_its_own_model_is_scored_where_only_means_are_shown(tmp_path):
    """In a process of its own, where no server has made the mean forms of the tasks."""
    site_table(tmp_path, f'name = "dsfl"\n{LOCAL}')
    for name in [n for n in TASKS if n.endswith(".mean")]:
        del TASKS[name]
    OwnSite(tmp_path / "d" / "sites" / "east")
    assert "score_own.mean" in TASKS


def test_scalars_have_the_names_of_their_fields():
    asked = {
        "weights": {"layer.1": torch.ones(2)}, "others": [{"w": torch.ones(1)}], "local": Local(epochs=3), "mu": 0.5,
        "shapes": {"a": [2, 3]}, "rows": ["x", "y"], "again": True, "classes": None,
    }  # fmt: skip
    found = list(scalars(asked))
    assert ("local.epochs", 3) in found
    assert not [p for p, _ in found if p.startswith(("weights", "others", "classes", "local.steps"))]
    assert [v for p, v in found if p == "shapes"] == ["a", 2, 3], "the names of what is no tensor are texts"
    assert [(p, v) for p, v in found if p in ("mu", "rows", "again")] == [
        ("mu", 0.5), ("rows", "x"), ("rows", "y"), ("again", True),
    ]  # fmt: skip


class Here:
    roster = Roster.of({"east": ClientInfo("m", 48)})


@pytest.mark.parametrize(
    ("bound", "fine", "refused"),
    [
        (3, [3, 3.0], [2, 4, True, "3"]),
        ([2, 5], [2, 3, 5], [1, 6, 5.5, False]),
        (0.05, [0.05], [0.050001, 0, -0.05]),
        ("sgd", ["sgd"], ["adam", "", 1]),
        (["a", "b"], ["a", "b"], ["c", 0, True]),
        (["0.weight", 3, 16], ["0.weight", 3, 9], ["1.weight", 2, 17]),
        (True, [True], [False, 1]),
        ([False, True], [False, True], [0, 1, "True"]),
        ("own examples", [48], [47, 49, "own examples"]),
        ("*", [1, "x", True], []),
        (["*"], ["*"], ["x", 1]),
        ([], [], [1, "x"]),
    ],
)
def test_a_bound_is_one_value_some_or_a_range(bound, fine, refused):
    def check(value):
        check_asked("east", ["t"], {"x": bound}, "t", {"x": value}, Here)

    for value in fine:
        check(value)
    for value in refused:
        with pytest.raises(WireError, match=r"east does not answer t with x = "):
            check(value)


def test_what_a_site_does_not_list_is_refused():
    with pytest.raises(WireError, match=r"with x = 1: sites\.east\.bounds in its site\.toml has no such line"):
        check_asked("east", ["t"], {"y": 1}, "t", {"x": 1}, Here)
    with pytest.raises(WireError, match=r"east does not answer u: sites\.east\.tasks"):
        check_asked("east", ["t"], {}, "u", {}, Here)
    with pytest.raises(ConfigError, match="solera deploy init"):
        check_asked("east", None, {}, "t", {}, Here)
    check_asked("east", ["t"], {}, "t", {"x": None, "w": {"a": torch.ones(1)}}, Here)


def test_the_log_names_arguments_in_a_line_of_bounded_length():
    assert noted({"mu": 0.5, "rows": ["a", "b", "a"], "local": Local(epochs=3)})["rows"] == ["a", "b"]
    long = noted({f"argument-{i}": "x" * 1000 for i in range(100)})
    assert long.pop("...") == "more than fits here"
    assert set(long.values()) == {"x" * 64}
    assert 10 < len(long) < 40
