"""Measurements: the traffic of a round, the scores of its models, and the summary of a run."""

import math
import platform
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import safetensors
import torch
import torch.nn.functional as F
from torch import Tensor

from ..core import __version__
from ..core.accounting import KINDS
from ..core.federation import Federation
from ..core.task import Data
from ..core.tensors import Inputs, batches, take
from ..method import Exchange, MeanScore, Method, Model, name_of, scoring
from ..place.placement import finest
from ..scenario.server import EnsembleReport, Server
from ..train.fitting import Score, evaluate, logits_of, score_tokens
from ..train.teachers import Ensemble, frozen
from . import record as rows
from .config import RunConfig
from .record import FORMAT, OWN, WAYS, RoundRecord, Traffic

SMALLEST = 1e-12  # probability of an ensemble, so that its logarithm is finite
MOST = 700.0  # loss whose exponential is a float
COMPARED_SAMPLES = 512  # test samples on which the members of an ensemble are compared
COMPARED_MEMBERS = 64  # limit of members that are compared
NOTED_CLIENTS = 1000  # limit of clients whose own scores are in a round's line


def traffic(fed: Federation) -> Traffic:
    """The traffic of this round: bytes by direction and task, and the number of floats and integers."""
    ways = {"down": fed.down, "up": fed.up}
    return Traffic(
        bytes={way: {task: t.bytes for task, t in sent.items()} for way, sent in ways.items()},
        floats={way: sum(t.floats for t in sent.values()) for way, sent in ways.items()},
        integers={way: sum(t.integers for t in sent.values()) for way, sent in ways.items()},
        content={
            way: {kind: sum(t.content[kind] for t in sent.values()) for kind in KINDS} for way, sent in ways.items()
        },
    )


def kinds(models: Mapping[str, Model], server: Server) -> dict[str, str]:
    """The models that are not one model for all clients: name -> "part" or "server"."""
    own = None if server.large in server.architectures else server.large
    found = {name: m.kind or ("server" if m.architecture == own else "model") for name, m in models.items()}
    return {name: kind for name, kind in found.items() if kind != "model"}


def measure(
    method: Method, state: Any, fed: Federation, server: Server, test: Data | None, eval_clients: int
) -> list[rows.Score]:
    """Accuracy and loss of every reported model and ensemble, and the scores of personal models, if any. Without test
    samples (in a dry run) only of the latter."""
    if test is None:
        return measure_own(method, state, fed, server, eval_clients)
    models = method.models(state)
    named: list[tuple[str, str, Callable[[], Score]]] = [
        *(("model", name, partial(_evaluate, server, m, test)) for name, m in models.items()),
        *(("ensemble", e.name, partial(_evaluate_ensemble, server, e, test)) for e in server.ensembles),
        *(("average", A, partial(_evaluate, server, Model(A, w), test)) for A, w in server.averages.items()),
    ]
    found = _judged(server, named)
    for e in server.ensembles:
        found += _diversity(server, e, test)
    return found + measure_own(method, state, fed, server, eval_clients)


def measure_own(method: Method, state: Any, fed: Federation, server: Server, eval_clients: int) -> list[rows.Score]:
    """The scores of the clients' own models, if the method has any. The clients compute them."""
    asked = scoring(method, state, fed)
    if asked is None:
        return []
    g = torch.Generator().manual_seed(fed.run_seed)  # the same clients in every round
    clients = [fed.clients.id(i) for i in torch.randperm(len(fed.clients), generator=g)[:eval_clients].tolist()]
    with fed.untimed():  # this does not count as the method's traffic; clients that do not answer are left out
        if asked.task.returns is MeanScore:
            return [*rows.scores("own", OWN, _measure_mean(asked, fed, clients))]
        replies = fed.map(asked.task, clients, min_replies=0, **asked.payload)
    own = {k: s for k, s in replies.items() if s.total}
    spread = _spread(list(own.values()))
    found = [*rows.scores("own", OWN, spread)]
    for stage, scored in server.stages.items():
        then = spread if scored is None else _spread([s for s in scored.values() if s.total])
        found += rows.scores("stage", stage, then)
    for k, s in list(own.items())[:NOTED_CLIENTS]:
        found += rows.scores("client", k, {"accuracy": round(s.accuracy, 4)})
    return found


