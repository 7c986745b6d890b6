"""The hypernetwork of pFedHN: a worked example, gradients against finite differences, the step against torch's."""

import pytest
import torch

from solera.methods.pfedhn import Hypernet, generate, new_hypernet, pull_back, sgd_step

LINEAR = {
    "head/p/w/weight": torch.tensor([[1.0, 2.0], [0.0, 1.0]]),
    "head/p/w/bias": torch.zeros(2),
}
V = torch.tensor([1.0, -1.0])


def test_hn1_the_change_of_theta_is_the_gradient_at_the_output():
    assert generate(LINEAR, V, "p")["w"].tolist() == [-1.0, -1.0]
    by_phi, by_v = pull_back(LINEAR, V, "p", {"w": torch.tensor([0.2, -0.1])})
    assert torch.allclose(by_phi["head/p/w/weight"], torch.tensor([[0.2, -0.2], [-0.1, 0.1]]))
    assert torch.allclose(by_v, torch.tensor([0.2, 0.3]))
    cfg = Hypernet(lr=1.0, momentum=0.0, weight_decay=0.0)
    stepped, _ = sgd_step(LINEAR, by_phi, {n: torch.zeros_like(t) for n, t in LINEAR.items()}, cfg)
    assert torch.allclose(stepped["head/p/w/weight"], torch.tensor([[0.8, 2.2], [0.1, 0.9]]))


MODELS = {
    "p": {"w": torch.ones(3, 2, dtype=torch.float64), "b": torch.zeros(3, dtype=torch.float64)},
    "q": {"w": torch.full((2, 2, 2), 5.0, dtype=torch.float64)},
}


def deep(layers=2):
    phi = new_hypernet(MODELS, 3, Hypernet(layers=layers, width=4), torch.Generator().manual_seed(0))
    return {n: t.double() for n, t in phi.items()}, torch.tensor([0.3, -1.0, 0.7], dtype=torch.float64)


def test_one_linear_head_for_each_tensor_on_a_shared_trunk():
    phi, v = deep()
    assert phi["trunk/0/weight"].shape == (4, 3)
    assert phi["trunk/1/weight"].shape == (4, 4)
    assert {n: tuple(t.shape) for n, t in generate(phi, v, "p").items()} == {"w": (3, 2), "b": (3,)}
    assert {n: tuple(t.shape) for n, t in generate(phi, v, "q").items()} == {"w": (2, 2, 2)}
    features = v
    for i in (0, 1):
        features = (phi[f"trunk/{i}/weight"] @ features + phi[f"trunk/{i}/bias"]).relu()
    by_hand = torch.einsum("abch,h->abc", phi["head/q/w/weight"], features) + phi["head/q/w/bias"]
    assert torch.allclose(generate(phi, v, "q")["w"], by_hand)


def test_heads_begin_at_the_initial_model():
    phi, v = deep()
    nothing = {n: torch.zeros_like(t) if n.startswith("trunk") else t for n, t in phi.items()}
    assert torch.equal(generate(nothing, v, "q")["w"], MODELS["q"]["w"])
    bound = 1 / 4**0.5
    drawn = phi["head/p/w/weight"]
    assert drawn.abs().max() <= bound < 1.3 * drawn.abs().max()


@pytest.mark.parametrize("layers", [0, 2])
def test_the_gradients_are_those_of_finite_differences(layers):
    phi, v = deep(layers)
    delta = {
        n: torch.randn(t.shape, generator=torch.Generator().manual_seed(1)).double() for n, t in MODELS["p"].items()
    }
    by_phi, by_v = pull_back(phi, v, "p", delta)
    assert not any(n.startswith("head/q/") for n in by_phi)

    def value(phi, v):
        return sum((delta[n] * t).sum() for n, t in generate(phi, v, "p").items())

    for name, g in by_phi.items():
        for position in range(min(3, g.numel())):
            step = torch.zeros_like(g)
            step.view(-1)[position] = 1e-6
            slope = (value(phi | {name: phi[name] + step}, v) - value(phi | {name: phi[name] - step}, v)) / 2e-6
            assert slope.item() == pytest.approx(g.view(-1)[position].item(), abs=1e-7)
    for i in range(3):
        step = torch.zeros(3).double()
        step[i] = 1e-6
        assert ((value(phi, v + step) - value(phi, v - step)) / 2e-6).item() == pytest.approx(by_v[i].item(), abs=1e-7)


@pytest.mark.parametrize("clip", [None, 0.5, 50.0])
def test_the_step_is_torchs_sgd_with_clipped_gradient(clip):
    cfg = Hypernet(lr=0.1, momentum=0.9, weight_decay=0.01, clip=clip)
    g = torch.Generator().manual_seed(0)
    x = {"a": torch.randn(3, 2, generator=g), "b": torch.randn(4, generator=g)}
    ours, velocity = dict(x), {n: torch.zeros_like(t) for n, t in x.items()}
    theirs = {n: t.clone().requires_grad_() for n, t in x.items()}
    optimizer = torch.optim.SGD(theirs.values(), 0.1, momentum=0.9, weight_decay=0.01)
    for _ in range(4):
        gradient = {n: torch.randn(t.shape, generator=g) for n, t in x.items()}
        ours, velocity = sgd_step(ours, gradient, velocity, cfg)
        for n, t in theirs.items():
            t.grad = gradient[n].clone()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(theirs.values(), clip)
        optimizer.step()
    assert all(torch.allclose(ours[n], theirs[n], atol=1e-6) for n in x)


@pytest.mark.parametrize(
    "bad", [{"embedding": 0}, {"layers": -1}, {"width": 0}, {"lr": -1.0}, {"momentum": 1.0}, {"clip": 0.0}]
)
def test_settings_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Hypernet(**bad)
