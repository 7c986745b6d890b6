"""The fusion step: compute the teachers' predictions once for the round's public samples, and distil every student.

FedDF, Fed-ET, `fusionlarge` and FedEED's framework share this step. They differ in their teachers and students.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...core.federation import Federation, Replies
from ...core.task import Data
from ...core.tensors import Weights, weights_of
from ...scenario.server import Server
from ...train.distill import Distill, Distilled, Loss, Memo, Validate, cached, distill, visits
from ...train.fitting import Diverged, Fitted, evaluate, logits_of
from ...train.norms import reestimate
from ...train.teachers import Build, Cache, Frozen, Teacher, frozen

Seeds = Callable[..., int]  # `fed.seed`, or that of an earlier round
Asked = Teacher | Cache | Memo  # a teacher, or its stored predictions
Student = TypeVar("Student", bound=Hashable)  # an architecture, or (architecture, number of the global model)


def fuse(
    students: Mapping[Student, Weights],
    teacher: Asked | Mapping[Student, Asked],
    d: Tensor,
    cfg: Distill,
    seeds: Seeds,
    server: Server,
    loss: Loss | None = None,
    validate: bool = True,
    jobs: Sequence[int] | None = None,
    **facts: Any,
) -> dict[Student, Weights]:
    """The students' weights after distillation from `teacher` on the public samples d.

    All students see the same minibatches and are independent given the teacher, so they are distilled in parallel.
    `teacher` may be stored predictions (see `asked`), and may differ between students. `loss` defaults to KL.
    `validate`: stop early by the server's validation set, if there is one. `jobs` number the students, for the
    random numbers of each (dropout); default: 0, 1, ... `facts` are added to the event of each student.
    """
    if cfg.steps == 0 or not students:
        return dict(students)
    if not isinstance(teacher, Mapping):
        teacher = dict.fromkeys(students, asked(teacher, len(students) > 1, d, cfg, seeds, server))
    accuracy, seed = accuracy_on(server.validation) if validate else None, seeds("fusion")

    def distilled(g: Student) -> tuple[Weights, Distilled]:
        model = server.model(_named(g)["architecture"], students[g])  # built in the job, which may run twice
        done = distill(model, server.public, teacher[g], cfg, seed, indices=d, loss=loss, validate=accuracy)
        return weights_of(model), done

    numbers = range(len(students)) if jobs is None else jobs
    results = server.parallel([partial(distilled, g) for g in students], [seeds("job", i) for i in numbers])
    for g, (_, done) in zip(students, results, strict=True):
        kind = "distill_diverged" if done.diverged else "distilled"
        outcome = {"steps": done.steps, "best_step": done.best_step, "loss": done.loss, "accuracy": done.accuracy}
        server.event(kind, **_named(g), **facts, **outcome)
    server.worked(sum(done.steps for _, done in results) * min(cfg.batch, len(d)))
    return {g: weights for g, (weights, _) in zip(students, results, strict=True)}


def _named(student: Any) -> dict[str, Any]:
    return {"architecture": student} if isinstance(student, str) else {"architecture": student[0], "group": student[1]}


# ---- the teachers ------------------------------------------------------------------------------


def asked(teacher: Asked, several: bool, d: Tensor, cfg: Distill, seeds: Seeds, server: Server) -> Asked:
    """The teacher's predictions for all samples that distillation will visit, each computed once.

    If samples change with every draw, this is the teacher itself; `several` students then share its predictions for a
    minibatch. Stored predictions are returned unchanged. Without distillation steps nothing is computed.
    """
    if isinstance(teacher, Cache | Memo) or cfg.steps == 0:
        return teacher
    if server.public.fresh:
        return Memo(teacher, d, cfg, seeds("fusion")) if several else teacher
    return kept(teacher, visited(d, cfg, seeds), cfg, seeds, server)


def visited(d: Tensor, cfg: Distill, seeds: Seeds) -> Tensor:
    """The public samples of d that are in some minibatch."""
    return d[visits(len(d), cfg.steps, cfg.batch, seeds("fusion"))].unique()


def kept(teacher: Teacher, seen: Tensor, cfg: Distill, seeds: Seeds, server: Server) -> Cache:
    """The teacher's predictions for the samples `seen`, each computed once."""
    return cached(teacher, server.public, seen, cfg, partial(side_by_side, seeds, server))


