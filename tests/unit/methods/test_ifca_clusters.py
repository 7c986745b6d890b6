"""IFCA's choice of a cluster."""

import math

from solera.methods.ifca import lowest


def test_ifca1():
    assert [lowest(row) for row in ((0.9, 0.3), (0.2, 0.8), (0.5, 0.5))] == [1, 0, 0]


def test_a_loss_that_is_not_a_number_is_never_the_lowest():
    assert lowest([math.nan, 3.0]) == 1
    assert lowest([math.nan, math.inf]) == 0
