"""Screens select uploads and average those of one architecture. They are the defences against Byzantine clients.

Krum and multi-Krum: Blanchard, El Mhamdi, Guerraoui, Stainer, NeurIPS 2017. With d(i, j) the squared distance of two
models, the score of model i is the sum of d(i, j) over the n - f - 2 models nearest to it (Krum needs n >= 2f + 3).

    krum          the model with the lowest score
    multi_krum    the mean of the n - f - 2 models with the lowest scores
    bulyan        El Mhamdi, Guerraoui, Rouault, ICML 2018 (n >= 4f + 3): Krum picks n - 2f models one after the other,
                  each out of those that are left; then, number by number, the mean of the n - 4f picked values nearest
                  to their median
    trimmed_mean  Yin, Chen, Ramchandran, Bartlett, ICML 2018 (n >= 2f + 1): number by number, the mean without the f
                  smallest and the f largest values

All models count the same, whatever their numbers of examples: a Byzantine client could claim any.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field, replace
from functools import partial
from typing import Annotated, ClassVar, Literal, Self

import torch
from torch import Tensor

from ...core.federation import Federation, Replies
from ...core.settings import ByzantineCount, Hint, NonNegative, Positive, Problem, Slot, settings
from ...core.tensors import Weights
from ...scenario.server import Server
from ...train.aggregate import uniform_mean
from ...train.fitting import evaluate
from ...train.norms import parameter_names
from ...train.robust import by_number, clip_updates, weighted_median
from ...train.teachers import Build, Frozen, drop_worst
from .fusion import finite_models, side_by_side
from .training import Sent, Update, average_of, head_of

Selection = Literal["krum", "multi_krum", "bulyan"]
Combined = Literal["weighted", "uniform", "median", "trimmed_mean", "krum", "multi_krum", "bulyan"]
Plain = Annotated[Literal["weighted", "uniform"], Hint("others with kind = 'robust'")]
NEEDED = {"krum": (2, 3), "multi_krum": (2, 3), "bulyan": (4, 3), "trimmed_mean": (2, 1)}  # n >= a f + b


@settings
class Screen(Slot):
    """Every valid upload counts; those of one architecture are averaged."""

    kind: str = field(default="all", init=False)
    average: Plain = "weighted"  # by the clients' numbers of examples, or equally
    buffers: Literal["mean", "last"] = "mean"  # BatchNorm's running statistics: averaged too, or the last client's

    BESIDE: ClassVar = {
        "average": "method.screen.average",
        "average_buffers": "method.screen.buffers",
        **{
            old: f"method.screen.{new}, with method.screen.kind = 'robust'"
            for old, new in (
                ("teachers", "teachers_by"),
                ("byzantine", "max_byzantine"),
                ("drop_worst", "drop_worst"),
                ("drop_threshold", "drop_threshold"),
                ("drop_outliers", "drop_outliers"),
                ("update_clip", "update_clip"),
            )
        },
    }

    @property
    def individual(self) -> bool:
        """True if it needs the clients' models, and not only their mean."""
        return self.buffers != "mean"

    def uploads(self, x: Replies, sent: Sent, fed: Federation, server: Server) -> Replies:
        """The uploads, clipped or unchanged; `sent` are the models that clients were sent."""
        return x

    def members(self, models: dict[str, Frozen], x: Replies, fed: Federation, server: Server) -> dict[str, Frozen]:
        """The clients that are used at all, in averages and as teachers."""
        return models

    def teachers(self, models: dict[str, Frozen], fed: Federation, server: Server) -> dict[str, Frozen]:
        """The members whose models teach."""
        return models

    def screened(
        self, x: Replies, sent: Sent, probe: Tensor, fed: Federation, server: Server, build: Build | None = None
    ) -> tuple[Replies, dict[str, Frozen], dict[str, Frozen]]:
        """The results of `uploads`, `members` and `teachers`. Models whose logits on `probe` are not finite are
        rejected."""
        x = self.uploads(x, sent, fed, server)
        members = self.members(finite_models(x, probe, fed, server, build=build), x, fed, server)
        return x, members, self.teachers(members, fed, server)

    def averages(self, x: Replies, members: Iterable[str], fed: Federation, server: Server) -> dict[str, Weights]:
        """The average of each architecture's clients; architectures without a client are left out."""
        S = {A: [k for k in members if fed.architecture(k) == A] for A in server.architectures}
        return {A: self.average_of(x, S_A, fed, server) for A, S_A in S.items() if S_A}

    def head(self, x: Replies, members: Iterable[str], fed: Federation, server: Server) -> Weights:
        """The average of the heads of all architectures; every client counts the same."""
        heads = Replies((k, Update(head_of(x[k].weights))) for k in members)
        how = replace(self, average="uniform") if self.average == "weighted" else self
        return how.combined(heads, list(heads), fed, server)

    def average_of(self, x: Replies, S: list[str], fed: Federation, server: Server) -> Weights:
        """One model from the uploads of clients S, which have one architecture."""
        one = self.combined(x, S, fed, server)
        if self.buffers == "mean":
            return one
        names = parameter_names(server.template(fed.architecture(S[0])))
        return x[S[-1]].weights | {name: one[name] for name in names}

    def combined(self, x: Replies, S: list[str], fed: Federation, server: Server) -> Weights:
        """Their mean, running statistics included."""
        return average_of(self.average, x, S, fed)


