"""The base of the panels: wire, ticks, errors, keys, themes, honest text; the bundle is what its sources say."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ipywidgets.widgets.widget import _instances
from support.ui import WireComm, axe_faults

from art_nb.core.types import ArtError
from art_nb.panels import base as panels
from art_nb.panels.base import MAX_UPDATE_BYTES, Panel, ThrottledSender, command, sendable

ROOT = Path(__file__).parents[2]
JS = ROOT / "js"
RENDER = """
export default { render: (host) => mount(host, (root, wire, model) => {
  Object.assign(window, { h, visible, marked, wire, root, num, heard: [], ticks: [], gaps: [] });
  const input = h("input", { type: "text", label: "a text" });
  const button = h("button", { onclick: () => heard.push("click") }, "Press");
  const box = h("input", { type: "checkbox", label: "a box" });
  root.append(input, box, button, h("p", { class: "art-text" }, marked("plain")));
  const say = announcer(root);
  wire.onTick((tick) => ticks.push(tick));
  wire.onGap((tick) => gaps.push(tick.seq));
  const table = { j: () => (heard.push("j"), say("j")), Escape: () => false };
  for (const name of ["J", "Enter", "Alt+ArrowUp", "Shift+ArrowUp", "Ctrl+j"]) table[name] = () => heard.push(name);
  return keys(root, table);
}) };
"""


class Probe(Panel):
    """A panel that shows `js/panel.js` itself."""

    _esm = (JS / "panel.js").read_text(encoding="utf-8") + RENDER
    _css = (JS / "panel.css").read_text(encoding="utf-8")

    def html(self) -> str:
        return "<div>a probe, frozen</div>"

    @command
    def add(self, a: int, b: int) -> dict:
        return {"sum": a + b, "id": "an id of its own"}

    @command
    def refuse(self) -> dict:
        raise ArtError("there is no \u202estep\u202c 7")

    @command
    def break_(self) -> dict:
        return {"quotient": 1 / 0}

    @command(thread=True)
    def wait(self, ms: int) -> dict:
        time.sleep(ms / 1000)
        return {"waited": ms}

    @command(thread=True)
    def hold(self) -> dict:
        return {"held": self.go_on.wait(120)}

    @command
    async def later(self) -> tuple:
        return {"n": 3}, [b"abc"]


class Ear(WireComm):
    """The far end of a panel: the ticks that arrive, and when."""

    def __init__(self):
        self.ticks = []
        super().__init__()

    def publish_msg(self, msg_type, data=None, **rest):
        if "tick" in (data or {}).get("state", {}):
            self.ticks.append((time.monotonic(), data["state"]["tick"]))


def answers(panel, *requests, first=()):
    """What a panel answers, in the order of the answers; it waits on until the `first` of them are there."""
    heard = []
    panel.send = lambda message, buffers=None: heard.append((message, buffers))
    for n, (name, args) in enumerate(requests, 1):
        panel._on_message(panel, {"id": n, "client": "c", "command": name, "args": args}, [])
    if first:
        until(lambda: {message["id"] for message, _ in heard} >= {*first})
        panel.go_on.set()
    until(lambda: len(heard) >= len(requests))
    return heard


def until(truth):
    """Wait for something to become true."""
    end = time.monotonic() + 120
    while not truth():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)


# the wire ------------------------------------------------------------------------------------------------------------


def test_quick_threaded_and_async_commands_answer():
    panel = Probe()
    panel.go_on = threading.Event()
    heard = answers(panel, ("hold", {}), ("add", {"a": 1, "b": 2}), ("later", {}), first=(2, 3))
    by_id = {message["id"]: (message, buffers) for message, buffers in heard}
    assert heard[-1][0]["id"] == 1  # the slow one did not stand in the way
    assert by_id[2][0]["reply"] == {"sum": 3, "id": "an id of its own"}
    assert by_id[3] == ({"id": 3, "client": "c", "v": 1, "ok": True, "reply": {"n": 3}}, [b"abc"])
    assert panel.last_error is None


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("add", {"a": "1", "b": 2}),
        ("add", {"a": 1}),
        ("add", {"a": 1, "b": 2, "c": 3}),
        ("add", {"a": 1.5, "b": 2}),
        ("add", None),
        ("html", {}),
        ("close", {}),
        ("show", {}),
        ("__init__", {}),
        ("_send_update", {"tick": {}}),
        ("send_state", {}),
        (7, {}),
        (None, {}),
        ("set_state", {"sync_data": {}}),
    ],
)
def test_what_is_not_on_the_list_is_refused(name, args):
    panel = Probe()
    ((message, _),) = answers(panel, (name, args))
    assert message["ok"] is False
    assert "\n" not in message["error"]
    assert "Traceback" not in message["error"]
    assert panel.last_error is None
    assert panel.comm is not None


def test_a_refusal_stays_with_the_asker_and_a_fault_is_shown():
    panel = Probe()
    ((message, _),) = answers(panel, ("refuse", {}))
    assert (message["error"], panel.last_error, panel.last_error_text) == ("there is no \u202estep\u202c 7", None, "")
    ((message, _),) = answers(panel, ("break_", {}))
    assert message["error"] == panel.last_error_text == "ZeroDivisionError: division by zero"
    assert isinstance(panel.last_error, ZeroDivisionError)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(["add", "refuse", "later", "close", "tick", "comm", "", "art_command"]) | st.text(max_size=8)


@settings(max_examples=150)
@given(
    message=JSON
    | st.fixed_dictionaries(
        {"id": st.integers() | JSON, "command": NAMES | JSON}, optional={"args": JSON, "client": JSON}
    )
)
def test_no_message_breaks_a_panel(message):
    panel, heard = Probe(), []
    panel.send = lambda answer, buffers=None: heard.append(answer)
    panel._on_message(panel, message, [])
    panel.close()
    assert len(heard) <= 1
    assert panel.last_error is None
    for answer in heard:
        json.dumps(answer, allow_nan=False)


def test_what_json_cannot_hold_is_mended():
    numpy = pytest.importorskip("numpy")
    mended = sendable(
        {"text": "half \ud800 of one", "r": float("nan"), "n": numpy.float32(0.5), "rows": [float("inf"), "ok"]}
    )
    assert mended == {"text": "half \\ud800 of one", "r": None, "n": 0.5, "rows": [None, "ok"]}
    json.dumps(mended, ensure_ascii=False, allow_nan=False).encode("utf-8")


# ticks ---------------------------------------------------------------------------------------------------------------


def test_updates_are_throttled_and_the_last_update_is_sent():
    panel, end = Probe(), time.monotonic() + 1.1
    panel.comm = Ear()

    def flood(who):
        n = 0
        while time.monotonic() < end:
            panel.send_update({who: (n := n + 1)})
            time.sleep(0.001)
        panel.send_update({who: -1})

    threads = [threading.Thread(target=flood, args=(f"t{i}",)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    last = lambda: {key: value for _, tick in [*panel.comm.ticks] for key, value in tick.items() if key != "seq"}
    until(lambda: [*last().values()] == [-1] * 3)
    times, ticks = zip(*panel.comm.ticks)
    assert [tick["seq"] for tick in ticks] == list(range(1, len(ticks) + 1))
    assert min(b - a for a, b in zip(times, times[1:])) > 0.2  # a lower bound: a slow machine only adds to it
    assert last() == {"t0": -1, "t1": -1, "t2": -1}


def test_no_tick_is_lost_while_messages_are_taken_in():
    """A message of the page holds traitlets' notifications back; what another thread assigns meanwhile may be lost."""
    panel = Probe()
    panel.comm, stop, counts = Ear(), threading.Event(), range(3000)

    def page():
        while not stop.is_set():
            panel.set_state({"last_error_text": "of the page"})

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=page)
    thread.start()
    try:
        sys.setswitchinterval(1e-6)
        for n in counts:
            panel._send_update({"n": n})
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
    assert [tick["n"] for _, tick in panel.comm.ticks] == [*counts]


