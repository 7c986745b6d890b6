"""Every model of the zoo: shapes, norms, heads, pieces, initialisation."""

import copy

import pytest
import torch
from torch import nn

from solera.core.errors import ConfigError
from solera.models import MODELS, build, is_split, model_info

IMAGE = [name for name, info in MODELS.items() if info.kind == "image" and not info.own]
TEXT = [name for name, info in MODELS.items() if info.kind == "text" and not info.own and info.encoding is None]
NORMS = ("batch", "group", "none")
HEADS = ("plain", "shared", "projection")
SHAPES = [(1, 28, 28), (3, 32, 32), (3, 64, 64)]
BIG = ("resnet18", "resnet8-wide", "vgg9-fedma", "vgg11", "vgg19")  # on the meta device: shapes without arithmetic
SMALLEST = {
    "lenet5": 12,
    "mcmahan-cnn": 4,
    "fedet-cnn": 16,
    "alexnet-small": 15,
    "vgg9": 16,
    "vgg11": 16,
    "vgg19": 16,
}


def make(name, classes=10, shape=None, **options):
    """A zoo model on an input it takes."""
    if MODELS[name].kind == "text":
        options = {"vocabulary": 30, **options}
    return build(name, classes, shape or ((9,) if MODELS[name].kind == "text" else (3, 32, 32)), **options)


def inputs_for(name, batch=2, shape=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if MODELS[name].kind == "text":
        return torch.randint(1, 30, (batch, *(shape or (9,))), generator=generator)
    return torch.randn(batch, *(shape or (3, 32, 32)), generator=generator)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", IMAGE)
def test_shapes_of_all_norms_and_heads(name, shape):
    for norm in NORMS if MODELS[name].has_norm else ("none",):
        for head in HEADS:
            with torch.device("meta" if name in BIG else "cpu"), torch.no_grad():
                model = build(name, 7, shape, norm, head).eval()
                if head == "plain":  # the body is the same under every head
                    features = model.features(torch.zeros(2, *shape))
                representation = model.adapter(features)
                logits = model.head(representation)
            width = {"plain": model.feature_dim, "shared": 128, "projection": 256}[head]
            assert features.shape == (2, model.feature_dim), (norm, head)
            assert representation.shape == (2, width), (norm, head)
            assert logits.shape == (2, 7), (norm, head)


@pytest.mark.parametrize("head", HEADS)
def test_forward_is_the_three_pieces_in_a_row(head):
    model = make("resnet8", head=head).eval()
    x = inputs_for("resnet8")
    assert model.represent(x).equal(model.adapter(model.features(x)))
    assert model(x).equal(model.head(model.represent(x)))


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", TEXT)
def test_text_shapes(name, head):
    model = build(name, 4, (11,), head=head, vocabulary=20)
    tokens = torch.randint(0, 20, (3, 11))
    assert model(tokens).shape == (3, 4)
    assert model.features(tokens).shape == (3, model.feature_dim)


@pytest.mark.parametrize("name", IMAGE)
def test_images_need_not_be_square(name):
    with torch.device("meta"):
        assert build(name, 10, (3, 32, 48))(torch.empty(2, 3, 32, 48)).shape == (2, 10)


@pytest.mark.parametrize("name", [name for name in IMAGE if name != "mlp"])
def test_smallest_image_works_and_the_next_smaller_is_refused(name):
    side = SMALLEST.get(name, 8)
    with torch.device("meta"):
        assert build(name, 10, (1, side, side))(torch.empty(2, 1, side, side)).shape == (2, 10)
    with pytest.raises(ConfigError, match=rf"'{name}' needs images of at least {side}x{side} pixels, not \d+x\d+"):
        build(name, 10, (1, side, side - 1))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", IMAGE)
def test_norm_layers_are_the_ones_asked_for(name, norm):
    with torch.device("meta"):
        kinds = {type(m) for m in build(name, 10, (3, 32, 32), norm).modules()}
    has = MODELS[name].has_norm
    assert (nn.BatchNorm2d in kinds) == (norm == "batch" and has)
    assert (nn.GroupNorm in kinds) == (norm == "group" and has)


def test_which_models_have_norm_layers():
    without = {name for name in (*IMAGE, *TEXT) if not MODELS[name].has_norm}
    assert without == {
        *("mlp", "lenet5", "mcmahan-cnn", "fedet-cnn", "alexnet-small", "vgg9", "vgg9-fedma"),
        *("text-bag", "lstm", "transformer"),
    }


@pytest.mark.parametrize(
    ("name", "norm"),
    [(name, norm) for name in IMAGE for norm in (NORMS if MODELS[name].has_norm else ("none",))],
)
def test_one_training_step_reaches_every_parameter(name, norm):
    torch.manual_seed(0)
    shape = (1, 28, 28)
    model = build(name, 10, shape, norm)
    x = inputs_for(name, shape=shape)
    before = x.clone()
    logits = model(x)
    assert 1e-3 < logits.std() < 20  # neither dead nor exploded at the start
    nn.functional.cross_entropy(logits, torch.tensor([1, 2])).backward()
    missing = [key for key, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert missing == []
    assert x.equal(before)


@pytest.mark.parametrize("name", ["resnet56", "wrn16-2", "resnet18"])
def test_residual_models_without_norm_start_as_their_shortcuts(name):
    torch.manual_seed(0)
    model = make(name, norm="none")
    last = [m for key, m in model.named_modules() if key.endswith(".conv2")]
    assert last
    assert all(not m.weight.any() for m in last)
    assert model(inputs_for(name)).std() < 5


@pytest.mark.parametrize("name", [*IMAGE, *TEXT])
def test_pieces_and_names(name):
    model = make(name, head="shared")
    assert is_split(model)
    assert {key.split(".")[0] for key in model.state_dict()} == {"body", "adapter", "head"}
    plain = make(name)
    assert isinstance(plain.adapter, nn.Identity)
    assert isinstance(plain.head, nn.Linear)
    assert {key.split(".")[0] for key in plain.state_dict()} == {"body", "head"}


def test_shared_heads_have_one_shape():
    shapes = set()
    for name in [*IMAGE, *TEXT]:
        with torch.device("meta"):
            head = make(name, classes=5, head="shared").head
        shapes.add(tuple((key, tuple(value.shape)) for key, value in head.state_dict().items()))
    assert len(shapes) == 1


@pytest.mark.parametrize("name", [*IMAGE, *TEXT])
def test_copies_and_round_trips(name):
    torch.manual_seed(1)
    model = make(name, head="shared").eval()
    x = inputs_for(name)
    expected = model(x)
    twin = copy.deepcopy(model)
    assert twin(x).equal(expected)
    torch.manual_seed(2)
    other = make(name, head="shared").eval()
    assert not other(x).equal(expected)
    other.load_state_dict(model.state_dict())
    assert other(x).equal(expected)
    next(twin.parameters()).data.add_(1)
    assert model(x).equal(expected)


@pytest.mark.parametrize("name", [name for name in [*IMAGE, *TEXT] if name not in ("vgg11", "vgg19", "resnet18")])
def test_initialisation_depends_on_torchs_seed_only(name):
    torch.manual_seed(3)
    first = make(name, head="shared").state_dict()
    torch.manual_seed(3)
    second = make(name, head="shared").state_dict()
    third = make(name, head="shared").state_dict()
    assert all(first[key].equal(second[key]) for key in first)
    assert any(not first[key].equal(third[key]) for key in first)


@pytest.mark.parametrize("name", ["resnet20", "shufflenetv2", "lstm"])
def test_weights_load_into_a_model_made_without_memory(name):
    torch.manual_seed(0)
    model = make(name).eval()
    with torch.device("meta"):
        empty = make(name)
    empty.load_state_dict(model.state_dict(), assign=True)
    assert empty.eval()(inputs_for(name)).equal(model(inputs_for(name)))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mlp", {"dropout": 0.5}),
        ("alexnet-small", {}),
        ("vgg9", {"dropout": 0.5}),
        ("vgg9", {"dropout": 0.5, "hidden": [64]}),
        ("wrn16-2", {"dropout": 0.5, "norm": "group"}),
        ("lstm", {"dropout": 0.5}),
    ],
)
def test_dropout_acts_in_training_only(name, options):
    torch.manual_seed(0)
    model = make(name, **options)
    x = inputs_for(name)
    assert not model(x).equal(model(x))
    model.eval()
    assert model(x).equal(model(x))