def not_finite(record: RoundRecord) -> list[str]:
    """The models and ensembles of a round whose loss is infinite or not a number."""
    return [name for name, loss in _losses(record).items() if not math.isfinite(loss)]


def _losses(record: RoundRecord) -> dict[str, float]:
    return {name: score["loss"] for kind in ("model", "ensemble") for name, score in record.of(kind).items()}


def measure_validation(method: Method, state: Any, server: Server) -> list[rows.Score]:
    """Accuracy and loss of every reported model on the server's validation set."""
    held_out = server.validation
    assert held_out is not None
    models = method.models(state).items()
    return _judged(server, [("validation", name, partial(_evaluate, server, m, held_out)) for name, m in models])


def _judged(server: Server, named: Sequence[tuple[str, str, Callable[[], Score]]]) -> list[rows.Score]:
    """The scores of these models; of language models also the perplexity, exp(mean cross-entropy of a token)."""
    found: list[rows.Score] = []
    judged = server.parallel([job for _, _, job in named], range(len(named)))
    for (kind, name, _), s in zip(named, judged, strict=True):
        numbers = {"accuracy": s.accuracy, "loss": s.loss}
        if server.positions is not None:
            numbers["perplexity"] = math.exp(s.loss) if s.loss < MOST else math.inf
        found += rows.scores(kind, name, numbers)
    return found


def first_if_all_void(rounds: Sequence[RoundRecord]) -> str | None:
    """The reason of the first round if all rounds were void; None otherwise."""
    void = [e["reason"] for r in rounds for e in r.events if e["kind"] == "round_empty"]
    return void[0] if void and len(void) == len(rounds) else None


def why_unusable(rounds: Sequence[RoundRecord]) -> str | None:
    """The reason if all final models are unusable, with the first failure of a client; None if one is usable."""
    last = next((r for r in reversed(rounds) if r.scores), None)
    bad = not_finite(last) if last else []
    if last is None or not bad or len(bad) < len(_losses(last)):
        return None
    first = next((f for r in rounds for f in r.failures), None)
    why = f"; the first client to fail was {first['client']}: {first['reason']}" if first else ""
    return f"at the end the loss of {', '.join(bad)} is not finite{why}"


def _measure_mean(asked: Exchange, fed: Federation, clients: Sequence[str]) -> dict[str, Any]:
    """The spread if the server may see only means: single clients' accuracies, and so the worst, stay unknown."""
    fed.dismiss()
    means = fed.mean(asked.task, clients, by=lambda k: "all", uniform=True, min_replies=0, **asked.payload)
    if "all" not in means or not means["all"].scored:
        return {"clients": 0}
    m, share = means["all"], means["all"].scored.item()
    mean = m.accuracy.item() / share
    return {
        "mean": mean,
        "weighted_mean": m.correct.item() / m.total.item(),  # weighted by test samples
        "std": max(0.0, m.squared.item() / share - mean**2) ** 0.5,
        "clients": round(share * means.counts["all"]),
    }


