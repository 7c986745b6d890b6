"""Image transformations against numbers from elsewhere: by hand, colorsys, Pillow."""

import colorsys

import numpy as np
import pytest
import torch

from solera.core.errors import DataError
from solera.data import transforms as T
from solera.data.partition import torch_rng
from solera.data.transforms import augmented

Image = pytest.importorskip("PIL.Image")
ImageEnhance = pytest.importorskip("PIL.ImageEnhance")
ALL = ["crop", "flip", "jitter", "gray"]


def pictures(n=4, channels=3, size=16, seed=0):
    g = torch.Generator().manual_seed(seed)
    coarse = torch.rand(n, channels, 4, 4, generator=g)
    return torch.nn.functional.interpolate(coarse, size=(size, size), mode="nearest")


def as_pil(image):
    return Image.fromarray(T.to_bytes(image).permute(1, 2, 0).numpy())


def of_pil(image):
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() / 255


def test_bytes_and_unit_values_round_trip():
    levels = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    assert torch.equal(T.to_bytes(T.to_unit(levels)), levels)
    assert T.to_bytes(torch.tensor([-0.5, 0.5, 2.0])).tolist() == [0, 128, 255]


def test_normalise_by_hand():
    image = torch.tensor([255, 51], dtype=torch.uint8).reshape(1, 2, 1, 1)
    out = T.normalise(image, (0.5, 0.2), (0.25, 2.0))
    assert torch.allclose(out.flatten(), torch.tensor([2.0, 0.0]))
    tokens = torch.tensor([[3, 1]])
    assert T.normalise(tokens, (), ()) is tokens


@pytest.mark.parametrize("size", [(7, 5), (16, 16), (40, 33)])
def test_resizing_a_constant_image_keeps_the_constant(size):
    out = T.resize(torch.full((2, 3, 16, 16), 77, dtype=torch.uint8), *size)
    assert out.shape == (2, 3, *size)
    assert out.dtype == torch.uint8
    assert out.unique().tolist() == [77]


@pytest.mark.parametrize("size", [8, 11, 32])
def test_resize_agrees_with_pillow(size):
    image = T.to_bytes(pictures(1)[0])
    theirs = Image.fromarray(image.permute(1, 2, 0).numpy()).resize((size, size), Image.Resampling.BILINEAR)
    ours = T.resize(image[None], size, size)[0].permute(1, 2, 0).numpy()
    assert np.abs(ours.astype(int) - np.asarray(theirs).astype(int)).max() <= 1


def test_channels_convert_by_brightness_and_by_repetition():
    primary = torch.tensor([[255, 0, 0], [0, 255, 0], [0, 0, 255]], dtype=torch.uint8).reshape(3, 3, 1, 1)
    assert T.to_channels(primary, 1).flatten().tolist() == [76, 150, 29]  # 255 * (.299, .587, .114)
    gray = torch.tensor([9], dtype=torch.uint8).reshape(1, 1, 1, 1)
    assert T.to_channels(gray, 3).flatten().tolist() == [9, 9, 9]
    with pytest.raises(DataError, match="4 channels cannot become 3-channel"):
        T.to_channels(torch.zeros(1, 4, 2, 2), 3)


def test_to_shape_works_in_chunks_of_any_number():
    images = T.to_bytes(pictures(5)).repeat(300, 1, 1, 1)
    out = T.to_shape(images, (1, 8, 8))
    assert out.shape == (1500, 1, 8, 8)
    assert torch.equal(out[:5], out[1495:])


def test_crop_by_hand():
    image = torch.arange(1.0, 10).reshape(1, 1, 3, 3).expand(3, 1, 3, 3)
    out = T.windows(image, torch.tensor([1, 0, 2]), torch.tensor([1, 0, 1]), padding=1)
    assert out[0, 0].tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert out[1, 0].tolist() == [[0, 0, 0], [0, 1, 2], [0, 4, 5]]
    assert out[2, 0].tolist() == [[4, 5, 6], [7, 8, 9], [0, 0, 0]]


@pytest.mark.parametrize("turn", [-0.2, -0.05, 0.0, 0.13, 0.5, 1.0])
def test_hue_turns_like_colorsys(turn):
    images = torch.rand(2, 3, 5, 5, generator=torch.Generator().manual_seed(1))
    images[0, :, 0, 0] = 0.4  # a gray pixel has no hue
    images[0, :, 0, 1] = torch.tensor([0.0, 0.7, 0.7])
    out = T.adjust_hue(images, torch.tensor([turn, turn]))
    for pixel, got in zip(
        images.permute(0, 2, 3, 1).reshape(-1, 3), out.permute(0, 2, 3, 1).reshape(-1, 3), strict=True
    ):
        h, s, v = colorsys.rgb_to_hsv(*pixel.tolist())
        assert got.tolist() == pytest.approx(colorsys.hsv_to_rgb((h + turn) % 1, s, v), abs=1e-5)


@pytest.mark.parametrize("factor", [0.2, 0.7, 1.0, 1.8])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("adjust_brightness", "Brightness"), ("adjust_contrast", "Contrast"), ("adjust_saturation", "Color")],
)
def test_adjustments_agree_with_pillow(ours, theirs, factor):
    images = pictures(3)
    out = getattr(T, ours)(images, torch.full((3,), factor))
    for image, got in zip(images, out, strict=True):
        expected = of_pil(getattr(ImageEnhance, theirs)(as_pil(image)).enhance(factor))
        assert float((got - expected).abs().max()) < 3 / 255  # Pillow rounds to whole levels on the way


