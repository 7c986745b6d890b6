"""A mutation tester: change the source in one place, run the tests of that file, and check whether they fail.

    python scripts/mutants.py                        all files, 25 mutants each; about two hours on two cores
    python scripts/mutants.py --per-file 6 parts     a small sample of the files whose path holds "parts"
    python scripts/mutants.py --minutes 20           as many as fit, evenly over the files
    python scripts/mutants.py --again                only what survived before: after new tests were written

`--seed` determines the mutants of each file, so two versions are compared on the same sample. Results are appended to
`--results`; a second call continues where the first one ended. A survivor that cannot be killed (it behaves the same,
or is only slower) has its reason in benchmarks/results/mutants.json. Exit code 1: a survivor has no reason.

The work tree is never changed: torch and pytest are loaded once, and each mutant is a fork that compiles the changed
source and gives it to every importer of the module. (Considered: cosmic-ray rewrites the file and starts an interpreter
for each mutant, so it imports torch for seconds before a test of one second; mutmut changes only function bodies, not
the defaults of a dataclass. Neither draws a fixed number from each file and tests it with that file's own tests.)
"""

import argparse
import ast
import collections
import contextlib
import dataclasses
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE, TESTS = ROOT / "src", ROOT / "tests" / "unit"
REASONS = ROOT / "benchmarks" / "results" / "mutants.json"
MEMORY = 6 * 2**30  # bytes a mutant may use
TARGETS = (
    "train/*.py",
    "methods/{feddf,fedet,fusionlarge}.py",
    "methods/{hierarchical,decentralised}.py",
    "methods/{fedeed,mnfl,mnflparam}.py",
    "methods/framework/*.py",
    "methods/steps/*.py",
    "core/federation.py",
    "scenario/scenario.py",
    "data/partition.py",
)
FRAMEWORK = ("methods/test_framework.py",)
ALGORITHM_1 = ("cohort", "grouping", "algorithm", "slots")  # of the framework, beside its trainers
ABSENT = ("methods/test_some_absent.py",)  # clients, groups and architectures that are
EVERYWHERE = ("test_defaults.py",)
OWN = {  # tests beside those named after the file: test_NAME.py and test_NAME_*.py are found
    "train/generators.py": ("methods/test_fedftg.py", "methods/test_fedgen.py"),
    "methods/fedftg.py": ("train/test_generators.py",),
    "methods/fedgen.py": ("train/test_generators.py",),
    "runs/measure.py": ("train/test_diversity.py",),
    "train/robust.py": ("train/test_filtered_mean.py",),
    "train/consensus.py": ("train/test_agreement.py",),
    "train/similarity.py": ABSENT,
    "methods/steps/coefficients.py": ("methods/test_mnfl.py", "methods/test_mnfl_by_hand.py", *ABSENT),
    "methods/steps/predictions.py": ("methods/test_mnfl.py", "methods/test_fedmd.py", "methods/test_dsfl.py"),
    "methods/steps/teaching.py": ("methods/test_drawn_twice.py", "methods/test_feddf_extensions.py"),
    "methods/mnfl.py": ABSENT,
    "methods/mnflparam.py": ("methods/test_mnfl.py",),
    "methods/hierarchical.py": ABSENT,
    "scenario/scenario.py": (
        "data/test_public.py",
        "data/test_sources.py",
        "data/test_generator.py",
        "methods/test_fedet.py",
    ),
    "methods/fedeed.py": FRAMEWORK,
    **{f"methods/framework/{name}.py": FRAMEWORK for name in ALGORITHM_1},
    "methods/framework/local_trainers.py": FRAMEWORK,
    "methods/framework/ensemble_trainers.py": (*FRAMEWORK, "methods/test_drawn_twice.py"),
    "methods/framework/global_trainers.py": (*FRAMEWORK, *ABSENT),
}

# ---- what can be changed ------------------------------------------------------------------------------------

OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
COMPARISONS: dict[type, tuple[type, ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
PAIRS = [("min", "max"), ("any", "all"), ("argmin", "argmax"), ("zeros", "ones"), ("zeros_like", "ones_like")]
PAIRS += [("floor", "ceil"), ("softmax", "log_softmax"), ("amin", "amax"), ("eval", "train"), ("new_zeros", "new_ones")]
FUNCTIONS = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])} | {"clip_grad_norm_": "clip_grad_value_"}
UNWRAPPED = {"detach", "clone", "abs", "clamp", "clamp_min", "sqrt", "exp", "log", "double", "square", "flip"}
COMMUTING = {"max", "min", "isinstance", "issubclass", "getattr", "hasattr", "equal", "allclose", "cast"}
TALK = {"log", "logger", "warnings", "print", "Info"}  # calls that only say something


@dataclasses.dataclass(frozen=True)
class Site:
    """A place that can be changed, and how."""

    kind: str
    scope: str  # the function or class it is in
    statement: ast.stmt
    change: Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of one file; its id stays when other lines of the file change."""

    id: str
    file: str  # below src/solera
    index: int  # among the sites of the file
    kind: str
    scope: str
    line: int
    was: str
    now: str

    def in_words(self) -> str:
        """Where it is, and the change."""
        return f"{self.id} {self.file}:{self.line} {self.scope} ({self.kind})\n  - {self.was}\n  + {self.now}"


def sites(tree: ast.Module) -> list[Site]:
    """Everything that can be changed, in the order of the source."""
    found: list[Site] = []
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.BinOp | ast.Subscript):
            continue  # a name for a type
        _walk(statement, lambda new, s=statement: _replace(tree.body, s, new), "", statement, found)
    return found


def _replace(body: list[Any], old: Any, new: Any) -> None:
    body[next(i for i, node in enumerate(body) if node is old)] = new


def _called(node: ast.AST) -> list[str]:
    """`log.info(...)` -> ["log", "info"], for what is called by name."""
    names = []
    node = node.func if isinstance(node, ast.Call) else node
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [*names, node.id][::-1] if isinstance(node, ast.Name) else names[::-1]


def _only_talks(node: ast.AST) -> bool:
    """Whether to skip a node: messages, checks that only refuse, types and documentation."""
    if isinstance(node, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr):
        return True
    if isinstance(node, ast.keyword) and node.arg in ("strict", "reason"):
        return True
    if isinstance(node, ast.Expr):
        value = node.value
        if isinstance(value, ast.Constant) or (isinstance(value, ast.Yield) and isinstance(value.value, ast.JoinedStr)):
            return True
        node = value
    if isinstance(node, ast.If) and not node.orelse:
        return all(_only_talks(statement) for statement in node.body)
    if isinstance(node, ast.Call) and (names := _called(node)):
        return names[0] in TALK or names[-1].startswith(("check", "_check"))
    return isinstance(node, ast.FunctionDef) and node.name.startswith(("check", "_check", "__repr__"))


def _walk(node: ast.AST, put: Callable[[Any], None], scope: str, statement: ast.stmt, found: list[Site]) -> None:
    if _only_talks(node):
        return
    if isinstance(node, ast.stmt):
        statement = node
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        scope = f"{scope}.{node.name}".lstrip(".")
    found += [Site(kind, scope, statement, change) for kind, change in _changes(node, put)]
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "type_params", "op", "ops", "ctx"):
            continue
        if isinstance(value, list):
            for child in value:
                if isinstance(child, ast.AST):
                    _walk(child, lambda new, v=value, c=child: _replace(v, c, new), scope, statement, found)
        elif isinstance(value, ast.AST):
            _walk(value, lambda new, n=node, f=name: setattr(n, f, new), scope, statement, found)


def _changes(node: Any, put: Callable[[Any], None]) -> Iterator[tuple[str, Callable[[], None]]]:
    """The changes of this node itself, each by its kind."""
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "flip", lambda: put(ast.Constant(not node.value))
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        others = {0: (1,), 1: (0, 2)}.get(node.value, (node.value + 1, node.value - 1))
        for other in others:
            yield "constant", lambda other=other: put(ast.Constant(other))
    elif isinstance(node, ast.Constant) and isinstance(node.value, float):
        yield "constant", lambda: put(ast.Constant(node.value * 2 or 1.0))
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in OPERATORS:
        sides = [] if isinstance(node, ast.AugAssign) else [node.left, node.right]
        if not any(isinstance(s, ast.JoinedStr | ast.List) or _is_text(s) for s in sides):
            yield "operator", lambda: setattr(node, "op", OPERATORS[type(node.op)]())
    elif isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            for other in COMPARISONS[type(op)]:
                yield "comparison", lambda i=i, other=other: node.ops.__setitem__(i, other())
    elif isinstance(node, ast.BoolOp):
        yield "logic", lambda: setattr(node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield "sign", lambda: put(node.operand)
    elif isinstance(node, ast.IfExp) and not isinstance(node.test, ast.Compare | ast.UnaryOp):
        yield "logic", lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.comprehension) and node.ifs:
        yield "filter", lambda: node.ifs.clear()
    elif isinstance(node, ast.Call):
        yield from _call_changes(node, put)
    if isinstance(node, ast.If | ast.While) and not isinstance(node.test, ast.Compare | ast.UnaryOp):
        yield "logic", lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.For) and not isinstance(node.body[-1], ast.Return | ast.Break | ast.Raise):
        yield "loop", lambda: node.body.append(ast.Break())
    elif isinstance(node, ast.Continue | ast.Break):
        yield "loop", lambda: put(ast.Pass())
    elif _can_go(node):
        yield "drop", lambda: put(ast.Pass())


def _can_go(node: ast.AST) -> bool:
    """Statements without which the rest still has all its names."""
    if isinstance(node, ast.Assign):
        return not any(isinstance(target, ast.Name | ast.Tuple) for target in node.targets)
    return isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _call_changes(node: ast.Call, put: Callable[[Any], None]) -> Iterator[tuple[str, Callable[[], None]]]:
    name = (_called(node) or [""])[-1]
    method = isinstance(node.func, ast.Attribute)
    if method and name in ("sum", "mean"):
        yield "function", lambda: setattr(node.func, "attr", "mean" if name == "sum" else "sum")
    elif not method and name == "sum":
        yield "function", lambda: setattr(node.func, "id", "max")
    elif name in FUNCTIONS:
        yield "function", lambda: setattr(node.func, "attr" if method else "id", FUNCTIONS[name])
    elif isinstance(node.func, ast.Attribute) and name in UNWRAPPED:
        value = node.func.value
        inner = node.args[0] if isinstance(value, ast.Name) and value.id in ("torch", "math") and node.args else value
        yield "function", lambda: put(inner)
    elif name == "sorted" and node.args:
        yield "function", lambda: put(ast.Call(ast.Name("list", ast.Load()), node.args[:1], []))
    plain = [a for a in node.args if not isinstance(a, ast.Starred)]
    if len(plain) == len(node.args) > 1 and name not in COMMUTING and ast.dump(plain[0]) != ast.dump(plain[1]):
        yield "arguments", lambda: node.args.__setitem__(slice(0, 2), node.args[1::-1])
    for keyword in node.keywords:
        if keyword.arg is not None and not _only_talks(keyword) and not isinstance(keyword.value, ast.JoinedStr):
            yield "arguments", lambda keyword=keyword: node.keywords.remove(keyword)


def _shown(statement: ast.stmt) -> str:
    """A statement in one line, without what it contains."""
    whole = ast.unparse(ast.fix_missing_locations(statement))
    return whole if not hasattr(statement, "body") else whole.split("\n", 1)[0]


def places(file: str, text: str) -> list[tuple[str, int]]:
    """The id of each place of a source text that can be changed, and its index among them."""
    found, seen = [], collections.Counter[tuple[str, ...]]()
    for index, site in enumerate(sites(ast.parse(text))):
        key = (Path(file).stem, site.kind, site.scope, _shown(site.statement))
        seen[key] += 1
        found.append((hashlib.sha256("\0".join([*key, str(seen[key])]).encode()).hexdigest()[:10], index))
    return found


def mutant_at(file: str, text: str, name: str, index: int) -> Mutant:
    """The mutant with that index, in words."""
    site = sites(ast.parse(text))[index]
    was, line = _shown(site.statement), site.statement.lineno
    site.change()
    now = "pass" if site.kind == "drop" else _shown(site.statement)
    if now == was:  # the change is in what the statement contains
        now += "  # once" if isinstance(site.statement, ast.For) else "  # dropped"
    return Mutant(name, file, index, site.kind, site.scope, line, was, now)


def sample(file: str, number: int, seed: int) -> list[Mutant]:
    """This many mutants of a file, taking the kinds in turn.

    A larger number only adds some, and so does a change of other lines: the order is that of the hashes of the ids.
    """
    text = (SOURCE / "solera" / file).read_text(encoding="utf-8")
    kinds = [site.kind for site in sites(ast.parse(text))]
    left: dict[str, list[tuple[str, int]]] = {}
    found = places(file, text)
    for name, index in sorted(found, key=lambda place: hashlib.sha256(f"{seed}:{place[0]}".encode()).digest()):
        left.setdefault(kinds[index], []).append((name, index))
    drawn: list[tuple[str, int]] = []
    while len(drawn) < min(number, len(found)):
        drawn += [of_kind.pop(0) for of_kind in left.values() if of_kind]
    return [mutant_at(file, text, name, index) for name, index in drawn[:number]]


# ---- files and their tests ----------------------------------------------------------------------------------


def targets(only: list[str]) -> list[str]:
    """The files to change, below src/solera."""
    home = SOURCE / "solera"
    files = []
    for pattern in TARGETS:
        folder, braces, rest = pattern.partition("{")
        names = [f"{folder}{n}{rest.partition('}')[2]}" for n in rest.partition("}")[0].split(",")] if braces else []
        files += names or sorted(p.relative_to(home).as_posix() for p in home.glob(pattern))
    files = [f for f in files if not f.endswith("__init__.py") and any(o in f for o in only or [""])]
    if missing := [f for f in files if not (home / f).is_file()]:
        sys.exit(f"TARGETS names files that are not there: {', '.join(missing)}")
    if not files:
        sys.exit(f"no file to change has {' or '.join(only)} in its path")
    return files


def tests_of(file: str) -> list[str]:
    """The test files that are a source file's own."""
    stem = Path(file).stem
    found = [*sorted(TESTS.rglob(f"test_{stem}.py")), *sorted(TESTS.rglob(f"test_{stem}_*.py"))]
    found += [TESTS / name for name in (*OWN.get(file, ()), *EVERYWHERE)]
    if len(found) == len(EVERYWHERE) or not all(test.is_file() for test in found):
        sys.exit(f"{file}: no test of its own, or one that is gone; name them in OWN")
    return list(dict.fromkeys(test.relative_to(ROOT).as_posix() for test in found))


