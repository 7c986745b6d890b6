"""Features of a layer, the server's tower on them, and teaching both ways: the numbers of GKT-1."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from solera.core.tensors import weights_of
from solera.methods.fedgkt import epochs_at, extract, taught, tower, tower_with, transfer_loss
from solera.models import build, wrap
from solera.train.fitting import Local, fit, logits_of
from toys import Conv, images, mlp, same_bits

Z_C, Z_S, Y = torch.tensor([[1.0, 0.0, -1.0]]).double(), torch.tensor([[2.0, 0.0, 0.0]]).double(), torch.tensor([0])


def test_gkt_1_the_client_learns_from_the_server():
    kd = transfer_loss(Z_C, Y, Z_S, 1.0, 3.0) - F.cross_entropy(Z_C, Y)
    assert kd.item() == pytest.approx(0.0996007384, abs=5e-11)
    assert transfer_loss(Z_C, Y, Z_S, 1.0, 3.0).item() == pytest.approx(0.5072067028, abs=5e-11)


def test_gkt_1_the_server_learns_from_the_client():
    kd = transfer_loss(Z_S, Y, Z_C, 1.0, 3.0) - F.cross_entropy(Z_S, Y)
    assert kd.item() == pytest.approx(0.1044354087, abs=5e-11)
    assert transfer_loss(Z_S, Y, Z_C, 1.0, 3.0).item() == pytest.approx(0.3439801749, abs=5e-11)


def test_without_a_teacher_or_without_weight_it_is_cross_entropy():
    model, (x, y) = mlp(0), images(6)
    alone = taught(y, None, 1.0, 3.0)(model, x[2:5], torch.tensor([2, 3, 4]))
    assert torch.equal(alone, F.cross_entropy(model(x[2:5]), y[2:5]))
    none = taught(y, torch.randn(6, 4), 0.0, 3.0)(model, x, torch.arange(6))
    torch.testing.assert_close(none, F.cross_entropy(model(x), y))


def test_cache_index_is_sample_index_under_shuffling():
    """Rows are looked up by position: a batch in any order has the loss of its own samples."""
    model, (x, y) = mlp(0), images(9)
    teacher = torch.randn(9, 4, generator=torch.Generator().manual_seed(1))
    order = torch.tensor([7, 0, 4])
    found = taught(y, teacher, 0.5, 2.0)(model, x[order], order)
    each = [transfer_loss(model(x[i : i + 1]), y[i : i + 1], teacher[i : i + 1], 0.5, 2.0) for i in order.tolist()]
    torch.testing.assert_close(found, torch.stack(each).mean())


@pytest.mark.parametrize(("layer", "shape"), [("body", (16,)), ("adapter", (8,)), ("body.1", (16,)), ("head.0", (8,))])
def test_features_are_the_output_of_a_layer(layer, shape):
    model, (x, _) = wrap(mlp(0), "3", representation=8, head_hidden=8), images(40)
    features, logits = extract(model, x, layer)
    assert features.shape == (40, *shape)
    assert torch.equal(logits, logits_of(model, x))
    expected = {"body": model.features, "adapter": model.represent}.get(layer)
    if expected is not None:
        with torch.no_grad():
            assert torch.equal(features, expected(x))
    assert not any(m._forward_hooks for m in model.modules())


def test_gkt_2_the_stem_of_resnet8_gives_maps_of_16_by_32_by_32():
    torch.manual_seed(0)
    model = build("resnet8", 10, (3, 32, 32))
    features, logits = extract(model, torch.randn(2, 3, 32, 32), "body.stem")
    assert features.shape == (2, 16, 32, 32)
    assert 500 * (features[0].numel() + logits.shape[1]) == 8_197_000
    assert 500 * logits.shape[1] == 5_000


def test_extraction_changes_nothing_and_does_not_depend_on_the_batch():
    model, (x, _) = Conv(0), images(40)
    model.train()
    before = weights_of(model)
    all_at_once = extract(model, x, "4")[0]
    assert same_bits(before, weights_of(model))
    assert model.training
    assert torch.equal(extract(model, x[3:5], "4")[0], all_at_once[3:5])


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.relu, self.fc = nn.ReLU(), nn.Linear(4, 2)

    def forward(self, x):
        return self.fc(self.relu(self.relu(x)))


def test_a_layer_used_twice_or_never_is_refused():
    with pytest.raises(ValueError, match="'relu' does not give one row of features per sample"):
        extract(Twice(), torch.randn(3, 4), "relu")
    model = Twice()
    model.spare = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="'spare'"):
        extract(model, torch.randn(3, 4), "spare")


@pytest.mark.parametrize("shape", [(128,), (16, 14, 14), (3, 1, 1)])
@pytest.mark.parametrize("layers", [0, 3])
def test_a_tower_turns_features_into_logits(shape, layers):
    torch.manual_seed(0)
    model = tower(shape, 5, 24, layers)
    assert logits_of(model, torch.randn(7, *shape)).shape == (7, 5)
    assert not list(model.buffers())


def test_what_a_tower_computes():
    """Written out with functions: norm, first layer, x + f(norm x), norm, mean over the pixels of a map, classifier."""
    torch.manual_seed(0)
    model, x = tower((3, 6, 4), 5, 8, 1).double(), torch.randn(2, 3, 6, 4, dtype=torch.float64)
    w = {name: t + 0.1 * torch.randn_like(t) for name, t in weights_of(model).items()}  # norms are not ones and zeros
    model.load_state_dict(w)
    h = F.group_norm(x, 1, w["0.weight"], w["0.bias"])
    h = F.conv2d(h, w["1.weight"], w["1.bias"], stride=2, padding=1)
    r = F.group_norm(h, 1, w["2.layers.0.weight"], w["2.layers.0.bias"])
    r = F.conv2d(r, w["2.layers.1.weight"], w["2.layers.1.bias"], padding=1).relu()
    h = h + F.conv2d(r, w["2.layers.3.weight"], w["2.layers.3.bias"], padding=1)
    h = F.group_norm(h, 1, w["3.weight"], w["3.bias"]).relu()
    assert h.shape == (2, 8, 3, 2)
    expected = h.flatten(2).sum(-1) / 6 @ w["6.weight"].T + w["6.bias"]
    torch.testing.assert_close(model(x), expected)

    model, x = tower((7,), 5, 8, 1).double(), torch.randn(2, 7, dtype=torch.float64)
    w = {name: t + 0.1 * torch.randn_like(t) for name, t in weights_of(model).items()}
    model.load_state_dict(w)
    h = F.layer_norm(x, (7,), w["0.weight"], w["0.bias"]) @ w["1.weight"].T + w["1.bias"]
    r = F.layer_norm(h, (8,), w["2.layers.0.weight"], w["2.layers.0.bias"])
    r = (r @ w["2.layers.1.weight"].T + w["2.layers.1.bias"]).relu()
    h = h + r @ w["2.layers.3.weight"].T + w["2.layers.3.bias"]
    h = F.layer_norm(h, (8,), w["3.weight"], w["3.bias"]).relu()
    torch.testing.assert_close(model(x), h @ w["5.weight"].T + w["5.bias"])


def test_the_size_of_a_tower():
    """Input norm, first layer, two dense layers and a norm in each block, last norm, classifier."""
    d, w, C, L = 128, 64, 10, 4
    dense = 2 * d + (d + 1) * w + L * (2 * w + 2 * (w + 1) * w) + 2 * w + (w + 1) * C
    assert sum(p.numel() for p in tower((d,), C, w, L).parameters()) == dense
    c = 16
    maps = 2 * c + (9 * c + 1) * w + L * (2 * w + 2 * (9 * w + 1) * w) + 2 * w + (w + 1) * C
    assert sum(p.numel() for p in tower((c, 8, 8), C, w, L).parameters()) == maps


def test_a_tower_with_given_weights_draws_no_random_number_and_shares_nothing():
    torch.manual_seed(0)
    model = tower((6,), 5, 8, 2)
    weights = weights_of(model)
    state = torch.get_rng_state()
    again = tower_with(weights, (6,), 5, 8, 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert same_bits(weights_of(again), weights)
    fit(again, torch.randn(8, 6), torch.arange(8) % 5, Local(epochs=1, batch=4), 0)
    assert same_bits(weights_of(model), weights)
    assert not same_bits(weights_of(again), weights)


@pytest.mark.parametrize("shape", [(), (4, 4), (2, 3, 4, 5), (0,)])
def test_features_that_are_neither_vectors_nor_maps_are_refused(shape):
    with pytest.raises(ValueError, match="vectors or maps"):
        tower(shape, 5, 8, 1)


@pytest.mark.parametrize("maps", [False, True])
def test_a_tower_learns(maps):
    x, y = images(120)
    x = x if maps else x.flatten(1)
    torch.manual_seed(0)
    model = tower(x.shape[1:], 4, 16, 2)
    fit(model, x, y, Local(epochs=8, batch=16, lr=3e-3, optimizer="adam"), 0)
    assert (logits_of(model, x).argmax(-1) == y).float().mean() > 0.9


def test_the_epochs_of_the_paper_s_code_decrease():
    from_round, epochs = [20, 30, 40, 100, 150], [15, 10, 5, 3, 1]
    rounds = (0, 19, 20, 29, 30, 39, 40, 99, 100, 149, 150, 500)
    found = [epochs_at(t, 20, from_round, epochs) for t in rounds]
    assert found == [20, 20, 15, 15, 10, 10, 5, 5, 3, 3, 1, 1]
    assert epochs_at(7, 4, [], []) == 4
