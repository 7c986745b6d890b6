"""Clients on other machines, reached through Flower: the engine of a deployment.

Only Flower's public interface is used, and the codes of its errors (`deploy/flower_inside.py`): the server pushes and
pulls messages on a `Grid`, a site answers one kind of query. A message is one array of bytes, the safetensors encoding
of `wire` as it is, and one line of JSON beside it. Flower moves and stores it without looking inside; the receiver
compares its header with the declared type before anything is built from it.

The name of a site follows from the key of its node, which the SuperLink has checked, never from what the site says. A
call can be repeated (`serve` starts from the state that the call names), so a site that went away in the middle of one
is asked again when it is back.
"""

import dataclasses
import json
import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from ..core.calls import Call, Reply, Roster
from ..core.errors import RunError
from ..core.stopping import check_stop
from ..core.wire import Limits, Packed, WireError, safe_name
from ..engines.engine_settings import FlowerConfig
from ..engines.serve import most_due
from .flower_inside import CODES, GONE, TOO_LATE

log = logging.getLogger("solera")
PROTOCOL = 1  # of the facts beside a message; both ends must have the same
QUERY = "query.call"  # the one kind of message
STYPE = "solera.safetensors"  # says what the bytes are: never Flower's own arrays, which allocate what a header claims
FACTS, BODY = "facts", "message"
MOST_FACTS = 1 << 20  # characters of JSON beside a message
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 1.0  # between two looks for replies
SLACK_S = 120.0  # a message of which Flower says nothing is given up so long after its time
SAY_AGAIN_S = 60.0  # how often a wait is mentioned
FOREVER_S = 12 * 3600.0  # what Flower keeps a message for, where no deadline is set


def pack(facts: Mapping[str, Any], body: bytes | ArrayRecord | None = None) -> RecordDict:
    """A record for Flower: facts, and the bytes of a message (or what `one_array` has made of them)."""
    record = RecordDict({FACTS: ConfigRecord({"json": json.dumps(facts, separators=(",", ":"))})})
    if body is not None:
        record[BODY] = one_array(body) if isinstance(body, bytes) else body
    return record


def one_array(blob: bytes) -> ArrayRecord:
    """Bytes as one Flower array, which is not copied. Messages that share it are uploaded with one copy of it."""
    return ArrayRecord({"bytes": Array(dtype="uint8", shape=(len(blob),), stype=STYPE, data=blob)})


def unpack(record: Any, limits: Limits) -> tuple[dict[str, Any], bytes]:
    """Facts and bytes of a record, from a sender that is not trusted: WireError unless it is as `pack` makes one."""
    try:
        if set(record) - {FACTS, BODY}:
            raise WireError(f"records {sorted(map(str, record))[:4]}, expected {FACTS} and {BODY}")
        text = record[FACTS]["json"]
        if not isinstance(text, str) or len(text) > MOST_FACTS:
            raise WireError(f"facts of {len(text)} characters")
        facts = json.loads(text)
        told = facts.get("protocol") if isinstance(facts, dict) else None
        if told != PROTOCOL:
            raise WireError(f"protocol {str(told)[:20]}, this end speaks {PROTOCOL}: install the same solera on both")
        if BODY not in record:
            return facts, b""
        arrays = record[BODY]
        if list(arrays) != ["bytes"] or arrays["bytes"].stype != STYPE:
            raise WireError(f"a message is one array of {STYPE}")
        blob = arrays["bytes"].data
        if len(blob) > limits.bytes:
            raise WireError(f"a message of {len(blob)} bytes, expected at most {limits.bytes}")
        return facts, blob if isinstance(blob, bytes) else bytes(blob)
    except WireError:
        raise
    except Exception as e:  # whatever it is, the sender made it
        raise WireError(f"not a message: {type(e).__name__}: {str(e)[:100]}") from None


class Nodes:
    """The nodes of the sites. `site_of` knows a site by its public key; None if no site has that key."""

    def __init__(self, grid: Any, site_of: Callable[[bytes], str | None]):
        self.grid, self.site_of = grid, site_of
        self._strangers: set[int] = set()

    def present(self) -> dict[str, int]:
        """The sites that are connected now, with their nodes."""
        found: dict[str, int] = {}
        for node in self.grid.get_nodes():
            site = self.site_of(bytes(node.public_key))
            if site is not None:
                found[site] = node.node_id
            elif node.node_id not in self._strangers:
                self._strangers.add(node.node_id)
                log.warning("node %d has a key that no site of this run has: it is left alone", node.node_id)
        return found