def test_a_closed_panel_says_nothing_more():
    class Slow(Ear):
        def send(self, *args, **options):
            sending.set()
            time.sleep(0.2)
            super().send(*args, **options)

        def publish_msg(self, msg_type, data=None, **rest):
            said.append(msg_type)

    panel, said, sending = Probe(), [], threading.Event()
    panel.comm = Slow()
    thread = threading.Thread(target=panel.send_update, args=({"n": 1},))
    thread.start()
    assert sending.wait(120)
    panel.close()
    thread.join()
    assert said == ["comm_msg", "comm_close"]


def test_a_tick_is_small():
    panel = Probe()
    with pytest.raises(ValueError, match=str(MAX_UPDATE_BYTES)):
        panel.send_update({"text": "x" * MAX_UPDATE_BYTES})
    panel._sender = ThrottledSender(panel._send_update, interval_s=3600)
    panel.send_update({"phase": "rollout"})
    panel.send_update({"a": "日" * 3000})  # counted as it is sent
    panel.send_update({"b": "日" * 3000})  # each is small, both merged are not
    panel._sender.flush()
    assert panel.tick == {"phase": "rollout", "seq": 1}
    assert "bytes of JSON, but the maximum is" in panel.last_error_text


# showing -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def shell():
    """An IPython shell that records what is displayed and updated."""
    from IPython.core.interactiveshell import InteractiveShell

    InteractiveShell.clear_instance()
    one = InteractiveShell.instance()
    seen = []
    one.display_pub.publish = lambda data, metadata=None, transient=None, update=False, **_: seen.append(
        {"data": data, "id": (transient or {}).get("display_id"), "update": update}
    )
    one.seen = seen
    yield one
    InteractiveShell.clear_instance()


