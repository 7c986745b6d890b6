"""Helpers of the data tests."""

from pathlib import Path

import pytest
import torch

from solera.data import Dataset, from_tensors

SHARED = Path(__file__).resolve().parents[3].parent / "shared" / "data"


@pytest.fixture
def shared():
    """Returns a sample folder of a published set, or skips the test."""

    def folder(name):
        if not (SHARED / name).is_dir():
            pytest.skip(f"the development samples (../shared/data/{name} beside the repository) are absent")
        return SHARED / name

    return folder


@pytest.fixture
def colour_task() -> Dataset:
    """A small task of colour images with its own constants."""
    g = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (60, 3, 12, 12), generator=g, dtype=torch.uint8)
    labels = torch.arange(60) % 6
    return from_tensors(
        (images[:48], labels[:48]), (images[48:], labels[48:]), mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.5), name="toy"
    )
