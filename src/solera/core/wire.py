"""Messages: trees of tensors and plain scalars. Nothing else can be sent, and never code.

A message is one safetensors blob: tensors are stored as tensors, the tree around them is JSON in the blob's
metadata. The receiver rebuilds the tree *into a type it already knows* (a task's annotations). So no class, module or
function name is ever read from a message, and everything that the type does not declare is refused.

Inside one process a message does not have to become bytes: `Packed` holds the flattened value, knows its exact
encoded size, and is rebuilt by the same `decode` with the same checks.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import operator
import re
import struct
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from .errors import ConfigError, SoleraError

Place = tuple[str, int]  # a file, and the number of a tensor in it


class WireError(SoleraError, ValueError):
    """A message that is malformed, too large, or not of the type that the receiver declared."""


SAFE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


def safe_name(name: str, what: str) -> str:
    """Return `name` if it is safe as part of a path. Names come from configurations and from other machines."""
    if not SAFE_NAME.fullmatch(name):
        raise ConfigError(
            f"{what} {name[:80]!r}: only lower-case letters, digits, '.', '_' and '-', at most 64 characters, "
            "beginning with a letter or digit"
        )
    return name


@dataclasses.dataclass(frozen=True)
class Limits:
    """Size limits of a message. Checked before memory is allocated for its content."""

    bytes: int = 1 << 31
    tensors: int = 100_000
    header: int = 16 << 20
    depth: int = 32
    finite: bool = True  # no NaN and no infinity in a tensor


# For files that a run wrote itself: any size, NaN allowed (100 MB is the header limit of safetensors).
OWN_FILES = Limits(bytes=1 << 62, tensors=1 << 31, header=100_000_000, finite=False)


DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
NAMED = {name: dtype for dtype, name in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class Tie:
    """The names, shapes and dtypes that a reply's field must have: they follow from the call's arguments `names`."""

    names: tuple[str | int, ...]
    only: str | None = None
    dtype: torch.dtype | None = None  # None: names, shapes and dtypes of the argument itself
    exact: bool = True
    fill: "Fill | None" = None

    def wanted(self, sent: Mapping[str, Any]) -> Any:
        """Tensors with the required names, shapes and dtypes. None if an argument is None: then the field must be."""
        found: list[Any] = [name if isinstance(name, int) else _argument(sent, name) for name in self.names]
        if any(v is None for v in found):
            return None
        if self.dtype is None:
            return {n: found[0][n] for n in _argument(sent, self.only)} if self.only else found[0]
        if len(found) == 1 and isinstance(found[0], Mapping):
            return {name: self._blank(shape) for name, shape in found[0].items()}
        return self._blank([d for v in found for d in _dimensions(v)])

    def _blank(self, shape: Sequence[int]) -> "Tensor | _AtMost":
        blank = torch.empty(tuple(shape), dtype=self.dtype, device="meta")
        return blank if self.exact else _AtMost(blank)


class _AtMost(NamedTuple):
    largest: Tensor


Fill = Callable[[Tensor, int], Tensor]  # (zeros, number of a client's examples) -> values of a possible reply
TIE = "tie"  # the key in a field's metadata


def like(name: str, only: str | None = None, fill: Fill | None = None) -> Any:
    """Field marker: this value must have the names, shapes and dtypes of the argument `name` of the call.

    `only` names another argument: the list of tensor names that the reply must have. `fill`: see `sized`.
    """
    return dataclasses.field(metadata={TIE: Tie((name,), only, fill=fill)})


def sized(*names: str | int, dtype: torch.dtype = torch.float32, fill: Fill | None = None) -> Any:
    """Field marker: a tensor whose size follows from the arguments of the call.

    Each name is an argument ("drawn.indices": a field of an argument) and gives a dimension: an integer gives itself, a
    tensor its length. A list of integers gives several dimensions, a mapping of lists one tensor for each name. A
    constant dimension is passed as an integer. Without any name the field is a single number. `fill` turns zeros into
    an example of a valid reply, for fields where zeros are invalid.
    """
    return dataclasses.field(metadata={TIE: Tie(names, dtype=dtype, fill=fill)})


def at_most(*names: str | int, dtype: torch.dtype = torch.float32) -> Any:
    """Field marker: like `sized`, but each dimension may be smaller. For sizes that only the client knows."""
    return dataclasses.field(metadata={TIE: Tie(names, dtype=dtype, exact=False)})


def _argument(sent: Mapping[str, Any], name: str) -> Any:
    first, *fields = name.split(".")
    value = sent[first]
    for f in fields:
        value = getattr(value, f)
    return value


def _dimensions(v: Any) -> Sequence[int]:
    return [len(v)] if isinstance(v, Tensor) else v if isinstance(v, list) else [v]


# ---- flattening and encoding ----------------------------------------------------------------------


class Packed:
    """A value ready to be sent. Its size is known exactly; it becomes bytes only if it leaves the process."""

    def __init__(self, value: Any, steady: bool = False):
        """`steady`: scalars take the same space whatever their value, so `size` is known before they are and reveals
        nothing about them."""
        found: list[Tensor] = []
        self.tree = _flatten(value, found, 0)
        self.steady = steady
        self.tensors = [_portable(t) for t in found]
        self.memo: dict[str, Any] = {}  # the decoded value, shared by the clients that get this same message

    @functools.cached_property
    def _order(self) -> list[int]:
        # The largest element type first: this keeps every tensor aligned in the blob.
        return sorted(range(len(self.tensors)), key=lambda i: (-self.tensors[i].element_size(), i))

    @functools.cached_property
    def _header(self) -> bytes:
        return self._header_of(self._order, {})

    def _header_of(self, order: list[int], notes: dict[str, str]) -> bytes:
        header: dict[str, Any] = {"__metadata__": {"tree": json.dumps(self.tree, separators=(",", ":")), **notes}}
        at = 0
        for i in order:
            t = self.tensors[i]
            end = at + t.numel() * t.element_size()
            header[str(i)] = {"dtype": DTYPES[t.dtype], "shape": list(t.shape), "data_offsets": [at, end]}
            at = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * sum(WIDEST - len(json.dumps(n)) for n in _numbers(self.tree) if self.steady)
        return text + b" " * (-len(text) % 8)

    @functools.cached_property
    def size(self) -> int:
        """The length of `blob` in bytes, without creating it."""
        return 8 + len(self._header) + sum(t.numel() * t.element_size() for t in self.tensors)

    @property
    def blob(self) -> bytes:
        """The safetensors encoding. Written here and not by the safetensors library, so that `size` is exact and no
        tensor is copied twice. The library does the reading."""
        return self._joined(self._header, self._order)

    def without(self, elsewhere: Mapping[int, Place]) -> bytes:
        """The encoding without the tensors that are already in other files. It records the file and number of each."""
        files: dict[str, dict[int, int]] = {}
        for i, (file, number) in elsewhere.items():
            files.setdefault(file, {})[i] = number
        order = [i for i in self._order if i not in elsewhere]
        return self._joined(self._header_of(order, {"elsewhere": json.dumps(files, separators=(",", ":"))}), order)

    def _joined(self, header: bytes, order: list[int]) -> bytes:
        parts: list[Any] = [struct.pack("<Q", len(header)), header]
        parts += [
            t.cpu().reshape(-1).view(torch.uint8).numpy().data for t in (self.tensors[i] for i in order) if t.numel()
        ]
        return b"".join(parts)

    @property
    def floats(self) -> int:
        """The number of floating-point values in the tensors."""
        return sum(t.numel() for t in self.tensors if t.is_floating_point())

    @property
    def integers(self) -> int:
        """The number of integers and booleans in the tensors."""
        return sum(t.numel() for t in self.tensors if not t.is_floating_point())

    @property
    def versions(self) -> list[int]:
        """Torch's modification counters: they show whether a shared message was written to."""
        return [t._version for t in self.tensors]


