"""The rollout viewer in Chromium, on the real panel: what widgets of this kind must show, key by key."""

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.ui import HOSTILE, axe_faults, calm, waits
from support.view_parts import CALLS, Talk, crowd, games, recorded_run, steps

import art_nb as art
from art_nb.panels import viewer
from art_nb.panels.viewer import RolloutViewer, ViewError, view, write_new
from art_nb.views import replies, token_objective
from art_nb.views.boards import RENDERERS
from art_nb.views.index import RolloutIndex
from art_nb.views.token_objective import objective_reply
from art_nb.views.token_values import tokens_reply

COLOR = "[aria-label='Color tokens by']"


@pytest.fixture
def opened(page_with):
    """Open a viewer and wait for the first conversation."""

    def open_viewer(what, **options):
        panel = what if isinstance(what, RolloutViewer) else RolloutViewer(what)
        page = page_with(panel, **options)
        page.wait_for_selector(".art-msg, .art-pane, .art-failure")
        page.wait_for_function("!document.querySelector('.art-bar').textContent.includes('loading')")
        calm(page)
        page.panel = panel
        return page

    return open_viewer


def press(page, *names):
    """Press keys with the focus in the conversation."""
    page.focus(".art-reader")
    for name in names:
        page.keyboard.press(name)


def selected(page):
    """The rollout on show: its row and the row marked in the browser."""
    page.wait_for_timeout(80)
    calm(page)
    return page.inner_text(".art-crumbs").split("Copy link")[0].replace("\n", " ").strip()


def settled(page, text):
    """Wait until the crumbs say something."""
    page.wait_for_function("(text) => document.querySelector('.art-crumbs').textContent.includes(text)", arg=text)


# V1: the browser -----------------------------------------------------------------------------------------------------


def test_steps_groups_and_rollouts(opened):
    page = opened(steps())
    assert page.inner_text(".art-bar").startswith("9 groups of 3 steps")
    rows = page.locator(".art-row")
    assert rows.nth(0).inner_text().replace("\n", " ").startswith("▾ Step 3 3 groups")
    group = rows.nth(1)
    rewards = [0.6, 0.7, 0.8, 0.9]
    assert group.locator("[role=img]").get_attribute("aria-label") == f"rewards {', '.join(map(str, rewards))}"
    assert f"{np.mean(rewards):.3g} ±{np.std(rewards):.2g}" in group.inner_text().replace("\n", " ")
    heights = group.locator(".art-stick").evaluate_all("(all) => all.map((one) => one.offsetHeight)")
    assert heights == sorted(heights) and heights[0] < heights[-1]
    assert page.locator(".art-row-group", has_text="game 1").first.inner_text().split("\n")[2] == "equal rewards"
    assert page.locator(".art-row", has_text="equal rewards").count() == 1
    assert rows.nth(0).get_attribute("aria-level") == "1" and rows.nth(1).get_attribute("aria-level") == "2"


def test_the_bars_have_one_line_from_1000_pixels_on(opened, tmp_path):
    name = "help-desk-smollm2-135m-with-a-long-name-of-the-run"
    page = opened(recorded_run(tmp_path / name), width=1000)
    page.fill("[aria-label=Filter]", "reward > 0.2")
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelector('.art-bar').textContent.includes('34 of 37 rollouts')")
    sizes = "(all) => all.map((bar) => [bar.offsetHeight < 48, bar.scrollWidth <= bar.clientWidth])"
    for width in (1000, 1140, 1280):
        page.set_viewport_size({"width": width, "height": 700})
        calm(page)
        assert page.locator(".art-bar").evaluate_all(sizes) == [[True, True]] * 2
        assert page.locator(".art-title").evaluate("(title) => title.offsetWidth") >= 56  # about eight characters


@pytest.mark.parametrize("width", [880, 940])
def test_narrow_bars_wrap_and_nothing_overlaps(opened, width):
    page = opened(steps(), width=width)
    assert page.locator("[aria-label=Filter]").bounding_box()["width"] > 180
    link, colors = page.locator("button:has-text('Copy link')").bounding_box(), page.locator(COLOR).bounding_box()
    assert link["x"] + link["width"] <= colors["x"] or link["y"] + link["height"] <= colors["y"]


def test_a_group_opens_and_closes_by_mouse_and_keys(opened):
    page = opened(steps())
    closed = page.locator(".art-row-group", has_text="game 2").first
    assert closed.get_attribute("aria-expanded") == "false"
    closed.click()
    assert page.locator(".art-row-rollout", has_text="failed").count() == 1
    page.focus(".art-list")
    page.keyboard.press("ArrowLeft")
    assert page.locator(".art-row-group", has_text="game 2").first.get_attribute("aria-expanded") == "false"
    for name in ("ArrowRight", "ArrowRight"):
        page.keyboard.press(name)
    settled(page, "rollout 0")
    assert "game 2" in selected(page)


def test_a_press_or_a_click_of_a_screen_reader_selects_a_row(opened):
    page = opened(games(0, 4))
    rollouts = page.locator(".art-row-rollout")
    box = rollouts.nth(1).bounding_box()
    page.mouse.move(box["x"] + 60, box["y"] + box["height"] / 2)
    page.mouse.down()
    settled(page, "rollout 1")  # before the release
    page.mouse.up()
    page.keyboard.press("ArrowDown")  # the list has the focus
    settled(page, "rollout 2")
    page.evaluate("document.querySelectorAll('.art-row-rollout')[3].click()")
    settled(page, "rollout 3")


def evaluated(path):
    """A run whose rewards reach from -1 to 1, with evaluations of 12 and of 3 games."""
    store = art.RunStore(path)
    store.write_groups("train", 2, [games(seed, 4) for seed in range(2)])
    for group, rewards in ((games(9, 12), [1.0, 0.0, -1.0, 1.0]), (games(8, 3), [0.5, 0.5, 0.5])):
        for i, trajectory in enumerate(group):
            trajectory.reward = rewards[i % len(rewards)]
            trajectory.metrics["duration"], trajectory.metadata = 23.75, {}
        group.metadata = {"scenario_id": "evaluation"} if len(group) == 12 else {}
        store.write_groups("val", 2 if len(group) == 12 else 1, [group])
    return store


