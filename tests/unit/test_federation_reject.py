"""A reply that the method cannot use leaves its client as it was; and every task has a seed of its own."""

import itertools

from solera.core.task import Data
from solera.methods.fd import train_and_report
from solera.methods.fedavg import FedAvg
from solera.train.fitting import Local
from toys import World, images, kept_by, mlp, same_bits

LOCAL = Local(epochs=1, batch=8, lr=0.05)


def world(tmp) -> World:
    return World(tmp, {"m": lambda: mlp(1)}, [("m", Data(*images(n, n))) for n in (6, 9, 7)])


def trained(place: World, t: int):
    place.fed.begin(t)
    how = {"local": LOCAL, "gamma": 0.0, "final_pass": False, "classes": 4}
    return place.fed.map(train_and_report, list(place.fed.clients), **how)


def test_a_rejected_client_has_its_state_of_before(tmp_path):
    place = world(tmp_path)
    place.fed.ledger = {}
    place.fed.begin(0)
    replies = trained(place, 0)
    place.fed.reject(replies, "c1", "of no use")
    assert set(place.fed.ledger) == {"c0", "c2"}  # it had none
    assert set(replies) == {"c0", "c2"} == place.fed.answered

    trained(place, 1)
    before, ledger = {k: kept_by(place.fed, k)["model"] for k in place.fed.clients}, dict(place.fed.ledger)
    replies = trained(place, 2)
    place.fed.reject(replies, "c1", "of no use")
    assert place.fed.ledger["c1"] == ledger["c1"]
    assert same_bits(kept_by(place.fed, "c1")["model"], before["c1"])
    assert place.fed.ledger["c0"] != ledger["c0"]
    assert not same_bits(kept_by(place.fed, "c0")["model"], before["c0"])


def test_no_two_tasks_of_a_run_have_one_seed(tmp_path):
    """Of any client, round or exchange; and the same run again has the same seeds."""
    runs = []
    for name in ("a", "b"):
        place = world(tmp_path / name)
        place.run(FedAvg(LOCAL), 3)
        trained(place, 3)
        trained(place, 4)
        runs.append(place.seeds)
    assert runs[0] == runs[1]
    assert len(runs[0]) == 3 * 5
    assert all(a != b for a, b in itertools.combinations(runs[0], 2))
