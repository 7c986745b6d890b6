"""What a method may rely on: order, seeds, quorum, ties to what was sent, and exact counts of what travelled."""

import collections
import dataclasses

import pytest
import torch
from torch import Tensor

from helpers import Site
from solera.core.errors import ConfigError
from solera.core.federation import Federation, FederationConfig, QuorumNotMet, TaskError, draw_clients, per_client
from solera.core.task import Client, task
from solera.core.tensors import Weights
from solera.core.wire import Packed, at_most, encode, like, sized
from solera.engines import ClientInfo, ClientStates, InProcess, Reply, Roster
from solera.engines.faulty import Faulty


@dataclasses.dataclass(frozen=True)
class Sum:
    weights: Weights = like("weights")
    seed: float = 0.0


@dataclasses.dataclass(frozen=True)
class Shape:
    t: Tensor = at_most(2)


@task("test_federation.add_id")
def add_id(client: Client, weights: Weights, each: float) -> Sum:
    i = int(client.id[1:])
    return Sum({n: w + each * i if w.is_floating_point() else w + i for n, w in weights.items()}, client.seed % 1000)


@task("test_federation.draw")
def draw(client: Client) -> Shape:
    return Shape(torch.cat([torch.rand(1), torch.rand(1, generator=client.rng("mine"))]))


@dataclasses.dataclass(frozen=True)
class Whole:
    t: Tensor = sized(1)

    def __post_init__(self) -> None:
        if not torch.equal(self.t, self.t.round()):
            raise ValueError("not a whole number")


@task("test_federation.whole")
def whole(client: Client) -> Whole:
    return Whole(torch.tensor([float(client.id[1:])]))


@task("test_federation.vandal")
def vandal(client: Client, weights: Weights) -> None:
    weights["w"].mul_(2)


@task("test_federation.untyped_reply")
def untyped_reply(client: Client) -> Shape:
    return {"t": torch.zeros(1), "secret": torch.zeros(1)}  # type: ignore[return-value]


@pytest.fixture
def fed(tmp_path):
    return make(tmp_path)


def make(tmp_path, plan=lambda c: None, reverse=False, sizes=(4, 3, 2, 1), **config) -> Federation:
    engine = Faulty(InProcess(Site(sizes), ClientStates(tmp_path)), plan, reverse)
    return Federation(engine, 1, FederationConfig(**config))


W = {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor(5)}


def test_map_returns_valid_replies_in_canonical_order(tmp_path):
    fed = make(tmp_path, reverse=True)
    replies = fed.map(add_id, ["c03", "c00", "c02"], weights=W, each=1.0)
    assert list(replies) == ["c00", "c02", "c03"]
    assert replies["c02"].weights["w"].tolist() == [3.0, 4.0]
    assert replies.failures == {}


def test_mean_weighs_by_examples_or_not_and_keeps_counters(fed):
    got = fed.mean(add_id, ["c00", "c01", "c02", "c03"], weights=W, each=1.0)
    assert got.weights["w"].tolist() == [2.0, 3.0]  # (4*0 + 3*1 + 2*2 + 1*3) / 10 = 1
    assert got.weights["n"].item() == 8  # counters: the largest
    got = fed.mean(add_id, ["c00", "c01", "c02", "c03"], uniform=True, weights=W, each=1.0)
    assert got.weights["w"].tolist() == [2.5, 3.5]


def test_mean_by_group_leaves_out_groups_without_replies(tmp_path):
    fed = make(tmp_path, plan=lambda c: "drop" if c.client in ("c01", "c03") else None)
    means = fed.mean(add_id, list(fed.clients), by=fed.architecture, uniform=True, weights=W, each=1.0)
    assert list(means) == ["p"]
    assert means.counts == {"p": 2}
    assert means["p"].weights["w"].tolist() == [2.0, 3.0]


def test_groups_come_in_the_order_of_their_names(fed):
    means = fed.mean(add_id, list(fed.clients), by=lambda k: f"g{99 - int(k[1:])}", weights=W, each=1.0)
    assert list(means) == list(means.counts) == sorted(f"g{99 - int(k[1:])}" for k in fed.clients)