def test_an_evaluation_has_no_groups_and_no_advantages(opened, tmp_path):
    page = opened(evaluated(tmp_path / "run"), height=1200)
    assert page.inner_text(".art-bar >> nth=0").replace("\n", " ").startswith("run 23 rollouts · 2 groups")
    heads = [row.inner_text().replace("\n", " ") for row in page.locator(".art-row-step").all()]
    assert heads == [
        "▾ Step 2 2 groups " + heads[0].split()[-1],
        "▾ Step 2 val 12 rollouts 0.25",
        "▾ Step 1 val 3 rollouts 0.5",
    ]
    assert "advantage" in page.inner_text(".art-facts")
    assert page.locator(".art-row", has_text="equal rewards").count() == 0
    page.panel.goto("run/val/2/0/3")
    settled(page, "rollout 3")
    assert selected(page) == "step 2 val › evaluation › rollout 3 of 12"
    assert "advantage" not in page.inner_text(".art-facts") and "23.75 s" in page.inner_text(".art-facts")
    page.panel.goto("run/val/1/0/1")
    settled(page, "rollout 1")
    assert selected(page) == "step 1 val › evaluation 0 › rollout 1 of 3"
    page.click("text=Best")
    page.wait_for_selector("[role=listbox]")
    assert (
        "val step 2" in (row := page.locator(".art-row", has_text="val step 2").first.inner_text())
        and "group" not in row
    )
    page.panel.goto("run/val/2/0/3")
    settled(page, "rollout 3")
    page.select_option(COLOR, "advantage")
    page.wait_for_selector("text=evaluations have no advantages")


def test_the_bar_of_a_reward_begins_at_zero(opened, tmp_path):
    page = opened(evaluated(tmp_path / "run"), height=1200)
    page.panel.goto("run/val/2/0/0")
    settled(page, "rollout 0 of 12")
    bars = [row.locator(".art-level") for row in page.locator(".art-row-rollout").all()[8:11]]
    for bar, reward, (start, end) in zip(bars, ("1", "0", "−1"), ((0.5, 1), (0.5, 0.5), (0, 0.5)), strict=True):
        assert bar.get_attribute("aria-label") == bar.get_attribute("title") == f"reward {reward}, scale from −1 to 1"
        box, filled = bar.bounding_box(), bar.locator("i").evaluate("(bar) => bar.getBoundingClientRect().toJSON()")
        assert filled["left"] == pytest.approx(box["x"] + start * box["width"], abs=0.6)
        assert filled["right"] == pytest.approx(box["x"] + end * box["width"], abs=0.6)
        zero = bar.locator("b").bounding_box()
        assert zero["x"] == pytest.approx(box["x"] + box["width"] / 2, abs=0.6) and zero["width"] >= 1
    sticks = page.locator(".art-row-group", has_text="evaluation").first.locator(".art-stick")
    high, zero, low = (sticks.nth(n).bounding_box() for n in (0, 1, 2) if sticks.count() >= 3)
    assert high["y"] + high["height"] == pytest.approx(low["y"], abs=1)
    assert zero["height"] <= 2 < min(high["height"], low["height"])


def test_with_a_filter_the_headings_count_the_matches(opened, tmp_path):
    page = opened(evaluated(tmp_path / "run"))
    page.fill("[aria-label=Filter]", "split = val and reward = 0")
    page.wait_for_function("document.querySelector('.art-bar').textContent.includes('3 of 23 rollouts')")
    calm(page)
    assert page.locator(".art-row-step").first.inner_text().replace("\n", " ") == "▾ Step 2 val 3 rollouts"
    assert page.locator(".art-row-group").first.inner_text().replace("\n", " ") == "▾ evaluation 3 of 12"
    assert "groups" not in page.inner_text(".art-bar >> nth=0")
    assert page.locator(".art-mean").count() == 0


def test_a_small_board_is_visible_in_a_narrow_panel(opened, tmp_path):
    page = opened(evaluated(tmp_path / "run"), width=870, height=1000)
    page.wait_for_selector(".art-grid")
    side, board = page.locator(".art-side").bounding_box(), page.locator(".art-grid").bounding_box()
    assert board["y"] + board["height"] <= side["y"] + side["height"]
    assert page.locator("[aria-label='Board number']").bounding_box()["y"] < side["y"] + side["height"]


def test_crumbs_and_marks_are_not_cut_off(opened):
    cut = Talk(1).add("user", "Count.").say("one two three four five six seven eight", finish="length").end(0.5)
    group = art.TrajectoryGroup([cut, cut], metadata={"scenario_id": "31049"})
    page = opened({13: [group]}, width=1030)
    assert selected(page).startswith("step 13 › 31049 › rollout 0"), "also in a run with one step"
    page.wait_for_selector(".art-row .art-badge:has-text('truncated')")
    whole = "(all) => all.filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.textContent)"
    for width in (1030, 870):
        page.set_viewport_size({"width": width, "height": 800})
        calm(page)
        assert page.locator(".art-crumbs .art-name, .art-row .art-badge").evaluate_all(whole) == [], width


def test_a_failed_rollout_says_why(opened):
    page = opened(games(0, 2, failed=1))
    press(page, "J", "J")
    page.wait_for_selector(".art-failure")
    assert "TimeoutError the endpoint did not answer" in page.inner_text(".art-failure")
    assert page.inner_text(".art-big").startswith("failed")
    assert "reward" not in page.inner_text(".art-big"), "a failed rollout has no reward"


def test_ten_thousand_rollouts_keep_few_rows_in_the_page(browser, bridge):
    panel = RolloutViewer(crowd(10_000))
    page = browser.new_page()
    page.goto(bridge.serve(panel))
    page.wait_for_function(
        "document.querySelector('.art-bar')?.textContent.startsWith('1250 groups10000 rollouts · 1250 groups')"
    )
    rows = page.evaluate("""async () => { const list = document.querySelector('.art-list'); let most = 0;
      for (let i = 0; i < 60; i++) { list.scrollTop += 900; await new Promise(requestAnimationFrame);
        most = Math.max(most, document.querySelectorAll('.art-row').length); }
      return { most, top: list.scrollTop }; }""")
    assert 0 < rows["most"] <= 60
    assert rows["top"] > 30_000
    page.close()
    panel.close()


def test_pages_of_previews_come_with_the_rows_in_sight(opened):
    page = opened(crowd(4000))
    page.keyboard.press("Tab")
    page.focus(".art-list")
    page.keyboard.press("End")
    page.wait_for_timeout(300)
    asked = [one["args"]["ids"] for one in page.evaluate("sent") if one.get("command") == "page"]
    assert asked
    assert max(map(len, asked)) <= 200


# V2: filter, search, sort, presets -----------------------------------------------------------------------------------


def shown(page):
    """Rewards of the rows in the browser."""
    return [float(text) for text in page.locator(".art-row-rollout .art-reward").all_inner_texts() if text != "failed"]


def test_filter_by_keyboard(opened):
    page = opened(steps())
    press(page, "\\")
    page.keyboard.insert_text("reward > 0.65 and step = 3")
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelector('.art-bar').textContent.includes(' of 37 rollouts')")
    assert all(value > 0.65 for value in shown(page))
    assert page.locator(".art-row-step").count() == 1
    page.keyboard.press("Escape")
    page.wait_for_function("!document.querySelector('.art-bar').textContent.includes(' of 37 rollouts')")


def test_a_wrong_filter_is_explained(opened):
    page = opened(steps())
    press(page, "\\")
    page.keyboard.type("reward <")
    page.keyboard.press("Enter")
    page.wait_for_selector(".art-wrong:not([hidden])")
    assert "column" in page.inner_text(".art-wrong")
    assert page.get_attribute("[aria-label=Filter]", "aria-invalid") == "true"
    page.keyboard.type(" 0.5")
    page.keyboard.press("Enter")
    page.wait_for_selector(".art-wrong", state="hidden")
    assert page.panel.last_error is None


