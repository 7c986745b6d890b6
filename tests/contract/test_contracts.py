"""Every registered method and every engine keeps its contract; a new one is picked up by being registered."""

import pytest

import solera.methods  # noqa: F401  (registers them)
from solera.engines import ENGINES, EngineConfig, InProcess, Processes, Threads
from solera.engines.faulty import Faulty
from solera.method import METHODS
from solera.testing import check_engine, check_method


@pytest.mark.parametrize("name", sorted(METHODS))
def test_method(name, tmp_path):
    check_method(name, tmp_path)


ON_THIS_MACHINE = sorted(name for name, settings in ENGINES.items() if settings is EngineConfig)


@pytest.mark.parametrize("name", ON_THIS_MACHINE)  # Ray: test_on_ray.py; Flower: unit/deploy
def test_engine(name, tmp_path):
    check_engine(EngineConfig(name, 2).open, tmp_path)


@pytest.mark.parametrize("workers", [1, 3])
def test_engines_with_another_number_of_workers(workers, tmp_path):
    for i, kind in enumerate((Threads, Processes)):
        check_engine(lambda site, states, kind=kind: kind(site, states, workers), tmp_path / str(i))


def test_an_engine_that_repeats_and_reorders_replies_changes_nothing(tmp_path):
    check_engine(lambda site, states: Faulty(InProcess(site, states), lambda c: "duplicate", True), tmp_path)


def test_the_contract_can_fail(tmp_path):
    """An engine that loses a reply does not pass."""
    with pytest.raises(AssertionError):
        check_engine(
            lambda site, states: Faulty(InProcess(site, states), lambda c: "drop" if c.client == "c03" else None),
            tmp_path,
        )
