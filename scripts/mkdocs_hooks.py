"""Additions to mkdocs for the site: files of the repository, and diagrams and equations without scripts.

The pages are also read in the repository, where a link to `../../src/solera/methods/feddf.py` leads to the file. In the
site such a link leads to a generated page that shows the file. A line
`<!-- whole file: ../../src/solera/methods/feddf.py -->` in a page is replaced by the file's text. Diagrams (mermaid)
become tables: to draw them, the theme would fetch a program from the network. Equations (LaTeX between dollar signs)
become MathML, which browsers typeset without a script.
"""

import itertools
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from markdown import Extension, Markdown
from markdown.inlinepatterns import InlineProcessor
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

try:
    from latex2mathml.converter import convert
except ImportError:  # on_config reports it in one line
    convert = None

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^```.*?^```\s*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
WHOLE = re.compile(r"^<!-- whole file: (\S+) -->$", re.MULTILINE)
NODE = re.compile(r'(\w+)\["<b>(.+?)</b><br/>(.+?)"\]')
PARTICIPANT = re.compile(r"participant (\w+) as (.+)")
MESSAGE = re.compile(r"(\w+)--?>>(\w+): (.+)")
EQUATION = r"(?<![\\$])\$\$([^$]+?)\$\$(?!\$)"
FORMULA = r"(?<![\\$\w])\$(?![\s$])([^$]+?)(?<!\s)\$(?![$\w])"
BEFORE_ESCAPES = 185  # after code (190), which keeps its dollars; before escapes (180), which take backslashes
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


def mathml(latex: str, display: str) -> str:
    """An equation as MathML. An unknown command is an error; the converter alone would print it."""
    try:
        made = convert(latex.strip(), display=display)
    except Exception as problem:  # its own exceptions do not say which equation
        raise PluginError(f"equation {latex.strip()!r}: {type(problem).__name__} {problem}") from problem
    unknown = re.findall(r"\\[a-zA-Z]+", made)
    if unknown:
        raise PluginError(f"equation {latex.strip()!r}: latex2mathml does not know {', '.join(unknown)}")
    return made.replace("<mi>log</mi><m", '<mi>log</mi><mspace width="0.17em" /><m')


class Typeset(InlineProcessor):
    """LaTeX between dollar signs, stashed as MathML so that no other pattern touches it."""

    def __init__(self, pattern: str, md: Markdown, display: str) -> None:
        super().__init__(pattern, md)
        self.display = display

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:  # type: ignore[override]
        assert self.md is not None
        return self.md.htmlStash.store(mathml(m[1], self.display)), m.start(0), m.end(0)


class Equations(Extension):
    """`$$...$$` is an equation of its own, `$...$` one in the text."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.inlinePatterns.register(Typeset(EQUATION, md, "block"), "equation", BEFORE_ESCAPES + 1)
        md.inlinePatterns.register(Typeset(FORMULA, md, "inline"), "formula", BEFORE_ESCAPES)


def on_config(config: Any) -> Any:
    """Set up the equations, or say which package is missing."""
    if convert is None:
        raise PluginError("the site needs latex2mathml to typeset equations: pip install 'solera[docs]'")
    config.markdown_extensions.append(Equations())
    return config


def on_files(files: Files, config: Any) -> Files:
    """Make a page for every file outside docs/ that a page links to."""
    wanted = set()
    for file in files.documentation_pages():
        found = {outside(file.src_uri, target) for target in links(file.content_string)}
        wanted |= {path for path in found if path is not None and path != "README.md" and (ROOT / path).exists()}
    for path in sorted(wanted):
        files.append(File.generated(config, page_of(path), content=shown(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links out of docs/ to their generated pages, write diagrams as tables, and insert whole files."""
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