@pytest.mark.parametrize(("preset", "order"), [("Best", -1), ("Worst", 1)])
def test_presets_by_keyboard(opened, preset, order):
    page = opened(steps())
    page.focus(f"text={preset}")
    page.keyboard.press("Enter")
    page.wait_for_selector("[role=listbox]")
    rewards = shown(page)
    assert rewards == sorted(rewards, key=lambda value: order * value)
    assert page.get_attribute(f"text={preset}", "aria-pressed") == "true"
    assert page.locator("[role=option]").count() == len(page.locator(".art-row").all())
    assert page.locator("[role=option]").first.get_attribute("aria-selected") == "true"  # it is open


@pytest.mark.parametrize("width", [760, 1400])
def test_a_group_keeps_half_of_its_row_for_its_name(opened, width):
    talk = {"role": "user", "content": "Hi"}
    groups = [
        art.TrajectoryGroup(
            [art.Trajectory(messages_and_choices=[talk], reward=i * differs) for i in range(16)],
            metadata={"scenario_id": f"a scenario with a name that is rather long {differs}"},
        )
        for differs in (0.0, 0.123)
    ]
    page = opened(groups, width=width)
    assert page.locator(".art-row .art-badge").first.inner_text() == "equal rewards"
    for row in page.locator(".art-row-group").all():
        box, name = row.bounding_box(), row.locator(".art-name").bounding_box()
        mean = row.locator(".art-mean").bounding_box()
        assert name["width"] >= 0.45 * box["width"], "the row has a margin of 20 pixels"
        assert mean["x"] + mean["width"] <= box["x"] + box["width"] + 1, "nothing is cut off"


def test_short_labels_of_the_list_are_explained(opened):
    page = opened(steps())
    assert page.locator(".art-mean").first.get_attribute("title") == "Mean ± standard deviation"
    page.click("text=Best")
    page.wait_for_selector("[role=listbox]")
    row = page.locator(".art-row").first
    assert re.search(r"step \d, group \d", row.inner_text()) and re.search(r"\d turns?$", row.inner_text())
    label = row.locator(".art-size")
    title = label.get_attribute("title")
    assert (
        re.fullmatch(r"\d turns?, \d+ tool calls?, \d+ tokens?", title) and label.get_attribute("aria-label") == title
    )
    assert "1 turns" not in page.content()


def test_the_most_varied_group_comes_first(opened):
    flat, wild = games(0, 3), games(1, 3)
    for i in range(3):
        flat.trajectories[i].reward, wild.trajectories[i].reward = 0.5, float(i)
    page = opened([flat, wild])
    page.click("text=Varied")
    page.wait_for_selector("[role=listbox]")
    assert shown(page)[:3] == [0.0, 1.0, 2.0]


def test_sort_by_keyboard(opened):
    page = opened(steps())
    page.focus("[aria-label=Sort]")
    page.select_option("[aria-label=Sort]", "reward")
    page.wait_for_selector("[role=listbox]")
    assert shown(page) == sorted(shown(page))


def test_search_goes_through_the_matches(opened):
    groups = [games(0, 3), games(1, 3)]
    groups[0].trajectories[1].messages_and_choices[0]["content"] = "You play. The word is Xylophone."
    groups[1].trajectories[2].messages_and_choices.append(
        {"role": "user", "content": "again a xylophone, and a XYLOPHONE"}
    )
    page = opened(groups)
    press(page, "/")
    page.keyboard.insert_text("xylophone")
    page.wait_for_function("document.querySelector('.art-found').textContent === '1 of 2'")
    settled(page, "rollout 1")
    page.wait_for_function("CSS.highlights.get('art-found')?.size > 0")
    assert page.locator("details[open] .art-text", has_text="Xylophone").is_visible()  # the system message was folded
    page.keyboard.press("Enter")
    settled(page, "rollout 2")
    page.wait_for_function("CSS.highlights.get('art-found')?.size === 2")
    page.keyboard.press("Shift+Enter")
    settled(page, "rollout 1")
    page.keyboard.press("Escape")
    assert page.input_value("[aria-label='Search all texts']") == ""
    page.wait_for_function("!CSS.highlights.has('art-found')")


def test_matches_after_the_first_200_are_loaded(opened):
    page = opened([games(n, 101) for n in range(2)])
    press(page, "/")
    page.keyboard.insert_text("you play")
    for key, number in (("", 1), ("Shift+Enter", 200), ("Enter", 201), ("Enter", 202), ("Enter", 1)):
        if key:
            page.keyboard.press(key)
        page.wait_for_function(
            "(text) => document.querySelector('.art-found').textContent === text", arg=f"{number} of 202"
        )
        settled(page, f"rollout {(number - 1) % 101}")
    after = [one["args"]["after_id"] for one in page.evaluate("sent") if one.get("command") == "search"]
    assert after == [-1, 199]


# V3, V4: side by side ------------------------------------------------------------------------------------------------


def test_the_common_prefix_is_folded_once_and_the_divergence_marked(opened):
    page = opened(steps())
    press(page, "l")
    page.wait_for_selector(".art-pane")
    assert page.locator(".art-pane").count() == 2
    same = int(re.search(r"The first (\d) messages are the same.", page.inner_text(".art-prefix"))[1])
    assert same >= 3  # the system, the first board, the first move
    assert page.locator(".art-prefix details[open]").count() == 0
    assert page.locator(".art-parting").count() == 2
    texts = page.locator(".art-pane .art-msg:first-of-type .art-body").all_inner_texts()
    assert texts[0] != texts[1]
    page.click(".art-prefix summary")
    assert page.locator(".art-prefix .art-msg").count() == same


def test_the_mark_stands_where_they_part(opened):
    one, two = (
        Talk().add("user", "Say it.").say("the same words, then apples", [-1.0] * 5).end(1.0),
        Talk().add("user", "Say it.").say("the same words, then pears", [-1.0] * 5).end(0.0),
    )
    page = opened(art.TrajectoryGroup([one, two]))
    press(page, "c")
    page.wait_for_selector(".art-pane")
    rest = page.locator(".art-parting").evaluate_all("(all) => all.map((one) => one.nextSibling.textContent)")
    assert rest == ["apples", "pears"]
    assert page.locator(".art-shared").first.inner_text().strip() == "the same words, then"


def test_up_to_four_and_never_more(opened):
    page = opened(games(0, 6))
    page.focus(".art-reader")
    for key, panes, active in [
        ("l", 2, 0),
        ("l", 2, 1),
        ("l", 3, 1),
        ("l", 3, 2),
        ("l", 4, 2),
        ("l", 4, 3),
        ("h", 4, 2),
    ]:
        page.keyboard.press(key)  # each is heard: the focus goes where the keys lead
        page.wait_for_function(f"document.querySelectorAll('.art-pane').length === {panes}")
        page.wait_for_selector(f".art-is-active[data-pane='{active}']")
    press(page, "l", "l", "l")
    page.wait_for_timeout(200)
    assert page.locator(".art-pane").count() == 4
    page.locator("[aria-label='Remove rollout 2']").click()
    page.wait_for_function("document.querySelectorAll('.art-pane').length === 3")


