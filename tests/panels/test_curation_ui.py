"""The curation panel in Chromium, on the real panel: filter, marks by keyboard, corrections, tags, hostile texts."""

import json
import threading

import pytest
from support.ui import HOSTILE, axe_faults, calm, waits
from support.view_parts import CALLS, RESULTS, Talk, crowd

import art_nb as art
from art_nb.views import curation_replies


def talks():
    """Twelve conversations; one has calls, one has personal data, two are the same."""
    made = [
        art.Trajectory(
            messages_and_choices=[
                {"role": "system", "content": "You answer customers."},
                {"role": "user", "content": f"Where is order {n}?"},
                {"role": "assistant", "content": f"Order {n} arrives on Monday."},
                {"role": "user", "content": "Thanks!"},
                {"role": "assistant", "content": "You are welcome."},
            ],
            reward=n / 10,
        )
        for n in range(9)
    ]
    call = Talk(2).add("user", "Look.").say("I look", tool_calls=CALLS)
    for result in RESULTS:
        call.add(**result)
    made.append(call.say("A fork.").end(1.0))
    mail = [{"role": "user", "content": "I am ana@example.com"}, {"role": "assistant", "content": "Hello Ana."}]
    made += [art.Trajectory(messages_and_choices=mail), art.Trajectory(messages_and_choices=mail)]
    return made


def saved(path):
    store = art.RunStore(path)
    store.write_groups("train", 1, [art.TrajectoryGroup(talks())])
    return store.path


@pytest.fixture
def opened(page_with):
    """Open the panel and wait until everything is read."""

    def open_panel(what, author="ana", journal=None, panel=None, **options):
        panel = panel or art.curate(what, author=author, journal=journal)
        page = page_with(panel, **options)
        page.wait_for_function("!document.querySelector('.art-cu-counts').textContent.includes('reading')")
        page.wait_for_selector(".art-cu-turn")
        calm(page)
        page.panel = panel
        return page

    return open_panel


def pressed(page, keys):
    page.focus(".art-panel")
    for key in keys:
        page.keyboard.press(key)
        calm(page)


def rows(page):
    return [text.split("\n") for text in page.locator(".art-cu-row").all_inner_texts()]


def test_filter_mark_correct_and_find_everything_after_a_reload(opened, tmp_path):
    path = saved(tmp_path / "run")
    page = opened(path)
    page.focus(".art-panel")
    page.keyboard.press("\\")
    page.keyboard.type("reward>=0.6 and not personal")
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelectorAll('.art-cu-row').length == 4")
    pressed(page, "ng")
    page.wait_for_selector(".art-cu-head .art-cu-mark-good[aria-pressed=true]")
    pressed(page, "nbnG")  # the list has the rows 6, 7, 8 and 9
    entries = page.panel.curation.journal.read()
    assert [(entry.value, entry.turn) for entry in entries] == [("good", None), ("bad", None), ("good", 2)]
    assert page.panel.good().rows == (6, 8) and page.panel.bad().rows == (7,)
    pressed(page, "e")
    page.wait_for_selector(".art-cu-editor textarea")
    page.fill(".art-cu-editor textarea", "I found <b>one</b> fork.")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".art-cu-correction")
    removed, added = (page.locator(f".art-cu-correction {name}").all_inner_texts() for name in ("del", "ins"))
    assert removed and any("<b>" in text for text in added)
    page.focus(".art-panel")
    page.keyboard.press("t")
    page.keyboard.type("forks")
    page.keyboard.press("Enter")
    page.wait_for_selector(".art-cu-tag:has-text('forks')")
    calm(page)
    page.wait_for_timeout(400)  # the state of the panel is stored
    counts = page.inner_text(".art-cu-counts")
    shown, row = rows(page), page.inner_text(".art-cu-head strong")
    page.reload()
    page.wait_for_selector(".art-cu-correction")
    calm(page)
    assert page.input_value(".art-cu-where") == "reward>=0.6 and not personal"
    assert (page.inner_text(".art-cu-counts"), rows(page)) == (counts, shown)
    assert page.inner_text(".art-cu-head strong") == row
    other = opened(path, author="ben")  # another kernel
    assert other.inner_text(".art-cu-counts") == counts
    assert len(other.panel.curation.journal.read()) == len(page.panel.curation.journal.read()) >= 4
    sft = [m["content"] for t in other.panel.good().to_sft() for m in t.messages()]
    assert "I found <b>one</b> fork." in sft


