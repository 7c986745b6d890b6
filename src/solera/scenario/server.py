"""The server: its architectures, public data and validation set, and the notes of a round."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from ..core.accounting import Clock
from ..core.errors import ConfigError
from ..core.randomness import Parallel, repeatable, seed_from
from ..core.task import Data
from ..core.tensors import Weights
from ..core.wire import Packed
from ..place.placement import Placement, numerics, within_memory
from ..train.chain import resized
from ..train.fitting import Score

T = TypeVar("T")
WAY_OUT = (
    "lower the batch of the server's training (method.fusion.batch) or engine.resident, or set engine.device = 'cpu'"
)
M = TypeVar("M", bound=Tensor | nn.Module)
Builder = Callable[[], nn.Module]
# A joint prediction: (models, their weights) -> a function of inputs; its first output is probabilities.
Joint = Callable[[list[nn.Module], list[float]], Callable[[Tensor], tuple[Tensor, ...]]]


@dataclasses.dataclass(frozen=True)
class EnsembleReport:
    """Models whose joint prediction is to be measured after the round."""

    name: str
    members: list[tuple[str, Weights]]
    rule: str
    weights: list[float] | None = None  # the weight of each; unset: equal weights
    names: list[str] | None = None  # of the members, for the report
    teacher: Joint | None = None  # instead of the rule, where a method's own equation was replaced
    build: Callable[[str, Weights], nn.Module] | None = None  # if not `Server.model`
    alike: Mapping[str, list[list[int]]] | None = None  # members to compare with each other; unset: all of them


def initialised(build: Builder, run_seed: int, A: str, copy_number: int = 0) -> nn.Module:
    """A model of architecture `A` as a run's seed initialises it."""
    with numerics(threads=1):
        return repeatable(seed_from(run_seed, "init", A, copy_number), build)