# ---- one mutant, in a fork ----------------------------------------------------------------------------------


class _Changed(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Gives a module's importers the changed code in place of the file's."""

    def __init__(self, name: str, path: str, code: Any):
        super().__init__(name, path)
        self.code = code

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self)

    def get_code(self, fullname: str) -> Any:
        return self.code


def _install(mutant: Mutant) -> None:
    path = SOURCE / "solera" / mutant.file
    tree = ast.parse(path.read_text(encoding="utf-8"))
    sites(tree)[mutant.index].change()
    code = compile(ast.fix_missing_locations(tree), str(path), "exec")
    name = "solera." + mutant.file.removesuffix(".py").replace("/", ".")
    sys.meta_path.insert(0, _Changed(name, str(path), code))


@dataclasses.dataclass
class Running:
    """A fork at work."""

    mutant: Mutant | None  # None: the tests as they are
    file: str
    folder: Path
    started: float
    limit: float  # seconds of CPU time

    def verdict(self, status: int, late: bool, seconds: float) -> dict[str, Any]:
        """The verdict."""
        text = (self.folder / "output").read_text(encoding="utf-8", errors="replace")
        by = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
        cut_off = late or (os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL))
        result = "timeout" if cut_off else "survived" if status == 0 else "killed"
        by_whom = by[0].rsplit("/", 1)[-1] if by else ""
        return {"verdict": result, "by": by_whom, "seconds": round(seconds, 1)}


def start(mutant: Mutant | None, file: str, tests: list[str], limit: float) -> tuple[int, Running]:
    """Fork, and run the tests there. The fork has its own process group, so that all of it can be ended."""
    folder = Path(tempfile.mkdtemp(prefix="mutant-"))
    process = os.fork()
    if process:
        return process, Running(mutant, file, folder, time.monotonic(), limit)
    code = 3
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit) + 5))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        if mutant is not None:
            _install(mutant)
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow"]
        code = int(pytest.main([*options, "--basetemp", str(folder / "tmp"), *tests]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def run(jobs: Iterator[tuple[Mutant | None, str, list[str], float]], workers: int) -> Iterator[tuple[Running, dict]]:
    """Run the jobs, this many in parallel, and yield the outcome of each."""
    running: dict[int, Running] = {}
    try:
        while True:
            while len(running) < workers and (job := next(jobs, None)):
                process, started = start(*job)
                running[process] = started
            if not running:
                return
            for process, job in list(running.items()):
                late = time.monotonic() - job.started > 5 * job.limit + 30  # it waits; a busy machine may be slow
                if late:
                    _end(process)
                done, status, used = os.wait4(process, 0 if late else os.WNOHANG)
                if done:
                    del running[process]
                    _end(process)  # what it may have left behind
                    yield job, job.verdict(status, late, used.ru_utime + used.ru_stime)
                    shutil.rmtree(job.folder, ignore_errors=True)
            time.sleep(0.02)
    finally:
        for process in running:
            _end(process)


def _end(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


# ---- the whole ----------------------------------------------------------------------------------------------


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """The last verdict on each mutant."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return {entry["id"]: entry for entry in map(json.loads, lines)}


def summary(drawn: list[Mutant], results: dict[str, dict[str, Any]], reasons: dict[str, Any]) -> tuple[str, int]:
    """A table by file, then every survivor without a reason, and how many these are."""
    rows = [f"{'file':34}{'tried':>7}{'killed':>8}{'timeout':>9}{'explained':>11}{'open':>6}"]
    total, still = collections.Counter[str](), []
    for file in dict.fromkeys(m.file for m in drawn):
        count = collections.Counter[str]()
        for m in (m for m in drawn if m.file == file and m.id in results):
            verdict = results[m.id]["verdict"]
            verdict = verdict if verdict != "survived" else "explained" if m.id in reasons else "open"
            count[verdict] += 1
            if verdict == "open":
                still.append(m)
        total += count
        rows.append(_row(file, count))
    rows.append(_row("all", total))
    tried = max(1, total.total())
    rows.append(f"noticed: {100 * (total['killed'] + total['timeout']) / tried:.1f} % of {total.total()}")
    for m in still:
        rows.append(f"\n{m.in_words()}")
    return "\n".join(rows), len(still)


def outdated(reasons: dict[str, Any]) -> list[str]:
    """Reasons whose mutant no longer exists, because its line has changed."""
    texts = {entry["file"]: SOURCE / "solera" / entry["file"] for entry in reasons.values()}
    there = {name for f, p in texts.items() if p.is_file() for name, _ in places(f, p.read_text(encoding="utf-8"))}
    return [name for name in reasons if name not in there]


def _row(name: str, count: collections.Counter[str]) -> str:
    numbers = f"{count['killed']:>8}{count['timeout']:>9}{count['explained']:>11}{count['open']:>6}"
    return f"{name:34}{count.total():>7}{numbers}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="only files whose path holds one of these")
    parser.add_argument("--seed", type=int, default=0, help="which mutants are drawn (default: %(default)s)")
    parser.add_argument("--per-file", type=int, default=25, help="mutants of each file (default: %(default)s)")
    parser.add_argument("--minutes", type=float, help="start no mutant after so many minutes")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="at a time (default: %(default)s)")
    parser.add_argument("--results", type=Path, help="default: build/mutants-SEED.jsonl")
    parser.add_argument("--again", action="store_true", help="try only what survived before")
    parser.add_argument("--list", action="store_true", help="only show the mutants")
    parser.add_argument("--explain", type=Path, default=REASONS, help="reasons of survivors (default: %(default)s)")
    asked = parser.parse_args()

    files = targets(asked.only)
    samples = {file: sample(file, asked.per_file, asked.seed) for file in files}
    rounds = range(max(map(len, samples.values())))
    drawn = [drawn[i] for i in rounds for drawn in samples.values() if i < len(drawn)]  # one of each file, again
    if asked.list:
        print("\n".join(f"{m.id} {m.file}:{m.line} {m.kind}: {m.was}  ->  {m.now}" for m in drawn))
        return
    path = asked.results or ROOT / "build" / f"mutants-{asked.seed}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    results = read_results(path)
    if asked.again:
        todo = [m for m in drawn if results.get(m.id, {}).get("verdict") == "survived"]
    else:
        todo = [m for m in drawn if m.id not in results]
    if todo:
        _work(todo, path, results, asked.workers, asked.minutes)
    reasons = json.loads(asked.explain.read_text(encoding="utf-8")) if asked.explain.is_file() else {}
    text, still = summary(drawn, results, reasons)
    print(text)
    if old := outdated(reasons):
        print(f"\nreasons of mutants that no longer exist (remove them from {asked.explain.name}): {', '.join(old)}")
    sys.exit(1 if still else 0)


