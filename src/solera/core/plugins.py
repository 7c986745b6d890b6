"""Plug-ins: code of other people, found by a name or by a path.

Methods, models, data sets and engines each have a `Registry`. A decorator (`@register("mine")`) adds a name to it, or
an entry point of an installed package (group `solera.methods`, `.models`, `.datasets`, `.engines`). A setting that
takes a name also takes a path: `package.module:attribute`, or `file.py:attribute` with the file beside the TOML. A name
takes precedence over a path, and a reserved prefix (`hf:`) over both.

**A path is code.** Only `load` imports it, and only inside `code_allowed`. The commands that run something allow it for
a configuration that the user named; `runs.trust` decides about those in run directories. Nothing in a message, a
checkpoint or a model file is ever used as a path. A file is imported once in a process, and from the same bytes whose
sha256 is recorded. This module does not import torch.
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
SITE_KEYS = ("data", "model")  # of each [sites.NAME], may be paths
RESERVED = ("hf:",)  # prefixes that are not modules
PATH = re.compile(r"(?P<module>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*|[^\0\n]*\.py):(?P<attribute>[A-Za-z_]\w*)", re.ASCII)
FORM = "'package.module:attribute', or 'file.py:attribute' with the file beside the TOML"
_BESIDE: contextvars.ContextVar[Path | None] = contextvars.ContextVar("solera_code", default=None)
_SHA256: dict[str, str] = {}  # path -> sha256 of the file it was imported from


# ---- paths as text: nothing is imported -------------------------------------------------------------


def is_path(name: object) -> bool:
    """True if a name has the form of a path to code."""
    return isinstance(name, str) and not name.startswith(RESERVED) and PATH.fullmatch(name) is not None


def label(name: str) -> str:
    """A name for display: a path to a file is shown without its folders."""
    return name.rpartition("/")[2] if is_path(name) else name


def short(name: str) -> str:
    """A name that can be used for a folder: of a path, only the attribute."""
    if isinstance(name, str) and name.startswith(RESERVED):  # of a folder or repository, its last part
        return name.partition(":")[2].partition("@")[0].rstrip("/").rpartition("/")[2]
    return name.rpartition(":")[2] if is_path(name) else name


def architectures(models: Iterable[str]) -> dict[str, str]:
    """The names of the models in a run, mapped to their names in the configuration.

    A model that is given by a path is named after its attribute, in lower case, one of Hugging Face after its
    repository or folder. Equal names get a number.
    """
    given = list(dict.fromkeys(models))
    called = {name: name for name in given if not (is_path(name) or name.startswith(RESERVED))}
    for name in given:
        if is_path(name) or name.startswith(RESERVED):
            first = free = re.sub(r"[^a-z0-9._-]", "-", short(name).lower()).lstrip("._-") or "model"
            n = 1
            while free in called:
                n += 1
                free = f"{first}-{n}"
            called[free] = name
    return called


def anchored(tables: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Tables of a configuration with absolute paths to files, so that they do not depend on the current folder."""
    return _with_names(tables, lambda name, _: absolute(name, folder))


def paths_in(tables: Mapping[str, Any]) -> dict[str, str]:
    """The paths to code in the tables of a configuration, each with the first key that names it."""
    found: dict[str, str] = {}
    _with_names(tables, lambda name, key: found.setdefault(name, key) if is_path(name) else None)
    return found


def _with_names(tables: Mapping[str, Any], change: Callable[[Any, str], Any]) -> dict[str, Any]:
    """The tables with `change(name, key)` instead of every name that may be a path. The input is not changed."""
    out, sites = dict(tables), tables.get("sites")
    wanted = [key.split(".") for key in KEYS]
    wanted += [["sites", site, leaf] for site in (sites if isinstance(sites, Mapping) else ()) for leaf in SITE_KEYS]
    for path in wanted:
        home: Any = out
        for name in path[:-1]:
            if isinstance(home.get(name), Mapping):
                home[name] = dict(home[name])
                home = home[name]
            else:
                home = {}
        if path[-1] in home:
            value, key = home[path[-1]], ".".join(map(str, path))
            home[path[-1]] = [change(n, key) for n in value] if isinstance(value, list) else change(value, key)
    return out


