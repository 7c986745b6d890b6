"""A deployment on one machine, from nothing to a report: three hospitals, three architectures, TLS and authentication.

    python examples/deploy/demo.py --out build/deploy-demo

Everything listens on 127.0.0.1 only. The script does what `docs/howto/deploy.md` tells people to do, with the same
commands, and ends what it started. It takes some minutes on two cores, a good part of it waiting: Flower looks for
new messages every three seconds.
"""

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import torch
from PIL import Image

from solera.data import load

HERE = pathlib.Path(__file__).resolve().parent
SITES = ("hospital-a", "hospital-b", "hospital-c")
SOLERA = [sys.executable, "-m", "solera.cli.main"]


def write_images(folder: pathlib.Path, each: int, public: int) -> None:
    """Images for three sites and the server, in a folder for each class. Each site sees mostly some of the classes."""
    data = load("fashion-mnist").train
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1))
    for i in order[:public].tolist():
        save(folder / "public", f"{i}.png", data.inputs[i])
    rest = order[public:]
    for s, site in enumerate(SITES):
        mine = [i for i in rest.tolist() if int(data.labels[i]) % 3 == s or i % 12 == s][:each]
        for i in mine:
            save(folder / site / str(int(data.labels[i])), f"{i}.png", data.inputs[i])


def save(folder: pathlib.Path, name: str, image: torch.Tensor) -> None:
    """One grey image."""
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image[0].numpy()).save(folder / name)


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run(*words: object) -> str:
    """A command, shown as a person would type it; what it prints."""
    print("$ solera", *words, flush=True)
    done = subprocess.run([*SOLERA, *map(str, words)], check=True, timeout=1200, stdout=subprocess.PIPE, text=True)  # noqa: S603
    print(done.stdout, end="", flush=True)
    return done.stdout


def start(log: pathlib.Path, *words: object) -> subprocess.Popen:
    """A command that goes on in the background."""
    print("$ solera", *words, "&", flush=True)
    return subprocess.Popen([*SOLERA, *map(str, words)], stdout=log.open("w"), stderr=subprocess.STDOUT)  # noqa: S603


def end(processes: list[subprocess.Popen]) -> None:
    """End what was started; each ends what it has started itself."""
    for p in processes:
        p.send_signal(signal.SIGTERM)
    for p in processes:
        try:
            p.wait(40)
        except subprocess.TimeoutExpired:
            p.kill()


def prepare(out: pathlib.Path, small: bool) -> pathlib.Path:
    """Images, the configuration, and folders for the server and each site; the folder that holds those."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(HERE, out, ignore=shutil.ignore_patterns("demo.py", "__pycache__"))
    write_images(out / "data", 40 if small else 300, 100 if small else 400)
    if small:
        text = (out / "hospitals.toml").read_text().replace("rounds = 3", "rounds = 1")
        text = text.replace("epochs = 4", "epochs = 1").replace("steps = 150", "steps = 10")
        (out / "hospitals.toml").write_text(text)
    os.chdir(out)  # hospitals.toml says where its images are, from here
    run("deploy", "init", "hospitals.toml", "--out", "deployment", "--address", f"127.0.0.1:{free_port()}")
    return out / "deployment"


@contextlib.contextmanager
def running(deployment: pathlib.Path) -> Iterator[pathlib.Path]:
    """The server's folder, while the server and three sites run."""
    server, processes = deployment / "server", []
    try:
        processes.append(start(deployment.parent / "server.out", "deploy", "server", server))
        wait_for_server(server, processes[0])
        for site in SITES:
            out = deployment.parent / f"{site}.out"
            processes.append(start(out, "deploy", "client", deployment / "sites" / site))
        yield server
    finally:
        end(processes)


def learn(server: pathlib.Path) -> str:
    """One run from its submission to its report; its digest."""
    run("deploy", "submit", server, "--name", "first", "--wait", "--timeout", 900)
    run("report", server / "runs" / "first", "-o", "report.html")
    run("deploy", "logs", server.parent / "sites" / "hospital-c", "--last", "4")
    summary = json.loads((server / "runs" / "first" / "summary.json").read_text())
    for name, scores in summary["models"].items():
        print(f"{name}: accuracy {scores['accuracy']:.3f}")
    return summary["digest"]


def rehearse(engine: str = "inprocess") -> str:
    """The same file as a simulation in this process or several; its digest."""
    out = pathlib.Path(f"simulated-{engine}")
    run("run", "hospitals.toml", "--out", out, "--quiet", "--engine", engine)
    return json.loads((out / "summary.json").read_text())["digest"]


def main() -> None:
    """From images to a report."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/deploy-demo"))
    options.add_argument("--small", action="store_true", help="one round on few images: what the tests run")
    options.add_argument("--simulate", action="store_true", help="also simulate it, and compare the digests")
    asked = options.parse_args()
    begun = time.monotonic()
    with running(prepare(asked.out.absolute(), asked.small)) as server:
        digest = learn(server)
        run("deploy", "status", server)
    print(f"{pathlib.Path('report.html').absolute()}; digest {digest}; {time.monotonic() - begun:.0f} s in all")
    if asked.simulate:
        same = rehearse() == digest
        print("the simulation ends in the same digest" if same else "THE SIMULATION ENDS IN ANOTHER DIGEST")
        sys.exit(not same)


def wait_for_server(server: pathlib.Path, process: subprocess.Popen) -> None:
    """Until the server says that it listens."""
    log = server / "log" / "server.jsonl"
    for _ in range(1200):
        if log.is_file() and "the server listens" in log.read_text():
            return
        if process.poll() is not None:
            break
        time.sleep(0.1)
    sys.exit(f"the server did not start: see {server / 'log'}")


if __name__ == "__main__":
    main()