def test_shown_again_under_the_same_key_the_former_is_closed(shell):
    before = len(_instances)
    for _ in range(1000):
        panel = Probe(key="one run")
        panel.show()
    assert len(_instances) - before == 2  # the last one, and its layout
    ids = [out["id"] for out in shell.seen if not out["update"]]
    left = [out["id"] for out in shell.seen if out["update"]]
    assert (len(set(ids)), left) == (1000, ids[:-1])
    panel.close()
    assert "one run" not in panels._SHOWN


def test_one_panel_in_two_places_is_frozen_in_both(shell):
    panel = Probe()
    panel.show()
    panel.show()
    assert not [out for out in shell.seen if out["update"]]
    panel.freeze()
    ids = [out["id"] for out in shell.seen]
    assert len(set(ids[:2])) == 2
    assert ids[2:] == ids[:2]


def test_both_forms_are_displayed_and_freezing_leaves_one(shell):
    panel = Probe()
    shell.display_formatter.format(panel)  # as the last line of a cell does
    (shown,) = shell.seen
    assert shown["data"]["text/html"] == "<div>a probe, frozen</div>"
    assert "application/vnd.jupyter.widget-view+json" in shown["data"]
    panel.freeze()
    frozen = shell.seen[-1]
    assert (frozen["update"], frozen["id"]) == (True, shown["id"])
    assert frozen["data"] == {"text/html": "<div>a probe, frozen</div>", "text/plain": "<Probe>"}
    assert panel.comm is None
    panel.show()  # a closed panel still has its frozen form
    assert "application/vnd.jupyter.widget-view+json" not in shell.seen[-1]["data"]


def test_outside_a_notebook_a_panel_is_a_line(capsys):
    Probe().show()
    assert capsys.readouterr().out == "<Probe: shown in notebooks>\n"


# in the browser ------------------------------------------------------------------------------------------------------


