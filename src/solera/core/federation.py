"""The federation as a method sees it: sample clients, map a task over them, read the replies.

Seeds, order, validation, quorum and byte counts are handled here. So an engine only moves messages, and a method reads
like its paper.
"""

import contextlib
import dataclasses
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol

import torch
from annotated_types import Gt, Le
from torch import Tensor

from ..train.aggregate import RunningMean
from .accounting import LOST, Availability, Clock, Trip, content_of
from .calls import SHA256, Call, Engine, Reply, Roster, Version
from .errors import RunError, SoleraError
from .randomness import seed_from
from .settings import Positive, PositiveInt, Problem, settings
from .task import Task
from .wire import Limits, Packed, WireError, decode, encode

log = logging.getLogger("solera")
REASON = 500  # characters kept of a failure's reason: the client may have written the text
STEPS = 1000  # limit of exchanges in a round; a step is round * STEPS + exchange
PROTOCOL = 900  # exchanges from here on are for a `Summing`: so a method's exchanges keep their numbers and seeds


class QuorumNotMet(SoleraError):
    """Too few valid replies: the exchange is void."""

    exit_code = 5


class TaskError(SoleraError):
    """A task breaks a rule of the library, so it would fail on every client."""


@settings
class FederationConfig:
    """The choice of a round's clients, and the limits for those that do not answer."""

    fraction: Annotated[float, Gt(0), Le(1)] = 1.0  # share of all clients sampled each round, C
    sampling: Literal["uniform", "size"] = "uniform"  # size: with probability proportional to their examples
    replacement: bool = False  # size only: draw with replacement; a client counts as often as it was drawn
    min_replies: PositiveInt = 1  # with fewer valid replies an exchange is void
    deadline_s: Positive | None = None  # time limit of a client for one task
    max_empty_rounds: PositiveInt = 3  # stop after so many void rounds in a row
    availability: Availability | None = None  # a simulated clock: who is online and drops out, and how fast all are

    def problems(self) -> Iterator[Problem]:
        """Settings that contradict each other."""
        if self.replacement and self.sampling != "size":
            yield "replacement = true: only with federation.sampling = 'size'"

    def cohort(self, clients: int) -> int:
        """The number of clients drawn each round, of `clients`."""
        return max(1, int(self.fraction * clients + 0.5))


class per_client:
    """Wraps a payload value that differs between clients: `weights=per_client(lambda k: M[fed.architecture(k)])`."""

    def __init__(self, of: Callable[[str], Any]):
        self.of = of


class Replies(dict[str, Any]):
    """Valid replies by client id, in canonical order; `failures` has the reason for every other client."""

    failures: dict[str, str]
    exchange: "_Exchange"  # the exchange they belong to

    def read_as(self, values: Mapping[str, Any]) -> "Replies":
        """The same replies with other values, for the clients in `values` only."""
        read = Replies(values)
        read.failures, read.exchange = self.failures, self.exchange
        return read


class Means(dict[Any, Any]):
    """Means by group; `counts` has the number of replies in each. Groups without replies are absent."""

    counts: dict[Any, int]


@dataclasses.dataclass
class Traffic:
    """The traffic of one task in one direction."""

    messages: int = 0
    bytes: int = 0
    floats: int = 0
    integers: int = 0
    content: Counter[str] = dataclasses.field(default_factory=Counter)  # bytes by kind, see `content`

    def sent(self, size: int) -> None:
        """Count a message of `size` bytes, valid or not."""
        self.messages += 1
        self.bytes += size

    def held(self, message: Packed, content: Mapping[str, int]) -> None:
        """Count the numbers in a valid message, and its bytes by kind."""
        self.content.update(content)
        self.floats += message.floats
        self.integers += message.integers


@dataclasses.dataclass
class _Exchange:
    """One task and the clients it was sent to."""

    task: str
    asked: int
    quorum: int  # with fewer valid replies it is void
    after: dict[str, Version | None]  # the client state that each call starts from
    ledger: dict[str, Version]  # the federation's ledger when the exchange began

    def set(self, k: str, version: Version | None) -> None:
        """Set the state that client `k` has now."""
        if version is None:
            self.ledger.pop(k, None)
        else:
            self.ledger[k] = version


