"""Low-bit weights: the oracle FDF-6, what rounding must keep, and how many bits really travel."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from solera.core.tensors import weights_of
from solera.methods.steps.low_bit import (
    ErrorFeedback,
    LowBit,
    Packing,
    StraightThrough,
    coarse_names,
    fit_coarse,
    from_levels,
    pack,
    quantise,
    quantise_activations,
    round_activations,
    standardised,
    to_levels,
    unpack,
)
from solera.train.fitting import Diverged, Local, fit, proximal
from toys import Conv, images, mlp, same_bits

W = torch.tensor([[0.5, -1.5, 0.25], [2.0, 1.0, -3.0]])
ONE = LowBit(bits=1)
BITS = range(1, 9)
LOCAL = Local(epochs=2, batch=8, lr=0.05)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- the oracle FDF-6 ------------------------------------------------------------------------------


def test_fdf_6_quantiser():
    assert quantise(W, 1).tolist() == [[0.75, -0.75, 0.75], [2.0, 2.0, -2.0]]


@pytest.mark.parametrize(("mask", "passes"), [(True, [[1, 0, 1], [0, 1, 0]]), (False, [[1, 1, 1], [1, 1, 1]])])
def test_fdf_6_straight_through(mask, passes):
    w = W.clone().requires_grad_()
    rounded = StraightThrough.apply(w, LowBit(bits=1, mask=mask))
    assert torch.equal(rounded, quantise(W, 1))
    upstream = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    rounded.backward(upstream)
    assert torch.equal(w.grad, upstream * torch.tensor(passes))


def test_fdf_6_error_feedback():
    p = nn.Parameter(W.clone())
    feedback = ErrorFeedback([p], ONE)
    feedback()
    assert torch.equal(p.data, quantise(W, 1))
    assert feedback.memory[0].tolist() == [[-0.25, -0.75, -0.5], [0.0, -1.0, -1.0]]
    feedback()  # u = w + e is the first w again
    assert torch.equal(p.data, quantise(W, 1))
    with torch.no_grad():
        p += 0.5
    feedback()
    assert torch.equal(p.data, quantise(W + 0.5, 1))


# ---- the quantiser ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", BITS)
def test_rounding_twice_is_rounding_once(bits):
    for seed in range(5):
        for w in (noise(7, 1000, seed=seed) * 0.037, noise(3, 5, 3, 3, seed=seed) * 1e-6, noise(4, 1, seed=seed)):
            once = quantise(w, bits)
            assert torch.equal(quantise(once, bits), once)


def test_several_bits_are_evenly_spaced_and_keep_the_largest():
    w = torch.tensor([[1.0, -0.6, 0.2, 0.0, 0.16]])
    assert torch.equal(quantise(w, 2), torch.tensor([[1.0, -1.0, 0.0, 0.0, 0.0]]))
    torch.testing.assert_close(quantise(w, 3), torch.tensor([[1.0, -2 / 3, 1 / 3, 0.0, 0.0]]))
    errors = [(quantise(noise(4, 200), b) - noise(4, 200)).abs().max().item() for b in range(2, 9)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] <= noise(4, 200).abs().max().item() / 127 / 2 + 1e-6


def test_zero_counts_as_positive_and_an_empty_filter_stays_zero():
    assert quantise(torch.tensor([[0.0, -2.0], [-0.0, 4.0]]), 1).tolist() == [[1.0, -1.0], [2.0, 2.0]]
    for bits in BITS:
        assert torch.equal(quantise(torch.zeros(2, 3), bits), torch.zeros(2, 3))


@pytest.mark.parametrize("bits", [1, 4])
def test_filters_do_not_depend_on_each_other(bits):
    w = noise(3, 4, 3, 3)
    alone = torch.cat([quantise(w[i : i + 1], bits) for i in range(3)])
    assert torch.equal(quantise(w, bits), alone)


def test_standardised_filters():
    u = standardised(W)
    torch.testing.assert_close(u[0], torch.tensor([0.6882, -1.0, 0.4588]), rtol=0, atol=5e-5)
    assert bool((u.abs() <= 1).all())
    q = quantise(W, 1, standardise=True)
    torch.testing.assert_close(q[0].abs(), torch.full((3,), u[0].abs().mean().item()))
    assert q.sign().tolist() == [[1, -1, 1], [1, 1, -1]]
    for flat in (torch.ones(2, 3), torch.ones(2, 1)):  # nothing to divide by
        assert torch.equal(quantise(flat, 1, standardise=True), torch.zeros_like(flat))


def test_which_tensors_are_rounded():
    conv = Conv(0)
    assert coarse_names(conv, ONE) == ["0.weight", "3.weight", "8.weight"]
    assert coarse_names(conv, LowBit(bits=1, skip_ends=True)) == ["3.weight"]
    assert coarse_names(conv, LowBit()) == []


def test_tied_weights_are_rounded_once_and_skipped_together():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "c": nn.Linear(4, 3), "d": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    assert coarse_names(model, ONE) == ["a.weight", "b.weight", "c.weight", "d.weight"]
    assert coarse_names(model, LowBit(bits=1, skip_ends=True)) == ["c.weight"]


# ---- training --------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", ["ste", "error_feedback"])
@pytest.mark.parametrize("bits", [1, 3])
def test_training_ends_with_rounded_weights(training, bits):
    model, cfg = Conv(0), LowBit(bits=bits, training=training)
    done = fit_coarse(model, *images(40), LOCAL, seed=1, cfg=cfg)
    assert (done.steps, model.training) == (10, False)
    for name, p in model.named_parameters():
        if name in coarse_names(model, cfg):
            assert torch.equal(p.data, quantise(p.data, bits)), name
        elif p.ndim == 1:
            assert len(p.unique()) > 1, name
    again = Conv(0)
    fit_coarse(again, *images(40), LOCAL, seed=1, cfg=cfg)
    assert same_bits(weights_of(model), weights_of(again))


@pytest.mark.parametrize("training", ["ste", "error_feedback"])
def test_it_learns(training):
    x, y = images(200, seed=3)
    model = Conv(0, width=12)
    fit_coarse(model, x, y, Local(epochs=15, batch=20, lr=0.05), seed=0, cfg=LowBit(bits=1, training=training))
    test, truth = images(200, seed=4)
    assert (model(test).argmax(-1) == truth).float().mean() > 0.8


def test_one_step_of_the_straight_through_estimator_by_hand():
    x, y = images(8)
    model, start = mlp(1), weights_of(mlp(1))
    with torch.no_grad():
        model[1].weight[0, :5] = 1.5  # beyond the mask
    start = weights_of(model)
    fit_coarse(model, x, y, Local(steps=1, batch=8, lr=0.1), seed=0, cfg=ONE)
    rounded = mlp(1)
    rounded.load_state_dict({n: quantise(t, 1) if t.ndim > 1 else t for n, t in start.items()})
    nn.functional.cross_entropy(rounded(x), y).backward()
    for name, p in rounded.named_parameters():
        mask = start[name].abs() <= 1 if p.ndim > 1 else torch.ones_like(p)
        moved = start[name] - 0.1 * p.grad * mask
        expected = quantise(moved, 1) if p.ndim > 1 else moved
        torch.testing.assert_close(weights_of(model)[name], expected, msg=name)


def test_two_steps_of_error_feedback_by_hand():
    x, y = images(8)
    model = mlp(1)
    w, e = {n: p.detach().clone() for n, p in mlp(1).named_parameters()}, {}
    for step in range(3):
        for n in w:
            if w[n].ndim > 1:
                u = w[n] + e.get(n, 0)
                w[n] = quantise(u, 1)
                e[n] = u - w[n]
        if step == 2:
            break
        model.load_state_dict(w)
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        w = {n: w[n] - 0.1 * p.grad for n, p in model.named_parameters()}
    trained = mlp(1)
    cfg = LowBit(bits=1, training="error_feedback")
    fit_coarse(trained, x, y, Local(steps=2, batch=8, lr=0.1), seed=0, cfg=cfg)
    for n, t in weights_of(trained).items():
        torch.testing.assert_close(t, w[n], msg=n)


@pytest.mark.parametrize("training", ["ste", "error_feedback"])
def test_a_proximal_term_goes_around_it(training):
    sent = weights_of(mlp(1))

    def end(mu: float) -> dict:
        model = mlp(1)
        cfg = LowBit(bits=8, training=training)
        fit_coarse(model, *images(40), Local(epochs=5, batch=8, lr=0.1), 0, cfg, partial(proximal, mu, sent))
        return weights_of(model)

    far, near = ({n: t - sent[n] for n, t in end(mu).items()} for mu in (0.0, 5.0))
    assert sum(t.norm() for t in near.values()) < 0.5 * sum(t.norm() for t in far.values())


@pytest.mark.parametrize("training", ["ste", "error_feedback"])
def test_many_bits_come_near_to_full_precision(training):
    x, y = images(40)
    exact, coarse = mlp(0), mlp(0)
    fit(exact, x, y, LOCAL, seed=0)
    fit_coarse(coarse, x, y, LOCAL, seed=0, cfg=LowBit(bits=8, training=training))
    assert (exact(x) - coarse(x)).abs().max() < 0.05


def test_a_training_that_blows_up_raises():
    for training in ("ste", "error_feedback"):
        cfg = LowBit(bits=1, training=training, mask=training == "error_feedback")
        with pytest.raises(Diverged, match="training diverged"):
            fit_coarse(mlp(0), *images(40), Local(epochs=20, batch=8, lr=1e4), 0, cfg)


def test_without_samples_weights_are_still_rounded():
    for training in ("ste", "error_feedback"):
        model = mlp(0)
        x, y = images(4)
        fit_coarse(model, x[:0], y[:0], LOCAL, 0, LowBit(bits=1, training=training))
        assert torch.equal(model[1].weight, quantise(mlp(0)[1].weight, 1))


# ---- packing ---------------------------------------------------------------------------------------


def rounded(bits: int) -> tuple[dict, list[str]]:
    model = Conv(3, width=5)
    names = coarse_names(model, LowBit(bits=bits))
    return {n: quantise(t, bits) if n in names else t for n, t in weights_of(model).items()}, names


@pytest.mark.parametrize("bits", BITS)
def test_what_is_packed_comes_out_to_the_bit(bits):
    weights, names = rounded(bits)
    packing = pack(weights, names, bits)
    assert same_bits(unpack(packing, weights, names, bits), weights)


@pytest.mark.parametrize("bits", BITS)
def test_bits_on_the_wire_are_those_of_the_formula(bits):
    weights, names = rounded(bits)
    codes, scales, rest = pack(weights, names, bits)
    assert all(codes[n].numel() == math.ceil(weights[n].numel() * bits / 8) for n in names)  # padding: 7 bits at most
    assert {n: t.numel() for n, t in scales.items()} == {n: len(weights[n]) for n in names}
    assert set(rest) == set(weights) - set(names)
    assert all(t.dtype == torch.uint8 for t in codes.values())


def test_the_bits_themselves():
    w = quantise(torch.tensor([[1.0, -1.0, 1.0, 1.0], [-3.0, -3.0, -3.0, 3.0], [2.0, -2.0, -2.0, -2.0]]), 1)
    codes, scales, _ = pack({"w": w}, ["w"], 1)
    assert codes["w"].tolist() == [0b10001101, 0b0001]
    assert scales["w"].tolist() == [1.0, 3.0, 2.0]
    w = torch.tensor([[1.0, -1.0, 0.0, 1.0, 0.0]])
    assert pack({"w": w}, ["w"], 2)[0]["w"].tolist() == [0b10010010, 0b01]


def broken(packing: Packing, **changes) -> Packing:
    return packing._replace(**{k: getattr(packing, k) | v for k, v in changes.items()})


def test_whatever_is_not_what_was_asked_for_is_refused():
    weights, names = rounded(2)
    good = pack(weights, names, 2)
    n = names[0]
    for bad, message in (
        (broken(good, codes={n: good.codes[n][:-1]}), "codes.0.weight: "),
        (broken(good, codes={n: good.codes[n].int()}), "codes.0.weight: "),
        (broken(good, codes={n: torch.full_like(good.codes[n], 255)}), "codes.0.weight: a level above 1"),
        (broken(good, scales={n: good.scales[n][:1]}), "scales.0.weight: "),
        (broken(good, rest={"0.bias": torch.zeros(1)}), "rest.0.bias: "),
        (broken(good, rest={"0.bias": good.rest["0.bias"].double()}), "rest.0.bias: "),
        (broken(good, rest={"more": torch.zeros(1)}), "rest: names differ"),
        (good._replace(codes={}), "codes: names differ"),
        (good._replace(scales={}), "scales: names differ"),
    ):
        with pytest.raises(ValueError, match=message):
            unpack(bad, weights, names, 2)


def test_levels_and_scales_stand_for_the_weights():
    levels, scales = to_levels(W, 1)
    assert levels.tolist() == [[1, -1, 1], [1, 1, -1]]
    assert scales.tolist() == [0.75, 2.0]
    assert torch.equal(from_levels(levels, scales, 1), quantise(W, 1))


# ---- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [0, 9, 16, 31, -1])
def test_impossible_numbers_of_bits(bits):
    with pytest.raises(ValueError, match=f"bits = {bits}"):
        LowBit(bits=bits)


def test_error_feedback_has_no_mask():
    with pytest.raises(ValueError, match="only for training"):
        LowBit(bits=1, training="error_feedback", mask=False)


# ---- activations ------------------------------------------------------------------------------------


def test_activations_by_hand():
    """One bit: the nearer end of the sample's range. Two bits: the nearest of 0, 1/3, 2/3 and 1 of it."""
    a = torch.tensor([[0.0, 0.9, 1.1, 2.0], [-3.0, 0.0, 2.0, 3.0]])
    assert quantise_activations(a, 1).tolist() == [[0.0, 0.0, 2.0, 2.0], [-3.0, -3.0, 3.0, 3.0]]
    two = torch.tensor([[0.0, 2 / 3, 4 / 3, 2.0], [-3.0, 1.0, 1.0, 3.0]])
    assert torch.allclose(quantise_activations(a, 2), two)
    assert quantise_activations(torch.full((2, 3), 7.0), 1).tolist() == [[7.0] * 3] * 2


