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

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from ..federation import Federation
from ..method import Info, Model, register
from ..parts.distill import Distill
from ..parts.local import Local
from ..parts.norms import parameter_names
from ..server import Server
from ..wire import ConfigError, Weights
from .cohort import Clock, Cohort
from .ensembles import EnsembleTrainer, Member
from .global_trainers import GlobalTrainer, Lesson, public_indices
from .grouping import Schedule, check_groups, drop_small, split
from .trainers import LocalTrainer, Models, Seeds, flat, nest


@register("framework")
@dataclass(frozen=True)
class Framework:
    """Local trainer, ensemble trainer and global trainer, freely combined."""

    local: Local = field(default_factory=Local)
    fusion: Distill = field(default_factory=Distill)
    local_trainer: LocalTrainer = field(default_factory=LocalTrainer)
    ensemble_trainer: EnsembleTrainer = field(default_factory=EnsembleTrainer)
    global_trainer: GlobalTrainer = field(default_factory=GlobalTrainer)
    K: int = 2  # global models (of each architecture), each trained by a group of clients
    group_sizes: tuple[int, ...] | None = None  # how the clients are shared out; left out: evenly
    schedule: Schedule = "random"  # groups drawn anew each round, or Fed-ensemble's strata
    pipeline: Literal["off", "strict", "eager"] = "off"  # designated only: clients train while the server distils
    secure: bool = False  # refuse what secure aggregation forbids: individual models, groups of one client
    save_ensemble: bool = False  # keep the round's client models, for inference; aggregated ones always are
    report_ensemble: bool = True  # measure the teachers' joint prediction each round (costs a pass of each)

    info: ClassVar[Info] = Info(
        title="Generalised framework",
        paper="FedEED's Algorithm 1, ICLR submission",
        models="any mix; K groups in each architecture",
        wire="model down, model up (with scaffold also control variates)",
        public="unlabelled, on the server",
        state="nothing",
        privacy="means only",
    )

    @dataclass(frozen=True)
    class State:
        t: int  # the round of the newest aggregates; -1 at first
        models: dict[str, list[Weights]]  # w^g*_k of each architecture: what group k trains next
        pending: dict[str, Weights]  # w^g_0 of each architecture, while its distillation is still to come
        memory: dict[str, list[Weights]]  # what the local trainer keeps beside each model
        history: list[list[Member]]  # the ensemble: its members of the last R rounds

    def __post_init__(self) -> None:
        if self.K < 1:
            raise ConfigError(f"K = {self.K}: at least 1 global model is needed")
        if self.group_sizes is not None and (len(self.group_sizes) != self.K or min(self.group_sizes) < 1):
            raise ConfigError(f"group_sizes = {list(self.group_sizes)}: K = {self.K} sizes of at least 1 are needed")
        if self.group_sizes is not None and self.schedule == "strata":
            raise ConfigError("group_sizes: strata are of equal size; leave it out, or set schedule = 'random'")
        if self.pipeline != "off" and not self.global_trainer.designated:
            raise ConfigError(f"pipeline = {self.pipeline!r}: only designated distillation leaves groups free to train")
        if self.secure and self.curious:
            raise ConfigError(f"secure = true: {', '.join(self.curious)} needs individual client models")

    # -- Algorithm 1 --

    def init(self, fed: Federation, server: Server) -> State:
        self.check(server)
        check_groups(self.shares, self.secure, self.global_trainer.designated, fed, server)
        w = {(P, k): server.init(P, k) for P in server.prototypes for k in range(self.K)}  # w^g*_{-1,k}
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
        if not means:
            server.event("round_empty", reason="no upload is usable")
            return state
        w_g, memory = cohort.aggregate(means, w, flat(state.memory))  # w^g_{t,k}
        members = self.ensemble_trainer.members(w_g, uploads, w, d, seeds, server)
        history = [*state.history, members][-self.ensemble_trainer.R :]  # w^e*_t
        self.report(history, server)
        x = w | w_g
        students = {g: x[g] for g in self.global_trainer.students(t, list(x), set(means))}
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
        first = [(P, 0) for P in server.prototypes if self.global_trainer.designated]
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
            voices, shares = [(m.prototype, m.weights) for m in members], [m.share for m in members]
            server.report_ensemble("ensemble", voices, self.ensemble_trainer.rule, shares)

    # -- what follows from the settings --

    @property
    def curious(self) -> list[str]:
        """The slots that need individual client models."""
        slots = ("local_trainer", "ensemble_trainer", "global_trainer")
        return [f"method.{s}" for s in slots if getattr(self, s).needs_client_models]

    @property
    def shares(self) -> tuple[int, ...]:
        return self.group_sizes or (1,) * self.K

    @property
    def keeps_ensemble(self) -> bool:
        """Whether the ensemble stays in the state between rounds."""
        return self.save_ensemble or not self.curious

    def describe(self) -> Info:
        """`info` for these settings."""
        privacy = (
            f"individual replies (for {', '.join(self.curious)})"
            if self.curious
            else "means only (no slot needs single models)"
        )
        public = self.info.public if self.global_trainer.distils and self.fusion.steps else "none"
        return replace(self.info, public=public, state=self.local_trainer.client_state, privacy=privacy)

    def check(self, server: Server) -> None:
        """Refuse at the start what would fail in the middle."""
        self.local_trainer.check(self.local)
        self.global_trainer.check(self.fusion, server)

    # -- results --

    def models(self, state: State) -> dict[str, Model]:
        """The first model of each architecture under its name; the others as name.1, name.2, ... if not designated."""
        shown = 1 if self.global_trainer.designated else self.K
        first = {P: Model(P, own[0]) for P, own in state.models.items()}
        return first | {f"{P}.{k}": Model(P, state.models[P][k]) for P in first for k in range(1, shown)}

    def ensemble_models(self, state: State) -> list[tuple[Model, float]]:
        """The ensemble itself, for inference: its members, and how much each counts."""
        return [(Model(m.prototype, m.weights), m.share) for checkpoint in state.history for m in checkpoint]
