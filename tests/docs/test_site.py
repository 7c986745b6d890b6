"""The site is built without a warning, and its pages ask nobody for anything."""

import html
import html.parser
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

for needed in ("mkdocs", "latex2mathml"):
    pytest.importorskip(needed, reason=f"the site needs {needed}: pip install 'solera[docs]'")

pytestmark = pytest.mark.rest
TYPESET = ["feddf", "fedet", "fedeed", "framework", "mnfl", "fedavg", "fedprox", "scaffold"]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> pathlib.Path:
    """The site as `make docs` makes it: what mkdocs would warn of is an error."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


class Requests(html.parser.HTMLParser):
    """What a browser fetches by itself when it shows a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source", "video", "object"):
            self.found.append(given.get("src") or given.get("data") or "")
        if tag == "link" and given.get("rel") not in ("canonical", "prev", "next"):
            self.found.append(given.get("href") or "")


def pages(site: pathlib.Path) -> list[pathlib.Path]:
    return sorted(site.rglob("*.html"))


def test_every_page_is_there(site):
    wanted = {p.relative_to(ROOT / "docs").with_suffix(".html") for p in (ROOT / "docs").rglob("*.md")}
    assert wanted <= {p.relative_to(site) for p in pages(site)}


def test_nothing_is_fetched_from_elsewhere(site):
    for page in pages(site):
        reader = Requests()
        text = page.read_text("utf-8")
        reader.feed(text)
        outside = [url for url in reader.found if url.startswith(("http:", "https:", "//"))]
        assert not outside, f"{page.relative_to(site)}: {outside}"
        assert 'class="mermaid"' not in text, "the theme fetches a program to draw these"


def test_diagrams_are_tables(site):
    text = (site / "architecture.html").read_text("utf-8")
    assert "flowchart" not in text
    assert "sequenceDiagram" not in text
    assert "<td><strong>core</strong></td>" in text
    assert "<td>sample()</td>" in text


def test_a_file_can_be_shown_whole_on_a_page(site):
    """FedDF's Algorithm 3 stands beside all of feddf.py, as it is now."""
    shown = re.sub(r"<[^>]+>", "", (site / "methods" / "feddf.html").read_text("utf-8"))
    source = (ROOT / "src/solera/methods/feddf.py").read_text("utf-8")
    for line in filter(None, map(str.strip, source.splitlines())):
        assert line in html.unescape(shown), line


def test_links_to_code_lead_to_a_page_that_shows_it(site):
    method = (site / "methods" / "feddf.html").read_text("utf-8")
    assert 'href="../code/src/solera/methods/feddf.py.html"' in method
    shown = (site / "code/src/solera/methods/feddf.py.html").read_text("utf-8")
    assert "FedDF" in shown
    assert "own_method.py" in (site / "code/examples.html").read_text("utf-8")


def text_of(page: pathlib.Path) -> str:
    """A page without its code, and without its scripts."""
    text = re.sub(r"<(script|pre|code|style)\b.*?</\1>", "", page.read_text("utf-8"), flags=re.DOTALL)
    return text.partition("<article")[2]


def test_equations_are_typeset(site):
    for page in pages(site):
        if "code" not in page.relative_to(site).parts:
            raw = re.findall(r".{0,40}\$.{0,40}", text_of(page))
            assert not raw, f"{page.relative_to(site)}: a dollar sign that begins no equation: {raw}"
    for method in TYPESET:
        text = text_of(site / "methods" / f"{method}.html")
        assert "<math" in text, f"{method}: no equation"
        assert "wzxhzdk" not in text, f"{method}: an equation was lost in the Markdown"


def equations(page: pathlib.Path) -> list[str]:
    """The LaTeX between the dollar signs of a page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S)
    return re.findall(r"\$\$?([^$]+)\$\$?", re.sub(r"`[^`]*`", "", text))


def test_code_hosts_can_typeset_the_equations():
    """They resolve Markdown's escapes (backslash and a sign) first, and a bar would end the cell of a table."""
    assert all(equations(ROOT / f"docs/methods/{method}.md") for method in TYPESET)
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for equation in equations(page):
            assert not re.search(r"\\[^a-zA-Z]|[|*<>]", equation), f"{page.name}: {equation}"


def test_without_the_converter_the_build_says_what_is_missing(tmp_path):
    (tmp_path / "latex2mathml").mkdir()
    (tmp_path / "latex2mathml" / "__init__.py").write_text("raise ImportError('not installed')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": path}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "the site needs latex2mathml to typeset equations: pip install 'solera[docs]'" in done.stderr
    assert "Traceback" not in done.stderr