class Server:
    """Everything a method may use on the server's side. The test set is not here: the run measures, methods do not."""

    def __init__(
        self,
        builders: Mapping[str, Builder],
        architectures: Sequence[str],
        seed: int,
        num_classes: int,
        large: str | None = None,
        public: Any = None,
        per_round: int | None = None,
        validation: Data | None = None,
        all_train: Callable[[], Data] | None = None,
        workers: int = 1,
        shape: tuple[int, ...] | None = None,
        tokens: bool = False,
        place: Placement | None = None,
        precision: Mapping[str, Mapping[str, int]] | None = None,
        positions: int | None = None,
    ):
        self.builders, self.architectures, self.large = dict(builders), sorted(architectures), large
        self.run_seed, self.num_classes = seed, num_classes
        self._public, self.per_round, self._validation = public, per_round, validation
        self.shape, self.tokens = shape, tokens  # of one prepared input, if known, and whether it is a row of token ids
        self.positions = positions  # predictions per text, one for each position; None: one per sample
        self.precision = dict(precision or {})  # bits of weights and activations of clients' models, where not 32
        self._all_train = all_train
        self._templates: dict[str, nn.Module] = {}
        self.parallel = Parallel(workers)
        self.lent: Packed | None = None  # the public samples as clients are sent them, if they do not hold them
        self.clock: Clock | None = None  # the simulated clock, if there is one
        self.move(place or Placement())
        self.begin()

    def move(self, place: Placement) -> None:
        """Move models, public samples and the validation set to `place`; weights stay on the CPU.

        On an accelerator one job runs at a time: concurrent jobs would share the generator from which dropout draws.
        """
        self.place = place  # where its models are
        self.public: Any = None if self._public is None else self._public.at(place)
        self.validation: Data | None = None if self._validation is None else self._validation.at(place)
        if place.device.type != "cpu":
            place.open()
            self.parallel = Parallel(1, lambda job: within_memory(place, job, WAY_OUT))

    def begin(self) -> None:
        """Clear the notes of the last round."""
        self.ensembles: list[EnsembleReport] = []
        self.averages: dict[str, Weights] = {}
        self.stages: dict[str, Mapping[str, Score] | None] = {}
        self.events: list[dict[str, Any]] = []

    # -- models --

    def template(self, A: str) -> nn.Module:
        """The model of architecture `A` as it was initialised; never train it, copy it."""
        if A not in self._templates:
            self._templates[A] = self._build(A, 0)
        return self._templates[A]

    def _build(self, A: str, copy_number: int) -> nn.Module:
        if A not in self.builders:
            raise ConfigError(f"no architecture is called {A!r}; known here: {', '.join(self.builders)}")
        return initialised(self.builders[A], self.run_seed, A, copy_number)

    def init(self, A: str, copy_number: int = 0) -> Weights:
        """Initial weights of architecture `A`. They depend on the run's seed only, never on the method."""
        model = self.template(A) if copy_number == 0 else self._build(A, copy_number)
        return {n: t.detach().clone() for n, t in model.state_dict().items()}

    def model(self, A: str, weights: Weights) -> nn.Module:
        """A model of architecture `A` with these weights, in eval mode, not shared.

        Its layers are as wide as the weights are: some methods cut neurons or add them.
        """
        model = resized(self.place.module(self.template(A)), weights)
        model.eval()  # in a line of its own: a model's own train() need not return the model
        return model

    def bring(self, what: M) -> M:
        """A module or a tensor on the device of the server's models."""
        return what.to(self.place.device)  # type: ignore[return-value]

    @property
    def answer(self) -> tuple[int, ...]:
        """The shape of a model's logits for one sample; the classes (of language models: the tokens) are last."""
        return (self.num_classes,) if self.positions is None else (self.positions, self.num_classes)

    def feature_dim(self, A: str) -> int:
        """The number of features that the body of architecture `A` gives; only models that are split have them."""
        dim = getattr(self.template(A), "feature_dim", None)
        if not isinstance(dim, int):
            raise ConfigError(
                f"this method needs a model split into body, adapter and head; {A!r} is not: "
                "wrap it with solera.models.wrap(model, classifier='name of its last layer')"
            )
        return dim

    # -- data --

    @property
    def all_train(self) -> Data:
        """All clients' training data in one place: for the centralised upper bound, in simulations only."""
        if self._all_train is None:
            raise ConfigError("the clients' data is not here: 'centralised' works in a simulation only")
        return self._all_train()

    # -- notes of the round --

    def report_ensemble(
        self,
        name: str,
        members: Sequence[tuple[str, Weights]],
        rule: str = "avg_logits",
        weights: Sequence[float] | None = None,
        names: Sequence[str] | None = None,
        teacher: Joint | None = None,
        build: Callable[[str, Weights], nn.Module] | None = None,
        alike: Mapping[str, list[list[int]]] | None = None,
    ) -> None:
        """Request a measurement of the joint prediction of these (architecture, weights) at the end of the round.

        `teacher(models, weights)`, where given, is used instead of the rule: inputs -> (probabilities, ...).
        `alike` are sets of members, by position, whose diversity is measured: by name, several sets taken together.
        """
        shares = None if weights is None else list(weights)
        told = None if names is None else list(names)
        self.ensembles.append(EnsembleReport(name, list(members), rule, shares, told, teacher, build, alike))

    def report_average(self, A: str, weights: Weights) -> None:
        """Request a measurement of the average of the clients' models before distillation."""
        self.averages[A] = weights

    def report_stages(self, **stages: Mapping[str, Score] | None) -> None:
        """Report scores of the clients' own models at several points of the round, by name, in this order. None is the
        end of the round, at which the run measures them itself."""
        self.stages = dict(stages)

    def worked(self, samples: float) -> None:
        """Advance the simulated clock, if there is one, by a training of the server on `samples` samples."""
        if self.clock is not None:
            self.clock.worked(samples)

    def event(self, kind: str, **facts: Any) -> None:
        """Record an event of this round in the run's metrics."""
        self.events.append({"kind": kind, **facts})
