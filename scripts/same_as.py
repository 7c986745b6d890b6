"""Compare what this tree does with what another commit does, on this machine: `make same-as REV=...`.

A case is a configuration and some commands on it; the cases are in same_as_cases.toml. Each commit runs them with its
own code: digests, metrics lines, result files, `--json` outputs and exit codes are kept in build/same-as, by the hash
of the commit's `src` and of the case, and are not made again. Differences that are meant are in same_as_meant.toml.

Only the command line and configuration files are used, so that a commit may move its modules as it likes. Where it
renames a setting, the cases file gives the new spelling: it is used if the code refuses the old one.
"""

import argparse
import collections
import contextlib
import fnmatch
import hashlib
import importlib
import importlib.metadata
import io
import json
import os
import pathlib
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

HERE = pathlib.Path(__file__).resolve()
CASES, MEANT = HERE.with_name("same_as_cases.toml"), HERE.with_name("same_as_meant.toml")
ROOT = HERE.parent.parent
FORMAT = 1  # of a record; another number makes all anew
SECONDS = 240  # a command that takes longer is killed, and its record says so
RUN = ["run", "case.toml", "--out", "out", "--json"]
DROPPED = {"seconds", "cpu_s", "environment", "solera"}  # times and versions
DROPPED |= {"proof", "sha256"}  # signed with a key of this user; safetensors writes a file's metadata in any order
TIME = re.compile(r"\d+(\.\d+)? ?(s|ms|min|seconds?|minutes?)\b")
CHOICES, NUMBER = re.compile(r"expected one of ('[^']*'(?:, '[^']*')*)"), (int, float)

Json = Any
Settings = dict[str, Any]


# ---- cases ------------------------------------------------------------------------------------------


def flat(table: dict[str, Any], before: str = "") -> Settings:
    """The settings of nested tables, by dotted key."""
    found: Settings = {}
    for key, value in table.items():
        found |= flat(value, f"{before}{key}.") if isinstance(value, dict) else {before + key: value}
    return found


def toml(settings: Settings) -> str:
    """A configuration file with these settings."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())


def respelled(settings: Settings, rules: Iterable[dict[str, Any]]) -> Settings:
    """The settings under their new names."""
    found: Settings = {}
    for key, value in settings.items():
        for rule in rules:
            old, star, _ = rule["old"].partition("*")
            fits = key.startswith(old) if star else key == old
            if fits and settings.get("method.name") in rule.get("of", [settings.get("method.name")]):
                new = rule.get("values", {}).get(str(value).lower(), value)
                found[rule["new"].replace("*", key.removeprefix(old))] = new
                found |= flat(rule.get("with", {}))
                break
        else:
            found[key] = value
    return found


def case(name: str, settings: Settings | None = None, *steps: list[str], **more: Any) -> dict[str, Any]:
    """One case. Its kind is its name's first word; its steps are commands, by default one run."""
    if settings is not None:
        settings = {k: v for k, v in settings.items() if v != "leave-out" and not k.startswith("kinds.")}
    return {"name": name, "settings": settings, "steps": list(steps) or [RUN], **more}


def probe(name: str, settings: Settings, key: str) -> dict[str, Any]:
    """The case that asks which values a key takes: an impossible one is refused with the list."""
    return case(f"probe {name} {key}", {**settings, key: "no-such-value"}, ["run", "case.toml", "--dry-run", "--json"])


