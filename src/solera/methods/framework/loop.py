"""The generalised framework of FedEED (anonymous ICLR submission, "FedEED: Efficient Federated Distillation with
Ensemble of Aggregated Models"), Algorithm 1: K global models; a local, an ensemble and a global trainer.

Each slot is filled by name in a configuration, or with an object of your own in Python. FedEED, FedBE, FedDistill,
Fed-ensemble, codistillation and FedDF are settings of it. Clients of different architectures form K groups in each.

Overlap (pipeline = "strict" or "eager", with designated distillation): clients of the other groups train while the
server distils. For that the loop is turned by half a round: round t begins with the distillation of round t - 1 and
ends when the aggregates of t are there. So nothing is under way at a checkpoint, and `finish` distils the last one.
All updates are those of "off", to the bit; what a round reports as the designated model is that of the round before,
except in the last round, where it is the same.
"""

from dataclasses import dataclass, replace

from ...federation import Federation
from ...method import About, Model, register
from ...parts.norms import parameter_names
from ...server import EnsembleReport, Server
from ...tensors import Weights
from .cohort import Clock, Cohort
from .ensemble_trainers import Member
from .global_trainers import Lesson, public_indices
from .groups import check_groups, drop_small, split
from .local_trainers import Models, Seeds, flat, nest
from .slots import Slots


@register("framework")
@dataclass(frozen=True)
class Framework(Slots):
    """Local trainer, ensemble trainer and global trainer, freely combined."""

    @property
    def about(self) -> About:
        single = f"for {', '.join(self.curious)}" if self.curious else "no slot needs single models"
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
        pending: dict[str, Weights]  # w^g_0 of each architecture, while its distillation is still to come
        memory: dict[str, list[Weights]]  # what the local trainer keeps beside each model
        history: list[list[Member]]  # the ensemble: its members of the last R rounds

    # -- Algorithm 1 --

    def init(self, fed: Federation, server: Server) -> State:
        check_groups(self.shares, self.secure, self.global_trainer.designated, fed, server)
        w = {(P, k): server.init(P, k) for P in server.architectures for k in range(self.K)}  # w^g*_{-1,k}
        memory = {g: self.local_trainer.memory(g, w[g], parameter_names(server.template(g[0]))) for g in w}
        return self.State(-1, nest(w), {}, nest(memory), [])

    def round(self, state: State, fed: Federation, server: Server) -> State:
        t, seeds, clock = fed.round, Seeds(fed.run_seed, fed.round), Clock(server)
        S = split(self.shares, self.schedule, fed, server)  # S_{t,0}, ..., S_{t,K-1}
        S = drop_small(S, server) if self.secure else S
        d = public_indices(self.fusion, seeds, server)
        cohort = Cohort(S, self.local_trainer, bool(self.curious), fed, server, clock)
        w = self.train(cohort, state, fed, server, clock)  # w^g*_{t-1,k}: what was sent
        means, uploads = cohort.collect(w, d[: self.fusion.batch], self.secure)  # w^l*_{t,k}
        w_g, memory = cohort.aggregate(means, w, flat(state.memory))  # w^g_{t,k}
        members = self.ensemble_trainer.members(w_g, uploads, w, d, seeds, server)
        history = [*state.history, members][-self.ensemble_trainer.R :]  # w^e*_t
        self.report(history, server)
        x = w | w_g
        students = {g: x[g] for g in self.global_trainer.students(t, list(x), set(means))}
        for P in [P for P, k in students if k == 0 and self.report_ensemble]:
            server.report_average(P, students[P, 0])
        if self.pipeline != "off":
            later = {P: student for (P, _), student in students.items()}
            return self.State(t, nest(x | {g: w[g] for g in students}), later, nest(memory), history)
        x |= self.lesson(students, t, history, fed, server, clock).teach(students)  # w^g*_{t,k}
        return self.State(t, nest(x), {}, nest(memory), history if self.keeps_ensemble else [])

    def train(self, cohort: Cohort, state: State, fed: Federation, server: Server, clock: Clock) -> Models:
        """Start every group as soon as its model is there, giving the distillation that was put off; the models sent.

        Designated groups are exchanges of their own even where nothing overlaps, because a client's random numbers
        depend on the number of its exchange.
        """
        w, memory = flat(state.models), flat(state.memory)
        first = [(P, 0) for P in server.architectures if self.global_trainer.designated]
        cohort.start([g for g in w if g not in first], w, memory, self.local)
        students = {(P, 0): student for P, student in state.pending.items()}
        lesson = self.lesson(students, state.t, state.history, fed, server, clock)
        for batch in [[g] for g in first] if self.pipeline == "eager" else [first]:
            w |= lesson.teach({g: students[g] for g in batch if g in students})
            for g in batch:
                cohort.start([g], w, memory, self.local)
        return w

    def finish(self, state: State, fed: Federation, server: Server) -> State:
        """The distillation of the last round, where it was put off."""
        students = {(P, 0): student for P, student in state.pending.items()}
        lesson = self.lesson(students, state.t, state.history, fed, server, Clock(server))
        x = flat(state.models) | lesson.teach(students)
        return replace(state, models=nest(x), pending={}, history=state.history if self.keeps_ensemble else [])

    def lesson(
        self, students: Models, t: int, history: list[list[Member]], fed: Federation, server: Server, clock: Clock
    ) -> Lesson:
        """The distillation of round t, its teachers asked already."""
        members, seeds = [m for checkpoint in history for m in checkpoint], Seeds(fed.run_seed, t)
        return self.global_trainer.lesson(
            list(students), members, self.ensemble_trainer, self.fusion, seeds, server, clock
        )

    def report(self, history: list[list[Member]], server: Server) -> None:
        """Have the ensemble measured as it teaches: before any distillation."""
        members = [m for checkpoint in history for m in checkpoint]
        if self.report_ensemble and members:
            voices, shares = [(m.architecture, m.weights) for m in members], [m.share for m in members]
            server.report_ensemble("ensemble", voices, self.ensemble_trainer.rule, shares)

    # -- results --

    def models(self, state: State) -> dict[str, Model]:
        """The first model of each architecture under its name; the others as name.1, name.2, ... if not designated."""
        shown = 1 if self.global_trainer.designated else self.K
        first = {P: Model(P, own[0]) for P, own in state.models.items()}
        return first | {f"{P}.{k}": Model(P, state.models[P][k]) for P in first for k in range(1, shown)}

    def ensemble_of(self, state: State) -> EnsembleReport | None:
        """The ensemble itself, for inference: its members, and how much each counts."""
        members = [m for checkpoint in state.history for m in checkpoint]
        if not members:
            return None
        voices, shares = [(m.architecture, m.weights) for m in members], [m.share for m in members]
        return EnsembleReport("ensemble", voices, self.ensemble_trainer.rule, shares)
