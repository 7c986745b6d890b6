"""BatchNorm: frozen is frozen, modes come back, and statistics can be estimated anew."""

import torch

from solera.train.norms import evaluating, has_batchnorm, parameter_names, reestimate, train_mode
from toys import Conv, images, mlp


def test_finds_batchnorm():
    assert has_batchnorm(Conv(0))
    assert not has_batchnorm(Conv(0, norm=False))


def test_parameter_names_are_the_weights_without_the_buffers():
    model = Conv(0)
    assert set(model.state_dict()) - set(parameter_names(model)) == {
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    }
    tied = mlp(0, 4, 4)
    tied.append(tied[3])
    assert set(parameter_names(tied)) == set(tied.state_dict())


def test_frozen_training_mode_keeps_the_statistics():
    model, (x, _) = Conv(0), images(20)
    train_mode(model, frozen=True)
    before = model[1].running_mean.clone()
    model(x)
    assert model.training
    assert torch.equal(model[1].running_mean, before)
    train_mode(model)
    model(x)
    assert not torch.equal(model[1].running_mean, before)


def test_evaluating_restores_after_an_error():
    model = Conv(0).train()
    model[1].eval()
    try:
        with evaluating(model):
            assert not model.training
            assert not torch.is_grad_enabled()
            raise RuntimeError
    except RuntimeError:
        pass
    assert torch.is_grad_enabled()
    assert [m.training for m in (model, model[0], model[1])] == [True, True, False]


def test_reestimate_is_one_plain_average_over_the_inputs():
    model, (x, _) = Conv(0, dropout=0.5), images(40)
    model[1].running_mean.fill_(7.0)
    momentum = model[1].momentum
    reestimate(model, x, batch=20)
    with torch.no_grad():
        features = model[0](x)
    expected = features.mean((0, 2, 3))
    torch.testing.assert_close(model[1].running_mean, expected, rtol=1e-5, atol=1e-6)
    halves = torch.stack([features[:20].var((0, 2, 3)), features[20:].var((0, 2, 3))]).mean(0)
    torch.testing.assert_close(model[1].running_var, halves, rtol=1e-5, atol=1e-6)
    assert model[1].momentum == momentum
    assert model.training


def test_reestimate_sees_no_dropout():
    """Inputs that are all 3 have a variance of 0, unless half of them are dropped."""
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(2)).train()
    reestimate(model, torch.full((10, 2), 3.0))
    assert model[1].running_mean.tolist() == [3.0, 3.0]
    assert model[1].running_var.tolist() == [0.0, 0.0]


def test_reestimate_uses_a_last_batch_of_two():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(1))
    reestimate(model, torch.tensor([[0.0], [2.0], [6.0], [10.0]]), batch=2)
    assert model[0].running_mean.tolist() == [4.5]
    reestimate(model, torch.tensor([[0.0], [2.0], [1.0], [6.0], [10.0]]), batch=3)
    assert model[0].running_mean.tolist() == [4.5]  # (1 + 8) / 2


def test_reestimate_leaves_a_last_batch_of_one_out_and_models_without_batchnorm_alone():
    model, (x, _) = Conv(0), images(21)
    reestimate(model, x, batch=20)
    mean = model[1].running_mean.clone()
    reestimate(model, x[:20], batch=20)
    assert torch.equal(model[1].running_mean, mean)
    plain = mlp(0)
    before = plain[1].weight.clone()
    reestimate(plain, x)
    assert torch.equal(plain[1].weight, before)