def test_activations_of_a_sample_do_not_depend_on_the_others():
    a = noise(6, 2, 3, 3)
    together = quantise_activations(a, 3)
    assert torch.equal(torch.cat([quantise_activations(one, 3) for one in a.split(1)]), together)
    assert all(len(one.unique()) <= 8 for one in together)
    step = (a.flatten(1).amax(1) - a.flatten(1).amin(1)) / 7
    assert bool(((together - a).abs().flatten(1).amax(1) <= step / 2 * 1.0001).all())


def two_layers() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False), nn.Linear(1, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        model[2].weight.copy_(torch.tensor([[3.0, 5.0]]))
        model[3].weight.fill_(2.0)
        model[3].bias.fill_(1.0)
    return model


def test_the_layers_after_the_first_get_rounded_inputs_and_straight_gradients():
    """x = (0.9, 2): the first layer sees x itself; behind it 0.9 becomes 0 of the range [0.9, 2], that is 0.9."""
    model, x = two_layers(), torch.tensor([[0.9, 2.0], [-1.0, 0.4]], requires_grad=True)
    end = round_activations(model, LowBit(activations=1))
    # second sample: ReLU gives (0, 0.4): both ends of its range
    assert torch.allclose(model(x), torch.tensor([[2 * (3 * 0.9 + 5 * 2) + 1], [2 * 5 * 0.4 + 1]]))
    three = torch.tensor([[0.9, 2.0, 1.2]])
    wide = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 1, bias=False))
    with torch.no_grad():
        wide[0].weight.copy_(torch.eye(3))
        wide[1].weight.copy_(torch.tensor([[1.0, 1.0, 10.0]]))
    round_activations(wide, LowBit(activations=1))
    assert wide(three).item() == pytest.approx(0.9 + 2 + 10 * 0.9)
    wide(three).backward()
    # through rounding as if it were not there: the gradient of the first weights is the outer product (1, 1, 10) x
    assert torch.allclose(wide[0].weight.grad, torch.tensor([[1.0], [1.0], [10.0]]) * three)
    # the second layer learns from what it was given
    assert torch.allclose(wide[1].weight.grad, torch.tensor([[0.9, 2.0, 0.9]]))
    end()
    assert torch.equal(model(x), two_layers()(x))