class Plan:
    """All cases of a commit, from the cases file and from that commit's own listing of methods."""

    def __init__(self, told: dict[str, Any], methods: list[dict[str, Any]]):
        self.told, self.methods = told, {m["name"]: m["settings"] for m in methods}
        self.like = {  # the subkeys of tables that many methods have, by how the cases file calls them
            name: self.tables(self.methods[of])[table] for name, (of, table) in told["shared"].items()
        }

    @staticmethod
    def tables(listing: Settings) -> dict[str, frozenset[str]]:
        """The tables of a method's settings, with their subkeys."""
        found = collections.defaultdict(set)
        for key in listing:
            table, _, sub = key.rpartition(".")
            found[table].add(sub)
        return {table: frozenset(subs) for table, subs in found.items()}

    def shared(self, name: str) -> dict[str, str]:
        """The tables of a method that many have, with the cases file's name of them."""
        alike = {subs: like for like, subs in self.like.items()}
        return {table: alike[subs] for table, subs in self.tables(self.methods[name]).items() if subs in alike}

    def base(self, name: str, kind: str = "mixed") -> Settings:
        """The toy configuration of a method: little of everything, so that a run takes a second."""
        own = self.told["method"].get(name, {})
        settings = flat(self.told["base"]["points"]) | {"method.name": name}
        settings |= flat(self.told["base"][own["base"]]) if "base" in own else {}
        settings["models.clients"] = own.get(kind) or self.told["base"][own.get("base", "points")]["kinds"][kind]
        for table in self.shared(name):
            for sub, value in self.told["less"].items():
                if sub == "epochs" and self.methods[name].get(f"{table}.steps") is not None:
                    continue  # training uses one of them
                if self.methods[name].get(f"{table}.{sub}") is not None:
                    settings[f"{table}.{sub}"] = value
        return settings | flat(own.get("set", {}))

    def options(self, name: str) -> Iterator[tuple[str, Settings]]:
        """The settings of a method that are tried one by one: key and default."""
        shared, settings = self.shared(name), self.base(name)
        for key, default in self.methods[name].items():
            table = key.rpartition(".")[0]
            if table in shared and [name, table] != self.told["shared"][shared[table]]:
                continue  # tried in full where the cases file says, and bundled here
            if key not in settings or isinstance(default, bool | str):
                yield key, default

    def hinted(self, name: str, key: str) -> list[Any] | None:
        return next((v for k, v in self.told["values"].items() if fnmatch.fnmatch(f"{name} {key}", k)), None)

    def probes(self) -> list[dict[str, Any]]:
        return [
            probe(name, self.base(name), key)
            for name in self.methods
            for key, default in self.options(name)
            if (default is None or isinstance(default, str)) and self.hinted(name, key) is None
        ]

    def values(self, name: str, key: str, default: Any, refusal: str) -> list[Any]:
        """Other values of an option: from the cases file, its type, or the error about an impossible one."""
        if (hint := self.hinted(name, key)) is not None:
            return hint
        if isinstance(default, bool):
            return [not default]
        if isinstance(default, int):
            return [default - 1 if default > 1 else default + 1]
        if isinstance(default, float):
            return [default / 2 or 0.5]
        if isinstance(default, list):
            return [default[:-1]] if len(default) > 1 else []
        if chosen := CHOICES.search(refusal):
            return [v for v in re.findall("'([^']*)'", chosen[1]) if v != default]
        if default is None:
            return [[2, 1]] if "list of" in refusal else [2] if "integer" in refusal else [0.5]
        return []

    def cases(self, refusals: dict[str, str], recipes: Iterable[str]) -> list[dict[str, Any]]:
        """All of them."""
        told, found = self.told, []
        for name in self.methods:
            mixed = self.base(name)
            found += [
                case(f"plain {name}", self.base(name, "plain")),
                case(f"mixed {name}", mixed),
                case(f"dry {name}", mixed, ["run", "case.toml", "--dry-run", "--json"]),
                case(f"workers {name}", mixed | {"engine.name": "processes", "engine.workers": 2}),
                case(f"resumed {name}", mixed, RUN, ["resume", "out", "--trust-code", "--json"], kill=2),
            ]
            own = told["method"].get(name, {})
            images = flat(told["base"]["images"]) | {"models.clients": own.get("augmented") or told["augmented"]}
            found.append(case(f"augmented {name}", mixed | images | flat(own.get("set", {})) | flat(told["augment"])))
            sites = {k: v for k, v in mixed.items() if k.split(".")[0] not in ("partition", "models", "data")}
            found.append(case(f"sites {name}", sites | flat(told["sites"]) | flat(own.get("sites", {}))))
            for key, default in self.options(name):
                for value in self.values(name, key, default, refusals.get(f"probe {name} {key}", "")):
                    also: Settings = {}
                    for pattern, other in told["with"].items():
                        if fnmatch.fnmatch(f"{name} {key}", pattern):
                            also |= flat(other)
                    also = {k: v for k, v in also.items() if k in self.methods[name] or not k.startswith("method.")}
                    found.append(case(f"option {name} {key}={json.dumps(value)}", mixed | also | {key: value}))
            for table, like in self.shared(name).items():
                for i, bundle in enumerate(told["bundles"][like]):
                    settings = {f"{table}.{k}": v for k, v in bundle.items()}
                    found.append(case(f"option {name} {table} bundle {i}", mixed | settings))
        for one in told["case"]:
            settings, more = None, {k: one[k] for k in ("new", "runs", "kill") if k in one}
            if "base" in one:
                settings = flat(told["base"][one["base"]]) | {
                    "models.clients": told["base"][one["base"]]["kinds"]["mixed"]
                }
                settings |= flat(one.get("set", {}))
            found.append(case(one["name"], settings, *(line.split() for line in one.get("steps", [])), **more))
        found += [case(f"recipe {name}", None, ["run", name, "--dry-run", "--json"]) for name in recipes]
        return found