def test_only_alexnet_drops_out_unless_asked():
    def rates(name):
        with torch.device("meta"):
            return {m.p for m in make(name).modules() if isinstance(m, nn.Dropout)} - {0.0}

    assert {name for name in [*IMAGE, *TEXT] if rates(name)} == {"alexnet-small"}


def test_text_bag_is_the_mean_of_the_real_tokens():
    model = build("text-bag", 2, (4,), vocabulary=10, embedding=3)
    table = model.body.embedding.weight
    features = model.features(torch.tensor([[4, 7, 0, 0], [0, 0, 0, 0], [1, 2, 3, 4]]))
    expected = torch.stack([table[[4, 7]].mean(0), torch.zeros(3), table[1:5].mean(0)])
    torch.testing.assert_close(features, expected)


def test_text_bag_without_padding_counts_token_zero():
    model = build("text-bag", 2, (2,), vocabulary=10, embedding=3, padding=None)
    torch.testing.assert_close(model.features(torch.tensor([[0, 5]]))[0], model.body.embedding.weight[[0, 5]].mean(0))


def test_lstm_ignores_padding_behind_the_text():
    model = build("lstm", 2, (6,), vocabulary=10).eval()
    padded = model.features(torch.tensor([[3, 1, 4, 0, 0, 0], [3, 1, 4, 1, 5, 9], [0, 0, 0, 0, 0, 0]]))
    bare = model.features(torch.tensor([[3, 1, 4]]))
    torch.testing.assert_close(padded[0], bare[0])
    assert not torch.allclose(padded[1], bare[0])
    assert padded.isfinite().all()


