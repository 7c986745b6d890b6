"""A run directory: everything that a run writes, in open formats, and consistent at every moment.

    config.toml          the full effective configuration
    run.json             what determines the results, and the command that started the run
    partition.json       how many samples of which class each client holds
    metrics.jsonl        one line for each round
    summary.json         the outcome, with a digest of the final state
    confusion.json       confusion matrices of the final models; regions.json: their decision regions, for 2-d samples
    models/*.safetensors the final models, with their own parameter names
    checkpoints/         the last two states, each with its sha256 in its name; in older/, files they still refer to
    clients/             the state that clients keep between rounds, each version with its sha256 in its name

A checkpoint is the server's state, its round, and the ledger: which version of its state each client has. All are in
one file, so one rename makes them valid at once.

A file is written under another name and then renamed, so `kill -9` at any moment leaves either the old or the new file.
"""

import dataclasses
import fcntl
import hashlib
import itertools
import json
import math
import os
import pathlib
import re
import time
import tomllib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from ..core.calls import Version
from ..core.errors import RunError
from ..core.files import read_file
from ..core.plugins import paths_in, sha256_of
from ..core.tensors import Weights
from ..core.wire import OWN_FILES, Packed, Place, WireError, decode, decode_field, elsewhere_of, leaves, safe_name
from .read import FINGERPRINTS, fingerprints_in
from .record import FILE, FORMAT, RoundRecord, each_line, write_records
from .trust import ENGINE, SENDS, prove, refuse_changes
from .words import KEY as STAND_INS
from .words import StandIns, dig, flat

BEGINNING = {".lock", "config.toml", "config.toml.draft", "run.json.draft"}  # left by a run that was killed early
CHECKPOINT = re.compile(r"\d{6}\.[0-9a-f]{64}\.safetensors")
KEEP = 2  # checkpoints: if the newest is damaged, the one before it is used
OLDER = "checkpoints/older"  # files that are no longer checkpoints, but hold tensors of a kept checkpoint
# `flock` belongs to the open handle. Unlike a POSIX lock it also excludes this process, and is not lost when another
# reader in this process closes the same file. But a forked child shares the handle and would keep the directory locked
# after its parent died. So children close the handles in this set.
_LOCKS: set[int] = set()
LOCK_PATIENCE_S = 0.5  # a program that checks whether a run is active holds the lock briefly


def _let_go() -> None:
    """In a forked child, close the locks: they belong to the parent."""
    for lock in _LOCKS:
        os.close(lock)
    _LOCKS.clear()


os.register_at_fork(after_in_child=_let_go)