def typed(page, keys):
    """Press keys faster than any conversation is loaded, and wait until everything is written."""
    page.evaluate(
        """(keys) => { for (const key of keys) document.querySelector(".art-panel")
        .dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, composed: true })); }""",
        keys,
    )
    page.wait_for_timeout(100)
    calm(page)


def test_keys_mark_the_selected_conversation_before_it_is_shown(opened):
    page = opened(talks())
    keys = {page.panel.curation.key_of(row): row for row in range(4)}

    def entries():
        return [(keys[e.conversation], e.value, e.turn) for e in page.panel.curation.journal.read()]

    typed(page, "gng")
    waits(page, lambda: len(entries()) == 2)
    assert entries() == [(0, "good", None), (1, "good", None)]
    typed(page, "njjG")  # the messages of the new conversation: 2 is the first reply, and 4 is the second one
    waits(page, lambda: len(entries()) == 3)
    assert entries()[2] == (2, "good", 4)
    typed(page, "nbbb")  # the second key withdraws the mark
    waits(page, lambda: len(entries()) == 6)
    assert [value for row, value, _ in entries() if row == 3] == ["bad", None, "bad"]
    assert page.locator(".art-cu-note").is_hidden()
    typed(page, "pGp")
    assert "Conversation 2 was not shown yet" in page.inner_text(".art-cu-note")
    assert len(entries()) == 6


def test_marks_of_two_people_and_python(opened, tmp_path):
    path = saved(tmp_path / "run")
    page = opened(path)
    art.curate(path, author="ben").mark(0, "bad")
    pressed(page, "g")
    page.wait_for_selector(".art-cu-head :text('disputed')")
    assert "ben: bad" in page.inner_text(".art-cu-head")
    waits(page, lambda: "1 disputed" in page.inner_text(".art-cu-counts"))
    art.curate(path, author="eve").tag(0, "from eve")
    page.panel.refresh()
    page.wait_for_selector(".art-cu-tag:has-text('from eve')")
    page.panel.tag(0, "from Python")
    page.wait_for_selector(".art-cu-tag:has-text('from Python')")
    page.click("[aria-label='Remove the tag from Python']")
    page.wait_for_selector(".art-cu-tag:has-text('from Python')", state="detached")
    pressed(page, "u")
    page.wait_for_selector(".art-cu-head .art-cu-mark-good[aria-pressed=false]")
    assert page.panel.bad().rows == (0,)


def test_calls_can_be_corrected_and_invalid_ones_are_refused(opened, tmp_path):
    page = opened(talks(), journal=tmp_path / "marks.jsonl")
    page.fill(".art-cu-where", "tools>0")
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelectorAll('.art-cu-row').length == 1")
    page.click(".art-cu-row")
    page.wait_for_selector(".art-call")
    calm(page)
    pressed(page, "e")
    page.wait_for_selector(".art-cu-call")
    arguments = page.locator("[aria-label='Arguments of call 1']")
    arguments.fill('{"query": ')
    page.click(".art-cu-editor >> text=Save")
    page.wait_for_selector(".art-cu-problem:has-text('not a JSON object')")
    arguments.fill('{"query": "pins"}')
    page.click(".art-cu-editor >> text=Save")
    page.wait_for_selector(".art-cu-correction ins:has-text('pins')")
    (pair,) = page.panel.preference_pairs()
    assert pair["chosen"][0]["tool_calls"][0]["function"]["arguments"] == '{"query": "pins"}'
    pressed(page, "e")
    page.click("text=Withdraw correction")
    page.wait_for_selector(".art-cu-correction", state="detached")
    assert page.panel.preference_pairs() == []


