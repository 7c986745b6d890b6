"""The generalised framework of FedEED (anonymous ICLR submission, "FedEED: Efficient Federated Distillation with
Ensemble of Aggregated Models"), Algorithm 1: K global models; a local, an ensemble and a global trainer.

Each trainer is a slot (see slots.py). FedEED, FedBE, FedDistill, Fed-ensemble and codistillation are declarations of
this class with other defaults. Clients of different architectures form K groups in each.

With `pipeline` (appendix A.7) clients train while the server distils. Only the designated models wait for a
distillation, so the loop is shifted by half a round: round t begins with the distillation of round t - 1 and ends with
the aggregates of t. At a checkpoint no work is running, and the last distillation comes at the end of the run. All
updates have the same bits as without overlap. A round reports the designated model of the round before.
"""

from dataclasses import dataclass, replace
from typing import Literal

from ...core.federation import Federation
from ...core.tensors import Weights
from ...method import Model, register
from ...scenario.server import EnsembleReport, Server
from ...train.norms import parameter_names
from ...train.teachers import Teacher
from ..steps.fusion import public_indices
from .cohort import Clock, Cohort
from .ensemble_trainers import Member
from .grouping import Models, Seeds, check_groups, drop_small, flat, nest, split
from .slots import Slots


@register("framework")
@dataclass(frozen=True)
class Framework(Slots):
    """Local trainer, ensemble trainer and global trainer, freely combined."""

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
        w, memory, clock = flat(state.models), flat(state.memory), Clock(server)  # w^g*_{t-1,k}
        S = split(self.shares, self.schedule, fed, server)  # S_{t,0}, ..., S_{t,K-1}
        S = drop_small(S, server) if self.no_single_groups else S
        cohort = Cohort(S, self.local_trainer, self.screen, bool(self.needs_individual), fed, server, clock)
        # A designated group is an exchange of its own, after all others: a client's seeds depend on the exchange.
        everyone = [(A, k) for A in server.architectures for k in range(self.K)]
        designated = [g for g in everyone if g[1] == 0 and self.global_trainer.designated]
        cohort.start([g for g in everyone if g not in designated], w, memory, self.local)
        w |= self.last_lesson(state, fed, server, clock)  # with `pipeline`: w^g*_{t-1,0}, beside the clients' work
        for g in designated:
            cohort.start([g], w, memory, self.local)

        seeds = Seeds(fed.run_seed, fed.round)
        d = public_indices(self.fusion, seeds, server)
        means, uploads = cohort.collect(w, d[: self.fusion.batch], self.no_single_groups)  # w^l*_{t,k}
        w_g = dict(w)
        for g, (mean, count) in means.items():  # g = (architecture, k): the K groups
            found = cohort.aggregate(g, mean, count, w[g], memory)  # w^g_{t,k} = LocalTrainer_k
            w_g = {h: x for h, x in w_g.items() if h != g} if found is None else w_g | {g: found}
        members = self.ensemble_trainer.members(w_g, uploads, w, d, seeds, server)  # w^e_t = EnsembleTrainer
        members = self.ensemble_trainer.tuned(members, seeds, server)
        history = [*state.history, members][-self.R :]  # w^e*_t: the checkpoints of R rounds
        self.report(history, server)

        x = w | w_g
        students = {g: x[g] for g in self.global_trainer.students(fed.round, list(x), set(means))}
        for A in [A for A, k in students if k == 0 and self.report_ensemble]:
            server.report_average(A, students[A, 0])
        if self.pipeline:
            pending = {A: student for (A, _), student in students.items()}
            return self.State(fed.round, nest(x | {g: w[g] for g in students}), pending, nest(memory), history)
        x |= self.taught(students, fed.round, history, fed, server, clock)  # w^g*_{t,k} = GlobalTrainer
        return self.State(fed.round, nest(x), {}, nest(memory), history if self.keeps_ensemble else [])

    def taught(
        self, students: Models, t: int, history: list[list[Member]], fed: Federation, server: Server, clock: Clock
    ) -> Models:
        """The students after the distillation of round t."""
        members, seeds = [m for checkpoint in history for m in checkpoint], Seeds(fed.run_seed, t)

        def teacher(own: list[Member]) -> Teacher:
            return self.ensemble_trainer.teacher(own, self.rule, self.fusion.temperature, server)

        return self.global_trainer.teach(students, members, teacher, self.fusion, seeds, server, clock)

    def last_lesson(self, state: State, fed: Federation, server: Server, clock: Clock) -> Models:
        """The students after the distillation that the previous round left pending."""
        pending = {(A, 0): x for A, x in state.pending.items()}
        return self.taught(pending, state.t, state.history, fed, server, clock)

    def finish(self, state: State, fed: Federation, server: Server) -> State:
        x = flat(state.models) | self.last_lesson(state, fed, server, Clock(server))
        return replace(state, models=nest(x), pending={}, history=state.history if self.keeps_ensemble else [])

    # -- results --

    def report(self, history: list[list[Member]], server: Server) -> None:
        """Evaluate the ensemble before any distillation, and the diversity of its members: among the models of the
        newest round, and among each model's checkpoints of R rounds."""
        place = [(r, (m.architecture, m.group)) for r, members in enumerate(history) for m in members]
        alike = {"models": [[i for i, (r, _) in enumerate(place) if r == len(history) - 1]]}
        if len(history) > 1:
            groups = dict.fromkeys(g for _, g in place)
            alike["checkpoints"] = [[i for i, (_, own) in enumerate(place) if own == g] for g in groups]
        if self.report_ensemble and (found := self.ensemble(history)):
            server.report_ensemble(found.name, found.members, found.rule, found.weights, alike=alike)

    def models(self, state: State) -> dict[str, Model]:
        """The first model of each architecture under its name; the others as name.1, name.2, ... if not designated."""
        shown = 1 if self.global_trainer.designated else self.K
        kind: Literal["part", "model"] = "part" if shown > 1 else "model"
        first = {A: Model(A, own[0], kind) for A, own in state.models.items()}
        return first | {f"{A}.{k}": Model(A, state.models[A][k], kind) for A in first for k in range(1, shown)}

    def ensemble_of(self, state: State) -> EnsembleReport | None:
        """The ensemble itself, for inference."""
        return self.ensemble(state.history)

    def ensemble(self, history: list[list[Member]]) -> EnsembleReport | None:
        """The members and their weights; None without a member."""
        members = [m for checkpoint in history for m in checkpoint]
        joint = [(m.architecture, m.weights) for m in members]
        return EnsembleReport("ensemble", joint, self.rule, [m.share for m in members]) if members else None
