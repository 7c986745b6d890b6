"""FedFomo's rate and its exploration fall from the second round on: the first has them as they are set."""

import pytest

from cohorts import Federated, settings
from solera.methods import fedfomo


def test_rate_and_epsilon_fall_from_the_second_round_on(tmp_path, monkeypatch):
    world = Federated(tmp_path, settings("fedfomo", lr_decay=0.5, epsilon=0.3, epsilon_decay=0.2))
    rates, shares = [], []
    ask, choose = world.fed.map, fedfomo.epsilon_greedy

    def asked(*args, **payload):
        rates.append(payload["local"].lr)
        return ask(*args, **payload)

    monkeypatch.setattr(world.fed, "map", asked)
    monkeypatch.setattr(fedfomo, "epsilon_greedy", lambda s, m, e, g: shares.append(e) or choose(s, m, e, g))
    world.play(3)
    assert rates == pytest.approx([0.1, 0.05, 0.025])
    assert shares == pytest.approx([0.3] * 5 + [0.1] * 5 + [0.0] * 5)