def test_adjustments_are_per_sample():
    images = pictures(2)
    out = T.adjust_brightness(images, torch.tensor([1.0, 0.5]))
    assert torch.equal(out[0], images[0])
    assert torch.allclose(out[1], images[1] / 2)


def test_jitter_with_no_strength_changes_nothing():
    images = pictures(20)
    out = T.color_jitter(images, torch_rng(0), 0, 0, 0, 0)
    assert torch.allclose(out, images, atol=1e-6)


def test_jitter_turns_the_hue_evenly_both_ways_and_nothing_else():
    muted = torch.tensor([0.3, 0.2, 0.2])  # hue 0, a third saturated
    out = T.color_jitter(muted[None, :, None, None].repeat(2000, 1, 1, 1), torch_rng(5), 0, 0, 0, 0.2)
    hue, saturation, value = zip(*(colorsys.rgb_to_hsv(*pixel) for pixel in out[:, :, 0, 0].tolist()), strict=True)
    assert np.allclose(saturation, 1 / 3, atol=1e-5)
    assert np.allclose(value, 0.3, atol=1e-5)
    turn = (np.array(hue) + 0.5) % 1 - 0.5
    assert turn.min() == pytest.approx(-0.2, abs=0.005)
    assert turn.max() == pytest.approx(0.2, abs=0.005)
    assert turn.std() == pytest.approx(0.4 / 12**0.5, rel=0.05)  # uniform in [-0.2, 0.2]


def test_augment_turns_the_hue_by_up_to_a_fifth():
    """Of images that nothing clips, the hue is changed by the turn alone; the middle is no padding."""
    dark = torch.tensor([0.15, 0.1, 0.1])
    out = augmented(dark[None, :, None, None].repeat(3000, 1, 16, 16), ALL, torch_rng(6))[:, :, 8, 8]
    coloured = out[out.amax(1) - out.amin(1) > 1e-3]
    assert len(coloured) == pytest.approx(0.8 * 3000, rel=0.05)  # a fifth is gray
    turn = np.array([(colorsys.rgb_to_hsv(*pixel)[0] + 0.5) % 1 - 0.5 for pixel in coloured.tolist()])
    assert np.abs(turn).max() == pytest.approx(0.2, abs=0.005)
    turned = turn[np.abs(turn) > 1e-4]
    assert len(turned) == pytest.approx(0.8 * len(coloured), rel=0.05)
    assert turned.std() == pytest.approx(0.4 / 12**0.5, rel=0.05)


def test_jitter_applies_its_steps_in_different_orders():
    # Brightness (doubling, clipped) and contrast do not commute; with one image repeated and fixed strengths the only
    # difference between samples that drew alike is the order, so compare with all orders of the drawn numbers.
    images = pictures(1).expand(200, -1, -1, -1)
    out = T.color_jitter(images, torch_rng(3), 0.8, 0.8, 0, 0)
    rng = torch_rng(3)
    brightness, contrast = (0.2 + 1.6 * torch.rand(200, generator=rng) for _ in range(2))
    one = T.adjust_contrast(T.adjust_brightness(images, brightness), contrast)
    two = T.adjust_brightness(T.adjust_contrast(images, contrast), brightness)
    is_one = (out - one).abs().amax((1, 2, 3)) < 1e-5
    is_two = (out - two).abs().amax((1, 2, 3)) < 1e-5
    assert bool((is_one | is_two).all())
    assert int((~is_one).sum()) > 40
    assert int((~is_two).sum()) > 40


def test_augment_is_decided_by_its_generator_and_stays_in_range():
    images = pictures(64)
    before = torch.random.get_rng_state()
    first, again, other = (augmented(images, ALL, torch_rng(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.random.get_rng_state())
    assert float(first.min()) >= 0
    assert float(first.max()) <= 1
    assert first.shape == images.shape
    same = augmented(images[:1].expand(64, -1, -1, -1), ALL, torch_rng(1))
    assert len({row.numpy().tobytes() for row in same}) > 50  # every sample has its own draw


def test_augment_has_the_stated_probabilities():
    n = 6000
    colour = torch.tensor([0.3, 0.15, 0.3])  # dark enough never to be clipped to white
    image = torch.zeros(1, 3, 8, 24)
    image[..., 12:] = colour[:, None, None]  # the crop moves it by at most 4, so its half tells a flip
    out = augmented(image.expand(n, -1, -1, -1), ALL, torch_rng(0))
    gray = (out - out[:, :1]).abs().amax((1, 2, 3)) < 1e-6
    assert abs(float(gray.float().mean()) - 0.2) < 0.02
    flipped = out[..., :12].sum((1, 2, 3)) > out[..., 12:].sum((1, 2, 3))
    assert abs(float(flipped.float().mean()) - 0.5) < 0.02
    untouched = (out.amax((2, 3)) - colour).abs().amax(1) < 1e-6
    assert abs(float(untouched.float().mean()) - 0.8 * 0.2) < 0.02  # neither gray nor jittered


def test_augment_of_gray_images_changes_brightness_and_place_only():
    images = pictures(200, channels=1, size=8)
    out = augmented(images, ALL, torch_rng(0))
    assert out.shape == images.shape
    assert not torch.equal(out, images)
    # Saturation and hue do nothing to gray images, whatever was drawn.
    assert torch.equal(T.adjust_hue(images, torch.rand(200)), images)
    assert torch.allclose(T.adjust_saturation(images, torch.rand(200)), images)
