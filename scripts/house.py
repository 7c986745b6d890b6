"""Count what a reader has to hold: `python scripts/house.py [REV ...]` prints this tree, or each commit in a column.

Lines and files of each room; the names at the root of the package; file names that stand in two rooms; lines of
feddf.py; how many names of ours a method imports; and how many files of ours run before a resumed run begins its next
round, traced in a process of its own.
"""

import ast
import collections
import pathlib
import statistics
import subprocess
import sys
import tarfile
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
TRACE = """
import os, pathlib, subprocess, sys, tempfile, time
package, seen = str(pathlib.Path(sys.argv[1]).resolve()), set()
def watch(frame, event, arg):
    file = frame.f_code.co_filename
    if event != "call" or not file.startswith(package):
        return
    if frame.f_code.co_name == "round" and file.removeprefix(package).startswith("/methods/"):
        print("resumed", len(seen), flush=True)
        os._exit(0)
    seen.add(file)
home = tempfile.mkdtemp()
out, solera = home + "/run", [sys.executable, "-m", "solera.cli.main"]
first = subprocess.Popen([*solera, "run", "quickstart/feddf", "--rounds", "50", "--out", out, "--quiet"])
lines = pathlib.Path(out) / "metrics.jsonl"
while first.poll() is None and not (lines.exists() and lines.read_text().count("\\n")):
    time.sleep(0.1)
first.kill()
first.wait()
from solera.cli.main import main
sys.argv[1:] = ["resume", out, "--quiet"]
sys.setprofile(watch)
main()
"""


def counted(tree: pathlib.Path) -> dict[str, int | str]:
    """What is counted of one tree, by name."""
    package = tree / "src" / "solera"
    files = sorted(package.rglob("*.py"))
    lines = {f: len(f.read_text("utf-8").splitlines()) for f in files}
    room = {f: f.relative_to(package).parts[0] if f.parent != package else "(root)" for f in files}
    rooms: collections.Counter[str] = collections.Counter()
    for f in files:
        rooms[room[f]] += lines[f]
    found: dict[str, int | str] = {"lines": sum(lines.values()), "files": len(files)}
    names = collections.Counter(f.stem for f in files if f.stem != "__init__")
    found["file names that occur twice"] = sum(n > 1 for n in names.values())
    at_root = {f.stem for f in package.glob("*.py")} | {f.parent.name for f in package.glob("*/__init__.py")}
    found["names at the root"] = len(at_root - {"__init__"})
    found["feddf.py"] = lines.get(package / "methods" / "feddf.py", 0)
    papers = [f for f in package.glob("methods/*.py") if "@register" in f.read_text("utf-8")]
    found["names of ours that a method imports, median"] = str(statistics.median(map(imported, papers)))
    found["files of ours before a resumed round"] = resumed(tree)
    return found | {f"lines of {name}": rooms[name] for name in sorted(rooms)}


def imported(file: pathlib.Path) -> int:
    """How many names a method's file imports from this package."""
    nodes = [n for n in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(n, ast.ImportFrom)]
    return sum(len(n.names) for n in nodes if n.level or (n.module or "").startswith("solera"))


def resumed(tree: pathlib.Path) -> str:
    """Files of ours that run between `solera resume` and the method's next round."""
    command = [sys.executable, "-c", TRACE, str(tree / "src" / "solera")]
    done = subprocess.run(command, env={"PYTHONPATH": str(tree / "src")}, capture_output=True, text=True, check=False)  # noqa: S603
    told = [line.split() for line in done.stdout.splitlines() if line.startswith("resumed")]
    return told[0][1] if told and told[0][1:] else "not traced"


def main() -> None:
    columns = {}
    for rev in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as place:
            archive = pathlib.Path(place) / "tree.tar"
            subprocess.run(["git", "-C", ROOT, "archive", "--output", archive, rev, "src"], check=True)  # noqa: S603, S607
            with tarfile.open(archive) as tar:
                tar.extractall(place, filter="data")
            columns[rev] = counted(pathlib.Path(place))
    columns["this tree"] = counted(ROOT)
    rows = list(dict.fromkeys(name for column in columns.values() for name in column))
    print(" " * 46 + "".join(f"{name[:12]:>14}" for name in columns))
    for row in rows:
        print(f"{row:46}" + "".join(f"{column.get(row, '-'):>14}" for column in columns.values()))


if __name__ == "__main__":
    main()
