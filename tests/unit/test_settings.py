"""Settings refuse wrong values when they are made, in one line with the key, the value and what is expected."""

import dataclasses
import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from annotated_types import Ge, Gt, Le

from solera.core.errors import ConfigError
from solera.core.settings import Hint, OrInf, Replaceable, checks_itself, settings
from solera.core.wire import WireError, decode, encode
from solera.methods import FedAvg, FedDF
from solera.runs.config import EngineConfig
from solera.train.distill import Distill
from solera.train.fitting import Local


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

    def problems(self):
        if self.steps == 0 and self.clip is not None:
            yield f"clip = {self.clip}: nothing is clipped in 0 steps"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"optimizer": "Adam"}, """Fit.optimizer = "Adam": expected one of 'sgd', 'adam'; did you mean 'adam'?"""),
        ({"optimizer": 3}, "Fit.optimizer = 3: expected one of 'sgd', 'adam'"),
        ({"optimiser": "sgd"}, "Fit.optimiser = \"sgd\": there is no such setting; did you mean 'optimizer'?"),
        ({"stps": 3}, "Fit.stps = 3: there is no such setting; did you mean 'steps'?"),
        ({"steps": -1}, "Fit.steps = -1: expected an integer of at least 0"),
        ({"steps": 1.5}, "Fit.steps = 1.5: expected an integer of at least 0"),
        ({"steps": True}, "Fit.steps = true: expected an integer of at least 0"),
        ({"share": 0}, "Fit.share = 0: expected a number above 0 and of at most 1"),
        ({"share": float("nan")}, "Fit.share = nan: expected a number above 0 and of at most 1"),
        ({"clip": float("inf")}, 'Fit.clip = inf: expected a number above 0 (or "none")'),
        ({"clip": "3"}, 'Fit.clip = "3": expected a number above 0 (or "none"), without quotes'),
        ({"sizes": [1, "a"]}, 'Fit.sizes[1] = "a": expected an integer, without quotes'),
        ({"sizes": 3}, 'Fit.sizes = 3: expected a list of integers (or "none"): write [3]'),
        ({"names": "a"}, 'Fit.names = "a": expected a list of strings: write ["a"]'),
        ({"step": 3}, "Fit.step = 3: expected a Step"),
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


def test_contradictions_are_told_beside_wrong_values_but_not_of_them():
    with pytest.raises(ConfigError) as e:
        Fit(share=2, steps=0, clip=1)
    assert e.value.problems == [
        "share = 2: expected a number above 0 and of at most 1",
        "clip = 1.0: nothing is clipped in 0 steps",
    ]
    with pytest.raises(ConfigError) as e:
        Fit(steps=0, clip=-1)
    assert e.value.problems == ['clip = -1: expected a number above 0 (or "none")']


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


# ---- kinds of fields --------------------------------------------------------------------------------


@settings
class Odd:
    pull: Annotated[float, Ge(0), OrInf()] = 1.0
    workers: Annotated[int, Ge(0), Hint("0: one for each core")] = 0
    rule: Literal["mean", "median"] | Callable[[int], int] = "mean"
    sizes: list[Annotated[int, Ge(1)]] = dataclasses.field(default_factory=list)
    anything: Any = None


def test_infinity_where_it_is_allowed_but_never_nan():
    assert Odd(pull=math.inf).pull == math.inf
    with pytest.raises(ConfigError, match=r"Odd\.pull = nan: expected a number of at least 0"):
        Odd(pull=math.nan)


def test_a_hint_says_what_a_value_means():
    with pytest.raises(ConfigError, match=r"at least 0 \(0: one for each core\)$"):
        Odd(workers=-1)


def test_a_choice_or_a_function():
    assert Odd(rule=abs).rule is abs
    with pytest.raises(ConfigError, match=r"expected one of 'mean', 'median' or a function; did you mean 'mean'\?"):
        Odd(rule="men")


