"""MOON: FedAvg without its term, its equation by hand, what clients keep, and what it does to representations."""

import json

import pytest
import torch
import torch.nn.functional as F

from solera.core.errors import ConfigError
from solera.core.task import Data
from solera.core.tensors import weights_of
from solera.core.wire import digest
from solera.methods.fedavg import FedAvg
from solera.methods.moon import MOON, contrast
from solera.models import wrap
from solera.testing import check_method, run_toy, wide
from solera.train.fitting import Local, minibatches
from solera.train.teachers import representations_of
from toys import Conv, World, images, kept_by, mlp, same_bits

LOCAL = Local(epochs=2, batch=8, lr=0.05)
SIZES, KINDS = (5, 12, 9, 20, 7), "cmcmc"


def conv(head="projection", dropout=0.0):
    return wrap(Conv(0, dropout=dropout), classifier="8", head=head)


def mixed(tmp, head="projection", dropout=0.0, **options) -> World:
    """Five clients of different sizes, two split architectures, one of them with BatchNorm."""
    builders = {"c": lambda: conv(head, dropout), "m": lambda: wrap(mlp(1), classifier="3", head=head)}
    return World(tmp, builders, [(P, Data(*images(n, n))) for n, P in zip(SIZES, KINDS, strict=True)], **options)


def kept(world: World, k: str = "c0") -> dict:
    return kept_by(world.fed, k)


@pytest.mark.parametrize("head", ["plain", "shared", "projection"])
def test_without_the_term_it_is_fedavg_to_the_bit(tmp_path, head):
    options = {"head": head, "fraction": 0.6, "dropout": 0.3}
    ours = mixed(tmp_path / "a", **options).run(MOON(LOCAL, mu=0.0), 3)
    theirs = mixed(tmp_path / "b", **options).run(FedAvg(LOCAL), 3)
    assert [digest(s.weights) for s in ours] == [digest(s.weights) for s in theirs]


def test_in_the_first_round_the_term_is_log_2_and_pulls_nowhere(tmp_path):
    """The received model and the client's previous one are the same then."""
    ours = mixed(tmp_path / "a").run(MOON(LOCAL, mu=5.0), 2)
    theirs = mixed(tmp_path / "b").run(FedAvg(LOCAL), 2)
    for P in "cm":
        for n, t in theirs[1].weights[P].items():
            assert torch.allclose(ours[1].weights[P][n], t, atol=1e-4)
    gap = [(ours[2].weights["m"][n] - t).abs().max().item() for n, t in theirs[2].weights["m"].items()]
    assert max(gap) > 1e-2


