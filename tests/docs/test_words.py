"""Pages, docstrings, comments and messages use the words of the field."""

import ast
import io
import pathlib
import re
import tokenize
from collections.abc import Iterator, Mapping

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "solera"
PAGES = sorted(
    [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"))]
)
INSTEAD = {
    r"(loses?|lost|cost\w* \w+|the) (its )?seat\b": "an invalid reply is dropped and the round continues",
    r"\bbl(ow|ew|own|ows) up\b": "diverged",
    r"\bnursery\b": "fork server",
    r"\bshelf\b": "shared buffer",
    r"\b(the|a|data) rooms?\b": "package",
    r"\bprototypes?\b": "architecture",
}
PLAIN = {  # in the sources
    r"\b(nobody|anybody|whoever)\b": "no client, any party, the program that",
    r"\bfor want of\b": "without",
    r"\b(bear|bears|bearing|borne|bearable)\b": "tolerate, at most",
    r"\b(liars?|(lying|dishonest) clients?)\b": "Byzantine clients",
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
HEADLESS = re.compile(r"(What|Who|Why|How|Whether|Which|Where)\b")  # say instead: The reasons, True if, The number of
SOURCES = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}


def refused(text: str, also: Mapping[str, str] = {}) -> str | None:
    """The first of the words in `text` that a reader should not have to guess, and what to say instead."""
    plain = re.sub(r"\s+", " ", re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL))
    for words, better in (INSTEAD | dict(also)).items():
        if found := re.search(words, plain, re.IGNORECASE):
            return f"{found[0]!r}; say: {better}"
    return None


def prose(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of the docstrings, string literals and comments of a module; identifiers are left alone."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    block, last = "", 0  # comments on consecutive lines are one text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text, line = token.string.lstrip("# "), token.start[0]
            block = f"{block} {text}" if line == last + 1 else text
            last = line
            yield line, block


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_pages_use_the_words_of_the_field(page):
    assert not (found := refused(page.read_text("utf-8"))), f"{page.name}: {found}"


@pytest.mark.parametrize("name", SOURCES)
def test_sources_use_the_words_of_the_field(name):
    source = SOURCES[name].read_text("utf-8")
    found = [f"{name}:{line}: {why}" for line, text in prose(source) if (why := refused(text, PLAIN))]
    found += [f"{name}: begins with a question: {text}" for text in headless(source)]
    assert not found, "\n".join(found)


def headless(source: str) -> list[str]:
    """The docstrings of a module that begin with a question instead of the thing."""
    nodes = (n for n in ast.walk(ast.parse(source)) if isinstance(n, DOCUMENTED))
    return [text for node in nodes if HEADLESS.match(text := ast.get_docstring(node) or "")]


@pytest.mark.parametrize(
    "source",
    [
        '"""A client loses its\n    seat."""',
        "x = 1  # the model blew up",
        "# it comes from the\n# nursery",
        'raise ValueError("on the " "shelf")',
        'print(f"{x}: a prototype")',
    ],
)
def test_docstrings_comments_and_messages_are_read(source):
    assert [text for _, text in prose(source) if refused(text)]


def test_questions_and_old_words_are_found():
    assert headless('def f():\n    """Who answers."""')
    assert not headless('def f():\n    """Whole rows."""')
    assert refused("clients that a mean bears", PLAIN)
    assert not refused("the bearer", PLAIN)


@pytest.mark.parametrize("source", ["prototype = nursery.shelf", 'f"{prototype}"', "# the paper's `prototypes`"])
def test_code_and_quotations_are_left_alone(source):
    assert not [text for _, text in prose(source) if refused(text)]