# ---- recording --------------------------------------------------------------------------------------


def plainly(value: Json, places: dict[str, str]) -> Json:
    """A value without times, versions and the paths of this machine."""
    if isinstance(value, dict):
        dropped = DROPPED | {"start", "end"} if value.get("kind") == "timeline" else DROPPED
        return {plainly(k, places): plainly(v, places) for k, v in value.items() if k not in dropped}
    if isinstance(value, list):
        return [plainly(v, places) for v in value]
    if isinstance(value, str):
        for path, name in places.items():
            value = value.replace(path, name)
        return TIME.sub("TIME", value)
    return value


def file_record(path: pathlib.Path, places: dict[str, str]) -> Json:
    """The content of a file of a run directory, or the hash of it."""
    if path.suffix == ".json":
        return plainly(json.loads(path.read_text()), places)
    if path.suffix == ".jsonl":
        return [plainly(json.loads(line), places) for line in path.read_text().splitlines()]
    if path.suffix == ".toml":
        return plainly(flat(tomllib.loads(path.read_text())), places)
    data = path.read_bytes()
    if path.suffix == ".safetensors":  # without the metadata, which name the version
        size = int.from_bytes(data[:8], "little")
        head = json.loads(data[8 : 8 + size])
        head.pop("__metadata__", None)
        data = json.dumps(head).encode() + data[8 + size :]
    return hashlib.sha256(data).hexdigest()


def run_record(out: pathlib.Path, places: dict[str, str]) -> Json:
    """All that a run left in its directory, by file. The names of checkpoints tell their content, too."""
    found: dict[str, Json] = {}
    for path in sorted(p for p in out.rglob("*") if p.is_file() and p.name not in (".lock", "report.html")):
        name, record = str(path.relative_to(out)), file_record(path, places)
        found[name] = record
    return found


def output_record(text: str, places: dict[str, str]) -> Json:
    """What a command printed: JSON as such, other text as lines."""
    with contextlib.suppress(ValueError):
        return plainly(json.loads(text), places)
    return plainly(text, places).splitlines()


def die_after(lines: int, out: pathlib.Path) -> None:
    """Kill this process, as by `kill -9`, when it next touches the run directory after so many metrics lines."""
    looking = False

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal looking
        if looking or event not in ("open", "os.rename") or not isinstance(args[0], str | os.PathLike):
            return
        if not os.path.abspath(args[0]).startswith(str(out)):
            return
        looking = True
        with contextlib.suppress(OSError):
            if (out / "metrics.jsonl").read_text().count("\n") >= lines:
                os.kill(os.getpid(), signal.SIGKILL)
        looking = False

    sys.addaudithook(hook)