def encode(value: Any) -> bytes:
    """A dataclass, mapping, list, scalar or tensor as one safetensors blob."""
    return Packed(value).blob


def leaves(value: Any) -> list[Tensor]:
    """The tensors of a value (not copies), in the order in which its encoding numbers them."""
    found: list[Tensor] = []
    _flatten(value, found, 0)
    return found


def digest(value: Any) -> str:
    """sha256 of the encoding: equal if and only if every name, shape, dtype and bit is equal."""
    return hashlib.sha256(encode(value)).hexdigest()


def _flatten(v: Any, tensors: list[Tensor], depth: int) -> Any:
    if depth > Limits.depth:
        raise WireError("a value that is nested too deeply (or contains itself) cannot be sent")
    if isinstance(v, Tensor):
        if v.dtype not in DTYPES or v.layout != torch.strided:
            raise WireError(f"a tensor of {v.dtype}, {v.layout} cannot be sent")
        # A message is made of CPU copies. A meta tensor has a size and no content: a Layout counts with it.
        tensors.append(v if v.is_cpu or v.is_meta else v.detach().cpu())
        return {"$": len(tensors) - 1}
    if dataclasses.is_dataclass(v) and not isinstance(v, type):
        return {f.name: _flatten(getattr(v, f.name), tensors, depth + 1) for f in dataclasses.fields(v)}
    if isinstance(v, Mapping):
        for k in v:
            if not isinstance(k, str):
                raise WireError(f"mapping key {k!r} is {type(k).__name__}, not str: it cannot be sent")
        return {k: _flatten(x, tensors, depth + 1) for k, x in v.items()}
    if isinstance(v, list | tuple):
        return [_flatten(x, tensors, depth + 1) for x in v]
    if isinstance(v, float) and not math.isfinite(v):
        raise WireError(f"the scalar {v} is not finite")
    if isinstance(v, int) and not _fits(v):
        raise WireError(f"an integer of {v.bit_length()} bits cannot be sent: the limit is 64")
    if v is None or isinstance(v, bool | int | float | str):
        return v
    raise WireError(f"{type(v).__name__} cannot be sent")


