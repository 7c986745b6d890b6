"""The generalised framework of FedEED (anonymous ICLR submission, "FedEED: Efficient Federated Distillation with
Ensemble of Aggregated Models"), Algorithm 1: K global models; a local, an ensemble and a global trainer.

Each slot is filled by name in a configuration, or with an object of your own in Python. FedEED, FedBE, FedDistill,
Fed-ensemble, codistillation and FedDF are settings of it. Clients of different architectures form K groups in each.

With `pipeline`, clients train while the server distils: overlap.py shifts this loop by half a round.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from ...core.federation import Federation
from ...core.tensors import Weights
from ...method import About, Model, register
from ...scenario.server import EnsembleReport, Server
from ...train.norms import parameter_names
from ..steps.fusion import public_indices
from .cohort import Clock, Cohort
from .ensemble_trainers import Member
from .global_trainers import Lesson
from .grouping import check_groups, drop_small, split
from .local_trainers import Group, Models, Seeds, flat, nest
from .overlapping import last_lesson, overlapped
from .slots import Slots


class Aggregated(NamedTuple):
    """The results of the clients' training in a round."""

    w: Models  # w^g_{t,k}; unchanged for a group without clients, missing if the aggregate is not finite
    trained: set[Group]
    memory: Models
    history: list[list[Member]]


def alike(history: list[list[Member]]) -> dict[str, list[list[int]]]:
    """Members whose diversity is measured: the models of the newest round, and each model's checkpoints of R rounds."""
    place = [(r, (m.architecture, m.group)) for r, members in enumerate(history) for m in members]
    sets = {"models": [[i for i, (r, _) in enumerate(place) if r == len(history) - 1]]}
    if len(history) > 1:
        groups = dict.fromkeys(g for _, g in place)
        sets["checkpoints"] = [[i for i, (_, own) in enumerate(place) if own == g] for g in groups]
    return sets