def test_mean_equals_the_mean_of_map_to_the_bit(fed):
    from solera.train.aggregate import weighted_mean

    w = {"w": torch.randn(1000, generator=torch.Generator().manual_seed(3))}
    everyone = list(fed.clients)
    replies = fed.map(add_id, everyone, weights=w, each=0.1)
    expected = weighted_mean([r.weights for r in replies.values()], [fed.num_examples(k) for k in replies])
    assert torch.equal(fed.mean(add_id, everyone, weights=w, each=0.1).weights["w"], expected["w"])


def test_a_mean_that_is_no_reply_itself_makes_the_exchange_void(fed):
    assert fed.mean(whole, ["c01", "c03"], uniform=True).t.item() == 2
    with pytest.raises(QuorumNotMet, match=r"mean of the replies to .*whole is not usable: not a whole number"):
        fed.mean(whole, ["c01", "c02"], uniform=True)


def test_seeds_depend_on_run_round_exchange_and_client_only(tmp_path):
    fed = make(tmp_path)
    first = fed.map(draw, list(fed.clients))
    second = fed.map(draw, list(fed.clients))
    fed.begin(0)
    again = fed.map(draw, ["c02"])  # alone, and in another order: the same draw
    assert torch.equal(again["c02"].t, first["c02"].t)
    values = {tuple(r.t.tolist()) for r in [*first.values(), *second.values()]}
    assert len(values) == 8, "every client and every exchange has its own"
    other = Federation(fed.engine, 2)
    assert not torch.equal(other.map(draw, ["c02"])["c02"].t, first["c02"].t)


def test_sampling_follows_the_seed_not_the_method(tmp_path):
    fed = make(tmp_path, sizes=(1,) * 20, fraction=0.4)
    fed.begin(3)
    cohort = fed.sample()
    fed.begin(3)
    fed.map(draw, ["c00"])  # whatever the method did before
    torch.rand(5, generator=fed.rng)
    assert fed.sample() == cohort
    assert len(cohort) == 8
    assert cohort == sorted(cohort)
    fed.begin(4)
    assert fed.sample() != cohort


@pytest.mark.parametrize(
    ("fraction", "clients", "m"), [(0.4, 20, 8), (0.125, 20, 3), (0.01, 20, 1), (1.0, 7, 7), (0.5, 5, 3)]
)
def test_cohort_size_is_rounded_half_up_and_at_least_one(tmp_path, fraction, clients, m):
    assert len(make(tmp_path, sizes=(1,) * clients, fraction=fraction).sample()) == m


def test_clients_without_examples_are_never_drawn():
    g = torch.Generator().manual_seed(0)
    for sampling in ("uniform", "size"):
        assert sorted(draw_clients(torch.tensor([0, 5, 0, 2]), 3, g, sampling).tolist()) == [1, 3]


def test_size_proportional_sampling_has_the_inclusion_probabilities_of_the_oracle():
    """FET-7: n = (4, 3, 2, 1), m = 2."""
    sizes, g, trials = torch.tensor([4, 3, 2, 1]), torch.Generator().manual_seed(1), 20_000
    without, copies, once = torch.zeros(4), torch.zeros(4), torch.zeros(4)
    for _ in range(trials):
        without[draw_clients(sizes, 2, g, "size")] += 1
        drawn = draw_clients(sizes, 2, g, "size", replacement=True)
        copies += torch.bincount(drawn, minlength=4)
        once[drawn.unique()] += 1
    near = {"atol": 0.015, "rtol": 0.0}
    torch.testing.assert_close(without / trials, torch.tensor([0.71587302, 0.60833333, 0.44126984, 0.23452381]), **near)
    torch.testing.assert_close(copies / trials, torch.tensor([0.8, 0.6, 0.4, 0.2]), **near)
    torch.testing.assert_close(once / trials, torch.tensor([0.64, 0.51, 0.36, 0.19]), **near)


def test_a_client_drawn_twice_trains_once_and_counts_twice(tmp_path):
    fed = make(tmp_path, sampling="size", replacement=True, fraction=1.0, sizes=(50, 1, 1, 1))
    cohort = fed.sample()
    assert fed.copies["c00"] >= 2
    assert sum(fed.copies.values()) == 4
    assert cohort == sorted(set(cohort))
    mean = fed.mean(add_id, cohort, uniform=True, weights=W, each=1.0).weights["w"][0].item()
    expected = 1 + sum(int(k[1:]) * n for k, n in fed.copies.items()) / 4
    assert mean == pytest.approx(expected)


