"""The live cell in a browser: the real script on the real panel, with runs that are written and one that trains."""

import json
import re
import threading
import time

import pytest
from support.live_parts import Home, Script
from support.ui import HOSTILE, WireComm, axe_faults, calm, waits

import art_nb as art
from art_nb.core.files import JsonLinesTail
from art_nb.panels.live_cell import LiveCell
from art_nb.training.run import Run


def until(truth, timeout_s=120):
    """Wait for something to become true."""
    end = time.monotonic() + timeout_s
    while not truth():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)


@pytest.fixture
def script(tmp_path):
    return Script(tmp_path / "run", ago_s=13 * 70).whole(12)


@pytest.fixture
def cell(script):
    return LiveCell(Run.attach(script.store.path))


def look(cell):
    """What the pulse of a shown cell does: read the run and send what is new."""
    cell.run.refresh()
    cell.send_update(cell.state())


def wait_for(page, text):
    page.wait_for_selector(f".art-panel >> text=/{text}/", timeout=120_000)


@pytest.fixture
def orders(script):
    """What was ordered of the run so far, as files; each counts once."""

    def read():
        found = sorted(p.name for p in script.store.path.iterdir() if re.fullmatch("[A-Z_]+", p.name))
        for name in found:
            (script.store.path / name).unlink()
        return found

    return read


