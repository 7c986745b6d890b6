"""What a method says about itself is data, and every hook of a method has a home in `Method`."""

import dataclasses
import inspect
import pathlib
import re
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import solera
import solera.methods
from solera.core.errors import ConfigError
from solera.method import METHODS, About, Method, Model, Traits, described, register
from solera.methods import MNFL, FedAvg, FedDF, FedET, Framework, FusionLarge, LocalOnly, Scaffold, ScaffoldUp
from solera.runs.loop import check_fit, check_server
from solera.testing import run_toy, small, toy, toy_for, wide
from solera.train.teachers import Ensemble

SRC = pathlib.Path(solera.__file__).parent
OURS = {n: cls for n, cls in METHODS.items() if cls.__module__.startswith("solera.methods.")}


@pytest.fixture
def names():
    """Whatever a test registers is forgotten."""
    before = dict(METHODS)
    yield
    for name in METHODS.keys() - before.keys():
        del METHODS[name]


# ---- traits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(OURS))
def test_the_words_are_made_from_the_traits(name):
    method = OURS[name]()
    words, traits = described(method), method.traits()
    assert (words.public == "none") == (traits.public == "none")
    assert words.models.startswith("one architecture" if traits.architectures == "one" else "any mix")
    seen = {"means": "means only", "individual": "individual replies", "none": "nothing", "data": "none:"}
    assert words.privacy.startswith(seen[traits.replies])


def test_traits_follow_the_settings():
    assert FedDF().traits().public == "server"
    assert FedDF(fusion=dataclasses.replace(FedDF().fusion, steps=0)).traits().public == "none"
    assert Scaffold().traits().replies == "means"
    assert ScaffoldUp().traits().replies == "individual"
    assert FusionLarge(head="shared").traits().split == "shared head"
    assert (Framework(K=2).traits().groups, Framework(K=2, group_sizes=(1, 2)).traits().groups) == ("K", "")


def test_a_trait_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"replies = .average.*means"):
        Traits(replies="average")


def test_without_public_samples_only_feddf_without_distillation_goes_on():
    """The large model learns on them in every round, even if by no step: it is refused, not left to fail."""
    idle = dataclasses.replace(FedDF().fusion, steps=0)
    bare = toy(public=solera.PublicConfig(source="none"), server=("large", wide))
    check_fit(FedDF(fusion=idle), bare)
    with pytest.raises(ConfigError, match="needs public data"):
        check_fit(FusionLarge(fusion=idle), bare)


def test_every_reason_is_told_at_once():
    bare = toy(public=solera.PublicConfig(source="none"))
    with pytest.raises(ConfigError) as caught:
        check_server(FedET(), bare.server)
    for part in ("needs public data", "models.server", "'wide' is a plain", "'deep' is a plain"):
        assert part in str(caught.value)


def test_nothing_reads_the_words():
    """Programs ask traits: the words of a method are made in method.py and printed by `ls`."""
    for path in SRC.rglob("*.py"):
        text = path.read_text("utf-8")
        if path.name not in ("method.py", "info_commands.py"):
            assert "described(" not in text, path
            assert not re.search(r"method\.about|\.privacy\.|\.models\.startswith", text), path
    for name in ("runs/supply.py", "testing/toys.py", "testing/contracts.py", "runs/loop.py", "runs/measure.py"):
        assert "hasattr(" not in (SRC / name).read_text("utf-8"), name
        assert "method: Any" not in (SRC / name).read_text("utf-8"), name


def test_every_hook_and_every_trait_is_documented():
    page = SRC.parents[1] / "docs" / "own-method.md"
    if not page.is_file():
        pytest.skip("the docs are not beside the package")
    text = page.read_text("utf-8")
    hooks = [n for n, f in vars(Method).items() if not n.startswith("_") and (inspect.isfunction(f) or n == "about")]
    assert {"fits", "finish", "personal", "ensemble_of", "traits"} <= set(hooks)
    for name in [*hooks, *(f.name for f in dataclasses.fields(Traits))]:
        assert re.search(rf"\| `{name}[`(]", text), f"{name} is not in docs/own-method.md"


# ---- own methods -------------------------------------------------------------------------------------


def test_what_is_optional_has_a_body():
    method = FedAvg()
    assert (list(method.fits(None)), method.finish("state", None, None)) == ([], "state")
    assert (method.ensemble_of("state"), method.personal("state", None)) == (None, None)
    assert LocalOnly().traits().personal


@dataclass(frozen=True)
class Halved(FedAvg):
    """FedAvg that goes half the way: State and all else are inherited."""

    def round(self, state, fed, server):
        new = super().round(state, fed, server)
        both = {P: {n: (t + new.weights[P][n]) / 2 for n, t in w.items()} for P, w in state.weights.items()}
        return self.State(both)


def test_a_method_derived_from_a_registered_one_can_be_registered(names, tmp_path):
    register("halved")(Halved)
    scenario = toy_for(Halved(), models={"wide": wide})
    method = small(Halved())
    ours = solera.simulate(scenario, method, tmp_path / "a", solera.RunConfig(rounds=1)).state.weights["wide"]
    plain = solera.simulate(scenario, small(FedAvg()), tmp_path / "b", solera.RunConfig(rounds=1)).state.weights["wide"]
    start = scenario.server.init("wide")
    assert all(torch.equal(ours[n], (start[n] + plain[n]) / 2) for n in ours)


def test_what_a_method_lacks_is_named(names):
    with pytest.raises(TypeError, match=r"'odd'.*does not derive from solera\.method\.Method"):
        register("odd")(dataclass(frozen=True)(type("Odd", (), {})))

    @dataclass(frozen=True)
    class Half(Method):
        about: ClassVar[About] = About("t", "p", "w", "s")

        def models(self, state) -> dict[str, Model]:
            return {}

    with pytest.raises(TypeError, match="lacks init, round"):
        register("half")(Half)

    class Plain(FedAvg):
        more: int = 1

    with pytest.raises(TypeError, match="Plain must be a dataclass"):
        register("plain")(Plain)


# ---- equations that can be replaced ------------------------------------------------------------------


@dataclass(frozen=True)
class EqualFedET(FedET):
    def weights(self, probs, copies):
        return torch.full(probs.shape[:2], 1 / len(probs), dtype=probs.dtype)


@dataclass(frozen=True)
class SilentFedET(FedET):
    def loss(self, logits, labels, dissent):
        return 0.0 * logits.sum()


@dataclass(frozen=True)
class FirstFedDF(FedDF):
    def teacher(self, models, copies):
        return Ensemble(models[:1], temperature=self.fusion.temperature)


@dataclass(frozen=True)
class FixedMNFL(MNFL):
    def learned(self, c, S, s, fed):
        return torch.eye(len(c), dtype=c.dtype)


@pytest.mark.parametrize("changed", [EqualFedET, SilentFedET, FirstFedDF, FixedMNFL])
def test_the_replaced_equation_is_the_one_that_counts(changed, tmp_path):
    plain = run_toy(small(changed.__mro__[1]()), tmp_path / "plain", rounds=1)
    ours = run_toy(small(changed()), tmp_path / "ours", rounds=1)
    assert ours.digest != plain.digest
    if changed is FixedMNFL:
        assert torch.equal(ours.state.c, torch.eye(8, dtype=ours.state.c.dtype))