def _work(todo: list[Mutant], path: Path, results: dict[str, Any], workers: int, minutes: float | None) -> None:
    """Try the mutants and record the verdicts."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # an exit ends the forks too
    sys.path[:0] = [str(SOURCE), str(ROOT / "tests")]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])  # for programs the tests start
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(path.parent / "mutants-bytecode")  # compiled once for all
    os.chdir(ROOT)
    import hypothesis  # noqa: F401  (once, for all forks)
    import pydantic  # noqa: F401
    import pytest  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch

    torch.set_num_threads(1)
    files = list(dict.fromkeys(m.file for m in todo))
    tests = {file: tests_of(file) for file in files}
    print(f"{len(todo)} mutants of {len(files)} files; first the tests as they are", flush=True)
    groups = list(dict.fromkeys(map(tuple, tests.values())))
    limits: dict[tuple[str, ...], float] = {}
    for job, result in run(((None, " ".join(g), list(g), 600.0) for g in groups), workers):
        if result["verdict"] != "survived":
            sys.exit(f"these tests fail or hang as they are, so they can judge nothing: {job.file} ({result['by']})")
        limits[tuple(job.file.split(" "))] = 10 + 4 * result["seconds"]
    end = time.monotonic() + 60 * minutes if minutes else float("inf")

    def jobs() -> Iterator[tuple[Mutant, str, list[str], float]]:
        for mutant in todo:
            if time.monotonic() > end:
                print("the time is over; call again to continue")
                return
            yield mutant, mutant.file, tests[mutant.file], limits[tuple(tests[mutant.file])]

    with path.open("a", encoding="utf-8") as file:
        for done, (job, result) in enumerate(run(jobs(), workers), 1):
            mutant = job.mutant
            assert mutant is not None
            entry = {**dataclasses.asdict(mutant), **result}
            results[mutant.id] = entry
            file.write(json.dumps(entry) + "\n")
            file.flush()
            if result["verdict"] == "survived":
                print(f"[{done}/{len(todo)}] survived {mutant.in_words()}", flush=True)


if __name__ == "__main__":
    main()
