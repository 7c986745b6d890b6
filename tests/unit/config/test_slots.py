"""Slots: options of a method in several kinds, from TOML, from overrides and from Python, and back."""

import json
import tomllib
from dataclasses import field, replace

import pytest

from solera.core.errors import ConfigError
from solera.core.settings import Slot, settings
from solera.methods.feddf import FedDF
from solera.methods.fedet import FedET
from solera.methods.fusionlarge import FusionLarge
from solera.methods.hierarchical import Hierarchical
from solera.methods.pfeddf import PFedDF
from solera.methods.steps.low_bit import LowBitUpload
from solera.methods.steps.screen import Robust, Screen
from solera.methods.steps.teaching import ByAccuracy, LowEntropy, Memory, Several, Swag, Teaching
from solera.methods.steps.training import Upload
from solera.runs.config import load_config, to_toml
from solera.testing import deep, run_toy, small

KINDS = [
    ("upload", "whole", Upload()),
    ("upload", "low-bit", LowBitUpload(bits=1)),
    ("screen", "all", Screen()),
    ("screen", "robust", Robust()),
    ("teaching", "clients", Teaching()),
    ("teaching", "swag", Swag(samples=10)),
    ("teaching", "memory", Memory(rounds=1)),
    ("teaching", "accuracy", ByAccuracy()),
    ("teaching", "low-entropy", LowEntropy(top=1000)),
    ("teaching", "several", Several()),
]
TEACHING = """
[method]
name = "feddf"
[[method.teaching.parts]]
kind = "swag"
samples = 3
[[method.teaching.parts]]
kind = "memory"
[method.teaching]
kind = "several"
"""


def method_of(*overrides: str, **tables):
    return load_config({"method": {"name": "feddf", **tables}}, overrides).method


def refused(*overrides: str, **tables) -> str:
    with pytest.raises(ConfigError) as caught:
        method_of(*overrides, **tables)
    return str(caught.value)


# ---- kinds ------------------------------------------------------------------------------------------


def test_every_kind_of_feddfs_slots_is_tested():
    ours = {(s, k) for s, k, _ in KINDS}
    for slot, first in (("upload", Upload), ("screen", Screen), ("teaching", Teaching)):
        there = {(slot, k) for k, cls in first.kinds().items() if cls.__module__.startswith("solera.methods.")}
        assert there == {pair for pair in ours if pair[0] == slot}


@pytest.mark.parametrize(("slot", "kind", "wanted"), KINDS)
def test_a_kind_by_its_table_by_its_name_and_by_an_override(slot, kind, wanted):
    assert type(wanted).kinds()[kind] is type(wanted)
    for method in (
        method_of(**{slot: {"kind": kind}}),
        method_of(**{slot: kind}),
        method_of(f"method.{slot}={kind}"),
        method_of(f"method.{slot}.kind={kind}"),
    ):
        assert method == FedDF(**{slot: wanted})


def test_settings_of_a_kind_from_overrides():
    found = method_of("method.screen.kind=robust", "method.screen.average=krum", "method.screen.max_byzantine=3")
    assert found.screen == Robust("krum", max_byzantine=3)
    assert method_of("method.upload.bits=3", upload={"kind": "low-bit", "skip_ends": True}).upload == LowBitUpload(
        bits=3, skip_ends=True
    )


def test_a_kind_in_short_and_settings_of_it():
    wanted = LowBitUpload(bits=3)
    assert method_of("method.upload=low-bit", "method.upload.bits=3").upload == wanted
    assert method_of("method.upload.bits=3", upload="low-bit").upload == wanted
    assert 'method.ensemble = {"kind": "avg_probs", "x": 1}: expected one of' in refused(
        "method.ensemble.x=1", ensemble="avg_probs"
    )


def test_without_a_kind_settings_are_those_of_the_default():
    assert method_of("method.screen.average=uniform").screen == Screen("uniform")


def test_an_override_with_a_kind_alone_replaces_the_table():
    swag = {"kind": "swag", "samples": 3, "scale": 0.1}
    assert method_of("method.teaching=clients", teaching=swag).teaching == Teaching()
    assert method_of("method.teaching=swag", teaching=swag).teaching == Swag(samples=10, scale=0.5)


def test_several_parts_stand_in_their_order():
    wanted = Several(parts=(Swag(samples=3), Memory()))
    assert load_config(tomllib.loads(TEACHING)).method.teaching == wanted
    assert method_of(
        'method.teaching={kind = "several", parts = [{kind = "swag", samples = 3}, "memory"]}'
    ).teaching == (wanted)


def test_the_methods_own_default_goes_on_in_another_kind():
    """Fed-ET averages uniformly; its robust screen does, too, unless it says otherwise."""
    assert load_config({"method": {"name": "fedet"}}).method.screen == Screen("uniform")
    robust = {"kind": "robust", "update_clip": 2.0}
    found = load_config({"method": {"name": "fedet", "screen": robust}})
    assert found.method.screen == Robust("uniform", update_clip=2.0)
    assert load_config(tomllib.loads(to_toml(found))).method == found.method


