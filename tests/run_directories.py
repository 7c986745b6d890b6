"""Run directories made up for tests of what reads them: every kind of record a run can leave, at any size."""

import json
import math
import pathlib
import random
from typing import Any

import tomli_w


def lines_of(home: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl as anybody reads them, without Solera."""
    return [json.loads(line) for line in (home / "metrics.jsonl").read_text().splitlines()]


def write_run(
    path: pathlib.Path,
    method: str = "feddf",
    seed: int = 0,
    rounds: int = 10,
    clients: int = 8,
    classes: int = 5,
    name: str = "made up",
    data: str = "fashion-mnist",
    model: str = "lenet5",
    level: float = 0.8,
    personal: bool = True,
    coefficients: bool = True,
    finished: bool = True,
) -> pathlib.Path:
    """A whole run directory, as `solera run` would leave it; the accuracy grows towards `level`."""
    path.mkdir(parents=True, exist_ok=True)
    rng = random.Random(f"{method} {seed}")
    ids = [f"c{i:03d}" for i in range(clients)]
    settings: dict[str, Any] = {
        "run": {"seed": seed, "rounds": rounds, "name": name},
        "data": {"name": data},
        "partition": {"kind": "dirichlet", "clients": clients, "alpha": 0.1},
        "models": {"clients": [model, "mlp"]},
        "federation": {"fraction": 0.5},
        "method": {"name": method, "local": {"epochs": 2, "lr": 0.05}},
    }
    (path / "config.toml").write_text(tomli_w.dumps(settings))
    command = f"solera run toy --seed {seed} --set method.name={method}"
    _write(path / "run.json", {"format": 1, "solera": "0.1.0", "experiment": None, "command": command})
    _write(path / "partition.json", _partition(ids, classes, model, rng))
    lines = [_round(t, rounds, ids, model, level, personal, coefficients, rng) for t in range(rounds)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        _write(path / "confusion.json", _confusion(rounds - 1, classes, model, rng))
        environment = {"python": "3.12.0", "torch": "2.10.0", "platform": "test"}
        summary = {"name": name, "method": method, "rounds": rounds, "digest": "ab" * 32, "environment": environment}
        _write(path / "summary.json", summary)
    return path


def _write(path: pathlib.Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))


def _partition(ids: list[str], classes: int, model: str, rng: random.Random) -> dict[str, Any]:
    shown = []
    for i, k in enumerate(ids):
        counts = [rng.randrange(200) if rng.random() < 0.4 else 0 for _ in range(classes)]
        shown.append({"client": k, "model": model if i % 2 else "mlp", "counts": counts})
    sizes = sorted(sum(c["counts"]) for c in shown)
    facts = {"min": sizes[0], "median": sizes[len(sizes) // 2], "max": sizes[-1], "empty": sizes.count(0)}
    return {"clients": len(ids), "classes": classes, "samples": sum(sizes), "sizes": facts, "shown": shown}


def _round(
    t: int,
    rounds: int,
    ids: list[str],
    model: str,
    level: float,
    personal: bool,
    coefficients: bool,
    rng: random.Random,
) -> dict[str, Any]:
    reached = level * (1 - 0.8 * math.exp(-4 * (t + 1) / rounds))
    score = lambda less: {"accuracy": max(0.0, reached - less + rng.gauss(0, 0.01)), "loss": 1.0}  # noqa: E731
    cohort = rng.sample(ids, max(1, len(ids) // 4))
    line: dict[str, Any] = {
        "round": t,
        "cohort": len(cohort),
        "bytes": {"down": {"local_update": 250_000}, "up": {"local_update": 240_000}},
        "floats": {"down": 60_000, "up": 60_000},
        "integers": {"down": 0, "up": 0},
        "models": {model: score(0.0), "mlp": score(0.05)},
        "ensembles": {"teachers": score(-0.03)},
        "averages": {model: score(0.1), "mlp": score(0.15)},
        "seconds": {"clients": 2.0, "server": 0.7, "evaluate": 0.2, "commit": 0.05, "total": 2.95},
        "failures": [{"client": ids[0], "task": "local_update", "reason": "no reply"}] if t % 5 == 3 else [],
        "events": [
            {"kind": "timeline", "what": "train", "groups": [f"{model}.0"], "start": 0.0, "end": 1.4},
            {"kind": "timeline", "what": "train", "groups": [f"{model}.1"], "start": 0.0, "end": 2.0},
            {"kind": "timeline", "what": "distil", "start": 0.1, "end": 0.8},
            {"kind": "distilled", "architecture": model, "steps": 10, "dissent": 0.1 + 0.2 * rng.random()},
            {
                "kind": "teachers",
                "clients": cohort,
                "confidence": [rng.random() / len(cohort) for _ in cohort],
                "agrees": [rng.random() for _ in cohort],
                "dissenting": 0.5 * rng.random(),
                "unanimous": rng.random(),
                "samples": 128,
            },
            *([{"kind": "client_rejected", "client": ids[-1], "reason": "drop_worst"}] if t % 7 == 2 else []),
        ],
    }
    if personal:
        own = {k: min(1.0, max(0.0, rng.gauss(reached, 0.12))) for k in ids}
        low = sorted(own.values())
        line["personal"] = {
            "mean": sum(low) / len(low),
            "std": 0.12,
            "worst_decile": sum(low[: max(1, len(low) // 10)]) / max(1, len(low) // 10),
            "clients": len(low),
        }
        line["personal_accuracies"] = {k: round(a, 4) for k, a in own.items()}
    if coefficients:
        line["events"].append({"kind": "coefficients", "clients": ids, "matrix": _matrix(len(ids), t / rounds, rng)})
    return line


def _matrix(n: int, progress: float, rng: random.Random) -> list[list[float]]:
    """Three groups of clients, dealt out like cards, that find each other with time."""
    return [
        [
            round((1 + (2 * progress if i % 3 == j % 3 else -0.8 * progress) + 0.1 * rng.random()) / n, 6)
            for j in range(n)
        ]
        for i in range(n)
    ]


def _confusion(t: int, classes: int, model: str, rng: random.Random) -> dict[str, Any]:
    def item() -> dict[str, Any]:
        matrix = [[60 if r == c else rng.randrange(12) for c in range(classes)] for r in range(classes)]
        for row in matrix:
            row[matrix.index(row)] += 100 - sum(row)
        return {"right": [matrix[c][c] for c in range(classes)], "matrix": matrix}

    return {
        "round": t,
        "classes": classes,
        "total": [100] * classes,
        "models": {model: item(), "mlp": item()},
        "ensembles": {"teachers": item()},
    }