def pressed(orders):
    """The next order."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        found = orders()
        if found:
            return found
        time.sleep(0.02)
    return []


# what is shown


def test_the_whole_picture(page_with, cell, script):
    script.rollouts(groups=3)
    cell.run.refresh()
    page = page_with(cell)
    for part in ("ttt-001", "24 of 64", "99 finished"):
        wait_for(page, part)
    text = page.locator(".art-panel").inner_text()
    for part in (
        "running",
        "step 13 of 40",
        "left",
        "24 of 64",
        "Rollouts",
        "Judging",
        "Training",
        "Syncing",
        "last step",
        "tok/s",
        "99 finished",
    ):
        assert part in text, part
    page.wait_for_selector(".art-curve canvas")
    assert page.locator(".art-curve canvas").count() == 7
    label = page.locator(".art-curve.art-wide").get_attribute("aria-label")
    assert re.match(r"Reward by step: [\d.]+ at first, [\d.]+ now, between", label)


def test_a_metric_of_the_task_gets_a_curve_when_it_appears(page_with, cell, script):
    page = page_with(cell)
    page.wait_for_selector(".art-curve canvas")
    assert page.locator("figure.art-curve").count() == 7
    for share in (0.25, 0.5):
        script.rollouts()
        script.training()
        script.done(**{"train/solved": share})
    look(cell)
    curve = page.locator("figure[aria-label^='solved by step: 0.25 at first, 0.5 now']")
    curve.locator("canvas").wait_for()
    assert page.locator("figure.art-curve").count() == 8
    assert not axe_faults(page)


def test_curves_are_drawn_where_the_numbers_are(page_with, cell):
    page = page_with(cell)
    page.wait_for_selector(".art-curve canvas")
    page.wait_for_function("""() => Math.min(...[...document.querySelectorAll('.art-curve canvas')].map(canvas => {
        const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        let n = 0;
        for (let i = 3; i < data.length; i += 4) n += data[i] > 60;
        return n; })) > 150""")


def test_a_pointer_reads_the_same_step_in_every_curve(page_with, cell):
    page = page_with(cell)
    page.wait_for_selector(".art-curve canvas")
    calm(page)
    page.wait_for_timeout(200)
    page.locator(".art-wide .u-over").hover(position={"x": 5, "y": 50})
    values = page.locator(".art-curve-value").all_inner_texts()
    assert [value.endswith("· step 1") for value in values] == [True] * 7
    assert page.locator(".art-cross:visible").count() == 7
    page.mouse.move(2, 2)
    page.wait_for_function(
        "![...document.querySelectorAll('.art-curve-value')].some((value) => value.innerText.includes('step'))"
    )


def test_ticks_move_the_picture_and_a_gap_heals(page_with, cell, script):
    page = page_with(cell)
    page.wait_for_selector(".art-curve canvas")
    script.whole(1)
    look(cell)
    wait_for(page, "step 14 of 40")
    script.whole(9)  # more rows than a tick repeats
    next(cell._seq)  # a tick that never arrives
    time.sleep(0.3)
    look(cell)
    wait_for(page, "step 23 of 40")
    page.wait_for_function("window.sent.filter(m => m.command === 'index').length >= 2")
    calm(page)
    page.wait_for_function("""() => document.querySelector('.art-wide').getAttribute('aria-label').includes(' now')""")
    until(lambda: hovered_steps(page) == {str(n) for n in range(1, 23)})


def hovered_steps(page):
    """The steps that a pointer reads in the curve of the reward, from left to right."""
    area = page.locator(".art-wide .u-over")
    area.hover(position={"x": 5, "y": 50})
    box, steps = area.bounding_box(), {"1"}
    for x in range(0, int(box["width"]), 5):
        page.mouse.move(box["x"] + x, box["y"] + 50)
        steps |= set(re.findall(r"step (\d+)", page.locator(".art-wide .art-curve-value").inner_text()))
    return steps


def test_phases_are_displayed(page_with, cell, script):
    page = page_with(cell)
    on = lambda: page.locator(".art-phase.art-on").get_attribute("data-phase")
    script.rollouts()
    look(cell)
    page.wait_for_selector(".art-on[data-phase=judging]")
    script.training(4)
    time.sleep(0.3)
    look(cell)
    wait_for(page, "batch 4 of 9")
    assert on() == "training"


def test_a_silent_run_is_said_to_be_silent(page_with, tmp_path):
    script = Script(tmp_path / "run", ago_s=62 * 2 + 200)
    script.whole(2).rollouts(groups=1)
    page = page_with(LiveCell(Run.attach(script.store.path)))
    wait_for(page, r"No event for \d+ s, phase rollouts")


def test_a_view_without_updates_reports_it(page_with, cell):
    page = page_with(cell)
    wait_for(page, "running")
    page.evaluate("() => { const old = Date.now; Date.now = () => old() + 20000; }")
    page.wait_for_selector(".art-state[data-state=lost]")
    wait_for(page, "shows the run again")


def test_a_lost_request_for_the_history_is_sent_again(page_with, cell, script, monkeypatch):
    hear, lost = WireComm.heard, []

    def lose_the_first(self, data):
        if not lost and data.get("content", {}).get("command") == "index":
            lost.append(data)
        else:
            hear(self, data)

    monkeypatch.setattr(WireComm, "heard", lose_the_first)
    page = page_with(cell)
    wait_for(page, "running")
    waits(page, lambda: lost)  # the page shows the state before it requests the history
    assert not page.locator(".art-curve").count()
    page.evaluate("() => { const old = Date.now; Date.now = () => old() + 20000; }")
    script.whole(1)
    look(cell)
    page.wait_for_selector(".art-curve canvas")


def test_a_long_history_is_loaded_once(page_with, cell, script):
    for _ in range(3_000):
        script.step += 1
        script.store.append_history(script.row() | {"step": script.step})
    cell.run.refresh()
    page = page_with(cell)
    page.wait_for_selector(".art-curve canvas")
    count = "window.sent.filter((message) => message.command === 'index').length"
    for _ in range(3):
        script.whole(1)
        look(cell)
        page.wait_for_timeout(300)
    calm(page)
    assert page.evaluate(count) == 1
    script.whole(9)
    time.sleep(0.3)
    look(cell)
    page.wait_for_function(f"{count} === 2")
    assert page.evaluate("window.sent.findLast((message) => message.command === 'index').args.from_row") > 3_000


def test_a_dead_run_shows_where_it_resumes(page_with, script):
    record = json.loads((script.store.path / "run.json").read_text())
    (script.store.path / "run.json").write_text(json.dumps(record | {"pid": 2**22 + 1}))
    page = page_with(LiveCell(Run.attach(script.store.path)))
    wait_for(page, "The training kernel ended at step 12")
    assert page.locator(".art-live-buttons button:visible").all_inner_texts() == ["Make static", "?"]


def test_a_failure_shows_the_events_before_it_and_advice(page_with, script):
    script.rollouts(groups=1)
    script.fail("OutOfMemoryError: CUDA out of memory <img src=x onerror='window.__pwned=1'>")
    cell = LiveCell(Run.attach(script.store.path))
    page = page_with(cell)
    wait_for(page, "Failed in step 12")
    wait_for(page, "Lower tokens_per_batch")
    page.locator(".art-live-note details summary").click()
    card = page.locator(".art-live-note.art-is-bad:visible").inner_text()
    assert card.count("group=g12-0") >= 2 and "boom" in card and "The last 3 events" in card
    assert page.evaluate("window.__pwned") is None
    frozen = cell.html()
    assert "Lower tokens_per_batch" in frozen and "<img src=x" not in frozen


def test_without_buttons_the_files_for_pausing_and_stopping_are_named(page_with, cell, script):
    page = page_with(cell)
    script.rollouts(groups=1)
    cell.button_stage = "unavailable"
    look(cell)
    wait_for(page, "this kernel ignores the buttons")
    text = page.locator(".art-live-note[role=status]").inner_text()
    assert f"To pause, interrupt the cell (■) or create the file {script.store.path}/PAUSE." in text
    assert text.endswith(f"To stop, create {script.store.path}/STOP.")


def test_warnings_are_shown_with_what_to_try(page_with, cell, script):
    page = page_with(cell)
    script.rollouts()
    script.training()
    script.done(**{"train/reward": 0.0, "offpolicy/kl_sampler": 3.0})
    look(cell)
    page.wait_for_selector("[data-warning=kl_blow_up]")
    assert "Try:" in page.locator("[data-warning=kl_blow_up]").inner_text()


# groups


def test_the_list_follows_until_the_reader_scrolls(page_with, cell, script):
    page = page_with(cell)
    page.wait_for_selector(".art-group")
    at_end = (
        "() => { const l = document.querySelector('.art-groups'); "
        "return l.scrollHeight - l.scrollTop - l.clientHeight < 12 }"
    )
    page.wait_for_function(at_end)
    page.locator(".art-groups").evaluate("""list => list.scrollTop && new Promise(done => {
        list.addEventListener('scroll', () => done(), {once: true}); list.scrollTop = 0; })""")
    script.rollouts(groups=2)
    look(cell)
    page.wait_for_selector(".art-newest:visible")
    assert page.locator(".art-newest").inner_text() == "2 new ↓"
    assert page.locator(".art-groups").evaluate("list => list.scrollTop") == 0
    page.locator(".art-newest").click()
    page.wait_for_function(at_end)
    assert not page.locator(".art-newest").is_visible()


def test_badges_and_earlier_groups(page_with, cell):
    page = page_with(cell)
    page.wait_for_selector(".art-group")
    assert page.locator(".art-group").count() == 60
    assert page.locator(".art-group >> text=equal rewards").count() > 0
    assert page.locator(".art-group >> text=1 failed").count() > 0
    page.get_by_role("button", name="Earlier").click()
    page.wait_for_function("document.querySelectorAll('.art-group').length === 96")
    assert not page.get_by_role("button", name="Earlier").is_visible()


@pytest.mark.parametrize("width", [560, 760, 870, 1080, 1440])
def test_titles_and_means_have_room_in_narrow_windows(page_with, cell, width):
    page = page_with(cell, width=width)
    page.wait_for_selector(".art-curve canvas")
    state = cell.state()
    state["groups"][-1] |= {"mean": -0.0625, "std": 0.39}
    cell.send_update(state)
    wait_for(page, "−0.0625 ± 0.39")
    names = page.locator(".art-group-names > span")
    assert names.all_inner_texts()[:4] == ["Step", "Scenario", "Rewards", "Mean ± std"]
    cut = """(selector) => [...document.querySelectorAll(selector)].filter(
        (node) => node.scrollWidth > node.clientWidth || node.offsetHeight > 24).map((node) => node.textContent)"""
    assert page.evaluate(cut, ".art-curve figcaption .art-muted") == []
    assert page.evaluate(cut, ".art-group > .art-num") == []
    lefts = "(nodes) => nodes.map((node) => Math.round(node.getBoundingClientRect().left))"
    assert names.evaluate_all(lefts)[:3] == page.locator(".art-group").first.locator("> span").evaluate_all(lefts)[:3]


def test_the_device_is_no_warning(page_with, cell):
    page = page_with(cell)
    page.wait_for_selector(".art-curve canvas")
    cell.send_update(cell.state() | {"machine": {"device": "CPU"}})
    badge = page.locator(".art-live-facts .art-badge", has_text="CPU")
    badge.wait_for()
    assert "warn" not in badge.get_attribute("class")


def test_a_group_that_is_not_there_is_said(page_with, cell):
    page = page_with(cell)
    page.locator(".art-group").last.click()
    page.wait_for_selector(".art-live-note[role=alert]:visible")
    assert (
        "No trajectories of split 'train' at step 12" in page.locator(".art-live-note[role=alert]:visible").inner_text()
    )


# keys and buttons

BUTTONS = [("Pause", "PAUSE"), ("Stop after step", "STOP_AFTER_STEP"), ("Stop now", "STOP")]


@pytest.mark.parametrize(("label", "order"), BUTTONS)
def test_buttons(page_with, cell, orders, label, order):
    page = page_with(cell)
    page.get_by_role("button", name=label, exact=True).click()
    assert pressed(orders) == [order]


@pytest.mark.parametrize(("key", "order"), [("p", "PAUSE"), ("s", "STOP_AFTER_STEP"), ("S", "STOP")])
def test_keys_press_them_too(page_with, cell, orders, key, order):
    page = page_with(cell)
    page.locator(".art-panel").focus()
    page.keyboard.press(key)
    assert pressed(orders) == [order]


def test_p_resumes_what_is_paused(page_with, cell, script, orders):
    page = page_with(cell)
    script.record("paused")
    look(cell)
    page.wait_for_selector(".art-state[data-state=paused]")
    page.locator(".art-panel").focus()
    page.keyboard.press("p")
    assert pressed(orders) == ["RESUME"]


def test_keys_move_among_groups(page_with, cell):
    page = page_with(cell)
    page.wait_for_selector(".art-group")
    page.locator(".art-panel").focus()
    chosen = lambda: page.locator(".art-group[aria-selected=true]").get_attribute("id")
    page.keyboard.press("k")
    assert chosen().endswith("-95")
    page.keyboard.press("k")
    assert chosen().endswith("-94")
    page.keyboard.press("ArrowUp")
    assert chosen().endswith("-93")
    page.keyboard.press("j")
    page.keyboard.press("ArrowDown")
    assert chosen().endswith("-95")
    page.keyboard.press("g")
    assert chosen().endswith("-36")
    assert page.locator(".art-groups").get_attribute("aria-activedescendant") == chosen()
    page.keyboard.press("G")
    assert chosen().endswith("-95")


def test_help(page_with, cell):
    page = page_with(cell)
    page.locator(".art-panel").focus()
    page.keyboard.press("?")
    assert page.get_by_role("dialog").is_visible()
    page.keyboard.press("Escape")
    assert not page.get_by_role("dialog").is_visible()


def test_enter_opens_x_closes_f_makes_static(page_with, cell, monkeypatch):
    page = page_with(cell)
    page.wait_for_selector(".art-group")
    page.locator(".art-panel").focus()
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    page.wait_for_selector(".art-live-note[role=alert]:visible")  # this one is not on disk
    asked = lambda: page.evaluate("window.sent.map(m => m.command)")
    assert asked()[-1] == "open_group"
    page.keyboard.press("x")
    assert asked()[-1] == "open_group"  # nothing is open
    page.keyboard.press("F")
    page.get_by_role("button", name="Click again").wait_for()  # the run is active
    assert "freeze" not in page.evaluate("window.sent.map(m => m.command)")
    page.keyboard.press("F")
    until(lambda: cell.comm is None)


def test_no_key_is_heard_while_the_focus_is_elsewhere(page_with, cell, orders):
    page = page_with(cell)
    wait_for(page, "running")
    page.evaluate("document.activeElement.blur()")
    for key in "psS":
        page.keyboard.press(key)
    page.wait_for_timeout(200)
    assert orders() == []


# a run that trains here


@pytest.fixture
def home(tiny_model_dir, tmp_path):
    made = Home(tiny_model_dir, tmp_path)
    yield made
    made.close()


def test_a_run_is_paused_resumed_stopped_and_started_again(page_with, home):
    run = home.train()
    cell = LiveCell(run)
    page = page_with(cell)
    import threading

    threading.Thread(target=cell.refresh_loop, args=(None,), daemon=True).start()
    button = lambda name: page.get_by_role("button", name=name, exact=True)
    page.wait_for_selector(".art-curve canvas")
    button("Pause").click()
    page.wait_for_selector(".art-state[data-state=paused]")
    step = run.step
    button("Resume").click()
    until(lambda: run.step > step)
    button("Stop now").click()
    until(lambda: run._over.is_set())
    page.wait_for_selector(".art-state[data-state=stopped]")
    button("Start").click()
    until(lambda: run.status == "running" and run.step > step)
    button("Stop after step").click()
    until(lambda: run._over.is_set())
    assert run.status == "stopped" and run.step in home.model.store.steps_saved()
    cell.over.set()


def test_a_run_may_wait_for_its_start(page_with, home):
    run = home.train(start=False, steps=1)
    cell = LiveCell(run)
    page = page_with(cell)
    assert page.locator(".art-state").get_attribute("data-state") == "ready"
    page.locator(".art-panel").focus()
    page.keyboard.press("p")
    run.join(120)
    until(lambda: run.step == 1)


def test_a_finished_group_opens_in_the_viewer(page_with, home):
    shown = []

    class Slot:
        def update(self, data, raw=False):
            shown.append(data)

    run = home.train(steps=1)
    run.join()
    cell = LiveCell(run)
    cell.slot = Slot()
    page = page_with(cell)
    page.locator(".art-group").last.click()
    page.wait_for_selector(".art-group.art-open")
    assert cell.opened.rollout_index.title
    group = art.TrajectoryGroup(cell.opened.what)
    assert sorted(t.reward for t in group) in [sorted(t.reward for t in one) for one in run.groups]
    page.locator(".art-panel").focus()
    page.keyboard.press("x")
    until(lambda: cell.opened is None)
    assert [html.data for html in shown] == [""]  # put away; outside notebooks the viewer itself only prints


# budgets, safety, looks


def test_a_thousand_steps_open_no_comm_and_keep_to_four_messages_a_second(page_with, tmp_path):
    import ipywidgets

    script = Script(tmp_path / "run", steps=2000)
    run = Run.attach(script.store.path)
    cell = LiveCell(run)
    page = page_with(cell)
    page.wait_for_selector(".art-panel")
    widgets, start = len(ipywidgets.Widget.widgets), time.monotonic()
    cell.comm.messages.clear()
    for n in range(1000):
        run.progress.rows.append({"step": n + 1, "train/reward": n / 1000, "train/reward_std_dev": 0.1})
        run.progress.step, run.progress.steps = n + 1, 2000
        cell.send_update(cell.state())
        time.sleep(0.002)
    until(lambda: cell.tick["step"] == 1000)
    passed = time.monotonic() - start
    ticks = [m for m in cell.comm.messages if m["type"] == "comm_msg" and "update" in str(m)]
    assert len(ticks) <= 4 * passed + 2
    assert len(ipywidgets.Widget.widgets) == widgets
    assert max(message["bytes"] for message in cell.comm.messages) < 200_000
    wait_for(page, "step 1001 of 2000")


def test_a_tick_is_small_and_the_state_too(cell, script):
    script.rollouts()
    cell.run.refresh()
    assert len(json.dumps(cell.state())) < 16_384
    assert sum(len(str(value)) for value in cell.get_state().values()) < 100_000
    cell.close()


def test_a_picture_that_cannot_be_sent_ends_neither_pulse_nor_cell(cell, monkeypatch):
    whole, pictures, frozen = cell.state(), [], []
    monkeypatch.setattr(cell, "state", lambda: pictures.append(1) or whole | {"title": "日" * 16_384})
    monkeypatch.setattr(cell, "_replace_outputs", lambda html, close: frozen.append(html))
    pulse = threading.Thread(target=cell.refresh_loop, args=(None,), daemon=True)
    pulse.start()
    until(lambda: len(pictures) > 1)
    assert pulse.is_alive() and "bytes of JSON, but the maximum is" in cell.last_error_text
    cell.finish()
    assert frozen
    cell.last_error = None
    pulse.join(120)


def test_two_threads_read_a_run_once(cell, script, monkeypatch):
    script.whole(1)
    read, busy, most = JsonLinesTail.new_rows, [], []

    def new(tail):
        busy.append(tail)
        most.append(len(busy))
        time.sleep(0.05)
        busy.pop()
        return read(tail)

    monkeypatch.setattr(JsonLinesTail, "new_rows", new)
    threads = [threading.Thread(target=cell.run.refresh) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1 and len(cell.run.history) == 13


def test_script_and_style_are_small(root):
    static = root / "art_nb/static"
    assert (static / "live.js").stat().st_size + (static / "live.css").stat().st_size <= 60 * 1024


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_serious_for_axe(page_with, cell, script, theme):
    script.rollouts(groups=2)
    script.fail()
    cell.run.refresh()
    page = page_with(cell, theme=theme)
    page.wait_for_selector(".art-curve canvas")
    page.locator(".art-panel").focus()
    page.keyboard.press("?")
    page.keyboard.press("k")
    assert axe_faults(page) == []


def test_hostile_text_stays_text(page_with, tmp_path):
    script = Script(tmp_path / "run", ago_s=100, name="<img src=x onerror='window.__pwned=1'>")
    for text in HOSTILE:
        script.scenario = text.replace("{", "{{").replace("}", "}}")[:500]
        script.rollouts(groups=1)
        script.step += 1
    script.fail(HOSTILE[1], "\n".join(HOSTILE[:5]))
    cell = LiveCell(Run.attach(script.store.path))
    page = page_with(cell)
    page.wait_for_selector(".art-group")
    page.wait_for_timeout(300)
    assert page.evaluate("window.__pwned") is None
    foreign = ", ".join(f".art-panel {tag}" for tag in ("img", "form", "svg", "script", "style"))
    assert page.locator(foreign).count() == 0
    page.set_content(cell.html())
    assert page.evaluate("window.__pwned") is None


def test_it_fits_a_narrow_page(page_with, cell):
    page = page_with(cell, width=520)
    page.wait_for_selector(".art-curve canvas")
    page.wait_for_timeout(200)
    assert not page.evaluate("(host => host.scrollWidth > host.clientWidth + 1)(document.querySelector('.art-host'))")
