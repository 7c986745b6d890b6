"""Settings refuse wrong values when they are made, in one line with the key, the value and what is wanted."""

import dataclasses
from typing import Annotated, ClassVar, Literal

import pytest
from annotated_types import Ge, Gt, Le

from solera.errors import ConfigError
from solera.settings import Replaceable, settings


@settings
class Step:
    lr: Annotated[float, Gt(0)] = 0.1


@settings
class Fit:
    steps: Annotated[int, Ge(0)] = 5
    optimizer: Literal["sgd", "adam"] = "sgd"
    share: Annotated[float, Gt(0), Le(1)] = 1.0
    sizes: tuple[int, ...] | None = None
    clip: Annotated[float, Gt(0)] | None = None
    step: Step = dataclasses.field(default_factory=Step)
    own: Annotated[Step, Replaceable()] = dataclasses.field(default_factory=Step)
    names: list[str] = dataclasses.field(default_factory=list)

    RENAMED: ClassVar = {"optimiser": "optimizer"}

    def problems(self):
        if self.steps == 0 and self.clip is not None:
            yield f"clip = {self.clip}: nothing is clipped in 0 steps"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"optimizer": "Adam"}, """Fit.optimizer = "Adam": one of 'sgd', 'adam' is wanted; did you mean 'adam'?"""),
        ({"optimizer": 3}, "Fit.optimizer = 3: one of 'sgd', 'adam' is wanted"),
        ({"optimiser": "sgd"}, "Fit.optimiser = \"sgd\": this setting is called 'optimizer' now"),
        ({"stps": 3}, "Fit.stps = 3: there is no such setting; did you mean 'steps'?"),
        ({"steps": -1}, "Fit.steps = -1: an integer of at least 0 is wanted"),
        ({"steps": 1.5}, "Fit.steps = 1.5: an integer of at least 0 is wanted"),
        ({"steps": True}, "Fit.steps = true: an integer of at least 0 is wanted"),
        ({"share": 0}, "Fit.share = 0: a number above 0 and of at most 1 is wanted"),
        ({"share": float("nan")}, "Fit.share = nan: a number above 0 and of at most 1 is wanted"),
        ({"clip": float("inf")}, 'Fit.clip = inf: a number above 0 (or "none") is wanted'),
        ({"clip": "3"}, 'Fit.clip = "3": a number above 0 (or "none") is wanted, without quotes'),
        ({"sizes": [1, "a"]}, 'Fit.sizes[1] = "a": an integer is wanted, without quotes'),
        ({"sizes": 3}, 'Fit.sizes = 3: a list of integers (or "none") is wanted: write [3]'),
        ({"names": "a"}, 'Fit.names = "a": a list of strings is wanted: write ["a"]'),
        ({"step": 3}, "Fit.step = 3: a Step is wanted"),
        ({"steps": 0, "clip": 1}, "Fit.clip = 1.0: nothing is clipped in 0 steps"),
    ],
)
def test_what_is_refused_and_how(given, said):
    with pytest.raises(ConfigError) as e:
        Fit(**given)
    assert str(e.value) == said


def test_every_problem_is_told():
    with pytest.raises(ConfigError, match=r"Fit\.steps = -1.*; Fit\.share = 2"):
        Fit(steps=-1, share=2)


def test_values_take_their_declared_form():
    made = Fit(share=1, sizes=[1, 2], clip=2)
    assert (made.share, made.sizes, made.clip) == (1.0, (1, 2), 2.0)
    assert isinstance(made.share, float)


def test_positions_and_copies_are_checked_too():
    assert Fit(3).steps == 3
    with pytest.raises(ConfigError, match="steps"):
        Fit("3")
    with pytest.raises(ConfigError, match="optimizer"):
        dataclasses.replace(Fit(), optimizer="x")


def test_a_replaceable_setting_takes_any_object():
    mine = object()
    assert Fit(own=mine).own is mine


def test_a_subclass_checks_its_own_settings_and_the_inherited_ones():
    @settings
    class More(Fit):
        rounds: Annotated[int, Ge(1)] = 1

    assert More(rounds=2, steps=1).steps == 1
    with pytest.raises(ConfigError, match=r"More\.rounds = 0"):
        More(rounds=0)
    with pytest.raises(ConfigError, match=r"More\.steps = -1"):
        More(steps=-1)


def test_settings_do_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Fit().steps = 3