@pytest.mark.parametrize(
    "method",
    [
        FedDF(
            upload=LowBitUpload(bits=2), screen=Robust("bulyan", buffers="last"), teaching=Swag(include_clients=False)
        ),
        FedDF(teaching=Several(parts=(Swag(samples=2), Memory(rounds=3), ByAccuracy(), LowEntropy(top=7)))),
        PFedDF(teaching=Memory(rounds=2)),
        FusionLarge(screen=Robust("median")),
        FedET(screen=Screen("weighted")),
        Hierarchical(upload=LowBitUpload(bits=4), screen=Robust(update_clip=1.5)),
    ],
    ids=lambda method: type(method).__name__,
)
def test_a_configuration_comes_back_equal(method):
    config = load_config({"method": {"name": type(method).__name__.lower()}})
    text = to_toml(replace(config, method=method))
    assert load_config(tomllib.loads(text)).method == method
    assert to_toml(load_config(tomllib.loads(text))) == text


# ---- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"upload": "lowbit"}, """method.upload.kind = "lowbit": expected one of 'low-bit', 'whole'"""),
        ({"upload": {"kind": "swag"}}, """method.upload.kind = "swag": expected one of 'low-bit', 'whole'"""),
        ({"teaching": "mine"}, "(your own is known once method.name = 'file.py:Method' names its file)"),
        ({"screen": {"kind": 3}}, "method.screen.kind = 3: expected one of 'all', 'robust'"),
        ({"screen": 3}, "method.screen = 3: this is a table"),
        ({"teaching": ["swag"]}, """method.teaching = ["swag"]: this is a table"""),
        (
            {"screen": {"drop_worst": True}},
            "method.screen.drop_worst = true: only kind = 'robust' has this setting, not kind = 'all'",
        ),
        (
            {"teaching": {"kind": "memory", "samples": 2}},
            "method.teaching.samples = 2: only kind = 'swag' has this setting, not kind = 'memory'",
        ),
        ({"screen": {"avrage": "uniform"}}, "did you mean 'method.screen.average'?"),
        (
            {"screen": {"average": "median"}},
            """method.screen.average = "median": expected one of 'weighted', 'uniform' (others with kind = 'robust')""",
        ),
        ({"upload": {"kind": "low-bit", "bits": 9}}, "method.upload.bits = 9: 1 to 8"),
        (
            {"teaching": {"kind": "several", "parts": [{"kind": "swag", "samples": 0}]}},
            "method.teaching.parts[0].samples = 0: expected an integer of at least 1",
        ),
        (
            {"teaching": {"kind": "several", "parts": ["memory", "memory"]}},
            """method.teaching.parts[1].kind = "memory": an earlier part is of this kind""",
        ),
        (
            {"teaching": {"kind": "several", "parts": ["swg"]}},
            """method.teaching.parts[0].kind = "swg": expected one""",
        ),
    ],
)
def test_mistakes_are_refused_with_their_full_key(given, said):
    assert said in refused(**given)


def test_the_same_mistakes_in_python():
    with pytest.raises(ConfigError, match=r"^Screen\.drop_worst = true: only kind = 'robust' has this setting"):
        Screen(drop_worst=True)
    with pytest.raises(ConfigError, match=r"^FedDF\.screen = .*: expected a Screen"):
        FedDF(screen=Swag())


