"""Frozen HTML and reports: whatever a model wrote is text in them, they fit, and a browser runs nothing of it."""

import re
from html.parser import HTMLParser

import pytest
from support.conversations import say
from support.ui import browser  # noqa: F401

from art_nb.core.events import Failed, Warned
from art_nb.core.files import append_lines
from art_nb.panels.live_cell import static_form
from art_nb.reports.charts import CHARTS, chart_cards, describe_curve
from art_nb.reports.html import LIMIT, Html, escaped, facts_line, tag, visible_text
from art_nb.reports.html import table as html_table
from art_nb.reports.report import MAX_REPORT_BYTES, export, report
from art_nb.reports.static_html import static_html, static_run
from art_nb.rollouts.trajectories import PydanticException, Trajectory, TrajectoryGroup
from art_nb.runs.sessions import SESSION_FILE
from art_nb.runs.store import RunStore
from art_nb.training.heartbeat import write_run_record
from art_nb.training.run import Run
from art_nb.views.boards import RENDERERS
from art_nb.views.index import load_all, open_rollouts

PWN = "window.__pwned=(window.__pwned||0)+1"
CORPUS = [
    f"<script>{PWN}</script>",
    f"<img src=x onerror='{PWN}'>",
    f"<svg onload='{PWN}'></svg>",
    f"<a href='javascript:{PWN}'>x</a>",
    f"</script><script>{PWN}</script>",
    "<button data-commandlinker-command='runmenu:restart' data-commandlinker-args='{}'>go</button>",
    "<a id=MathJax name=MathJax>x</a>",
    "<form action='https://evil.example/'><input name=x></form>",
    "<style>@import url(https://evil.example/x.css);body{display:none}</style>",
    f"<details open ontoggle='{PWN}'>x</details>",
    "abc\u202efdp.exe\u2066\u200b",
    "\x1b[31mred\x1b]8;;https://evil.example\x07link\x1b[0m",
    "[red]markup[/]",
    "\ud83d alone \udc80",
    "NUL \x00 and \x08 back",
    "</pre></div></td></table></details>",
    f'" onmouseover="{PWN}" x=\'',
    f"<iframe srcdoc='<script>parent.{PWN}</script>'>",
    "<!-- <b> --><plaintext>",
    "&lt;script&gt; &#60;b&#62;",
    "]]><![CDATA[<b>",
    "${alert(1)} {{7*7}} `x`",
]
TAGS = set("div b i p pre details summary table thead tbody tr th td caption img code progress span".split())
ATTRIBUTES = {"style", "open", "src", "alt", "title", "value", "max"}
STYLE = re.compile(r"(?:[a-z-]+:(?:[a-z0-9. #%-]|rgba\([0-9., ]+\))+;?)+")