@pytest.mark.parametrize(
    "fault",
    [
        "drop",
        "raise",
        "nan",
        "inf",
        "shape",
        "dtype",
        "extra",
        "garbage",
        "empty",
        "truncate",
        "stranger",
        "impersonate",
    ],
)
def test_one_bad_client_loses_its_seat_and_is_named(tmp_path, fault):
    fed = make(tmp_path, plan=lambda c: fault if c.client == "c01" else None)
    replies = fed.map(add_id, list(fed.clients), weights=W, each=1.0)
    assert "c01" in replies.failures
    if fault == "impersonate":  # the first to speak as c00 is c00: it ran first
        assert replies["c00"].weights["w"].tolist() == [1.0, 2.0]
    assert list(replies) == ["c00", "c02", "c03"]
    assert [f["client"] for f in fed.failures] == ["c01"]


def test_a_duplicate_reply_counts_once(tmp_path):
    fed = make(tmp_path, plan=lambda c: "duplicate")
    mean = fed.mean(add_id, list(fed.clients), weights=W, each=1.0)
    assert mean.weights["w"].tolist() == [2.0, 3.0]


def test_quorum(tmp_path):
    fed = make(tmp_path, plan=lambda c: "raise" if c.client != "c00" else None, min_replies=2)
    with pytest.raises(QuorumNotMet, match=r"1 of 4 clients .*min_replies is 2.*out of memory"):
        fed.map(add_id, list(fed.clients), weights=W, each=1.0)
    with pytest.raises(QuorumNotMet, match="no client was asked"):
        fed.map(add_id, [], weights=W, each=1.0)


def test_undeclared_fields_do_not_leave_a_client(fed):
    with pytest.raises(QuorumNotMet, match="secret"):
        fed.map(untyped_reply, ["c00"])


def test_a_task_that_writes_into_its_arguments_stops_the_run(fed):
    with pytest.raises(TaskError, match="writes into its arguments"):
        fed.map(vandal, ["c00"], weights={"w": torch.ones(2)})


def test_bytes_are_counted_as_encoded(fed):
    fed.map(add_id, ["c00", "c01"], weights=W, each=1.0)
    name = add_id.name
    assert fed.down[name].bytes == 2 * len(encode({"weights": W, "each": 1.0}))
    assert fed.down[name].messages == 2
    assert (fed.down[name].floats, fed.down[name].integers) == (4, 2)
    reply = add_id(fed.engine.inner.host.client("c00", fed.seed(), {}), weights=W, each=1.0)
    assert (fed.up[name].floats, fed.up[name].integers) == (4, 2)
    assert fed.up[name].bytes == 2 * Packed(reply, steady=True).size  # the seed's digits differ


def test_the_same_payload_is_packed_once(fed, monkeypatch):
    made, flatten = collections.Counter(), Packed.__init__

    def counting(self, value, steady=False):
        made["request" if isinstance(value, dict) else "reply"] += 1
        flatten(self, value, steady)

    monkeypatch.setattr(Packed, "__init__", counting)
    monkeypatch.setattr(Packed, "blob", property(lambda self: pytest.fail("nothing needs encoding in one process")))
    weights = {"p": dict(W), "q": dict(W)}
    fed.engine = fed.engine.inner
    fed.map(add_id, list(fed.clients), weights=per_client(lambda k: weights[fed.architecture(k)]), each=1.0)
    assert made == {"request": 2, "reply": 4}


def test_wrong_payload_and_wrong_settings_are_refused(fed):
    with pytest.raises(TypeError, match=r"takes \['each', 'weights'\], but was given \['weights'\]"):
        fed.map(add_id, ["c00"], weights=W)
    for bad in ({"fraction": 0.0}, {"fraction": 1.5}, {"min_replies": 0}, {"deadline_s": -1.0}, {"replacement": True}):
        with pytest.raises(ConfigError, match=f"FederationConfig.{next(iter(bad))}"):
            FederationConfig(**bad)


def test_the_order_in_which_clients_join_changes_nothing():
    infos = {f"site-{i}": ClientInfo("p" if i % 2 else "q", i + 1) for i in range(5)}
    forward, backward = Roster.of(infos), Roster.of(dict(reversed(infos.items())))
    assert list(forward) == list(backward)
    assert forward.sizes.tolist() == backward.sizes.tolist()
    assert [forward[k] for k in forward] == [infos[k] for k in sorted(infos)]


