"""How long a round takes on an accelerator, in several ways: the table of docs/howto/gpu.md.

    make bench-device                                            # on a machine with a GPU; a quarter of an hour
    PYTHONPATH=benchmarks python benchmarks/device.py --peers flower --write docs/howto/gpu.md
    PYTHONPATH=benchmarks python benchmarks/device.py --device cpu --laps 1 --samples 64   # only to see that it works

Ten clients of one architecture train for one epoch (FedAvg, minibatches of 32). All ways take turns within one run, in
processes of their own, and a number is how many times as long as `one at a time` a way takes: median and quartiles.
`the usual loop` is what clients of other frameworks' examples do: a DataLoader, `torch.optim`, a copy to the device at
each step, no federation around it.
"""

import argparse
import dataclasses
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from bench.contest import Dropped, Runner
from bench.pace import Pace
from bench.peers import PEERS, chosen, hand_out, install, start_of
from bench.workloads import LR, Fleet, Setting, run_side
from grid import put
from solera.core.errors import SoleraError
from solera.core.federation import FederationConfig
from solera.engines import EngineConfig
from solera.methods.fedavg import FedAvg
from solera.place.devices import compute_of, found
from solera.train.fitting import Local

CLIENTS = 10
FLEETS = {
    "lenet5": Fleet("lenet5", (1, 28, 28), CLIENTS, 640, CLIENTS),
    "mcmahan-cnn": Fleet("mcmahan-cnn", (1, 28, 28), CLIENTS, 640, CLIENTS),
    "resnet8": Fleet("resnet8", (3, 32, 32), CLIENTS, 640, CLIENTS, norm="none"),
}
FIRST = "one at a time"
USUAL = "the usual loop"


def ways(device: str) -> dict[str, EngineConfig | None]:
    """Every way by name; None: without Solera."""
    cpu = device == "cpu"
    several = EngineConfig("processes", device=device, **({"workers": 2} if cpu else {"per_device": 3}))
    known: dict[str, EngineConfig | None] = {
        FIRST: EngineConfig("inprocess", 1, device=device),
        USUAL: None,
        "several processes": several,
    }
    if cpu:
        return known
    known["on the CPU"] = EngineConfig(device="cpu")
    first = found()[device.partition(":")[0]][0]
    for precision in first.precisions[1:]:
        known[f"{FIRST}, {precision}"] = EngineConfig("inprocess", 1, device=device, precision=precision)  # type: ignore[arg-type]
    known[f"{FIRST}, not deterministic"] = EngineConfig("inprocess", 1, device=device, deterministic=False)
    return known


def side(way: str, model: str, device: str, samples: int, laps: int) -> None:
    """One way, in a process of its own, at the pace of whoever asks."""
    pace, fleet = Pace(), dataclasses.replace(FLEETS[model], samples=samples)
    engine = ways(device)[way]
    if engine is None:
        usual_loop(fleet, torch.device(device), pace)
        return
    method = FedAvg(Local(epochs=1, batch=fleet.batch, lr=LR))
    run_side(lambda: Setting(fleet.scenario(), method, FederationConfig(), engine), fleet.steps, pace, laps)


def usual_loop(fleet: Fleet, device: torch.device, pace: Pace) -> None:
    """Client after client, as in the examples of other frameworks."""
    torch.set_num_threads(1)
    scenario = fleet.scenario()
    data = scenario.dataset.train
    inputs = scenario.dataset.prepare(data.inputs)
    pace.ready()
    while pace.go():
        for k in range(fleet.cohort):
            mine = slice(k * fleet.samples, (k + 1) * fleet.samples)
            model = scenario.server.model(fleet.model, scenario.server.init(fleet.model)).to(device)
            model.train()
            optimizer = torch.optim.SGD(model.parameters(), LR)
            for x, y in DataLoader(TensorDataset(inputs[mine], data.labels[mine]), fleet.batch, shuffle=True):
                optimizer.zero_grad()
                F.cross_entropy(model(x.to(device)), y.to(device)).backward()
                optimizer.step()
            sent = [t.cpu() for t in model.state_dict().values()]  # as a client would
            assert sent
        pace.lap()
    pace.end(steps=0)


