"""A dry run sends what the run will send, trains nothing and leaves nothing."""

import dataclasses
from unittest import mock

import pytest
import torch
from torch import nn

import solera.methods  # noqa: F401  (registers them)
from solera.core.errors import ConfigError, RunError
from solera.core.federation import FederationConfig
from solera.core.randomness import Parallel
from solera.core.task import Client, task
from solera.core.tensors import weights_of
from solera.core.wire import Packed, at_most
from solera.data import PublicConfig
from solera.deploy.agreed import Noting, check_asked
from solera.engines import Call, ClientInfo, InProcess, Roster
from solera.engines.dry import Dry
from solera.engines.serve import arguments_of
from solera.method import METHODS, find_method
from solera.methods.steps import training
from solera.methods.steps.low_bit import LowBitUpload
from solera.methods.steps.screen import Robust
from solera.methods.steps.teaching import LowEntropy
from solera.methods.steps.training import local_update
from solera.place.placement import numerics
from solera.runs.config import RunConfig, load_config
from solera.runs.read import read_run
from solera.runs.rehearsal import rehearse, rehearse_config
from solera.testing import run_toy, small, toy_for
from solera.train.distill import Distill, distill
from solera.train.fitting import Local, fit

ROUNDS = 3
SOME = FederationConfig(fraction=0.75)


def both(method, out):
    """A dry run, what it says will be sent in each round, and what the run sends.

    What a deployment's sites would write down in the dry run is what they answer in the run: each call is looked at.
    """
    scenario, begin, asked = toy_for(method), InProcess.start, []
    noting = Noting(scenario.roster)
    dry = rehearse(scenario, method, RunConfig(rounds=ROUNDS), SOME, noting)
    bounds = noting.bounds(bool(method.traits().bytes_vary))

    def start(engine, calls):
        for call in calls:
            task, arguments = arguments_of(call)
            check_asked(call.client, noting.tasks, bounds, task.name, arguments, engine)
            asked.append(task.name)
        return begin(engine, calls)

    with mock.patch.object(InProcess, "start", start):
        run_toy(method, out, rounds=ROUNDS)
    assert set(asked) == noting.tasks
    return dry, [sent.bytes for sent in dry.rounds], [r.traffic.bytes for r in read_run(out).rounds]


@pytest.mark.parametrize("name", sorted(METHODS))
def test_bytes_are_those_of_the_run(name, tmp_path):
    dry, said, sent = both(small(find_method(name)()), tmp_path)
    assert said == sent
    assert dry.bounded == []
    assert (name == "fedgems") == bool(dry.varies)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("feddf", {"upload": LowBitUpload(bits=3, skip_ends=True)}),
        ("hierarchical", {"upload": LowBitUpload(bits=1)}),
        ("feddf", {"teaching": LowEntropy(top=20)}),
        ("fedgems", {"selective": False}),
        ("fedgkt", {"partial": "cached"}),
        ("heterofl", {"assignment": "dynamic"}),
        ("mnfl-twice", {}),
        ("mnfl-code", {}),
        ("scaffold-up", {}),
    ],
)
def test_other_exchanges_of_a_method_are_exact_as_well(name, settings, tmp_path):
    dry, said, sent = both(dataclasses.replace(small(find_method(name)()), **settings), tmp_path)
    assert said == sent
    assert dry.facts()["exact"]


@pytest.mark.parametrize("name", ["feddf", "fusionlarge", "hierarchical"])
def test_no_client_is_dropped_for_its_accuracy_in_a_dry_run(name):
    """All models are zeros there, which is at chance."""
    method = dataclasses.replace(small(find_method(name)()), screen=Robust(drop_worst=True))
    plain = rehearse(toy_for(method, validation=0.2), small(find_method(name)()), RunConfig(rounds=ROUNDS), SOME)
    dry = rehearse(toy_for(method, validation=0.2), method, RunConfig(rounds=ROUNDS), SOME)
    assert [sent.bytes for sent in dry.rounds] == [sent.bytes for sent in plain.rounds]


LENT = [n for n in sorted(METHODS) if small(find_method(n)()).traits().public == "everywhere" and n != "decentralised"]


