"""Seeds by address, and threads that keep the bits."""

import random
import threading

import numpy as np
import pytest
import torch
from torch import nn

from solera.core.randomness import Parallel, Watch, fingerprint, isolated, seed_from


def test_a_seed_depends_on_its_key_and_nothing_else():
    assert seed_from(1, "a", 2) == seed_from(1, "a", 2)
    keys = [(s, r, k, p) for s in range(3) for r in range(3) for k in ("c0", "c1") for p in ("task", "sample")]
    assert len({seed_from(*k) for k in keys}) == len(keys)
    assert 0 <= seed_from("x") < 2**63


def test_isolated_seeds_all_global_generators_and_puts_them_back():
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    before = fingerprint()
    with isolated(11):
        first = (torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random())
    assert fingerprint() == before
    torch.rand(1)
    with isolated(11):
        assert (torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()) == first


def test_fingerprint_shows_every_kind_of_draw():
    for draw in (lambda: torch.rand(1), lambda: np.random.rand(), lambda: random.random(), lambda: torch.randperm(3)):
        before = fingerprint()
        draw()
        assert fingerprint() != before
    before = fingerprint()
    torch.rand(3, generator=torch.Generator().manual_seed(1))
    assert fingerprint() == before


def _train(seed: int, dropout: float):
    def job():
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(64, 8, generator=g)
        layer = torch.randn(8, 8, generator=g)
        for _ in range(20):
            layer = layer - 0.01 * x.T @ nn.functional.dropout(x @ layer, dropout, training=dropout > 0)
        return layer

    return job


def test_parallel_has_the_bits_of_serial_with_and_without_dropout():
    for dropout in (0.0, 0.5):
        jobs = [_train(i, dropout) for i in range(6)]
        serial, threads = Parallel(1)(jobs, range(6)), Parallel(2)
        for _ in range(2):
            assert all(torch.equal(a, b) for a, b in zip(threads(jobs, range(6)), serial, strict=True))
        assert threads.alone == (dropout > 0)


def test_jobs_that_seed_the_generators_and_end_in_any_order_leave_later_work_parallel():
    one_in, two_in, one_out = threading.Event(), threading.Event(), threading.Event()

    def one():
        with isolated(1):
            one_in.set()
            two_in.wait(5)
        one_out.set()

    def two():
        one_in.wait(5)
        with isolated(2):
            two_in.set()
            one_out.wait(5)

    before = fingerprint()
    Parallel(2)([one, two], range(2))
    assert fingerprint() == before
    assert Watch().clean()


def test_parallel_work_has_as_many_torch_threads_as_its_caller():
    for threads in (2, 1):
        torch.set_num_threads(threads)
        assert Parallel(2)([torch.get_num_threads] * 3, range(3)) == [threads] * 3
        assert torch.get_num_threads() == threads


def test_what_ends_one_job_is_not_kept_waiting_for_the_others():
    def interrupted():
        raise KeyboardInterrupt

    told, ended = threading.Event(), threading.Event()

    def other():
        told.wait(60)
        ended.set()

    with pytest.raises(KeyboardInterrupt):
        Parallel(2)([interrupted, other], range(2))
    assert not ended.is_set(), "the other job was waited for"
    told.set()


def test_a_job_may_have_jobs_of_its_own():
    def nested(parallel):
        def outer(i):
            return lambda: torch.stack(parallel([_train(10 * i + j, 0.5 * (i == 2)) for j in range(2)], range(2)))

        return parallel([outer(i) for i in range(3)], range(3))

    done = []
    run = threading.Thread(target=lambda: done.extend(nested(Parallel(2))), daemon=True)
    run.start()
    run.join(20)
    assert not run.is_alive(), "the inner jobs wait for the outer ones"
    assert all(torch.equal(a, b) for a, b in zip(done, nested(Parallel(1)), strict=True))
