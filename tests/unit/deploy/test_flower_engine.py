"""The engine for Flower, on a grid inside this process: the contract of every engine, and what only a network does."""

import dataclasses
import json

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from grids import LocalGrid, LocalSite, error, in_a_flower_task, site_of  # noqa: F401
from solera.core.errors import ConfigError, SoleraError
from solera.core.federation import Federation
from solera.core.wire import Limits, WireError
from solera.deploy.flower import STYPE, Flower, FlowerConfig, Nodes, pack, unpack
from solera.engines import ClientStates, InProcess, engine_named
from solera.testing import check_engine, toy
from solera.testing.contracts import echo

pytestmark = pytest.mark.usefixtures("in_a_flower_task")
WEIGHTS = {"w": torch.arange(6.0)}


class Clock:
    """Time that passes when somebody sleeps."""

    def __init__(self):
        self.now, self.then = 1000.0, []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        for when, what in [t for t in self.then if t[0] <= self.now]:
            what()
            self.then.remove((when, what))


@pytest.fixture
def net(tmp_path):
    """Four clients of the toy federation, each a site with a folder of its own."""
    scenario, clock = toy(clients=4), Clock()
    grid = LocalGrid(LocalSite(k, tmp_path / k, scenario) for k in scenario.roster)

    def open_engine(**settings):
        config = FlowerConfig(**settings)
        nodes = Nodes(grid, site_of)
        return Flower(grid, nodes, config, "test", scenario.roster, clock=clock, sleep=clock.sleep)

    return grid, clock, open_engine, scenario


def asked(engine, **federation):
    from solera.core.federation import FederationConfig

    fed = Federation(engine, 3, FederationConfig(**federation))
    return fed, fed.map(echo, list(fed.clients), value=1.0, weights=WEIGHTS)


def expected(scenario, tmp_path):
    fed = Federation(InProcess(scenario, ClientStates(tmp_path / "reference")), 3)
    return fed, fed.map(echo, list(fed.clients), value=1.0, weights=WEIGHTS)


def test_it_is_an_engine_like_the_others(tmp_path):
    def open_engine(host, states):
        grid = LocalGrid(LocalSite(k, tmp_path / "sites" / k, host) for k in host.roster)
        return Flower(grid, Nodes(grid, site_of), FlowerConfig(), "test", host.roster)

    check_engine(open_engine, tmp_path)


def test_one_array_a_message_and_one_upload_for_equal_payloads(net):
    grid, _, open_engine, _ = net
    asked(open_engine())
    assert len(grid.sent) == 4
    for m in grid.sent:
        arrays = m.content["message"]
        assert list(arrays) == ["bytes"]
        assert arrays["bytes"].stype == STYPE
    assert [len(u) for u in grid.uploads] == [1], "four clients, one payload, one push"


def test_an_absent_site_is_waited_for_and_said_so(net, caplog, tmp_path):
    grid, clock, open_engine, scenario = net
    grid.offline = {"c02"}
    clock.then = [(1045.0, lambda: grid.offline.clear())]
    _, replies = asked(open_engine(wait_s=100))
    assert list(replies) == ["c00", "c01", "c02", "c03"]
    assert 1045 <= clock.now < 1048
    assert "c02 is not connected: waiting for it" in caplog.text
    assert torch.equal(replies["c02"].weights["w"], expected(scenario, tmp_path)[1]["c02"].weights["w"])


def test_an_absent_site_is_given_up_after_a_stated_time(net):
    grid, clock, open_engine, _ = net
    grid.offline = {"c02"}
    _, replies = asked(open_engine(wait_s=100))
    assert replies.failures == {"c02": "is not connected, 100 s long (engine.wait_s)"}
    assert 1100 <= clock.now < 1103


def test_an_absent_site_is_skipped_at_once_where_that_is_wanted(net):
    grid, clock, open_engine, _ = net
    grid.offline = {"c02"}
    _, replies = asked(open_engine(absent="skip"))
    assert replies.failures == {"c02": "is not connected; skipped, as engine.absent says"}
    assert clock.now < 1001


def test_a_site_that_goes_away_is_asked_again_and_gives_the_same_bits(net, tmp_path):
    grid, clock, open_engine, scenario = net

    def leave(message):
        grid.offline.add("c01")
        grid.faults.clear()
        clock.then = [(1030.0, lambda: grid.offline.clear())]
        return error(5, "Node Unavailable")(message)

    grid.faults["c01"] = leave
    fed, replies = asked(open_engine())
    reference, wanted = expected(scenario, tmp_path)
    assert {k: r.weights["w"].tolist() for k, r in replies.items()} == {
        k: r.weights["w"].tolist() for k, r in wanted.items()
    }
    assert fed.ledger == reference.ledger