@dataclasses.dataclass(frozen=True)
class MeanOf:
    """A mean that a method requests: of which replies, in which groups, with which weights."""

    task: Task
    clients: Sequence[str]
    payload: Mapping[str, Any]
    by: Callable[[str], Hashable] | None
    uniform: bool
    once: Collection[str]
    min_replies: int | None

    def weight(self, k: str, fed: "Federation") -> float:
        """The weight of client `k` in all fields except those in `once`."""
        return fed.copies.get(k, 1) * (1 if self.uniform else fed.num_examples(k))


class Summing(Protocol):
    """Computes means of replies. It may use exchanges of its own for that (`Federation.exchange`, protocol=True)."""

    def start(self, fed: "Federation", of: MeanOf) -> Callable[[], Means]:
        """Start, and return a function that waits for the mean of each group (the group None without groups)."""
        ...


class Plain:
    """Adds up replies unencrypted, in canonical order; the server briefly holds each single reply."""

    def start(self, fed: "Federation", of: MeanOf) -> Callable[[], Means]:
        """Send the task to the clients."""
        if not dataclasses.is_dataclass(of.task.returns):
            raise TypeError(f"mean needs a dataclass of tensors; {of.task.name} returns {of.task.returns}")
        fields = [f.name for f in dataclasses.fields(of.task.returns)]
        _, arriving = fed.exchange(of.task, of.clients, of.payload, of.min_replies)

        def result() -> Means:
            sums: dict[Any, dict[str, RunningMean]] = {}
            counts: Counter[Any] = Counter()
            for k, reply in arriving({}):
                group, n = of.by(k) if of.by else None, of.weight(k, fed)
                means = sums.setdefault(group, {f: RunningMean() for f in fields})
                counts[group] += fed.copies.get(k, 1)
                for f in fields:
                    value = getattr(reply, f)
                    weights = value if isinstance(value, dict) else {"": torch.as_tensor(value)}
                    means[f].add(weights, 1 if f in of.once else n)
            groups = sorted(sums, key=str)
            out = Means((g, _mean_reply(of.task, sums[g])) for g in groups)
            out.counts = {g: counts[g] for g in groups}
            return out

        return result