def test_keys_may_be_faster_than_panes(opened):
    page = opened(games(0, 6))
    press(page, *"lllllllll")
    page.wait_for_function("document.querySelectorAll('.art-pane').length === 4")


def test_picked_rollouts_are_compared(opened):
    page = opened(games(0, 5))
    page.focus(".art-list")
    page.keyboard.press("Home")
    for name in ("ArrowDown", "Space", "ArrowDown", "ArrowDown", "Space", "ArrowDown", "Space"):
        page.keyboard.press(name)
    assert page.inner_text("button:has-text('Compare')") == "Compare 3"
    page.keyboard.press("c")
    page.wait_for_selector(".art-pane")
    assert page.locator(".art-pane-head strong").all_inner_texts() == ["#0", "#2", "#3"]


def test_the_same_scenario_at_two_steps(opened):
    page = opened(steps())
    press(page, "s")
    page.wait_for_selector(".art-pane")
    heads = [re.sub(r"\s+", " ", text) for text in page.locator(".art-pane-head").all_inner_texts()]
    assert [re.search(r"step (\d)", head)[1] for head in heads] == ["1", "3"]
    page.select_option("[aria-label='Step a']", label="step 2 · mean 0.55")
    page.wait_for_function("document.querySelector('.art-pane-head')?.textContent.includes('step 2')")
    page.select_option("[aria-label='Step a: rollout']", label="worst")
    page.wait_for_function("document.querySelector('.art-pane-head')?.textContent.includes('#0')")
    press(page, "Escape")
    page.wait_for_selector(".art-pane", state="detached")


def refuse(*_):
    raise ValueError("The disk is gone.")


def test_an_error_of_the_step_comparison_is_shown(opened, monkeypatch):
    monkeypatch.setattr(replies, "_group_scores", refuse)
    page = opened(steps())
    press(page, "s")
    page.wait_for_selector(".art-steps .art-note:has-text('The disk is gone.')")
    page.click("[aria-label='Close the step comparison']")
    page.wait_for_selector(".art-steps", state="hidden")


def test_a_part_that_failed_to_load_is_requested_again(opened, monkeypatch):
    page = opened(Talk().add("user", "x" * 600_000).say("the end").end(1.0))
    with monkeypatch.context() as patch:
        patch.setattr(replies, "paginate", refuse)
        page.click("text=Load more")
        page.wait_for_selector("text=The disk is gone.")
    page.click("text=Load more")
    calm(page)
    parts = [one["args"]["part"] for one in page.evaluate("sent") if one["args"].get("part")]
    assert parts == [1, 1]


def test_previews_that_failed_to_load_are_requested_again(opened, monkeypatch):
    def fail(*_):
        raise ViewError("The disk is gone.")

    with monkeypatch.context() as patch:
        patch.setattr(viewer, "page_reply", fail)
        page = opened(games(0, 3))
        assert page.inner_text(".art-preview >> nth=0") == "…"
    press(page, "J")
    page.wait_for_function("!document.querySelector('.art-preview').textContent.includes('…')")


# V5: tokens ----------------------------------------------------------------------------------------------------------


def test_tokens_are_colored_by_logprob(opened):
    group = art.TrajectoryGroup(
        [Talk().add("user", "Say it.").say("sure unsure lost end", [-0.01, -2.4, -4.9, -7.0]).end(1.0)]
    )
    page = opened(group)
    page.select_option(COLOR, "logprob")
    page.wait_for_selector("[data-k]")
    classes = page.locator("[data-k]").evaluate_all(
        "(all) => all.map((one) => one.className.replace('art-tk art-tk-', ''))"
    )
    assert classes == ["s0", "s2", "s5", "s5"]
    assert page.locator("[data-k]").all_inner_texts() == ["sure", " unsure", " lost", " end"]
    patterns = page.locator(".art-legend .art-tk").evaluate_all(
        "(all) => all.map((one) => { const s = getComputedStyle(one);"
        " return `${s.textDecorationLine} ${s.textDecorationStyle}`; })"
    )
    assert len(set(patterns[1:])) == len(patterns[1:])  # each strength has a pattern of its own, not only a color
    assert "likely 0" in page.inner_text(".art-legend") and "−5 unlikely" in page.inner_text(".art-legend")


def test_the_numbers_stand_in_the_hover(opened):
    page = opened(steps())
    told, (_, *channels) = tokens_reply(page.panel.rollout_index, 0, 1)
    values = {name: np.frombuffer(data, "<f2") for name, data in zip(told["channels"], channels)}
    page.select_option(COLOR, "advantage")
    page.wait_for_selector("[data-turn='1'] [data-k]")
    page.locator("[data-turn='1'] [data-k='2']").hover()
    page.wait_for_selector(".art-tip:not([hidden])")
    said = dict(zip(*[iter(page.locator(".art-tip .art-pair span").all_inner_texts())] * 2))
    logprob = float(values["logprob"][2])
    assert float(said["log probability"].replace("−", "-")) == pytest.approx(logprob, rel=5e-3)
    assert float(said["probability"]) == pytest.approx(np.exp(logprob), rel=5e-3)
    assert float(said["advantage"].replace("−", "-")) == pytest.approx(float(values["advantage"][2]), rel=5e-3)
    assert said["trained"] == "yes"


@pytest.mark.parametrize("channel", ["logprob", "entropy", "advantage", "ratio", "mask", "gradient"])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_channel_of_a_recorded_run(opened, tmp_path, channel, theme):
    page = opened(recorded_run(tmp_path / "run"), theme=theme)
    page.select_option(COLOR, channel)
    page.wait_for_selector("[data-k]")
    page.wait_for_timeout(150)
    kinds = set(
        page.locator("[data-k]").evaluate_all(
            "(all) => all.map((one) => one.className.replace('art-tk art-tk-', '')[0])"
        )
    )
    assert kinds <= {"logprob": {"s"}, "entropy": {"s"}, "mask": {"m"}}.get(channel, {"n", "p", "z"})
    assert page.locator(".art-legend").is_visible()
    assert not axe_faults(page)


def test_what_is_not_known_is_said(opened):
    page = opened(steps())
    page.select_option(COLOR, "entropy")
    page.wait_for_selector(".art-note:has-text('not recorded')")
    bare = art.TrajectoryGroup(
        [art.Trajectory(messages_and_choices=[{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}])]
    )
    other = opened(bare)
    other.select_option(COLOR, "logprob")
    assert other.inner_text("[data-message='1'] .art-body") == "y"