def measure(
    model: str, device: str, samples: int, laps: int, others: Mapping[str, pathlib.Path | str], folder: pathlib.Path
) -> dict[str, str]:
    """How many times as long as the first way each way takes, or why it was not measured."""
    fleet = dataclasses.replace(FLEETS[model], samples=samples)
    me = [sys.executable, __file__, "--side"]
    commands = {way: ([*me, way, model, device, str(samples), str(laps + 1)], {}) for way in ways(device)}
    told: dict[str, str] = {}
    for peer, python in others.items():
        work = folder / f"{model}-{peer}"
        hand_out(fleet, work, laps + 1, device)
        start = start_of(peer, pathlib.Path(__file__).parent / "peers", python, work)
        if isinstance(start, str):
            told[PEERS[peer].title] = start
        else:
            commands[PEERS[peer].title] = start  # type: ignore[assignment]
    runners: dict[str, Runner] = {}
    seconds: dict[str, list[float]] = {}
    try:
        for way, (command, environment) in commands.items():
            try:
                runners[way] = Runner(way, command, folder, environment)
            except Dropped as e:
                told[way] = f"not measured: {e}"
        for lap in range(laps + 1):
            for way in list(runners):
                try:
                    took = runners[way].lap(sample=False)["seconds"]
                except Dropped as e:
                    told[way] = f"not measured: {e}"
                    runners.pop(way).close()
                    continue
                if lap:  # the first is for warming up
                    seconds.setdefault(way, []).append(took)
    finally:
        for runner in runners.values():
            runner.close()
    first = seconds.get(FIRST)
    if first is None:
        raise SystemExit(f"{model}: {told.get(FIRST)}")
    for way, times in seconds.items():
        ratios = sorted(a / b for a, b in zip(times, first, strict=False))
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        told[way] = f"{middle:.2f} ({low:.2f}–{high:.2f})"
    told["seconds of a round, one at a time"] = f"{statistics.median(first):.2f}"
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="as engine.device")
    parser.add_argument("--models", default=",".join(FLEETS))
    parser.add_argument("--laps", type=int, default=7)
    parser.add_argument("--samples", type=int, default=640, help="of each client")
    parser.add_argument("--peers", default="none", help="other frameworks: none, flower")
    parser.add_argument("--peers-dir", type=pathlib.Path, default=pathlib.Path("build/peers"))
    parser.add_argument("--write", type=pathlib.Path, metavar="PAGE", help="put the table into this page")
    parser.add_argument("--side", nargs=5, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.side:
        way, model, device, samples, laps = asked.side
        side(way, model, device, int(samples), int(laps))
        return
    try:
        compute = compute_of(EngineConfig(device=asked.device))
        peers = chosen(asked.peers)
    except SoleraError as e:
        raise SystemExit(f"error: {e}") from None
    device = compute.devices[0]
    if asked.device == "auto" and compute.on_cpu:
        raise SystemExit("error: no accelerator is here; --device cpu only shows that the programme works")
    others = {name: install(name, asked.peers_dir, print) for name in peers}
    columns: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory(prefix="solera-bench-") as folder:
        for model in asked.models.split(","):
            columns[model] = measure(model, device, asked.samples, asked.laps, others, pathlib.Path(folder))
            print(model, columns[model], flush=True)
    rows = list(dict.fromkeys(way for column in columns.values() for way in column))
    title = next((d.title for kind in found().values() for d in kind if d.name == device), "CPU")
    lines = [
        f"{title} ({device}), torch {torch.__version__}, {asked.laps} laps, {asked.samples} samples a client:",
        "",
        "| way | " + " | ".join(columns) + " |",
        "|---|" + "---|" * len(columns),
        *("| " + " | ".join([row, *(c.get(row, "–") for c in columns.values())]) + " |" for row in rows),
    ]
    table = "\n".join(lines) + "\n"
    print(table)
    if asked.write:
        put(asked.write, "bench-device", table)


if __name__ == "__main__":
    main()
