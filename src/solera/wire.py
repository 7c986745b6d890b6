"""What may cross the wire: trees of tensors and plain scalars. Nothing else, and never code.

A message is one safetensors blob: tensors are stored as tensors, the tree around them is JSON in the blob's
metadata. The receiver rebuilds the tree *into a type it already knows* (a task's annotations), so no class,
module or function name is ever read from a message, and whatever the type does not declare is refused.

Inside one process a message need not become bytes at all: `Packed` holds the flattened value, knows its exact
encoded size, and is rebuilt by the same `decode` with the same checks.
"""

import dataclasses
import functools
import hashlib
import json
import math
import re
import struct
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from .errors import ConfigError, SoleraError

Place = tuple[str, int]  # a file, and the number of a tensor in it


class WireError(SoleraError, ValueError):
    """A message that is malformed, too large, or not what the receiver declared."""


SAFE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


def safe_name(name: str, what: str) -> str:
    """`name`, if it may become part of a path; names come from configurations and from other machines."""
    if not SAFE_NAME.fullmatch(name):
        raise ConfigError(
            f"{what} {name[:80]!r}: lower-case letters, digits, '.', '_' and '-' only, at most 64, "
            "beginning with a letter or digit"
        )
    return name


@dataclasses.dataclass(frozen=True)
class Limits:
    """How large a message may be. Checked before anything is allocated for its content."""

    bytes: int = 1 << 31
    tensors: int = 100_000
    header: int = 16 << 20
    depth: int = 32
    finite: bool = True  # no NaN and no infinity in a tensor


# For files a run wrote itself: as large as its state is, and to the bit what was written (100 MB is the library's cap).
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


def like(name: str) -> Any:
    """Field marker: this value must have the names, shapes and dtypes of the argument `name` that was sent."""
    return dataclasses.field(metadata={"like": name})


def sized(*names: str) -> Any:
    """Field marker: a tensor of the size that was asked for, where nothing of that size was sent.

    Each name is one dimension, an argument that was sent: an integer, or a tensor, which counts by its length.
    """
    return dataclasses.field(metadata={"sized": names})


# ---- flattening and encoding ----------------------------------------------------------------------


class Packed:
    """A value ready to travel: counted exactly at once, turned into bytes only if it has to leave the process."""

    def __init__(self, value: Any):
        found: list[Tensor] = []
        self.tree = _flatten(value, found, 0)
        self.tensors = [_portable(t) for t in found]
        self.memo: dict[str, Any] = {}  # the receiver's decoded copy, when many clients get the same message

    @functools.cached_property
    def _order(self) -> list[int]:
        # Largest element type first keeps every tensor aligned in the blob.
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
        return text + b" " * (-len(text) % 8)

    @functools.cached_property
    def size(self) -> int:
        """Bytes of `blob`, without making it."""
        return 8 + len(self._header) + sum(t.numel() * t.element_size() for t in self.tensors)

    @property
    def blob(self) -> bytes:
        """The safetensors encoding. Written here rather than by the library so that `size` is exact and no
        tensor is copied twice; reading is left to the library."""
        return self._joined(self._header, self._order)

    def without(self, elsewhere: Mapping[int, Place]) -> bytes:
        """The encoding less the tensors that other files hold already; it says of each in which, under which number."""
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
        """How many floating-point numbers the tensors hold."""
        return sum(t.numel() for t in self.tensors if t.is_floating_point())

    @property
    def integers(self) -> int:
        """How many integers (and booleans) the tensors hold."""
        return sum(t.numel() for t in self.tensors if not t.is_floating_point())

    @property
    def versions(self) -> list[int]:
        """Torch's modification counters: they tell whether somebody wrote into a shared message."""
        return [t._version for t in self.tensors]


def encode(value: Any) -> bytes:
    """A dataclass, mapping, list, scalar or tensor as one safetensors blob."""
    return Packed(value).blob


def leaves(value: Any) -> list[Tensor]:
    """The very tensors of a value, in the order in which its encoding numbers them."""
    found: list[Tensor] = []
    _flatten(value, found, 0)
    return found


def digest(value: Any) -> str:
    """sha256 of the encoding: equal if and only if every name, shape, dtype and bit is equal."""
    return hashlib.sha256(encode(value)).hexdigest()


