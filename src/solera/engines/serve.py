"""The client's side of every engine: one call in, one reply out; and the client state that survives rounds."""

import contextlib
import functools
import pathlib
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ..core.calls import Call, Host, Reply
from ..core.errors import SoleraError
from ..core.randomness import SharedGenerator, repeatable
from ..core.task import TASKS, Task
from ..core.tensors import Weights
from ..core.wire import Layout, Packed, WireError, decode
from ..place.placement import OutOfMemory, Placement, within_memory
from .states import ClientStates, StateError

WAY_OUT = (
    "lower engine.per_device, the batch of the clients' training (method.local.batch) or engine.resident, or set "
    "engine.device = 'cpu'"
)


class InputModified(SoleraError):
    """A task wrote into a message it shares with other clients."""


def serve(call: Call, host: Host, states: "ClientStates", place: Placement, seed_global: bool = True) -> Reply:
    """Run one call. Whatever goes wrong in it becomes the reply's error; nothing is raised.

    The state loaded is the one the call names, and a new one is saved beside it, so a call can be repeated. Which of
    them counts is the federation's to say: a client whose reply is refused goes on from the one it had.
    `seed_global=False` is for threads, which share the global generators.
    """
    begun = time.monotonic()
    try:
        place.open()
        task, arguments = arguments_of(call)
        versions = call.message.versions

        def work() -> tuple[Any, dict[str, Weights], Snapshot]:
            loaded = states.load(call.client, call.after)
            client = host.client(call.client, call.seed, loaded, place)
            before = _snapshot(loaded)
            with place.training():  # what a task sets is not left to the next one
                return task.fn(client, **arguments), client.state, before

        once = functools.partial(repeatable, call.seed, work) if seed_global else work
        outbox, state, before = within_memory(place, once, WAY_OUT)
        if call.message.versions != versions:
            raise InputModified(f"task {call.task} writes into its arguments; clone them first (t.clone())")
        reply = Packed(outbox, steady=True)
        seconds = time.monotonic() - begun
        if call.deadline_s is not None and seconds > call.deadline_s:
            raise TimeoutError(f"took {seconds:.1f} s, the deadline is {call.deadline_s} s")
        version = call.after
        if _changed(state, before):
            decode(reply, task.returns, arguments)  # the server will look as closely
            version = states.save(call.client, call.step, state, call.keep, call.keep_from)
        return Reply(call.client, reply, version, seconds=seconds)
    except OutOfMemory as e:  # it would be so in every round: a run without this client would be another one
        A = host.roster[call.client].architecture
        return Reply(call.client, error=f"{call.client} ({A}), {call.task}: {e}", fatal="run")
    except (InputModified, SharedGenerator) as e:
        return Reply(call.client, error=str(e), fatal="task")
    except StateError as e:
        return Reply(call.client, error=str(e), fatal="run")
    except (Exception, SystemExit) as e:
        return Reply(call.client, error=_reason(e), seconds=time.monotonic() - begun)


KEEP_MESSAGES = 4  # the server and the worker forget messages by the same rule: of another exchange, or before these


class Held:
    """The messages that a worker holds: one that many clients share is sent once."""

    def __init__(self) -> None:
        self.messages: dict[Any, Packed] = {}
        self.step = -1

    def message(self, name: Any, facts: Mapping[str, Any], fetch: Callable[[], bytes]) -> Packed:
        """The message of a call with these facts; fetched unless it is held."""
        if facts["step"] != self.step:
            self.messages, self.step = {}, facts["step"]
        if name not in self.messages:
            self.messages[name] = Received(fetch(), facts["task"])
            for old in list(self.messages)[:-KEEP_MESSAGES]:
                del self.messages[old]
        return self.messages[name]


class Received(Packed):
    """A message that a worker holds: decoded from bytes once."""

    def __init__(self, blob: bytes, task: str):
        super().__init__(None)
        with contextlib.suppress(WireError):  # `serve` says what is wrong, in its reply
            if task in TASKS:
                inbox = decode(blob, TASKS[task].inbox)
                self.__dict__.update(Packed(inbox).__dict__)
                self.memo = {task: inbox}


def arguments_of(call: Call) -> tuple[Task, dict[str, Any]]:
    """The task of a call, and its arguments."""
    task = TASKS.get(call.task)
    if task is None:
        raise WireError(f"unknown task {call.task!r}")
    inbox = call.message.memo.get(call.task)
    if inbox is None:  # many clients share one message: look at it once
        inbox = call.message.memo[call.task] = decode(call.message, task.inbox)
    return task, {a: getattr(inbox, a) for a in task.takes}


def most_due(call: Call) -> int:
    """Bytes of the largest possible reply to a call; a refused call has none."""
    try:
        task, sent = arguments_of(call)
        return Layout(task.returns, sent).size
    except WireError:
        return 0
    except TypeError as e:
        raise SoleraError(
            f"the task {call.task} cannot be deployed: {e}; a reply is made of tensors, numbers and truth values"
        ) from None


Snapshot = dict[str, dict[str, tuple[Tensor, int]]]


def _snapshot(state: dict[str, Weights]) -> Snapshot:
    """A snapshot of a client's state. It holds the tensors, because the id of a freed object may be reused."""
    return {name: {n: (t, t._version) for n, t in weights.items()} for name, weights in state.items()}


def _changed(state: dict[str, Weights], before: Snapshot) -> bool:
    """True if anything was assigned, removed or written to."""
    if {k: list(v) for k, v in state.items()} != {k: list(v) for k, v in before.items()}:
        return True
    return any(
        t is not old or t._version != version
        for name, weights in before.items()
        for (old, version), t in zip(weights.values(), state[name].values(), strict=True)
    )


def _reason(e: BaseException) -> str:
    """The error in one line, with the file and line that raised it."""
    where = traceback.extract_tb(e.__traceback__)[-1]
    text = " ".join(str(e).split())
    return f"{type(e).__name__}: {text[:300]} ({pathlib.Path(where.filename).name}:{where.lineno})"
