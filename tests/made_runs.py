"""Run directories made by hand: what a run would have written, without running one."""

import json
from pathlib import Path
from typing import Any

import tomli_w

CONFIG: dict[str, Any] = {
    "run": {"seed": 0, "rounds": 3, "name": "toy", "checkpoint_every": 1},
    "data": {"name": "fashion-mnist", "test_size": 100},
    "partition": {"kind": "dirichlet", "clients": 4, "alpha": 0.1},
    "models": {"clients": ["mlp"]},
    "federation": {"fraction": 1.0},
    "method": {"name": "feddf", "local": {"lr": 0.1}},
    "engine": {"name": "auto", "workers": 0},
}


def line(t: int, models: dict[str, float], **more: Any) -> dict[str, Any]:
    """A round's line: 100 bytes down, 50 up, two seconds."""
    return {
        "round": t,
        "cohort": 4,
        "bytes": {"down": {"train": 100}, "up": {"train": 50}},
        "models": {n: {"accuracy": a, "loss": 1.0} for n, a in models.items()},
        "ensembles": {},
        "seconds": {"total": 2.0},
        "failures": [],
        "events": [],
        **more,
    }


def make_run(
    home: Path,
    accuracy: list[float] | None = None,
    rounds: list[dict[str, Any]] | None = None,
    finished: bool = True,
    **settings: Any,
) -> Path:
    """A run directory with these accuracies of the model "mlp"; settings are `table__key=value`."""
    config = json.loads(json.dumps(CONFIG))
    for key, value in settings.items():
        *tables, last = key.split("__")
        place = config
        for name in tables:
            place = place.setdefault(name, {})
        place[last] = value
    home.mkdir(parents=True)
    (home / "run.json").write_text(json.dumps({"format": 1, "solera": "0.1.0", "experiment": None}))
    (home / "config.toml").write_text(tomli_w.dumps(config))
    rounds = rounds or [line(t, {"mlp": a}) for t, a in enumerate(accuracy or [0.3, 0.5, 0.4])]
    (home / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in rounds))
    if finished:
        (home / "summary.json").write_text(json.dumps({"method": config["method"]["name"], "rounds": len(rounds)}))
    return home
