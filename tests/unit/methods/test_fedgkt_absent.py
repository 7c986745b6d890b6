"""FedGKT: what clients are taught that were absent or failed in the round before."""

import dataclasses

from cohorts import Federated, settings

METHOD = settings("fedgkt", server_rounds=[], server_epochs=[], server_hidden=8, server_layers=1)


def told(world: Federated) -> dict[str, int]:
    """How many of the tower's logits each client is sent, from now on."""
    rows: dict[str, int] = {}
    ask = world.fed.map

    def asked(task, clients, **payload):
        if "teacher" in payload:
            rows.update({k: len(payload["teacher"].of(k)) for k in clients})
        return ask(task, clients, **payload)

    world.fed.map = asked
    return rows


def go_on(world: Federated) -> None:
    world.fed.begin(len(world.states) - 1)
    world.server.begin()
    world.states.append(world.method.round(world.states[-1], world.fed, world.server))


def test_a_client_that_failed_is_taught_with_the_logits_of_its_last_upload(tmp_path):
    world = Federated(tmp_path, METHOD).play(1)
    data, world.data["c1"] = world.data["c1"], None
    go_on(world)
    assert [f["client"] for f in world.fed.failures] == ["c1"]
    world.data["c1"] = data
    rows = told(world)
    go_on(world)
    assert rows == {k: len(world.data[k]) for k in world.fed.clients}


def test_with_replacement_not_everybody_is_there_so_logits_are_made_on_the_fly(tmp_path):
    """The fraction is 1, but some are drawn twice and others not: no logits are kept, features are asked for anew."""
    world = Federated(tmp_path, METHOD)
    world.fed.config = dataclasses.replace(world.fed.config, sampling="size", replacement=True)
    world.play(2)
    assert world.fed.up["extract_features"].messages == len(world.fed.copies)
    assert world.states[-1].kept == {}
    everybody = Federated(tmp_path / "all", METHOD).play(2)
    assert "extract_features" not in everybody.fed.up
    assert set(everybody.states[-1].kept) == set(everybody.fed.clients)