def _flatten(v: Any, tensors: list[Tensor], depth: int) -> Any:
    if depth > Limits.depth:
        raise WireError("a value nested too deeply (or containing itself) may not cross the wire")
    if isinstance(v, Tensor):
        if v.dtype not in DTYPES or v.layout != torch.strided:
            raise WireError(f"a tensor of {v.dtype}, {v.layout} may not cross the wire")
        tensors.append(v)
        return {"$": len(tensors) - 1}
    if dataclasses.is_dataclass(v) and not isinstance(v, type):
        return {f.name: _flatten(getattr(v, f.name), tensors, depth + 1) for f in dataclasses.fields(v)}
    if isinstance(v, Mapping):
        for k in v:
            if not isinstance(k, str):
                raise WireError(f"mapping key {k!r} is {type(k).__name__}, not str: it may not cross the wire")
        return {k: _flatten(x, tensors, depth + 1) for k, x in v.items()}
    if isinstance(v, list | tuple):
        return [_flatten(x, tensors, depth + 1) for x in v]
    if isinstance(v, float) and not math.isfinite(v):
        raise WireError(f"the scalar {v} is not finite")
    if isinstance(v, int) and not _fits(v):
        raise WireError(f"an integer of {v.bit_length()} bits may not cross the wire: 64 are the limit")
    if v is None or isinstance(v, bool | int | float | str):
        return v
    raise WireError(f"{type(v).__name__} may not cross the wire")