def test_a_second_round_is_the_equation(tmp_path):
    """One client, by hand: cross-entropy + mu contrast, the frozen models asked minibatch by minibatch."""
    x, y = images(20)
    world = World(tmp_path, {"c": conv}, [("c", Data(x, y))])
    _, one, two = world.run(MOON(LOCAL, mu=2.0, tau=0.7), 2)
    model, received, previous = (world.server.model("c", one.weights["c"]) for _ in range(3))  # one client: the same
    optimizer = torch.optim.SGD(model.parameters(), LOCAL.lr)
    for a, b in minibatches(x, y, LOCAL, world.seeds[1]):
        with torch.no_grad():
            z_glob, z_prev = received.represent(a), previous.represent(a)
        model.train()
        z = model.represent(a)
        near, far = (torch.exp(F.cosine_similarity(z, other) / 0.7) for other in (z_glob, z_prev))
        loss = F.cross_entropy(model.head(z), b) + 2.0 * -torch.log(near / (near + far)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(torch.allclose(t, two.weights["c"][n], atol=1e-4) for n, t in weights_of(model).items())


def test_clients_keep_their_last_models_the_newest_first(tmp_path):
    world, sent = mixed(tmp_path), []
    method = MOON(LOCAL, buffer=2)
    state = method.init(world.fed, world.server)
    for t in range(3):
        world.fed.begin(t)
        state = method.round(state, world.fed, world.server)
        sent.append(kept(world)["previous-0"])
        assert set(kept(world)) == ({"previous-0", "previous-1"} if t else {"previous-0"})
    assert same_bits(kept(world)["previous-1"], sent[1])  # two rounds as a teacher have not changed it
    assert not same_bits(sent[1], sent[2])


def test_a_longer_memory_changes_what_is_learned(tmp_path):
    ends = [mixed(tmp_path / str(b)).run(MOON(LOCAL, buffer=b), 3) for b in (1, 2)]
    assert digest(ends[0][2]) == digest(ends[1][2])  # after two rounds there was one previous model at most
    assert digest(ends[0][3]) != digest(ends[1][3])


def test_what_an_absent_client_keeps_stays(tmp_path):
    world = mixed(tmp_path)
    method = MOON(LOCAL)
    state = world.run(method)[-1]
    before = kept(world)
    world.fed.sample = lambda: ["c1", "c2"]
    world.fed.begin(1)
    method.round(state, world.fed, world.server)
    assert same_bits(kept(world)["previous-0"], before["previous-0"])


def test_a_model_that_has_blown_up_is_not_kept(tmp_path):
    world = mixed(tmp_path)
    method = MOON(LOCAL)
    state = world.run(method)[-1]
    before = kept(world)["previous-0"]
    world.data["c0"] = Data(torch.full_like(world.data["c0"].inputs, 1e38), world.data["c0"].labels)
    world.fed.begin(1)
    state = method.round(state, world.fed, world.server)
    assert same_bits(kept(world)["previous-0"], before)
    assert all(torch.isfinite(t).all() for w in state.weights.values() for t in w.values())


def test_the_term_moves_representations_where_it_should(tmp_path):
    """Clients with two classes each; from the same start, one round with the term and one without."""
    x, y = images(240, seed=3)

    def ends_at(mu: float) -> float:
        parties = [("m", Data(x[y // 2 == h], y[y // 2 == h])) for h in (0, 1)]
        builders = {"m": lambda: wrap(mlp(1), classifier="3", head="projection", representation=16)}
        world = World(tmp_path / str(mu), builders, parties)
        local = Local(epochs=5, batch=20, lr=0.1)
        state = world.run(MOON(local, mu=0.0))[-1]
        previous = kept(world)["previous-0"]
        world.fed.begin(1)
        MOON(local, mu=mu).round(state, world.fed, world.server)
        mine = world.data["c0"].inputs
        models = (kept(world)["previous-0"], state.weights["m"], previous)
        z, near, far = (representations_of(world.server.model("m", w), mine) for w in models)
        return contrast(z, near, [far], 0.5).item()

    assert ends_at(5.0) < ends_at(0.0) - 0.1


def test_the_wire_is_that_of_fedavg(tmp_path):
    world = mixed(tmp_path)
    world.run(MOON(LOCAL))
    d = {P: sum(t.numel() for t in world.server.init(P).values() if t.is_floating_point()) for P in "cm"}
    (down,), (up,) = world.fed.down.values(), world.fed.up.values()
    assert down.floats == up.floats == sum(d[P] for P in KINDS)
    assert down.integers == up.integers == 3  # one BatchNorm counter for each client of kind c


def test_it_learns(tmp_path):
    result = run_toy(MOON(Local(epochs=5, batch=16, lr=0.1), mu=1.0), tmp_path / "run", rounds=8)
    assert min(m["accuracy"] for m in result.summary["models"].values()) > 0.9  # chance: 0.33
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["floats"]["down"] == last["floats"]["up"]


def test_variants_keep_the_contract_of_a_method(tmp_path):
    check_method(MOON(buffer=3, average="uniform"), tmp_path, engines=())


def test_what_makes_no_sense_is_refused(tmp_path):
    for wrong, said in (({"mu": -1.0}, "mu = -1"), ({"tau": 0.0}, "tau = 0"), ({"buffer": 0}, "buffer = 0")):
        with pytest.raises(ConfigError, match=said):
            MOON(**wrong)
    with pytest.raises(ConfigError, match="'moon' needs models made of a body, an adapter and a head"):
        run_toy(MOON(LOCAL), tmp_path, models={"wide": wide})
