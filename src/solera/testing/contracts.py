"""The contracts of methods and engines, as checks that raise AssertionError."""

import dataclasses
import functools
import math
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..core.errors import SoleraError
from ..core.federation import Federation, FederationConfig
from ..core.randomness import Parallel, same_bits
from ..core.task import Client, task
from ..core.tensors import Weights
from ..core.wire import decode, digest, encode, like
from ..engines import Call, ClientStates, Engine, EngineSettings, Host, InProcess, engine_of
from ..engines.faulty import Faulty
from ..method import Method, check_class, find_method, name_of
from ..place.placement import numerics
from ..runs.record import each_line
from .toys import run_toy, small, toy, toy_for

ENGINES_TO_COMPARE = ("inprocess", "threads", "processes")


# ---- the contract of a method -----------------------------------------------------------------------


@numerics(threads=1)
def check_method(
    method: Method | str, tmp: str | os.PathLike[str], engines: Sequence[str] = ENGINES_TO_COMPARE
) -> None:
    """Check the contract of a method. `method` is an object or a registered name."""
    given = find_method(method)() if isinstance(method, str) else method
    check_class(type(given), name_of(given))  # as registering it would
    name, tmp, method = name_of(given), pathlib.Path(tmp), small(given)
    try:
        reference = run_toy(method, tmp / "reference")
    except SoleraError as e:
        raise AssertionError(f"{name}: {e}") from e
    failed = [f for r in each_line(reference.out, None) if r is not None for f in r.failures]
    assert not failed, f"{name}: {failed[0]['client']} is dropped from {failed[0]['task']}: {failed[0]['reason']}"
    for model, score in {**reference.summary["models"], **reference.summary["ensembles"]}.items():
        assert math.isfinite(score["loss"]), f"{name}: the loss of {model!r} is {score['loss']}"
    back = decode(encode(reference.state), type(method).State)
    assert digest(back) == digest(reference.state), f"{name}: State changes when it is encoded and decoded"
    for engine in engines:
        again = run_toy(method, tmp / engine, engine)
        assert again.digest == reference.digest, f"{name}: the engine {engine!r} gives other bits"
    _check_round_is_pure(method, tmp / "pure")
    _check_resume(method, tmp / "resumed", reference.digest)
    _check_order(method, tmp / "order")
    _check_bad_client(method, tmp / "bad")


def _federation(scenario: Any, tmp: pathlib.Path, wrap: Callable[[Engine], Engine] = lambda e: e) -> Federation:
    engine = wrap(InProcess(scenario, ClientStates(tmp / "clients")))
    return Federation(engine, 0, FederationConfig(fraction=1.0))


class _Twice(Parallel):
    """Runs all server work twice, as after a disturbance. A job must not continue training the model it was given."""

    def __init__(self) -> None:
        super().__init__(1)

    def __call__(self, functions: Sequence[Callable[[], Any]], seeds: Sequence[int]) -> list[Any]:
        first, again = super().__call__(functions, seeds), super().__call__(functions, seeds)
        assert same_bits(first, again), "a job of server.parallel changes its arguments: it must only return a result"
        return again


def _check_round_is_pure(method: Method, tmp: pathlib.Path) -> None:
    """`round` does not change its input, gives the same result twice, and uses map or mean as its traits declare."""
    name, scenario = name_of(method), toy_for(method)
    fed, server = _federation(scenario, tmp), scenario.server
    server.parallel = _Twice()
    before = method.init(fed, server)
    bits = digest(before)
    fed.begin(0)
    first = digest(method.round(before, fed, server))
    assert digest(before) == bits, f"{name}: round changes the state it was given"
    verbs = set(fed.verbs)
    fed.void()  # also restores the clients' states
    fed.begin(0)
    assert digest(method.round(before, fed, server)) == first, f"{name}: the same round twice gives other bits"
    declared = method.traits().replies
    silent = sum(t.floats + t.integers for t in fed.up.values()) == 0  # clients sent acknowledgements only
    used = "none" if silent else "individual" if "map" in verbs else "means"
    assert declared == used or (silent and declared == "data"), f"{name}: declares replies {declared!r}, uses {used!r}"
    scored = method.personal(before, fed) is not None
    assert scored == method.traits().personal, f"{name}: traits().personal is {not scored}, but personal() is not"


def _check_resume(method: Method, tmp: pathlib.Path, expected: str) -> None:
    """A run that is stopped and resumed after each round ends in the same bits."""
    for rounds in (1, 2, 3):
        result = run_toy(method, tmp, rounds=rounds)
    assert result.digest == expected, f"{name_of(method)}: a resumed run ends in other bits"