def copies_of(clients: Iterable[str], fed: Federation) -> list[float]:
    """The number of times each client was sampled: its model's weight. With replacement it may exceed 1."""
    return [float(fed.copies.get(k, 1)) for k in clients]


def finite_models(
    x: Replies,
    probe: Tensor,
    fed: Federation,
    server: Server,
    probed: str = "public samples",
    build: Build | None = None,
) -> dict[str, Frozen]:
    """The uploaded models whose logits on `probe` are finite; the others are rejected. `build` makes their modules, if
    they predict differently from the server's."""
    uploads = [(fed.architecture(k), x[k].weights) for k in x]
    models = dict(zip(x, frozen(uploads, build or server.model), strict=True))
    fine = side_by_side(fed.seed, server, [partial(answers_finitely, model, probe) for model in models.values()])
    for k, ok in zip(list(models), fine, strict=True):
        if not ok:
            fed.reject(x, k, f"non-finite logits on {probed}")
            del models[k]
    return models


def answers_finitely(model: nn.Module, inputs: Tensor) -> bool:
    """True if the logits of `model` are finite for all of `inputs`."""
    return len(inputs) == 0 or bool(torch.isfinite(logits_of(model, inputs)).all())


def with_statistics(A: str, weights: Weights, inputs: Tensor, server: Server) -> Weights:
    """An untrained model (sampled or averaged) with BatchNorm statistics estimated from `inputs`."""
    model = server.model(A, weights)
    reestimate(model, inputs)
    return weights_of(model)


# ---- the round's public samples, and the server's own work --------------------------------------------------


def public_indices(cfg: Distill, seeds: Seeds, server: Server) -> Tensor:
    """The public samples of a round; none without distillation."""
    if cfg.steps == 0 or server.public is None:
        return torch.empty(0, dtype=torch.int64)
    return server.public.round_indices(server.per_round, seeds("public"))


def first_batch(d: Tensor, cfg: Distill, server: Server) -> Tensor:
    """The first minibatch of the public samples d: a model's logits on them must be finite."""
    return server.public[d[: cfg.batch]] if len(d) else d


def side_by_side(seeds: Seeds, server: Server, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run independent jobs in the server's threads; results in order."""
    return server.parallel(jobs, [seeds("job", i) for i in range(len(jobs))])


def outcome_of(train: Callable[[], Fitted]) -> Fitted | Diverged:
    """The result of a training on the server, or its `Diverged` error. (On a client it drops the client.)"""
    try:
        return train()
    except Diverged as e:
        return e


def accuracy_on(data: Data | None) -> Validate | None:
    """The accuracy of a model on `data`, as a function; None without data."""
    return None if data is None else lambda model: evaluate(model, data.inputs, data.labels).accuracy


# ---- checks before a run ---------------------------------------------------------------------------


def validation_problems(key: str, cfg: Distill, server: Server) -> Iterator[str]:
    """Report that the setting `key` needs a validation set if the server has none."""
    if cfg.keep_init_if_better and server.validation is None:
        yield f"method.{key}.keep_init_if_better needs a validation set on the server: set data.validation"


def logits_problems(name: str, server: Server) -> Iterator[str]:
    """Report architectures whose output per public sample is not one logit per class (or token, at every position)."""
    for A in server.architectures:
        shape = tuple(logits_of(server.model(A, server.init(A)), server.public[torch.tensor([0])]).shape)
        if shape != (1, *server.answer):
            yield f"{name}: {A!r} gives logits {shape} for one sample, not {(1, *server.answer)}"