class Federation:
    """A method's way to its clients: `sample`, `map`, `mean`, `submit` and `submit_mean` (without waiting), `reject`.

    `ledger` records which state each client has. Only a valid reply changes it.
    """

    def __init__(
        self,
        engine: Engine,
        seed: int,
        config: FederationConfig | None = None,
        limits: Limits | None = None,
        progress: Callable[[str, int, int], None] | None = None,
        ledger: Mapping[str, Version] | None = None,
        summing: Summing | None = None,
        elapsed_s: float = 0.0,
        lent: Packed | None = None,
        holders: Collection[str] = (),
    ):
        """`lent`: the public samples, which a client is sent once, with its first call; `holders` have them already."""
        self.engine, self.run_seed = engine, seed
        self.config, self.limits = config or FederationConfig(), limits or Limits()
        self.clients: Roster = engine.roster
        self.lent, self.holders = lent, set(holders)
        self._lent_bytes = Counter(data=0 if lent is None else sum(t.nbytes for t in lent.tensors))
        self.progress = progress or (lambda what, done, of: None)
        self.summing: Summing = summing or Plain()
        self.ledger: dict[str, Version] = dict(ledger or {})  # only clients that keep a state
        known = self.config.availability
        self.clock = None if known is None else Clock(known, len(self.clients), seed, elapsed_s)
        self.begin(0)

    def begin(self, round: int, kept: Sequence[Mapping[str, Version]] = ()) -> None:
        """Start a round. Everything random in it is determined by the run's seed and the round number.

        `kept` are the ledgers of the checkpoints that the run may fall back to.
        """
        self.round, self._next, self._kept = round, {False: 0, True: PROTOCOL}, list(kept)
        self.settle()
        self._pending: set[str] = set()  # clients whose replies have not been collected yet
        self.rng = torch.Generator().manual_seed(self.seed("server"))
        self.copies: Counter[str] = Counter()  # how often each client of the cohort was drawn
        self.down: dict[str, Traffic] = {}
        self.up: dict[str, Traffic] = {}
        self.failures: list[dict[str, str]] = []
        self.answered: set[str] = set()
        self.supplied: list[str] = []  # the clients that were sent the public samples in this round
        self.verbs: set[str] = set()  # which of map and mean were used: tells what the server saw of clients
        self.waited_s = 0.0  # time spent waiting for clients
        self._timed_calls = True
        if self.clock is not None:
            self.clock.begin(round)
        self.idle: Callable[[], None] = lambda: None  # called after an exchange, when no client is working

    def settle(self) -> None:
        """Keep the current client states, even if a later exchange is void. Replies that are still pending change
        nothing."""
        self._settled, self.ledger = self.ledger, dict(self.ledger)  # a late reply changes only the ledger of its time

    def void(self) -> None:
        """Undo the client states of a void round, also for the clients that did answer."""
        self.ledger = dict(self._settled)

    def digest(self, state: Any) -> str:
        """sha256 of the server's state and of the sha256 of every client's state."""
        whole = hashlib.sha256(encode(state))
        for k in sorted(self.ledger, key=self.clients.index):
            whole.update(f"{k} {self.ledger[k].sha256}\n".encode())
        return whole.hexdigest()

    def dismiss(self) -> None:
        """End the cohort's work: from here on every client counts once, however often it was drawn."""
        self.copies = Counter()

    @contextlib.contextmanager
    def untimed(self) -> Iterator[None]:
        """For measuring: exchanges take no simulated time, all clients are there, and none is sent public samples."""
        self._timed_calls = False
        try:
            yield
        finally:
            self._timed_calls = True

    def seed(self, *key: Any) -> int:
        """A seed determined by (run, round, key), never by scheduling, arrival order or engine."""
        return seed_from(self.run_seed, self.round, *key)

    def sample(self) -> list[str]:
        """The cohort of this round, in canonical order. It depends on the run's seed, never on the method."""
        sizes, g = self.clients.sizes, torch.Generator().manual_seed(self.seed("sample"))
        m = self.config.cohort(len(sizes))
        if self.clock is not None:
            sizes = sizes * self.clock.online()  # draw_clients takes no client without examples
        drawn = draw_clients(sizes, m, g, self.config.sampling, self.config.replacement)
        self.copies = Counter(self.clients.id(int(i)) for i in drawn)
        return sorted(self.copies)

    def architecture(self, k: str) -> str:
        """The architecture of client `k`."""
        return self.clients[k].architecture

    def num_examples(self, k: str) -> int:
        """The number of training examples that client `k` has reported."""
        return self.clients[k].num_examples

    # -- exchanges --

    def map(self, task: Task, clients: Sequence[str], /, min_replies: int | None = None, **payload: Any) -> Replies:
        """Run a task on each client and return the individual replies.

        With fewer than `min_replies` valid replies the exchange is void. Default: federation.min_replies.
        """
        return self.submit(task, clients, min_replies=min_replies, **payload)()

    def mean(self, task: Task, clients: Sequence[str], /, **how: Any) -> Any:
        """Run a task on each client and return only the mean of the replies: `submit_mean`, and wait."""
        return self.submit_mean(task, clients, **how)()

    def submit(
        self, task: Task, clients: Sequence[str], /, min_replies: int | None = None, **payload: Any
    ) -> Callable[[], Replies]:
        """Like `map`, but start now and return a function that waits for the replies."""
        self.verbs.add("map")
        exchange, arriving = self.exchange(task, clients, payload, min_replies)

        def result() -> Replies:
            failures: dict[str, str] = {}
            replies = Replies(arriving(failures))
            replies.failures, replies.exchange = failures, exchange
            return replies

        return result

    def submit_mean(
        self,
        task: Task,
        clients: Sequence[str],
        /,
        by: Callable[[str], Hashable] | None = None,
        uniform: bool = False,
        min_replies: int | None = None,
        once: Collection[str] = (),
        **payload: Any,
    ) -> Callable[[], Any]:
        """Start a task on each client, and return a function that waits for the mean of the replies.

        It is weighted by examples or `uniform`. Replies are added up as they arrive and are not kept. With `by` there
        is one mean for each group of clients. In the fields `once` every client has weight 1. With `min_replies=0`
        there may be nothing to average: then the result is None (or has no groups).
        """
        self.verbs.add("mean")
        collect = self.summing.start(self, MeanOf(task, clients, payload, by, uniform, once, min_replies))

        def result() -> Any:
            means = collect()
            return means if by else means.get(None)

        return result

    def reject(self, replies: Replies, k: str, reason: str) -> None:
        """Drop the reply of client `k`: it has the declared type, but the method cannot use it.

        It then counts as a failure: `k` is recorded and gets its previous state back. If too few replies are left, the
        exchange is void.
        """
        exchange = replies.exchange
        del replies[k]
        replies.failures[k] = _plain(reason)
        self.answered.discard(k)
        exchange.set(k, exchange.after[k])
        self._note_failure(k, exchange.task, replies.failures[k])
        self._check_quorum(exchange, len(replies), replies.failures)

    def carried(self, name: str, down: Sequence[Any], up: Sequence[Any]) -> None:
        """Count messages that no engine carries because this process simulates both ends: between servers of groups
        and the one above them. They take no simulated time."""
        for traffic, values in ((self.down, down), (self.up, up)):
            one = traffic.setdefault(name, Traffic())
            for value in values:
                message = Packed(value)
                one.sent(message.size)
                one.held(message, content_of(value))

    def _note_failure(self, k: str, task: str, reason: str) -> None:
        self.failures.append({"client": k, "task": task, "reason": reason})
        log.warning("round %d: %s dropped from %s: %s", self.round, k, task, reason[:300])

    def _check_quorum(self, exchange: _Exchange, valid: int, failures: Mapping[str, str]) -> None:
        if valid < exchange.quorum:
            for k, version in exchange.after.items():  # also for the clients that did answer
                exchange.set(k, version)
            why = "; no client was asked" if not exchange.asked else ""
            if failures:
                why = f"; first reason: {next(iter(failures.values()))[:200]}"
            raise QuorumNotMet(
                f"round {self.round}: {valid} of {exchange.asked} clients gave a valid reply to {exchange.task}, "
                f"federation.min_replies is {exchange.quorum}{why}"
            )

    def _keep(self, k: str) -> tuple[Version, ...]:
        """The states of client `k` that a fallback to a checkpoint or a void round needs."""
        return tuple(sorted({ledger[k] for ledger in (*self._kept, self._settled) if k in ledger}))

    def exchange(
        self,
        task: Task,
        clients: Sequence[str],
        payload: Mapping[str, Any],
        min_replies: int | None = None,
        protocol: bool = False,
    ) -> tuple[_Exchange, Callable[[dict[str, str]], Iterator[tuple[str, Any]]]]:
        """Start an exchange; the function yields (client, valid reply) in canonical order and fills in failures.

        For a `Summing`; methods use `map` and `mean`. Exchanges with `protocol` have numbers of their own, and a client
        that answers one of them does not count as having answered the method.
        """
        if set(payload) != set(task.takes):
            raise TypeError(f"{task.name} takes {sorted(task.takes)}, but was given {sorted(payload)}")
        number, end = self._next[protocol], STEPS if protocol else PROTOCOL
        if number == end:
            raise TaskError(f"round {self.round}: {task.name} is one exchange too many: their numbers end at {end}")
        self._next[protocol], step = number + 1, self.round * STEPS + number
        asked = sorted(set(clients), key=self.clients.index)
        if twice := self._pending.intersection(asked):  # the order of the two tasks would depend on the engine
            raise TaskError(
                f"round {self.round}: {min(twice)} is asked for {task.name} before its previous reply was collected"
            )
        self._pending.update(asked)
        answered: set[str] = set() if protocol else self.answered
        round, down = self.round, self.down.setdefault(task.name, Traffic())
        up = self.up.setdefault(task.name, Traffic())
        quorum = self.config.min_replies if min_replies is None else min_replies
        exchange = _Exchange(task.name, len(asked), quorum, {k: self.ledger.get(k) for k in asked}, self.ledger)
        sent, calls = {}, []
        packed: dict[tuple[int, ...], tuple[Packed, Counter[str]]] = {}
        clock, trips = self.clock if self._timed_calls else None, dict[str, Trip]()
        lent = self.lent if self._timed_calls and not protocol else None
        for k in asked:
            values = {a: v.of(k) if isinstance(v, per_client) else v for a, v in payload.items()}
            key = tuple(id(v) for v in values.values())  # the same objects give the same message: pack it once
            if key not in packed:
                packed[key] = Packed(values), content_of(values)
            sent[k] = values
            m, content = packed[key]
            size = m.size
            if lent is not None and k not in self.holders:
                size, content = size + lent.size, content + self._lent_bytes
                self.holders.add(k)
                self.supplied.append(k)
            down.sent(size)
            down.held(m, content)
            if clock is not None:
                samples = task.samples(values, self.num_examples(k))
                trips[k] = clock.send(self.clients.index(k), k, size, samples)
                if trips[k].lost:
                    continue
            seed = seed_from(self.run_seed, round, number, k, "task")
            after, keep = exchange.after[k], self._keep(k)
            first, limit_s = round * STEPS, self.config.deadline_s
            calls.append(Call(k, task.name, step, seed, self.run_seed, m, after, keep, first, limit_s))
        collect = self.engine.start(calls)

        def arriving(failures: dict[str, str]) -> Iterator[tuple[str, Any]]:
            waiting = dict.fromkeys(asked)
            early: dict[str, Any] = {}  # replies that arrived before their turn
            heard = {k for k, trip in trips.items() if trip.lost}
            failures.update(dict.fromkeys(heard, LOST))
            turn, valid = 0, 0

            def in_turn() -> Iterator[tuple[str, Any]]:
                nonlocal turn, valid
                while turn < len(asked) and asked[turn] in heard:
                    k, turn = asked[turn], turn + 1
                    if k in early:
                        valid += 1
                        answered.add(k)
                        yield k, early.pop(k)

            self.progress(task.name, 0, len(asked))
            for r in self._timed(collect()):
                if r.message:
                    up.sent(r.message.size if isinstance(r.message, Packed) else len(r.message))
                if r.fatal:
                    raise (RunError if r.fatal == "run" else TaskError)(f"round {round}: {r.error}")
                if r.client not in waiting or r.client in heard:
                    log.warning("round %d: unexpected reply from %s ignored", round, _plain(str(r.client)[:64]))
                    continue
                heard.add(r.client)
                self.progress(task.name, len(heard), len(asked))
                try:
                    if r.error is not None:
                        raise WireError(r.error)
                    if clock is not None:
                        trips[r.client].back(r.message.size if isinstance(r.message, Packed) else len(r.message or b""))
                        if late := clock.late(trips[r.client]):
                            raise WireError(late)
                    version = _version_of(r, step, exchange.after[r.client])
                    reply = decode(r.message, task.returns, sent[r.client], self.limits)
                    up.held(r.message if isinstance(r.message, Packed) else Packed(reply), content_of(reply))
                    early[r.client] = reply
                    exchange.set(r.client, version)
                except WireError as e:
                    failures[r.client] = _plain(str(e))
                yield from in_turn()
            self._pending.difference_update(asked)
            self.idle()
            if clock is not None:
                clock.collected(trips)
            failures.update(dict.fromkeys((k for k in asked if k not in heard), "no reply"))
            heard.update(asked)
            yield from in_turn()
            for k in (k for k in asked if k in failures):
                self._note_failure(k, task.name, failures[k])
            self._check_quorum(exchange, valid, failures)

        return exchange, arriving

    def _timed(self, replies: Iterator[Reply]) -> Iterator[Reply]:
        began = time.monotonic()
        for reply in replies:
            self.waited_s += time.monotonic() - began
            yield reply
            began = time.monotonic()
        self.waited_s += time.monotonic() - began