def test_the_members_of_a_list_have_ranges_too():
    with pytest.raises(ConfigError, match=r"Odd\.sizes\[1\] = 0: expected an integer of at least 1"):
        Odd(sizes=[3, 0])
    with pytest.raises(ConfigError, match=r"expected a list of integers of at least 1: write \[3\]"):
        Odd(sizes=3)


def test_numbers_of_numpy_become_plain_ones():
    made = Fit(steps=np.int64(3), share=np.float32(0.5))
    assert (type(made.steps), type(made.share)) == (int, float)


# ---- subclasses and methods -------------------------------------------------------------------------


def test_a_plain_dataclass_that_inherits_from_settings_is_checked():
    @dataclasses.dataclass(frozen=True)
    class More(Fit):
        rounds: Annotated[int, Ge(1)] = 1

    assert More(rounds=2).rounds == 2
    for wrong in ({"rounds": 0}, {"optimizer": "x"}, {"steps": 0, "clip": 1}):
        with pytest.raises(ConfigError, match=rf"^More\.{list(wrong)[-1]} = "):
            More(**wrong)


def test_a_subclass_without_fields_of_its_own_is_checked():
    class Named(Fit):
        pass

    with pytest.raises(ConfigError, match=r"^Named\.optimizer"):
        Named(optimizer="x")


def test_a_post_init_of_ones_own_finds_its_fields_checked():
    @settings
    class Own:
        steps: int = 1

        def __post_init__(self):
            if self.steps < 0:  # would be a TypeError with a string
                raise ConfigError("steps: no")

    with pytest.raises(ConfigError, match=r"Own\.steps = \"3\": expected an integer"):
        Own(steps="3")
    with pytest.raises(ConfigError, match=r"no$"):
        Own(steps=-1)


def test_a_class_is_made_to_check_itself_once():
    """However often it is registered or handed over: each time would be one more call on the stack."""

    @settings
    class Own:
        steps: int = 1

    made = Own.__post_init__
    assert checks_itself(Own) is Own
    assert Own.__post_init__ is made


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Distill(optimizer="Adam"), r"Distill\.optimizer = \"Adam\": .* did you mean 'adam'\?"),
        (lambda: Distill(optimiser="adam"), r"Distill\.optimiser = \"adam\": .* did you mean 'optimizer'\?"),
        (lambda: FedDF(ensemble="avg_logit"), r"FedDF\.ensemble = \"avg_logit\": .* did you mean 'avg_logits'\?"),
        (lambda: FedDF(teaching="swag"), r"FedDF\.teaching = \"swag\": expected a Teaching"),
        (lambda: FedAvg(average="Uniform"), r"FedAvg\.average = \"Uniform\": .* did you mean 'uniform'\?"),
        (lambda: FedAvg(local=3), r"FedAvg\.local = 3: expected a Local"),
        (lambda: EngineConfig(name="proceses"), r"EngineConfig\.name = .* did you mean 'processes'\?"),
    ],
)
def test_what_used_to_mean_something_else_in_silence(make, said):
    with pytest.raises(ConfigError, match=said):
        make()


def test_a_method_made_from_another_is_checked_without_being_registered():
    @dataclasses.dataclass(frozen=True)
    class Mine(FedAvg):
        gain: Annotated[float, Gt(0)] = 1.0

    assert Mine(gain=2).gain == 2.0
    with pytest.raises(ConfigError, match=r"Mine\.gain = 0"):
        Mine(gain=0)
    with pytest.raises(ConfigError, match=r"Mine\.average = \"Uniform\""):
        Mine(average="Uniform")


def test_settings_out_of_range_in_a_message_are_a_fault_of_the_message():
    message = encode({"local": dataclasses.asdict(Local()) | {"lr": -1.0}})
    with pytest.raises(WireError, match=r"Local\.lr = -1\.0: expected a number of at least 0"):
        decode(message, dict[str, Local])
