"""One torch thread in every test: their number changes the bits, and tests run beside each other."""

import pathlib

import pytest
import torch


@pytest.fixture(autouse=True)
def one_torch_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared_data() -> pathlib.Path:
    """Samples of the papers' data sets, beside the project where developers have them."""
    folder = pathlib.Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("needs the developers' data samples in ../shared/data")
    return folder
