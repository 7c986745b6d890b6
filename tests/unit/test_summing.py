"""Who makes the mean may hold exchanges of its own: clients train as they would without them."""

import dataclasses

import pytest
import torch
from torch import Tensor

from helpers import Site
from solera.core.federation import (
    PROTOCOL,
    STEPS,
    Federation,
    FederationConfig,
    MeanOf,
    Plain,
    QuorumNotMet,
    TaskError,
)
from solera.core.task import Client, task
from solera.core.tensors import Weights
from solera.core.wire import Layout, digest, like, sized
from solera.engines import ClientStates, InProcess
from solera.engines.faulty import Faulty
from solera.method import find_method
from solera.testing import small, toy_for


@dataclasses.dataclass(frozen=True)
class Drawn:
    seed: float
    weights: Weights = like("weights")


@dataclasses.dataclass(frozen=True)
class Key:
    key: Tensor = sized(4)


@task("test_summing.train")
def train(client: Client, weights: Weights) -> Drawn:
    return Drawn(float(client.seed % 1000), {n: w + torch.rand(w.shape) for n, w in weights.items()})


@task("test_summing.agree")
def agree(client: Client) -> Key:
    client.state["key"] = {"key": torch.rand(4)}
    return Key(client.state["key"]["key"])


class WithKeys:
    """`Plain` after a stage in which clients show a key, and before another; it looks at replies as vectors."""

    def __init__(self):
        self.stages: list[list[str]] = []
        self.steps: set[int] = set()

    def stage(self, fed, clients):
        _, arriving = fed.exchange(agree, clients, {}, min_replies=0, protocol=True)
        self.stages.append([k for k, _ in arriving({})])
        self.steps |= {version.step for version in fed.ledger.values()}

    def start(self, fed, of: MeanOf):
        self.stage(fed, of.clients)
        collect = Plain().start(fed, of)

        def result():
            means = collect()
            self.stage(fed, of.clients)
            return means

        return result


W = {"w": torch.tensor([1.0, 2.0]), "v": torch.ones(2, 2)}


def make(tmp_path, summing=None, plan=lambda call: None, **config):
    engine = Faulty(InProcess(Site((4, 3, 2, 1)), ClientStates(tmp_path)), plan)
    return Federation(engine, 1, FederationConfig(**config), summing=summing)


def test_stages_change_no_seed_and_no_bit(tmp_path):
    keys = WithKeys()
    plain, other = make(tmp_path / "a"), make(tmp_path / "b", keys)
    for fed in (plain, other):
        fed.begin(3)
    everybody = list(plain.clients)
    for _ in range(2):
        a, b = (fed.mean(train, everybody, weights=W) for fed in (plain, other))
        assert digest(a) == digest(b)
    c, d = (fed.mean(train, everybody, by=fed.architecture, uniform=True, weights=W) for fed in (plain, other))
    assert (digest(dict(c)), c.counts) == (digest(dict(d)), d.counts)
    e, f = (fed.map(train, everybody, weights=W) for fed in (plain, other))
    assert digest(dict(e)) == digest(dict(f))
    assert keys.stages == [everybody] * 6
    assert keys.steps == {3 * STEPS + PROTOCOL + i for i in range(6)}


def test_stages_are_counted_and_are_no_verb_of_the_method(tmp_path):
    fed = make(tmp_path, WithKeys())
    fed.mean(train, list(fed.clients), weights=W)
    assert fed.verbs == {"mean"}
    assert (fed.up[agree.name].messages, fed.up[agree.name].floats) == (8, 32)
    assert fed.up[agree.name].bytes == 8 * Layout(Key, {}).size


def test_who_answers_a_stage_has_not_answered_the_method(tmp_path):
    fed = make(
        tmp_path, WithKeys(), plan=lambda call: "drop" if (call.client, call.task) == ("c01", train.name) else None
    )
    fed.mean(train, list(fed.clients), weights=W)
    assert fed.answered == {"c00", "c02", "c03"}
    assert [(f["client"], f["task"]) for f in fed.failures] == [("c01", train.name)]


def test_a_mean_of_too_few_is_void_whoever_makes_it(tmp_path):
    fed = make(tmp_path, WithKeys(), plan=lambda call: "drop" if call.task == train.name else None)
    with pytest.raises(QuorumNotMet):
        fed.mean(train, list(fed.clients), weights=W)
    assert fed.mean(train, list(fed.clients), min_replies=0, weights=W) is None


def test_a_method_and_its_stages_run_out_of_numbers_apart(tmp_path):
    fed = make(tmp_path)
    fed._next = {False: PROTOCOL - 1, True: STEPS - 1}
    fed.map(agree, ["c00"])
    list(fed.exchange(agree, ["c00"], {}, protocol=True)[1]({}))
    with pytest.raises(TaskError, match=rf"agree is one exchange too many: their numbers end at {PROTOCOL}"):
        fed.map(agree, ["c00"])
    with pytest.raises(TaskError, match=rf"their numbers end at {STEPS}"):
        fed.exchange(agree, ["c00"], {}, protocol=True)


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedmd", "fedeed", "heterofl"])
def test_methods_of_means_end_in_the_same_bits(name, tmp_path):
    method, ends = small(find_method(name)()), []
    for summing in (None, WithKeys()):
        scenario = toy_for(method)
        states = ClientStates(tmp_path / str(len(ends)))
        fed = Federation(InProcess(scenario, states), 0, FederationConfig(fraction=0.75), summing=summing)
        state = method.init(fed, scenario.server)
        for t in range(2):
            fed.begin(t)
            scenario.server.begin()
            state = method.round(state, fed, scenario.server)
        ends.append(digest(state))
    assert ends[0] == ends[1]