def command(main: Callable[[], Any], argv: list[str], folder: pathlib.Path, kill: int = 0) -> tuple[int, str, str]:
    """Run the program in a fork of this process: exit code (below 0: the signal), output, errors."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = os.fork()
        if pid == 0:
            code: Any = 1
            try:
                os.setsid()
                os.chdir(folder)
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                sys.stdout, sys.stderr = streams = [os.fdopen(fd, "w", closefd=False) for fd in (1, 2)]
                sys.argv = ["solera", *argv]
                signal.alarm(SECONDS)
                if kill:
                    die_after(kill, folder / "out")
                main()
                code = 0
            except SystemExit as e:
                code = e.code if isinstance(e.code, int) else int(e.code is not None)
            except BaseException:
                traceback.print_exc()
            finally:
                with contextlib.suppress(BaseException):
                    for stream in (sys.stdout, *streams):
                        stream.flush()
                os._exit(code)
        try:
            status = os.waitpid(pid, 0)[1]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # its workers, or all of it if this process is interrupted
        texts = [(f.seek(0), f.read().decode(errors="replace"))[1] for f in (out, err)]
        return os.waitstatus_to_exitcode(status), *texts


def record_case(main: Callable[[], Any], one: dict[str, Any], work: pathlib.Path, tree: pathlib.Path) -> Json:
    """Run one case: of its spellings, the first that is accepted."""
    spellings = [one["settings"], *one["spellings"]]
    first: Json = None
    for number, settings in enumerate(spellings):
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        for name, text in one["files"].items():
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            (work / name).write_text(text)
        if settings is not None:
            (work / "case.toml").write_text(toml(settings))
        places = {str(work): "WORK", str(tree): "TREE"}
        record: dict[str, Json] = {"steps": {}, "runs": {}}
        for i, argv in enumerate(one["steps"]):
            code, out, err = command(main, argv, work, one.get("kill", 0) if i == 0 else 0)
            step: dict[str, Json] = {"exit": code}
            if code >= 0:
                step["output"] = output_record(out, places)
            if code not in (0, -9):
                step["error"] = [line for line in output_record(err, places) if re.search(r"\w", line)][-1:]
            record["steps"][" ".join(argv)] = step
            if i == 0 and code == 2 and settings is not None:
                break
        for out in one.get("runs", ["out"]):
            if (work / out).is_dir():
                record["runs"][out] = run_record(work / out, places)
        if next(iter(record["steps"].values()))["exit"] != 2:
            return {**record, "spelling": number}
        first = first or {**record, "spelling": 0}
    return first


def zygote(tree: pathlib.Path, folder: pathlib.Path, jobs: int) -> None:
    """Record the cases on stdin with this tree's code, `jobs` at a time, each in forks of this process.

    Modules are imported here once, and nothing is run here: a fork begins as clean as a new process, at once.
    """
    module, function = tomllib.loads((tree / "pyproject.toml").read_text())["project"]["scripts"]["solera"].split(":")
    main = getattr(importlib.import_module(module), function)
    where = pathlib.Path(sys.modules["solera"].__file__ or "").resolve()
    if tree / "src" not in where.parents:
        raise SystemExit(f"same_as: solera is imported from {where}, not from {tree}")
    cases = json.load(sys.stdin)
    work = folder.parent / "work"  # the same for all commits

    def warm() -> None:
        try:
            main()
        finally:
            (folder / "modules").write_text("\n".join(sys.modules))

    (folder / "modules").unlink(missing_ok=True)
    (folder / "warm").mkdir(exist_ok=True)
    settings = {"data.name": "toy-2d", "models.clients": ["mlp"], "method.name": "feddf", "run.rounds": 1}
    settings |= {"public.size": 8, "method.fusion.steps": 1, "engine.name": "inprocess"}
    (folder / "warm" / "case.toml").write_text(toml(settings))
    command(warm, ["run", "case.toml", "--out", "out"], folder / "warm")
    shutil.rmtree(folder / "warm")
    for name in (folder / "modules").read_text().splitlines():
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    running: dict[int, str] = {}

    def wait() -> None:
        pid, status = os.wait()
        name = running.pop(pid)
        if status:
            print(f"same_as: {name}: the recording failed", file=sys.stderr)

    for done, one in enumerate(cases):
        while len(running) >= jobs:
            wait()
        if done % 100 == 0 or done + 1 == len(cases):
            print(f"same_as: {done + 1} of {len(cases)}", file=sys.stderr, flush=True)
        if pid := os.fork():
            running[pid] = one["name"]
            continue
        code = 1
        try:
            place = work / one["key"]
            record = record_case(main, one, place, tree)
            record |= {
                "name": one["name"],
                "spellings": digest(one["spellings"]),
                "cpu": round(sum(os.times()[:4]), 2),
            }
            part = folder / f"{one['key']}.part"
            part.write_text(json.dumps(record))
            part.replace(folder / f"{one['key']}.json")
            shutil.rmtree(place, ignore_errors=True)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    while running:
        wait()


class Recorder:
    """The records of one commit, or of the tree as it is."""

    def __init__(self, rev: str | None, told: dict[str, Any], jobs: int):
        self.told, self.jobs = told, jobs
        self.name = rev or "this tree"
        if rev is None:  # hashed as git would, so that a commit of it finds the same records
            with tempfile.TemporaryDirectory() as index:
                env = {**os.environ, "GIT_INDEX_FILE": f"{index}/index"}
                git("read-tree", "HEAD", env=env)
                git("add", "--all", "src", env=env)
                tree = git("write-tree", env=env)
            key, self.tree = git("rev-parse", f"{tree}:src"), ROOT
        else:
            key = git("rev-parse", "--verify", f"{rev}:src")
            self.tree = (ROOT / "build" / "same-as").resolve() / "trees" / key[:16]
        with contextlib.suppress(OSError):
            processor = [
                x for x in pathlib.Path("/proc/cpuinfo").read_text().split("\n") if x[:5] in ("model", "flags")
            ]
        machine = [platform.machine(), sys.version, importlib.metadata.version("torch"), sorted(set(processor))]
        machine += [os.environ.get("SOLERA_DATA", "")]
        self.folder = (ROOT / "build" / "same-as").resolve() / f"{key[:16]}-{digest([machine, FORMAT])[:8]}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.rev, self.took = rev, 0.0

    def record(self, cases: list[dict[str, Any]]) -> dict[str, Json]:
        """The record of each case, by name; those that are not there are made."""
        whole = []
        for one in cases:
            settings, spellings = one["settings"], [flat(one["new"])] if "new" in one else []
            if settings is not None and (other := respelled(settings, self.told["respelled"])) != settings:
                spellings.append(other)
            files = {n: text for n, text in self.told["files"].items() if n in json.dumps([settings, one["steps"]])}
            one = {**one, "spellings": spellings, "files": files}
            whole.append({**one, "key": digest({k: v for k, v in one.items() if k != "spellings"})[:20]})
        missing = [one for one in whole if not self.usable(one)]
        if missing:
            if self.rev is not None and not self.tree.exists():
                data = git("archive", self.rev, "src", "pyproject.toml", text=False)
                with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                    archive.extractall(self.tree, filter="data")
            begun = time.monotonic()
            kept = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG", "SOLERA_DATA", "TMPDIR")}
            given = {"PYTHONPATH": str(self.tree / "src"), "XDG_STATE_HOME": str(self.folder / "state")}
            given |= {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
            given |= {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb", "HF_HUB_OFFLINE": "1"}
            words = [sys.executable, str(HERE), "--zygote", str(self.tree), str(self.folder), "--jobs", str(self.jobs)]
            subprocess.run(words, input=json.dumps(missing), text=True, env=kept | given, cwd=ROOT, check=True)  # noqa: S603
            self.took += time.monotonic() - begun
            if lost := [one["name"] for one in missing if not self.usable(one)]:
                raise SystemExit(f"same_as: {self.name}: no record of {', '.join(lost[:5])}; see above")
        return {one["name"]: json.loads((self.folder / f"{one['key']}.json").read_text()) for one in whole}

    def usable(self, one: dict[str, Any]) -> bool:
        """Whether there is a record. One that the first spelling's refusal ended is made again for other spellings."""
        with contextlib.suppress(OSError):
            record = json.loads((self.folder / f"{one['key']}.json").read_text())
            refused = next(iter(record["steps"].values()))["exit"] == 2 or record["spelling"]
            return not refused or record.get("spellings") == digest(one["spellings"])
        return False

    def listing(self, what: str) -> list[dict[str, Any]]:
        argv = ["ls", what, "--json"]
        step = self.record([case(f"cli ls {what}", None, argv)])[f"cli ls {what}"]["steps"][" ".join(argv)]
        if step["exit"]:
            raise SystemExit(f"same_as: {self.name}: solera {' '.join(argv)} ended with {step}")
        return step["output"]