WIDEST = len("-2.2250738585072014e-308")  # the longest text of a number in a tree


def _numbers(tree: Any) -> Iterator[bool | int | float]:
    """The scalars that are numbers, in order."""
    if isinstance(tree, dict):
        for v in () if _is_tensor(tree) else tree.values():
            yield from _numbers(v)
    elif isinstance(tree, list):
        for v in tree:
            yield from _numbers(v)
    elif isinstance(tree, bool | int | float):
        yield tree


def _is_tensor(v: Any) -> bool:
    return isinstance(v, dict) and len(v) == 1 and type(v.get("$")) is int


def _portable(t: Tensor) -> Tensor:
    """A contiguous tensor on every engine. An inference-mode tensor is cloned: it has no modification counter."""
    t = t.detach()
    return t.clone() if t.is_inference() else t.contiguous()


def _fits(v: int) -> bool:
    return -(1 << 63) <= v < 1 << 63


# ---- decoding -------------------------------------------------------------------------------------


def decode(
    message: "bytes | Packed",
    into: Any,
    sent: Mapping[str, Any] | None = None,
    limits: Limits | None = None,
    pieces: Mapping[int, Tensor] | None = None,
) -> Any:
    """Rebuild a message as the type `into`; `sent` are the arguments that `like` fields refer to.

    `pieces` are the tensors that `Packed.without` left out, by number; the caller loads them. Every problem of the
    message raises WireError.
    """
    limits = limits or Limits()
    with _sender_at_fault():
        if isinstance(message, Packed):
            _check_size(message.size, len(message._header), len(message.tensors), limits)
            return _Reading(dict(enumerate(message.tensors)), sent, limits).whole(message.tree, into)
        tree, heads = _parse(message, limits)
        if twice := heads.keys() & (pieces or {}).keys():
            raise WireError(f"tensor {min(twice)} is both in the message and in another file")
        # Check before any tensor is loaded, and again with the tensors: the library may read the header differently.
        _Reading({**heads, **(pieces or {})}, sent, limits, builds=False).whole(tree, into)
        return _Reading(_load(message) | dict(pieces or {}), sent, limits).whole(tree, into)


@contextlib.contextmanager
def _sender_at_fault() -> Iterator[None]:
    """Turn every parser error into a WireError: an invalid message is the sender's fault."""
    try:
        yield
    except WireError:
        raise
    except (Exception, RecursionError) as e:
        raise WireError(f"{type(e).__name__}: {e}") from None


def decode_field(message: bytes, name: str, into: Any, limits: Limits) -> Any:
    """One field of a message, as the type `into`. The other fields may have any type."""
    with _sender_at_fault():
        tree, _ = _parse(message, limits)
        return _Reading(_load(message), None, limits)(tree[name], into, f".{name}", 0)


