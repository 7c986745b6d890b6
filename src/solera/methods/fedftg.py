"""FedFTG (Zhang, Shen, Ding, Tao, Duan, CVPR 2022): fine-tuning the global model by data-free knowledge distillation.

After FedAvg, the server generates inputs from noise and labels. The generator is trained for inputs that a client's
model classifies as the label, but on which that model and the global model disagree ("hard samples"). The global model
is then distilled from the clients' models on them. A client's weight for a label is its share of the label's samples,
both in the generator's loss and in the ensemble.

With several architectures, the average of each is distilled from all clients' models on the same generated inputs. The
disagreement is then the mean over the architectures. With no fine-tuning steps this is FedAvg.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ..core.federation import Federation, Replies, per_client
from ..core.randomness import repeatable
from ..core.tensors import Weights, device_of, is_finite, weights_of
from ..method import About, Method, Model, Traits, register
from ..scenario.server import Server
from ..train.data_free import FineTune, fine_tune
from ..train.fitting import Diverged, Local
from ..train.generators import Conditional, draw, input_generator, label_prior, label_weights, restored
from .steps.averaging import average_of, models_of
from .steps.counts import train_and_count, usable_counts
from .steps.fusion import finite_models, side_by_side


@register("fedftg")
@dataclass(frozen=True)
class FedFTG(Method):
    """FedAvg; then the global model is distilled from the clients' models on generated hard samples."""

    local: Local = field(default_factory=Local)
    average: Literal["weighted", "uniform"] = "weighted"
    tune: FineTune = field(default_factory=FineTune)

    about: ClassVar[About] = About(
        title="FedFTG",
        paper="Zhang et al., CVPR 2022",
        wire="model down, model up, label counts up once",
        state="nothing",
    )

    @dataclass(frozen=True)
    class State:
        weights: dict[str, Weights]  # architecture -> weights
        generator: Weights
        counts: dict[str, Tensor]  # client -> its samples of each label, as reported in its first round

    def traits(self) -> Traits:
        return Traits(across="knowledge", products=True)

    def init(self, fed: Federation, server: Server) -> State:
        generator: Weights = {}
        if self.tune.steps:
            generator = weights_of(repeatable(fed.seed("generator"), partial(self.generator, server)))
        return self.State({A: server.init(A) for A in server.architectures}, generator, {})

    def round(self, state: State, fed: Federation, server: Server) -> State:
        w, known = state.weights, state.counts
        S = fed.sample()
        sent = per_client(lambda k: w[fed.architecture(k)])
        unknown = per_client(lambda k: server.num_classes if self.tune.steps > 0 and k not in known else None)
        x = fed.map(train_and_count, S, weights=sent, local=self.local, classes=unknown)
        if self.tune.steps == 0:
            return self.State(w | self.averages(x, list(x), fed), state.generator, known)
        counts = usable_counts(x, known, fed, server)
        teachers = finite_models(x, self.probe(state, fed, server), fed, server, "generated samples")
        w_0 = self.averages(x, list(teachers), fed)
        n = torch.stack([counts[k] * fed.copies.get(k, 1) for k in teachers])
        tune = partial(self.fine_tune, w_0, list(teachers.values()), n, state.generator, fed, server)
        ((tuned, generator, losses),) = side_by_side(fed.seed, server, [tune])  # one job: dropout draws random numbers
        server.worked(self.tune.steps * self.tune.batch * len(w_0))
        if losses is None:
            server.event("distill_diverged", steps=self.tune.steps)
        for A, loss in (losses or {}).items():
            server.event("distilled", architecture=A, steps=self.tune.steps, loss=loss)
        return self.State(w | tuned, generator, known | {k: counts[k] for k in teachers})

    def fine_tune(
        self,
        w_0: dict[str, Weights],
        teachers: list[nn.Module],
        counts: Tensor,
        generator: Weights,
        fed: Federation,
        server: Server,
    ) -> tuple[dict[str, Weights], Weights, dict[str, float | None] | None]:
        """Train generator and global models in turn, against each other; also returns the models' last losses. If the
        training diverged, everything is unchanged and there are no losses."""
        rng = torch.Generator().manual_seed(fed.seed("inputs"))
        G = server.bring(restored(partial(self.generator, server), generator))
        students = {A: server.model(A, w) for A, w in w_0.items()}
        lr = self.tune.student_lr * self.tune.decay**fed.round
        alpha, prior = label_weights(counts).float(), label_prior(counts).float()
        try:
            losses = fine_tune(G, list(students.values()), teachers, alpha, prior, self.tune, lr, rng)
        except Diverged:
            return w_0, generator, None
        tuned, weights = {A: weights_of(m) for A, m in students.items()}, weights_of(G)
        if not all(map(is_finite, [weights, *tuned.values()])):
            return w_0, generator, None
        return tuned, weights, dict(zip(students, losses, strict=True))

    def averages(self, x: Replies, S: list[str], fed: Federation) -> dict[str, Weights]:
        """FedAvg's step for each architecture with an upload."""
        groups = {A: [k for k in S if fed.architecture(k) == A] for A in sorted({fed.architecture(k) for k in S})}
        return {A: average_of(self.average, x, S_A, fed) for A, S_A in groups.items()}

    def probe(self, state: State, fed: Federation, server: Server) -> Tensor:
        """Some generated inputs, to check that the logits of an uploaded model are finite."""
        C, rng = server.num_classes, torch.Generator().manual_seed(fed.seed("probe"))
        G = server.bring(restored(partial(self.generator, server), state.generator))
        with torch.no_grad():
            return G(*draw(torch.full((C,), 1 / C), self.tune.batch, G.noise, rng, device_of(G)))

    def generator(self, server: Server) -> Conditional:
        """A new generator of inputs."""
        assert server.shape is not None  # checked by `fits`
        return input_generator(server.shape, self.tune.noise, server.num_classes, self.tune.features)

    def fits(self, server: Server) -> Iterator[str]:
        if self.tune.steps == 0:
            return
        if server.tokens:
            yield "fedftg generates images or vectors, but the inputs here are tokens: use fedgen"
        elif server.shape is None or len(server.shape) not in (1, 3):
            yield f"fedftg generates images [C, H, W] or vectors [F], but an input here is {server.shape}"

    def models(self, state: State) -> dict[str, Model]:
        return models_of(state.weights)