def _check_order(method: Method, tmp: pathlib.Path) -> None:
    """The order in which replies arrive does not change the result."""
    digests = set()
    for reverse in (False, True):
        scenario = toy_for(method)
        fed = _federation(scenario, tmp / str(reverse), functools.partial(Faulty, plan=lambda c: None, reverse=reverse))
        state = method.init(fed, scenario.server)
        fed.begin(0)
        digests.add(digest(method.round(state, fed, scenario.server)))
    assert len(digests) == 1, f"{name_of(method)}: the order of arrival changes the result"


def _only(client: str, fault: str, call: Call) -> str | None:
    return fault if call.client == client else None


def _check_bad_client(method: Method, tmp: pathlib.Path) -> None:
    """An invalid reply is dropped and the round continues. The result is the same as if the client had not answered."""
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
    assert len(digests) == 1, f"{name_of(method)}: an invalid reply changes the result"


# ---- the contract of an engine ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Echo:
    """The reply of the test task `echo`."""

    value: float
    weights: Weights = like("weights")


@task("testing.echo")
def echo(client: Client, value: float, weights: Weights) -> Echo:
    """Return the payload plus a draw from the client's seed and the number of its calls."""
    calls = client.state.get("calls", {"n": torch.zeros(())})["n"] + 1
    client.state["calls"] = {"n": calls}
    return Echo(value, {n: w + calls + torch.rand(w.shape) for n, w in weights.items()})  # as dropout draws


@task("testing.explode")
def explode(client: Client) -> None:
    """Fail on every other client."""
    if int(client.id[1:]) % 2:
        raise RuntimeError("out of memory")


@task("testing.die")
def die(client: Client) -> None:
    """Kill its process on one client."""
    if client.id == "c01":
        os.kill(os.getpid(), 9)


@task("testing.overwrite")
def overwrite(client: Client, weights: Weights) -> None:
    """Break the rule that a task must not change its arguments."""
    for w in weights.values():
        w.zero_()


@numerics(threads=1)
def check_engine(
    engine: EngineSettings | type[EngineSettings] | str | Callable[[Host, ClientStates], Engine],
    tmp: str | os.PathLike[str],
) -> None:
    """Check the contract of an engine, in comparison with the serial engine. `engine` is what `simulate` takes, or a
    function that opens one."""
    tmp = pathlib.Path(tmp)
    given: Any = engine
    open_engine = engine_of(given).open if isinstance(given, str) or getattr(given, "open", None) else given
    name = given if isinstance(given, str) else getattr(given, "__qualname__", type(given).__qualname__)
    scenario = toy()
    weights = {"w": torch.arange(6.0)}

    def answers(make: Callable[[Host, ClientStates], Engine], where: str) -> list[str]:
        engine = make(scenario, ClientStates(tmp / where))
        try:
            fed = Federation(engine, 3)
            seen = []
            for t, retry in ((0, False), (1, False), (1, True)):
                if retry:
                    fed.void()  # restores the clients' states
                fed.begin(t)
                for value in (1.0, 2.0):
                    replies = fed.map(echo, list(fed.clients), value=value, weights=weights)
                    lost = [f"{k}: {why}" for k, why in replies.failures.items()]
                    assert not lost, f"{len(lost)} replies are missing; the first: {lost[0]}"
                    assert list(replies) == list(fed.clients), "replies are not in canonical order"
                    seen.append(digest(dict(replies)))
            fed.begin(2)
            replies = fed.map(explode, list(fed.clients))
            assert {int(k[1:]) % 2 for k in replies} == {0}, "there is a reply from a client that failed"
            assert all("out of memory" in why for why in replies.failures.values())
            assert len(replies) + len(replies.failures) == len(fed.clients), "a client is neither a reply nor a failure"
            early = fed.submit(echo, ["c00"], value=3.0, weights=weights)
            late = fed.submit(echo, ["c01"], value=4.0, weights=weights)
            assert (late()["c01"].value, early()["c00"].value) == (4.0, 3.0), "two exchanges at once are mixed up"
            return seen
        finally:
            engine.close()

    expected = answers(InProcess, "reference")
    try:
        found = answers(open_engine, "engine")
    except AssertionError as e:
        raise AssertionError(f"{name}: {e}") from e
    except Exception as e:  # an engine may raise anything
        raise AssertionError(f"{name} raised {type(e).__name__}: {e}") from e
    assert found == expected, f"{name}: other bits than with the engine 'inprocess'"
    assert expected[2:4] == expected[4:6], f"{name}: a repeated round gives other bits"