def test_a_correction_that_is_not_saved_is_kept(opened, tmp_path):
    long = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    long += [{"role": "user", "content": f"message {n} " + "word " * 4000} for n in range(60)]
    page = opened([*talks()[:2], art.Trajectory(messages_and_choices=long)], journal=tmp_path / "marks.jsonl")
    field = ".art-cu-editor textarea"

    def edited():
        pressed(page, "e")
        page.wait_for_selector(field)
        return page.input_value(field)

    edited()
    page.fill(field, "a draft")
    assert edited() == "a draft"  # a second key opens the form again
    assert page.locator(".art-cu-editor").count() == 1
    page.click(".art-cu-row >> nth=2")
    page.wait_for_selector("text=message 0")
    assert edited() == "Hello"
    page.fill(field, "another draft")
    page.click("text=Load more")
    calm(page)
    page.wait_for_selector(field)
    assert page.input_value(field) == "another draft"
    page.keyboard.press("Escape")  # cancels the form
    assert page.locator(field).count() == 0
    assert edited() == "Hello"
    page.keyboard.press("Escape")
    page.click(".art-cu-row >> nth=0")
    page.wait_for_selector(".art-cu-turn >> text=not saved")
    assert edited() == "a draft"
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".art-cu-correction")
    assert page.locator("text=not saved").locator("visible=true").count() == 0 and not page.locator(field).count()
    (entry,) = page.panel.curation.journal.read()
    assert entry.value["content"] == "a draft" and entry.turn == 2


def test_a_form_stays_open_when_another_person_marks_the_conversation(opened, tmp_path, monkeypatch):
    """The form opens while the new marks are being read."""
    page = opened(saved(tmp_path / "run"))
    read, begun, ended = curation_replies.traj_reply, threading.Event(), threading.Event()

    def slow(*args, **options):
        begun.set()
        assert ended.wait(120)
        return read(*args, **options)

    monkeypatch.setattr(curation_replies, "traj_reply", slow)
    art.curate(tmp_path / "run", author="bob").mark(0, "bad")
    page.panel.refresh()
    assert begun.wait(120)
    page.focus(".art-panel")
    page.keyboard.press("e")
    page.wait_for_selector(".art-cu-editor")
    page.keyboard.type("My text. ")
    ended.set()
    page.wait_for_selector(".art-cu-head:has-text('bob: bad')")
    page.wait_for_selector(".art-cu-editor")
    assert page.input_value(".art-cu-editor textarea") == "Order 0 arrives on Monday.My text. "


