"""What people add, and how it is found: by a name, or by a path to code.

Methods, models, data sets and engines each have a `Registry`. A name gets into it by a decorator (`@register("mine")`)
or by an entry point of an installed package (group `solera.methods`, `.models`, `.datasets`, `.engines`). Wherever a
name is wanted a path will do: `package.module:attribute`, or `file.py:attribute` with the file beside the TOML. A name
wins over a path, and a reserved prefix (`hf:`) over both.

**A path is code.** `load` alone imports it, and only inside `code_allowed`: the commands that run something open it for
a configuration that the person named, and `runs.trust` decides about those in run directories. Nothing in a message, a
checkpoint or a model file is ever taken for a path. A file is imported once in a process, from the very bytes of which
the sha256 is recorded. Nothing here imports torch.
"""

import contextlib
import contextvars
import difflib
import hashlib
import importlib
import importlib.abc
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from .errors import ConfigError
from .files import read_file

T = TypeVar("T")
D = TypeVar("D")
log = logging.getLogger("solera")

KEYS = ("method.name", "models.clients", "models.server", "data.name", "public.name", "engine.name")  # may be paths
RESERVED = ("hf:",)  # prefixes that are no module
PATH = re.compile(r"(?P<module>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*|[^\0\n]*\.py):(?P<attribute>[A-Za-z_]\w*)", re.ASCII)
FORM = "'package.module:attribute', or 'file.py:attribute' with the file beside the TOML"
_BESIDE: contextvars.ContextVar[Path | None] = contextvars.ContextVar("solera_code", default=None)
_SHA256: dict[str, str] = {}  # path -> of the file it was imported from


# ---- paths as texts: nothing is imported ------------------------------------------------------------


def is_path(name: object) -> bool:
    """Whether a name has the form of a path to code."""
    return isinstance(name, str) and not name.startswith(RESERVED) and PATH.fullmatch(name) is not None


def label(name: str) -> str:
    """A name for people: of a path to a file, without its folders."""
    return name.rpartition("/")[2] if is_path(name) else name


def short(name: str) -> str:
    """A name that can be that of a folder: of a path, the attribute alone."""
    return name.rpartition(":")[2] if is_path(name) else name


def architectures(models: Iterable[str]) -> dict[str, str]:
    """What models are called in a run, with the names they have in a configuration.

    A model that a path names is called by its attribute, in lower case; a number tells apart those that would be called
    the same.
    """
    given = list(dict.fromkeys(models))
    called = {name: name for name in given if not is_path(name)}
    for name in given:
        if is_path(name):
            first = free = short(name).lower().lstrip("_")
            n = 1
            while free in called:
                n += 1
                free = f"{first}-{n}"
            called[free] = name
    return called