@pytest.mark.parametrize(
    ("flat", "now"),
    [
        ({"quantise": {"bits": 1}}, "method.upload.kind = 'low-bit'"),
        ({"average": "uniform"}, "method.screen.average"),
        ({"average_buffers": "last"}, "method.screen.buffers"),
        ({"teachers": "krum"}, "method.screen.teachers_by, with method.screen.kind = 'robust'"),
        ({"byzantine": 2}, "method.screen.max_byzantine, with method.screen.kind = 'robust'"),
        ({"drop_worst": True}, "method.screen.drop_worst, with method.screen.kind = 'robust'"),
        ({"drop_threshold": 1.5}, "method.screen.drop_threshold, with method.screen.kind = 'robust'"),
        ({"drop_outliers": True}, "method.screen.drop_outliers, with method.screen.kind = 'robust'"),
        ({"update_clip": 2.0}, "method.screen.update_clip, with method.screen.kind = 'robust'"),
        ({"swag": {"samples": 2}}, "method.teaching.kind = 'swag'"),
        ({"memory": {"rounds": 2}}, "method.teaching.kind = 'memory'"),
        ({"teacher_weights": "accuracy"}, "method.teaching.kind = 'accuracy'"),
        ({"low_entropy_top": 9}, "method.teaching.top, with method.teaching.kind = 'low-entropy'"),
        ({"student_init": "from_previous"}, "another method: method.name = 'feddf-previous'"),
        ({"distill_absent": True}, "a setting of method.name = 'feddf-previous'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_key_beside_the_slots_is_refused_with_its_place(flat, now):
    said = refused(**flat)
    assert said.startswith(f"method.{next(iter(flat))} = ")
    assert said.endswith(f": this setting is now {now}")
    with pytest.raises(ConfigError) as caught:
        FedDF(**flat)
    assert str(caught.value).endswith(f": this setting is now {now}")


@pytest.mark.parametrize("name", ["fusionlarge", "fedet", "hierarchical", "pfeddf"])
def test_other_methods_with_these_slots_refuse_it_as_well(name):
    with pytest.raises(ConfigError, match=r'^method\.average = "median": this setting is now method\.screen\.average$'):
        load_config({"method": {"name": name, "average": "median"}})


# ---- a user's own ----------------------------------------------------------------------------------


@settings
class FirstOnly(Teaching):
    """The first teachers of the round alone."""

    kind: str = field(default="first-only", init=False)
    count: int = 1

    def fits(self, server):
        if self.count < 1:
            yield f"count = {self.count}: no client teaches; at least 1"

    def join(self, teachers, M, at):
        return dict(list(teachers.items())[: self.count])


class Unnamed(FirstOnly):
    """The same without a kind of its own."""


def test_a_users_own_teaching_is_a_kind_once_it_is_imported(tmp_path):
    method = method_of(teaching={"kind": "first-only", "count": 2})
    assert method.teaching == FirstOnly(count=2)
    assert load_config(tomllib.loads(to_toml(load_config({"method": {"name": "feddf", "teaching": "first-only"}}))))
    plain = run_toy(small(FedDF()), tmp_path / "plain", rounds=1)
    own = run_toy(small(FedDF(teaching=FirstOnly())), tmp_path / "own", rounds=1)
    every = run_toy(small(FedDF(teaching=FirstOnly(count=99))), tmp_path / "every", rounds=1)
    assert own.digest != plain.digest == every.digest
    with pytest.raises(ConfigError, match=r"^method\.teaching\.count = 0: no client teaches; at least 1$"):
        run_toy(small(FedDF(teaching=FirstOnly(count=0))), tmp_path / "none", rounds=1)


def test_a_class_without_a_kind_has_its_full_name():
    """So a run directory tells it from its base, and two such classes from each other."""
    assert Unnamed().kind == f"{__name__}.Unnamed" != FirstOnly().kind
    assert Unnamed() != FirstOnly()
    assert Teaching.kinds()[f"{__name__}.Unnamed"] is Unnamed


def test_a_slot_of_ones_own():
    @settings
    class Flavour(Slot):
        kind: str = field(default="plain", init=False)

    @settings
    class Sweet(Flavour):
        kind: str = field(default="sweet", init=False)
        spoons: int = 2

    assert Flavour.kinds() == {"plain": Flavour, "sweet": Sweet}
    assert list(Sweet().fits(None)) == []

    @settings
    class Sugary(Flavour):
        kind: str = field(default="sweet", init=False)

    with pytest.raises(ConfigError, match=r"kind = 'sweet': .*Sweet and .*Sugary have this kind; give one of them"):
        Flavour.kinds()
    Sugary.kind = "sugary"

    class NoDeco(Sweet):
        kind: str = field(default="none", init=False)

    with pytest.raises(ConfigError, match=r"NoDeco must be decorated with @settings$"):
        Flavour.kinds()


# ---- runs -------------------------------------------------------------------------------------------


def test_swag_beside_memory_with_one_architecture(tmp_path):
    """Drawn models teach from the first round on, the last student from the second; one part alone is another run."""
    both = Several(parts=(Swag(samples=2), Memory(rounds=1)))
    runs = {
        name: run_toy(small(FedDF(teaching=teaching)), tmp_path / name, rounds=2, models={"deep": deep})
        for name, teaching in (("both", both), ("swag", Swag(samples=2)), ("memory", Memory(rounds=1)))
    }
    assert len({r.digest for r in runs.values()}) == 3
    reported = [json.loads(line) for line in (tmp_path / "both" / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert all("swag" in line["ensembles"] for line in reported)


def test_run_json_has_the_kinds(tmp_path):
    teaching = Several(parts=(Memory(rounds=2), LowEntropy(top=20)))
    run_toy(small(FedDF(upload=LowBitUpload(bits=3), screen=Robust("median"), teaching=teaching)), tmp_path / "a")
    found = json.loads((tmp_path / "a" / "run.json").read_text("utf-8"))["experiment"]["method"]
    assert (found["upload"]["kind"], found["upload"]["bits"]) == ("low-bit", 3)
    assert (found["screen"]["kind"], found["screen"]["average"]) == ("robust", "median")
    assert [part["kind"] for part in found["teaching"]["parts"]] == ["memory", "low-entropy"]
