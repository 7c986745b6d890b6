"""Contracts that every method and every engine must keep, usable by other packages.

    from solera.testing import check_method, check_engine
    check_method(MyMethod(), tmp_path)          # raises AssertionError with what is broken

`toy` is the federation they are tried on: eight clients, two architectures, one of them with BatchNorm and dropout.
"""

import dataclasses
import functools
import math
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .config import EngineConfig, RunConfig
from .data import PartitionConfig, PublicConfig, from_tensors
from .devices import numerics
from .engines import Call, ClientStates, Engine, InProcess, Site
from .engines.faulty import Faulty
from .federation import Federation, FederationConfig
from .method import METHODS, Method, find_method, name_of
from .models import wrap
from .randomness import Parallel, same_bits
from .runner.loop import NothingLearned, Result, simulate
from .scenario import Scenario
from .task import Client, task
from .tensors import Weights
from .wire import decode, digest, encode

ENGINES_TO_COMPARE = ("inprocess", "threads", "processes")


def wide() -> nn.Module:
    """A plain architecture of the toy federation."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def deep() -> nn.Module:
    """The other one, with all that makes bits hard to keep: BatchNorm statistics and dropout."""
    return nn.Sequential(
        nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)
    )


def deep_group() -> nn.Module:
    """`deep` with GroupNorm, for methods that refuse running statistics."""
    return nn.Sequential(
        nn.Linear(8, 12), nn.GroupNorm(3, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)
    )


def stacked() -> nn.Module:
    """A plain chain, as `wide` is, with one layer more: for methods that match or cut neurons."""
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))


def split_wide() -> nn.Module:
    """`wide` in three pieces, for methods that need them; its head has the shape of every other head here."""
    return wrap(wide(), classifier="2", head="shared", representation=8, head_hidden=8)


def split_deep() -> nn.Module:
    """`deep` in three pieces."""
    return wrap(deep(), classifier="6", head="shared", representation=8, head_hidden=8)


def large() -> nn.Module:
    """A model of the server's own, in three pieces and larger than any client's."""
    whole = nn.Sequential(
        nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)
    )
    return wrap(whole, classifier="6", head="shared", representation=8, head_hidden=8)


def toy(
    models: dict[str, Any] | None = None, clients: int = 8, seed: int = 0, samples: int = 400, **options: Any
) -> Scenario:
    """A federation that trains in a fraction of a second: three classes of points in eight dimensions."""
    g = torch.Generator().manual_seed(7)
    centres = torch.randn(3, 8, generator=g) * 2

    def draw(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.arange(n) % 3
        return centres[y] + torch.randn(n, 8, generator=g), y

    data = from_tensors(draw(samples), draw(150), classes=3, name="toy")
    options = {"client_test": 0.25, "validation": 0.1, "public": PublicConfig(size=60), **options}
    split = options.pop("partition", PartitionConfig(clients=clients, alpha=1.0, variant="class", min_size=4))
    return Scenario(data, models or {"wide": wide, "deep": deep}, split, seed=seed, **options)


def small(method: Method) -> Method:
    """The same method with so little local training and distillation that a round takes milliseconds."""
    changes: dict[str, Any] = {}
    for f in dataclasses.fields(method):
        value = getattr(method, f.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            less = {"epochs": 1, "steps": 6, "batch": 16, "every": 2, "patience": 4}
            known = {g.name for g in dataclasses.fields(value)}
            less.pop("steps" if getattr(value, "steps", None) is None else "epochs")  # local training is by one of them
            changes[f.name] = dataclasses.replace(value, **{k: v for k, v in less.items() if k in known})
    return dataclasses.replace(method, **changes)


def toy_for(method: Method, **options: Any) -> Scenario:
    """The toy federation a method accepts: what its traits ask for, with one architecture if it can do no more."""
    traits = method.traits()
    models: dict[str, Any] = {"wide": wide, "deep": deep}
    if traits.split in ("split", "shared features", "shared head"):
        models = {"wide": split_wide, "deep": split_deep}
    if not traits.batchnorm:
        models["deep"] = deep_group
    if traits.split == "chain":
        models = {"wide": wide, "deep": stacked}
    if traits.architectures == "one":
        del models["wide"]
    if traits.public_labels == "needed":
        options.setdefault("public", PublicConfig(size=60, labels=True))
    if traits.server_model == "larger":
        options.setdefault("server", ("large", large))
    return toy(**{"models": models, **options})


def run_toy(method: Method, out: pathlib.Path, engine: str = "inprocess", rounds: int = 3, **options: Any) -> Result:
    """A toy run of a method."""
    return simulate(
        toy_for(method, **options),
        method,
        out,
        RunConfig(rounds=rounds),
        FederationConfig(fraction=0.75),
        EngineConfig(name=engine, workers=2),  # type: ignore[arg-type]
        resume=True,
    )


# ---- the contract of a method -----------------------------------------------------------------------


@numerics(threads=1)
def check_method(
    method: Method | str, tmp: str | os.PathLike[str], engines: Sequence[str] = ENGINES_TO_COMPARE
) -> None:
    """Everything the library promises of a method. `method` is an object or a registered name."""
    method = find_method(method)() if isinstance(method, str) else method
    assert type(method) in METHODS.values(), f"{type(method).__name__} is not registered: decorate it with @register"
    name, tmp = name_of(method), pathlib.Path(tmp)
    method = small(method)

    try:
        reference = run_toy(method, tmp / "reference")
    except NothingLearned as e:
        raise AssertionError(f"{name}: {e}") from e
    for model, score in {**reference.summary["models"], **reference.summary["ensembles"]}.items():
        assert math.isfinite(score["loss"]), f"{name}: the loss of {model!r} is {score['loss']}"
    back = decode(encode(reference.state), type(method).State)
    assert digest(back) == digest(reference.state), f"{name}: State does not survive the wire"
    for engine in engines:
        again = run_toy(method, tmp / engine, engine)
        assert again.digest == reference.digest, f"{name}: other bits on the engine {engine!r}"
    _check_round_is_pure(method, tmp / "pure")
    _check_resume(method, tmp / "resumed", reference.digest)
    _check_order(method, tmp / "order")
    _check_bad_client(method, tmp / "bad")


def _federation(scenario: Any, tmp: pathlib.Path, wrap: Callable[[Engine], Engine] = lambda e: e) -> Federation:
    engine = wrap(InProcess(scenario, ClientStates(tmp / "clients")))
    return Federation(engine, 0, FederationConfig(fraction=1.0))


class _Twice(Parallel):
    """Server work as it is where it was disturbed: run again. A job that trains a given model would go on with it."""

    def __init__(self) -> None:
        super().__init__(1)

    def __call__(self, functions: Sequence[Callable[[], Any]], seeds: Sequence[int]) -> list[Any]:
        first, again = super().__call__(functions, seeds), super().__call__(functions, seeds)
        assert same_bits(first, again), "a job of server.parallel changes what it was given: let it return its result"
        return again


def _check_round_is_pure(method: Method, tmp: pathlib.Path) -> None:
    """`round` leaves its input as it was, gives the same twice, and uses the verbs its privacy class declares."""
    name, scenario = name_of(method), toy_for(method)
    fed, server = _federation(scenario, tmp), scenario.server
    server.parallel = _Twice()
    before = method.init(fed, server)
    bits = digest(before)
    fed.begin(0)
    first = digest(method.round(before, fed, server))
    assert digest(before) == bits, f"{name}: round changes the state it was given"
    verbs = set(fed.verbs)
    fed.void()  # what clients keep is as it was, too
    fed.begin(0)
    assert digest(method.round(before, fed, server)) == first, f"{name}: the same round twice gives other bits"
    declared = method.traits().replies
    silent = sum(t.floats + t.integers for t in fed.up.values()) == 0  # nothing but acknowledgements came up
    used = "none" if silent else "individual" if "map" in verbs else "means"
    assert declared == used or (silent and declared == "data"), f"{name}: declares replies {declared!r}, shows {used!r}"
    scored = method.personal(before, fed) is not None
    assert scored == method.traits().personal, f"{name}: traits().personal is {not scored}, but personal() is not"


def _check_resume(method: Method, tmp: pathlib.Path, expected: str) -> None:
    """Stopping after each round and starting again ends in the same bits."""
    for rounds in (1, 2, 3):
        result = run_toy(method, tmp, rounds=rounds)
    assert result.digest == expected, f"{name_of(method)}: a resumed run ends in other bits"


def _check_order(method: Method, tmp: pathlib.Path) -> None:
    """The order in which replies arrive changes nothing."""
    digests = []
    for reverse in (False, True):
        scenario = toy_for(method)
        fed = _federation(scenario, tmp / str(reverse), functools.partial(Faulty, plan=lambda c: None, reverse=reverse))
        state = method.init(fed, scenario.server)
        fed.begin(0)
        digests.append(digest(method.round(state, fed, scenario.server)))
    assert digests[0] == digests[1], f"{name_of(method)}: the order of arrival changes the result"


def _only(client: str, fault: str, call: Call) -> str | None:
    return fault if call.client == client else None


def _check_bad_client(method: Method, tmp: pathlib.Path) -> None:
    """A client whose replies are spoiled loses its seat, not the round; and the rest is as if it had not answered."""
    digests = set()
    for fault in ("drop", "nan", "shape", "garbage"):
        scenario = toy_for(method)
        bad = scenario.roster.id(2)
        fed = _federation(scenario, tmp / fault, functools.partial(Faulty, plan=functools.partial(_only, bad, fault)))
        state = method.init(fed, scenario.server)
        fed.begin(0)
        state = method.round(state, fed, scenario.server)
        if fed.verbs:
            named = {f["client"] for f in fed.failures}
            answered_with_data = sum(t.floats for t in fed.up.values()) > 0
            assert bad in named or (fault in ("nan", "shape") and not answered_with_data), f"{fault}: {bad} not named"
        digests.add(digest(state))
    assert len(digests) == 1, f"{name_of(method)}: a spoiled reply leaves traces"


# ---- the contract of an engine ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Echo:
    """What the test tasks answer."""

    value: float
    weights: Weights


@task("testing.echo")
def echo(client: Client, value: float, weights: Weights) -> Echo:
    """Answers with the payload, a draw from the client's seed, and a count of its own calls."""
    calls = client.state.get("calls", {"n": torch.zeros(())})["n"] + 1
    client.state["calls"] = {"n": calls}
    drawn = torch.rand(3)  # the global generator, as dropout uses it
    return Echo(value, {"drawn": drawn, "calls": calls, "sum": torch.stack([w.sum() for w in weights.values()]).sum()})