def test_t_goes_through_the_colors(opened):
    page = opened(steps())
    values = []
    for _ in range(3):
        press(page, "t")
        values.append(page.input_value(COLOR))
    press(page, "T")
    assert (values, page.input_value(COLOR)) == (["logprob", "entropy", "advantage"], "entropy")
    press(page, "T", "T")
    page.wait_for_function("!document.querySelector('[data-k]')")


def test_four_thousand_tokens_are_colored_at_once(opened):
    """The rest comes in pieces."""
    long = (
        Talk()
        .add("user", "Go on.")
        .say(" ".join(f"w{n}" for n in range(6000)), [-(n % 50) / 10 for n in range(6000)])
        .end(1.0)
    )
    page = opened(art.TrajectoryGroup([long]))
    page.evaluate("""new MutationObserver(() => {
      window.firstTokens ||= document.querySelectorAll('[data-k]').length; })
      .observe(document.body, { childList: true, subtree: true })""")
    page.select_option(COLOR, "logprob")
    page.wait_for_function("document.querySelectorAll('[data-k]').length === 6000")
    assert page.evaluate("firstTokens") == 4000


def test_tokens_by_arrow_keys(opened):
    page = opened(steps())
    page.select_option(COLOR, "logprob")
    page.wait_for_selector("[data-k]")
    page.focus(".art-stream")
    for name in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft"):
        page.keyboard.press(name)
    assert page.get_attribute(".art-is-chosen", "data-k") == "1"
    assert "token 2 of" in page.inner_text(".art-drawer")
    page.keyboard.press("Escape")
    assert page.locator(".art-is-chosen").count() == 0
    assert not page.locator(".art-drawer").is_visible()


# V14: the terms of the loss ------------------------------------------------------------------------------------------


def test_the_terms_of_every_loss_are_shown(opened, tmp_path):
    page = opened(recorded_run(tmp_path / "run"))
    page.select_option(COLOR, "ratio")
    page.wait_for_selector("[data-turn='1'] [data-k]")
    page.locator("[data-turn='1'] [data-k='1']").click()
    page.click("text=Loss terms")
    page.wait_for_selector(".art-terms")
    told, _ = objective_reply(page.panel.rollout_index, 0, 1, 1, ["cispo", "ppo", "dapo", "dr_grpo", "gspo"])
    heads = [
        head.removesuffix("used in training").strip()
        for head in page.locator(".art-terms thead th").all_inner_texts()[1:]
    ]
    assert heads == [loss["name"] for loss in told["losses"]]
    ours = page.locator(".art-terms .art-is-ours")
    assert ours.inner_text().startswith("ppo")
    cells = {
        row.locator("th").inner_text().split("  ")[0]: row.locator("td").all_inner_texts()
        for row in page.locator(".art-terms tbody tr").all()
    }
    gradients = next(values for name, values in cells.items() if name.startswith("∂loss"))
    for loss, said in zip(told["losses"], gradients):
        assert float(said.split()[0].replace("−", "-")) == pytest.approx(loss["gradient"], rel=2e-3, abs=1e-12)
        assert ("reinforced" in said) == (loss["gradient"] < 0)
    (said,) = next(values for name, values in cells.items() if name.startswith("log ratio"))  # the same under all: once
    assert float(said.replace("−", "-")) == pytest.approx(told["losses"][0]["terms"][2]["value"], rel=1e-3)
    ratios = next(values for name, values in cells.items() if name.startswith("ratio"))
    assert len(ratios) == 5  # GSPO's is of the whole answer
    assert float(ratios[0]) == pytest.approx(told["losses"][0]["terms"][3]["value"], rel=1e-3)
    page.locator("[data-turn='1'] [data-k='2']").click()  # the terms stay open from token to token
    page.wait_for_function("document.querySelector('.art-drawer').textContent.includes('token 3 of')")
    page.wait_for_selector(".art-terms")
    assert not axe_faults(page)


def test_a_row_of_equal_values_has_one_cell(opened, tmp_path, monkeypatch):
    def all_clipped(*request):
        reply, buffers = objective_reply(*request)
        for loss in reply["losses"]:
            loss["terms"] = [term | {"value": 1.0} if term["name"] == "clipped" else term for term in loss["terms"]]
        reply["losses"] = [loss for loss in reply["losses"] if any(t["name"] == "clipped" for t in loss["terms"])]
        return reply, buffers

    monkeypatch.setattr(token_objective, "objective_reply", all_clipped)
    page = opened(recorded_run(tmp_path / "run"))
    page.select_option(COLOR, "ratio")
    page.locator("[data-turn='1'] [data-k='1']").click()
    page.click("text=Loss terms")
    page.wait_for_selector(".art-terms")
    row = page.locator(".art-terms tr", has=page.locator("th", has_text=re.compile("^clipped")))
    assert row.locator("td").all_inner_texts() == ["clipped"]
    assert row.get_attribute("class") != "art-differs"


def test_tokens_by_the_gradient_of_another_loss(opened, tmp_path):
    page = opened(recorded_run(tmp_path / "run"))
    page.select_option(COLOR, "gradient")
    page.wait_for_selector(", ".join(f"[data-k].art-tk-{side}{level}" for side in "np" for level in range(1, 5)))
    page.select_option("[aria-label=Loss]", "gspo")
    page.wait_for_function("sent.some((one) => one.command === 'objective_tokens' && one.args.losses?.[0] === 'gspo')")


# V6, V7, V8: folds, rewards, boards ----------------------------------------------------------------------------------


def test_folds(opened):
    page = opened(games(2, 2, tools=True))
    assert page.locator("[data-message='0'] details[open]").count() == 0  # system
    assert page.locator(".art-thinking[open]").count() == 0
    calls = page.locator(".art-call")
    assert [calls.nth(i).evaluate("(one) => one.open") for i in (0, 1)] == [False, True]  # the one that failed is open
    assert "error" in calls.nth(1).inner_text()
    calls.nth(0).locator("summary").click()
    calls.nth(0).locator("text=arguments").wait_for()
    assert '"query": "forks"' in calls.nth(0).inner_text()
    assert "0. a rule about forks" in calls.nth(0).inner_text()
    assert "39. a rule about forks" not in calls.nth(0).inner_text()  # the cap of a tool's result
    calls.nth(0).locator("text=Show all 40 lines").click()
    assert "39. a rule about forks" in calls.nth(0).inner_text()
    assert page.locator("article.art-from-tool").count() == 0  # results stand beside their calls


def test_colored_tokens_keep_the_results_of_calls(opened):
    page = opened(games(2, 2, tools=True))
    page.select_option(COLOR, "logprob")
    page.wait_for_selector("[data-k]")
    page.locator(".art-call summary").first.click()
    page.locator(".art-call >> text=a rule about forks").first.wait_for()


def test_expand_and_collapse_all(opened):
    page = opened(games(2, 2, tools=True))
    press(page, "e")
    page.wait_for_function("!document.querySelector('.art-conversation details:not([open])')")
    assert "39. a rule about forks" in page.inner_text(".art-conversation")
    press(page, "x")
    page.wait_for_function("!document.querySelector('.art-conversation details[open]')")