def _spread(scores: list[Score]) -> dict[str, Any]:
    """Both means, the spread and the worst of the clients' accuracies.

    "mean" gives every client the same weight, "weighted_mean" every test sample. The latter is mean(correct) /
    mean(total), so a server that sees only means can compute it, too.
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
    if test.labels.ndim > 1:
        return score_tokens(
            lambda x: answers(server, e, x).clamp_min(SMALLEST).log(), test.inputs, test.labels
        )  # fmt: skip
    said = answers(server, e, test.inputs)
    loss = F.nll_loss(said.clamp_min(SMALLEST).log(), test.labels).item()
    return Score(int((said.argmax(-1) == test.labels).sum()), len(test), loss)


def _diversity(server: Server, e: EnsembleReport, test: Data) -> list[rows.Score]:
    """The diversity of an ensemble's members on some test samples; of a large ensemble, of its first members."""
    count = -(-COMPARED_SAMPLES // (server.positions or 1))  # of language models: every token is a prediction
    rest = take(test.inputs, torch.arange(0, len(test), max(1, len(test) // count))[:count])
    models = list(frozen(e.members[:COMPARED_MEMBERS], e.build or server.model))
    if len(models) < 2:
        return []
    said = server.parallel([partial(logits_of, m, rest) for m in models], range(len(models)))
    logits = torch.stack(said).cpu()
    found: list[rows.Score] = []
    for name, sets in (e.alike or {"members": [list(range(len(models)))]}).items():
        d = diversity(logits.flatten(1, -2), [[i for i in own if i < len(models)] for own in sets])
        if d is not None and math.isfinite(d.kl):
            called = e.name if name == "members" else f"{e.name}: {name}"
            found += rows.scores("diversity", called, {"disagreement": d.disagreement, "kl": d.kl, "pairs": d.pairs})
    return found


def answers(server: Server, what: Model | EnsembleReport, inputs: Inputs) -> Tensor:
    """The class probabilities of a model or an ensemble. [samples, classes], or [samples, length, tokens]"""
    if isinstance(what, Model):
        return logits_of(server.model(what.architecture, what.weights), inputs).softmax(-1)
    models = frozen(what.members, what.build or server.model)
    if what.teacher is not None:
        ensemble = what.teacher(list(models), what.weights or [1.0] * len(models))
    else:
        ensemble = Ensemble(models, what.rule, what.weights)  # type: ignore[arg-type]
    return torch.cat([ensemble(x)[0] for x in batches(inputs, 512)])


def summarise(
    rounds: Sequence[RoundRecord], home: Path, method: Method, state: Any, fed: Federation, config: RunConfig
) -> dict[str, Any]:
    """The outcome of a run, from its records."""
    failures = Counter(f["client"] for r in rounds for f in r.failures)
    evaluated, timed = [r for r in rounds if r.scores], [r.simulated for r in rounds if r.simulated]
    last = evaluated[-1] if evaluated else None
    personal = {"personal": last.own, "personal_stages": last.of("stage")} if last else {}

    def best(kind: str) -> dict[str, Any]:
        out = {}
        for name, score in last.of(kind).items() if last else ():
            seen = [(r.of(kind)[name]["accuracy"], -r.round) for r in evaluated if name in r.of(kind)]
            accuracy, negative = max(seen)
            out[name] = {**score, "best_accuracy": accuracy, "best_round": -negative}
            if "perplexity" in score:
                out[name]["best_perplexity"] = min(
                    r.of(kind)[name]["perplexity"] for r in evaluated if name in r.of(kind)
                )
        return out

    return {
        "format": FORMAT,
        "solera": __version__,
        "name": config.name or home.name,
        "method": name_of(method),
        "rounds": len(rounds),
        "finished": True,
        "digest": fed.digest(state),
        "models": best("model"),
        "ensembles": best("ensemble"),
        **{key: found for key, found in personal.items() if found},
        "bytes": {way: sum(r.traffic.sent(way) for r in rounds) for way in WAYS},
        "content": {
            way: {kind: sum(r.traffic.content[way].get(kind, 0) for r in rounds) for kind in KINDS} for way in WAYS
        },
        "seconds": round(sum(r.seconds["total"] for r in rounds), 3),
        **({"simulated_hours": timed[-1]["end_s"] / 3600} if timed else {}),
        **({"server_hours": sum(s["server_s"] for s in timed) / 3600} if timed else {}),
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
        "out": str(home),
    }


# ---- The diversity of an ensemble's members: FedEED's argument for distilling into one designated model


class Diversity(NamedTuple):
    """The means over pairs."""

    disagreement: float
    kl: float
    pairs: int


def diversity(logits: Tensor, sets: Sequence[Sequence[int]]) -> Diversity | None:
    """Over the pairs within each set of members; None without a pair. logits [members, samples, classes]"""
    pairs = sorted({(i, j) for own in sets for i in own for j in own if i < j})
    if not pairs or logits.shape[1] == 0:
        return None
    log_p = finest(logits).log_softmax(-1)
    choice, N = log_p.argmax(-1), logits.shape[1]
    crossed = torch.einsum("inc,jnc->ij", log_p.exp(), log_p) / N  # mean over x of sum_c p_i log p_j
    one, two = torch.tensor(pairs).T
    differ = finest(choice[one] != choice[two]).mean().item()
    own = crossed.diagonal()
    kl = (own[one] - crossed[one, two] + own[two] - crossed[two, one]).mean().item() / 2
    return Diversity(differ, kl, len(pairs))