@task("testing.explode")
def explode(client: Client) -> None:
    """Fails on every other client."""
    if int(client.id[1:]) % 2:
        raise RuntimeError("out of memory")


@task("testing.die")
def die(client: Client) -> None:
    """Takes its process along on one client."""
    if client.id == "c01":
        os.kill(os.getpid(), 9)


@task("testing.overwrite")
def overwrite(client: Client, weights: Weights) -> None:
    """Breaks the rule that arguments are not written to."""
    for w in weights.values():
        w.zero_()


@numerics(threads=1)
def check_engine(open_engine: Callable[[Site, ClientStates], Engine], tmp: str | os.PathLike[str]) -> None:
    """Everything the library promises of an engine, against the serial one."""
    tmp = pathlib.Path(tmp)
    scenario = toy()
    weights = {"w": torch.arange(6.0)}

    def answers(make: Callable[[Site, ClientStates], Engine], where: str) -> list[str]:
        engine = make(scenario, ClientStates(tmp / where))
        try:
            fed = Federation(engine, 3)
            seen = []
            for t, retry in ((0, False), (1, False), (1, True)):
                if retry:
                    fed.void()  # client state must be as before it
                fed.begin(t)
                for value in (1.0, 2.0):
                    replies = fed.map(echo, list(fed.clients), value=value, weights=weights)
                    assert list(replies) == list(fed.clients), "replies are not in canonical order"
                    seen.append(digest(dict(replies)))
            fed.begin(2)
            replies = fed.map(explode, list(fed.clients))
            assert {int(k[1:]) % 2 for k in replies} == {0}, "a failing client has a reply"
            assert all("out of memory" in why for why in replies.failures.values())
            assert len(replies) + len(replies.failures) == len(fed.clients), "a client got lost"
            early = fed.submit(echo, ["c00"], value=3.0, weights=weights)
            late = fed.submit(echo, ["c01"], value=4.0, weights=weights)
            assert (late()["c01"].value, early()["c00"].value) == (4.0, 3.0), "two exchanges at once are mixed up"
            return seen
        finally:
            engine.close()

    expected = answers(InProcess, "reference")
    found = answers(open_engine, "engine")
    assert found == expected, "other bits than in process"
    assert expected[2:4] == expected[4:6], "a repeated round gives other bits"


__all__ = [
    "Faulty",
    "check_engine",
    "check_method",
    "deep",
    "deep_group",
    "large",
    "run_toy",
    "small",
    "split_deep",
    "split_wide",
    "stacked",
    "toy",
    "toy_for",
    "wide",
]