class RunDirectory:
    """The files of one run. Opening locks the directory until `close`."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        version: str,
        resume: bool = False,
        config: str | None = None,
        experiment: dict[str, Any] | None = None,
        command: str | None = None,
        stand_ins: StandIns | None = None,
    ):
        """`experiment` is everything that determines the results; a run is continued only with an equal one. `command`
        and `stand_ins` are recorded for readers."""
        self.path, self.version = pathlib.Path(path).resolve(), version
        self._other = "choose another directory as `out`" if config is None else "choose another --out"
        self._chains = [_Written() for _ in range(KEEP)]  # one for each kept checkpoint, used in turn
        # Of the kept checkpoints: the other files that hold their tensors, and the client state that belongs to them.
        self._kept: dict[str, tuple[set[str], dict[str, Version]]] = {}
        if resume and not os.path.lexists(self.path / "run.json"):
            raise RunError(
                f"{path} is not a run directory: it has no run.json; start a run with `solera run --out {path}`"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = self._acquire()
        except OSError as e:
            raise RunError(f"{path} cannot be used as a run directory: {e.strerror}") from None
        try:
            if resume:
                self._check_same(experiment)
                refuse_changes(self.path, _code_in(config, but=ENGINE))
            elif (self.path / "run.json").exists():
                way = "pass resume=True" if config is None else f"continue it with `solera resume {path}`"
                raise RunError(f"{path} already holds a run; {way}, or {self._other}")
            elif extra := [p.name for p in self.path.iterdir() if p.name not in BEGINNING]:
                raise RunError(f"{path} is not empty (it has {extra[0]!r}); {self._other}")
            else:
                if config is not None:  # first: a directory with run.json can then always be resumed
                    self._write("config.toml", config.encode())
                facts = {"format": FORMAT, "solera": version, "experiment": experiment, "command": command}
                facts |= {STAND_INS: stand_ins} if stand_ins else {}
                if code := _code_in(config):
                    facts |= {"code": code, "proof": prove(code)}
                if sends := dig(tomllib.loads(config or ""), *SENDS.split(".")):
                    facts |= {"sends": prove({sends: SENDS})}
                self._write("run.json", json.dumps(facts, indent=1).encode())
        except BaseException:
            self.close()
            raise

    def _acquire(self) -> int:
        """Take the lock and return its handle."""
        lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        end = time.monotonic() + LOCK_PATIENCE_S
        try:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > end:
                        holder = os.pread(lock, 32, 0).decode(errors="replace").strip()
                        this = ", this one" if holder == str(os.getpid()) else ""
                        by = f"process {holder or 'unknown'}{this}"
                        raise RunError(f"{self.path} is in use by another run ({by})") from None
                time.sleep(0.01)
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
        except BaseException:
            os.close(lock)
            raise
        _LOCKS.add(lock)
        return lock

    def _check_same(self, experiment: dict[str, Any] | None) -> None:
        """Refuse a directory of another version, or of another experiment: the bits would not be the same."""
        try:
            facts = json.loads(read_file(self.path / "run.json"))
            found, by, before = facts["format"], facts["solera"], facts.get("experiment")
            if not isinstance(before, dict | None):
                raise TypeError("experiment is not an object")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            why = e.strerror if isinstance(e, OSError) else e
            raise RunError(f"{self.path}/run.json is damaged ({why}); the run cannot be continued") from None
        if (found, by) != (FORMAT, self.version):
            raise RunError(
                f"{self.path} was written in format {found} by solera {by}; this is solera {self.version}, format "
                f"{FORMAT}: continue it with that version (pip install solera=={by})"
            )
        if before is not None and experiment is not None:
            then, now = flat(before), flat(json.loads(json.dumps(experiment)))
            for key in [*now, *(k for k in then if k not in now)]:  # the most informative keys first
                if then.get(key) != now.get(key):
                    raise RunError(
                        f"{self.path} was started with {key} = {then.get(key, 'unset')}, not {now.get(key, 'unset')}: "
                        "a run can only be continued with the same settings (rounds and engine may change); "
                        f"{self._other}"
                    )

    def computed_on(self, fingerprint: str) -> str:
        """Record the numeric fingerprint of this machine; return a warning if the run was on another one before."""
        facts = json.loads(read_file(self.path / "run.json"))
        before = fingerprints_in(facts)
        if before[-1:] == [fingerprint]:
            return ""
        self._write("run.json", json.dumps({**facts, FINGERPRINTS: [*before, fingerprint]}, indent=1).encode())
        if not before:
            return ""
        return (
            f"this machine computes other bits (fingerprint {fingerprint}) than the one that the run was on before "
            f"({before[-1]}): the run goes on, but does not end in the digest that it has on one machine"
        )

    def close(self) -> None:
        """Release the lock."""
        if self._lock in _LOCKS:  # False in a forked child
            _LOCKS.remove(self._lock)
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # explicitly: a child that was just forked still has the handle
            os.close(self._lock)
        self._lock = -1

    # -- files --

    def _write(self, name: str, content: bytes) -> None:
        path = self.path / name
        draft = path.with_name(path.name + ".draft")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(draft, "wb") as f:
                f.write(content)
                f.flush()
                os.fsync(f.fileno())
            draft.replace(path)
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as e:
            raise RunError(f"{path} cannot be written: {e.strerror}; the last checkpoint is still valid") from None

    def write_summary(self, summary: dict[str, Any]) -> None:
        self._write("summary.json", json.dumps(summary, indent=2).encode())

    def write_facts(self, name: str, facts: dict[str, Any]) -> None:
        """Write facts that are too large for every line of metrics.jsonl into a separate file."""
        self._write(name, json.dumps(facts).encode())

    def write_model(self, name: str, weights: Weights, facts: dict[str, str]) -> str:
        """Write a final model, which `safetensors.torch.load_file` can load, and return its sha256."""
        tensors = {n: t.detach().cpu().contiguous() for n, t in weights.items()}
        content = safetensors.torch.save(tensors, metadata=facts)
        self._write(f"models/{safe_name(name, 'model name')}.safetensors", content)
        return hashlib.sha256(content).hexdigest()

    @property
    def clients(self) -> pathlib.Path:
        return self.path / "clients"

    # -- rounds --

    def commit(self, round: int, state: Any, ledger: Mapping[str, Version]) -> None:
        """Write a checkpoint: a resumed run starts from it. The round's metrics were already appended, and the client
        states that the ledger names are on disk.

        Tensors that have not changed since the last commit but one stay in their files, if that saves half of the
        writing. If those files would hold more than twice what the state needs, everything is written again. The files
        of the last commit are not used: the two kept checkpoints share no file, so a damaged file affects only one of
        them.
        """
        content = {"state": state, "ledger": _pack(ledger), "round": torch.tensor(round)}
        tensors, packed = leaves(content), Packed(content)
        written = self._chains[0]
        elsewhere = written.places(tensors)
        new = sum(t.nbytes for i, t in enumerate(tensors) if i not in elsewhere)
        old = written.bytes_in({file for file, _ in elsewhere.values()})
        if 2 * new > packed.size or old + new > 2 * packed.size:
            elsewhere = {}
        blob = packed.without(elsewhere) if elsewhere else packed.blob
        name = f"{round:06d}.{hashlib.sha256(blob).hexdigest()}.safetensors"
        self._write(f"checkpoints/{name}", blob)
        self._kept[name] = ({file for file, _ in elsewhere.values()}, dict(ledger))
        written.note(name, len(blob), tensors, elsewhere)
        self._chains = [*self._chains[1:], written]
        self._tidy()

    def _tidy(self) -> None:
        """Remove files that no kept checkpoint needs. A needed file exists at every moment, in one of two places."""
        files = self._checkpoints()
        self._kept = {p.name: self._kept.get(p.name) or _about(p) for p in files[-KEEP:]}
        needed = set[str]().union(*(files for files, _ in self._kept.values()))
        for path in files[:-KEEP]:
            if path.name not in needed:
                _remove(path)
                continue
            try:  # no checkpoint any more (its client states are gone), but its tensors are needed
                (self.path / OLDER).mkdir(exist_ok=True)
                path.replace(self.path / OLDER / path.name)
            except OSError as e:
                raise RunError(f"{path} cannot be moved to {OLDER}: {e.strerror}; it is still valid") from None
        for path in (self.path / OLDER).glob("*.safetensors"):
            if path.name not in needed:
                _remove(path)

    def ledgers(self) -> list[dict[str, Version]]:
        """The ledgers of the kept checkpoints, oldest first. Their client states must be kept."""
        return [self._kept[name][1] for name in sorted(self._kept)]

    def _checkpoints(self) -> list[pathlib.Path]:
        """Files that look like checkpoints, oldest first."""
        return sorted(p for p in (self.path / "checkpoints").glob("*.safetensors") if CHECKPOINT.fullmatch(p.name))

    def latest(
        self,
        into: Any,
        check: Callable[[Mapping[str, Version]], None] = lambda ledger: None,
        recorded: float = math.inf,
    ) -> tuple[int, Any, dict[str, Version], list[str]]:
        """The newest usable checkpoint as (rounds done, state, ledger, problems of newer ones); 0 rounds if there is
        none.

        `check` raises RunError if a client state of the ledger is missing or damaged. Such a checkpoint is not usable,
        nor is one with a round that is not among the `recorded` first ones. If there is no earlier one, this raises
        RunError and the run does not start again: the user may restore the file. An intact checkpoint that is not a
        state of this type also raises: a fallback would lose a good run.
        """
        damaged: list[str] = []
        lost: RunError | None = None
        checkpoint = dataclasses.make_dataclass("Checkpoint", [("state", into), ("ledger", Ledger), ("round", Tensor)])
        for path in reversed(self._checkpoints()):
            round = int(path.name[:6])
            try:
                blob = _verified(path)
            except (OSError, ValueError) as e:
                why = e.strerror if isinstance(e, OSError) else e
                damaged.append(f"checkpoint of round {round} is damaged: {why}")
                continue
            try:
                found = decode(blob, checkpoint, limits=OWN_FILES, pieces=self._pieces(blob))
                if found.round.tolist() != round:
                    damaged.append(f"{path.name} was renamed: it is the checkpoint of round {found.round.tolist()}")
                    continue
                ledger = _unpack(found.ledger)
                if recorded <= round:
                    raise RunError(f"{FILE} has no valid line for round {recorded}")
                check(ledger)
                return round + 1, found.state, ledger, damaged
            except WireError as e:
                raise RunError(
                    f"{self.path} cannot be continued: its checkpoint of round {round} is not a state of this method "
                    f"({e}); resume it with the method and the version it was started with"
                ) from None
            except ValueError as e:
                damaged.append(f"checkpoint of round {round} is incomplete: it needs tensors of another file, and {e}")
            except RunError as e:
                damaged.append(f"checkpoint of round {round} cannot be used: {e}")
                lost = lost or e
        if lost is not None:
            raise RunError(
                f"{self.path} cannot be continued: {lost}, and there is no earlier checkpoint that works without it; "
                f"restore the file, or {self._other} for a new run"
            )
        return 0, None, {}, damaged

    def _pieces(self, blob: bytes) -> dict[int, Tensor]:
        """The tensors of a checkpoint that are in other files. Raises ValueError with the name of a damaged file."""
        wanted: dict[str, dict[int, int]] = {}
        for i, (file, number) in elsewhere_of(blob, OWN_FILES).items():
            wanted.setdefault(file, {})[i] = number
        pieces: dict[int, Tensor] = {}
        for file, numbers in wanted.items():
            if not CHECKPOINT.fullmatch(file):  # otherwise it could be a path to any file
                raise WireError(f"it refers to {file[:80]!r}, which is not the name of a checkpoint")
            here, older = self.path / "checkpoints" / file, self.path / OLDER / file
            path = here if here.exists() else older
            try:
                held = safetensors.torch.load(_verified(path))
            except OSError as e:
                raise ValueError(f"{path} cannot be read: {e.strerror}") from None
            except (ValueError, safetensors.SafetensorError) as e:
                raise ValueError(f"{path} is damaged: {e}") from None
            if missing := [n for n in numbers.values() if str(n) not in held]:
                raise WireError(f"it refers to tensor {missing[0]} of {file}, which does not exist")
            pieces |= {i: held[str(n)] for i, n in numbers.items()}
        return pieces

    def rewind(self, round: int) -> None:
        """Remove what was written in `round` and later: these rounds will be re-run."""
        before = {r.round: r for r in self.records() if r.round < round}  # an incomplete line is dropped
        self._write(FILE, write_records(before.values()))
        for path in self._checkpoints():
            if int(path.name[:6]) >= round:
                _remove(path)
        self._tidy()

    def recorded(self) -> int:
        """The number of rounds with a line in metrics.jsonl, up to the first gap."""
        found = {r.round for r in self.records()}
        return next(t for t in itertools.count() if t not in found)

    def append(self, record: RoundRecord) -> None:
        """Add a round's line to metrics.jsonl."""
        try:
            with open(self.path / FILE, "ab") as f:
                f.write(write_records([record]))
                f.flush()
                os.fsync(f.fileno())
        except OSError as e:
            raise RunError(f"{self.path / FILE} cannot be written: {e.strerror}") from None

    def records(self) -> Iterator[RoundRecord]:
        """The rounds recorded so far, one by one, so that they are not all in memory."""
        try:
            yield from (record for record in each_line(self.path, None) if record is not None)
        except FileNotFoundError:
            return
        except OSError as e:
            raise RunError(f"{self.path / FILE} cannot be read: {e.strerror}") from None