def absolute(name: Any, folder: Path) -> Any:
    """A path to a file or a folder, made absolute; any other name unchanged."""
    if isinstance(name, str) and name.startswith(RESERVED):
        prefix, _, where = name.partition(":")
        near = where.startswith(("./", "../", "~"))
        return f"{prefix}:{os.path.abspath(folder / os.path.expanduser(where))}" if near else name
    origin, _, attribute = name.rpartition(":") if is_path(name) else ("", "", "")
    return f"{os.path.abspath(folder / os.path.expanduser(origin))}:{attribute}" if origin.endswith(".py") else name


# ---- importing --------------------------------------------------------------------------------------


@contextlib.contextmanager
def code_allowed(beside: str | os.PathLike[str]) -> Iterator[None]:
    """Allow the import of paths. `beside` is the folder of the files named in tables that do not come from a file."""
    token = _BESIDE.set(Path(beside).absolute())
    try:
        yield
    finally:
        _BESIDE.reset(token)


def allowed() -> Path | None:
    """The folder given to `code_allowed`; None if code is not allowed."""
    return _BESIDE.get()


def load(path: str, what: str) -> Any:
    """Import the object at a path; `what` begins the error message. Refused outside `code_allowed`."""
    if (folder := allowed()) is None:
        raise ConfigError(
            f"{what} names code. Only commands that run something (run, resume, sweep, predict, export) import code, "
            "from a configuration that you name; in Python, use `with solera.core.plugins.code_allowed(FOLDER):`"
        )
    origin, _, attribute = path.rpartition(":")
    try:
        module = _file(folder / origin) if origin.endswith(".py") else importlib.import_module(origin)
    except ModuleNotFoundError as e:
        file, hint = Path(*origin.split(".")).with_suffix(".py"), ""
        if origin.endswith(".py"):
            hint = " (Files beside the TOML cannot import each other: each is found only by its path.)"
        elif (folder / file).is_file():
            hint = f" For the file beside the TOML, write '{file}:...'."
        raise ConfigError(f"{what}: there is no module {e.name!r}: is it installed?{hint}") from e
    except OSError as e:
        raise ConfigError(f"{what}: {e.filename or origin}: {e.strerror or e}") from e
    except Exception as e:  # a user's code may raise anything
        raise ConfigError(f"{what} cannot be imported: {type(e).__name__}: {e}") from e
    if not hasattr(module, attribute):
        near = difflib.get_close_matches(attribute, vars(module), 1)
        raise ConfigError(f"{what}: {origin} has no {attribute!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    _SHA256.setdefault(path, _sha256(module))
    return getattr(module, attribute)


def sha256_of(path: str) -> str | None:
    """The sha256 of the file that a path was imported from; None if this process has not imported it."""
    return _SHA256.get(path)


def sha256_of_file(path: str, folder: Path) -> str | None:
    """The current sha256 of the file that a path names, without an import; None for a module or a missing file."""
    origin = path.rpartition(":")[0]
    try:
        return hashlib.sha256(read_file(folder / origin)).hexdigest() if origin.endswith(".py") else None
    except OSError:
        return None


class _Bytes(importlib.abc.SourceLoader):
    """Runs exactly the bytes that were read: no cached bytecode of another version is used."""

    def __init__(self, file: Path, source: bytes):
        self.file, self.source = file, source

    def get_filename(self, fullname: str) -> str:
        return str(self.file)

    def get_data(self, path: Any) -> bytes:
        return self.source


def files_of_code() -> dict[str, bytes]:
    """The files that this process has imported by their paths, as they were then."""
    loaders = [getattr(module, "__loader__", None) for module in list(sys.modules.values())]
    return {str(loader.file): loader.source for loader in loaders if isinstance(loader, _Bytes)}


def take_over(files: Mapping[str, bytes]) -> None:
    """Import code files that another process has imported; they need not be on this machine."""
    for file, source in files.items():
        _file(Path(file), source)


def _file(file: Path, source: bytes | None = None) -> ModuleType:
    """The module of a file. `source` is its content, where that is known."""
    name = f"solera_own_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    if name not in sys.modules:
        loader = _Bytes(file, read_file(file) if source is None else source)
        spec = importlib.util.spec_from_file_location(name, file, loader=loader)
        assert spec is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _sha256(module: ModuleType) -> str:
    """The sha256 of a module's file; "" if it has none."""
    loader = module.__loader__
    try:
        source = loader.source if isinstance(loader, _Bytes) else read_file(module.__file__ or "")
    except OSError:
        return ""
    return hashlib.sha256(source).hexdigest()


# ---- registries -------------------------------------------------------------------------------------


class Registry(dict[str, T], Generic[T]):
    """The plug-ins of one kind, by name.

    `kind` is the word for one of them, `group` the entry-point group. `accept(thing, name)` turns a class or function
    into an entry, or raises a TypeError with the reason. `ours` are the entries that come with the library.
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
        """Add an entry. The names of the library's own entries (`ours`) cannot be replaced."""
        if is_path(name) or name.startswith(RESERVED):
            raise ConfigError(f"{self.kind} name {name!r} has the form of a path; register it under a plain name")
        if name in self._taken and not ours:
            raise ConfigError(f"{self.kind} name {name!r} is taken by solera; register yours under another name")
        self._taken |= {name} if ours else set()
        self[name] = entry

    def find(self, name: str, key: str | None = None) -> T:
        """The entry called `name`: registered, an entry point, or at a path. `key`: the setting that names it."""
        what = f"{key} = {name!r}" if key else f"{self.kind} {name!r}"
        name = absolute(name, allowed() or Path.cwd())
        if name not in self and is_path(name):
            try:
                self[name] = self.accept(load(name, what), name)
            except TypeError as e:
                raise ConfigError(f"{what}: {e}") from None
        elif name not in self and not self._import_entry_point(name):
            raise ConfigError(f"{what} is not known; {self._way_out(name)}")
        return self[name]

    def names(self) -> list[str]:
        """Every name that is not a path, including those of entry points. Nothing is imported."""
        points = dict.fromkeys(point.name for point in _entry_points(group=self.group))
        return [*(n for n in self if not is_path(n)), *(n for n in points if n not in self)]

    def _way_out(self, name: str) -> str:
        """A hint for an unknown name: the nearest one, and how to name your own. A decorator takes effect only when
        its file is imported."""
        near, pathlike = difflib.get_close_matches(name, self.names(), 3), ":" in name or ".py" in name
        if near:
            hint = f"did you mean {' or '.join(map(repr, near))}?"
        else:
            hint = f"a path to code is {FORM}" if pathlike else "known names: " + ", ".join(sorted(self.names()))
        own = f"; your own is named by its path, such as 'file.py:{name}', or by an entry point of your package"
        return hint + (own if name.isidentifier() else "")

    def load_entry_points(self) -> None:
        """Import all entry points of installed packages; those that fail are skipped with a warning."""
        for name in self.names():
            try:
                self.find(name)
            except ConfigError as e:
                log.warning("%s", e)

    def name_of(self, entry: T) -> str | None:
        """The name by which a new process finds an entry: the library's own name first, then a path."""
        names = [n for n, known in self.items() if known is entry]
        return min(names, key=lambda n: (n not in self._taken, not is_path(n)), default=None)

    def _import_entry_point(self, name: str) -> bool:
        """Register the entry point of that name; False if there is none."""
        for point in _entry_points(group=self.group, name=name):
            try:
                thing = point.load()  # the import may register it
                if name not in self:
                    self.register(name)(thing)
            except Exception as e:  # another package may raise anything
                package = point.dist.name if point.dist is not None else point.value
                raise ConfigError(
                    f"{self.kind} {name!r} of the package {package!r} cannot be used: {type(e).__name__}: {e}"
                ) from e
        return name in self


def _entry_points(**wanted: str) -> Iterable[Any]:
    import importlib.metadata  # slow to import, and `solera --help` imports this module

    return importlib.metadata.entry_points(**wanted)