def test_requests_find_their_answers(page_with):
    page = page_with(Probe())
    both = page.evaluate(
        "Promise.all([wire.request('wait', {ms: 60}), wire.request('add', {a: 2, b: 3})])"
        ".then((all) => all.map(({reply}) => reply))"
    )
    assert both == [{"waited": 60}, {"sum": 5, "id": "an id of its own"}]
    assert page.evaluate(
        "wire.request('later')"
        ".then(({reply, buffers}) => [reply.n, buffers[0] instanceof DataView, buffers[0].getUint8(1)])"
    ) == [3, True, 98]
    assert page.evaluate("wire.request('nothing').catch((error) => error.message)") == "there is no command 'nothing'"
    given_up = """(() => { const stop = new AbortController(), asked = wire.request('wait', {ms: 20}, stop);
      stop.abort(); return asked.catch((error) => error.name); })()"""
    assert page.evaluate(given_up) == "AbortError"


def test_a_lost_tick_is_noticed(page_with):
    panel = Probe()
    page = page_with(panel)
    panel.tick = {"n": 1, "seq": 1}
    panel.tick = {"n": 2, "seq": 2}
    panel.tick = {"n": 5, "seq": 5}
    page.wait_for_function("ticks.length === 3")
    assert page.evaluate("gaps") == [5]


def test_an_unexpected_error_is_shown_on_the_panel(page_with):
    panel = Probe()
    page = page_with(panel)
    assert not page.locator(".art-strip").is_visible()
    page.evaluate("wire.request('break_').catch(() => 0)")
    page.wait_for_selector(".art-strip")
    assert "ZeroDivisionError: division by zero" in page.inner_text(".art-strip")
    page.click(".art-strip button")
    assert not page.locator(".art-strip").is_visible()
    assert isinstance(panel.last_error, ZeroDivisionError)
    panel.last_error = None  # else the fixture raises it


@pytest.mark.parametrize(
    "call",
    [
        "h('div', {innerHTML: '<b>x</b>'})",
        "h('div', {outerHTML: 'x'})",
        "h('iframe', {srcdoc: 'x'})",
        "h('div', {srcdoc: 'x'})",
        "h('script', {}, 'x')",
        "h('a', {href: 'javascript:0'})",
        "h('img', {src: 'x'})",
        "h('div', {onclick: 'x()'})",
        "h('style', {}, 'x')",
        "h('form', {action: 'x'})",
        "h('div', {textContent: 'x'})",
        "h('link', {})",
        "h('div', {insertAdjacentHTML: 'x'})",
        "h('div', {formaction: 'x'})",
    ],
)
def test_nothing_becomes_markup(page_with, call):
    page = page_with(Probe())
    assert "is not allowed" in page.evaluate(
        f"(() => {{ try {{ {call}; return 'allowed'; }} catch (error) {{ return error.message; }} }})()"
    )


def test_text_is_text(page_with):
    page = page_with(Probe())
    made = page.evaluate("""(() => { const node = h("p.muted",
        { id: "made", label: "a label", style: { color: "red" }, "data-n": 0, hidden: false },
      "<img src=x onerror=alert(1)>", null, false, [1, [h("b", null, "bold")]]); return node.outerHTML; })()""")
    assert made == (
        '<p class="art-muted" id="made" aria-label="a label" data-n="0" style="color: red;">'
        "&lt;img src=x onerror=alert(1)&gt;1<b>bold</b></p>"
    )


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("tab\tand\nline", "tab\tand\nline"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\u202etxt.exe", "\\u202etxt.exe"),
        ("a\u200bb\ufeff", "a\\u200bb\\ufeff"),
        ("nul\x00", "nul\\x00"),
        ("\x85\r", "\\x85\\x0d"),
        ("\U000e0041", "\\U000e0041"),
        ("👩\u200d💻", "👩\u200d💻"),
        ("a\u200db", "a\\u200db"),
        ("soft\u00adhyphen", "soft\\xadhyphen"),
        ("e\u0301 ü 漢 🎉", "e\u0301 ü 漢 🎉"),
        ("\u2028", "\\u2028"),
    ],
)
def test_what_cannot_be_seen_is_written_out(page_with, text, seen):
    page = page_with(Probe())
    assert page.evaluate("(text) => visible(text)", text) == seen
    assert page.evaluate("(text) => { const p = h('p'); p.append(marked(text)); return p.textContent; }", text) == seen
    marks = page.evaluate(
        "(text) => { const p = h('p'); p.append(marked(text)); return p.querySelectorAll('.art-odd').length; }", text
    )
    assert (marks > 0) == (seen != text)