class Page(HTMLParser):
    """Every element, attribute and text of a page."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.styles, self.sources = set(), set(), set(), set()
        self.texts, self.open = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, name, attributes):
        self.tags.add(name)
        self.attributes |= {key for key, _ in attributes}
        self.styles |= {value for key, value in attributes if key == "style"}
        self.sources |= {value[:22] for key, value in attributes if key in ("src", "href")}
        self.texts += [value or "" for key, value in attributes if key in ("alt", "title")]
        if name not in ("img", "meta", "br"):
            self.open.append(name)

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, data):
        self.texts.append(data)

    def handle_comment(self, data):
        raise AssertionError("a comment")

    def handle_pi(self, data):
        raise AssertionError("an instruction")

    unknown_decl = handle_pi

    @property
    def text(self):
        return "\n".join(self.texts)


def hostile_trajectory(text, reward=0.0):
    """A trajectory that says something everywhere."""
    call = {"id": text, "type": "function", "function": {"name": text, "arguments": text}}
    spelled = text.encode("utf-8", "replace").decode()
    return Trajectory(
        messages_and_choices=[
            {"role": "system", "content": text},
            {"role": text, "content": text},
            {"role": "user", "content": [{"type": "text", "text": text}, {"type": text}]},
            say(text, tool_calls=[call], reasoning=text),
            {"role": "tool", "content": text, "tool_call_id": text},
            say(f"<think>{text}</think>{text}", finish="length"),
        ],
        reward=reward,
        metrics={spelled: 1.0, f"reward/{spelled}": 2.0},
        metadata={text: text, "seed": text},
        logs=[text, text],
    )


def hostile_group(text):
    """Two of them, and a failed one."""
    failed = PydanticException(type=text, message=text, traceback=text)
    return TrajectoryGroup(
        [hostile_trajectory(text), hostile_trajectory(text, 1.0)], exceptions=[failed], metadata={"scenario_id": text}
    )


def hostile_run(folder, texts=CORPUS):
    """A run directory of the whole corpus."""
    store = RunStore(folder / "runs" / "<b>run<b>")
    spelled = [text.encode("utf-8", "backslashreplace").decode() for text in texts]
    store.write_model(
        {"base_model": spelled[0], "project": spelled[1], "name": " ".join(spelled), "inference_api_key": "sk-secret"}
    )
    for step in (1, 2, 3):
        store.write_groups("train", step, [hostile_group(text) for text in texts])
        store.append_history({"step": step, "train/reward": step / 3, "loss/entropy": 1.0 / step, spelled[3]: 1.0})
    for text in spelled:
        store.append_event(Warned(key=text, message=text))
        store.append_event(Failed(where=text, message=text, traceback=text))
        tables = {name: {text: text} for name in ("versions", "machine", "options", "engine")}
        git, base = {"commit": text, "remote": text, "num_changed": text}, {"name": text, "identity": text}
        session = {"time": text, "call": text, "step": text, "goal": text, "git": git, "base_model": base}
        append_lines(store.path / SESSION_FILE, session | tables)
    return store


def check_inert(text, more_tags=frozenset(), more_attributes=frozenset(), sources=("data:image/svg+xml;base64,",)):
    """Nothing in a page is anything but ours."""
    page = Page(text)
    assert page.tags <= TAGS | more_tags
    assert page.attributes <= ATTRIBUTES | more_attributes
    assert not page.open
    for style in page.styles:
        assert STYLE.fullmatch(style), style
    assert all(source.startswith(tuple(source[:22] for source in sources)) for source in page.sources)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", text)
    text.encode("utf-8")
    return page


@pytest.mark.parametrize("text", CORPUS, ids=range(len(CORPUS)))
def test_what_was_said_is_only_text(text):
    for what in (hostile_trajectory(text), hostile_group(text), [hostile_group(text), hostile_group("x")]):
        shown = static_html(what)
        page = check_inert(shown)
        said = visible_text(text.encode("utf-8", "backslashreplace").decode()).replace("\\\\", "\\")
        assert said in page.text.replace("\\\\", "\\")
        assert len(shown.encode()) <= LIMIT


def test_a_run_of_the_whole_corpus_is_inert(tmp_path):
    store = hostile_run(tmp_path)
    shown = static_run(store, note=CORPUS[0])
    page = check_inert(shown)
    assert len(shown.encode()) <= LIMIT
    assert "Reward by step: 0.333 at step 1, 1 at step 3" in shown
    assert 'art.view("' in page.text
    assert "sk-secret" not in shown
    for path in (report(store, tmp_path / "report.html"), export(store, [0, 1, 2, 30], tmp_path / "rows.html")):
        text = path.read_text()
        head, _, body = text.partition("</head>")
        assert re.findall(r"<(\w+)", head) == ["html", "head", "meta", "meta", "meta", "title", "style"]
        assert "default-src &#x27;none&#x27;" in head
        check_inert(
            body.removesuffix("</html>\n"),
            {"body", "h1", "h2", "section", "a"},
            {"id", "href"},
            ("data:image/svg+xml;base64,", "#r"),
        )
        assert "sk-secret" not in text


def test_five_megabytes_on_a_line_fit():
    shown = static_html(TrajectoryGroup([hostile_trajectory("<b>" * 1_700_000), hostile_trajectory("x" * 5_000_000)]))
    assert len(shown.encode()) <= LIMIT
    assert "characters left out" in shown
    check_inert(shown)


def test_many_of_everything_fit(tmp_path):
    long = Trajectory(messages_and_choices=[{"role": "user", "content": f"<{i}>" * 50} for i in range(3000)])
    assert "messages left out" in static_html(long)
    many = TrajectoryGroup([Trajectory(messages_and_choices=[say("&" * 900)], reward=i) for i in range(300)])
    for what in (long, many, [many] * 400, {step: [many] for step in range(30)}):
        shown = static_html(what)
        assert len(shown.encode()) <= LIMIT
        check_inert(shown)
    assert len(static_html(many, limit=20_000).encode()) <= 20_000
    assert len(static_html(many, limit=500).encode()) <= 500
    store = RunStore(tmp_path)
    for step in range(2000):
        store.append_history({"step": step, "train/reward": step / 2000, "loss/grad_norm": 1.0, "loss/entropy": 2.0})
    store.write_groups("train", 2000, [many] * 20)
    shown = static_html(store)
    assert len(shown.encode()) <= LIMIT
    assert "50 of 2000 steps" in shown


def test_the_room_is_used():
    text = "word " * 400
    shown = static_html(
        TrajectoryGroup([Trajectory(messages_and_choices=[say(text + str(i))], reward=i) for i in range(4)])
    )
    assert shown.count(text.strip()) == 4
    assert "left out" not in shown


def test_roles_are_words_and_the_rest_is_folded():
    group = TrajectoryGroup(
        [
            Trajectory(
                messages_and_choices=[
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": "Go."},
                    say(f"<think>hm</think>{i}"),
                ],
                reward=i,
            )
            for i in range(3)
        ],
        metadata={"scenario_id": "s"},
    )
    page = Page(static_html(group))
    assert "common to all rollouts: 2 messages" in page.text
    assert page.text.count("Be brief.") == 2  # in the title of the fold, and inside
    assert "assistant (sampled)" in page.text
    assert "thinking" in page.text
    assert "reward 1 ± 0.816" in page.text
    same = Page(static_html(TrajectoryGroup([Trajectory(reward=1.0)] * 2)))
    assert "all rewards equal: no gradient" in same.text


def test_the_error_of_a_board_renderer_is_shown(monkeypatch):
    def broken(trajectory):
        raise KeyError("<b>tile</b>")

    monkeypatch.setitem(RENDERERS, "broken", broken)
    html = static_html(hostile_trajectory("an answer"))
    assert "board: the renderer broken raised KeyError: &#x27;&lt;b&gt;tile&lt;/b&gt;&#x27;" in html
    check_inert(html)


def test_nothing_to_show():
    assert "no rollouts" in static_html(TrajectoryGroup([]))
    assert "0 rollouts" in static_html([])
    assert describe_curve(CHARTS[0], []) == "Reward: no values"
    assert chart_cards([]) == ""
    many = {"step": 1, "train/reward": 0.5} | {f"train/m{i:02}": 1.0 for i in range(36)}
    cards = chart_cards([many])  # 6 metrics have a chart, 20 are listed
    assert "in run.history: m06, m07" in cards and "m24, m25 and 10 more" in cards and "m26" not in cards
    broke = static_html(TrajectoryGroup([ValueError("<x>")]))
    assert "failed: ValueError: &lt;x&gt;" in broke


def test_a_run_of_another_process_is_a_run_and_a_damaged_step_is_said(tmp_path):
    store = RunStore(tmp_path)
    for step in (1, 2, 3):
        store.write_groups("train", step, [TrajectoryGroup([Trajectory(reward=step)])])
        store.append_history({"train/reward": step / 4, "step": step})
    (tmp_path / "trajectories" / "train" / "0003.parquet").write_bytes(b"PAR1 torn")
    shown = static_html(Run.attach(tmp_path))
    assert "<img src=" in shown and "Groups of step 2" in shown and "step 3 of train could not be read" in shown


def test_a_run_that_failed_before_its_first_step_shows_its_evaluation(tmp_path):
    """A first step in which every rollout failed: the static form itself failed on it, and hid the error."""
    RunStore(tmp_path).write_groups("val", 0, [TrajectoryGroup([Trajectory(reward=reward) for reward in (0, 1)])])
    write_run_record(RunStore(tmp_path), name="x", status="failed", step=0, steps=3, groups=1, rollouts=2)
    RunStore(tmp_path).append_event(Warned(key="no signal at step 1", message="Nothing is learned: <b>"))
    RunStore(tmp_path).append_event(Failed(where="step 1", message="ValueError: the reward is missing"))
    run = Run.attach(tmp_path)
    shown = static_html(run)
    assert "Rollouts of step 0 (val)" in shown and "reward 0.5" in shown and "advantage" not in shown
    assert static_form(run).count("the reward is missing</div>") == 1
    assert "⚠ Nothing is learned: &lt;b&gt;" in static_form(run)


def test_pieces_escape_what_they_are_given():
    for text in CORPUS:
        for shown in (
            escaped(text),
            tag("p", text, title=text),
            html_table([text], [[text]], text),
            facts_line(text, text),
        ):
            assert isinstance(shown, Html)
            check_inert(shown)
    assert escaped(Html("<b>")) == "<b>"


def test_a_report_is_complete(tmp_path):
    store = RunStore(tmp_path / "counting")
    for step in range(1, 6):
        store.append_history({"step": step, "train/reward": step / 5})
        store.write_groups(
            "train",
            step,
            [
                TrajectoryGroup(
                    [Trajectory(messages_and_choices=[say(f"answer {step}.{i}")], reward=i) for i in range(3)]
                )
            ],
        )
    store.append_event(Warned(key="k", message="the reward is flat"))
    text = report(store, tmp_path / "r.html", note="for you").read_text()
    for step in (1, 3, 5):
        assert f"answer {step}.2" in text
        assert f"<h2>step {step}</h2>" in text
    assert "answer 2.2" not in text
    assert "the reward is flat" in text
    assert "for you" in text
    assert "answer 4.1" in report(store, tmp_path / "r.html", groups=[1]).read_text()
    index = load_all(store)
    text = export(index, [4, 4], tmp_path / "one.html").read_text()
    assert text.count("<section") == 1
    assert text.count('href="#r4"') == 1
    assert "answer 4.1" in text


def test_a_report_stays_below_its_limit(tmp_path):
    long = [say("<" * 200_000) for _ in range(30)]
    big = TrajectoryGroup([Trajectory(messages_and_choices=long, reward=i) for i in range(8)])
    path = report(open_rollouts([big] * 3), tmp_path / "big.html", groups=[0, 1, 2])
    assert path.stat().st_size <= MAX_REPORT_BYTES
    with pytest.raises(ValueError, match="at most 200"):
        export(open_rollouts([Trajectory() for _ in range(300)]), range(201), tmp_path / "x.html")


def test_a_browser_runs_nothing_of_it(browser, tmp_path):  # noqa: F811
    store = hostile_run(tmp_path)
    shown = {"run.html": static_run(store, note=CORPUS[0]), "list.html": static_html([*map(hostile_group, CORPUS)])}
    for name, text in shown.items():
        (tmp_path / name).write_text(f"<!doctype html><meta charset=utf-8><div>{text}</div>")
    report(store, tmp_path / "report.html")
    export(store, range(60), tmp_path / "rows.html")
    for path in (tmp_path / name for name in [*shown, "report.html", "rows.html"]):
        asked, said = [], []
        page = browser.new_page()
        page.on("request", lambda request, asked=asked: asked.append(request.url))
        page.on("dialog", lambda dialog, said=said: (said.append(dialog.message), dialog.dismiss()))
        page.goto(f"file://{path}")
        page.evaluate("() => document.querySelectorAll('details').forEach(one => one.open = true)")
        page.wait_for_timeout(200)
        assert page.evaluate("() => window.__pwned") is None
        live = "script,svg,iframe,form,button,input,style:not(head style),a:not([href^='#r'])"
        assert page.evaluate("live => document.querySelectorAll(live).length", live) == 0
        assert page.evaluate("() => typeof MathJax") == "undefined"
        assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
        assert said == []
        assert page.inner_text("body").count("<script>") > 0
        page.close()


def test_the_browser_would_run_it_unescaped(browser, tmp_path):  # noqa: F811
    path = tmp_path / "raw.html"
    path.write_text(f"<!doctype html><meta charset=utf-8><div>{''.join(CORPUS[:3])}</div>")
    page = browser.new_page()
    page.goto(f"file://{path}")
    page.wait_for_function("() => window.__pwned >= 3", timeout=120_000)
    page.close()


def test_it_reads_with_scripts_off(browser, tmp_path):  # noqa: F811
    path = report(hostile_run(tmp_path), tmp_path / "report.html")
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"file://{path}")
    assert page.locator("table").first.is_visible()
    fold = page.locator("details").first
    assert not fold.locator("table, pre").first.is_visible()
    fold.locator("summary").first.click()
    assert fold.locator("table, pre").first.is_visible()
    assert page.locator("img").first.get_attribute("alt").startswith("Reward by step")
    context.close()
