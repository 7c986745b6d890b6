"""DS-FL (Itahara, Nishio, Koda, Morikura, Yamamoto, IEEE TMC 2021): distillation-based semi-supervised learning.

Each round clients train on their own labelled samples and predict some unlabelled public ("open") samples. The server
sharpens the mean of the predictions (entropy reduction aggregation, ERA). All clients then train on these labels, and
so does a separate server model, which is never sent. Clients keep their models, which may be of any architecture.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Gt, Lt
from torch import Tensor

from ..core.federation import Federation
from ..core.settings import Hint
from ..core.tensors import Weights, weights_of
from ..method import About, Exchange, Model, Traits, register
from ..place.placement import finest
from ..scenario.server import Server
from ..train.fitting import Diverged, Fitted, Local, fit
from .steps.fusion import logits_problems, outcome_of, side_by_side
from .steps.personal import OnClients
from .steps.predictions import (
    StudentNorm,
    answered,
    distil_locally,
    draw,
    public_problems,
    question,
    towards_targets,
    train_and_answer,
    train_and_score,
)
from .steps.training import Own, models_of

Sharpening = Annotated[float, Gt(0), Lt(1), Hint("or set aggregation = 'sa'")]


@register("dsfl")
@dataclass(frozen=True)
class DSFL(OnClients):
    """Semi-supervised collaboration: clients and a server model learn from sharpened mean predictions."""

    local: Local = field(default_factory=lambda: Local(epochs=5, batch=100, lr=0.1))  # on private samples
    distill: Local = field(default_factory=lambda: Local(epochs=5, batch=100, lr=0.1))  # on open samples, server too
    aggregation: Literal["era", "sa"] = "era"  # of predictions: sharpened mean, or simple mean
    temperature: Sharpening = 0.1  # T of ERA: the lower, the sharper
    era_input: Literal["probabilities", "logits"] = "probabilities"  # what clients send, and what is averaged
    student_norm: StudentNorm = "train"  # BatchNorm statistics during distillation
    judge_clients: bool = True  # score the clients' own models too, which needs data.client_test

    about: ClassVar[About] = About(
        "DS-FL", "Itahara et al., IEEE TMC 2021", "indices down, predictions up, targets down", "its model"
    )

    @dataclass(frozen=True)
    class State:
        server: Own  # the server model; clients keep their own models

    def traits(self) -> Traits:
        return Traits(
            across="knowledge",
            public="everywhere",
            server_model="own",
            may_name_server=True,
            replies="means",
            personal=self.judge_clients,
        )

    def init(self, fed: Federation, server: Server) -> State:
        A = server.large or server.architectures[0]
        return self.State(Own(A, server.init(A)))

    def round(self, state: State, fed: Federation, server: Server) -> State:
        x, S = draw(None, fed, server), fed.sample()
        task = train_and_answer if self.era_input == "probabilities" else train_and_score
        mean = fed.mean(task, S, uniform=True, local=self.local, **question(x, server))  # update, predict, upload
        y = self.aggregate(mean)
        how: dict[str, Any] = {"distil": self.distill, "temperature": 1.0, "student_norm": self.student_norm}
        clients = fed.submit_mean(distil_locally, answered(S, fed), uniform=True, targets=y, **how)  # broadcast
        taught = self.taught(state.server, x, y, fed, server)  # while the clients train
        clients()
        return self.State(taught)

    def aggregate(self, mean: Any) -> Tensor:
        """The labels of this round, from the mean of what the clients sent."""
        if self.aggregation == "era":
            return reduce_entropy(mean.probs if self.era_input == "probabilities" else mean.logits, self.temperature)
        return mean.probs if self.era_input == "probabilities" else mean.logits.softmax(-1)

    def taught(self, own: Own, x: Tensor, y: Tensor, fed: Federation, server: Server) -> Own:
        """The server model after training on the open samples x with labels y; unchanged if the training diverged."""
        objective = towards_targets(student_norm=self.student_norm)

        def train() -> tuple[Fitted | Diverged, Weights]:  # everything inside the job: it may run twice
            model = server.model(own.architecture, own.weights)
            job = partial(fit, model, server.public[x], y, self.distill, fed.seed("distil"), objective)
            return outcome_of(job), weights_of(model)

        ((done, weights),) = side_by_side(fed.seed, server, [train])
        server.worked(self.distill.visits(len(x)))
        if isinstance(done, Diverged):
            server.event("distill_diverged", architecture=own.architecture, steps=done.steps)
            return own
        return Own(own.architecture, weights)

    def fits(self, server: Server) -> Iterator[str]:
        yield from public_problems("dsfl", None, server)
        yield from logits_problems("dsfl", server)

    def personal(self, state: State, fed: Federation) -> Exchange | None:
        return super().personal(state, fed) if self.judge_clients else None

    def models(self, state: State) -> dict[str, Model]:
        return models_of({state.server.architecture: state.server.weights})


def reduce_entropy(mean: Tensor, temperature: float) -> Tensor:
    """softmax(mean / T) of every row: DS-FL's entropy reduction aggregation, of a mean of the clients' predictions.

    The most likely class stays the same. For probabilities and T = 0.1, a flat mean gets sharper, and a certain one
    gets slightly softer: its ratio becomes e^(1/T) : 1.
    """
    return (finest(mean) / temperature).softmax(-1).to(mean.dtype)
