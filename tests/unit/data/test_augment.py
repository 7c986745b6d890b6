"""Augmentation against loops over single samples, where its random numbers come from, and what is refused."""

import pytest
import torch

from solera import Scenario
from solera.core.errors import ConfigError, DataError
from solera.data import PartitionConfig, PublicConfig, from_tensors
from solera.data.partition import torch_rng
from solera.data.transforms import augmented, drawn_anew
from solera.models.factory import ModelsConfig
from solera.runs.config import load_config

NAMED = ["crop", "flip"]


def pictures(n=30, channels=3, height=9, width=7, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, channels, height, width), generator=g, dtype=torch.uint8)


def naive_crop(image, top, left):
    """One image [C, H, W], pixel by pixel: black outside of it."""
    channels, height, width = image.shape
    out = torch.zeros_like(image)
    for c in range(channels):
        for row in range(height):
            for column in range(width):
                r, k = row + top - 4, column + left - 4
                if 0 <= r < height and 0 <= k < width:
                    out[c, row, column] = image[c, r, k]
    return out


def naive_flip(image):
    return torch.tensor([[line[::-1] for line in plane] for plane in image.tolist()])


def test_crop_and_flip_are_those_of_a_loop_over_samples():
    images = pictures(12, channels=2)
    rng = torch_rng(3)
    top, left = torch.randint(0, 9, (2, 12), generator=rng).tolist()
    flipped = (torch.rand(12, generator=rng) < 0.5).tolist()
    assert len(set(zip(top, left, strict=True))) > 8
    assert 2 < sum(flipped) < 10
    expected = []
    for image, t, k, turned in zip(images.float() / 255, top, left, flipped, strict=True):
        cut = naive_crop(image, t, k)
        expected.append(naive_flip(cut) if turned else cut)
    assert torch.equal(augmented(images, NAMED, torch_rng(3)), torch.stack(expected))


def test_every_window_is_drawn_and_half_are_flipped():
    images = torch.zeros(4000, 1, 9, 9)
    images[:, :, 4, 4] = 1.0  # where it ends up tells the window
    out = augmented(images, ["crop"], torch_rng(0))
    where = out.flatten(1).argmax(1).bincount(minlength=81)
    assert int(where.min()) > 20  # 4000 / 81 is 49
    left = torch.zeros(4000, 1, 2, 2)
    left[..., 0] = 1.0
    turned = augmented(left, ["flip"], torch_rng(0))[:, 0, 0, 1].mean()
    assert float(turned) == pytest.approx(0.5, abs=0.03)


def test_steps_are_taken_in_their_order_and_other_generators_are_left_alone():
    def darker(batch, rng):
        assert batch.dtype == torch.float32
        assert 0 <= float(batch.min()) <= float(batch.max()) <= 1  # before normalisation
        return batch * torch.rand(len(batch), 1, 1, 1, generator=rng)

    images, before = pictures(), torch.random.get_rng_state()
    one, other = augmented(images, [darker, "crop"], torch_rng(1)), augmented(images, ["crop", darker], torch_rng(1))
    assert torch.equal(before, torch.random.get_rng_state())
    assert not torch.equal(one, other)
    rng = torch_rng(1)
    factor = torch.rand(30, 1, 1, 1, generator=rng)
    assert torch.equal(one, augmented(images.float() / 255 * factor, ["crop"], rng))


def test_samples_drawn_anew():
    task = from_tensors((pictures(), torch.arange(30) % 3), (pictures(), torch.arange(30) % 3))
    samples = drawn_anew(task.train.inputs, NAMED, task.prepare)
    rows = torch.tensor([4, 4, 29, 0])
    assert (len(samples), samples.fresh) == (30, True)
    assert torch.equal(samples[rows], task.prepare(task.train.inputs[rows]))
    assert torch.equal(samples.draw(rows, 5), samples.draw(rows, 5))
    assert not torch.equal(samples.draw(rows, 5), samples.draw(rows, 6))
    assert not torch.equal(samples.draw(rows, 5)[0], samples.draw(rows, 5)[1])  # each for itself
    expected = task.prepare(augmented(task.train.inputs[rows], NAMED, torch_rng(5, "augment")))
    assert torch.equal(samples.draw(rows, 5), expected)


def scenario(inputs, augment, **options):
    y = torch.arange(len(inputs)) % 3
    data = from_tensors((inputs, y), (inputs, y), name="mine", **options)
    model = "text-bag" if data.vocabulary else "mlp"
    return Scenario(data, [model], PartitionConfig(clients=2, kind="iid"), PublicConfig("none"), augment=augment)