def test_a_site_that_goes_away_costs_one_reply_where_absence_is_skipped(net):
    grid, _, open_engine, _ = net
    grid.faults["c01"] = error(5)
    _, replies = asked(open_engine(absent="skip"))
    assert replies.failures == {"c01": "it went away before it had answered"}


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (1, "its program could not be loaded"),
        (2, "its program raised an error"),
        (8, "its process died"),
        (99, "code 99"),
    ],
)
def test_what_flower_reports_is_one_clients_failure(net, code, said):
    grid, _, open_engine, _ = net
    grid.faults["c03"] = error(code, "why\nnot")
    _, replies = asked(open_engine())
    assert replies.failures == {"c03": f"{said}: why not"}


def test_a_site_that_is_still_at_work_is_not_asked_a_second_time(net):
    grid, clock, open_engine, _ = net
    grid.faults["c03"] = error(3)
    engine = open_engine(grace_s=20)
    fed, replies = asked(engine, deadline_s=5)
    assert replies.failures == {"c03": "no reply within the deadline of 5 s"}
    assert grid.sent[0].metadata.ttl == 25, "the deadline and the time for the way"
    grid.faults.clear()
    before, messages = clock.now, len(grid.sent)
    fed.begin(1)
    replies = fed.map(echo, list(fed.clients), value=1.0, weights=WEIGHTS)
    assert list(replies) == ["c00", "c01", "c02", "c03"]
    assert clock.now - before >= 19, "it had the time to give up what nobody waits for"
    assert len(grid.sent) - messages == 4


def test_a_reply_that_comes_late_is_never_looked_at(net):
    from solera.deploy.site import answer

    grid, _, open_engine, _ = net
    grid.faults["c03"] = error(3)
    fed, replies = asked(open_engine(grace_s=1), deadline_s=5)
    assert list(replies.failures) == ["c03"]
    late = next(m for m in grid.sent if m.metadata.dst_node_id == 104)
    grid._replies[late.metadata.message_id] = Message(answer(late.content, grid.sites[104]), reply_to=late)
    grid.faults.clear()
    ledger = dict(fed.ledger)
    fed.begin(1)
    replies = fed.map(echo, ["c03"], value=1.0, weights=WEIGHTS)
    assert list(replies) == ["c03"]
    assert late.metadata.message_id in grid._replies
    assert "c03" not in ledger, "what it made of the call that ran out of time does not count"


def test_a_reply_that_was_sent_before_is_refused(net, caplog):
    grid, _, open_engine, _ = net
    engine = open_engine()
    kept = {}

    def record(message):
        from solera.deploy.site import answer

        kept["content"] = answer(message.content, grid.sites[102])
        return Message(kept["content"], reply_to=message)

    grid.faults["c01"] = record
    fed, _ = asked(engine)
    grid.faults["c01"] = lambda message: Message(kept["content"], reply_to=message)
    fed.begin(1)
    replies = fed.map(echo, list(fed.clients), value=1.0, weights=WEIGHTS)
    assert replies.failures == {"c01": "it answers another call: a reply that was sent before is refused"}
    assert "the reply of c01 is refused" in caplog.text


def test_a_site_cannot_speak_in_the_name_of_another(net):
    grid, _, open_engine, _ = net

    def pretend(message):
        facts = {"protocol": 1, "site": "c00", "nonce": json.loads(message.content["facts"]["json"])["nonce"]}
        return Message(pack(facts), reply_to=message)

    grid.faults["c01"] = pretend
    _, replies = asked(open_engine())
    assert replies.failures == {"c01": "it says that it is 'c00': refused, its key says otherwise"}
    assert "c00" in replies


def test_a_reply_is_no_larger_than_what_is_due(net):
    """It costs its client, is not read, and does not count as traffic."""
    grid, _, open_engine, _ = net
    fed, replies = asked(open_engine())
    one = fed.up["testing.echo"].bytes // 4

    def flood(message):
        nonce = json.loads(message.content["facts"]["json"])["nonce"]
        facts = {"protocol": 1, "site": "c01", "nonce": nonce, "version": None, "seconds": 0.1}
        return Message(pack(facts, b"\0" * 5_000_000), reply_to=message)

    grid.faults["c01"] = flood
    fed.begin(1)
    replies = fed.map(echo, list(fed.clients), value=1.0, weights=WEIGHTS)
    assert list(replies) == ["c00", "c02", "c03"]
    assert replies.failures == {"c01": f"a message of 5000000 bytes, expected at most {one}"}
    assert fed.up["testing.echo"].bytes == 3 * one


