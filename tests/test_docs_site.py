"""The documentation site that `make docs` has built: in Chromium, from disk, without a network."""

from pathlib import Path

import pytest
from support.ui import axe_faults

import art_nb

SITE = Path(__file__).parents[1] / "build" / "docs"
pytestmark = pytest.mark.skipif(not (SITE / "index.html").exists(), reason="`make docs` has not built the site")
PAGES = (
    "index",
    "api/art.train",
    "docs/options",
    "docs/colab",
    "examples/tic_tac_toe/tic-tac-toe",
    "examples/2048/2048",
)
IMPACTS = ("minor", "moderate", "serious", "critical")


@pytest.fixture
def opened(browser):
    contexts = []

    def open_page(name, width=1280, theme="light", query=""):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme, offline=True)
        contexts.append(context)
        page = context.new_page()
        page.goto(f"{(SITE / name).as_uri()}.html{query}")
        return page

    yield open_page
    for context in contexts:
        context.close()


@pytest.mark.parametrize("word", ["epsilon_high", "rollout", "KL"])
def test_the_search_finds(opened, word):
    page = opened("search", query=f"?q={word}")
    page.locator("#search-results li a").first.wait_for(timeout=60_000)
    assert page.locator("#search-results li").count() > 0


def test_every_public_name_has_a_page():
    pages = {path.stem for path in (SITE / "api").glob("*.html")}
    assert {f"art.{name}" for name in art_nb._MODULE_OF} <= pages
    text = (SITE / "api" / "art.train.html").read_text()
    assert "groups_per_step" in text and "[source]" in text


@pytest.mark.parametrize("name", PAGES)
def test_a_narrow_page_does_not_scroll_sideways(opened, name):
    page = opened(name, width=390)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_no_fault(opened, name, theme):
    assert not axe_faults(opened(name, theme=theme), "body", IMPACTS)


def test_nothing_comes_from_a_network():
    for file in SITE.rglob("*.html"):
        for start in ('<script src="http', '<link rel="stylesheet" href="http', '<img src="http'):
            assert start not in file.read_text(), file
