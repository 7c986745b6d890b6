"""A deployment on one machine, from nothing to a report: three hospitals, three architectures, TLS and authentication.

    python examples/deploy/demo.py --out build/deploy-demo

Everything listens on 127.0.0.1 only. The script does what `docs/howto/deploy.md` tells people to do, with the same
commands, and ends what it started. It takes a few minutes, most of which is waiting: Flower starts a Python process for
each message.
"""

import argparse
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

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


def run(*words: object) -> None:
    """A command, shown as a person would type it."""
    print("$ solera", *words, flush=True)
    subprocess.run([*SOLERA, *map(str, words)], check=True, timeout=1200)  # noqa: S603


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


def main() -> None:
    """From images to a report."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/deploy-demo"))
    options.add_argument("--small", action="store_true", help="one round on few images: what the tests run")
    options.add_argument("--simulate", action="store_true", help="also simulate it, and compare the digests")
    asked = options.parse_args()
    out, begun = asked.out.absolute(), time.monotonic()
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(HERE, out, ignore=shutil.ignore_patterns("demo.py", "__pycache__"))
    write_images(out / "data", 40 if asked.small else 300, 100 if asked.small else 400)
    if asked.small:
        text = (out / "hospitals.toml").read_text().replace("rounds = 3", "rounds = 1")
        text = text.replace("epochs = 4", "epochs = 1").replace("steps = 150", "steps = 10")
        (out / "hospitals.toml").write_text(text)
    deployment, processes = out / "deployment", []
    os.chdir(out)  # hospitals.toml says where its images are, from here
    run("deploy", "init", out / "hospitals.toml", "--out", deployment, "--address", f"127.0.0.1:{free_port()}")
    try:
        server = deployment / "server"
        processes.append(start(out / "server.out", "deploy", "server", server))
        for site in SITES:
            processes.append(start(out / f"{site}.out", "deploy", "client", deployment / "sites" / site))
        wait_for_server(server, processes[0])
        run("deploy", "submit", server, "--name", "first", "--wait", "--timeout", 900)
        run("deploy", "status", server)
        run("report", server / "runs" / "first", "-o", out / "report.html")
        run("deploy", "logs", deployment / "sites" / "hospital-c", "--last", "4")
    finally:
        end(processes)
    summary = json.loads((server / "runs" / "first" / "summary.json").read_text())
    for name, scores in summary["models"].items():
        print(f"{name}: accuracy {scores['accuracy']:.3f}")
    print(f"{out / 'report.html'}; digest {summary['digest']}; {time.monotonic() - begun:.0f} s in all")
    if asked.simulate:
        run("run", out / "hospitals.toml", "--out", out / "simulated", "--quiet", "--engine", "inprocess")
        same = json.loads((out / "simulated" / "summary.json").read_text())["digest"]
        print(
            "the simulation ends in the same digest" if same == summary["digest"] else f"THE SIMULATION DIFFERS: {same}"
        )
        sys.exit(same != summary["digest"])


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
