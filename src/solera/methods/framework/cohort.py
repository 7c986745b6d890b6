"""The clients of one round of the framework: groups start when their models are ready, and are collected together."""

import time
from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor

from ...core.federation import Federation, QuorumNotMet, Replies
from ...core.tensors import Weights, is_finite
from ...scenario.server import Server
from ...train.fitting import Local
from ...train.teachers import frozen
from ..steps.fusion import finite_models
from ..steps.screen import Screen
from ..steps.training import Update
from .ensemble_trainers import Upload
from .grouping import MIN_GROUP, Group, Models, members_of
from .local_trainers import LocalTrainer

Means = dict[Group, tuple[Any, int]]  # each group's mean reply, and of how many clients


class Clock:
    """Records start and end of each piece of work, in seconds since the round began; written to the run's events."""

    def __init__(self, server: Server):
        self.server, self.zero = server, time.monotonic()

    def timed(self, what: str, work: Callable[..., Any], *args: Any) -> Any:
        """Run a piece of the server's work and record its time."""
        return self.span(what, lambda: work(*args))()

    def span(self, what: str, wait: Callable[[], Any], **facts: Any) -> Callable[[], Any]:
        """A piece of work that has started; its time is recorded when the result arrives."""
        start = time.monotonic() - self.zero

        def result() -> Any:
            try:
                return wait()
            finally:
                end = time.monotonic() - self.zero
                self.server.event("timeline", what=what, start=round(start, 4), end=round(end, 4), **facts)

        return result


class Cohort:
    """The clients S of a round, each with its group. With `individual` the server sees individual models."""

    def __init__(
        self,
        S: dict[str, Group],
        trainer: LocalTrainer,
        screen: Screen,
        individual: bool,
        fed: Federation,
        server: Server,
        clock: Clock,
    ):
        self.S, self.trainer, self.screen, self.individual = S, trainer, screen, individual
        self.fed, self.server, self.clock = fed, server, clock
        self.running: list[Callable[[], Any]] = []

    def start(self, groups: Collection[Group], w: Models, memory: Models, local: Local) -> None:
        """Send the clients of `groups` their models, in one exchange for each kind of local trainer."""
        left = {k: g for k, g in self.S.items() if g in groups}
        while left:
            trainer = self.trainer.of(min(left.values()))
            who = {k: g for k, g in left.items() if self.trainer.of(g) == trainer}
            self._start(trainer, who, w, memory, local)
            left = {k: g for k, g in left.items() if k not in who}

    def _start(self, trainer: LocalTrainer, who: dict[str, Group], w: Models, memory: Models, local: Local) -> None:
        task, payload = trainer.request(who, w, memory, local)
        if self.individual:
            wait = self.fed.submit(task, list(who), **payload)
        else:
            how: dict[str, Any] = {"by": who.__getitem__, "uniform": trainer.uniform(self.screen)}
            wait = self.fed.submit_mean(task, list(who), once=trainer.once, **how, **payload)
        names = [f"{A}.{k}" for A, k in sorted(set(who.values()))]
        self.running.append(self.clock.span("train", wait, groups=names))

    def collect(self, w: Models, probe: Tensor, no_single_groups: bool) -> tuple[Means, list[Upload]]:
        """The mean reply of each group and, with `individual`, the client models; `w` are the models that were sent.

        `probe` are indices of public samples: a model's logits on them must be finite.
        """
        got: dict[Any, Any] = {}
        void = QuorumNotMet(
            f"round {self.fed.round}: no group has {MIN_GROUP} clients, which method.no_single_groups requires"
        )
        inputs = self.server.public[probe] if len(probe) and self.individual else probe
        for wait in self.running:
            try:
                replies = wait()
                got |= self._finite(replies, w, inputs) if self.individual else replies
            except QuorumNotMet as e:  # its groups then have no client; the others continue
                void = e
        if not got:
            raise void
        if self.individual:
            return self._average(got, w)
        answered = [g for k, g in self.S.items() if k in self.fed.answered]
        for A, k in [g for g in got if no_single_groups and answered.count(g) < MIN_GROUP]:
            self.server.event("group_too_small", architecture=A, group=k, reason="all clients but one have failed")
            del got[A, k]
        if not got:
            raise void
        return {g: (mean, answered.count(g)) for g, mean in got.items()}, []

    def _finite(self, replies: Replies, w: Models, inputs: Tensor) -> dict[str, Any]:
        """The replies of clients whose models have finite logits, and which the screen does not reject."""
        x = replies.read_as({k: Update(self._client_model(k, w, r)) for k, r in replies.items()})
        models = finite_models(x, inputs, self.fed, self.server)
        return {k: replies[k] for k in self.screen.members(models, x, self.fed, self.server)}

    def _client_model(self, k: str, w: Models, reply: Any) -> Weights:
        return self.trainer.of(self.S[k]).client_model(w[self.S[k]], reply)

    def _average(self, replies: dict[str, Any], w: Models) -> tuple[Means, list[Upload]]:
        """The mean reply of each group, bitwise equal to `Federation.mean` or by the screen's rule; and the uploads of
        clients that may teach."""
        fed, server, S = self.fed, self.server, self.S
        fine = sorted(replies, key=fed.clients.index)
        x = Replies({k: Update(self._client_model(k, w, replies[k])) for k in fine})
        x = self.screen.uploads(x, lambda k: w[S[k]], fed, server)
        means: Means = {}
        for g in sorted({S[k] for k in fine}):
            own = {k: replies[k] for k in fine if S[k] == g}
            means[g] = self.trainer.of(g).mean(own, x, self.screen, fed, server), len(own)
        models = frozen([(S[k][0], x[k].weights) for k in fine], server.model)
        teachers = self.screen.teachers(dict(zip(fine, models, strict=True)), fed, server)
        copies = {k: fed.copies.get(k, 1) for k in fine}
        return means, [Upload(S[k], x[k].weights, float(copies[k] * fed.num_examples(k)), copies[k]) for k in teachers]

    def aggregate(self, g: Group, mean: Any, count: int, sent: Weights, memory: Models) -> Weights | None:
        """w^g_{t,k} of a group: the new model from the mean reply of `count` clients.

        Also updates the trainer's memory of the group. None if the aggregate is not finite.
        """
        trainer, N = self.trainer.of(g), len(members_of(self.fed, g[0]))
        owner = trainer.owner(g)
        found, kept = trainer.update(sent, memory[owner], mean, count / N)
        if not is_finite(found):
            self.server.event("aggregate_rejected", architecture=g[0], group=g[1], reason="not finite")
            return None
        memory[owner] = kept
        return found
