"""One torch thread in every test: their number changes the bits, and tests run beside each other."""

import pathlib
import signal

import pytest
import torch

# A shell starts what it puts in the background with SIGINT ignored, and programs started by the tests would inherit
# that: those that are to be interrupted would go on.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def state_home(tmp_path_factory):
    """The key that proves whose runs are (`runs/trust.py`): never the developer's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


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