def draw_clients(
    sizes: Tensor, m: int, rng: torch.Generator, sampling: str = "uniform", replacement: bool = False
) -> Tensor:
    """Positions of the sampled clients. Clients without examples are never drawn. All, if fewer than `m` are left."""
    eligible = (sizes > 0).nonzero().flatten()
    if sampling == "uniform":
        return eligible[torch.randperm(len(eligible), generator=rng)[:m]]
    share = sizes[eligible].double()
    m = m if replacement else min(m, len(eligible))
    return eligible[torch.multinomial(share / share.sum(), m, replacement, generator=rng)]


def _mean_reply(task: Task, means: Mapping[str, RunningMean]) -> Any:
    values: dict[str, Any] = {}
    for f, mean in means.items():
        result = mean.result()
        values[f] = result[""] if set(result) == {""} else result
    try:
        return task.returns(**values)
    except ValueError as e:  # each reply was just inside its allowed range, and rounding moved the mean out of it
        raise QuorumNotMet(f"the mean of the replies to {task.name} is not usable: {e}") from None


def _version_of(r: Reply, step: int, after: Version | None) -> Version | None:
    """The client's state after a call: unchanged, or written by this call."""
    if r.version == after:
        return after
    made = r.version is not None and r.version.step == step and isinstance(r.version.sha256, str)
    if not made or not SHA256.fullmatch(r.version.sha256):  # type: ignore[union-attr]
        raise WireError(f"it names a client state that this call cannot have made: {_plain(str(r.version)[:100])}")
    return r.version


def _plain(reason: str) -> str:
    """One line that is safe to print: the text may come from a client."""
    return "".join(c if c.isprintable() else " " for c in reason[:REASON])