@settings
class Robust(Screen):
    """Defences against Byzantine clients. Those of one architecture are compared with each other."""

    kind: str = field(default="robust", init=False)
    average: Combined = "weighted"  # type: ignore[assignment]  # the last four tolerate max_byzantine clients
    teachers_by: Literal["all", "krum", "multi_krum", "bulyan"] = "all"  # whose models teach, in each architecture
    max_byzantine: ByzantineCount = 1  # f: Byzantine clients tolerated per architecture by krum, bulyan, trimmed_mean
    drop_worst: bool = False  # clients near chance on the validation set are neither averaged nor teachers
    drop_threshold: NonNegative = 1.2  # in multiples of chance
    drop_outliers: bool = False  # if no client is near chance, drop those far below the others
    update_clip: Positive | None = None  # largest norm of a client's update, in multiples of its architecture's median

    def problems(self) -> Iterator[Problem]:
        if self.drop_outliers and not self.drop_worst:
            yield "drop_outliers = true has no effect without drop_worst = true"

    def fits(self, server: Server) -> Iterator[Problem]:
        if self.drop_threshold > server.num_classes:
            yield f"drop_threshold = {self.drop_threshold}: {server.num_classes} times chance is an accuracy of 1"
        if self.drop_worst and server.validation is None:
            yield "drop_worst needs a validation set on the server: set data.validation"

    @property
    def individual(self) -> bool:
        return self != Robust(self.average) or self.average not in ("weighted", "uniform")

    def for_dry_run(self) -> Self:
        return replace(self, drop_worst=False, drop_outliers=False) if self.drop_worst else self  # zeros: all dropped

    def uploads(self, x: Replies, sent: Sent, fed: Federation, server: Server) -> Replies:
        """The uploads, with each update's norm clipped to `update_clip` times the median of its architecture's clients.

        An update is the difference from the model that the client was sent.
        """
        if self.update_clip is None:
            return x
        for A in server.architectures:
            own = [k for k in x if fed.architecture(k) == A]
            names = parameter_names(server.template(A))
            fine = clip_updates([x[k].weights for k in own], [sent(k) for k in own], self.update_clip, names)
            for k, weights in zip(own, fine, strict=True):
                if weights is not x[k].weights:
                    server.event("update_clipped", client=k)
                    x[k] = Update(weights)
        return x

    def members(self, models: dict[str, Frozen], x: Replies, fed: Federation, server: Server) -> dict[str, Frozen]:
        """With `drop_worst`, the models better than chance on the validation set; the other clients are rejected."""
        held_out = server.validation
        if not self.drop_worst or held_out is None:
            return models
        jobs = [partial(evaluate, model, held_out.inputs, held_out.labels) for model in models.values()]
        scores = [score.accuracy for score in side_by_side(fed.seed, server, jobs)]
        kept = drop_worst(scores, server.num_classes, self.drop_threshold, self.drop_outliers)
        for i, k in enumerate(models):
            if i not in kept:
                fed.reject(x, k, f"drop_worst: an accuracy of {scores[i]:.4f} on the validation samples")
        return {k: model for i, (k, model) in enumerate(models.items()) if i in kept}

    def teachers(self, models: dict[str, Frozen], fed: Federation, server: Server) -> dict[str, Frozen]:
        """All, or in each architecture those that the rule chooses; the others still count in the average."""
        if self.teachers_by == "all":
            return models
        taught = set()
        for A in server.architectures:
            S = [k for k in models if fed.architecture(k) == A]
            if S:
                distances = squared_distances([models[k].weights for k in S], parameter_names(server.template(A)))
                f = self._tolerated(self.teachers_by, S, fed, server)
                taught |= {S[i] for i in chosen(self.teachers_by, distances, f)}
        for k in models:
            if k not in taught:
                server.event("teacher_left_out", client=k, rule=self.teachers_by)
        return {k: model for k, model in models.items() if k in taught}

    def combined(self, x: Replies, S: list[str], fed: Federation, server: Server) -> Weights:
        """One model by `average`."""
        if self.average == "weighted" or self.average == "uniform" or self.average == "median":
            return average_of(self.average, x, S, fed)
        names = [n for n in parameter_names(server.template(fed.architecture(S[0]))) if n in x[S[0]].weights]
        f = self._tolerated(self.average, S, fed, server)
        return byzantine_mean(self.average, [x[k].weights for k in S], names, f)

    def _tolerated(self, how: str, S: list[str], fed: Federation, server: Server) -> int:
        """The number of Byzantine clients that the rule tolerates among S, at most `max_byzantine`; notes if fewer."""
        most, asked = tolerated(how, len(S)), self.max_byzantine
        if asked > most:
            A = ", ".join(sorted({fed.architecture(k) for k in S}))
            server.event("fewer_liars", architecture=A, rule=how, clients=len(S), asked=asked, borne=most)
        return min(asked, most)