def test_a_million_clients_cost_arrays_not_objects(tmp_path):
    site = Site(sizes=(1,))
    site.roster = Roster(torch.ones(1_000_000, dtype=torch.int64), ["p"], torch.zeros(1_000_000, dtype=torch.int64))
    fed = Federation(InProcess(site, ClientStates(tmp_path)), 0, FederationConfig(fraction=1e-5))
    cohort = fed.sample()
    assert len(cohort) == 10
    assert all(fed.num_examples(k) == 1 for k in cohort)
    assert fed.clients.id(999_999) == "c999999"
    assert fed.clients.index("c000042") == 42
    with pytest.raises(KeyError):
        fed.clients.index("c1000000")


def test_a_reply_tied_to_no_argument_is_refused_when_the_task_is_defined():
    with pytest.raises(
        TypeError, match=r"misspelt, its reply: \.weights is tied to 'weights': there is no such argument"
    ):

        @task("test_federation.misspelt")
        def misspelt(client: Client, wieghts: Weights) -> Sum: ...


class Hostile:
    """An engine whose only client answers with whatever bytes it likes."""

    def __init__(self, tmp_path, *replies):
        self.inner, self.replies = InProcess(Site((1,)), ClientStates(tmp_path)), replies
        self.roster = self.inner.roster

    def start(self, calls):
        return lambda: iter(self.replies)

    def close(self):
        pass


def _blob(header: str) -> bytes:
    return len(header).to_bytes(8, "little") + header.encode()


@pytest.mark.parametrize(
    "header",
    [
        '{"x": {"dtype": "F32", "shape": [NaN]}}',
        '{"x": {"dtype": "F32", "shape": [' + "9" * 4000 + "," + "9" * 4000 + "]}}",
        "[" * 100_000,
    ],
)
def test_numbers_are_counted_in_valid_replies_only(tmp_path, header):
    blob = _blob(header)
    fed = Federation(Hostile(tmp_path, Reply("c00", blob)), 1)
    assert "c00" in fed.map(draw, ["c00"], min_replies=0).failures
    up = fed.up[draw.name]
    assert (up.messages, up.bytes, up.floats, up.integers) == (1, len(blob), 0, 0)


def test_a_reason_is_short_and_printable_whatever_the_client_wrote(tmp_path):
    nan = {"weights": {"\x1b[2J\ud800\n" + "w" * 10_000: torch.tensor([float("nan")])}, "seed": 0.0}
    for reply in (Reply("c00", encode(nan)), Reply("c00", error="\x07" * 10_000)):
        fed = Federation(Hostile(tmp_path, reply), 1)
        reason = fed.map(add_id, ["c00"], min_replies=0, weights=W, each=1.0).failures["c00"]
        assert reason.isprintable()
        assert len(reason) <= 500


def test_a_client_has_one_exchange_at_a_time(fed):
    """Its state would depend on which of two came first, and that on the engine."""
    first = fed.submit(draw, ["c00", "c01"])
    with pytest.raises(TaskError, match=r"c01 is asked for .*draw before its previous reply was collected"):
        fed.submit(draw, ["c01", "c02"])
    other = fed.submit(draw, ["c02"])
    assert list(first()) == ["c00", "c01"]
    assert list(fed.map(draw, ["c01"])) == ["c01"]
    fed.begin(1)  # whatever was left behind belongs to the round before
    assert list(fed.map(draw, ["c02"])) == ["c02"]
    assert list(other()) == ["c02"]


def test_messages_between_simulated_servers_are_counted_like_those_of_an_exchange(fed):
    models, logits = {"a": {"w": torch.ones(3), "n": torch.tensor(7)}}, torch.ones(4, 2)
    fed.carried("above", down=[models], up=[models, models])
    fed.carried("above", down=[], up=[logits])
    up, down = fed.up["above"], fed.down["above"]
    assert (down.messages, up.messages) == (1, 3)
    assert (down.bytes, up.bytes) == (len(encode(models)), 2 * len(encode(models)) + len(encode(logits)))
    assert (down.floats, down.integers, up.floats, up.integers) == (3, 1, 14, 2)
    assert up.content == {"parameters": 2 * (3 * 4 + 8), "predictions": 4 * 8}
    assert fed.verbs == set()  # nobody was asked
