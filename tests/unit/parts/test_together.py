"""Several trainings at once give what each would give alone."""

import copy

import pytest
import torch
from torch import nn

from solera.parts.local import Diverged, Local, fit
from solera.parts.objectives import proximal, towards
from solera.parts.together import Training, fit_together, try_batched, why_not_batched
from solera.tensors import weights_of

SIZES = (40, 48, 33, 40)  # minibatches of 16: the last one of an epoch has 8, 16, 1 and 8 samples
STATED = 1e-5  # the tolerance that docs/howto/gpu.md names


def conv():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))


def trainings(cfg, mu=0.0, correct=None, make=conv, scale=1.0):
    found = []
    for i, n in enumerate(SIZES):
        g = torch.Generator().manual_seed(i)
        x, y = torch.randn(n, 1, 8, 8, generator=g) * scale, torch.randint(0, 3, (n,), generator=g)
        model = make()
        received = {name: t + 0.01 * i for name, t in weights_of(model).items()}
        found.append(Training(model, x, y, cfg, i, proximal(mu, received), correct and correct(model, i)))
    return found


def alone(t):
    return fit(t.model, t.inputs, t.labels, t.cfg, t.seed, t.objective, t.correct)


def pulled(model, i):
    """As in Ditto: it looks at the parameters while they are trained."""
    at = dict(model.named_parameters())
    return lambda name, gradient: gradient + 0.1 * i * at[name].detach()


CASES = {
    "sgd": ({"epochs": 3, "momentum": 0.9, "weight_decay": 0.01}, {}),
    "adam": ({"epochs": 2, "optimizer": "adam", "clip": 0.5}, {}),
    "cosine": ({"steps": 7, "schedule": "cosine"}, {}),
    "proximal": ({"epochs": 2}, {"mu": 0.5}),
    "corrected": ({"epochs": 2}, {"correct": pulled}),
}


@pytest.mark.parametrize("case", CASES)
def test_trainings_together_are_those_alone(case):
    settings, options = CASES[case]
    cfg = Local(batch=16, lr=0.02, **settings)
    one, many = trainings(cfg, **options), trainings(cfg, **options)
    expected = [alone(t) for t in one]
    found = fit_together(many)
    for a, b, want, got in zip(one, many, expected, found, strict=True):
        assert (got.steps, got.lr_sum) == (want.steps, want.lr_sum)
        assert got.loss == pytest.approx(want.loss, rel=1e-5)
        trained = weights_of(b.model)
        for name, t in weights_of(a.model).items():
            torch.testing.assert_close(trained[name], t, atol=STATED, rtol=STATED)
        assert not b.model.training
        assert all(p.grad is None for p in b.model.parameters())


def test_who_diverges_is_told_and_the_others_go_on():
    cfg = Local(epochs=2, batch=16, lr=0.02)
    many, one = trainings(cfg), trainings(cfg)
    for group in (many, one):
        group[1].inputs[20] = float("nan")
    found = fit_together(many)
    with pytest.raises(Diverged) as e:
        alone(one[1])
    assert isinstance(found[1], Diverged)
    assert (str(found[1]), found[1].steps) == (str(e.value), e.value.steps)
    for i in (0, 2, 3):
        alone(one[i])
        for name, t in weights_of(one[i].model).items():
            torch.testing.assert_close(weights_of(many[i].model)[name], t, atol=STATED, rtol=STATED)


def test_frozen_parameters_stay():
    def half():
        model = conv()
        model[0].requires_grad_(False)
        return model

    many = trainings(Local(epochs=1, batch=16, lr=0.1), make=half)
    before = weights_of(many[0].model)
    fit_together(many)
    after = weights_of(many[0].model)
    assert torch.equal(before["0.weight"], after["0.weight"])
    assert not torch.equal(before["4.weight"], after["4.weight"])


def test_what_cannot_be_batched_has_a_reason():
    cfg = Local()
    one = trainings(cfg)[0]
    assert one.why_alone() == ""
    own = copy.copy(one)
    object.__setattr__(own, "objective", towards(lambda z, t: z.sum()))
    assert own.why_alone() == "the method's own loss"
    assert "BatchNorm" in why_not_batched(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert "Dropout" in why_not_batched(nn.Dropout(0.1))
    assert why_not_batched(nn.Dropout(0.0)) == ""

    class Asks(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum().item() > 0 else x[:, :2]

    assert try_batched(nn.Linear(3, 2), torch.ones(2, 3), torch.tensor([0, 1])) == ""
    assert "item()" in try_batched(Asks(3, 2), torch.ones(2, 3), torch.tensor([0, 1]))


def test_only_trainings_of_one_kind_share_a_batch():
    base, kinds = Local(epochs=1, batch=16), set()
    for cfg in (base, Local(epochs=2, batch=16), Local(epochs=1, batch=16, schedule="cosine")):
        kinds |= {t.kind() for t in trainings(cfg)}
    # With a schedule the step size follows from the number of steps: 3 for 40, 48 and 33 samples alike.
    assert len(kinds) == 3
    assert trainings(base)[0].kind() != trainings(base, mu=0.1)[0].kind()
    assert (
        trainings(base)[0].kind()
        != trainings(base, make=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3)))[0].kind()
    )
