"""Clients train while the server distils (FedEED, appendix A.7): pipeline = true.

Only the designated models wait for a distillation; the other groups can continue. So the loop is shifted by half a
round: round t begins with the distillation of round t - 1 and ends with the aggregates of t. At a checkpoint no work is
running. The last distillation comes at the end of the run. All updates have the same bits as without overlap. A round
reports the designated model of the round before, except the last round, which reports its own.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from ...core.federation import Federation
from ...scenario.server import Server
from .cohort import Clock
from .local_trainers import flat, nest

if TYPE_CHECKING:
    from .algorithm import Framework


def overlapped(framework: "Framework", state: "Framework.State", fed: Federation, server: Server) -> "Framework.State":
    """A round of the framework that includes the distillation of the round before and leaves its own to the next."""
    w, memory, clock = flat(state.models), flat(state.memory), Clock(server)
    cohort = framework.cohort(fed, server, clock)
    others, *designated = framework.exchanges(server)
    cohort.start(others, w, memory, framework.local)
    students = {(A, 0): student for A, student in state.pending.items()}
    lesson = framework.lesson(students, state.t, state.history, fed, server, clock)
    w |= lesson.teach(students)  # side by side, so all of them are ready at about the same time
    for groups in designated:
        cohort.start(groups, w, memory, framework.local)
    new = framework.aggregate(cohort, w, state, fed, server)
    x = w | new.w
    later = framework.students(x, new, fed, server)
    models = nest(x | {g: w[g] for g in later})
    return framework.State(fed.round, models, {A: m for (A, _), m in later.items()}, nest(new.memory), new.history)


def last_lesson(framework: "Framework", state: "Framework.State", fed: Federation, server: Server) -> "Framework.State":
    """The distillation of the last round, if it is pending."""
    students = {(A, 0): student for A, student in state.pending.items()}
    lesson = framework.lesson(students, state.t, state.history, fed, server, Clock(server))
    x, history = flat(state.models) | lesson.teach(students), state.history if framework.keeps_ensemble else []
    return replace(state, models=nest(x), pending={}, history=history)