@dataclasses.dataclass
class _Task:
    """One message on its way: a call, or (without one) something else that is asked of a site."""

    site: str
    facts: Mapping[str, Any]  # what is asked
    payload: Any = None  # what is sent with it: something with `blob`; tasks that share it are sent with one copy
    call: Call | None = None
    node: int | None = None  # where it was sent; None: not yet
    message: str = ""  # Flower's name of what was sent
    nonce: str = ""
    absent_since: float | None = None
    said: float = 0.0
    ends: float = 0.0  # when Flower says at the latest that there is no reply


class Flower:
    """Sites on a network. `run` is the run's name, under which sites keep their state; `roster` is what they said."""

    def __init__(
        self,
        grid: Any,
        nodes: Nodes,
        config: FlowerConfig,
        run: str,
        roster: Roster | None = None,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.grid, self.nodes, self.config, self.run = grid, nodes, config, safe_name(run, "run name")
        self.limits, self._clock, self._sleep = limits or Limits(), clock, sleep
        self.enrolled = roster  # set once the sites have been greeted
        self.public: str | None = None  # digest of the public samples that sites get from the server
        self.hellos: Mapping[str, str] = {}  # digests of what the sites said when the run began
        self._busy: dict[str, float] = {}  # site -> when at the latest it has given up a call that ran out of time

    @property
    def roster(self) -> Roster:
        assert self.enrolled is not None, "sites are greeted first"
        return self.enrolled

    def close(self) -> None:
        """Nothing is open: the grid is Flower's."""

    # -- hello --

    def greet(self, sites: Collection[str], run_seed: int) -> dict[str, dict[str, Any]]:
        """Ask sites what they have, before a run: the facts that each tells. Those that do not answer in `wait_s` are
        missing from the result."""
        return self._tell(sites, {"what": "hello", "run_seed": run_seed, "public": self.public})

    def deliver(self, sites: Collection[str], payload: Packed) -> None:
        """Send the public samples to sites, which keep them. Raises if one does not get them."""
        got = self._tell(sites, {"what": "public", "public": self.public}, payload)
        if lacking := sorted(set(sites) - set(got)):
            raise RunError(f"the public samples did not reach {', '.join(lacking)}: see the log, then submit again")

    def _tell(self, sites: Collection[str], facts: Mapping[str, Any], payload: Any = None) -> dict[str, dict[str, Any]]:
        """Ask something of sites outside of an exchange; the facts that those told that have answered."""
        told: dict[str, dict[str, Any]] = {}
        for task, outcome in self._conduct([_Task(k, facts, payload) for k in sorted(sites)]):
            why = outcome if isinstance(outcome, str) else outcome[0].get("error")
            if why:
                log.warning("%s does not take part (%s): %s", task.site, facts["what"], str(why)[:200])
            else:
                told[task.site] = outcome[0]  # type: ignore[assignment]
        return told

    # -- calls --

    def start(self, calls: Sequence[Call]) -> Callable[[], Iterator[Reply]]:
        """Send at once what can be sent; the rest when its site is there, while replies are collected."""
        tasks = [_Task(c.client, self._facts_of(c), c.message, c) for c in calls]
        self._send(tasks)

        def collect() -> Iterator[Reply]:
            for task, outcome in self._conduct(tasks):
                if isinstance(outcome, str):
                    yield Reply(task.site, error=outcome)
                    continue
                facts, blob = outcome
                try:
                    yield Reply.of({**facts, "fatal": ""}, task.site, blob)  # a site cannot end the run
                except WireError as e:
                    yield Reply(task.site, error=str(e))

        return collect

    # -- moving messages --

    def _conduct(self, tasks: list[_Task]) -> Iterator[tuple[_Task, tuple[dict[str, Any], bytes] | str]]:
        """Every task with its outcome, as they come: facts and bytes, or why there are none."""
        left, pause = list(tasks), FIRST_PAUSE_S
        while left:
            check_stop()
            pause = min(pause * 1.3, LONGEST_PAUSE_S)
            for task, reason in self._send(left):
                left.remove(task)
                yield task, reason
            for task in [t for t in left if t.node is not None]:
                for message in self.grid.pull_messages([task.message]):  # one at a time: each may be a large model
                    outcome = self._look(task, message)
                    if outcome is not None:
                        left.remove(task)
                        pause = FIRST_PAUSE_S
                        yield task, outcome
                        break
            for task in [t for t in left if t.node is not None and self._clock() > t.ends + SLACK_S]:
                left.remove(task)
                yield task, "no reply, and no word of what became of the message"
            if left:
                self._sleep(pause)

    def _send(self, tasks: Sequence[_Task]) -> list[tuple[_Task, str]]:
        """Send what can be sent; the tasks that are given up, with the reason."""
        waiting = [t for t in tasks if t.node is None]
        if not waiting:
            return []
        given_up, ready = [], []
        present, now = self.nodes.present(), self._clock()
        for task in waiting:
            if task.site in present and now >= self._busy.get(task.site, 0.0):
                self._busy.pop(task.site, None)
                ready.append(task)
            elif (why := self._absence(task, task.site in present, now)) is not None:
                given_up.append((task, why))
        self._push(ready, present)
        return given_up

    def _absence(self, task: _Task, connected: bool, now: float) -> str | None:
        """The reason to give up a task whose site cannot be asked now; None: it waits."""
        what = "is busy with a call that ran out of time" if connected else "is not connected"
        if self.config.absent == "skip" and task.call is not None:
            return f"{what}; skipped, as engine.absent says"
        if task.absent_since is None:
            task.absent_since = now
        waited = now - task.absent_since
        if waited >= self.config.wait_s:
            return f"{what}, {self.config.wait_s:g} s long (engine.wait_s)"
        if task.said == 0.0 or now - task.said >= SAY_AGAIN_S:
            task.said = now
            log.warning("%s %s: waiting for it, %.0f s so far", task.site, what, waited)
        return None

    def _push(self, ready: Sequence[_Task], present: Mapping[str, int]) -> None:
        """Upload messages, those with the same payload together: it then travels once."""
        groups: dict[int, list[_Task]] = {}
        for task in ready:
            groups.setdefault(id(task.payload), []).append(task)
        for group in groups.values():
            body = None if group[0].payload is None else one_array(group[0].payload.blob)
            messages = []
            for task in group:
                task.nonce = secrets.token_hex(16)
                limit_s = None if task.call is None else task.call.deadline_s
                ttl = FOREVER_S if limit_s is None else limit_s + self.config.grace_s
                task.ends = self._clock() + ttl
                about = {"protocol": PROTOCOL, "run": self.run, "site": task.site, "nonce": task.nonce}
                messages.append(Message(pack({**task.facts, **about}, body), present[task.site], QUERY, ttl=ttl))
            for task, name in zip(group, self.grid.push_messages(messages), strict=True):
                if name:
                    task.node, task.message = present[task.site], str(name)
                    log.debug("sent %s to %s", task.facts.get("task", task.facts["what"]), task.site)

    def _facts_of(self, call: Call) -> dict[str, Any]:
        """All of a call but its message; the digests of the public samples that the site got before, and of what it
        said of itself when the run began: it compares, so every exchange repeats the hello."""
        return {"what": "call", **call.facts(), "public": self.public, "hello": self.hellos.get(call.client)}

    def _look(self, task: _Task, message: Any) -> tuple[dict[str, Any], bytes] | str | None:
        """The content of a reply, or why it is refused; None if the task is to be sent again."""
        if message.has_error():
            return self._failure(task, int(message.error.code), str(message.error.reason))
        try:
            if message.metadata.src_node_id != task.node:
                raise WireError("the reply comes from another node")
            due = 0 if task.call is None else most_due(task.call)
            limits = dataclasses.replace(self.limits, bytes=min(due, self.limits.bytes))
            facts, blob = unpack(message.content, limits)
            if facts.get("nonce") != task.nonce:
                raise WireError("it answers another call: a reply that was sent before is refused")
            if facts.get("site") != task.site:
                raise WireError(f"it says that it is {str(facts.get('site'))[:64]!r}: refused, its key says otherwise")
            return facts, blob
        except WireError as e:
            log.warning("the reply of %s is refused: %s", task.site, e)
            return str(e)

    def _failure(self, task: _Task, code: int, reason: str) -> str | None:
        if code == GONE and (task.call is None or self.config.absent == "wait"):
            task.node, task.said = None, 0.0
            log.warning("%s went away before it had answered: it is asked again once it is back", task.site)
            return None
        if code == TOO_LATE:
            limit_s = None if task.call is None else task.call.deadline_s
            self._busy[task.site] = self._clock() + self.config.grace_s
            said = f"the deadline of {limit_s:g} s" if limit_s is not None else f"{FOREVER_S / 3600:g} hours"
            return f"no reply within {said}"
        text = " ".join(reason.split())[:300]
        return "it went away before it had answered" if code == GONE else f"{CODES.get(code, f'code {code}')}: {text}"
