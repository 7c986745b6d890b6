"""HeteroFL: parts of one model, FedAvg as a special case, masking, static BatchNorm, the wire, and what it refuses."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from solera.core.errors import ConfigError
from solera.core.federation import FederationConfig
from solera.core.task import Data
from solera.core.tensors import weights_of
from solera.core.wire import WireError, decode, digest, encode
from solera.method import METHODS
from solera.methods.fedavg import FedAvg
from solera.methods.heterofl import HeteroFL, PartUpdate, cut, part_statistics, sub_shapes, train_part
from solera.models import build
from solera.runs.config import RunConfig
from solera.runs.loop import check_fit, check_server, simulate
from solera.testing import check_method, deep_group, run_toy, toy, wide
from solera.train.chain import resized
from solera.train.fitting import Local, evaluate
from toys import Conv, World, images, mlp, same_bits

ONE = Local(epochs=1, batch=8, lr=0.05)
PLAIN = {"rates": [1.0], "scaler": False, "masked": False, "static_norm": False}


def conv() -> nn.Module:
    return Conv(0, width=8)  # with BatchNorm


def world(tmp, builder=conv, n=(20, 30, 10, 16), **options) -> World:
    return World(tmp, {"net": builder}, [("net", Data(*images(size, k))) for k, size in enumerate(n)], **options)


@pytest.mark.parametrize("average", ["weighted", "uniform"])
@pytest.mark.parametrize("builder", [conv, lambda: mlp(0)])
def test_the_whole_model_for_everybody_is_fedavg_to_the_bit(tmp_path, average, builder):
    ours = world(tmp_path / "a", builder).run(HeteroFL(ONE, average=average, **PLAIN), rounds=3)[-1]
    theirs = world(tmp_path / "b", builder).run(FedAvg(ONE, average), rounds=3)[-1]
    assert same_bits(ours.weights["net"], theirs.weights["net"])


def test_masking_changes_nothing_where_everybody_has_all_classes(tmp_path):
    ours = world(tmp_path / "a", lambda: mlp(0), n=(40, 60)).run(HeteroFL(ONE, **PLAIN | {"masked": True}))[-1]
    theirs = world(tmp_path / "b", lambda: mlp(0), n=(40, 60)).run(HeteroFL(ONE, **PLAIN))[-1]
    assert same_bits(ours.weights["net"], theirs.weights["net"])


def test_it_learns_and_so_do_its_parts(tmp_path):
    """On the toy, whose models are narrow: halves are as small as a part can usefully be."""
    method = HeteroFL(Local(epochs=3, batch=16, lr=0.1, clip=1.0), [1.0, 0.5])
    models = run_toy(method, tmp_path / "run", rounds=8).summary["models"]
    assert set(models) == {"wide", "wide-0.5", "deep", "deep-0.5"}
    assert models["wide"]["accuracy"] > 0.8
    assert models["deep"]["accuracy"] > 0.8
    assert min(m["accuracy"] for m in models.values()) > 0.6


def test_weak_clients_teach_the_whole_model(tmp_path):
    """Class 3 is known to a client of rate 0.5 only: the whole model learns it from there."""
    x, y = images(400, 5)
    strong, weak = Data(x[:200][y[:200] < 3], y[:200][y[:200] < 3]), Data(x[200:], y[200:])
    w = World(tmp_path, {"net": lambda: mlp(0)}, [("net", strong), ("net", weak)])
    local = Local(epochs=3, batch=16, lr=0.1, clip=1.0)
    state = w.run(HeteroFL(local, [1.0, 0.5]), rounds=6)[-1]
    xs, ys = images(200, 6)
    model = w.server.model("net", HeteroFL().models(state)["net"].weights)
    assert evaluate(model, xs[ys == 3], ys[ys == 3]).accuracy > 0.5


# ---- one exchange by hand ---------------------------------------------------------------------------


def test_a_round_is_the_mean_over_holders_of_what_each_client_would_do(tmp_path):
    w = world(tmp_path, lambda: mlp(0), n=(20, 30, 10))
    method = HeteroFL(ONE, [1.0, 0.5, 0.5], scaler=True, masked=False)
    start, end = w.run(method)
    x, shapes = start.weights["net"], start.shapes["net"]
    assert shapes["0.5"] == {"1.weight": [8, 64], "1.bias": [8], "3.weight": [4, 8], "3.bias": [4]}
    sent = []
    for i, (k, r) in enumerate((("c0", "1"), ("c1", "0.5"), ("c2", "0.5"))):
        client = w.client(k, w.seeds[i], {})
        how = {"classes": torch.ones(0), "rows": [], "local": ONE, "rate": float(r), "static": True}
        sent.append(train_part(client, weights=cut(x, shapes[r]), **how).weights)
    new = end.weights["net"]
    torch.testing.assert_close(new["1.weight"][:8], sum(s["1.weight"][:8] for s in sent) / 3)
    assert torch.equal(new["1.weight"][8:], sent[0]["1.weight"][8:])
    torch.testing.assert_close(new["3.weight"][:, :8], sum(s["3.weight"][:, :8] for s in sent) / 3)


def test_what_no_client_of_the_cohort_holds_is_untouched(tmp_path):
    w = world(tmp_path, lambda: mlp(0), n=(20, 30))
    w.fed.sample = lambda: ["c1"]
    start, end = w.run(HeteroFL(ONE, [1.0, 0.5]))
    old, new = start.weights["net"], end.weights["net"]
    assert torch.equal(old["1.weight"][8:], new["1.weight"][8:])
    assert not torch.equal(old["1.weight"][:8], new["1.weight"][:8])
    assert torch.equal(old["3.weight"][:, 8:], new["3.weight"][:, 8:])


def test_rows_of_the_last_layer_come_from_those_who_have_the_class(tmp_path):
    g = torch.Generator().manual_seed(0)
    first = Data(torch.randn(8, 1, 8, 8, generator=g), torch.tensor([0, 1] * 4))
    second = Data(torch.randn(8, 1, 8, 8, generator=g), torch.tensor([1, 2] * 4))
    w = World(tmp_path, {"net": lambda: mlp(0)}, [("net", first), ("net", second)])
    start, end = w.run(HeteroFL(Local(steps=3, weight_decay=0.1), [1.0]))
    x, new = start.weights["net"], end.weights["net"]

    def trained(k, i):
        how = {"rows": ["3.weight", "3.bias"], "local": Local(steps=3, weight_decay=0.1), "rate": 1.0, "static": True}
        return train_part(w.client(k, w.seeds[i], {}), weights=x, classes=torch.ones(4), **how)

    a, b = trained("c0", 0), trained("c1", 1)
    assert (a.held.tolist(), b.held.tolist()) == ([1, 1, 0, 0], [0, 1, 1, 0])
    assert not a.weights["3.weight"][2:].any()
    assert torch.equal(new["3.weight"][0], a.weights["3.weight"][0])
    torch.testing.assert_close(new["3.weight"][1], (a.weights["3.weight"][1] + b.weights["3.weight"][1]) / 2)
    assert torch.equal(new["3.weight"][2], b.weights["3.weight"][2])
    assert torch.equal(new["3.weight"][3], x["3.weight"][3]), "nobody has class 3"


@pytest.mark.parametrize("held", [[2.0, 1.0], [-1.0, 0.0]])
def test_a_client_cannot_count_more_than_once_for_a_class(held):
    with pytest.raises(WireError, match="0 to 1"):
        decode(encode({"weights": {}, "held": torch.tensor(held)}), PartUpdate)


# ---- static BatchNorm -------------------------------------------------------------------------------


def test_training_does_not_see_or_leave_running_statistics(tmp_path):
    w = world(tmp_path)
    start, end = w.run(HeteroFL(ONE, [1.0, 0.5]))
    assert set(end.weights["net"]) == {n for n, _ in conv().named_parameters()}
    assert set(start.statistics["net"]["0.5"]) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert start.statistics["net"]["0.5"]["1.running_mean"].shape == (4,)


def test_statistics_are_those_of_the_averaged_model_on_the_clients_data(tmp_path):
    w = world(tmp_path, n=(20, 30))
    method = HeteroFL(ONE, [1.0, 1.0])
    state = w.run(method)[-1]
    model = resized(conv(), weights_of(conv()) | state.weights["net"])
    means = []
    for k in ("c0", "c1"):
        seen = model[0](w.data[k].inputs)
        means.append(seen.mean((0, 2, 3)) * len(w.data[k]) / 50)
    torch.testing.assert_close(state.statistics["net"]["1"]["1.running_mean"], sum(means).detach())


def test_a_part_nobody_spoke_about_keeps_its_statistics(tmp_path):
    w = world(tmp_path)
    method = HeteroFL(ONE, [1.0, 0.5])
    one = w.run(method)[-1]
    w.fed.begin(1)
    w.fed.sample = lambda: ["c0"]  # rate 1
    two = method.round(one, w.fed, w.server)
    assert same_bits(one.statistics["net"]["0.5"], two.statistics["net"]["0.5"])
    assert not same_bits(one.statistics["net"]["1"], two.statistics["net"]["1"])


def test_a_client_with_one_example_gives_no_statistics(tmp_path):
    w = world(tmp_path, n=(20, 1))
    state = w.run(HeteroFL(ONE, [1.0]))[-1]
    assert w.fed.up["part_statistics"].messages == 1
    assert all(bool(torch.isfinite(t).all()) for t in state.weights["net"].values())


def test_statistics_of_a_part_are_what_a_pass_gives(tmp_path):
    w = world(tmp_path)
    shapes = sub_shapes(conv(), 0.5)
    part = cut(weights_of(conv()), shapes)
    names = [n for n in part if n.startswith("1.") and ("running" in n or "num" in n)]
    client = w.client("c0", 1, {})
    given = part_statistics(
        client, weights={n: t for n, t in part.items() if n not in names}, statistics={n: part[n] for n in names}
    )
    seen = resized(conv(), part)[0](client.train.inputs)
    torch.testing.assert_close(given.statistics["1.running_mean"], seen.mean((0, 2, 3)).detach())


# ---- rates ------------------------------------------------------------------------------------------


def test_rates_are_given_in_turn_within_each_architecture(tmp_path):
    """Architectures alternate, and so do rates: one after the other, every second client would be weak and 'b'."""
    parties = [(P, Data(*images(6, i))) for i, P in enumerate("ababab")]
    w = World(tmp_path, {"a": lambda: mlp(0), "b": conv}, parties)
    method = HeteroFL(rates=[1.0, 0.5])
    assert method.rates_of(list(w.fed.clients), w.fed) == {
        "c0": 1.0, "c1": 1.0, "c2": 0.5, "c3": 0.5, "c4": 1.0, "c5": 1.0
    }  # fmt: skip
    assert HeteroFL().used("a", w.fed) == [1.0, 0.5, 0.25]


def test_rates_are_not_spent_on_clients_that_are_never_drawn(tmp_path):
    """The first client has no examples: with the only rate of 1, the whole model would stay untrained."""
    w = world(tmp_path, n=(0, 20, 30))
    method = HeteroFL(ONE, [1.0, 0.5, 0.25])
    assert method.rates_of(["c1", "c2"], w.fed) == {"c1": 1.0, "c2": 0.5}
    start, end = w.run(method)
    assert set(start.shapes["net"]) == {"1", "0.5"}
    assert not torch.equal(start.weights["net"]["0.weight"][4:], end.weights["net"]["0.weight"][4:])
    assert HeteroFL().used("net", world(tmp_path / "none", n=(0, 0)).fed) == [1.0]


def test_dynamic_rates_change_from_round_to_round_but_not_between_runs(tmp_path):
    w = world(tmp_path, n=(5,) * 9)
    method = HeteroFL(assignment="dynamic")
    drawn = []
    for t in (0, 1, 0):
        w.fed.begin(t)
        drawn.append(method.rates_of(list(w.fed.clients), w.fed))
    assert drawn[0] == drawn[2] != drawn[1]
    assert set(drawn[0].values()) | set(drawn[1].values()) <= set(method.rates)
    w.fed.begin(0)
    assert method.rates_of(["c3"], w.fed) == {"c3": drawn[0]["c3"]}, "who else is drawn must not matter"


@pytest.mark.parametrize("options", [{"assignment": "dynamic"}, {"static_norm": False, "average": "weighted"}])
def test_other_settings_keep_the_contract(tmp_path, options):
    check_method(METHODS["heterofl"](**options), tmp_path, ("threads",))


# ---- wire -------------------------------------------------------------------------------------------


def test_what_travels_without_batchnorm(tmp_path):
    """Each way the sizes of the sub-tensors, and a number for each class where rows are masked."""
    w = world(tmp_path, lambda: mlp(0), n=(20, 30, 10, 5))
    state = w.run(HeteroFL(ONE, [1.0, 0.5], masked=False))[-1]
    n = {r: sum(torch.Size(s).numel() for s in shapes.values()) for r, shapes in state.shapes["net"].items()}
    assert n == {"1": 64 * 16 + 16 + 16 * 4 + 4, "0.5": 64 * 8 + 8 + 8 * 4 + 4}
    floats = 2 * (n["1"] + n["0.5"])
    assert [w.fed.up["train_part"].floats, w.fed.down["train_part"].floats] == [floats] * 2
    assert "part_statistics" not in w.fed.up
    w.run(HeteroFL(ONE, [1.0, 0.5]))
    assert [w.fed.up["train_part"].floats, w.fed.down["train_part"].floats] == [floats + 16] * 2


def test_what_travels_with_batchnorm(tmp_path):
    w = world(tmp_path, n=(20, 30))
    state = w.run(HeteroFL(ONE, [1.0, 0.5], masked=False))[-1]
    n = sum(t.numel() for r in ("1", "0.5") for t in cut(state.weights["net"], state.shapes["net"][r]).values())
    b = 2 * 8 + 2 * 4
    up, down = w.fed.up["part_statistics"], w.fed.down["part_statistics"]
    assert (w.fed.up["train_part"].floats, up.floats) == (n, b)
    assert (w.fed.down["train_part"].floats, down.floats) == (n, n + b)


# ---- results and refusals ---------------------------------------------------------------------------


def test_parts_are_saved_and_can_be_built(tmp_path):
    result = run_toy(HeteroFL(ONE, [1.0, 0.25]), tmp_path / "run", rounds=1)
    saved = load_file(tmp_path / "run" / "models" / "wide-0.25.safetensors")
    model = resized(wide(), saved)
    assert model[0].out_features == model[2].in_features == 4
    assert digest(weights_of(model)) == digest(result.models["wide-0.25"].weights)


@pytest.mark.parametrize("rates", [[], [0.5], [0.5, 1.0], [1.0, 0.0], [1.0, 2.0], [1.0, -0.5]])
def test_rates_that_cannot_be(rates):
    with pytest.raises(ConfigError, match=r"HeteroFL\.rates"):
        HeteroFL(rates=rates)


def test_models_that_cannot_be_cut_are_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"'deep' cannot be cut to rate 0\.3: its layer '1' has 3 groups"):
        check_fit(HeteroFL(rates=[1.0, 0.3]), toy({"wide": wide, "deep": deep_group}))
    w = world(tmp_path, lambda: build("shufflenetv2", 4, (1, 8, 8)))
    with pytest.raises(ConfigError, match=r"'net' cannot be cut to rate 1: its layer 'body\.stage1\.0\.left\.0'"):
        check_server(HeteroFL(), w.server)


def test_group_norm_is_cut_where_its_groups_allow_it(tmp_path):
    result = simulate(
        toy({"deep": deep_group}), HeteroFL(ONE, [1.0, 0.5]), tmp_path, RunConfig(rounds=1), FederationConfig()
    )
    assert set(result.models) == {"deep", "deep-0.5"}
