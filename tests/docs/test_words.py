"""The pages use the words of the field."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
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


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_the_words_of_the_field(page):
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text("utf-8"), flags=re.DOTALL)
    for words, better in INSTEAD.items():
        found = re.search(words, text, re.IGNORECASE)
        assert not found, f"{page.name}: {found[0]!r}; say: {better}" if found else ""