def test_a_lone_surrogate_is_written_out(page_with):
    assert page_with(Probe()).evaluate("visible('a' + String.fromCharCode(0xd800) + 'b')") == "a\\ud800b"


def test_keys_are_heard_with_the_focus_and_not_while_typing(page_with):
    page = page_with(Probe())
    page.evaluate("document.addEventListener('keydown', (event) => (window.outside ??= []).push(event.key))")
    page.keyboard.press("j")
    assert page.evaluate("heard") == []  # nobody has looked at the panel yet
    page.focus(".art-panel")
    for key in ("j", "Shift+J", "Alt+ArrowUp", "Shift+ArrowUp", "Control+j", "q"):
        page.keyboard.press(key)
    assert page.evaluate("heard") == ["j", "J", "Alt+ArrowUp", "Shift+ArrowUp", "Ctrl+j"]
    page.focus("input[type=text]")
    page.keyboard.type("jJ")
    assert page.input_value("input[type=text]") == "jJ"
    assert len(page.evaluate("heard")) == 5
    page.focus("input[type=checkbox]")
    page.keyboard.press("j")  # a box is no text
    page.focus("text=Press")
    page.keyboard.press("Enter")  # and Enter on a button presses it
    assert page.evaluate("heard.slice(5)") == ["j", "click"]
    assert page.evaluate("window.outside") == ["j"]  # only the first, before the panel had the focus
    assert page.get_attribute(".art-panel", "data-lm-suppress-shortcuts") == "true"


def test_the_theme_follows_the_page(page_with):
    page = page_with(Probe(), theme="light")
    dark = "document.querySelector('.art-host').classList.contains('art-dark')"
    assert page.evaluate(dark) is False
    for change, wanted in [
        ("document.body.dataset.jpThemeLight = 'false'", True),
        ("document.body.dataset.jpThemeLight = 'true'", False),
        ("delete document.body.dataset.jpThemeLight, document.documentElement.setAttribute('theme', 'dark')", True),
        ("document.documentElement.removeAttribute('theme'), document.body.className = 'vscode-light'", False),
        ("document.body.className = 'vscode-dark'", True),
        ("document.body.className = ''", False),
    ]:
        page.evaluate(f"void ({change})")
        page.wait_for_function(f"{dark} === {str(wanted).lower()}")
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"{dark} === true")


def test_a_theme_of_high_contrast_has_no_grey(page_with):
    page = page_with(Probe(), theme="dark")
    muted = "getComputedStyle(root.appendChild(h('span.muted', null, 'x'))).color"
    color = "getComputedStyle(root).color"
    assert page.evaluate(muted) != page.evaluate(color)
    page.evaluate("void document.body.setAttribute('data-jp-theme-name', 'JupyterLab Dark High Contrast')")
    page.wait_for_function("document.querySelector('.art-contrast')")
    assert page.evaluate(muted) == page.evaluate(color)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_base_has_no_serious_fault(page_with, theme):
    panel = Probe(last_error_text="something failed")
    page = page_with(panel, theme=theme)
    assert not axe_faults(page)


def test_closing_a_panel_takes_its_listeners_away(page_with):
    page = page_with(Probe())
    before = page.evaluate("[...model.listeners.values()].flat().length")
    page.evaluate("close_panel()")
    assert before > 0
    assert page.evaluate("[...model.listeners.values()].flat().length") == 0


# the bundle ----------------------------------------------------------------------------------------------------------