def _portable(t: Tensor) -> Tensor:
    """One layout on every engine; an inference-mode tensor carries no modification counter."""
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

    `pieces` are the tensors that `Packed.without` left out, by their numbers; whoever reads the file brings them.
    Raises WireError for whatever is wrong with the message, and nothing else.
    """
    limits = limits or Limits()
    try:
        if isinstance(message, Packed):
            _check_size(message.size, len(message._header), len(message.tensors), limits)
            tree, tensors = message.tree, dict(enumerate(message.tensors))
        else:
            tree, tensors = _parse(message, limits)
        if twice := tensors.keys() & (pieces or {}).keys():
            raise WireError(f"tensor {min(twice)} is here and elsewhere")
        tensors |= pieces or {}
        used: set[int] = set()
        built = _build(tree, into, tensors, used, sent or {}, "", 0, limits)
        if len(used) != len(tensors):
            raise WireError(f"{len(tensors) - len(used)} tensors that nothing declares")
        return built
    except WireError:
        raise
    except (Exception, RecursionError) as e:  # whatever a parser trips over is the sender's fault
        raise WireError(f"{type(e).__name__}: {e}") from None


def decode_field(message: bytes, name: str, into: Any, limits: Limits) -> Any:
    """One field of a message, as the type `into`; the others may be of any type."""
    try:
        tree, tensors = _parse(message, limits)
        return _build(tree[name], into, tensors, set(), {}, f".{name}", 0, limits)
    except WireError:
        raise
    except (Exception, RecursionError) as e:
        raise WireError(f"{type(e).__name__}: {e}") from None


def _check_size(size: int, header: int, tensors: int, limits: Limits) -> None:
    if size > limits.bytes:
        raise WireError(f"{size} bytes is over the limit of {limits.bytes}")
    if header > limits.header:
        raise WireError(f"a header of {header} bytes in a message of {size} (limit {limits.header})")
    if tensors > limits.tensors:
        raise WireError(f"{tensors} tensors is over the limit of {limits.tensors}")


def elsewhere_of(blob: bytes, limits: Limits) -> dict[int, Place]:
    """The tensors that `Packed.without` left out, and where they are said to be; nothing is opened."""
    try:
        files = json.loads(_header_in(blob, limits)["__metadata__"].get("elsewhere", "{}"))
        found = {int(i): (str(file), int(n)) for file, numbers in files.items() for i, n in numbers.items()}
    except WireError:
        raise
    except (Exception, RecursionError) as e:
        raise WireError(f"{type(e).__name__}: {e}") from None
    if len(found) != sum(map(len, files.values())):
        raise WireError("a tensor in two places")
    return found


def _header_in(blob: bytes, limits: Limits) -> dict[str, Any]:
    if len(blob) < 8:
        raise WireError(f"{len(blob)} bytes is no message")
    (n,) = struct.unpack("<Q", blob[:8])
    _check_size(len(blob), n, 0, limits)
    if n > len(blob) - 8:
        raise WireError(f"a header of {n} bytes in a message of {len(blob)}")
    header = json.loads(blob[8 : 8 + n])
    _check_size(len(blob), n, len(header) - 1, limits)
    return header


def _parse(blob: bytes, limits: Limits) -> tuple[Any, dict[int, Tensor]]:
    header = _header_in(blob, limits)
    tree = json.loads(header["__metadata__"]["tree"], parse_constant=_refuse_constant)
    return tree, {int(k): t for k, t in safetensors.torch.load(blob).items()}


def _refuse_constant(s: str) -> None:
    raise WireError(f"{s} in a scalar")


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    every = typing.get_type_hints(cls)
    return {f.name: every[f.name] for f in dataclasses.fields(cls)}


def _build(
    v: Any,
    into: Any,
    tensors: dict[int, Tensor],
    used: set[int],
    sent: Mapping,
    path: str,
    depth: int,
    limits: Limits,
) -> Any:
    if depth > limits.depth:
        raise WireError(f"{path}: nested deeper than {limits.depth}")

    def go(x: Any, t: Any, p: str) -> Any:
        return _build(x, t, tensors, used, sent, f"{path}.{p}", depth + 1, limits)

    if into is Tensor:
        return _tensor(v, tensors, used, path, limits.finite)
    origin, args = typing.get_origin(into), typing.get_args(into)
    if origin in (types.UnionType, typing.Union):
        if v is None and type(None) in args:
            return None
        return _build(v, _only(args, into), tensors, used, sent, path, depth, limits)
    if origin is typing.Annotated:
        return _build(v, args[0], tensors, used, sent, path, depth, limits)
    if origin is typing.Literal:
        for a in args:
            if type(a) is type(v) and a == v:
                return v
        raise WireError(f"{path}: {str(v)[:40]!r} is none of {args}")
    if dataclasses.is_dataclass(into) and isinstance(into, type):
        hints = _hints(into)
        if not isinstance(v, dict) or set(v) != {f.name for f in dataclasses.fields(into)}:
            got = sorted(v)[:8] if isinstance(v, dict) else type(v).__name__
            raise WireError(f"{path or into.__name__}: fields {got}, expected {sorted(hints)}")
        built = {f.name: go(v[f.name], hints[f.name], f.name) for f in dataclasses.fields(into)}
        for f in dataclasses.fields(into):
            if "like" in f.metadata:
                _same_shapes(built[f.name], sent.get(f.metadata["like"]), f"{path}.{f.name}")
            if "sized" in f.metadata:
                _right_size(built[f.name], [sent.get(n) for n in f.metadata["sized"]], f"{path}.{f.name}")
        return into(**built)
    if origin is dict:
        if not isinstance(v, dict):
            raise WireError(f"{path}: expected a mapping, got {type(v).__name__}")
        return {k: go(x, args[1], k) for k, x in v.items()}
    if origin in (list, tuple):
        if not isinstance(v, list):
            raise WireError(f"{path}: expected a list, got {type(v).__name__}")
        return origin(go(x, args[0], str(i)) for i, x in enumerate(v))
    if into is float and type(v) in (int, float) and math.isfinite(v):
        return float(v)
    if into in (int, bool, str) and type(v) is into:
        if into is int and not _fits(v):
            raise WireError(f"{path}: an integer of {v.bit_length()} bits")
        return v
    if into in (None, type(None)) and v is None:
        return None
    raise WireError(f"{path or 'message'}: expected {getattr(into, '__name__', into)}, got {type(v).__name__}")


def _only(args: tuple[Any, ...], into: Any) -> Any:
    kinds = [a for a in args if a is not type(None)]
    if len(kinds) != 1:
        raise WireError(f"{into}: a declared type may be optional, but not a choice of several types")
    return kinds[0]


def _tensor(v: Any, tensors: dict[int, Tensor], used: set[int], path: str, finite: bool) -> Tensor:
    if not (isinstance(v, dict) and set(v) == {"$"} and type(v["$"]) is int and v["$"] in tensors):
        raise WireError(f"{path or 'message'}: expected a tensor")
    if v["$"] in used:
        raise WireError(f"{path}: a tensor used twice")
    used.add(v["$"])
    t = tensors[v["$"]]
    if t.dtype not in DTYPES:
        raise WireError(f"{path}: dtype {t.dtype}")
    # A sum is finite unless something is not (or it overflows): one pass, and no mask is allocated.
    if finite and t.is_floating_point() and not math.isfinite(t.sum().item()) and not torch.isfinite(t).all():
        raise WireError(f"{path}: not finite")
    return t


def _same_shapes(got: Any, want: Any, path: str) -> None:
    if want is None:
        return
    if isinstance(want, Tensor):
        got, want = {"": got}, {"": want}
    if set(got) != set(want):
        odd = sorted(set(got) ^ set(want))
        raise WireError(f"{path}: names differ from what was sent: {odd[:3]}")
    for k, t in want.items():
        if got[k].shape != t.shape or got[k].dtype != t.dtype:
            raise WireError(f"{path}.{k}: {tuple(got[k].shape)} {got[k].dtype}, sent was {tuple(t.shape)} {t.dtype}")


def _right_size(got: Tensor, asked: list[Any], path: str) -> None:
    if any(a is None for a in asked):
        return
    want = tuple(len(a) if isinstance(a, Tensor) else a for a in asked)
    if tuple(got.shape) != want:
        raise WireError(f"{path}: {tuple(got.shape)}, asked for was {want}")


def likes(into: Any) -> set[str]:
    """The names that `like` and `sized` fields of this type refer to."""
    found = set().union(*(likes(t) for t in typing.get_args(into)))
    if dataclasses.is_dataclass(into) and isinstance(into, type):
        for f in dataclasses.fields(into):
            found |= likes(_hints(into)[f.name]) | {n for n in [f.metadata.get("like")] if n is not None}
            found |= set(f.metadata.get("sized", ()))
    return found


def check_type(into: Any, where: str, depth: int = 0) -> None:
    """Refuse, when a task or a method is defined, a type that could not cross the wire."""
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
        f"{where}: {into} may not cross the wire; use Tensor, int, float, bool, str, None, "
        "Literal, list[...], dict[str, ...] or a dataclass of these"
    )
