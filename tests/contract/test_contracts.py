"""Every registered method and every engine keeps its contract; a new one is picked up by being registered."""

from dataclasses import dataclass

import pytest

import solera.methods  # noqa: F401  (registers them)
from solera.core.errors import SoleraError
from solera.core.federation import FederationConfig
from solera.engines import ENGINES, EngineConfig, InProcess, Processes, Threads
from solera.engines.faulty import Faulty
from solera.method import METHODS, Client, Model, Weights, like, task, weights_of
from solera.methods import FedAvg
from solera.runs.config import RunConfig
from solera.runs.rehearsal import rehearse
from solera.testing import check_engine, check_method, run_toy, small, toy


@pytest.mark.parametrize("name", sorted(METHODS))
def test_method(name, tmp_path):
    check_method(name, tmp_path)


ON_THIS_MACHINE = sorted(name for name, settings in ENGINES.items() if settings is EngineConfig)


@pytest.mark.parametrize("name", ON_THIS_MACHINE)  # Ray: test_on_ray.py; Flower: unit/deploy
def test_engine(name, tmp_path):
    check_engine(EngineConfig(name, 2).open, tmp_path)


@pytest.mark.parametrize("workers", [1, 3])
def test_engines_with_another_number_of_workers(workers, tmp_path):
    for i, kind in enumerate((Threads, Processes)):
        check_engine(lambda site, states, kind=kind: kind(site, states, workers), tmp_path / str(i))


def test_an_engine_that_repeats_and_reorders_replies_changes_nothing(tmp_path):
    check_engine(lambda site, states: Faulty(InProcess(site, states), lambda c: "duplicate", True), tmp_path)


def test_an_engine_is_given_as_to_simulate(tmp_path):
    for i, engine in enumerate(("inprocess", EngineConfig("threads", 2))):
        check_engine(engine, tmp_path / str(i))


def lossy(site, states):
    return Faulty(InProcess(site, states), lambda c: "drop" if c.client == "c03" else None)


def broken(site, states):
    raise OSError("no route to the cluster")


def test_what_an_engine_does_wrong_is_named(tmp_path):
    with pytest.raises(AssertionError, match=r"^lossy: 1 replies are missing; the first: c03: "):
        check_engine(lossy, tmp_path / "a")
    with pytest.raises(AssertionError, match=r"^broken raised OSError: no route to the cluster$"):
        check_engine(broken, tmp_path / "b")


# ---- methods that break the contract ----------------------------------------------------------------


@dataclass(frozen=True)
class Change(FedAvg):
    """FedAvg with a last step of its own in each round."""

    def round(self, state, fed, server):
        new = super().round(state, fed, server)
        return self.State({A: {n: self.change(n, t) for n, t in w.items()} for A, w in new.weights.items()}, *rest(new))

    def change(self, n, t):
        return t


def rest(state):
    return [getattr(state, f) for f in state.__dataclass_fields__ if f != "weights"]


class AsFloat(Change):
    """Averages the integer buffers."""

    def change(self, n, t):
        return t.float() / 2


class Longer(Change):
    """Returns weights of another shape."""

    def change(self, n, t):
        return t[:1] if t.ndim else t


class Fewer(FedAvg):
    """Loses a tensor on the way out."""

    def models(self, state):
        return {A: Model(A, {n: t for n, t in w.items() if n != "0.bias"}) for A, w in state.weights.items()}


class NoReturn(FedAvg):
    """Forgets its return statement."""

    def round(self, state, fed, server):
        super().round(state, fed, server)


WRONG = [
    (
        AsFloat,
        r"AsFloat\.round: models\(\)\['deep'\] has 1\.num_batches_tracked as float32, .* has int64: average only",
    ),
    (Longer, r"Longer\.round: models\(\)\['\w+'\] has 0\.weight of shape \[1, 8\], the architecture has \[1\d, 8\]$"),
    (Fewer, r"Fewer\.init: models\(\)\['\w+'\] lacks 0\.bias$"),
    (NoReturn, r"NoReturn\.round returned None, not a NoReturn\.State$"),
]


@pytest.mark.parametrize(("cls", "said"), WRONG, ids=lambda x: getattr(x, "__name__", ""))
def test_what_a_method_does_to_its_models_is_named(cls, said, tmp_path):
    """By the check, by a run and by a dry run."""
    with pytest.raises(AssertionError, match=said):
        check_method(cls(), tmp_path / "a", engines=())
    with pytest.raises(SoleraError, match=said):
        run_toy(small(cls()), tmp_path / "b", rounds=1)
    with pytest.raises(SoleraError, match=said):
        rehearse(toy(), small(cls()), RunConfig(rounds=1), FederationConfig())


@dataclass(frozen=True)
class Noted:
    weights: Weights = like("weights")


@task("test_contracts.shy")
def shy(client: Client, weights: Weights) -> Noted:
    if client.id == "c03":
        raise ValueError("three is too many")
    return Noted(weights_of(client.model(weights)))


class Shy(FedAvg):
    """One client always fails."""

    def round(self, state, fed, server):
        fed.map(shy, [k for k in fed.sample() if fed.architecture(k) == "deep"], weights=state.weights["deep"])
        return super().round(state, fed, server)


def test_a_client_that_fails_undisturbed_is_named(tmp_path):
    with pytest.raises(AssertionError, match=r"c03 is dropped from test_contracts\.shy: .*three is too many"):
        check_method(Shy(), tmp_path, engines=())


def test_the_contract_can_fail(tmp_path):
    """An engine that loses a reply does not pass."""
    with pytest.raises(AssertionError):
        check_engine(
            lambda site, states: Faulty(InProcess(site, states), lambda c: "drop" if c.client == "c03" else None),
            tmp_path,
        )