def test_skip_ends_leaves_the_last_input_alone():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 4)), noise(5, 3)
    plain = model(x)
    end = round_activations(model, LowBit(bits=1, activations=1, skip_ends=True))
    assert torch.equal(model(x), plain)
    end()
    round_activations(model, LowBit(bits=1, activations=1))
    assert not torch.equal(model(x), plain)


def test_training_sees_rounded_activations_and_leaves_no_hook():
    (x, y), model = images(16), mlp(0)
    cfg = LowBit(activations=1)
    fit_coarse(model, x, y, Local(steps=1, batch=16, lr=0.1), 0, cfg)
    by_hand = mlp(0)
    hidden = by_hand[2](by_hand[1](by_hand[0](x)))
    hi = hidden.detach().amax(1, keepdim=True)
    lo = hidden.detach().amin(1, keepdim=True)
    rounded = torch.where(hidden.detach() - lo >= (hi - lo) / 2, hi, lo)
    loss = nn.functional.cross_entropy(by_hand[3](hidden + (rounded - hidden).detach()), y)
    for p, g in zip(by_hand.parameters(), torch.autograd.grad(loss, list(by_hand.parameters())), strict=True):
        with torch.no_grad():
            p -= 0.1 * g
    for name, p in model.named_parameters():
        assert torch.allclose(p, by_hand.get_parameter(name), atol=1e-6)
    assert not any(m._forward_pre_hooks for m in model.modules())