def test_a_message_beside_a_hello_is_refused(net, caplog):
    grid, _, open_engine, scenario = net

    def flood(message):
        nonce = json.loads(message.content["facts"]["json"])["nonce"]
        return Message(pack({"protocol": 1, "site": "c01", "nonce": nonce}, b"x"), reply_to=message)

    grid.faults["c01"] = flood
    assert set(open_engine().greet(list(scenario.roster), 0)) == {"c00", "c02", "c03"}
    assert "the reply of c01 is refused: a message of 1 bytes, expected at most 0" in caplog.text


def test_a_task_whose_reply_has_no_limit_is_not_deployed():
    from solera.core.calls import Call
    from solera.core.task import TASKS, Client, task
    from solera.core.wire import Packed
    from solera.engines.serve import most_due

    @task("test_flower_engine.told")
    def told(client: Client) -> str:
        return "anything"

    try:
        with pytest.raises(SoleraError, match=r"told cannot be deployed: a reply of type .*str.*: its size cannot be"):
            most_due(Call("c00", told.name, 1, 1, 1, Packed({})))
    finally:
        del TASKS[told.name]


def test_a_site_cannot_end_the_run(net):
    grid, _, open_engine, _ = net

    def fatal(message):
        nonce = json.loads(message.content["facts"]["json"])["nonce"]
        facts = {"protocol": 1, "site": "c01", "nonce": nonce, "error": "the disk is full", "fatal": "run"}
        return Message(pack(facts), reply_to=message)

    grid.faults["c01"] = fatal
    _, replies = asked(open_engine())
    assert replies.failures == {"c01": "the disk is full"}


def test_a_node_that_nobody_knows_is_left_alone(net, caplog):
    grid, _, open_engine, _ = net
    grid.sites[666] = dataclasses.replace(grid.sites[101], name="stranger")
    asked(open_engine())
    assert 666 not in {m.metadata.dst_node_id for m in grid.sent}
    assert "node 666 has a key that no site of this run has" in caplog.text


def test_hello_tells_what_a_site_has(net):
    _, _, open_engine, scenario = net
    told = open_engine().greet(list(scenario.roster), 0)
    assert {k: (h["architecture"], h["num_examples"]) for k, h in told.items()} == {
        k: (i.architecture, i.num_examples) for k, i in scenario.roster.items()
    }


def test_a_site_that_cannot_say_hello_is_named(net, caplog):
    grid, _, open_engine, scenario = net
    grid.offline = {"c02"}
    grid.faults["c01"] = error(2, "no data")
    told = open_engine(wait_s=5).greet(list(scenario.roster), 0)
    assert set(told) == {"c00", "c03"}
    assert "c01 does not take part (hello): its program raised an error: no data" in caplog.text
    assert "c02 does not take part (hello): is not connected" in caplog.text


FACTS = {"json": json.dumps({"protocol": 1})}


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (lambda: RecordDict(), "not a message"),
        (lambda: RecordDict({"facts": ConfigRecord({"json": "[]"})}), "protocol None"),
        (lambda: RecordDict({"facts": ConfigRecord({"json": '{"protocol": 2}'})}), "install the same solera"),
        (lambda: RecordDict({"facts": ConfigRecord({"json": "{" * 100_000})}), "not a message"),
        (lambda: RecordDict({"facts": ConfigRecord({"json": b"{}"})}), "facts of 2 characters"),
        (lambda: RecordDict({"facts": ConfigRecord({"json": " " * (2 << 20)})}), "facts of 2097152 characters"),
        (lambda: RecordDict({"facts": ConfigRecord(FACTS), "more": ConfigRecord()}), "records"),
        (lambda: RecordDict({"facts": ConfigRecord(FACTS), "message": ConfigRecord()}), "one array"),
        (lambda: arrays(Array("float32", (1 << 40,), "numpy.ndarray", b"\x93NUMPY")), "one array"),
        (lambda: arrays(Array("uint8", (9,), STYPE, b"123456789")), "9 bytes, expected at most 8"),
    ],
)
def test_what_is_no_message_is_refused(record, said):
    with pytest.raises(WireError, match=said):
        unpack(record(), Limits(bytes=8))


def arrays(array):
    return RecordDict({"facts": ConfigRecord(FACTS), "message": ArrayRecord({"bytes": array})})


def test_what_is_packed_is_unpacked():
    facts, blob = unpack(pack({"protocol": 1, "a": [1, None]}, b"12345678"), Limits(bytes=8))
    assert (facts, blob) == ({"protocol": 1, "a": [1, None]}, b"12345678")


def test_a_simulation_says_how_to_deploy():
    with pytest.raises(ConfigError, match="solera deploy init"):
        engine_named("flower").open(toy(clients=2), None)