# ---- the rules --------------------------------------------------------------------------------------


def tolerated(how: str, n: int) -> int:
    """The largest f among n models that a rule tolerates."""
    a, b = NEEDED[how]
    return max(0, (n - b) // a)


def squared_distances(uploads: Sequence[Weights], names: Iterable[str]) -> Tensor:
    """||w_i - w_j||^2 over the tensors `names`, for each pair. float64 [n, n]"""
    n, names = len(uploads), list(names)
    found = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        for j in range(i):
            terms = [(uploads[i][name].double() - uploads[j][name].double()).square().sum() for name in names]
            found[i, j] = found[j, i] = torch.stack(terms).sum()
    return found


def krum_scores(distances: Tensor, f: int) -> Tensor:
    """The sum of the squared distances to the n - f - 2 nearest others, but at least to one, if there is one. [n]"""
    n = len(distances)
    nearest = distances.sort(1).values[:, 1:]  # without the distance to itself, which is 0
    return nearest[:, : max(1, n - f - 2)].sum(1)


def chosen(how: Selection, distances: Tensor, f: int) -> list[int]:
    """The models that the rule chooses, in ascending order; ties go to the first."""
    n = len(distances)
    if how == "bulyan":
        left, picked = list(range(n)), []
        for _ in range(max(1, n - 2 * f)):
            scores = krum_scores(distances[left][:, left], f)
            picked.append(left.pop(int(scores.argmin())))
        return sorted(picked)
    count = 1 if how == "krum" else max(1, n - f - 2)
    return sorted(krum_scores(distances, f).sort(stable=True).indices[:count].tolist())


def byzantine_mean(
    how: Selection | Literal["trimmed_mean"], uploads: Sequence[Weights], names: Iterable[str], f: int
) -> Weights:
    """One model from the uploads. `names` are the tensors (the parameters) by which models are compared.

    Integer tensors (counters) have no mean: their maximum is kept.
    """
    if f > tolerated(how, len(uploads)):
        most = tolerated(how, len(uploads))
        raise ValueError(f"{how}: {len(uploads)} models tolerate {most} Byzantine clients, not {f}")
    if how == "trimmed_mean":
        return by_number(uploads, lambda values: values.double().sort(0).values[f : len(values) - f].mean(0))
    kept = [uploads[i] for i in chosen(how, squared_distances(uploads, names), f)]
    if how == "bulyan":
        return by_number(kept, lambda values: _nearest_to_median(values.double(), len(values) - 2 * f))
    return uniform_mean(kept)


def _nearest_to_median(values: Tensor, count: int) -> Tensor:
    order = (values - weighted_median(values)).abs().sort(dim=0, stable=True).indices[:count]
    return values.gather(0, order).mean(0)