@pytest.mark.parametrize("name", LENT)
def test_public_samples_are_sent_once_to_each_client_that_is_asked(name, tmp_path):
    """Whatever the method asks of it, in the run, in two halves of it and in the dry run."""
    method = small(find_method(name)())
    public = PublicConfig(size=60, labels=method.traits().public_labels == "needed", where="server")
    dry = rehearse(toy_for(method, public=public), method, RunConfig(rounds=ROUNDS), SOME)
    run_toy(method, tmp_path / "whole", rounds=ROUNDS, public=public)
    for rounds in (1, ROUNDS):
        run_toy(method, tmp_path / "halves", rounds=rounds, public=public)
    whole, halves = (read_run(tmp_path / out).rounds for out in ("whole", "halves"))
    assert [r.traffic for r in halves] == [r.traffic for r in whole]
    if not dry.varies:
        assert [sent.bytes for sent in dry.rounds] == [r.traffic.bytes for r in whole]
    everyone = [k for r in whole for e in r.events if e["kind"] == "public_sent" for k in e["clients"]]
    one = sum(t.nbytes for t in toy_for(method, public=public).server.lent.tensors)
    assert sum(r.traffic.content["down"]["data"] for r in whole) == len(everyone) * one > 0
    assert len(everyone) == len(set(everyone))


@pytest.mark.parametrize(
    ("name", "settings", "why"),
    [
        ("fedgems", {"server": Local(epochs=30, batch=16, lr=0.01, optimizer="adam")}, "gets wrong"),
        ("fedma", {"matching": "bbp"}, "make layers wider"),
    ],
)
def test_bytes_that_depend_on_what_is_learned_are_said_to(name, settings, why, tmp_path):
    dry, said, sent = both(dataclasses.replace(small(find_method(name)()), **settings), tmp_path)
    assert said[0] == sent[0]
    assert said != sent
    assert why in dry.varies
    assert not dry.facts()["exact"]


def test_nothing_is_trained_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.Tensor, "backward", lambda *a, **k: pytest.fail("a gradient is computed"))
    dry = rehearse_config(load_config("toy", []))
    assert list(tmp_path.iterdir()) == []
    assert dry.models["mlp"] == {"architecture": "mlp", "bytes": 4 * 199_210}
    assert (dry.clients, dry.cohort, len(dry.rounds)) == (8, 4, 5)


def test_what_a_run_refuses_a_dry_run_refuses():
    method = small(find_method("feddf")())
    with pytest.raises(ConfigError, match="needs public data"):
        rehearse(toy_for(method, public=PublicConfig(source="none")), method, RunConfig(), SOME)
    with pytest.raises(ConfigError, match="min_replies"):
        rehearse(toy_for(method), method, RunConfig(), FederationConfig(fraction=0.25, min_replies=8))


def test_a_reply_that_zeros_cannot_stand_for_is_named(monkeypatch):
    """Label counts must sum to the client's examples: zeros do not, and without `fill` there is nothing else."""
    method = small(find_method("fedftg")())
    marker = training.CountedUpdate.__dataclass_fields__["counts"]
    bare = {"tie": dataclasses.replace(marker.metadata["tie"], fill=None)}
    monkeypatch.setattr(marker, "metadata", bare)
    with pytest.raises(RunError, match=r"train_and_count is refused: label counts .*`fill`"):
        rehearse(toy_for(method), method, RunConfig(rounds=1), SOME)


def test_trainings_take_no_step_in_the_servers_threads_either():
    model, x, y = nn.Linear(2, 2), torch.ones(8, 2), torch.zeros(8, dtype=torch.int64)
    before = weights_of(model)

    def job():
        student = nn.Linear(2, 2)
        done = fit(model, x, y, Local(epochs=3), 0).steps
        return done + distill(student, x, lambda i: pytest.fail("a teacher is asked"), Distill(steps=4), 0).steps

    with numerics(dry=True), numerics():
        assert Parallel(2)([job, job], [0, 1]) == [0, 0]
    assert all(torch.equal(before[n], t) for n, t in weights_of(model).items())
    assert fit(model, x, y, Local(epochs=3), 0).steps == 3


@dataclasses.dataclass(frozen=True)
class Chosen:
    rows: torch.Tensor = at_most("most")


@task("test_dry.choose")
def choose(client: Client, most: int) -> Chosen: ...


def test_the_engine_answers_zeros_as_large_as_they_may_be():
    engine = Dry(Roster.of({"c0": ClientInfo("m", 3)}))
    (reply,) = engine.start([Call("c0", choose.name, 0, 0, 0, Packed({"most": 7}))])()
    assert (reply.client, reply.message.tensors[0].tolist(), engine.bounded) == ("c0", [0.0] * 7, {choose.name})
    sent = {"weights": {"w": torch.ones(2)}, "local": Local(), "mu": 0.0}
    (reply,) = engine.start([Call("c0", local_update.name, 0, 0, 0, Packed(sent))])()
    assert reply.message.tensors[0].tolist() == [0.0, 0.0]