def test_only_training_samples_of_clients_are_augmented():
    inputs = pictures(40)
    y = torch.arange(40) % 3
    data = from_tensors((inputs, y), (inputs, y))
    models = ModelsConfig(clients=["mlp"], server="mlp")
    split, public = PartitionConfig(clients=2, kind="iid"), PublicConfig(size=8)
    made = Scenario(data, models, split, public, augment=NAMED, client_test=0.25, validation=0.1)
    client = made.client("c00", 0, {})
    assert client.train.inputs.fresh
    assert len(client.train.inputs) == len(client.train.labels) == len(client.train)
    assert made.server.all_train.inputs.fresh
    for samples in (client.test.inputs, made.validation.inputs, made.test.inputs):
        assert isinstance(samples, torch.Tensor)
    assert not made.public.fresh
    assert isinstance(scenario(pictures(), []).client("c00", 0, {}).train.inputs, torch.Tensor)


@pytest.mark.parametrize(
    ("inputs", "steps", "message"),
    [
        (torch.randint(0, 9, (30, 6)), ["crop"], r"data\.augment = \['crop'\]: these steps need.* of mine are tokens"),
        (torch.randn(30, 6), ["flip"], r"data\.augment = \['flip'\]: these steps need.* of mine are vectors of shape"),
        (torch.randn(30, 3, 8, 8), ["crop"], r"data\.augment = \['crop'\]: these steps need float images in \[0, 1\]"),
        (pictures(channels=2), ["crop", "gray"], r"jitter and gray need .* 1 or 3 channels, and those of mine have 2"),
        (pictures(), ["crp"], r"data\.augment: there is no 'crp'; use crop, flip, jitter, gray"),
        (pictures(), [lambda batch: batch], r"data\.augment: .* cannot be called with \(samples, generator\)"),
    ],
)  # fmt: skip
def test_what_cannot_be_augmented_is_refused_before_any_work(inputs, steps, message):
    with pytest.raises(ConfigError, match=message):
        scenario(inputs, steps)


def test_functions_may_change_samples_of_any_kind_but_not_their_form():
    def noise(batch, rng):
        return batch + torch.randn(batch.shape, generator=rng)

    def swapped(batch, rng):
        return batch.flip(1)

    vectors, tokens = torch.randn(30, 6), torch.randint(0, 9, (30, 6))
    rows = torch.arange(5)
    train = scenario(vectors, [noise]).client("c00", 0, {}).train.inputs
    assert not torch.equal(train.draw(rows, 1), train[rows])
    train = scenario(tokens, [swapped]).client("c00", 0, {}).train.inputs
    assert torch.equal(train.draw(rows, 1), train[rows].flip(1))
    for wrong in (lambda batch, rng: batch[1:], lambda batch, rng: batch.double(), lambda batch, rng: None):
        with pytest.raises(DataError, match=r"augment: .*<lambda> returned .* it must keep both"):
            scenario(vectors, [wrong]).client("c00", 0, {}).train.inputs.draw(rows, 1)


def test_the_setting():
    tables = {"method": {"name": "fedavg"}, "data": {"augment": ["crop", "flip"]}}
    assert load_config(tables).data.augment == ["crop", "flip"]
    assert load_config("quickstart/fedavg", ['data.augment=["flip"]']).data.augment == ["flip"]
    with pytest.raises(ConfigError, match=r"data\.augment\[1\] = \"flop\": expected one of .*; did you mean 'flip'\?"):
        load_config(tables | {"data": {"augment": ["crop", "flop"]}})
    with pytest.raises(ConfigError, match=r"did you mean 'data\.augment'"):
        load_config({"method": {"name": "fedavg", "local": {"augment": ["crop"]}}})


def test_a_single_step_is_refused_with_the_list_that_is_meant():
    with pytest.raises(ConfigError, match=r'^public\.augment = "crop": expected a list of .*: write \["crop"\]$'):
        load_config({"method": {"name": "feddf"}, "public": {"augment": "crop"}})


def test_fresh_noise_is_another_at_each_draw():
    for shape, kind in (((30, 3, 9, 7), "uniform"), ((30, 3, 9, 7), "gauss"), ((30, 6), "uniform")):
        x = pictures() if len(shape) == 4 else torch.randn(shape)
        data = from_tensors((x, torch.arange(30) % 3), (x, torch.arange(30) % 3))
        configs = [PublicConfig("noise", size=20, noise=kind, fresh=fresh) for fresh in (False, True)]
        once, fresh = (Scenario(data, ["mlp"], PartitionConfig(clients=2), cfg).public for cfg in configs)
        rows = torch.arange(5)
        assert (once.fresh, fresh.fresh) == (False, True)
        assert torch.equal(once[rows], fresh[rows])
        assert torch.equal(once.draw(rows, 1), once[rows])
        assert torch.equal(fresh.draw(rows, 1), fresh.draw(rows, 1))
        assert not torch.equal(fresh.draw(rows, 1), fresh.draw(rows, 2))
        assert once.digest != fresh.digest
