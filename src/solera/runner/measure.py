"""Measuring: what a round sent, how good its models are, and what a whole run came to."""

import functools
import math
import platform
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import safetensors
import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import RunConfig
from ..federation import Federation
from ..method import Exchange, MeanScore, Method, Model, name_of, scoring
from ..parts.local import Score, evaluate, logits_of
from ..parts.teachers import Ensemble, frozen
from ..runs.directory import FORMAT, RunDirectory
from ..server import EnsembleReport, Server
from ..task import Data
from ..version import __version__

NOTED_CLIENTS = 1000  # of whom a round's line says how good their own models are


def traffic(fed: Federation) -> dict[str, Any]:
    """What travelled in this round: bytes by direction and task, and how many numbers that were."""
    ways = {"down": fed.down, "up": fed.up}
    return {
        "bytes": {way: {task: t.bytes for task, t in sent.items()} for way, sent in ways.items()},
        "floats": {way: sum(t.floats for t in sent.values()) for way, sent in ways.items()},
        "integers": {way: sum(t.integers for t in sent.values()) for way, sent in ways.items()},
    }


def measure(
    method: Method, state: Any, fed: Federation, server: Server, test: Data, eval_clients: int
) -> dict[str, Any]:
    """Accuracy and loss of every reported model and ensemble, and of personal models where there are any."""
    models = method.models(state)
    jobs = [functools.partial(_evaluate, server, m, test) for m in models.values()]
    jobs += [functools.partial(_evaluate_ensemble, server, e, test) for e in server.ensembles]
    jobs += [functools.partial(_evaluate, server, Model(P, w), test) for P, w in server.averages.items()]
    scores = [{"accuracy": s.accuracy, "loss": s.loss} for s in server.parallel(jobs, range(len(jobs)))]
    found: dict[str, Any] = {
        "models": dict(zip(models, scores, strict=False)),
        "ensembles": {e.name: s for e, s in zip(server.ensembles, scores[len(models) :], strict=False)},
    }
    if server.averages:
        found["averages"] = dict(zip(server.averages, scores[len(models) + len(server.ensembles) :], strict=True))
    if (asked := scoring(method, state, fed)) is not None:
        if asked.task.returns is MeanScore:
            return found | {"personal": _measure_mean(asked, fed, eval_clients)}
        own = _measure_personal(asked, fed, eval_clients)
        found["personal"] = _spread(list(own.values()))
        if server.stages:
            found["personal_stages"] = {
                name: found["personal"] if scores is None else _spread([s for s in scores.values() if s.total])
                for name, scores in server.stages.items()
            }
        found["personal_accuracies"] = {k: round(s.accuracy, 4) for k, s in list(own.items())[:NOTED_CLIENTS]}
    return found


def not_finite(metrics: Mapping[str, Any]) -> list[str]:
    """The models and ensembles of a round whose loss is infinite or not a number."""
    return [name for name, loss in _losses(metrics).items() if not math.isfinite(loss)]


def _losses(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: score["loss"] for group in ("models", "ensembles") for name, score in metrics.get(group, {}).items()}


def first_if_all_void(rounds: Sequence[Mapping[str, Any]]) -> str | None:
    """What was said of the first round, if all were void; None if one was not."""
    void = [e["reason"] for m in rounds for e in m["events"] if e["kind"] == "round_empty"]
    return void[0] if void and len(void) == len(rounds) else None


def why_unusable(rounds: Sequence[Mapping[str, Any]]) -> str | None:
    """Why nobody can use what a run leaves, with the first reason that a client gave on the way; None if one can."""
    last: Mapping[str, Any] = next((m for m in reversed(rounds) if "models" in m), {})
    bad = not_finite(last)
    if not bad or len(bad) < len(_losses(last)):
        return None
    first = next((f for m in rounds for f in m["failures"]), None)
    why = f"; the first client to fail was {first['client']}: {first['reason']}" if first else ""
    return f"at the end the loss of {', '.join(bad)} is not finite{why}"


def _measure_personal(asked: Exchange, fed: Federation, eval_clients: int) -> dict[str, Score]:
    """The score of each client's own model on its own test split. What this costs on the wire is not the method's
    traffic."""
    replies = fed.map(
        asked.task, _scored(fed, eval_clients), min_replies=0, **asked.payload
    )  # who is missing is not measured
    return {k: r for k, r in replies.items() if r.total}