def test_a_reward_is_broken_down(opened):
    page = opened(games(0, 3))
    one = page.panel.rollout_index.locate(0).trajectory
    parts = {
        row.locator("th").inner_text(): float(row.locator("td").last.inner_text().replace("−", "-"))
        for row in page.locator(".art-parts tr").all()
    }
    assert parts == pytest.approx({"reward/result": one.reward - 0.1, "reward/form": 0.1})
    assert sum(parts.values()) == pytest.approx(one.reward)
    assert "✓ The parts add up to the reward." in page.inner_text(".art-reward-card")
    assert "advantage" in page.inner_text(".art-reward-card")
    one.metrics["reward/form"] = 0.3
    page.panel.rollout_index.refresh()
    press(page, "J", "K")
    page.wait_for_selector("text=The parts do not add up to the reward.")


def test_boards_have_a_slider(opened):
    page = opened(games(0, 2))
    page.wait_for_selector(".art-grid")
    slider = page.locator("[aria-label='Board number']")
    assert slider.input_value() == slider.get_attribute("max") == "2"
    cells = page.locator(".art-grid td").all_inner_texts()
    assert sorted(cells).count("X") == 2 and len(cells) == 9
    assert page.inner_text(".art-caption").startswith("3 of 3")
    slider.focus()
    page.keyboard.press("ArrowLeft")
    assert page.locator(".art-grid td").all_inner_texts().count("X") == 1
    assert page.locator(".art-grid .art-is-last").count() == 1
    assert page.locator(".art-msg.art-is-current").get_attribute("data-message") == "3"
    page.click("[aria-label='Previous board']")
    assert "X" not in page.locator(".art-grid td").all_inner_texts()


def test_the_error_of_a_board_renderer_is_shown(opened, monkeypatch):
    def broken(trajectory):
        raise KeyError("tile")

    monkeypatch.setitem(RENDERERS, "broken", broken)
    page = opened(games(0, 2))
    page.wait_for_selector(".art-facts .art-note:has-text(\"the renderer broken raised KeyError: 'tile'\")")
    assert page.locator(".art-grid").count() == 1  # of the next renderer


def test_2048_and_any_text_grid(opened):
    board = "2 4 8 16\n32 64 128 256\n512 1024 2048 .\n. . 2 2"
    page = opened(Talk().add("user", f"Board:\n{board}\nYour move.").say("left").end(1.0))
    page.wait_for_selector(".art-grid")
    assert "2048" in page.locator(".art-grid td").all_inner_texts()
    assert (
        page.locator(".art-grid td").first.evaluate("(one) => getComputedStyle(one).backgroundColor")
        != "rgba(0, 0, 0, 0)"
    )


# V9: every key -------------------------------------------------------------------------------------------------------


def current(page):
    return int(page.locator(".art-msg.art-is-current").get_attribute("data-message"))


def test_j_k_g_G(opened):
    page = opened(games(0, 2))
    assert current(page) == 2  # the first thing that the model said
    seen = []
    for name in ("j", "j", "k", "G", "j", "g", "k"):
        press(page, name)
        seen.append(current(page))
    assert seen == [3, 4, 3, 6, 6, 0, 0]


def test_J_K_n_p(opened):
    page = opened(steps())
    for name, rollout in zip(("J", "n", "K", "p"), (1, 2, 1, 0), strict=True):
        press(page, name)
        settled(page, f"rollout {rollout} of")
    press(page, "p")
    assert "rollout 0 of" in selected(page)  # it is the first
    press(page, *"JJJJ")  # into the next group, which opens
    settled(page, "game 1")
    assert page.locator(".art-row.art-is-selected").is_visible()


def test_brackets_go_from_group_to_group(opened):
    page = opened(steps())
    places = ("step 3 › game 1", "step 3 › game 2", "step 2 › game 0", "step 3 › game 2")
    for name, place in zip(("]", "]", "]", "["), places, strict=True):
        press(page, name)
        settled(page, place)


def test_h_and_l_go_from_pane_to_pane(opened):
    page = opened(games(0, 3))
    press(page, "l")
    page.wait_for_selector(".art-pane")
    active = lambda: page.locator(".art-pane.art-is-active").get_attribute("data-pane")
    assert active() == "0"
    press(page, "l")
    assert active() == "1"
    press(page, "j")
    assert page.locator(".art-pane.art-is-active .art-is-current").count() == 1
    press(page, "h", "h")
    assert active() == "0"


def test_f_leaves_only_the_text(opened):
    page = opened(steps())
    press(page, "f")
    assert not page.locator(".art-browser").is_visible()
    press(page, "Escape")
    assert page.locator(".art-browser").is_visible()


def test_question_mark_helps(opened):
    page = opened(steps())
    press(page, "?")
    said = page.inner_text("[role=dialog]")
    for key in "jkJKnp[]hlf/gGexo?":
        assert key in said
    assert not axe_faults(page)
    page.keyboard.press("?")
    assert not page.locator("[role=dialog]").is_visible()


def test_o_overrides_the_score(opened, tmp_path):
    page = opened(recorded_run(tmp_path / "run"))
    press(page, "o")
    page.keyboard.type("0.25")
    page.keyboard.press("Tab")
    page.keyboard.type("a lucky guess")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=set by a person")
    said = [json.loads(line) for line in (tmp_path / "run" / "judgements.jsonl").read_text().splitlines()]
    assert [(one["score"], one["by"], one["reason"], one["step"], one["trajectory"]) for one in said] == [
        (0.25, "human", "a lucky guess", 3, 0)
    ]
    page.wait_for_selector(".art-row-rollout .art-badge:has-text('human')")
    card = page.inner_text(".art-reward-card")
    assert "judged" not in card and "trained at step 3" in card and "Its rewards stay the same." in card
    assert page.panel.rollout_index.locate(0).trajectory.reward == 0.6  # what was trained stays as it was


@pytest.mark.parametrize("preset", ["All", "Best", "Worst", "Varied"])
def test_a_score_is_saved_in_each_list(opened, tmp_path, preset):
    page = opened(recorded_run(tmp_path / "run"))
    page.get_by_role("button", name=preset).click()
    page.wait_for_selector(f".art-segments [aria-pressed=true]:has-text('{preset}')")
    press(page, "J")
    place = selected(page)
    press(page, "o")
    page.keyboard.type("0.25")
    page.keyboard.press("Enter")
    page.wait_for_selector(".art-row.art-is-selected .art-badge:has-text('human')")
    page.wait_for_selector("text=set by a person")
    page.wait_for_function("document.querySelector('.art-bar').textContent.includes('37 rollouts')")
    assert selected(page) == place
    assert not page.locator(".art-saved").is_visible()


