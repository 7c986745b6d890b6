"""A method whose tasks, arguments, slots and models have names of their own is counted like ours: types decide."""

import json
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import pytest
import torch
from torch import Tensor

from solera.core.accounting import Availability
from solera.core.federation import FederationConfig
from solera.method import (
    About,
    Client,
    Distill,
    Federation,
    Local,
    Method,
    Model,
    PublicRows,
    Server,
    Trains,
    Traits,
    Weights,
    distill,
    fit,
    like,
    per_client,
    task,
    weights_of,
)
from solera.methods.steps.screen import Robust, Screen
from solera.runs.config import RunConfig
from solera.runs.loop import simulate
from solera.runs.read import read_run
from solera.runs.rehearsal import rehearse
from solera.runs.results import lines_of
from solera.testing import toy
from solera.train.teachers import soft_targets
from solera.use.trained import _facts

TIMED = FederationConfig(availability=Availability(speed=[10.0], down_mbit=[1e9], up_mbit=[1e9], server_speed=1e9))


@dataclass(frozen=True)
class Where:
    numbers: PublicRows
    why: str = ""


@dataclass(frozen=True)
class Sent:
    w: Weights = like("start")


@task("own_names.work")
def work(
    client: Client, start: Weights, mine: Local, theirs: Annotated[Local, Trains(on="public")], soft: Distill, on: Where
) -> Sent:
    model, x = client.model(start), client.public[on.numbers]
    fit(model, client.train.inputs, client.train.labels, mine, client.seed)
    fit(model, x, torch.zeros(len(x), dtype=torch.int64), theirs, client.seed)
    distill(model, x, lambda inputs: soft_targets(torch.zeros(len(inputs), 3)), soft, client.seed)
    return Sent(weights_of(model))


@dataclass(frozen=True)
class Renamed(Method):
    mine: Local = field(default_factory=lambda: Local(epochs=2, batch=16, lr=0.01))
    theirs: Local = field(default_factory=lambda: Local(steps=3, batch=4, lr=0.01))
    soft: Distill = field(default_factory=lambda: Distill(steps=5, batch=64))
    sieve: Screen = field(default_factory=Screen)

    about: ClassVar[About] = About(title="Renamed", paper="none", wire="models", state="nothing")

    @dataclass(frozen=True)
    class State:
        halves: dict[str, Weights]

    def traits(self) -> Traits:
        return Traits(public="everywhere")

    def init(self, fed: Federation, server: Server) -> State:
        return self.State({A: server.init(A) for A in server.architectures})

    def round(self, state: State, fed: Federation, server: Server) -> State:
        how: dict[str, Any] = {"mine": self.mine, "theirs": self.theirs, "soft": self.soft}
        x = fed.map(
            work, fed.sample(), start=per_client(lambda k: state.halves[fed.architecture(k)]),
            on=Where(torch.arange(20)), **how,
        )  # fmt: skip
        if isinstance(self.sieve, Robust) and self.sieve.drop_worst:  # zeros predict one class: no reply would be left
            for k in [k for k in x if all(not t.any() for t in x[k].w.values())]:
                fed.reject(x, k, "no better than guessing")
        return self.State(state.halves | {fed.architecture(k): r.w for k, r in x.items()})

    def models(self, state: State) -> dict[str, Model]:
        return {f"half of {A}".replace(" ", "-"): Model(A, w, kind="part") for A, w in state.halves.items()}


def test_samples_that_a_task_trains_on_follow_from_the_types_of_its_arguments():
    sent = {
        "start": {}, "mine": Local(epochs=3, batch=8), "theirs": Local(epochs=2), "soft": Distill(steps=5, batch=8),
        "on": Where(torch.arange(7)),
    }  # fmt: skip
    assert work.samples(sent, 20) == 3 * 20 + 2 * 7 + 5 * 7  # a batch is never larger than the data
    assert work.samples(sent | {"mine": Local(steps=5, batch=8)}, 20) == 5 * 8 + 14 + 35


def test_a_training_on_public_samples_whose_number_is_not_sent_is_refused():
    with pytest.raises(TypeError, match=r"own_names\.blind trains on public samples.* as PublicRows"):

        @task("own_names.blind")
        def blind(client: Client, soft: Distill, answers: Tensor) -> None:
            pass


def test_bytes_and_hours_of_a_method_with_names_of_its_own(tmp_path):
    scenario = toy(seed=3)
    dry = rehearse(scenario, Renamed(), RunConfig(rounds=2), TIMED)
    result = simulate(scenario, Renamed(), tmp_path, RunConfig(rounds=2), TIMED)
    rounds = read_run(tmp_path).rounds
    assert [sent.bytes for sent in dry.rounds] == [r.traffic.bytes for r in rounds]
    assert dry.facts()["exact"]
    slowest = max(2 * info.num_examples + 3 * 4 + 5 * 20 for info in scenario.roster.values())
    assert result.summary["simulated_hours"] * 3600 == pytest.approx(2 * slowest / 10, rel=1e-3)


def test_rules_that_judge_untrained_models_are_off_in_a_dry_run_whatever_the_slot_is_called():
    method = replace(Renamed(), sieve=Robust(drop_worst=True))
    assert rehearse(toy(validation=0.2), method, RunConfig(rounds=1), FederationConfig()).total("up") > 0


def test_what_a_model_is_follows_from_its_kind_not_from_its_name(tmp_path):
    simulate(toy(), Renamed(), tmp_path, RunConfig(rounds=1))
    (last,) = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert last["kinds"] == {"half-of-deep": "part", "half-of-wide": "part"} == dict.fromkeys(last["models"], "part")
    assert {r.kind for r in lines_of(read_run(tmp_path))} == {"part"}
    assert {_facts(f)["kind"] for f in (tmp_path / "models").iterdir()} == {"part"}
