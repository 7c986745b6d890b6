"""The pages of the four papers: everything they name exists, and nothing of a paper is left out."""

import dataclasses
import inspect
import pathlib
import re

import pytest

import bounds
import solera.methods  # noqa: F401  (registers them)
from solera.core.settings import Slot, hints, table_of
from solera.lab.papers import PAPERS, load_paper, paper_names
from solera.method import METHODS
from solera.runs.config import TABLES, recipe_names

ROOT = pathlib.Path(__file__).parents[2]
PAGES = {paper: ROOT / "docs" / "papers" / f"{paper}.md" for paper in PAPERS}
ITEMS = {  # of each paper: tables and figures with results
    "feddf": [*(f"Table {n}" for n in range(1, 9)), *(f"Figure {n}" for n in range(1, 18) if n != 7)],
    "fedet": [*(f"Table {n}" for n in range(2, 7)), "Figure 2"],
    "fedeed": [*(f"Table {n}" for n in range(1, 10)), *(f"Figure {n}" for n in range(2, 5))],
    "mnfl": [*(f"Table {n}" for n in range(1, 7)), *(f"Figure {n}" for n in range(1, 4))],
}


def marked(page: pathlib.Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", page.read_text("utf-8"))


@pytest.mark.parametrize("paper", PAPERS)
def test_every_table_and_figure_has_a_recipe(paper):
    found = [load_paper(name) for name in paper_names()]
    have = {re.sub(r" \(.\)", "", item) for p in found if p.paper == paper for item in (p.item, *p.also)}
    assert [item for item in ITEMS[paper] if item not in have] == []


@pytest.mark.parametrize("paper", PAPERS)
def test_every_recipe_of_the_paper_is_on_its_page(paper):
    ours = {name for name in recipe_names() if name.startswith(f"{paper}/") and not name.endswith("laptop")}
    ours |= {name for name in paper_names() if load_paper(name).paper == paper}
    named = set(marked(PAGES[paper]))
    assert sorted(name for name in ours if name not in named and name in paper_names()) == []


@pytest.mark.parametrize("paper", PAPERS)
def test_files_that_a_page_names_exist(paper):
    files = [name for name in marked(PAGES[paper]) if re.fullmatch(r"[\w/]+\.py", name)]
    assert len(files) > 5
    assert [name for name in files if not any((ROOT / at / name).is_file() for at in ("src/solera", ""))] == []


def keys_of(cls: type, above: str) -> set[str]:
    """All dotted keys of a settings class."""
    found = set()
    for name, hint in hints(cls).items():
        found.add(f"{above}.{name}")
        inner = table_of(hint)
        for kind in inner.kinds().values() if inner and issubclass(inner, Slot) else filter(None, [inner]):
            found |= keys_of(kind, f"{above}.{name}")
    return found


@pytest.mark.parametrize("paper", PAPERS)
def test_settings_that_a_page_names_exist(paper):
    known = set().union(*(keys_of(cls, table) for table, cls in TABLES.items()))
    ours = [cls for cls in METHODS.values() if dataclasses.is_dataclass(cls) and cls.__module__.startswith("solera.")]
    known |= set().union(*(keys_of(cls, "method") for cls in ours))
    tables = "|".join([*TABLES, "method"])
    named = [name for name in marked(PAGES[paper]) if re.fullmatch(rf"({tables})\.[\w.]+", name)]
    assert len(named) > 10
    assert [name for name in named if name not in known] == []


@pytest.mark.parametrize("paper", PAPERS)
def test_recipes_and_functions_that_a_page_names_exist(paper):
    named = marked(PAGES[paper])
    recipes = [name for name in named if re.fullmatch(rf"({'|'.join(PAPERS)})/[\w-]+", name)]
    assert recipes
    assert [name for name in recipes if name not in recipe_names()] == []
    functions = {name for name, _ in inspect.getmembers(bounds, inspect.isfunction)}
    called = [name for name in named if re.fullmatch(r"[a-z]+(_[a-z]+)+|hoeffding", name)]
    assert [name for name in called if name not in functions] == []


CLAIMS = {"feddf": 20, "fedet": 12, "fedeed": 14, "mnfl": 11}  # at least


@pytest.mark.parametrize("paper", PAPERS)
def test_a_page_lists_the_papers_claims_and_where_each_stands(paper):
    """Also those on privacy, communication and secure aggregation."""
    claims = PAGES[paper].read_text("utf-8").partition("| the paper claims | where it stands |\n|---|---|\n")[2]
    rows = [line.strip("| ").split(" | ") for line in claims.partition("\n\n")[0].splitlines()]
    assert len(rows) >= CLAIMS[paper]
    stands = re.compile(r"(shown|half shown|not shown|not tried|by construction)\b")
    assert [claim for claim, where in rows if not stands.match(where)] == []
    text = claims.lower()
    assert all(
        word in text for word in ("privacy", "secure aggregation", "communication" if paper != "mnfl" else "send")
    )
