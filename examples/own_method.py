"""A method of your own in one file: FedAvg whose server keeps an exponential average of its models.

There are few rules. Hyper-parameters are fields, `State` is everything that a checkpoint holds, `round` returns a new
state, and client work is a `@task` whose annotations are the types of the messages. In return you get every engine,
exact resume, byte counts, and invalid replies dropped with the client's name. `solera.testing.check_method` checks the
rules.

Run it with `python examples/own_method.py`. A package would declare the method as an entry point instead:

    [project.entry-points."solera.methods"]
    slowavg = "your_package.slowavg:SlowAvg"
"""

import tempfile
from dataclasses import dataclass, field
from typing import ClassVar

from solera.method import (
    About,
    Client,
    Federation,
    Local,
    Method,
    Model,
    Server,
    Traits,
    Weights,
    fit,
    like,
    per_client,
    register,
    task,
    weights_of,
)  # fmt: skip
from solera.testing import check_method


@dataclass(frozen=True)
class Trained:
    weights: Weights = like("weights")  # must have the names, shapes and dtypes of the argument `weights`


@task("own_method.train")
def train(client: Client, weights: Weights, local: Local) -> Trained:
    model = client.model(weights)
    fit(model, client.train.inputs, client.train.labels, local, client.seed)
    return Trained(weights_of(model))


@register("slowavg")
@dataclass(frozen=True)
class SlowAvg(Method):
    """Averaging with a server that takes only a part of the step."""

    local: Local = field(default_factory=Local)
    keep: float = 0.5  # weight of the old model

    about: ClassVar[About] = About(title="SlowAvg", paper="an example", wire="model down, model up", state="nothing")

    @dataclass(frozen=True)
    class State:
        weights: dict[str, Weights]

    def traits(self) -> Traits:
        return Traits(replies="means")  # defaults for the rest: any models, no public data

    def init(self, fed: Federation, server: Server) -> State:
        return self.State({A: server.init(A) for A in server.architectures})

    def round(self, state: State, fed: Federation, server: Server) -> State:
        sent = per_client(lambda k: state.weights[fed.architecture(k)])
        mean = fed.mean(train, fed.sample(), by=fed.architecture, weights=sent, local=self.local)
        new = dict(state.weights)
        for A, reply in mean.items():
            new[A] = {
                n: self.keep * old + (1 - self.keep) * reply.weights[n] if old.is_floating_point() else reply.weights[n]
                for n, old in state.weights[A].items()
            }
        return self.State(new)

    def models(self, state: State) -> dict[str, Model]:
        return {A: Model(A, w) for A, w in state.weights.items()}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        check_method(SlowAvg(), folder)
    print("slowavg passes every check: the same bits on every engine and after every resume")


if __name__ == "__main__":
    main()