@dataclasses.dataclass(frozen=True)
class Ledger:
    """The version of each client's state, as arrays: 40 bytes and a name for each client that has a state."""

    clients: Tensor  # uint8: their names, one in each line
    steps: Tensor  # int64
    sha256: Tensor  # uint8 [clients, 32]


def _pack(ledger: Mapping[str, Version]) -> Ledger:
    clients = sorted(ledger)  # independent of the order of replies
    hashes = b"".join(bytes.fromhex(ledger[k].sha256) for k in clients)
    return Ledger(
        _as_bytes("\n".join(clients).encode()),
        torch.tensor([ledger[k].step for k in clients], dtype=torch.int64),
        _as_bytes(hashes).reshape(-1, 32),
    )


def _as_bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.zeros(0, dtype=torch.uint8)


def _unpack(ledger: Ledger) -> dict[str, Version]:
    clients = bytes(ledger.clients.numpy()).decode().split("\n") if len(ledger.clients) else []
    hashes = bytes(ledger.sha256.numpy()).hex()
    if not len(clients) == len(ledger.steps) == len(ledger.sha256) == len(hashes) // 64:
        raise WireError(f"a ledger of {len(clients)} clients, {len(ledger.steps)} steps, {len(hashes) // 64} sha256")
    found = enumerate(zip(clients, ledger.steps.tolist(), strict=True))
    return {k: Version(step, hashes[64 * i : 64 * i + 64]) for i, (k, step) in found}


