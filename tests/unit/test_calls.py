"""Calls and replies as facts: what comes out of JSON is the same again, and nothing impossible gets through."""

import json

import pytest
import torch

from solera.core.calls import Call, Reply, Version
from solera.core.wire import Packed, WireError

VERSION = Version(1000, "ab" * 32)
MESSAGE = Packed({"w": torch.ones(2)})
CALL = Call("c00", "t", 2001, 7, 8, MESSAGE, VERSION, (VERSION, Version(0, "cd" * 32)), 2000, 1.5)
REPLY = Reply("c00", b"body", VERSION, None, 0.25, "")


@pytest.mark.parametrize("call", [CALL, Call("c00", "t", 0, 0, 0, MESSAGE)])
def test_a_call_is_the_same_after_the_journey(call):
    assert Call.of(json.loads(json.dumps(call.facts())), MESSAGE) == call
    assert Call.of(call.facts(), MESSAGE) == call


@pytest.mark.parametrize("reply", [REPLY, Reply("c00", error="why", fatal="task")])
def test_a_reply_is_the_same_after_the_journey(reply):
    assert Reply.of(json.loads(json.dumps(reply.facts())), "c00", reply.message) == reply


@pytest.mark.parametrize(
    "wrong",
    [
        {"client": 3}, {"client": "x" * 201}, {"task": None}, {"step": -1}, {"step": 10**12}, {"step": True},
        {"step": "1"}, {"seed": 1 << 63}, {"run_seed": 1.5}, {"keep_from": None}, {"keep": {}}, {"keep": [3]},
        {"keep": [[0, "../../etc/passwd"]]}, {"after": []}, {"after": [0]}, {"after": [-1, "ab" * 32]},
        {"after": [0, "AB" * 32]}, {"after": "ab"}, {"deadline_s": 0}, {"deadline_s": "1"}, {"deadline_s": 1e10},
    ],
)  # fmt: skip
def test_a_call_that_cannot_be_is_refused(wrong):
    with pytest.raises(WireError):
        Call.of({**CALL.facts(), **wrong}, MESSAGE)


@pytest.mark.parametrize(
    "wrong",
    [{"fatal": "all"}, {"fatal": 0}, {"seconds": None}, {"seconds": -1}, {"seconds": "1"}, {"version": [1, 2]}],
)
def test_a_reply_that_cannot_be_is_refused(wrong):
    with pytest.raises(WireError):
        Reply.of({**REPLY.facts(), **wrong}, "c00", b"")


def test_facts_that_are_missing_are_refused():
    for name in ("client", "task", "step", "seed", "run_seed", "keep", "keep_from"):
        with pytest.raises(WireError):
            Call.of({k: v for k, v in CALL.facts().items() if k != name}, MESSAGE)
