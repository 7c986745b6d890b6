"""A reply before it exists: what ties it, how large it is, and that no other reply is loaded, whatever the task."""

import dataclasses
import json
import math
import struct
import tracemalloc
import types
import typing

import pytest
import torch

import solera.methods
import solera.testing  # noqa: F401
from solera.core import wire
from solera.core.task import TASKS, Client, task
from solera.core.tensors import Shapes, Weights
from solera.core.wire import Layout, Packed, WireError, at_most, check_ties, decode, encode, like, sized
from solera.method import prepare_scoring

prepare_scoring()  # registers how clients' own models are scored
OURS = {name: t for name, t in TASKS.items() if t.fn.__module__.startswith("solera.")}
WITH_TENSORS = sorted(name for name, t in OURS.items() if list(wire._tensors_in(t.returns)))

MEGABYTE = 1 << 20


def question(kind, name=""):
    """A value of a declared type, as a server could send it."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is torch.Tensor:
        return torch.ones(4, 3)
    if kind == Weights:
        return {"a": torch.ones(2, 3), "b": torch.ones(3), "n": torch.tensor(7)}
    if kind == Shapes:
        return {"a": [2, 3], "b": [5]}
    if kind in (int, float, bool, str):
        return {int: 6, float: 0.5, bool: True, str: "text"}[kind]
    if origin in (types.UnionType, typing.Union):
        return question(next(a for a in args if a is not type(None)))
    if origin is typing.Annotated:
        return question(args[0])
    if origin is typing.Literal:
        return args[0]
    if origin is list:
        return ["a", "b"] if args[0] is str else [question(args[0]), question(args[0])]
    if dataclasses.is_dataclass(kind):
        try:
            return kind()
        except TypeError:
            return kind(**{n: question(t) for n, t in typing.get_type_hints(kind).items()})
    raise TypeError(kind)


def asked(name):
    return {a: question(t) for a, t in OURS[name].takes.items()}


def reply_to(name, sent, examples=5):
    return Packed(Layout(OURS[name].returns, sent).example(examples), steady=True)


# ---- every task of the package ----------------------------------------------------------------------


def test_most_tasks_send_tensors():
    assert len(OURS) > 40
    assert len(WITH_TENSORS) > 25


@pytest.mark.parametrize("name", sorted(OURS))
def test_every_tensor_of_every_reply_is_tied_and_its_bytes_are_known(name):
    returns, sent = OURS[name].returns, asked(name)
    assert all(tie is not None for _, _, tie in wire._tensors_in(returns))
    layout, reply = Layout(returns, sent), reply_to(name, sent)
    assert layout.exact, "a task whose replies can only be bounded: name it in the documentation"
    assert layout.size == reply.size == len(reply.blob)
    value = decode(reply.blob, returns, sent)
    if returns is not type(None):
        assert wire.digest(layout.unflatten(layout.flatten(value))) == wire.digest(value)


def hostile(blob, change):
    """The message with another header, and as many bytes as it had."""
    (n,) = struct.unpack("<Q", blob[:8])
    header = json.loads(blob[8 : 8 + n])
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + blob[8 + n :]


def first(header):
    return header["0"]


TERABYTE = 1 << 40
SAME_SIZE = {"F32": "I32", "I64": "F64", "F64": "I64", "U8": "BOOL", "I32": "F32"}
NOTHING = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
LIES = {
    "dtype": lambda h: first(h).update(dtype="F16"),
    "dtype of the same size": lambda h: first(h).update(dtype=SAME_SIZE[first(h)["dtype"]]),
    "no dtype": lambda h: first(h).update(dtype="C64"),
    "shape": lambda h: first(h).update(shape=[*first(h)["shape"], 1]),
    "shape of a terabyte": lambda h: first(h).update(shape=[TERABYTE, *first(h)["shape"]]),
    "a terabyte by overflow": lambda h: first(h).update(shape=[1 << 62, 1 << 62, *first(h)["shape"]]),
    "a negative shape": lambda h: first(h).update(shape=[-1, -1, *first(h)["shape"]]),
    "offsets of a terabyte": lambda h: first(h).update(data_offsets=[0, TERABYTE], shape=[TERABYTE]),
    "one tensor more": lambda h: h.update({"77": NOTHING}),
    "ten thousand more": lambda h: h.update({str(i): NOTHING for i in range(100, 10_100)}),
    "one tensor less": lambda h: h.pop("0"),
}


@pytest.mark.parametrize("name", WITH_TENSORS)
def test_a_hostile_header_is_refused_before_memory_is_touched(name, monkeypatch):
    sent = asked(name)
    blob = reply_to(name, sent).blob
    assert decode(blob, OURS[name].returns, sent) is not None  # honest, it passes
    monkeypatch.setattr(wire, "_load", lambda blob: pytest.fail("a tensor is loaded"))
    for what, lie in LIES.items():
        message = hostile(blob, lie)
        tracemalloc.start()
        with pytest.raises(WireError):
            decode(message, OURS[name].returns, sent)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < (16 if what == "ten thousand more" else 1) * MEGABYTE, f"{what}: {peak} bytes"
    for lying in (struct.pack("<Q", TERABYTE) + blob[8:], struct.pack("<Q", 1 << 63) + blob[8:], blob[:-1], blob[:8]):
        with pytest.raises(WireError):
            decode(lying, OURS[name].returns, sent)


@dataclasses.dataclass(frozen=True)
class Update:
    weights: Weights = like("weights")


def test_a_large_message_of_another_type_is_refused_without_a_copy_of_it():
    """64 MB that are there and not what was asked for: the library would copy them."""
    blob = encode({"weights": {"w": torch.zeros(16 * MEGABYTE)}})
    sent = {"weights": {"w": torch.zeros(16 * MEGABYTE, dtype=torch.int32)}}
    tracemalloc.start()
    with pytest.raises(WireError, match=r"\.weights\.w: \(16777216,\) torch.float32, expected .*torch.int32"):
        decode(blob, Update, sent)
    refused = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    assert decode(blob, Update, {"weights": {"w": torch.zeros(16 * MEGABYTE)}}).weights["w"].numel() == 16 * MEGABYTE
    loaded = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused < MEGABYTE / 10
    assert loaded > 63 * MEGABYTE  # what was measured is the copy


# ---- ties -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Chosen:
    rows: torch.Tensor = at_most("most", 3)


@pytest.mark.parametrize(
    ("shape", "fits"), [((0, 3), True), ((5, 3), True), ((5, 2), True), ((6, 3), False), ((5,), False)]
)
def test_at_most_bounds_every_dimension(shape, fits):
    blob = encode({"rows": torch.zeros(shape)})
    if fits:
        assert decode(blob, Chosen, {"most": 5}).rows.shape == shape
    else:
        with pytest.raises(WireError, match=r"expected at most \(5, 3\)"):
            decode(blob, Chosen, {"most": 5})


def test_the_layout_of_what_is_bounded_is_the_largest():
    layout = Layout(Chosen, {"most": 5})
    assert not layout.exact
    assert layout.slots == [(".rows", torch.float32, (5, 3))]


@dataclasses.dataclass(frozen=True)
class Part:
    weights: Weights = like("weights", only="names")
    counts: torch.Tensor | None = sized("classes", dtype=torch.int64)


def test_a_part_of_what_was_sent_and_what_was_not_asked_for():
    sent = {"weights": {"a": torch.ones(2), "b": torch.ones(3)}, "names": ["b"], "classes": None}
    fine = {"weights": {"b": torch.zeros(3)}, "counts": None}
    assert decode(encode(fine), Part, sent).counts is None
    with pytest.raises(WireError, match=r"\.counts: it was not asked for"):
        decode(encode(fine | {"counts": torch.zeros(4, dtype=torch.int64)}), Part, sent)
    with pytest.raises(WireError, match=r"\.counts: expected a tensor"):
        decode(encode(fine), Part, sent | {"classes": 4})
    with pytest.raises(WireError, match="names differ"):
        decode(encode(fine | {"weights": sent["weights"]}), Part, sent)


@dataclasses.dataclass(frozen=True)
class Several:
    models: list[Weights] = like("models")


def test_a_list_is_tied_one_by_one():
    sent = {"models": [{"a": torch.ones(2)}, {"b": torch.ones(3)}]}
    assert len(decode(encode(sent), Several, sent).models) == 2
    for wrong in (sent["models"][:1], sent["models"][::-1]):
        with pytest.raises(WireError, match=r"\.models"):
            decode(encode({"models": wrong}), Several, sent)


@dataclasses.dataclass(frozen=True)
class Free:
    inner: dict[str, list[torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class Row:
    t: torch.Tensor = sized("drawn.rows")


@dataclasses.dataclass(frozen=True)
class Drawn:
    rows: torch.Tensor


@pytest.mark.parametrize(
    ("returns", "takes", "says"),
    [
        (Free, {}, r"\.inner has no size limit; .*sized"),
        (torch.Tensor, {}, "a tensor has no size limit"),
        (Weights, {"weights": Weights}, "a tensor has no size limit"),
        (Row, {"drawn": int}, r"\.t is tied to 'drawn.rows': there is no such argument"),
        (Row, {}, r"\.t is tied to 'drawn.rows': there is no such argument"),
        (Update, {"weights": torch.Tensor}, "of the right type"),
        (Part, {"weights": Weights, "names": str, "classes": int}, "'weights', 'names'"),
        (Part, {"weights": Weights, "names": list[str], "classes": float}, "'classes'"),
    ],
)  # fmt: skip
def test_a_reply_that_nothing_bounds_is_refused_when_the_task_is_defined(returns, takes, says):
    with pytest.raises(TypeError, match=says):
        check_ties(returns, takes, "task t")


def test_a_task_is_checked_when_it_is_defined():
    check_ties(Row, {"drawn": Drawn}, "task t")
    with pytest.raises(TypeError, match=r"task test_layout.free, its reply: \.inner has no size limit"):

        @task("test_layout.free")
        def free(client: Client) -> Free: ...


# ---- numbers ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Mixed:
    loss: float
    count: int
    sure: bool
    weights: Weights = like("weights")


SENT = {"weights": {"w": torch.zeros(2, 2), "n": torch.tensor(0), "h": torch.zeros(3, dtype=torch.float16)}}


def test_the_size_of_a_message_tells_nothing_of_its_numbers():
    sizes = {
        Packed(Mixed(loss, count, sure, SENT["weights"]), steady=True).size
        for loss in (0.0, -1.0, 0.1 + 0.2, -2.2250738585072014e-308, 1.7976931348623157e308)
        for count in (0, -(1 << 63), (1 << 63) - 1)
        for sure in (True, False)
    }
    assert sizes == {Layout(Mixed, SENT).size}
    odd = Packed(Mixed(math.pi, 3, True, SENT["weights"]), steady=True)
    assert len(odd.blob) == odd.size
    assert decode(odd.blob, Mixed, SENT).loss == math.pi
    assert len(encode(Mixed(0.0, 0, True, {}))) < len(encode(Mixed(math.pi, 0, True, {})))  # files and digests: as ever


def test_a_reply_is_one_vector_and_back():
    layout = Layout(Mixed, SENT)
    value = Mixed(0.5, 3, True, {"w": torch.arange(4.0).view(2, 2), "n": torch.tensor(9), "h": torch.ones(3).half()})
    vector = layout.flatten(value)
    assert vector.tolist() == [0.0, 1.0, 2.0, 3.0, 9.0, 1.0, 1.0, 1.0, 0.5, 3.0, 1.0]
    assert vector.dtype == torch.float64
    back = layout.unflatten(vector)
    assert (back.loss, back.count, back.sure) == (0.5, 3, True)
    assert wire.digest(back) == wire.digest(value)
    assert wire.digest(layout.unflatten(2 * vector).weights["n"]) == wire.digest(torch.tensor(18))
    turned = dataclasses.replace(value, weights=dict(reversed(value.weights.items())))
    assert torch.equal(layout.flatten(turned), vector)  # by name, whatever the order a client sends them in
    for wrong, says in (
        ({}, "'h', 'n', 'w'"),
        ({"h": torch.ones(3)}, r"\.weights\.h"),
        ({"w": torch.ones(4)}, r"\.w: \(4,\)"),
    ):
        with pytest.raises(WireError, match=says):
            layout.flatten(Mixed(0.5, 3, True, value.weights | wrong if wrong else wrong))


def test_what_has_no_length_before_it_is_there_has_no_layout():
    @dataclasses.dataclass(frozen=True)
    class Words:
        text: str

    with pytest.raises(TypeError, match=r"\.text .*cannot be known"):
        Layout(Words, {})