def _about(checkpoint: pathlib.Path) -> tuple[set[str], dict[str, Version]]:
    """The other files that a checkpoint needs, and its ledger; none if it is damaged, because then it is never used."""
    try:
        blob = _verified(checkpoint)
        files = {file for file, _ in elsewhere_of(blob, OWN_FILES).values()}
        return files, _unpack(decode_field(blob, "ledger", Ledger, OWN_FILES))
    except (OSError, ValueError):
        return set(), {}


class _Written:
    """The tensors of a checkpoint, and the files that hold them.

    A tensor is recognised by identity: the same object, not written to since (torch counts writes). Methods reuse the
    unchanged tensors of the old state in the new one, so no values have to be compared. The references are weak.
    """

    def __init__(self) -> None:
        self._places: dict[int, tuple[weakref.ref[Tensor], int, Place]] = {}  # by id: tensor, version, place
        self._bytes: dict[str, int] = {}

    def places(self, tensors: list[Tensor]) -> dict[int, Place]:
        """The places of the tensors that have not changed, by their index in the list."""
        found = {}
        for i, t in enumerate(tensors):
            known, version, place = self._places.get(id(t), (None, 0, ("", 0)))
            if known is not None and known() is t and t._version == version:
                found[i] = place
        return found

    def bytes_in(self, files: set[str]) -> int:
        """The total size of these files."""
        return sum(self._bytes[file] for file in files)

    def note(self, file: str, size: int, tensors: list[Tensor], elsewhere: dict[int, Place]) -> None:
        """Record that a checkpoint was written into `file`, except for the tensors that are `elsewhere`."""
        places = {i: elsewhere.get(i, (file, i)) for i in range(len(tensors))}
        # A tensor made in inference mode has no write counter: it counts as new each time.
        counted = [(i, t) for i, t in enumerate(tensors) if not t.is_inference()]
        self._places = {id(t): (weakref.ref(t), t._version, places[i]) for i, t in counted}
        used = {name for name, _ in places.values()}
        self._bytes = {name: held for name, held in {**self._bytes, file: size}.items() if name in used}


def _code_in(config: str | None, but: str = "") -> dict[str, str]:
    """The paths to code in a configuration (except for the key `but`), with the sha256 of the imported files."""
    named = {} if config is None else paths_in(tomllib.loads(config))
    return {path: sha256_of(path) or "" for path, key in named.items() if key != but}


def _remove(path: pathlib.Path) -> None:
    """Remove a file that is not needed any more."""
    try:
        path.unlink(missing_ok=True)
    except OSError as e:
        raise RunError(f"{path} cannot be removed: {e.strerror}") from None


def _verified(path: pathlib.Path) -> bytes:
    """The content of a file that has its sha256 in its name. Raises ValueError if they differ."""
    content = read_file(path, None)
    if hashlib.sha256(content).hexdigest() != path.name[7:71]:
        raise ValueError("its content does not match the sha256 in its name")
    return content
