"""A notebook full of attacks in other hands: reopened untrusted without a kernel, and as HTML without scripts."""

import json
import subprocess
import sys
import time
import urllib.request
import uuid
from types import SimpleNamespace

import nbformat
import pytest
from nbconvert import HTMLExporter
from playwright.sync_api import expect
from support.ui import TEXTS, LabPage
from test_static_html import hostile_run

from art_nb.reports.html import visible_text
from art_nb.training.heartbeat import write_run_record

pytestmark = pytest.mark.timeout(300)
expect.set_options(timeout=120_000)
WIDGET = "application/vnd.jupyter.widget-view+json"
TUTORIALS = ("tic_tac_toe/tic-tac-toe.ipynb", "ruler/ruler.ipynb")
VIEW, RUN, FROZEN, _, FROZEN_RUN, JUDGED = range(1, 7)  # cells
CELLS = [
    """import sys; sys.path.insert(0, {tests!r})
import art_nb as art
from art_nb.panels.viewer import view
from support.judging_parts import Says, answers
from support.ui import TEXTS, WORD
store = art.RunStore({path!r})
run = art.Run.attach(store.path)""",
    "view(store)",
    "run",
    "talk = view(art.Trajectory(messages_and_choices=[dict(role='user', content=text) for text in TEXTS]))\ntalk",
    "talk.freeze()",
    "art.ui = 'html'\nrun",
    """group = answers(*TEXTS, scenario_id=TEXTS[1])
panel = await art.judge(group, Says(TEXTS[0] + WORD, [1 - n / 99 for n in range(len(TEXTS))]), journal={path!r},
                        cache=None, show=False, rubric=TEXTS[2] + WORD)
panel""",
]
COUNTER = """let value; Object.defineProperty(window, '__pwned', {
  get: () => value, set: (given) => { value = given; window.attacked(String(given)); }});"""
BAIT = """<img class="bait" src="data:," alt="bait" onerror="window.__pwned = 'bait'">"""
LIVE_MARKUP = "script, iframe, form, a, svg[onload], style, img:not([src^='data:']), [data-commandlinker-command]"
ALL_OPEN = "() => document.querySelectorAll('details').forEach((one) => one.open = true)"
TOO_WIDE = """() => { const wider = (one) => one.scrollWidth > one.clientWidth + 1;
  const beyond = (one) => one.getBoundingClientRect().right > document.documentElement.clientWidth + 1;
  return [...[document.documentElement, ...document.querySelectorAll('.jp-OutputArea-output')].filter(wider),
          ...[...document.images].filter(beyond)].map((one) => one.outerHTML.slice(0, 200)); }"""


