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
STYPE = "solera.safetensors"  # never Flower's own arrays, which allocate the size that a header claims
FACTS, BODY = "facts", "message"
MOST_FACTS = 1 << 20  # characters of JSON beside a message
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 1.0  # between two checks for replies
SLACK_S = 120.0  # grace time after its deadline of a message about which Flower reports nothing
SAY_AGAIN_S = 60.0  # between two log lines about a wait
FOREVER_S = 12 * 3600.0  # Flower's storage time of a message without a deadline


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
    """Facts and bytes of a record from an untrusted sender. Raises WireError unless it has the form of `pack`."""
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
    except Exception as e:  # any error is the sender's fault
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
    """One message to a site: a call, or (without one) another request."""

    site: str
    facts: Mapping[str, Any]  # the kind of request
    payload: Any = None  # its payload, an object with `blob`; tasks that share it share one copy
    call: Call | None = None
    node: int | None = None  # where it was sent; None: not yet
    message: str = ""  # Flower's id of the message
    nonce: str = ""
    absent_since: float | None = None
    said: float = 0.0
    ends: float = 0.0  # the latest time at which Flower reports a missing reply


class Flower:
    """Sites on a network. `run` is the run's name, under which sites keep their state; `roster` lists them."""

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
        self.enrolled = roster  # set after `greet`
        self.public: str | None = None  # digest of the public samples that sites get from the server
        self.hellos: Mapping[str, str] = {}  # digests of the sites' hellos when the run began
        self._busy: dict[str, float] = {}  # site -> time at which it has certainly ended a call that timed out

    @property
    def roster(self) -> Roster:
        assert self.enrolled is not None, "sites are greeted first"
        return self.enrolled

    def close(self) -> None:
        """Do nothing: the grid belongs to Flower."""

    # -- hello --

    def greet(self, sites: Collection[str], run_seed: int) -> dict[str, dict[str, Any]]:
        """Ask sites for their facts, before a run. Sites that do not answer within `wait_s` are missing from the
        result."""
        return self._tell(sites, {"what": "hello", "run_seed": run_seed, "public": self.public})

    def deliver(self, sites: Collection[str], payload: Packed) -> None:
        """Send the public samples to sites, which keep them. Raises if one does not get them."""
        got = self._tell(sites, {"what": "public", "public": self.public}, payload)
        if lacking := sorted(set(sites) - set(got)):
            raise RunError(f"the public samples did not reach {', '.join(lacking)}: see the log, then submit again")

    def _tell(self, sites: Collection[str], facts: Mapping[str, Any], payload: Any = None) -> dict[str, dict[str, Any]]:
        """Send a request to sites outside of an exchange; returns the facts of those that answered."""
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
        """Send calls to connected sites at once; the others when their site connects, while replies are collected."""
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
        """Every task with its outcome, as they arrive: facts and bytes, or the reason why there are none."""
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
        """Send all tasks that can be sent now. Returns the tasks that are given up, with the reason."""
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
        """The reason to give up a task whose site is not connected; None: it waits."""
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
        """Upload messages; those with the same payload together, so that it is sent once."""
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
        """All of a call except its message; and digests of the public samples that the site received and of its hello
        when the run began. The site compares them, so every exchange repeats the check."""
        return {"what": "call", **call.facts(), "public": self.public, "hello": self.hellos.get(call.client)}

    def _look(self, task: _Task, message: Any) -> tuple[dict[str, Any], bytes] | str | None:
        """The content of a reply, or the reason why it is refused; None if the task must be sent again."""
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
