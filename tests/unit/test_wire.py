"""Messages: what goes in comes out, sizes are exact, and anything else is refused with a WireError."""

import contextlib
import dataclasses
import io
import json
import struct
import time
import zipfile
from typing import Literal

import hypothesis.strategies as st
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings

from solera.core.tensors import Weights
from solera.core.wire import (
    DTYPES,
    OWN_FILES,
    Limits,
    Packed,
    WireError,
    check_type,
    decode,
    digest,
    elsewhere_of,
    encode,
    leaves,
    like,
    sized,
)


@dataclasses.dataclass(frozen=True)
class Inner:
    rate: float
    names: list[str]
    kind: Literal["a", "b"] = "a"
    maybe: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Outer:
    weights: Weights
    inner: Inner
    models: dict[str, Weights]
    count: int = 3
    flag: bool = True


@dataclasses.dataclass(frozen=True)
class Update:
    weights: Weights = like("weights")


def outer() -> Outer:
    return Outer(
        {"a.weight": torch.randn(3, 4), "n": torch.tensor(7), "e": torch.zeros(0, 5)},
        Inner(0.5, ["x", "ü"], "b", torch.randn(2, dtype=torch.float64)),
        {"p": {"w": torch.ones(2, 2)}, "q": {}},
    )


def test_round_trip_keeps_every_bit_and_type():
    value = outer()
    back = decode(encode(value), Outer)
    assert digest(back) == digest(value)
    assert back.inner.names == ["x", "ü"]
    assert back.weights["n"].dtype == torch.int64
    assert back.weights["e"].shape == (0, 5)


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(DTYPES, key=str)), st.lists(st.integers(0, 4), max_size=3)),
        max_size=6,
    ),
    st.text(max_size=12),
)
@settings(max_examples=60, deadline=None)
def test_size_is_counted_exactly_without_encoding(specs, name):
    value = {name: [torch.ones(shape, dtype=dtype) for dtype, shape in specs]}
    packed = Packed(value)
    assert packed.size == len(packed.blob)
    assert set(safetensors.torch.load(packed.blob)) == {str(i) for i in range(len(specs))}
    assert packed.floats + packed.integers == sum(t.numel() for t in packed.tensors)


def test_a_message_inside_the_process_is_checked_like_bytes():
    bad = {"weights": {"w": torch.tensor([float("nan")])}}
    for message in (Packed(bad), encode(bad)):
        with pytest.raises(WireError, match="not finite"):
            decode(message, Update)
    good = Packed({"weights": {"w": torch.ones(2)}})
    assert decode(good, Update).weights["w"].data_ptr() == good.tensors[0].data_ptr(), "nothing is copied"


def test_strided_tensors_arrive_in_one_layout():
    t = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for message in (Packed({"t": t}), encode({"t": t})):
        back = decode(message, dict[str, torch.Tensor])["t"]
        assert back.is_contiguous()
        assert torch.equal(back, t)


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        ({"w": torch.ones(1)}, r"\.weights\.w: \(1,\)"),  # would broadcast
        ({"w": torch.ones(2, 2, dtype=torch.float64)}, "float64"),
        ({"w": torch.ones(2, 2), "v": torch.ones(1)}, "'v'"),
        ({}, "'w'"),
        ({"w": torch.full((2, 2), float("inf"))}, "not finite"),
    ],
)
def test_like_ties_a_reply_to_what_was_sent(reply, says):
    sent = {"weights": {"w": torch.ones(2, 2)}}
    with pytest.raises(WireError, match=says):
        decode(encode({"weights": reply}), Update, sent)
    assert decode(encode({"weights": {"w": torch.zeros(2, 2)}}), Update, sent).weights["w"].sum() == 0


@dataclasses.dataclass(frozen=True)
class Answers:
    probs: torch.Tensor = sized("indices", "classes")