def watched(context):
    """A page, and what attacks did there: each that sets `__pwned`, each dialog, each address that was asked."""
    context.set_default_timeout(60_000)
    page, seen = context.new_page(), SimpleNamespace(attacks=[], dialogs=[], asked=[])
    page.expose_function("attacked", lambda given: seen.attacks.append(given))
    page.add_init_script(COUNTER)
    page.on("dialog", lambda dialog: (seen.dialogs.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: seen.asked.append(request.url))
    return page, seen


def check_inert(page, seen, home):
    """No attack has worked, nobody else was asked, and the outputs hold no markup that could act."""
    assert (seen.attacks, seen.dialogs) == ([], [])
    assert [url for url in seen.asked if not url.startswith((home, "data:", "blob:"))] == []
    found = page.locator(".jp-OutputArea-output").locator(LIVE_MARKUP)
    assert found.count() == 0, found.first.evaluate("(one) => one.outerHTML")


def api(lab, path, method="GET"):
    """Ask the server."""
    request = urllib.request.Request(f"{lab.url}/api/{path}?token={lab.token}", method=method)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.loads(reply.read() or "null")


def sessions(lab, name):
    """The sessions of a notebook: none where it has no kernel."""
    return [one["id"] for one in api(lab, "sessions") if one["path"] == name]


def walk(nb):
    """Look at a rollout of every text in the live viewer, with everything unfolded."""
    crumbs = "document.querySelector('.art-crumbs').textContent"
    nb.page.focus(".art-reader")
    for _ in TEXTS[1:]:
        nb.page.keyboard.press("e")
        before = nb.page.evaluate(crumbs)
        nb.page.keyboard.press("]")
        nb.page.wait_for_function(f"(before) => {crumbs} !== before", arg=before)


@pytest.fixture(scope="module")
def saved(browser, lab_server, root, tmp_path_factory):
    """The notebook as it was saved: two panels live, three frozen; and what happened in the page."""
    store = hostile_run(tmp_path_factory.mktemp("attacks"), TEXTS)
    write_run_record(store, name="x", status="failed", step=3, steps=3, groups=1, rollouts=3)
    cells = [source.format(path=str(store.path), tests=str(root / "tests")) for source in CELLS]
    context = browser.new_context(viewport={"width": 1300, "height": 900})
    page, seen = watched(context)
    nb = LabPage(lab_server, page, lab_server.write(cells)).open()
    shown = {VIEW: ".art-msg", RUN: ".art-state[data-state=failed]", FROZEN: ".art-msg"}
    for n in range(len(cells)):
        nb.run(n, 120)
        if n in shown:
            nb.cell(n).locator(shown[n]).first.wait_for()
        if n == VIEW:
            walk(nb)
    nb.cell(FROZEN).locator(".art-panel").wait_for(state="detached")
    expect(nb.cell(JUDGED)).to_contain_text("Judged group")
    check_inert(page, seen, lab_server.url)
    notebook = nbformat.reads(json.dumps(nb.save()), as_version=4)
    context.close()
    for session in sessions(lab_server, nb.name):
        api(lab_server, f"sessions/{session}", "DELETE")
    return notebook


def outputs(notebook):
    """All outputs of a notebook."""
    return [out for cell in notebook.cells for out in cell.get("outputs", [])]


def markup(notebook):
    """All HTML in its outputs."""
    return "".join(out.data.get("text/html", "") for out in outputs(notebook) if "data" in out)


def check_readable(areas, page):
    """Every text, and what the panels say of a run and of a judgment, is there for the eye."""
    page.evaluate(ALL_OPEN)
    for message, text in zip(areas[FROZEN].locator("pre").all(), TEXTS, strict=True):
        expect(message).to_have_text(visible_text(text))
        message.scroll_into_view_if_needed()
        expect(message).to_be_visible()
    for n in (VIEW, RUN, FROZEN_RUN):
        curves = areas[n].get_by_role("img", name="Reward by step")
        curves.scroll_into_view_if_needed()
        expect(curves).to_be_visible()
        expect(areas[n]).to_contain_text("Groups of step 3")
    judged = areas[JUDGED].get_by_text("shared messages: 1")
    judged.scroll_into_view_if_needed()
    expect(judged).to_be_visible()
    for text in TEXTS[:16]:  # as many as a frozen group shows in full
        expect(areas[JUDGED]).to_contain_text(visible_text(text))


# reopened in JupyterLab ----------------------------------------------------------------------------------------------


@pytest.fixture
def reopened(browser, lab_server, saved):
    """Open the saved notebook as from elsewhere: signed by nobody, for a kernel that is not here, with a bait added."""
    contexts = []

    def reopen(trust):
        theirs, name = nbformat.from_dict(saved), f"{uuid.uuid4().hex[:8]}.ipynb"
        theirs.metadata = {"kernelspec": {"name": "elsewhere", "display_name": "Elsewhere", "language": "python"}}
        bait = nbformat.v4.new_output("display_data", {"text/html": BAIT})
        theirs.cells.append(nbformat.v4.new_code_cell(outputs=[bait]))
        path = lab_server.folder / "notebooks" / name
        nbformat.write(theirs, path)
        if trust:
            subprocess.run([sys.executable, "-m", "jupyter", "trust", str(path)], check=True, env=lab_server.env)
        cells = api(lab_server, f"contents/{name}")["content"]["cells"]
        assert {cell["metadata"]["trusted"] for cell in cells} == {trust}
        contexts.append(browser.new_context(viewport={"width": 1300, "height": 900}))
        page, seen = watched(contexts[-1])
        page.goto(f"{lab_server.url}/lab/workspaces/{name[:8]}/tree/{name}?token={lab_server.token}")
        page.locator(".jp-Dialog").get_by_role("button", name="No Kernel").click()
        nb = LabPage(lab_server, page, name)
        nb.cell(len(CELLS)).scroll_into_view_if_needed()
        expect(page.get_by_role("img", name="bait")).to_be_attached()
        assert sessions(lab_server, name) == []
        return nb, seen

    yield reopen
    for context in contexts:
        context.close()


def test_reopened_untrusted_it_reads_and_no_attack_works(reopened, lab_server):
    nb, seen = reopened(trust=False)
    check_readable([nb.cell(n).locator(".jp-OutputArea") for n in range(len(CELLS))], nb.page)
    check_inert(nb.page, seen, lab_server.url)
    assert "Error displaying widget" not in nb.page.locator(".jp-Notebook").inner_text()


def test_reopened_trusted_only_the_bait_works(reopened):
    nb, seen = reopened(trust=True)
    nb.page.evaluate(ALL_OPEN)
    end = time.monotonic() + 120
    while not seen.attacks and time.monotonic() < end:
        nb.page.wait_for_timeout(50)
    assert seen.attacks == ["bait"]
    assert seen.dialogs == []
    check_readable([nb.cell(n).locator(".jp-OutputArea") for n in range(len(CELLS))], nb.page)
    assert "Error displaying widget" not in nb.page.locator(".jp-Notebook").inner_text()


# the file, and nbconvert's HTML --------------------------------------------------------------------------------------


@pytest.fixture
def html_page(browser, tmp_path):
    """Open a notebook as nbconvert's HTML."""
    contexts = []

    def open_html(notebook, scripts=False, width=1100):
        path = tmp_path / "notebook.html"
        path.write_text(HTMLExporter().from_notebook_node(notebook)[0], encoding="utf-8")
        contexts.append(browser.new_context(java_script_enabled=scripts, viewport={"width": width, "height": 800}))
        contexts[-1].route("https://**", lambda route: route.abort())
        page, seen = watched(contexts[-1])
        page.goto(path.as_uri(), wait_until="domcontentloaded")
        return page, seen

    yield open_html
    for context in contexts:
        context.close()


def test_the_saved_notebook_is_valid_and_holds_no_script(saved):
    nbformat.validate(saved)
    assert "widgets" not in saved.metadata
    assert "<script" not in markup(saved).lower()
    assert not [out for out in outputs(saved) if WIDGET in out.get("data", {})]
    live = [n for n, cell in enumerate(saved.cells) if any("art_nb" in out.get("metadata", {}) for out in cell.outputs)]
    assert live == [VIEW, RUN]
    assert all("text/html" in out.data for out in outputs(saved))


def test_as_html_it_reads_with_scripts_off(saved, html_page):
    page, seen = html_page(saved)
    areas = page.locator(".jp-CodeCell")
    fold = areas.nth(JUDGED).locator("details").first
    fold.locator("summary").first.click()
    expect(fold).to_have_attribute("open", "")
    check_readable([areas.nth(n).locator(".jp-OutputArea") for n in range(len(CELLS))], page)
    assert page.evaluate(TOO_WIDE) == []
    check_inert(page, seen, "file:")


def test_as_html_no_attack_works_with_scripts_on(saved, html_page):
    page, seen = html_page(saved, scripts=True)
    page.evaluate(ALL_OPEN)
    page.wait_for_load_state()
    assert (seen.attacks, seen.dialogs) == ([], [])
    assert not [url for url in seen.asked if "evil.example" in url]
    assert page.locator(".jp-OutputArea script").count() == 0
    areas = page.locator(".jp-CodeCell")
    check_readable([areas.nth(n).locator(".jp-OutputArea") for n in range(len(CELLS))], page)


@pytest.mark.parametrize("tutorial", TUTORIALS)
def test_a_committed_tutorial_reads_with_scripts_off(root, html_page, tutorial):
    notebook = nbformat.read(root / "examples" / tutorial, as_version=4)
    nbformat.validate(notebook)
    assert "widgets" not in notebook.metadata
    assert not [out for out in outputs(notebook) if WIDGET in out.get("data", {})]
    assert "<script" not in markup(notebook).lower()
    for width in (1100, 700):
        page, seen = html_page(notebook, width=width)
        expect(page.locator(".jp-OutputArea-output").first).to_be_visible()
        assert page.evaluate(TOO_WIDE) == []
        assert seen.asked == [page.url]
