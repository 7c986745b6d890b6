"""Tiny models and a tiny federation for tests: small enough to check by hand."""

import copy
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from solera.core.federation import Federation, FederationConfig, Replies, _Exchange
from solera.core.task import Client, Data
from solera.engines import ClientInfo, ClientStates, InProcess, Roster
from solera.runs.loop import check_server
from solera.scenario.server import Server


class Quadratic(nn.Module):
    """f(x) = a/2 (x - b)^2 disguised as a classifier, in float64.

    A sample carries (a, b) and has label 0; the logits are chosen so that its cross-entropy is f(x) + 1.
    """

    def __init__(self, x: float = 0.0):
        super().__init__()
        self.x = nn.Parameter(torch.tensor([x], dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        a, b = inputs[:, 0], inputs[:, 1]
        f = a / 2 * (self.x - b).square() + 1
        return torch.stack([torch.zeros_like(f), torch.log(torch.expm1(f))], 1)


def quadratic_data(a: float, b: float, n: int = 1) -> tuple[Tensor, Tensor]:
    return torch.tensor([[a, b]] * n, dtype=torch.float64), torch.zeros(n, dtype=torch.int64)


class Constant(nn.Module):
    """The same logits for every input."""

    def __init__(self, *logits: float):
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.logits.expand(len(inputs), -1)


class Conv(nn.Sequential):
    """A small convolutional net on 1x8x8 images, with BatchNorm unless told otherwise."""

    def __init__(self, seed: int, norm: bool = True, width: int = 6, classes: int = 4, dropout: float = 0.0):
        torch.manual_seed(seed)
        super().__init__(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width) if norm else nn.Identity(),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(4 * width, classes),
        )


def mlp(seed: int, width: int = 16, classes: int = 4) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, classes))


def images(n: int, seed: int = 0, classes: int = 4) -> tuple[Tensor, Tensor]:
    """Noise with a bright quadrant that tells the class."""
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(n, 1, 8, 8, generator=g), torch.randint(classes, (n,), generator=g)
    for i, c in enumerate(y.tolist()):
        r, s = divmod(c % 4, 2)
        x[i, 0, 4 * r : 4 * r + 4, 4 * s : 4 * s + 4] += 1.5
    return x, y


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def kept_by(fed: Federation, k: str) -> dict[str, dict[str, Tensor]]:
    """All that client k keeps now."""
    return fed.engine.states.load(k, fed.ledger.get(k))  # type: ignore[attr-defined]


def give(fed: Federation, k: str, state: dict[str, dict[str, Tensor]]) -> None:
    """Have client k keep this."""
    fed.ledger[k] = fed.engine.states.save(k, 0, state)  # type: ignore[attr-defined]


def replies_of(values: dict[str, Any]) -> Replies:
    """Replies to an exchange that nobody made; none of them has to be valid."""
    replies = Replies(values)
    replies.failures = {}
    replies.exchange = _Exchange("nothing", len(values), 0, dict.fromkeys(values), {})
    return replies


class Samples:
    """Public samples as methods see them, without any data set behind them."""

    fresh = False

    def __init__(self, inputs: Tensor):
        self.inputs = inputs

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, indices: Tensor) -> Tensor:
        return self.inputs[indices]

    def at(self, place: Any) -> "Samples":
        return self

    def round_indices(self, per_round: int | None, seed: int) -> Tensor:
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        return order[:per_round].sort().values


class World:
    """A federation and its server: (architecture, data) of each client, a builder of each architecture."""

    def __init__(
        self,
        tmp: pathlib.Path,
        builders: dict[str, Callable[[], nn.Module]],
        clients: Sequence[tuple[str, Data]],
        *,
        public: Tensor | None = None,
        validation: Data | None = None,
        classes: int = 4,
        fraction: float = 1.0,
        seed: int = 0,
        workers: int = 1,
        **server: Any,
    ):
        self.seeds: list[int] = []  # as given to clients, call by call
        self.data = {f"c{i}": data for i, (_, data) in enumerate(clients)}
        infos = {f"c{i}": ClientInfo(P, len(data)) for i, (P, data) in enumerate(clients)}
        self.roster, self.classes = Roster.of(infos), classes
        samples = None if public is None else Samples(public)
        everything = Data(*(torch.cat([getattr(d, f) for _, d in clients]) for f in ("inputs", "labels")))
        options = {"all_train": lambda: everything, "workers": workers, "public": samples, "validation": validation}
        self.server = Server(builders, list(builders), seed, classes, **{**options, **server})
        config = FederationConfig(fraction=fraction)
        self.fed = Federation(InProcess(self, ClientStates(tmp)), seed, config)

    def client(self, k: str, seed: int, state: dict[str, Any], place: Any = None) -> Client:
        self.seeds.append(seed)
        P, data = self.roster[k].architecture, self.data[k]
        template = copy.deepcopy(self.server.template(P))
        return Client(k, P, data, data, None, self.classes, seed, state, template)

    def run(self, method: Any, rounds: int = 1, state: Any = None) -> list[Any]:
        """The states after 0, 1, ... rounds; clients begin with nothing of their own."""
        self.fed.ledger = {}
        if state is None:
            check_server(method, self.server)  # as a run does
            state = method.init(self.fed, self.server)
        states = [state]
        for t in range(rounds):
            self.fed.begin(t)
            self.server.begin()
            states.append(method.round(states[-1], self.fed, self.server))
        return states

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in self.server.events if e["kind"] == kind]


def spoil(w: World, *clients: str) -> None:
    """The uploads of these clients answer with infinite numbers."""
    task = w.fed.map

    def spoiled(*args, **payload):
        replies = task(*args, **payload)
        for k in clients:
            replies[k].weights["head.2.bias"].fill_(float("inf"))
        return replies

    w.fed.map = spoiled


def equal_rows(*models: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], bool]:
    """How equal the answers to a sample are when it is asked beside others: to the bit, unless this machine's products
    have other bits for other numbers of rows (found here with torch alone), as some of MKL's kernels do. Then close."""
    g = torch.Generator().manual_seed(0)
    for layer in (m for model in models for m in model.modules() if isinstance(m, nn.Linear)):
        x = torch.randn(300, layer.in_features, generator=g)
        weight = torch.randn(layer.out_features, layer.in_features, generator=g)
        whole = nn.functional.linear(x, weight)
        for n in (32, 33, 44, 60, 64, 100, 101, 128):
            if not torch.equal(nn.functional.linear(x[:n], weight), whole[:n]):
                return lambda a, b: torch.allclose(a, b, atol=1e-6)
    return torch.equal