def test_a_press_or_a_click_of_a_screen_reader_selects_a_row(opened):
    page = opened(talks())
    box = page.locator(".art-cu-row").nth(3).bounding_box()
    page.mouse.move(box["x"] + 60, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.wait_for_selector(".art-cu-row:nth-child(4)[aria-selected=true]")
    page.mouse.up()
    page.keyboard.press("ArrowDown")  # the list has the focus
    page.wait_for_selector(".art-cu-row:nth-child(5)[aria-selected=true]")
    page.evaluate("document.querySelector('.art-cu-row:nth-child(6)').click()")
    page.wait_for_selector(".art-cu-row:nth-child(6)[aria-selected=true]")


def test_personal_data_repeats_and_the_split(opened):
    page = opened(talks())
    assert "2 with findings of personal data" in page.inner_text(".art-cu-facts")
    assert "marks are kept in memory" in page.inner_text(".art-cu-facts")
    page.fill(".art-cu-where", "repeated")
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelectorAll('.art-cu-row').length == 1")
    page.click(".art-cu-row")
    page.wait_for_selector(".art-cu-notes >> text=ana@example.com")
    assert "Nearly the same" in page.inner_text(".art-cu-notes")
    page.click(".art-cu-notes >> text=ana@example.com")
    assert page.evaluate("CSS.highlights.get('art-curated').size") == 1
    page.fill(".art-cu-where", "validation")
    page.keyboard.press("Enter")
    page.fill(".art-cu-share", "1")
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelectorAll('.art-cu-row').length == 12")
    page.fill(".art-cu-where", "mark <")
    page.keyboard.press("Enter")
    page.wait_for_selector(".art-cu-problem:has-text('column')")
    assert page.get_attribute(".art-cu-where", "aria-invalid") == "true"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_accessible_and_not_wider_than_the_page(opened, theme):
    page = opened(talks(), theme=theme, width=1000)
    page.panel.mark(0, "good")
    page.panel.mark(1, "bad")
    page.panel.mark(2, "fix")
    page.panel.tag(0, "orders")
    page.panel.edit(0, 2, "Order 0 arrives on Friday.")
    page.wait_for_selector(".art-cu-correction")
    calm(page)
    for width in (390, 1000, 1440):
        page.set_viewport_size({"width": width, "height": 900})
        calm(page)
        assert not axe_faults(page)
        over = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert over <= 0, width
    pressed(page, "e")
    page.wait_for_selector(".art-cu-editor")
    page.focus(".art-panel")
    page.keyboard.press("?")
    page.wait_for_selector(".art-cu-help")
    assert not axe_faults(page)


def test_hostile_texts_stay_texts(opened, tmp_path):
    made = []
    for text in HOSTILE:
        entries = [{"role": "user", "content": text}, {"role": "assistant", "content": text + "\nana@example.com"}]
        made.append(art.Trajectory(messages_and_choices=entries))
    call = {"id": "c", "type": "function", "function": {"name": HOSTILE[0], "arguments": HOSTILE[1]}}
    made[0].messages_and_choices[1]["tool_calls"] = [call]
    page = opened(made, author=HOSTILE[1], journal=tmp_path / "marks")
    for row, text in enumerate(HOSTILE[:12]):
        page.panel.tag(row, text[:60])
        if row:
            page.panel.edit(row, 1, text + " corrected")
    pressed(page, "nnnnnnnnnnnnnnnnnnnn")
    page.wait_for_selector(".art-cu-turn")
    for _ in range(12):
        pressed(page, "pe")
    allowed = "DIV SPAN BUTTON SECTION STRONG NAV ARTICLE HEADER DETAILS SUMMARY DEL INS INPUT TEXTAREA DL DT DD KBD"
    names = page.evaluate("[...document.querySelectorAll('.art-host *')].map((one) => one.tagName)")
    assert {*names} <= {*allowed.split(), "DATALIST", "OPTION"}
    assert page.evaluate("window.__pwned") is None
    text = page.panel.html()
    assert "<script" not in text and "<img" not in text and "&lt;script" in text
    assert len(art.curate(made, journal=tmp_path / "marks").good()) == 11


def test_ten_thousand_conversations_scroll_and_are_marked(opened, tmp_path):
    page = opened({1: crowd(10_000)}, journal=tmp_path / "marks.jsonl")
    assert "10000 conversations" in page.inner_text(".art-cu-counts")
    assert page.locator(".art-cu-row").count() < 80
    page.focus(".art-cu-list")
    page.keyboard.press("End")
    calm(page)
    page.wait_for_selector(".art-cu-row.art-is-selected:has-text('answer 7')")
    milliseconds = page.evaluate(
        """async () => { const start = performance.now();
        document.querySelector('.art-cu-head .art-cu-mark-good').click();
        while (!document.querySelector('.art-cu-row.art-is-selected .art-cu-good'))
          await new Promise(requestAnimationFrame);
        return performance.now() - start; }"""
    )
    assert milliseconds < 5000
    (line,) = (tmp_path / "marks.jsonl").read_text().splitlines()
    assert json.loads(line)["value"] == "good" and page.panel.good().rows == (9999,)


def test_making_the_panel_static(opened):
    page = opened(talks())
    page.panel.edit(0, 2, "Order 0 arrives on Friday.")
    page.click("text=Make static")
    page.wait_for_selector(".art-panel", state="detached")
    assert "<ins>Friday</ins>" in page.panel.html()
