"""The page is one file that asks for nothing, and nothing in a name can become markup."""

import base64
import hashlib
import html.parser
import json
import re

import pytest

from run_directories import write_run
from solera.report.figures import report_data
from solera.report.loading import read_all
from solera.report.page import EMPTY, embedded, render

NASTY = '</script><script>alert(1)</script><img src=x onerror="alert(2)"> <!-- \u2028 \' & \\u003c'


class Page(html.parser.HTMLParser):
    """The tags of a page, the text of its scripts and styles, and its policy."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.blocks, self.attributes, self.inside = [], [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.inside = (tag, dict(attrs)) if tag in ("script", "style") else None
        if self.inside:
            self.blocks.append([tag, dict(attrs), ""])

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, data):
        if self.inside:
            self.blocks[-1][2] += data


@pytest.fixture
def page(tmp_path):
    path = write_run(tmp_path / "run", name="x", model=NASTY)
    config = path / "config.toml"
    config.write_text(config.read_text().replace('name = "feddf"', f"name = {json.dumps(NASTY)}"))
    return render(report_data(read_all([path])))


def test_there_are_three_scripts_and_styles_whatever_the_names_say(page):
    tags = [(tag, attributes.get("type")) for tag, attributes, _ in Page(page).blocks]
    assert tags == [("style", None), ("script", "application/json"), ("script", None)]
    assert Page(page).tags.count("img") == 0
    assert "<title>" in page
    assert NASTY not in page


def test_names_arrive_in_the_data_unchanged(page):
    data = json.loads(Page(page).blocks[1][2])
    assert data["groups"][0]["method"] == NASTY
    assert NASTY in data["partitions"][0]["shown"][1]["model"]


def test_nothing_comes_from_elsewhere(page):
    parsed = Page(page)
    links = [(k, v) for k, v in parsed.attributes if k in ("src", "href", "action", "srcset", "data")]
    assert links == [("href", "data:,"), ("href", "#figures")]
    outside = re.sub(r'"data">.*?</script>', "", page, flags=re.DOTALL)
    assert re.findall(r"https?://[^\s\"']+", outside) == ["http://www.w3.org/2000/svg"]
    assert not [k for k, _ in parsed.attributes if k.startswith("on") or k == "style"]


def test_the_policy_allows_what_is_there_and_nothing_else(page):
    (policy,) = [v for k, v in Page(page).attributes if k == "content" and "default-src" in v]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == rules["connect-src"] == rules["form-action"] == rules["base-uri"] == "'none'"
    for tag in ("script", "style"):
        (block,) = [b for b in Page(page).blocks if b[0] == tag and "type" not in b[1]]
        digest = base64.b64encode(hashlib.sha256(block[2].encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"


def test_the_script_writes_text_only_as_text():
    script = Page(render(EMPTY)).blocks[2][2]
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
        'setAttribute("style"',
    ):
        assert word not in script


def test_the_live_page_may_ask_its_own_server():
    assert "connect-src 'self'" in render(EMPTY, live=True)
    assert 'data-live="true"' in render(EMPTY, live=True)


@pytest.mark.parametrize("value", ["</script>", "<!--", "<script", "]]>", "&lt;", "\u2028", "\ud800"])
def test_json_inside_a_script_is_only_json(value):
    text = embedded({"a": value})
    assert json.loads(text) == {"a": value}
    assert not set(text) & set("<>&\u2028")
    text.encode()


def test_what_is_not_json_is_escaped():
    page = render({**EMPTY, "title": "<i>"}, made="<i>")
    assert "<i>" not in page
    assert page.count("&lt;i&gt;") == 3
