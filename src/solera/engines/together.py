"""Clients of one architecture, trained together in batched passes (`engine.vectorize`).

A task is an ordinary function, and knows of no other client. So each of the clients has a thread, and they take turns:
one runs until its task asks for a training (`parts.local.fit`) or ends. When all others are there or through, the
trainings that can be batched are done as one (`parts.together`), and the threads go on with what came out. Only one
thread runs at any time, and each sees the global generators as if it were alone, from its call's seed.
"""

import contextvars
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..devices import Placement, numerics
from ..errors import ConfigError
from ..parts.local import TOGETHER, Fitted, fit
from ..parts.together import Training, fit_together, try_batched
from ..randomness import OURS, Stream
from .base import Call, Host, Reply
from .serve import serve
from .states import ClientStates

BATCHED = ""  # among what is counted: the trainings that were batched


class _Turn:
    """One client's thread: it runs when it is told to, and says when it waits or has ended."""

    def __init__(self, number: int, call: Call, work: Callable[[], Reply]):
        self.call, self.work, self.stream = call, work, Stream(call.seed)
        self.asked: Training | None = None  # what it waits for
        self.answer: Fitted | Exception | None = None  # None: train it yourself
        self.reply: Reply | None = None
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        context, threads = contextvars.copy_context(), torch.get_num_threads()
        self._thread = threading.Thread(
            target=context.run, args=(self._run, threads), name=f"{OURS}-{number}", daemon=True
        )
        self._thread.start()

    def go_on(self) -> None:
        """Let it run until it waits for a training, or ends."""
        self.asked = None
        with self.stream.current():
            self._go.release()
            self._back.acquire()

    def _run(self, threads: int) -> None:
        self._go.acquire()
        torch.set_num_threads(threads)
        TOGETHER.set(self._train)
        try:
            self.reply = self.work()
        finally:
            self._back.release()

    def _train(self, *training: Any) -> Fitted:
        """Instead of `fit`, in the client's thread."""
        self.asked = Training(*training)
        self._back.release()
        self._go.acquire()
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is not None:
            return self.answer
        token = TOGETHER.set(None)
        try:
            return fit(*training)
        finally:
            TOGETHER.reset(token)


def serve_together(
    calls: Sequence[Call], host: Host, states: ClientStates, place: Placement, counted: Counter[str]
) -> Iterator[Reply]:
    """Serve these calls side by side. `counted`: how many trainings were batched, and how many were not, and why."""

    def work(call: Call) -> Callable[[], Reply]:
        return lambda: serve(call, host, states, place, seed_global=False)

    turns = [_Turn(i, call, work(call)) for i, call in enumerate(calls)]
    going = turns
    while going:
        for turn in going:
            turn.go_on()
        going = [turn for turn in going if turn.asked is not None]
        _train_all(going, counted)
    for turn in turns:
        yield turn.reply or Reply(turn.call.client, error="its thread ended without a reply")


def _train_all(turns: Sequence[_Turn], counted: Counter[str]) -> None:
    """Answer all that wait for a training: those of one kind together."""
    kinds: dict[Any, list[tuple[_Turn, Training]]] = {}
    for turn in turns:
        turn.answer, training = None, turn.asked
        assert training is not None
        if why := training.why_alone():
            counted[why] += 1
        else:
            kinds.setdefault(training.kind(), []).append((turn, training))
    for alike in kinds.values():
        if len(alike) == 1:
            counted["no other training of its kind"] += 1
            continue
        counted[BATCHED] += len(alike)
        answers: Sequence[Fitted | Exception]
        try:
            answers = fit_together([training for _, training in alike])
        except (torch.OutOfMemoryError, RuntimeError) as e:
            answers = [type(e)(str(e)) for _ in alike]
        for (turn, _), answer in zip(alike, answers, strict=True):
            turn.answer = answer


def note_of(counted: Counter[str]) -> dict[str, Any]:
    """For the record of the round."""
    alone = {why: n for why, n in counted.items() if why != BATCHED}
    return {"kind": "vectorized", "together": counted[BATCHED], "alone": alone}


@numerics()
def check_batched(host: Host) -> None:
    """Refuse models that cannot be trained in one pass, each with its reason, before any work."""
    roster, place = host.roster, Placement()
    seen: set[str] = set()
    for k in roster:
        A = roster[k].architecture
        if A in seen or roster[k].num_examples == 0:
            continue
        seen.add(A)
        client = host.client(k, 0, {}, place)
        rows = torch.arange(min(2, client.num_examples))
        if why := try_batched(client.model(), client.train.inputs[rows], client.train.labels[rows]):
            raise ConfigError(
                f"engine.vectorize = true: {A!r} cannot be batched: {why}; set engine.vectorize = false, or choose "
                "another model (of the zoo: models.norm = 'group' or 'none')"
            )