def _check_size(size: int, header: int, tensors: int, limits: Limits) -> None:
    if size > limits.bytes:
        raise WireError(f"{size} bytes are over the limit of {limits.bytes}")
    if header > limits.header:
        raise WireError(f"a header of {header} bytes in a message of {size} (limit {limits.header})")
    if tensors > limits.tensors:
        raise WireError(f"{tensors} tensors are over the limit of {limits.tensors}")


def elsewhere_of(blob: bytes, limits: Limits) -> dict[int, Place]:
    """The tensors that `Packed.without` left out, and where the message says they are. Opens no file."""
    with _sender_at_fault():
        files = json.loads(_header_in(blob, limits)["__metadata__"].get("elsewhere", "{}"))
        found = {int(i): (str(file), int(n)) for file, numbers in files.items() for i, n in numbers.items()}
    if len(found) != sum(map(len, files.values())):
        raise WireError("the message names two places for one tensor")
    return found


def _header_in(blob: bytes, limits: Limits) -> dict[str, Any]:
    if len(blob) < 8:
        raise WireError(f"{len(blob)} bytes are too short for a message")
    (n,) = struct.unpack("<Q", blob[:8])
    _check_size(len(blob), n, 0, limits)
    if n > len(blob) - 8:
        raise WireError(f"a header of {n} bytes in a message of {len(blob)}")
    header = json.loads(bytes(blob[8 : 8 + n]))
    _check_size(len(blob), n, len(header) - 1, limits)
    return header


