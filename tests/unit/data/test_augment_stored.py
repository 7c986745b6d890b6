"""Without a step, stored samples stay as they are stored."""

import torch

from solera.data.transforms import augmented, flip


def test_stored_pixels_become_values_only_where_a_step_needs_them():
    pixels = torch.arange(2 * 3 * 2 * 2, dtype=torch.uint8).reshape(2, 3, 2, 2)
    assert augmented(pixels, [], torch.Generator()) is pixels
    values = augmented(pixels, [lambda batch, rng: batch], torch.Generator())
    torch.testing.assert_close(values, pixels / 255, rtol=0, atol=1e-6)
    assert flip(values, torch.Generator().manual_seed(0)).dtype == torch.float32
