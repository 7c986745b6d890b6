"""The flag that ends a run: who sees it, and that nobody else does."""

import os
import signal
import threading
import time

import pytest
import torch
from torch import nn

from solera.core.randomness import Parallel
from solera.core.stopping import Interrupted, check_stop, stoppable
from solera.train.fitting import Local, fit, logits_of

X, Y = torch.randn(64, 4), torch.zeros(64, dtype=torch.int64)
FOR_EVER = Local(epochs=10**7, batch=8)


def told_to_stop(number, after_s=0.3):
    """Send this process a signal in a moment."""
    threading.Timer(after_s, os.kill, (os.getpid(), number)).start()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, Interrupted), (signal.SIGINT, KeyboardInterrupt)])
def test_training_in_threads_ends_too(number, error):
    before = threading.active_count()
    told_to_stop(number)
    with pytest.raises(error), stoppable():
        Parallel(2)([lambda: fit(nn.Linear(4, 2), X, Y, FOR_EVER, 0)] * 2, range(2))
    while threading.active_count() > before:  # else the test's own time runs out
        time.sleep(0.01)


def test_answering_many_samples_ends_too():
    class Deaf(nn.Module):
        """What is raised here is swallowed, as in a destructor."""

        asked = 0

        def forward(self, x):
            self.asked += 1
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.01)
            except KeyboardInterrupt:
                pass
            return x

    model = Deaf()
    with pytest.raises(Interrupted, match="stopped by SIGTERM"), stoppable():
        logits_of(model, X, batch=1)
    assert model.asked == 1


def test_nobody_is_stopped_outside_or_afterwards():
    with pytest.raises(Interrupted), stoppable():
        os.kill(os.getpid(), signal.SIGTERM)
    check_stop()
    assert fit(nn.Linear(4, 2), X, Y, Local(epochs=1, batch=8), 0).steps == 8
    with stoppable():
        check_stop()


def test_the_programs_handlers_are_put_back_and_its_own_for_ctrl_c_is_kept():
    def own(*_):
        raise ZeroDivisionError

    before = signal.signal(signal.SIGINT, own)
    term = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(ZeroDivisionError), stoppable():
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGTERM) is term
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_run_in_another_thread_has_no_handlers_and_works():
    done = []

    def work():
        with stoppable():
            check_stop()
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done
