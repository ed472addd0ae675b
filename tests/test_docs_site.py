"""The documentation as a site: every page is in the navigation, and every relative link resolves.

None of this needs mkdocs; `make docs` builds the site itself and is as strict.
"""

import importlib.util
import json
import re
from pathlib import Path

import pytest

import fedcover as fc
from fedcover import flower
from tests.helpers.repository import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def anchors(page):
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = HEADING.findall(FENCED.sub("", page.read_text()))
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", text).strip()) for text in plain}


def broken_links(page):
    broken = []
    for link in LINK.findall(FENCED.sub("", page.read_text())):
        if link.startswith(("http:", "https:", "mailto:", "../../actions/")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


def test_pages_are_in_the_navigation_once():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\n\n")[0]
    named = re.findall(r"[\w-]+\.md", navigation)
    assert sorted(named) == [page.name for page in PAGES]


@pytest.mark.parametrize("page", [*PAGES, *sorted(ROOT.glob("*.md"))], ids=lambda page: page.name)
def test_relative_links_resolve(page):
    assert broken_links(page) == []


def test_public_names_are_in_the_api_reference():
    named = re.findall(r"^::: fedcover\.(\S+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    aliases = {"__version__", "windows", "drawn"}
    expected = {*fc.__all__, *(f"flower.{name}" for name in flower.__all__)} - aliases
    assert sorted(named) == sorted(expected)


def hooks():
    spec = importlib.util.spec_from_file_location("hooks", DOCS / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_command_reference_has_every_command():
    text = hooks().command_options()
    commands = json.loads((Path(__file__).parent / "golden" / "commands.json").read_text())
    headings = set(re.findall(r"^#+ fedcover (.+)$", text, re.MULTILINE))
    assert {*commands, "data", "flower"} == headings


def test_command_list_is_complete():
    commands = json.loads((Path(__file__).parent / "golden" / "commands.json").read_text())
    listed = (DOCS / "cli.md").read_text()
    assert [name for name in commands if f"fedcover {name} " not in listed] == []
