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

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..federation import Federation, QuorumNotMet, Replies
from ..method import Info, Model, register
from ..parts.distill import Distill
from ..parts.local import Local, is_finite, logits_of
from ..parts.norms import parameter_names
from ..server import Server
from ..wire import ConfigError, Weights
from .ensembles import EnsembleTrainer, Member, Upload
from .global_trainers import GlobalTrainer, Lesson, public_indices
from .grouping import MIN_SECURE, Schedule, check_groups, drop_small, members_of, split
from .local_update import Update
from .shared import finite_models
from .trainers import Group, LocalTrainer, Models, Seeds, mean_reply

NORM_SAMPLES = 1024  # public samples that give drawn models their BatchNorm statistics


@register("framework")
@dataclass(frozen=True)
class Framework:
    """Local trainer, ensemble trainer and global trainer, freely combined."""

    local: Local = field(default_factory=Local)
    fusion: Distill = field(default_factory=Distill)
    local_trainer: LocalTrainer = field(default_factory=LocalTrainer)
    ensemble_trainer: EnsembleTrainer = field(default_factory=EnsembleTrainer)
    global_trainer: GlobalTrainer = field(default_factory=GlobalTrainer)
    K: int = 2  # global models (of each architecture), each trained by a group of its own
    group_sizes: tuple[int, ...] | None = None  # how clients are shared out; default: evenly
    schedule: Schedule = "random"  # groups drawn anew each round, or Fed-ensemble's strata
    pipeline: Literal["off", "strict", "eager"] = "off"  # designated only: clients train while the server distils
    secure: bool = False  # refuse whatever secure aggregation forbids: individual models, groups of one client
    save_ensemble: bool = False  # keep client models in the state, for inference; aggregated ones always are
    report_ensemble: bool = True  # measure the teachers' joint prediction each round (costs a pass of each)

    info: ClassVar[Info] = Info(
        title="Generalised framework",
        paper="FedEED's Algorithm 1, anonymous ICLR submission",
        models="any mix; K groups in each architecture",
        wire="model down, model up (scaffold: and control variates)",
        public="unlabelled, on the server",
        state="nothing",
        privacy="means only",
    )

    @dataclass(frozen=True)
    class State:
        t: int  # the round of the newest aggregates; -1 at first
        models: dict[str, list[Weights]]  # w^g*_k of each architecture: what group k trains next
        pending: dict[str, Weights]  # w^g_0 of each architecture whose distillation is still to come (pipeline)
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
            raise ConfigError(
                f"pipeline = {self.pipeline!r}: needs method.global_trainer.kind = 'designated', where most groups "
                "need not wait for a distillation"
            )
        if self.secure and self.needs_client_models:
            raise ConfigError(f"secure = true: {', '.join(self._curious)} needs individual client models")
        self.local_trainer.check(self.local)

    @property
    def _curious(self) -> list[str]:
        """The slots that need individual client models."""
        slots = ("local_trainer", "ensemble_trainer", "global_trainer")
        return [f"method.{s}" for s in slots if getattr(self, s).needs_client_models]

    @property
    def needs_client_models(self) -> bool:
        return bool(self._curious)

    def describe(self) -> Info:
        """`info` with what follows from the slots."""
        if self.needs_client_models:
            privacy = f"individual replies (for {', '.join(self._curious)})"
        else:
            privacy = "means only (no slot needs individual models)"
        public = self.info.public if self.global_trainer.distils else "none"
        return replace(self.info, public=public, state=self.local_trainer.client_state, privacy=privacy)

    def init(self, fed: Federation, server: Server) -> State:
        self.check(server)
        check_groups(self.shares, self.secure, fed, server)
        w = {(P, k): server.init(P, k) for P in server.prototypes for k in range(self.K)}  # w^g*_{-1,k}
        memory = {g: self.local_trainer.memory(w[g], parameter_names(server.template(g[0]))) for g in w}
        return self.State(-1, nest(w), {}, nest(memory), [])

    def round(self, state: State, fed: Federation, server: Server) -> State:
        clock, seeds = Clock(server), Seeds(fed.run_seed, fed.round)
        w, memory = flat(state.models), flat(state.memory)  # w^g*_{t-1,k}
        S = split(self.shares, self.schedule, fed, server)  # S_{t,0}, ..., S_{t,K-1}
        S = drop_small(S, server) if self.secure else S
        running = [self.start({k: g for k, g in S.items() if not self.waits(g)}, w, memory, fed, clock)]
        late = [P for P in server.prototypes if self.waits((P, 0))]
        lesson = self.lesson(state, fed, server, clock)
        for batch in [[P] for P in late] if self.pipeline == "eager" else [late]:
            w |= self.distil(lesson, {(P, 0): state.pending[P] for P in batch if P in state.pending}, clock)
            for P in batch:
                running.append(self.start({k: g for k, g in S.items() if g == (P, 0)}, w, memory, fed, clock))
        means, uploads = self.collect(running, S, w, seeds, fed, server)  # w^l*
        if not means:
            server.event("round_empty", reason="no upload is usable")
            return state
        new, rejected = dict(w), set()
        for g, (mean, count) in means.items():
            owner, N = self.local_trainer.owner(g), len(members_of(fed, g[0]))
            found, kept = self.local_trainer.update(w[g], memory[owner], mean, count / N)  # w^g_{t,k}
            if is_finite(found):
                new[g], memory[owner] = found, kept
            else:
                rejected.add(g)
                server.event("aggregate_rejected", prototype=g[0], group=g[1], reason="not finite")
        usable = {g: new[g] for g in new if g not in rejected}
        inputs = self.norm_inputs(seeds, server)
        members = self.ensemble_trainer.members(usable, uploads, w, seeds, server, inputs)
        history = [*state.history, members][-self.ensemble_trainer.R :]  # w^e*_t
        if self.report_ensemble:
            self.report(history, server)
        students = self.global_trainer.students(fed.round, list(new), set(means))
        state = self.State(fed.round, nest(new), {P: new[P, k] for P, k in students}, nest(memory), history)
        if self.pipeline == "off":
            return self.close(state, students, fed, server, clock)  # w^g*_{t,k}
        return replace(state, models=nest(new | {g: w[g] for g in students}))
