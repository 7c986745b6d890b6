"""FedDF (Lin, Kong, Stich, Jaggi, NeurIPS 2020), Algorithm 3: clients of any architecture, fused by distillation.

Every architecture is averaged over its clients and distilled, on public samples, from the mean logits of all clients.
BatchNorm statistics are averaged like parameters, and the student updates its own. Options are slots."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

from ..core.federation import Federation, Replies
from ..core.settings import NonNegative
from ..core.tensors import Weights
from ..method import About, Method, Model, Traits, register
from ..scenario.server import Server
from ..train.distill import Distill
from ..train.fitting import Local
from ..train.teachers import Ensemble, Frozen, Rule, Teacher
from .steps.fusion import copies_of, fuse, public_indices
from .steps.reporting import report_averages, report_fusion
from .steps.screen import Screen
from .steps.teaching import Lesson, Teaching, current, teaching_problems
from .steps.training import Upload, by_architecture, models_of


@register("feddf")
@dataclass(frozen=True)
class FedDF(Method):
    """Server-side fusion of client models by distilling their averaged logits."""

    local: Local = field(default_factory=Local)
    fusion: Distill = field(default_factory=Distill)
    mu: NonNegative = 0.0  # proximal term in the clients' objective, as in FedProx
    ensemble: Rule = "avg_logits"
    report_ensemble: bool = True  # evaluate the ensemble of the teachers each round (one pass per teacher)
    upload: Upload = field(default_factory=Upload)  # what clients send
    screen: Screen = field(default_factory=Screen)  # which uploads count, and how they are averaged
    teaching: Teaching = field(default_factory=Teaching)  # who teaches, and how much each counts

    about: ClassVar[About] = About("FedDF", "Lin et al., NeurIPS 2020", "model down, model up", "nothing")

    @dataclass(frozen=True)
    class State:
        weights: dict[str, Weights]  # M: architecture -> weights

    def traits(self) -> Traits:
        precision, products = self.upload.precision, self.teaching.products
        t = Traits(across="knowledge", precision=precision, next_token=True, products=products)
        return replace(t, public="server") if self.fusion.steps else t

    fits = teaching_problems

    def init(self, fed: Federation, server: Server) -> State:
        return self.State({A: server.init(A) for A in server.architectures})  # line 2

    def round(self, state: State, fed: Federation, server: Server) -> State:
        M = current(state.weights)
        S, sent = fed.sample(), by_architecture(M, fed)  # line 6
        x = self.upload.ask(sent, S, self.local, self.mu, fed, server)  # lines 7-8
        d = public_indices(self.fusion, fed.seed, server)  # the source of the minibatches of line 13
        at = Lesson(fed, server, self.fusion, d, self.upload.build(server), self.ensemble, self.report_ensemble)
        x, members, teachers = self.screen.screened(x, sent, at.first_batch, fed, server, at.build)
        report_fusion(self, FedDF, teachers, x, at)
        x_0 = self.start(x, members, M, at)
        teachers = self.teaching.join(teachers, state.weights, at)
        votes = self.teaching.votes(teachers, copies_of(teachers, fed), at)
        avg_logits, d = self.teaching.narrow(self.teacher(list(teachers.values()), votes), d, at)
        fused = fuse(x_0, avg_logits, d, self.fusion, fed.seed, server)  # lines 12-15
        return self.State(M | fused | self.teaching.keep(state.weights))

    def start(self, x: Replies, members: dict[str, Frozen], M: dict[str, Weights], at: Lesson) -> dict[str, Weights]:
        return report_averages(self.screen.averages(x, members, at.fed, at.server), at)  # lines 9-11

    def teacher(self, models: list[Frozen], votes: list[float]) -> Teacher:
        """From a batch of inputs to targets [samples, classes] at the fusion's temperature, and their entropy."""
        return Ensemble(models, self.ensemble, votes, self.fusion.temperature)

    def models(self, state: State) -> dict[str, Model]:
        return models_of(current(state.weights))