def test_group_count_is_an_option():
    with torch.device("meta"):
        model = build("resnet8", 10, (3, 32, 32), "group", groups=8)
        groups = {m.num_groups for m in model.modules() if isinstance(m, nn.GroupNorm)}
    assert groups == {8}
    with pytest.raises(ConfigError, match="groups = 4 does not divide the 58 channels"):
        build("shufflenetv2", 10, (3, 32, 32), "group", groups=4)
    with pytest.raises(ConfigError, match="groups = 0 is not a positive"):
        build("resnet8", 10, (3, 32, 32), "group", groups=0)


def test_mlp_takes_any_shape_and_any_depth():
    assert build("mlp", 3, (2,), hidden=[16, 16])(torch.zeros(5, 2)).shape == (5, 3)
    linear = build("mlp", 10, (1, 28, 28), hidden=[])
    assert linear.feature_dim == 784
    assert sum(p.numel() for p in linear.parameters()) == 7850


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("resnet20", 10, (32,)), {}, r"'resnet20' takes images of shape .* not \(32,\).*text-bag"),
        (("lstm", 2, (3, 32, 32)), {"vocabulary": 9}, r"'lstm' takes token sequences .* not \(3, 32, 32\)"),
        (("lstm", 2, (8,)), {}, "'lstm' needs vocabulary, the number of token ids"),
        (
            ("resnet20", 2, (8,)),
            {"vocabulary": 9},
            "'resnet20' takes images, but the task is text; .*'text-bag', 'lstm'",
        ),
        (("text-bag", 2, (8,)), {"vocabulary": 0}, "vocabulary = 0 is not a positive whole number"),
        (("text-bag", 2, (8,)), {"vocabulary": 5, "padding": 5}, "padding = 5 is not a token id below vocabulary = 5"),
        (("lstm", 2, (8,)), {"vocabulary": 5, "layers": 1, "dropout": 0.1}, "dropout = 0.1 acts between layers"),
        (("lstm", 2, (8,)), {"vocabulary": 5, "hidden": 0}, "hidden = 0 is not a positive"),
        (("resnet20", 1, (3, 32, 32)), {}, "classes = 1 must be"),
        (("resnet20", 10, (3, 0, 32)), {}, r"shape = \(3, 0, 32\) must be positive"),
        (("resnet20", 10, ()), {}, r"shape = \(\) must be positive"),
        (("resnet20", 10, (3, 32, 32), "layer"), {}, "norm = 'layer' is unknown; choose one of batch, group, none"),
        (("resnet20", 10, (3, 32, 32), "batch", "big"), {}, "head = 'big' is unknown; choose one of plain, shared"),
        (("resnet18", 10, (3, 32, 32)), {"stem": "tiny"}, "stem = 'tiny' is unknown"),
        (("shufflenetv2", 10, (3, 32, 32)), {"width": 3}, "width = 3 is unknown"),
        (("mlp", 10, (1, 28, 28)), {"hidden": 200}, "hidden = 200 is not a list"),
        (("mlp", 10, (1, 28, 28)), {"hidden": [200, -1]}, "hidden = -1 is not a positive"),
        (("mlp", 10, (1, 28, 28)), {"dropout": 1.0}, "dropout = 1.0 must be at least 0 and below 1"),
        (("fedet-cnn", 10, (3, 32, 32)), {"channels": [3]}, r"channels = \[3\] must have 2 entries"),
        (("mlp", 10, (1, 28, 28)), {"hiden": [3]}, "no option 'hiden'; did you mean 'hidden'"),
        (("resnet20", 10, (3, 32, 32)), {"depth": 3}, "no option 'depth'; it has no options"),
        (
            ("resnet20", 10, (3, 32, 32)),
            {"representation": 64},
            "representation = 64 has no effect with head = 'plain'",
        ),
        (("resnet20", 10, (3, 32, 32)), {"head_hidden": 0}, "head_hidden = 0 has no effect with head = 'plain'"),
        (("resnet-20", 10, (3, 32, 32)), {}, "model 'resnet-20' is not known; did you mean 'resnet20'"),
        (("qqqq", 10, (3, 32, 32)), {}, "model 'qqqq' is not known; known names: .*resnet20"),
    ],
)
def test_mistakes_are_named(arguments, options, message):
    with pytest.raises(ConfigError, match=message):
        build(*arguments, **options)


def test_listing():
    info = model_info("resnet20")
    assert (info.name, info.kind, info.own) == ("resnet20", "image", False)
    assert all(i.title and i.source and i.notes and i.name == name for name, i in MODELS.items() if not i.own)
    assert model_info("alexnet-small").options == {"hidden": (512, 512), "dropout": 0.5}
    assert list(model_info("text-bag").options) == ["embedding", "padding"]