@register("framework")
@dataclass(frozen=True)
class Framework(Slots):
    """Local trainer, ensemble trainer and global trainer, freely combined."""

    @property
    def about(self) -> About:
        slots = self.needs_individual
        single = f"for {', '.join(slots)}" if slots else "no slot needs individual models"
        return About(
            title="Generalised framework",
            paper="FedEED's Algorithm 1, ICLR submission",
            wire="model down, model up (with scaffold also control variates)",
            state=self.local_trainer.client_state,
            privacy=single,
        )

    @dataclass(frozen=True)
    class State:
        t: int  # the round of the newest aggregates; -1 at first
        models: dict[str, list[Weights]]  # w^g*_k of each architecture: what group k trains next
        pending: dict[str, Weights]  # w^g_0 of each architecture, if its distillation is not done yet
        memory: dict[str, list[Weights]]  # the local trainer's memory for each model
        history: list[list[Member]]  # the ensemble: its members of the last R rounds

    # -- Algorithm 1 --

    def init(self, fed: Federation, server: Server) -> State:
        check_groups(self.shares, self.no_single_groups, self.global_trainer.designated, fed, server)
        w = {(A, k): server.init(A, k) for A in server.architectures for k in range(self.K)}  # w^g*_{-1,k}
        memory = {g: self.local_trainer.of(g).memory(g, w[g], parameter_names(server.template(g[0]))) for g in w}
        return self.State(-1, nest(w), {}, nest(memory), [])

    def round(self, state: State, fed: Federation, server: Server) -> State:
        if self.pipeline:
            return overlapped(self, state, fed, server)
        w, clock = flat(state.models), Clock(server)  # w^g*_{t-1,k}
        cohort = self.cohort(fed, server, clock)  # S_{t,0}, ..., S_{t,K-1}
        for groups in self.exchanges(server):
            cohort.start(groups, w, flat(state.memory), self.local)
        new = self.aggregate(cohort, w, state, fed, server)  # w^g_{t,k}, w^e*_t
        x = w | new.w
        students = self.students(x, new, fed, server)
        x |= self.lesson(students, fed.round, new.history, fed, server, clock).teach(students)  # w^g*_{t,k}
        return self.State(fed.round, nest(x), {}, nest(new.memory), new.history if self.keeps_ensemble else [])

    def aggregate(self, cohort: Cohort, w: Models, state: State, fed: Federation, server: Server) -> Aggregated:
        """K groups of clients train one global model each; the ensemble has the results of the last R rounds."""
        seeds, R = Seeds(fed.run_seed, fed.round), self.ensemble_trainer.R
        d = public_indices(self.fusion, seeds, server)
        means, uploads = cohort.collect(w, d[: self.fusion.batch], self.no_single_groups)  # w^l*_{t,k}
        w_g, memory = dict(w), flat(state.memory)
        for g, (mean, count) in means.items():  # g = (architecture, k): the K groups
            found = cohort.aggregate(g, mean, count, w[g], memory)  # w^g_{t,k}
            if found is None:
                del w_g[g]
            else:
                w_g[g] = found
        members = self.ensemble_trainer.members(w_g, uploads, w, d, seeds, server)
        history = [*state.history, members][-R:]  # w^e*_t: the checkpoints of R rounds
        self.report(history, server)
        return Aggregated(w_g, set(means), memory, history)

    def cohort(self, fed: Federation, server: Server, clock: Clock) -> Cohort:
        """The clients of this round in their groups."""
        S = split(self.shares, self.schedule, fed, server)
        S = drop_small(S, server) if self.no_single_groups else S
        return Cohort(S, self.local_trainer, bool(self.needs_individual), fed, server, clock)

    def exchanges(self, server: Server) -> list[list[Group]]:
        """Which groups receive their models in one exchange: each designated group alone, after all the others.

        Designated groups are separate exchanges even without overlap, because a client's random numbers depend on the
        number of its exchange.
        """
        everyone = [(A, k) for A in server.architectures for k in range(self.K)]
        designated = [g for g in everyone if g[1] == 0 and self.global_trainer.designated]
        return [[g for g in everyone if g not in designated], *([g] for g in designated)]

    def students(self, x: Models, new: Aggregated, fed: Federation, server: Server) -> Models:
        """The models to distil in this round, before distillation."""
        students = {g: x[g] for g in self.global_trainer.students(fed.round, list(x), new.trained)}
        for A in [A for A, k in students if k == 0 and self.report_ensemble]:
            server.report_average(A, students[A, 0])
        return students

    def finish(self, state: State, fed: Federation, server: Server) -> State:
        return last_lesson(self, state, fed, server)

    def lesson(
        self, students: Models, t: int, history: list[list[Member]], fed: Federation, server: Server, clock: Clock
    ) -> Lesson:
        """The distillation of round t, with the teachers' predictions already computed."""
        members, seeds = [m for checkpoint in history for m in checkpoint], Seeds(fed.run_seed, t)
        return self.global_trainer.lesson(
            list(students), members, self.ensemble_trainer, self.fusion, seeds, server, clock
        )

    def report(self, history: list[list[Member]], server: Server) -> None:
        """Evaluate the ensemble before any distillation."""
        members = [m for checkpoint in history for m in checkpoint]
        if self.report_ensemble and members:
            voices, shares = [(m.architecture, m.weights) for m in members], [m.share for m in members]
            server.report_ensemble("ensemble", voices, self.ensemble_trainer.rule, shares, alike=alike(history))

    # -- results --

    def models(self, state: State) -> dict[str, Model]:
        """The first model of each architecture under its name; the others as name.1, name.2, ... if not designated."""
        shown = 1 if self.global_trainer.designated else self.K
        kind: Literal["part", "model"] = "part" if shown > 1 else "model"
        first = {A: Model(A, own[0], kind) for A, own in state.models.items()}
        return first | {f"{A}.{k}": Model(A, state.models[A][k], kind) for A in first for k in range(1, shown)}

    def ensemble_of(self, state: State) -> EnsembleReport | None:
        """The ensemble itself, for inference: its members and their weights."""
        members = [m for checkpoint in state.history for m in checkpoint]
        if not members:
            return None
        voices, shares = [(m.architecture, m.weights) for m in members], [m.share for m in members]
        return EnsembleReport("ensemble", voices, self.ensemble_trainer.rule, shares)
