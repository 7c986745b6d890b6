"""Other frameworks at the same work, each in an environment of its own that is made here and can be thrown away.

The programs are in benchmarks/peers of the repository. They get a folder with the data, the weights to start from and
the settings, and take turns with our sides like any other (see `pace`).
"""

import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from solera.core.errors import ConfigError
from solera.engines import default_workers

from . import pace
from .workloads import LR, Fleet

INSTALL_S = 1800.0
QUIET = {  # no reports to anybody, nothing installed behind our back
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


@dataclasses.dataclass(frozen=True)
class Peer:
    """A framework: what to install, and which program of benchmarks/peers uses it."""

    title: str
    packages: tuple[str, ...]
    program: str


PEERS = {
    "flower": Peer("Flower simulation 1.41", ("flwr[simulation]==1.41.0",), "with_flower.py"),
    "pfl": Peer("pfl-research 0.6", ("pfl==0.6.0",), "with_pfl.py"),
    "fedlab": Peer("FedLab 1.3", ("fedlab==1.3.0",), "with_fedlab.py"),
}
Start = tuple[Sequence[str], Mapping[str, str]]


def chosen(names: str) -> list[str]:
    """The frameworks that `none`, `all` or a list with commas means."""
    if names in ("none", "all"):
        return [] if names == "none" else list(PEERS)
    wanted = [n.strip() for n in names.split(",") if n.strip()]
    for name in wanted:
        if name not in PEERS:
            raise ConfigError(
                f"--peers {names}: no framework is called {name!r}; there are {', '.join(PEERS)}, all, none"
            )
    return wanted


def install(name: str, folder: pathlib.Path, tell: Callable[[str], None] = lambda text: None) -> pathlib.Path | str:
    """The Python of an environment that has the framework and our version of torch; or why there is none."""
    peer, home = PEERS[name], folder.resolve() / name
    python, done = home / "bin" / "python", home / "installed.json"
    version = torch.__version__.partition("+")[0]
    wanted = {"packages": list(peer.packages), "torch": version}
    if done.is_file() and python.exists() and json.loads(done.read_text()) == wanted:
        return python
    tell(f"{peer.title}: installing into {home}")
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    (home / "constraints.txt").write_text(f"torch=={version}\n")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in (
        [sys.executable, "-m", "venv", str(home)],
        [*pip, "--constraint", str(home / "constraints.txt"), "torch", *peer.packages],
    ):
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)  # noqa: S603
        except (OSError, subprocess.TimeoutExpired) as e:
            return f"it cannot be installed: {e}"
        if ended.returncode:
            lines = [t for t in ended.stderr.splitlines() if t.startswith("ERROR")] or ended.stderr.splitlines()
            return f"it cannot be installed: {lines[-1][:300] if lines else 'pip gave no reason'}"
    done.write_text(json.dumps(wanted))
    return python


def hand_out(fleet: Fleet, folder: pathlib.Path, rounds: int, device: str = "cpu") -> None:
    """Write the work into a folder: samples, weights to start from, settings, and `pace.py`."""
    scenario = fleet.scenario()
    data = scenario.dataset
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("", data.train), ("test_", data.test)):
        np.save(folder / f"{name}inputs.npy", part.inputs.numpy())
        np.save(folder / f"{name}labels.npy", part.labels.numpy())
    start = scenario.server.init(fleet.model)
    np.savez(folder / "start.npz", **{n: t.numpy() for n, t in start.items()})  # type: ignore[arg-type]
    settings = {
        "model": fleet.model,
        "clients": fleet.clients,
        "samples": fleet.samples,
        "cohort": fleet.cohort,
        "batch": fleet.batch,
        "lr": LR,
        "rounds": rounds,
        "workers": default_workers(),
        "threads": fleet.threads,
        "mean": data.mean[0],
        "std": data.std[0],
        "device": device,
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    shutil.copy(pace.__file__, folder / "pace.py")


def start_of(name: str, programs: pathlib.Path, python: pathlib.Path | str, work: pathlib.Path) -> Start | str:
    """How to start a framework at its work; or why that is not possible."""
    program = programs.resolve() / PEERS[name].program
    if isinstance(python, str):
        return python
    if not program.is_file():
        return f"{program} is not there: run the benchmark in the repository"
    path = f"{work.resolve()}:{programs.resolve()}"
    return [str(python), str(program), str(work.resolve())], QUIET | {
        "PYTHONPATH": path,
        "FLWR_HOME": str(work / "flwr"),
    }