@pytest.mark.parametrize("shape", [(1,), (4, 3), (5, 2), (5, 3, 1), (15,), (3, 5), ()])
def test_sized_asks_for_a_size_nothing_was_sent_of(shape):
    sent = {"indices": torch.arange(5), "classes": 3}
    with pytest.raises(WireError, match=r"\.probs: .*expected \(5, 3\)"):
        decode(encode({"probs": torch.ones(shape)}), Answers, sent)
    assert decode(encode({"probs": torch.ones(5, 3)}), Answers, sent).probs.sum() == 15
    assert decode(encode({"probs": torch.ones(shape)}), Answers).probs.shape == shape  # without a question


def test_what_may_not_leave():
    class Canary:
        pass

    for value in (
        Canary(),
        {1: 2},
        float("nan"),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2).to_sparse(),
        {1, 2},
    ):
        with pytest.raises(WireError):
            encode(value)
    loop: list = []
    loop.append(loop)
    with pytest.raises(WireError, match="deep"):
        encode(loop)


def _blob(tree: str, tensors: dict | None = None) -> bytes:
    return safetensors.torch.save(tensors or {}, {"tree": tree})


def _lying_header() -> bytes:
    head = json.dumps(
        {"__metadata__": {"tree": "{}"}, "0": {"dtype": "F32", "shape": [1 << 36], "data_offsets": [0, 1 << 38]}}
    ).encode()
    return struct.pack("<Q", len(head)) + head + b"\0" * 16


def _overlapping() -> bytes:
    head = json.dumps(
        {
            "__metadata__": {"tree": '{"weights":{"a":{"$":0},"b":{"$":1}}}'},
            "0": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "1": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        }
    ).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + b"\0" * 12


def _torch_zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as z:
        z.writestr("archive/data.pkl", b"\x80\x02cos\nsystem\nq\x00X\x04\x00\x00\x00trueq\x01\x85q\x02Rq\x03.")
    return buffer.getvalue()


HOSTILE = {
    "pickle": b"cposix\nsystem\n(S'touch pwned'\ntR.",
    "torch zip": _torch_zip(),
    "nothing": b"",
    "seven bytes": b"\0" * 7,
    "header past the end": struct.pack("<Q", 1 << 40) + b"{}",
    "header not json": struct.pack("<Q", 4) + b"abcd",
    "lying size": _lying_header(),
    "overlapping tensors": _overlapping(),
    "no tree": safetensors.torch.save({"0": torch.ones(1)}),
    "tree not json": _blob("{"),
    "depth bomb": _blob("[" * 100_000 + "]" * 100_000),
    "huge integer": _blob('{"weights":{},"n":' + "9" * 100_000 + "}"),
    "nan scalar": _blob('{"weights": NaN}'),
    "aliased": _blob('{"weights":{"a":{"$":0},"b":{"$":0}}}', {"0": torch.ones(1)}),
    "undeclared tensor": _blob('{"weights":{}}', {"0": torch.ones(1)}),
    "unknown field": _blob('{"weights":{},"__class__":"os.system"}'),
    "missing field": _blob("{}"),
    "list for a mapping": _blob('{"weights":[1]}'),
    "scalar for a tensor": _blob('{"weights":{"a":1.5}}'),
    "reference out of range": _blob('{"weights":{"a":{"$":5}}}'),
    "reference not an int": _blob('{"weights":{"a":{"$":"0"}}}', {"0": torch.ones(1)}),
    "not a finite tensor": _blob('{"weights":{"a":{"$":0}}}', {"0": torch.tensor([float("-inf")])}),
    "names as words": _blob('{"weights":{}}', {"evil": torch.ones(1)}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_messages_are_refused_quickly(name):
    began = time.process_time()  # not the clock on the wall: the machine may have other things to do
    with pytest.raises(WireError):
        decode(HOSTILE[name], Update)
    assert time.process_time() - began < 1.0


def test_limits_are_checked_before_content():
    message = encode({"weights": {str(i): torch.ones(1) for i in range(20)}})
    for limits, says in [
        (Limits(bytes=100), "limit of 100"),
        (Limits(tensors=10), "20 tensors"),
        (Limits(header=64), "limit 64"),
        (Limits(depth=1), "nested deeper than 1"),
    ]:
        with pytest.raises(WireError, match=says):
            decode(message, Update, limits=limits)
    with pytest.raises(WireError, match="over the limit"):
        decode(Packed({"weights": {"a": torch.ones(100)}}), Update, limits=Limits(bytes=100))


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_mutated_messages_raise_nothing_but_wire_errors(data):
    blob = bytearray(encode(outer()))
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, min(len(blob) - 1, 600)))
        blob[at] = data.draw(st.integers(0, 255))
    blob = blob[: data.draw(st.integers(0, len(blob)))] if data.draw(st.booleans()) else blob
    with contextlib.suppress(WireError):
        assert isinstance(decode(bytes(blob), Outer), Outer)


