"""What the site needs beyond mkdocs: files of the repository, linked to or shown whole, and diagrams without scripts.

The pages are also read in the repository, where a link to `../../src/solera/methods/feddf.py` leads to the file. In the
site such a link leads to a page made here, which shows the file; and where a page has a line
`<!-- whole file: ../../src/solera/methods/feddf.py -->`, the file's text stands there. Diagrams (mermaid), which code
hosts draw, become tables here: to draw them, the theme would fetch a program from the network.
"""

import itertools
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^```.*?^```\s*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
WHOLE = re.compile(r"^<!-- whole file: (\S+) -->$", re.MULTILINE)
NODE = re.compile(r'(\w+)\["<b>(.+?)</b><br/>(.+?)"\]')
PARTICIPANT = re.compile(r"participant (\w+) as (.+)")
MESSAGE = re.compile(r"(\w+)--?>>(\w+): (.+)")
LANGUAGES = {".py": "python", ".toml": "toml", ".md": "markdown", ".yml": "yaml", ".json": "json"}


def outside(page: str, target: str) -> str | None:
    """The path in the repository that a link on a page leads to, if it leads out of docs/."""
    path = os.path.normpath(PurePosixPath("docs") / PurePosixPath(page).parent / target)
    return None if path.startswith("docs/") else path


def page_of(path: str) -> str:
    """The page of the site that shows a file of the repository."""
    return "index.md" if path == "README.md" else f"code/{path.removesuffix('/')}.md"


def shown(path: str) -> str:
    """A page that shows a file of the repository, or lists a folder."""
    file = ROOT / path
    if file.is_dir():
        names = sorted(p.name for p in file.iterdir() if p.is_file())
        return f"# {path}\n\n" + "".join(f"- `{name}`\n" for name in names)
    return f"# {path}\n\n{fenced(path)}\n"


def fenced(path: str) -> str:
    """The text of a file of the repository, as a block of code."""
    file = ROOT / path
    return f"````{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text('utf-8')}\n````"


def links(text: str) -> set[str]:
    """Where the links of a page lead, without those inside code."""
    return {target for _, target, _ in LINK.findall(FENCE.sub("", text))}


def as_table(diagram: str) -> str:
    """A flowchart of boxes and arrows, or a sequence of messages, as a table."""
    if diagram.lstrip().startswith("flowchart"):
        boxes = {key: (name, text) for key, name, text in NODE.findall(diagram)}
        arrows: dict[str, list[str]] = {key: [] for key in boxes}
        for line in (line for line in diagram.splitlines() if "-->" in line):
            steps = [[key.strip() for key in side.split("&")] for side in line.split("-->")]
            for begin, end in itertools.pairwise(steps):
                for key in begin:
                    arrows[key] += [boxes[other][0] for other in end]
        rows = [(f"**{name}**", text, ", ".join(arrows[key]) or "-") for key, (name, text) in boxes.items()]
        head = ("box", "what it is", "arrows to")
    else:
        names = dict(PARTICIPANT.findall(diagram))
        rows = [(names[a], names[b], what) for a, b, what in MESSAGE.findall(diagram)]
        head = ("from", "to", "what")
    cells = [head, ("---",) * 3, *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in cells)


def on_files(files: Files, config: Any) -> Files:
    """Make a page for every file outside of docs/ that some page links to."""
    wanted = set()
    for file in files.documentation_pages():
        found = {outside(file.src_uri, target) for target in links(file.content_string)}
        wanted |= {path for path in found if path is not None and path != "README.md" and (ROOT / path).exists()}
    for path in sorted(wanted):
        files.append(File.generated(config, page_of(path), content=shown(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links out of docs/ to the pages made for them, write diagrams as tables, and show files whole."""
    here = page.file.src_uri
    if here.startswith("code/"):
        return markdown

    def led(match: re.Match[str]) -> str:
        path = outside(here, match[2])
        if path is None:
            return match[0]
        return match[1] + os.path.relpath(page_of(path), PurePosixPath(here).parent) + match[3]

    kept, at = [], 0
    for fence in FENCE.finditer(markdown):
        drawn = fence[0].startswith("```mermaid")
        shown_as = as_table(fence[0].strip().removeprefix("```mermaid").removesuffix("```")) if drawn else fence[0]
        kept += [LINK.sub(led, markdown[at : fence.start()]), shown_as]
        at = fence.end()
    text = "".join([*kept, LINK.sub(led, markdown[at:])])
    return WHOLE.sub(lambda line: fenced(outside(here, line[1]) or f"docs/{line[1]}"), text)