def git(*words: str, text: bool = True, env: dict[str, str] | None = None) -> Any:
    """What git answers."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=text, env=env)  # noqa: S603, S607
    if done.returncode:
        raise SystemExit(f"same_as: git {' '.join(words)}: {str(done.stderr).strip()}")
    return done.stdout.strip() if text else done.stdout


def digest(value: Json) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


# ---- comparing --------------------------------------------------------------------------------------


def differences(a: Json, b: Json, key: str = "") -> Iterator[tuple[str, Json, Json]]:
    """Every place where two records differ: key, and both values (None: not there)."""
    if isinstance(a, dict) and isinstance(b, dict):
        if list(a) != list(b) and set(a) == set(b):
            yield f"{key}(order)", list(a), list(b)
        for k in [*a, *(k for k in b if k not in a)]:
            yield from differences(a.get(k), b.get(k), f"{key}.{k}" if key else k)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from differences(x, y, f"{key}.{i}")
    elif type(a) is not type(b) or a != b:
        yield key, a, b


def compare(here: dict[str, Json], there: dict[str, Json], meant: list[dict[str, str]]) -> list[tuple[str, str, Json]]:
    """Each case with its verdict: same, different, meant, only here, only there; and what there is to say about it."""
    found: list[tuple[str, str, Json]] = []
    for name in [*here, *(n for n in there if n not in here)]:
        entries = [m for m in meant if fnmatch.fnmatchcase(name, m.get("case", "*"))]
        if name not in here or name not in there:
            verdict = "only here" if name in here else "only there"
            reason = next((m["reason"] for m in entries if "key" not in m), None)
            found.append((name, "meant" if reason else verdict, reason))
            continue
        a, b = ({k: r[k] for k in ("steps", "runs")} for r in (there[name], here[name]))
        reasons, open_ones = [], []
        for key, x, y in differences(a, b):
            reason = next((m["reason"] for m in entries if fnmatch.fnmatchcase(key, m.get("key", "*"))), None)
            reasons.append(reason) if reason else open_ones.append((key, x, y))
        if open_ones:
            found.append((name, "different", (*open_ones[0], len(open_ones))))
        else:
            found.append((name, "meant" if reasons else "same", reasons[0] if reasons else None))
    return found


def told_table(found: list[tuple[str, str, Json]], limit: int) -> str:
    """The verdicts as text: a table by kind, then the cases that are not the same."""
    verdicts = ["same", "different", "meant", "only here", "only there"]
    counts = collections.Counter((name.split()[0], verdict) for name, verdict, _ in found)
    kinds = list(dict.fromkeys(name.split()[0] for name, _, _ in found))
    lines = ["".join(f"{x:>12}" for x in ["", *verdicts])]
    lines += ["".join(f"{x:>12}" for x in [kind, *(counts[kind, v] or "-" for v in verdicts)]) for kind in kinds]
    shown: collections.Counter[tuple[str, str]] = collections.Counter()
    for name, verdict, about in found:
        if verdict == "same":
            continue
        shown[name.split()[0], verdict] += 1
        if shown[name.split()[0], verdict] > limit:
            continue
        lines.append(f"{verdict}: {name}" + (f" ({about})" if verdict == "meant" else ""))
        if verdict == "different":
            key, x, y, more = about
            x, y = (s if len(s) <= 160 else s[:160] + " ..." for s in (json.dumps(x), json.dumps(y)))
            lines.append(f"    {key}: {x} -> {y}" + (f" (and {more - 1} more)" if more > 1 else ""))
    hidden = sum(max(0, n - limit) for n in shown.values())
    return "\n".join(lines + ([f"... and {hidden} more; --all shows them"] if hidden else []))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("rev", nargs="?", help="the commit to compare with")
    parser.add_argument("other", nargs="?", help="another commit, instead of this tree")
    parser.add_argument("--only", default="*", help="only cases like this, e.g. 'option feddf *'")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="cases at a time")
    parser.add_argument("--all", action="store_true", help="list all differences, not only five of each kind")
    parser.add_argument("--count", action="store_true", help="count the cases instead of running them")
    parser.add_argument("--zygote", nargs=2, type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.zygote:
        zygote(*args.zygote, args.jobs)
        return 0
    if not args.rev:
        parser.error("which commit? make same-as REV=...")
    told, meant = tomllib.loads(CASES.read_text()), tomllib.loads(MEANT.read_text()).get("meant", [])
    there, here = (Recorder(rev, told, args.jobs) for rev in (args.rev, args.other))
    plan = Plan(told, there.listing("methods"))
    refusals = {
        name: " ".join(line for step in record["steps"].values() for line in step.get("error", []))
        for name, record in there.record(plan.probes()).items()
    }
    wanted = [c for c in plan.cases(refusals, []) if fnmatch.fnmatch(c["name"], args.only)]
    if args.count:
        print(
            *(f"{n:6} {kind}" for kind, n in collections.Counter(c["name"].split()[0] for c in wanted).items()),
            sep="\n",
        )
        return 0
    records = []
    for recorder in (there, here):
        recipes = plan.cases({}, [r["name"] for r in recorder.listing("recipes")])
        mine = [c for c in recipes if c["name"].startswith("recipe ") and fnmatch.fnmatch(c["name"], args.only)]
        records.append(recorder.record(wanted + mine))
        print(f"{recorder.name}: {len(records[-1])} cases, {recorder.took:.0f} s to record", flush=True)
    found = compare(records[1], records[0], meant)
    print(told_table(found, 10**9 if args.all else 5))
    return int(any(verdict not in ("same", "meant") for _, verdict, _ in found))


if __name__ == "__main__":
    sys.exit(main())