def _scored(fed: Federation, eval_clients: int) -> list[str]:
    """The clients whose own models are scored: the same in every round."""
    g = torch.Generator().manual_seed(fed.run_seed)
    return [fed.clients.id(i) for i in torch.randperm(len(fed.clients), generator=g)[:eval_clients].tolist()]


def _measure_mean(asked: Exchange, fed: Federation, eval_clients: int) -> dict[str, Any]:
    """The same where the server may see means only: single clients' accuracies, and so the worst, stay unknown."""
    fed.dismiss()
    means = fed.mean(
        asked.task, _scored(fed, eval_clients), by=lambda k: "all", uniform=True, min_replies=0, **asked.payload
    )  # fmt: skip
    if "all" not in means or not means["all"].scored:
        return {"clients": 0}
    m, share = means["all"], means["all"].scored.item()
    mean = m.accuracy.item() / share
    return {
        "mean": mean,
        "weighted_mean": m.correct.item() / m.total.item(),  # every test sample counts the same, not every client
        "std": max(0.0, m.squared.item() / share - mean**2) ** 0.5,
        "clients": round(share * means.counts["all"]),
    }


def _spread(scores: list[Score]) -> dict[str, Any]:
    """Both means, the spread and the worst of the clients' accuracies.

    In "mean" every client counts the same, in "weighted_mean" every test sample does. That is mean(correct) /
    mean(total), so a server that sees means only can have it, too.
    """
    accuracy = sorted(s.accuracy for s in scores)
    if not accuracy:
        return {"clients": 0}
    return {
        "mean": statistics.fmean(accuracy),
        "weighted_mean": sum(s.correct for s in scores) / sum(s.total for s in scores),
        "std": statistics.pstdev(accuracy),
        "worst_decile": statistics.fmean(accuracy[: max(1, len(accuracy) // 10)]),
        "clients": len(accuracy),
    }


def _evaluate(server: Server, model: Model, test: Data) -> Score:
    return evaluate(server.model(model.architecture, model.weights), test.inputs, test.labels)


def _evaluate_ensemble(server: Server, e: EnsembleReport, test: Data) -> Score:
    said = answers(server, e, test.inputs)
    loss = F.nll_loss(said.clamp_min(1e-12).log(), test.labels).item()
    return Score(int((said.argmax(-1) == test.labels).sum()), len(test), loss)


def answers(server: Server, what: Model | EnsembleReport, inputs: Tensor) -> Tensor:
    """The probabilities that a model, or several together, give to each class. [samples, classes]"""
    if isinstance(what, Model):
        return logits_of(server.model(what.architecture, what.weights), inputs).softmax(-1)
    ensemble = Ensemble(frozen(what.members, server.model), what.rule, what.weights)  # type: ignore[arg-type]
    return torch.cat([ensemble(x)[0] for x in inputs.split(512)])


def summarise(home: RunDirectory, method: Method, state: Any, fed: Federation, config: RunConfig) -> dict[str, Any]:
    """The outcome of a run, from what it recorded."""
    rounds = list(home.metrics())
    failures = Counter(f["client"] for m in rounds for f in m["failures"])
    evaluated = [m for m in rounds if "models" in m]

    def best(group: str) -> dict[str, Any]:
        out = {}
        for name in evaluated[-1][group] if evaluated else ():
            seen = [(m[group][name]["accuracy"], -m["round"]) for m in evaluated if name in m[group]]
            accuracy, negative = max(seen)
            out[name] = {**evaluated[-1][group][name], "best_accuracy": accuracy, "best_round": -negative}
        return out

    return {
        "format": FORMAT,
        "solera": __version__,
        "name": config.name or home.path.name,
        "method": name_of(method),
        "rounds": len(rounds),
        "finished": True,
        "digest": fed.digest(state),
        "models": best("models"),
        "ensembles": best("ensembles"),
        **({p: evaluated[-1][p] for p in ("personal", "personal_stages") if p in evaluated[-1]} if evaluated else {}),
        "bytes": {way: sum(sum(m["bytes"][way].values()) for m in rounds) for way in ("down", "up")},
        "seconds": round(sum(m["seconds"]["total"] for m in rounds), 3),
        "failures": dict(sorted(failures.items())),
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": numpy.__version__,
            "safetensors": safetensors.__version__,
            "threads": torch.get_num_threads(),
            "platform": platform.platform(),
        },
        "engine": type(fed.engine).__name__.lower(),
        "workers": getattr(fed.engine, "count", getattr(fed.engine, "workers", 1)),
        "out": str(home.path),
    }