def anchored(tables: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Tables of a configuration with paths to files made absolute, so that they mean the same from anywhere."""
    out = dict(tables)
    for key in KEYS:
        table, _, leaf = key.partition(".")
        if isinstance(inside := out.get(table), Mapping) and leaf in inside:
            value = inside[leaf]
            whole = [absolute(n, folder) for n in value] if isinstance(value, list) else absolute(value, folder)
            out[table] = {**inside, leaf: whole}
    return out


def absolute(name: Any, folder: Path) -> Any:
    """A path to a file with all its folders; any other name as it is."""
    origin, _, attribute = name.rpartition(":") if is_path(name) else ("", "", "")
    return f"{os.path.abspath(folder / os.path.expanduser(origin))}:{attribute}" if origin.endswith(".py") else name


def paths_in(tables: Mapping[str, Any]) -> dict[str, str]:
    """The paths to code that tables of a configuration name, each with the first key that names it."""
    found: dict[str, str] = {}
    for key in KEYS:
        table, _, leaf = key.partition(".")
        inside = tables.get(table)
        value = inside.get(leaf) if isinstance(inside, Mapping) else None
        for name in value if isinstance(value, list) else [value]:
            if isinstance(name, str) and is_path(name):
                found.setdefault(name, key)
    return found


# ---- importing --------------------------------------------------------------------------------------


@contextlib.contextmanager
def code_allowed(beside: str | os.PathLike[str]) -> Iterator[None]:
    """Let paths be imported. Where tables do not come from a file, `beside` is the folder of the files they name."""
    token = _BESIDE.set(Path(beside).absolute())
    try:
        yield
    finally:
        _BESIDE.reset(token)


def allowed() -> Path | None:
    """The folder for which `code_allowed` is open; None: code is not allowed."""
    return _BESIDE.get()


def load(path: str, what: str) -> Any:
    """What a path names; `what` begins the message of an error. Refused outside of `code_allowed`."""
    if (folder := allowed()) is None:
        raise ConfigError(
            f"{what} names code, which is imported only by commands that run something (run, resume, sweep, predict, "
            "export), from a configuration you name; from Python, inside of solera.plugins.code_allowed(FOLDER)"
        )
    origin, _, attribute = path.rpartition(":")
    try:
        module = _file(folder / origin) if origin.endswith(".py") else importlib.import_module(origin)
    except ModuleNotFoundError as e:
        raise ConfigError(f"{what}: there is no module {e.name!r}: is it installed?{_hint(origin, folder)}") from e
    except OSError as e:
        raise ConfigError(f"{what}: {e.filename or origin}: {e.strerror or e}") from e
    except Exception as e:  # whatever somebody's code raises
        raise ConfigError(f"{what} cannot be imported: {type(e).__name__}: {e}") from e
    if not hasattr(module, attribute):
        near = difflib.get_close_matches(attribute, vars(module), 1)
        raise ConfigError(f"{what}: {origin} has no {attribute!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    _SHA256.setdefault(path, _sha256(module))
    return getattr(module, attribute)


def sha256_of(path: str) -> str | None:
    """The sha256 of the file that a path was imported from; None if it was not imported here."""
    return _SHA256.get(path)


def sha256_of_file(path: str, folder: Path) -> str | None:
    """The sha256 of the file that a path names now, without importing it; None if it names a module, or no file."""
    origin = path.rpartition(":")[0]
    try:
        return hashlib.sha256(read_file(folder / origin)).hexdigest() if origin.endswith(".py") else None
    except OSError:
        return None


class _Bytes(importlib.abc.SourceLoader):
    """Runs the bytes that were read, and no other: no bytecode of an earlier or later version is looked for."""

    def __init__(self, file: Path):
        self.file, self.source = file, read_file(file)

    def get_filename(self, fullname: str) -> str:
        return str(self.file)

    def get_data(self, path: Any) -> bytes:
        return self.source


def _file(file: Path) -> ModuleType:
    name = f"solera_own_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    if name not in sys.modules:
        loader = _Bytes(file)
        spec = importlib.util.spec_from_file_location(name, file, loader=loader)
        assert spec is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        module.__sha256__ = hashlib.sha256(loader.source).hexdigest()  # type: ignore[attr-defined]
    return sys.modules[name]


def _sha256(module: ModuleType) -> str:
    """Of the file that a module came from; "" if it came from none."""
    if (known := getattr(module, "__sha256__", None)) is not None:
        return known
    try:
        return hashlib.sha256(read_file(module.__file__ or "")).hexdigest()
    except OSError:
        return ""


def _hint(origin: str, folder: Path) -> str:
    if origin.endswith(".py"):
        return " (A file beside the TOML is found by its path only, not by another file.)"
    file = Path(*origin.split(".")).with_suffix(".py")
    return f" The file beside the TOML is '{file}:...'." if (folder / file).is_file() else ""


# ---- what there is of one kind ----------------------------------------------------------------------


class Registry(dict[str, T], Generic[T]):
    """What there is of one kind, by name.

    `kind` is what one is called, `group` that of the entry points. `accept(thing, name)` makes the entry of a class or
    function, or raises a TypeError that says what is wrong with it. `ours` are entries that come with the library.
    """

    def __init__(self, kind: str, group: str, accept: Callable[[Any, str], T], ours: Mapping[str, T] | None = None):
        super().__init__(ours or {})
        self.kind, self.group, self.accept = kind, group, accept
        self._taken = set(self)  # the names of what comes with the library

    def register(self, name: str) -> Callable[[D], D]:
        """The decorator that makes something available by name."""

        def add(thing: D) -> D:
            self.add(name, self.accept(thing, name), ours=getattr(thing, "__module__", "").startswith("solera."))
            return thing

        return add

    def add(self, name: str, entry: T, ours: bool = False) -> None:
        """Put an entry under its name. A name of the library's own (`ours`) is taken."""
        if is_path(name) or name.startswith(RESERVED):
            raise ConfigError(f"{self.kind} name {name!r}: this is how a path is written; register it under a word")
        if name in self._taken and not ours:
            raise ConfigError(f"{self.kind} name {name!r} is taken by solera; register yours under another name")
        self._taken |= {name} if ours else set()
        self[name] = entry

    def find(self, name: str, key: str | None = None) -> T:
        """What is called `name`: registered, an entry point, or where a path leads. `key`: the setting that asks."""
        what = f"{key} = {name!r}" if key else f"{self.kind} {name!r}"
        name = absolute(name, allowed() or Path.cwd())
        if name not in self and is_path(name):
            self._import(name, what)
        elif name not in self and not self._import_entry_point(name):
            raise ConfigError(f"{what} is not known; {self.hint(name)}")
        return self[name]

    def names(self) -> list[str]:
        """Every name that is not a path, those of entry points included: nothing is imported."""
        points = dict.fromkeys(point.name for point in _entry_points(group=self.group))
        return [*(n for n in self if not is_path(n)), *(n for n in points if n not in self)]

    def hint(self, name: str) -> str:
        """What was probably meant by a name that is not known."""
        if near := difflib.get_close_matches(name, self.names(), 3):
            return f"did you mean {' or '.join(map(repr, near))}?"
        if ":" in name or ".py" in name:
            return f"a path to code is {FORM}"
        return "known are: " + ", ".join(sorted(self.names()))

    def load_entry_points(self) -> None:
        """Import all that installed packages declare; what fails is left out with a warning."""
        for name in self.names():
            try:
                self.find(name)
            except ConfigError as e:
                log.warning("%s", e)

    def name_of(self, entry: T) -> str | None:
        """The name by which a new process finds an entry: the library's own, or its path, if it came by one."""
        names = [n for n, known in self.items() if known is entry]
        return min(names, key=lambda n: (n not in self._taken, not is_path(n)), default=None)

    def _import(self, path: str, what: str) -> None:
        try:
            self[path] = self.accept(load(path, what), path)
        except TypeError as e:
            raise ConfigError(f"{what}: {e}") from None

    def _import_entry_point(self, name: str) -> bool:
        """Whether there is an entry point of that name, which is then registered."""
        for point in _entry_points(group=self.group, name=name):
            try:
                thing = point.load()  # which may register itself
                if name not in self:
                    self.register(name)(thing)
            except Exception as e:  # whatever somebody's package raises
                package = point.dist.name if point.dist is not None else point.value
                raise ConfigError(
                    f"{self.kind} {name!r} of the package {package!r} cannot be used: {type(e).__name__}: {e}"
                ) from e
        return name in self


def _entry_points(**wanted: str) -> Iterable[Any]:
    import importlib.metadata  # slow to import, and `solera --help` comes by here

    return importlib.metadata.entry_points(**wanted)
