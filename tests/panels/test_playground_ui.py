"""The playground in Chromium, on the real panel and a tiny trained model."""

import pytest
from support.live_parts import Home
from support.ui import HOSTILE, axe_faults, calm

import art_nb as art
from art_nb.panels.playground import Playground, PlaygroundError
from art_nb.rollouts.entries import is_choice


@pytest.fixture(scope="module")
def model(tiny_model_dir, tmp_path_factory):
    """A registered tiny model with the checkpoints of two steps."""
    home = Home(tiny_model_dir, str(tmp_path_factory.mktemp("playground")))
    example = art.Trajectory(
        messages_and_choices=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    )
    home.wait(home.model.train_sft([example], art.TrainSFTConfig(learning_rate=1e-3)))
    yield home.model
    home.close()


@pytest.fixture
def opened(page_with):
    def open_panel(*args, **options):
        panel = art.playground(*args)
        page = page_with(panel, **options)
        page.wait_for_selector(".art-p-chat")
        calm(page)
        page.panel = panel
        return page

    return open_panel


def send(page, text, tokens="4"):
    page.fill("[aria-label='Maximum number of tokens']", tokens)
    page.fill("[aria-label=Message]", text)
    page.get_by_role("button", name="Send", exact=True).click()
    page.wait_for_function("!document.querySelector('.art-playground').textContent.includes('waiting')")
    calm(page)


def roles(page, chat=1):
    return page.locator(f"[aria-label='Chat {chat}'] .art-p-head strong").all_inner_texts()


def test_a_chat_shows_the_probability_of_each_token(opened, model):
    page = opened(model)
    send(page, "free: A1 B1")
    assert roles(page) == ["user", "assistant"]
    page.focus(".art-p-text[tabindex='0']")
    page.keyboard.press("ArrowRight")
    detail = page.inner_text(".art-p-detail")
    assert detail.startswith("Token 1 of ") and detail.count("%") == 7  # the token and six alternatives
    choice = page.panel.chats[0].entries[1]
    assert is_choice(choice) and len(choice.logprobs.content) <= 4
    assert page.panel.trajectory().messages()[0] == {"role": "user", "content": "free: A1 B1"}


def test_two_checkpoints_get_the_same_message(opened, model):
    page = opened(model, None, [0, 1])
    assert page.eval_on_selector("[aria-label='Checkpoint of chat 1']", "node => node.value") == "0"
    send(page, "free: A1 B1")
    assert roles(page, 1) == roles(page, 2) == ["user", "assistant"]
    page.click("text=Close the second chat")
    page.wait_for_selector("[aria-label='Chat 2']", state="detached")
    assert len(page.panel.chats) == 1


def test_a_rollout_is_continued_from_a_turn(opened, model):
    talk = [("user", "first"), ("assistant", "one"), ("user", "second"), ("assistant", "two")]
    rollout = art.Trajectory(messages_and_choices=[{"role": role, "content": text} for role, text in talk])
    page = opened(model, rollout)
    assert roles(page) == ["user", "assistant", "user", "assistant"]
    page.click("[aria-label='Fork after message 2']")
    page.wait_for_function("document.querySelectorAll('.art-p-message').length == 2")
    page.select_option("[aria-label='Role of the message']", "tool")
    page.fill("[aria-label=Message]", "an observation")
    page.get_by_role("button", name="Add", exact=True).click()
    page.wait_for_function("document.querySelectorAll('.art-p-message').length == 3")
    assert [message["content"] for message in page.panel.trajectory().messages()] == ["first", "one", "an observation"]
    assert len(rollout.messages_and_choices) == 4  # the rollout itself is unchanged


def test_an_error_is_shown_and_changes_nothing(opened, model):
    page = opened(model)
    page.fill("[aria-label=Temperature]", "-1")
    send(page, "free: A1")
    assert "temperature" in page.inner_text(".art-p-note")
    assert roles(page) == ["user"] and not page.panel.chats[0].is_waiting


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_accessible_and_not_wider_than_the_page(opened, model, theme):
    page = opened(model, None, [0, 1], theme=theme, width=870)
    send(page, "free: A1 B1")
    page.focus(".art-p-text[tabindex='0']")
    page.keyboard.press("ArrowRight")
    for width in (390, 870, 1440):
        page.set_viewport_size({"width": width, "height": 900})
        calm(page)
        assert not axe_faults(page)
        over = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert over <= 0, width


def test_hostile_texts_stay_texts(opened, model):
    page = opened(model, art.Trajectory(messages_and_choices=[{"role": "user", "content": text} for text in HOSTILE]))
    assert page.evaluate("window.__pwned") is None
    assert page.locator(".art-p-message").count() == len(HOSTILE)
    text = page.panel.html()
    assert "<script" not in text and "&lt;script" in text


def test_what_cannot_be_opened(model):
    with pytest.raises(PlaygroundError, match="at most two chats"):
        art.playground(model, steps=[0, 1, 2])
    with pytest.raises(PlaygroundError, match="Invalid role 'judge'"):
        Playground(model).add("judge", "a")
    with pytest.raises(PlaygroundError, match="There is no chat 3"):
        Playground(model).fork(3, 0)