SINKS = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\s*\(|new\s+Function|srcdoc|DOMParser|createContextualFragment"
    r"|setHTML|https?://|\bimport\s*\(|WebSocket|XMLHttpRequest|\bfetch\s*\(|postMessage|localStorage"
)
# The script of the viewer, from the kernel and as a blob: anywidget imports the script of each panel in the same way.
BLOB_IMPORT = "return (await import(url)).default;"
SOURCES = sorted(path for path in JS.rglob("*.js") if "node_modules" not in path.parts)


def test_there_are_sources():
    assert {"panel.js", "viewer.js"} <= {path.name for path in SOURCES}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(JS).as_posix())
def test_no_sink_and_no_address_in_the_sources(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    if path.name == "embedded-viewer.js":
        assert [line.strip() for line in lines].count(BLOB_IMPORT) == 1
        lines = [line for line in lines if line.strip() != BLOB_IMPORT]
    assert not [f"{n}: {line.strip()}" for n, line in enumerate(lines, 1) if SINKS.search(line)]


def test_the_sink_test_would_notice():
    for line in (
        "x.innerHTML = y",
        "eval (x)",
        'import("https://x")',
        "new Function('x')",
        "el.insertAdjacentHTML('x', y)",
    ):
        assert SINKS.search(line)


@pytest.mark.parametrize("path", sorted((ROOT / "art_nb" / "static").glob("*.css")), ids=lambda path: path.name)
def test_style_sheets_fetch_nothing_and_touch_only_us(path):
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"@import|url\(|expression\(", text)
    rules = re.sub(r"/\*.*?\*/", "", text)
    selectors = [
        one.strip()
        for block in re.findall(r"([^{}]+)\{", rules)
        for one in re.split(r",(?![^(]*\))", block)
        if not block.strip().startswith("@")
    ]
    assert selectors
    assert not [
        one
        for one in selectors
        if ".art-" not in one
        and "art-tk" not in one
        and not re.match(r"::highlight\(art-|\.u-|\.uplot|\d+%|from|to", one)
    ]


def test_no_panel_styles_what_is_anothers():
    """All sheets lie in one page: what is not in a common sheet has one owner."""
    sheets = [path for path in JS.rglob("*.css") if "node_modules" not in path.parts]
    named = {path.name: set(re.findall(r"\.(art-[\w-]+)", path.read_text(encoding="utf-8"))) for path in sheets}
    common = {name for sheet in ("panel.css", "thread.css") for name in named.pop(sheet)}
    owned = [name for names in named.values() for name in names - common if not name.startswith("art-is-")]
    assert len(named) == 7
    assert sorted(owned) == sorted(set(owned))


def test_a_panel_takes_at_most_60_kb():
    pairs = {}
    for path in (ROOT / "art_nb" / "static").iterdir():
        if path.suffix in (".js", ".css"):
            pairs[path.stem] = pairs.get(path.stem, 0) + path.stat().st_size
    assert pairs
    assert not {name: size for name, size in pairs.items() if size > 60 * 1024}


@pytest.mark.slow
def test_the_bundle_is_what_the_sources_say(tmp_path):
    """Rebuilt from the lock file, the bundle is the same to the byte."""
    npm = shutil.which("npm")
    if npm is None:
        if os.environ.get("ART_NB_BROWSER") == "required":
            pytest.fail("ART_NB_BROWSER=required, and there is no npm")
        pytest.skip("no npm: the bundle cannot be rebuilt here")
    shutil.copytree(JS, tmp_path / "js", ignore=shutil.ignore_patterns("node_modules"))
    for words in (["ci", "--no-audit", "--no-fund"], ["run", "build"]):
        done = subprocess.run([npm, *words], cwd=tmp_path / "js", capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
    built = {path.name: path.read_bytes() for path in (tmp_path / "art_nb" / "static").iterdir()}
    ours = {
        path.name: path.read_bytes() for path in (ROOT / "art_nb" / "static").iterdir() if not path.name.startswith(".")
    }
    assert sorted(name for name in built.keys() | ours.keys() if built.get(name) != ours.get(name)) == []
