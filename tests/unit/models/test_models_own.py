"""A user's own models: wrapped, registered, checked."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from solera.core.errors import ConfigError
from solera.models import (
    MODELS,
    SplitModel,
    as_split,
    build,
    check_output,
    is_split,
    register_model,
    require_split,
    size_of,
    wrap,
)

SHAPE = (1, 8, 8)


class WithFc(nn.Module):
    """A class with an fc attribute, and BatchNorm and dropout before it."""

    def __init__(self, classes=4, shape=SHAPE):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(shape[0], 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.5))
        self.fc = nn.Linear(6, classes)

    def forward(self, x):
        return self.fc(self.encoder(x).mean(dim=(2, 3)))


class Functional(nn.Module):
    """All but the layers with weights is written in forward; the last layer is nested."""

    def __init__(self, classes=4):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.top = nn.ModuleDict({"hidden": nn.Linear(27, 12), "out": nn.Linear(12, classes)})

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        x = F.relu(self.top["hidden"](torch.flatten(x, 1)))
        return self.top["out"](x)


def sequential(classes=4):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Tanh(), nn.Linear(10, classes))


OWN = [(sequential, "3", 10), (WithFc, "fc", 6), (Functional, "top.out", 12)]


@pytest.fixture
def registered():
    """Names registered by a test disappear with it."""
    before = dict(MODELS)
    yield
    MODELS.clear()
    MODELS.update(before)


@pytest.mark.parametrize(("make", "classifier", "features"), OWN)
def test_wrap_with_the_shared_head(make, classifier, features):
    model = make().eval()
    split = wrap(model, classifier, shape=SHAPE).eval()
    x = torch.randn(5, *SHAPE)
    assert is_split(split)
    assert split.feature_dim == features
    assert split.features(x).shape == (5, features)
    assert split(x).shape == (5, 4)
    assert size_of(split.head).parameters == 128 * 128 + 128 + 128 * 4 + 4
    # same head, whatever the model
    zoo = build("mlp", 4, SHAPE, head="shared")
    assert {k: v.shape for k, v in split.head.state_dict().items()} == {
        k: v.shape for k, v in zoo.head.state_dict().items()
    }


@pytest.mark.parametrize(("make", "classifier", "features"), OWN)
def test_wrap_plain_computes_the_same_and_leaves_the_original_alone(make, classifier, features):
    model = make().eval()
    names = list(model.state_dict())
    x = torch.randn(5, *SHAPE)
    expected = model(x)
    split = wrap(model, classifier, head="plain", shape=SHAPE).eval()
    assert split(x).equal(expected)
    with torch.no_grad():
        for p in split.parameters():
            p.add_(1)
    assert model(x).equal(expected)
    assert list(model.state_dict()) == names
    twin = copy.deepcopy(split)
    twin.load_state_dict(split.state_dict())
    assert twin(x).equal(split(x))


def test_wrap_for_another_number_of_classes():
    split = wrap(WithFc(classes=1000), "fc", head="plain", classes=7)
    assert split.eval()(torch.randn(2, *SHAPE)).shape == (2, 7)


def test_wrap_with_moons_projection():
    split = wrap(Functional(), "top.out", head="projection", representation=20).eval()
    x = torch.randn(3, *SHAPE)
    assert split.represent(x).shape == (3, 20)
    assert isinstance(split.head, nn.Linear)
    assert [m.out_features for m in split.adapter if isinstance(m, nn.Linear)] == [12, 20]


@pytest.mark.parametrize("path", ["head", "encoder", "", "encoder.0"])
def test_wrap_names_the_linear_layers_when_the_path_is_wrong(path):
    with pytest.raises(ConfigError, match=rf"classifier = '{path}' is not a Linear layer inside the WithFc.*'fc'"):
        wrap(WithFc(), path)


def test_wrap_without_linear_layers_points_to_as_split():
    with pytest.raises(ConfigError, match=r"its Linear layers: none.*as_split\(body, feature_dim, classes\)"):
        wrap(nn.Sequential(nn.Conv2d(1, 4, 8), nn.Flatten()), "1")


@pytest.mark.parametrize(("classifier", "last"), [("1", nn.LogSoftmax(dim=1)), ("1", nn.Linear(10, 4))])
def test_wrap_notices_steps_after_the_classifier(classifier, last):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), last)
    with pytest.raises(ConfigError, match="classifier = '1' of the Sequential is not its last step"):
        wrap(model, classifier, shape=SHAPE)
    assert not model[1]._forward_hooks


def test_as_split_heads():
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 30), nn.ReLU())
    x = torch.randn(2, *SHAPE)
    assert as_split(body, 30, 5)(x).shape == (2, 5)
    assert isinstance(as_split(body, 30, 5, head="plain").head, nn.Linear)
    narrow = as_split(body, 30, 5, representation=16, head_hidden=8)
    assert [tuple(p.shape) for p in narrow.head.parameters()] == [(8, 16), (8,), (5, 8), (5,)]
    with pytest.raises(ConfigError, match="feature_dim = 0 is not a positive"):
        as_split(body, 0, 5)
    with pytest.raises(ConfigError, match="head_hidden = -1 is not a positive"):
        as_split(body, 30, 5, head_hidden=-1)


def test_require_split_passes_split_models_and_explains_others():
    split = build("mlp", 4, SHAPE)
    assert require_split(split, "fedet") is split
    assert not is_split(WithFc())
    with pytest.raises(
        ConfigError, match=r"fedet needs .* 'mine' is a plain Functional.*classifier='top\.out'"
    ) as error:
        require_split(Functional(), "fedet", "mine")
    assert "as_split" in str(error.value)
    assert error.value.exit_code == 2


def test_registered_whole_model(registered):
    register_model("own-net", title="Mine")(WithFc)
    model = build("own-net", 5, SHAPE)
    assert isinstance(model, WithFc)
    assert model.eval()(torch.zeros(2, *SHAPE)).shape == (2, 5)
    assert MODELS["own-net"].own
    assert MODELS["own-net"].title == "Mine"
    with pytest.raises(ConfigError, match=r"head = 'shared' needs .* 'own-net' is a plain WithFc"):
        build("own-net", 5, SHAPE, head="shared")


def test_registered_body_gets_any_head_norm_and_option(registered):
    @register_model("own-body")
    def own_body(shape, norm, width=8):
        return nn.Sequential(nn.Conv2d(shape[0], width, 3), norm(width), nn.Flatten()), width * 36

    model = build("own-body", 3, SHAPE, "group", "shared", width=4)
    assert isinstance(model, SplitModel)
    assert model(torch.zeros(2, *SHAPE)).shape == (2, 3)
    assert any(isinstance(m, nn.GroupNorm) for m in model.modules())
    assert MODELS["own-body"].options == {"width": 8}


def test_registered_builder_with_its_own_split(registered):
    @register_model("own-split")
    def own_split(classes, head, **options):
        return wrap(Functional(classes), "top.out", head=head) if options["wrapped"] else sequential(classes)

    assert is_split(build("own-split", 3, SHAPE, head="shared", wrapped=True))
    assert isinstance(build("own-split", 3, SHAPE, wrapped=False), nn.Sequential)


def test_registered_text_models_may_want_the_vocabulary_or_not(registered):
    @register_model("own-text", kind="text")
    def own_text(shape, vocabulary):
        return nn.Sequential(nn.Embedding(vocabulary, 3), nn.Flatten()), 3 * shape[0]

    register_model("own-length", kind="text")(lambda classes: nn.Embedding(50, classes))
    assert build("own-text", 4, (5,), vocabulary=20)(torch.full((2, 5), 19)).shape == (2, 4)
    assert isinstance(build("own-length", 4, (5,), vocabulary=20), nn.Embedding)
    with pytest.raises(ConfigError, match="'own-text' needs vocabulary"):
        build("own-text", 4, (5,))


def test_registering_again_replaces_ones_own_only(registered):
    register_model("own-net")(WithFc)
    register_model("own-net")(lambda classes: sequential(classes))
    assert isinstance(build("own-net", 5, SHAPE), nn.Sequential)
    with pytest.raises(ConfigError, match="'resnet20' is taken by solera"):
        register_model("resnet20")(WithFc)


def test_registered_builder_that_returns_no_model(registered):
    register_model("own-net")(lambda classes: "weights")
    with pytest.raises(ConfigError, match="builder of model 'own-net' returns a str"):
        build("own-net", 5, SHAPE)


@pytest.mark.parametrize("make", [sequential, WithFc, Functional])
def test_check_output_accepts_models_and_builders(make):
    check_output(make(), SHAPE, 4)
    check_output(make, SHAPE, 4)


def test_check_output_of_text_and_vectors():
    check_output(build("lstm", 2, (7,), vocabulary=9), (7,), 2)
    check_output(build("mlp", 3, (2,)), (2,), 3, tokens=False)


def test_check_output_changes_nothing():
    class Counting(WithFc):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x):
            self.calls += 1
            return super().forward(x + torch.rand(1))

    torch.manual_seed(0)
    model = Counting().train()
    model.encoder[1].eval()  # a frozen BatchNorm stays frozen
    before = {key: value.clone() for key, value in model.state_dict().items()}
    whole = sequential()
    state = torch.get_rng_state()
    check_output(model, SHAPE, 4)
    check_output(WithFc, SHAPE, 4)
    wrap(whole, "3", head="plain", shape=SHAPE)
    assert torch.get_rng_state().equal(state)
    assert all(value.equal(model.state_dict()[key]) for key, value in before.items())
    assert model.training
    assert model.fc.training
    assert not model.encoder[1].training


class Fails(nn.Module):
    def forward(self, x):
        raise KeyError("mask")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            sequential(7),
            r"'mine' returns logits of shape \[n, 7\] for inputs of shape \(1, 8, 8\).*\[n, 4\].*4 outputs",
        ),
        (nn.Conv2d(1, 4, 3), r"shape \[n, 4, 6, 6\]"),
        (nn.Sequential(nn.Flatten(0), nn.Linear(128, 4)), r"shape \[4\]"),
        (
            nn.Linear(5, 4),
            r"'mine' fails on a batch of inputs of shape \(1, 8, 8\): RuntimeError.*choose another model",
        ),
        (Fails(), r"'mine' fails on a batch .* KeyError: 'mask'"),
        (nn.Sequential(nn.Flatten(), nn.RNN(64, 4)), "'mine' returns a tuple; its forward must return one tensor"),
        (nn.Sequential(nn.Flatten(), nn.LazyLinear(4)), r"'mine' has lazy layers \(1\.weight has no size yet\)"),
        (lambda: "no model", "model 'mine' is a str"),
    ],
)
def test_check_output_names_model_and_way_out(model, message):
    with pytest.raises(ConfigError, match=message):
        check_output(model, SHAPE, 4, name="mine")


def test_check_output_wants_floats():
    class Labels(nn.Module):
        def forward(self, x):
            return torch.zeros(len(x), 4, dtype=torch.int64)

    with pytest.raises(ConfigError, match=r"'Labels' returns torch\.int64 values"):
        check_output(Labels(), SHAPE, 4)