class Slot(NamedTuple):
    """Name, dtype and shape of a tensor that is not loaded yet."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def _parse(blob: bytes, limits: Limits) -> tuple[Any, dict[int, Slot]]:
    """The tree and the header of each tensor. No tensor is loaded; the safetensors library checks the offsets."""
    header = _header_in(blob, limits)
    tree = json.loads(header.pop("__metadata__")["tree"], parse_constant=_refuse_constant)
    heads = {int(k): Slot(k, NAMED[h["dtype"]], tuple(h["shape"])) for k, h in header.items()}
    claimed = sum(math.prod(h.shape) * h.dtype.itemsize for h in heads.values())
    (n,) = struct.unpack("<Q", blob[:8])
    if claimed != len(blob) - 8 - n:
        raise WireError(f"the header announces tensors of {claimed} bytes, the message has {len(blob) - 8 - n}")
    return tree, heads


def _load(blob: bytes) -> dict[int, Tensor]:
    return {int(k): t for k, t in safetensors.torch.load(blob).items()}


def _refuse_constant(s: str) -> None:
    raise WireError(f"a scalar is {s}")


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    every = typing.get_type_hints(cls)
    return {f.name: every[f.name] for f in dataclasses.fields(cls)}


ANY: Any = object()  # marks a value without a tie


class _Reading:
    """One pass over a message, into a declared type.

    With tensor headers it checks everything except the numbers, and builds nothing. With the tensors themselves it
    builds the value. Ties are checked if the arguments of the call (`sent`) are given.
    """

    def __init__(self, tensors: Mapping[int, Any], sent: Mapping[str, Any] | None, limits: Limits, builds: bool = True):
        self.tensors, self.sent, self.limits, self.builds = tensors, sent, limits, builds
        self.finite = builds and limits.finite
        self.used: set[int] = set()

    def whole(self, tree: Any, into: Any) -> Any:
        """The value; every tensor of the message must be used."""
        built = self(tree, into, "", 0)
        if len(self.used) != len(self.tensors):
            raise WireError(f"{len(self.tensors) - len(self.used)} tensors that the type does not declare")
        return built

    def __call__(self, v: Any, into: Any, path: str, depth: int, want: Any = ANY) -> Any:
        if depth > self.limits.depth:
            raise WireError(f"{path}: nested deeper than {self.limits.depth}")
        if into is Tensor:
            return self.tensor(v, path, want)
        origin, args = typing.get_origin(into), typing.get_args(into)
        if origin in (types.UnionType, typing.Union):
            if v is None and type(None) in args and (want is ANY or want is None):
                return None
            return self(v, _only(args, into), path, depth, want)
        if origin is typing.Annotated:
            return self(v, args[0], path, depth, want)
        if want is None:
            raise WireError(f"{path}: it was not asked for")
        if origin is typing.Literal:
            for a in args:
                if type(a) is type(v) and a == v:
                    return v
            raise WireError(f"{path}: {str(v)[:40]!r} is not one of {args}")
        if dataclasses.is_dataclass(into) and isinstance(into, type):
            return self.fields(v, into, path, depth)
        if origin is dict:
            if not isinstance(v, dict):
                raise WireError(f"{path}: expected a mapping, got {type(v).__name__}")
            if want is not ANY and v.keys() != want.keys():
                raise WireError(f"{path}: names differ from what was sent: {sorted(v.keys() ^ want.keys())[:3]}")
            wants = dict.fromkeys(v, ANY) if want is ANY else want
            if args[1] is Tensor and depth < self.limits.depth:
                return {k: self.tensor(x, f"{path}.{k}", wants[k]) for k, x in v.items()}
            return {k: self(x, args[1], f"{path}.{k}", depth + 1, wants[k]) for k, x in v.items()}
        if origin in (list, tuple):
            if not isinstance(v, list):
                raise WireError(f"{path}: expected a list, got {type(v).__name__}")
            if want is not ANY and len(v) != len(want):
                raise WireError(f"{path}: a list of {len(v)}, expected {len(want)}")
            pairs = zip(v, [ANY] * len(v) if want is ANY else want, strict=True)
            return origin(self(x, args[0], f"{path}.{i}", depth + 1, w) for i, (x, w) in enumerate(pairs))
        if into is float and type(v) in (int, float) and math.isfinite(v):
            return float(v)
        if into in (int, bool, str) and type(v) is into:
            if into is int and not _fits(v):
                raise WireError(f"{path}: an integer of {v.bit_length()} bits")
            return v
        if into in (None, type(None)) and v is None:
            return None
        raise WireError(f"{path or 'message'}: expected {getattr(into, '__name__', into)}, got {type(v).__name__}")

    def fields(self, v: Any, into: type, path: str, depth: int) -> Any:
        """A dataclass; with `sent`, its fields must satisfy their ties."""
        hints, built = _hints(into), {}
        if not isinstance(v, dict) or v.keys() != hints.keys():
            got = sorted(v)[:8] if isinstance(v, dict) else type(v).__name__
            raise WireError(f"{path or into.__name__}: fields {got}, expected {sorted(hints)}")
        for f in dataclasses.fields(into):
            tie = f.metadata.get(TIE) if self.sent is not None else None
            want = ANY if tie is None else tie.wanted(self.sent)
            built[f.name] = self(v[f.name], hints[f.name], f"{path}.{f.name}", depth + 1, want)
        return into(**built) if self.builds else None

    def tensor(self, v: Any, path: str, want: Any) -> Any:
        """A tensor, by its number."""
        if not (_is_tensor(v) and v["$"] in self.tensors):
            raise WireError(f"{path or 'message'}: expected a tensor")
        if v["$"] in self.used:
            raise WireError(f"{path}: a tensor is used twice")
        self.used.add(v["$"])
        t = self.tensors[v["$"]]
        if want is not ANY:
            _check_tie(t, want, path)
        elif t.dtype not in DTYPES:
            raise WireError(f"{path}: dtype {t.dtype}")
        # If the sum is finite, all values are: one pass, no mask. A sum may also overflow: hence the second test.
        if self.finite and t.is_floating_point() and not math.isfinite(t.sum().item()) and not torch.isfinite(t).all():
            raise WireError(f"{path}: not finite")
        return t


def _check_tie(t: "Tensor | Slot", want: Any, path: str) -> None:
    if want is None:
        raise WireError(f"{path}: it was not asked for")
    bounded = isinstance(want, _AtMost)
    most = want.largest if bounded else want
    fits = t.shape == most.shape
    if bounded and not fits:
        fits = len(t.shape) == len(most.shape) and all(map(operator.le, t.shape, most.shape))
    if not fits or t.dtype != most.dtype:
        asked = f"{'at most ' * bounded}{tuple(most.shape)} {most.dtype}"
        raise WireError(f"{path}: {tuple(t.shape)} {t.dtype}, expected {asked}")


def _only(args: tuple[Any, ...], into: Any) -> Any:
    kinds = [a for a in args if a is not type(None)]
    if len(kinds) != 1:
        raise WireError(f"{into}: a declared type may be optional, but not a union of several types")
    return kinds[0]


# ---- ties: the layout of a reply in advance -------------------------------------------------------


def check_ties(returns: Any, takes: Mapping[str, Any], where: str) -> None:
    """Refuse a reply type with a tensor that has no tie: a client could make it arbitrarily large."""
    for path, held, tie in _tensors_in(returns):
        if tie is None:
            raise TypeError(
                f"{where}: {path or 'a tensor'} has no size limit; make it a field of a dataclass and tie it to "
                'the arguments with like("weights"), sized("indices", "classes") or at_most("rows")'
            )
        found = [int if isinstance(name, int) else _argument_type(takes, name) for name in tie.names]
        if tie.dtype is None:
            fits = found == [held] and (tie.only is None or _argument_type(takes, tie.only) == list[str])
        elif held == dict[str, Tensor]:
            fits = found == [dict[str, list[int]]]
        else:
            fits = held is Tensor and all(t in (int, Tensor, list[int]) for t in found)
        if not fits:
            names = ", ".join(repr(name) for name in (*tie.names, *([tie.only] if tie.only else [])))
            raise TypeError(f"{where}: {path} is tied to {names}: there is no such argument of the right type")


def _tensors_in(into: Any, path: str = "", tie: Tie | None = None) -> Iterator[tuple[str, Any, Tie | None]]:
    """The fields of a type that hold tensors: path, type and tie of each."""
    into = _present(into)
    if dataclasses.is_dataclass(into) and isinstance(into, type):
        for f in dataclasses.fields(into):
            yield from _tensors_in(_hints(into)[f.name], f"{path}.{f.name}", f.metadata.get(TIE))
    elif into is Tensor or any(True for t in typing.get_args(into) for _ in _tensors_in(t)):
        yield path, into, tie


def _present(into: Any) -> Any:
    """A declared type without Annotated and without its None."""
    if typing.get_origin(into) is typing.Annotated:
        return _present(typing.get_args(into)[0])
    return _only(typing.get_args(into), into) if typing.get_origin(into) in (types.UnionType, typing.Union) else into


def _argument_type(takes: Mapping[str, Any], name: str) -> Any:
    first, *fields = name.split(".")
    found = _present(takes.get(first))
    for f in fields:
        found = _present(_hints(found).get(f)) if isinstance(found, type) and dataclasses.is_dataclass(found) else None
    return found


class Layout:
    """The layout of a reply, known in advance: names, dtypes and shapes follow from its type and the arguments `sent`.

    Its numbers have a fixed order: the tensors in the order of the encoding, then the scalars.
    """

    def __init__(self, into: Any, sent: Mapping[str, Any]):
        self.into, self.exact = into, True  # not exact: the largest size it may have
        self._fills: dict[int, Fill] = {}
        self._blank = self._field(into, sent, "")
        self.size = Packed(self._blank, steady=True).size  # bytes of the message
        self.slots = list(_slots(self._blank, ""))

    def _field(self, into: Any, sent: Mapping[str, Any], path: str) -> Any:
        if dataclasses.is_dataclass(into) and isinstance(into, type):
            ties = {f.name: f.metadata[TIE] for f in dataclasses.fields(into) if TIE in f.metadata}
            return {
                name: self._tied(ties[name].wanted(sent), ties[name].fill)
                if name in ties
                else self._field(hint, sent, f"{path}.{name}")
                for name, hint in _hints(into).items()
            }
        if into in (None, type(None)):
            return None
        if into in (float, int, bool):
            return into()
        raise TypeError(f"{path or 'a reply'} of type {into}: its size cannot be known in advance")

    def _tied(self, want: Any, fill: Fill | None) -> Any:
        if isinstance(want, _AtMost):
            self.exact, want = False, want.largest
        if isinstance(want, Tensor):
            blank = torch.empty_like(want, device="meta")
            if fill is not None:
                self._fills[id(blank)] = fill
            return blank
        if isinstance(want, Mapping):
            return {name: self._tied(w, fill) for name, w in want.items()}
        return want if want is None else [self._tied(w, fill) for w in want]

    def flatten(self, value: Any) -> Tensor:
        """The numbers of a reply as one float64 vector. Integers are exact up to 2^53."""
        packed = Packed(_ordered(value, self._blank))
        for t, slot in zip(packed.tensors, self.slots, strict=True):
            _check_tie(t, slot, slot.name)
        beside = torch.tensor([float(n) for n in _numbers(packed.tree)], dtype=torch.float64)
        return torch.cat([*(t.double().flatten() for t in packed.tensors), beside])

    def unflatten(self, vector: Tensor) -> Any:
        """The reply with these numbers."""
        sizes = [math.prod(slot.shape) for slot in self.slots]
        *flat, beside = vector.split([*sizes, len(vector) - sum(sizes)])
        tensors, numbers = iter(flat), iter(beside.tolist())

        def tensor(blank: Tensor) -> Tensor:
            t = next(tensors)
            return (t if blank.is_floating_point() else t.round()).to(blank.dtype).view(blank.shape)

        def number(zero: float) -> float:
            x = next(numbers)
            return type(zero)(round(x)) if isinstance(zero, int) else x

        return decode(Packed(_mapped(self._blank, tensor, number)), self.into)

    def example(self, examples: int) -> Any:
        """An untrained reply of a client with `examples` examples: zeros, where zeros are valid."""

        def tensor(blank: Tensor) -> Tensor:
            zeros = torch.zeros(blank.shape, dtype=blank.dtype)
            fill = self._fills.get(id(blank))
            return zeros if fill is None else fill(zeros, examples)

        return _mapped(self._blank, tensor, lambda n: n)


def _slots(blank: Any, path: str) -> Iterator[Slot]:
    if isinstance(blank, Tensor):
        yield Slot(path, blank.dtype, tuple(blank.shape))
    elif isinstance(blank, dict | list):
        for name, b in blank.items() if isinstance(blank, dict) else enumerate(blank):
            yield from _slots(b, f"{path}.{name}")


def _ordered(value: Any, blank: Any) -> Any:
    """The value with its names in the order of `blank`. Clients may send them in any order."""
    if isinstance(blank, dict):
        named = value if isinstance(value, Mapping) else vars(value)
        if named.keys() != blank.keys():
            raise WireError(f"names differ from the layout: {sorted(named.keys() ^ blank.keys())[:3]}")
        return {name: _ordered(named[name], b) for name, b in blank.items()}
    return [_ordered(*pair) for pair in zip(value, blank, strict=True)] if isinstance(blank, list) else value


def _mapped(v: Any, tensor: Callable[[Tensor], Tensor], number: Callable[[Any], Any]) -> Any:
    """The tree with `tensor` applied to its tensors and `number` to its numbers."""
    if isinstance(v, Tensor):
        return tensor(v)
    if isinstance(v, dict):
        return {k: _mapped(x, tensor, number) for k, x in v.items()}
    if isinstance(v, list):
        return [_mapped(x, tensor, number) for x in v]
    return v if v is None else number(v)


def check_type(into: Any, where: str, depth: int = 0) -> None:
    """Refuse a type that cannot be sent. Called when a task or a method is defined."""
    origin, args = typing.get_origin(into), typing.get_args(into)
    if depth > Limits.depth:
        raise TypeError(f"{where}: nested too deeply")
    inner: Callable[[Any], None] = lambda t: check_type(t, where, depth + 1)  # noqa: E731
    if into in (Tensor, int, float, bool, str, None, type(None)) or origin is typing.Literal:
        return
    if origin in (types.UnionType, typing.Union):
        return inner(_only(args, into))
    if origin is typing.Annotated:
        return inner(args[0])
    if dataclasses.is_dataclass(into) and isinstance(into, type):
        for t in _hints(into).values():
            inner(t)
        return
    if (origin is dict and args[0] is str) or origin is list or (origin is tuple and args[1:] == (...,)):
        return inner(args[1] if origin is dict else args[0])
    raise TypeError(
        f"{where}: {into} cannot be sent; use Tensor, int, float, bool, str, None, "
        "Literal, list[...], dict[str, ...] or a dataclass of these"
    )