def test_what_is_read_stays_open_while_more_is_loaded(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(RolloutIndex.load, "__defaults__", (0.0,))  # one step a request
    page = opened(recorded_run(tmp_path / "run"))
    page.wait_for_function("document.querySelectorAll('.art-row-step').length === 3")
    assert page.locator(".art-row-rollout.art-is-selected").is_visible()


def test_an_override_needs_a_run_and_a_score_in_range(opened, tmp_path):
    page = opened(games(0, 2))
    press(page, "o")
    page.keyboard.type("0.5")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=are not in a run directory")
    page.keyboard.press("Escape")
    other = opened(recorded_run(tmp_path / "run"))
    press(other, "o")
    other.keyboard.type("7")
    other.keyboard.press("Enter")
    other.wait_for_selector("text=a score is between 0 and 1.")
    assert not (tmp_path / "run" / "judgements.jsonl").exists()


def test_keys_do_nothing_while_typing(opened):
    page = opened(steps())
    before = selected(page)
    page.focus("[aria-label='Search all texts']")
    page.keyboard.type("jJn]fxgo?")
    assert page.input_value("[aria-label='Search all texts']") == "jJn]fxgo?"
    assert page.locator(".art-browser").is_visible() and not page.locator("[role=dialog]").is_visible()
    assert selected(page) == before


# V10: links ----------------------------------------------------------------------------------------------------------


def test_a_link_leads_back(opened, page_with):
    page = opened(steps())
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    press(page, "]", "]", "J")
    settled(page, "rollout 1")
    page.wait_for_timeout(150)
    calm(page)
    press(page, "j", "j", "y")
    page.wait_for_selector("text=Copied:")
    link = page.evaluate("navigator.clipboard.readText()")
    assert link == "9 groups of 3 steps/train/3/2/1/1"
    other = opened(steps())
    other.panel.goto(link)
    settled(other, "game 2")
    other.wait_for_function("document.querySelector('.art-is-current')?.dataset.turn === '1'")
    assert "rollout 1" in selected(other)


def test_a_reload_loses_nothing(opened):
    page = opened(steps())
    press(page, "]", "J", "f", "t")
    settled(page, "rollout 1")
    press(page, "j", "j")
    before = selected(page), current(page)
    kept = {"id": 5, "turn": 1, "wide": True, "color": "logprob"}
    waits(page, lambda: kept.items() <= page.panel.ui.items())  # the state is written a moment later
    page.reload()
    page.wait_for_selector(".art-msg.art-is-current")
    settled(page, "game 1")
    page.wait_for_selector("[data-k]")
    assert (selected(page), current(page)) == before
    assert not page.locator(".art-browser").is_visible()
    assert page.input_value(COLOR) == "logprob"


def test_saved_values_of_another_version_become_the_default(opened):
    panel = view(steps())
    panel.ui = {"color": "push", "loss": "sft", "lens": True}
    page = opened(panel)
    assert (page.input_value(COLOR), page.input_value("[aria-label=Loss]")) == ("", "")


def test_goto_before_the_page_is_there(opened):
    panel = view(steps())
    panel.goto("9 groups of 3 steps/train/1/2/3")
    page = opened(panel)
    settled(page, "step 1")
    assert selected(page) == "step 1 › game 2 › rollout 3 of 4"


# growth, freezing, export --------------------------------------------------------------------------------------------


def test_a_damaged_step_is_said_and_the_others_are_there(opened, tmp_path):
    store = recorded_run(tmp_path / "run")
    store.write_groups("train", 4, [games(7, 2)])
    (store.path / "trajectories" / "train" / "0004.parquet").write_bytes(b"PAR1 torn")
    page = opened(store)
    page.wait_for_selector("text=/Could not read: step 4 of train/")
    page.wait_for_selector(".art-row-step:has-text('Step 3')")


def test_new_steps_of_an_active_run_are_read(opened, tmp_path):
    store = recorded_run(tmp_path / "run")
    page = opened(store)
    store.write_groups("train", 4, [games(7, 2)])
    page.panel.refresh()
    page.wait_for_selector(".art-row-step:has-text('Step 4')")
    assert "rollout 0 of" in selected(page)  # the reader stays where he was


def test_freeze_from_the_page(opened):
    page = opened(steps())
    page.click("text=Make static")
    page.wait_for_selector(".art-panel", state="detached")
    assert page.panel.comm is None


def test_export_writes_one_file(opened, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rollouts-1.html").write_text("not to be touched")
    page = opened(steps())
    page.click("text=Export")
    page.wait_for_selector("text=Saved: rollouts-2.html")
    text = (tmp_path / "rollouts-2.html").read_text()
    assert "Content-Security-Policy" in text and "<script" not in text
    assert (tmp_path / "rollouts-1.html").read_text() == "not to be touched"


def test_two_files_at_once_have_two_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    begun = threading.Event()

    def slowly(path):
        begun.set()
        time.sleep(0.1)
        path.write_text("slow")

    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(write_new, "rollouts", ".html", slowly)
        begun.wait()
        quick = write_new("rollouts", ".html", lambda path: path.write_text("quick"))
    assert slow.result() == tmp_path / "rollouts-1.html"
    assert [slow.result().read_text(), quick.read_text()] == ["slow", "quick"]


# V12: for everybody --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1300, 900, 600])
def test_no_serious_fault(opened, theme, width):
    page = opened(steps(), theme=theme, width=width)
    page.wait_for_selector(".art-grid")
    assert not axe_faults(page)
    page.click("text=Best")
    page.wait_for_selector("[role=listbox]")
    assert not axe_faults(page)
    press(page, "l")
    page.wait_for_selector(".art-pane")
    assert not axe_faults(page)
    over = page.evaluate(
        "document.querySelector('.art-panel').scrollWidth - document.querySelector('.art-panel').clientWidth"
    )
    assert over <= 0


def test_the_list_has_roles(opened):
    page = opened(steps())
    assert page.get_attribute(".art-list", "role") == "tree"
    active = page.get_attribute(".art-list", "aria-activedescendant")
    assert page.locator(f"#{active}").get_attribute("aria-selected") == "true"
    press(page, "j")
    page.wait_for_function("document.querySelector('[aria-live]').textContent.includes('of')")


def test_motion_and_forced_colors(opened):
    page = opened(steps(), reduced_motion="reduce", forced_colors="active")
    page.select_option(COLOR, "advantage")
    page.wait_for_selector("[data-k]")
    assert page.evaluate("getComputedStyle(document.querySelector('.art-button')).transitionDuration") in ("0s", "")
    line = page.evaluate(
        "getComputedStyle(document.querySelector('.art-tk-n4[data-k], .art-tk-n3[data-k], .art-tk-n2[data-k]'))"
        ".textDecorationStyle"
    )
    assert line == "wavy"  # the pattern speaks where colors may not


# hostile texts -------------------------------------------------------------------------------------------------------


def hostile():
    """A group whose every text is an attack."""
    rollouts = []
    for n, text in enumerate(HOSTILE):
        plain = text.encode("utf-8", "replace").decode()  # a choice's text must be whole characters
        talk = Talk(n).add("system", text).add("user", text)
        calls = [CALLS[0] | {"function": {"name": plain, "arguments": plain}}, CALLS[1]]
        talk.say(f"{plain} and", reasoning_content=plain, tool_calls=calls)
        talk.add("tool", text, tool_call_id="call-a").add("tool", text, tool_call_id="nobody").add(
            "assistant", text, name="<b>x</b>"
        ).add("odd<role>", text)
        rollouts.append(
            talk.end(
                n / 10,
                metrics={plain: 1.0, f"reward/{plain}": 0.5},
                metadata={plain: plain, "ruler_explanation": plain},
                logs=[plain],
            )
        )
    rollouts.append(RuntimeError(HOSTILE[0] + HOSTILE[1]))
    return art.TrajectoryGroup(rollouts, metadata={"scenario_id": "<img src=x onerror='window.__pwned=1'>"})


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_hostile_texts_stay_texts(opened, theme):
    page = opened(hostile(), theme=theme)
    allowed = set(
        "DIV SPAN BUTTON INPUT SELECT OPTION ARTICLE HEADER DETAILS SUMMARY SECTION ASIDE NAV"
        " TABLE TBODY THEAD TR TH TD STRONG I P B KBD"
        " DL DT DD".split()
    )
    for n in range(len(HOSTILE)):
        press(page, "e")
        if n in (1, 5):
            page.select_option(COLOR, "logprob")
            page.wait_for_selector("[data-k]")
            page.locator("[data-k]").first.click()
        if n == 6:
            page.select_option(COLOR, "")
        found = set(page.evaluate("[...document.querySelectorAll('.art-host *')].map((one) => one.tagName)"))
        assert found <= allowed
        bad = page.evaluate("""[...document.querySelectorAll('.art-host *')]
          .flatMap((one) => [...one.attributes]).map((one) => one.name)
          .filter((name) => /^on|^href$|^src|^action$|^name$|commandlinker/.test(name))""")
        assert bad == []
        press(page, "J")
        page.wait_for_timeout(60)
    press(page, "g", "K", "K")
    page.wait_for_timeout(100)
    press(page, "l")
    page.wait_for_selector(".art-pane")
    press(page, "/")
    page.keyboard.type("<script>")
    page.wait_for_timeout(500)
    assert page.evaluate("window.__pwned") is None
    assert page.evaluate("document.querySelector('style').sheet.cssRules.length") > 0


def test_what_hides_is_seen(opened):
    page = opened(
        art.TrajectoryGroup([Talk().add("user", "\u202etxt.exe \x1b[31mred a\u200bb \ud800").say("ok").end(0.0)])
    )
    assert page.inner_text("[data-message='0'] .art-body") == "\\u202etxt.exe \\x1b[31mred a\\u200bb \\ud800"


def test_a_text_of_five_megabytes(opened):
    page = opened(art.TrajectoryGroup([Talk().add("user", "x" * 5_000_000).say("short").end(0.0)]))
    assert len(page.inner_text(".art-conversation")) < 40_000
    sizes = [message["bytes"] for message in page.panel.comm.messages]
    assert max(sizes) < 400_000
    assert page.locator("text=Load more").count() == 1


# the budgets of the wire ---------------------------------------------------------------------------------------------


def test_the_state_is_small(opened):
    page = opened(crowd(2000))
    press(page, "J", "t", "]")
    page.wait_for_timeout(500)
    state = page.panel.get_state()
    size = sum(len(json.dumps(value, default=str)) for key, value in state.items() if key != "layout")
    assert size < 70_000  # the script and the style sheet; no rollout
    assert sum(len(json.dumps(state[key])) for key in ("ui", "jump", "tick")) < 1000


# JupyterLab ----------------------------------------------------------------------------------------------------------

SETUP = """import sys; sys.path.insert(0, {tests!r})
from support.view_parts import steps, games
import art_nb as art
from art_nb.panels.viewer import view
viewer = view(steps())
viewer"""


def test_in_lab_keys_are_ours_and_a_reload_keeps_the_place(lab, root):
    nb = lab([SETUP.format(tests=str(root / "tests")), "1 + 1"])
    nb.run(0)
    page = nb.page
    page.wait_for_selector(".art-msg")
    page.locator(".art-reader").click()
    for name in (
        "J",
        "x",
        "j",
        "d",
        "d",
        "Escape",
        "a",
        "b",
        "m",
    ):  # x cuts a cell, dd deletes it, a and b insert: in Lab, not here
        page.keyboard.press(name)
    settled(page, "rollout 1")
    assert page.locator(".jp-Notebook .jp-CodeCell").count() == 2
    assert page.locator(".jp-Notebook .jp-MarkdownCell").count() == 0
    page.wait_for_timeout(600)
    nb.save()
    page.reload()
    page.wait_for_selector(".art-msg", timeout=120_000)
    settled(page, "rollout 1")


def test_in_lab_a_saved_panel_is_read_without_its_kernel_and_live_with_it(lab, root):
    nb = lab([SETUP.format(tests=str(root / "tests"))])
    nb.run(0)
    nb.page.wait_for_selector(".art-msg")
    (output,) = nb.save()["cells"][0]["outputs"]
    assert sorted(output["data"]) == ["text/html", "text/plain"] and output["metadata"]["art_nb"]

    nb.page.reload()
    nb.page.wait_for_selector(".art-msg", timeout=120_000)  # the kernel still has it
    assert not nb.page.locator(".jp-mod-dirty").count()
    (again,) = nb.save()["cells"][0]["outputs"]
    assert again == output

    nb.restart_kernel()
    (again,) = nb.save()["cells"][0]["outputs"]
    assert again == output
    nb.page.reload()
    nb.cell(0).locator(".jp-OutputArea >> text=game 0").first.wait_for()
    assert not nb.page.locator(".art-panel").count()
    assert "Error displaying widget" not in nb.text(0)


def test_in_lab_a_frozen_panel_outlives_its_kernel(lab, root):
    nb = lab([SETUP.format(tests=str(root / "tests")), "viewer.freeze()", "games(0)", "[games(0), games(1)]"])
    for n in (0, 1):
        nb.run(n)
    nb.page.wait_for_selector(".art-panel", state="detached")
    nb.cell(0).locator(".jp-OutputArea >> text=game 0").first.wait_for()
    saved = nb.save()
    output = saved["cells"][0]["outputs"][0]["data"]
    assert "application/vnd.jupyter.widget-view+json" not in output
    assert "game 0" in "".join(output["text/html"])
    assert not saved["metadata"].get("widgets")
    nb.page.reload()
    nb.page.wait_for_selector(".jp-Notebook .jp-CodeCell")
    nb.cell(0).locator(".jp-OutputArea >> text=game 0").first.wait_for()


def test_in_lab_dark(lab, root):
    nb = lab([SETUP.format(tests=str(root / "tests"))], theme="dark")
    nb.run(0)
    nb.page.wait_for_selector(".art-msg")
    assert nb.page.locator(".art-host.art-dark").count() == 1
    nb.page.wait_for_selector(".art-grid")
    assert not axe_faults(nb.page)