def test_digest_sees_names_shapes_types_and_bits():
    base = {"w": torch.tensor([1.0, 2.0])}
    others = [
        {"v": torch.tensor([1.0, 2.0])},
        {"w": torch.tensor([[1.0, 2.0]])},
        {"w": torch.tensor([1.0, 2.0], dtype=torch.float64)},
        {"w": torch.tensor([1.0, 2.0000002])},
    ]
    assert len({digest(v) for v in [base, *others]}) == 5
    assert digest(base) == digest({"w": torch.tensor([1.0, 2.0])})


def test_types_that_could_not_travel_are_refused_when_declared():
    for bad in (object, dict[int, torch.Tensor], int | str, set[int]):
        with pytest.raises((TypeError, WireError)):
            check_type(bad, "here")
    check_type(Outer, "here")


def test_integers_have_64_bits_on_both_sides():
    for n in (2**63 - 1, -(2**63)):
        assert decode(encode(n), int) == n
    for n in (2**63, 10**5000):
        with pytest.raises(WireError, match=r"an integer of .* bits"):
            Packed(n)
    tensors, tree = {}, {"tree": str(2**63)}
    with pytest.raises(WireError, match="an integer of 64 bits"):
        decode(safetensors.torch.save(tensors, tree), int)


def test_a_header_over_the_limit_is_refused_inside_the_process_too():
    message, limits = Packed(["x" * 100]), Limits(header=64)
    for m in (message, message.blob):
        with pytest.raises(WireError, match=r"a header of .* bytes"):
            decode(m, list[str], limits=limits)


def test_a_run_reads_its_own_files_as_it_wrote_them():
    state = {"w": torch.tensor([float("nan"), 1.0])}
    with pytest.raises(WireError, match="not finite"):
        decode(encode(state), Weights)
    assert decode(encode(state), Weights, limits=OWN_FILES)["w"][1] == 1.0


def test_leaves_are_the_very_tensors_in_the_order_of_their_numbers():
    value = outer()
    found, packed = leaves(value), Packed(value)
    assert found[0] is value.weights["a.weight"]
    assert found[3] is value.inner.maybe
    assert len(found) == len(packed.tensors)
    assert all(torch.equal(a, b) for a, b in zip(found, packed.tensors, strict=True))


def test_tensors_that_are_elsewhere_are_named_and_come_back_with_their_pieces():
    value = {"a": torch.arange(4), "b": torch.ones(300, dtype=torch.float64), "c": torch.zeros(2)}
    packed, places = Packed(value), {1: ("file", 7), 2: ("other", 0)}
    blob = packed.without(places)
    assert set(safetensors.torch.load(blob)) == {"0"}
    assert len(blob) < packed.size - 2400 + 100
    assert elsewhere_of(blob, OWN_FILES) == places
    assert elsewhere_of(packed.blob, OWN_FILES) == {}
    back = decode(blob, dict[str, torch.Tensor], pieces={1: value["b"], 2: value["c"]})
    assert digest(back) == digest(value)


def test_a_message_cannot_refer_to_anything():
    """Whoever decodes it without pieces finds tensors missing, wherever they are said to be."""
    blob = Packed({"a": torch.ones(2)}).without({0: ("/etc/passwd", 0)})
    with pytest.raises(WireError, match="expected a tensor"):
        decode(blob, dict[str, torch.Tensor])


@pytest.mark.parametrize("blob", [b"", b"x" * 40, struct.pack("<Q", 2) + b"{}", struct.pack("<Q", 4) + b"null"])
def test_references_of_a_damaged_file_raise_nothing_but_wire_errors(blob):
    with pytest.raises(WireError):
        elsewhere_of(blob, OWN_FILES)
