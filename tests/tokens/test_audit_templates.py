"""Tool calls through chat templates: printed, read back, one and two in a turn; and templates that never end."""

import gc
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest

from art_nb.core.types import ServeError
from art_nb.models.tiny import tiny_tokenizer
from art_nb.tokens.chat import ChatFormat, clean_messages
from art_nb.tokens.deadlines import DeadlineRunner
from art_nb.tokens.tool_calls import CALL_FORMATS

TOKENIZER = tiny_tokenizer()
ASK = [{"role": "user", "content": "How is the weather?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The forecast.",
            "parameters": {
                "type": "object",
                "required": ["city"],
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "units": {"type": "object"},
                    "metric": {"type": "boolean"},
                    "code": {"type": "string"},
                },
            },
        },
    }
]
ARGUMENTS = [{"city": "San José, {CR}", "days": 3, "code": "007"}, {"city": "Oslo", "metric": True, "days": -4}]

# Templates of our own that print calls as the models' do; {{ CALLS }} prints those of message m.
FRAME = (
    "{% if tools %}<|tools|>{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}"
    "{% if m.tool_calls %}CALLS{% endif %}<|over|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
EACH = "{% for c in m.tool_calls %}{% set f = c.function %}"
TEXTS = "{{ v if v is string else v | tojson }}"
OBJECT = "{{ f.arguments | tojson }}"
CALLS = {
    "hermes": EACH + '<tool_call>\n{"name": "{{ f.name }}", "arguments": ' + OBJECT + "}\n</tool_call>\n{% endfor %}",
    "llama3_json": "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at once') }}{% endif %}"
    "{% set f = m.tool_calls[0].function %}{# ipython #}"
    '{"name": "{{ f.name }}", "parameters": ' + OBJECT + "}",
    "mistral": EACH + "[TOOL_CALLS]{{ f.name }}[ARGS]" + OBJECT + "{% endfor %}",
    "qwen3_coder": EACH + "\n<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments | items %}"
    "<parameter={{ k }}>\n{{ v | string if v is not mapping else v | tojson }}\n</parameter>\n"
    "{% endfor %}"
    "</function>\n</tool_call>{% endfor %}",
    "glm45": EACH + "\n<tool_call>{{ f.name }}\n{% for k, v in f.arguments | items %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>" + TEXTS + "</arg_value>\n{% endfor %}</tool_call>{% endfor %}",
    "deepseek_v3": "<｜tool▁calls▁begin｜>" + EACH + "<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
    "{{ f.name }}\n```json\n"
    "{{ '' + f.arguments }}\n```<｜tool▁call▁end｜>\n{% endfor %}<｜tool▁calls▁end｜>",
    "gemma4": EACH + "<|tool_call>call:{{ f.name }}{{ '{' }}{% for k, v in f.arguments | dictsort %}{{ k }}:"
    '{% if v is string %}<|"|>{{ v }}<|"|>{% else %}{{ v | tojson }}{% endif %}'
    "{{ ',' if not loop.last }}{% endfor %}{{ '}' }}<tool_call|>{% endfor %}",
    "lfm2": "<|tool_call_start|>[" + EACH + "{{ f.name }}({% for k, v in f.arguments | items %}{{ k }}="
    "{{ \"'\" ~ v ~ \"'\" if v is string else v }}{{ ', ' if not loop.last }}{% endfor %})"
    "{{ ', ' if not loop.last }}{% endfor %}]<|tool_call_end|>",
    "openai": "{% set f = m.tool_calls[0].function %} to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
    + OBJECT
    + "<|call|>",
}
OWN = {name: FRAME.replace("CALLS", calls) for name, calls in CALLS.items()}
OWN["openai"] = OWN["openai"].replace("\n{{ m.content", "{{ m.content").replace("assistant\n", "assistant")
ONE_CALL = {"llama3_json", "openai"}


def warned(template, **options):
    """Return a chat format and the keys of its warnings."""
    keys = []
    return ChatFormat(TOKENIZER, template, warn=lambda key, message: keys.append(key), **options), keys


def said(n):
    """Return a client's message with `n` calls."""
    calls = [
        {"id": f"abcdefgh{i}", "type": "function", "function": {"name": "get_weather", "arguments": json.dumps(a)}}
        for i, a in enumerate(ARGUMENTS[:n])
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def printed(chat, n):
    """Return what the template prints for a reply with `n` calls, without the mark of its end."""
    text = chat.render(clean_messages([*ASK, said(n)]), TOOLS, prompt=False)
    openings = [chat.render(ASK, TOOLS, prompt) for prompt in (True, False)]
    opening = next(o for o in openings if text.startswith(o))
    marked = chat.render([*ASK, {"role": "assistant", "content": "MARK"}], TOOLS, prompt=False)
    thinking = opening.rstrip().endswith("<think>")
    return thinking, text[len(opening) :].removesuffix(marked.rpartition("MARK")[2])


def read(chat, thinking, text, step=None):
    """Return the calls of a reply, read at once or in pieces."""
    stream = chat.stream(TOKENIZER("<think>")["input_ids"] if thinking else [], TOOLS)
    for at in range(0, len(text), step or len(text)):
        stream.add(text[at : at + (step or len(text))])
    stream.add("", last=True)
    assert stream.message().get("tool_calls"), text
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in stream.calls]


@pytest.mark.parametrize("name", CALLS)
def test_every_format_is_recognized_and_read_back(name):
    chat, warnings = warned(OWN[name])
    assert chat.calls is CALL_FORMATS[name] and not warnings
    for n in (1,) if name in ONE_CALL else (1, 2):
        thinking, text = printed(chat, n)
        for step in (None, 1, 7):
            assert read(chat, thinking, text, step) == [("get_weather", a) for a in ARGUMENTS[:n]]


def test_a_template_that_refuses_two_calls_gets_one():
    chat, _ = warned(OWN["llama3_json"])
    text = "; ".join(json.dumps({"name": "get_weather", "parameters": a}) for a in ARGUMENTS)
    assert read(chat, False, text) == [("get_weather", ARGUMENTS[0])]
    reply = chat.reply(text, TOOLS)
    assert chat.prompt_ids([*ASK, reply, {"role": "tool", "content": "sunny", "tool_call_id": "x"}], TOOLS)


def test_a_template_that_wants_text_gets_text():
    chat, _ = warned(OWN["deepseek_v3"])
    assert '"days": 3' in TOKENIZER.decode(chat.prompt_ids([*ASK, said(1)], TOOLS))
    no_place = OWN["deepseek_v3"].replace("{% if tools %}<|tools|>{{ tools | tojson }}\n{% endif %}", "")
    chat, _ = warned(no_place)
    assert chat.prompt_ids([*ASK, said(2)], TOOLS)


def test_calls_that_nobody_can_read_are_named_once():
    strange = FRAME.replace("CALLS", EACH + "@@{{ f.name }}@@{{ f.arguments | tojson }}{% endfor %}")
    assert warned(strange)[1] == ["tool calls are not read"]
    messages = []
    ChatFormat(TOKENIZER, strange, warn=lambda key, message: messages.append(message))
    assert "tool_call_parser" in messages[0]
    assert warned(OWN["qwen3_coder"], tool_call_parser="hermes")[1] == ["tool calls are not read"]


@pytest.mark.parametrize("name", [name for name in CALLS if name != "openai"])
@pytest.mark.parametrize("cut", [0.3, 0.6, 0.9])
def test_a_call_that_is_cut_off_or_damaged_raises_nothing(name, cut):
    chat, _ = warned(OWN[name])
    text = printed(chat, 1)[1]
    for damaged in (
        text[: int(len(text) * cut)],
        text.replace("{", "{{", 1),
        text.replace("}", "", 1),
        text + text[:9],
    ):
        chat.reply(damaged, TOOLS)


LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def test_a_template_that_never_ends_is_stopped_and_not_used_again():
    chat = ChatFormat(TOKENIZER, "{% if messages | length > 1 %}" + LOOPS + "{% endif %}hello")
    threads = []

    def overrun(chat):
        chat._run.limit_s = 60
        assert chat.render(ASK) == "hello"
        threads.append(chat._run._thread)
        chat._run.limit_s = 0.3
        with pytest.raises(ServeError, match="more than 0.3 seconds") as error:
            chat.render(ASK * 2)
        assert error.value.status == 500
        return str(error.value)

    for _ in range(2):
        assert "Register" not in overrun(chat)  # one overrun is forgiven
    for messages in (ASK * 2, ASK):
        with pytest.raises(ServeError, match="Register the model again with another `chat_template`"):
            chat.render(messages)
    assert len({*threads}) == 2
    del chat
    gc.collect()
    for thread in threads:  # they were interrupted
        thread.join(60)
        assert not thread.is_alive()


def test_renders_share_one_thread_and_wait_for_their_turn():
    """A thread per render failed in a process without memory for another thread."""
    run, started, gate, seen = DeadlineRunner(60), threading.Event(), threading.Event(), []

    def slow():
        started.set()
        gate.wait(60)
        return seen.append(threading.get_ident()) or "slow"

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(run, slow)
        started.wait(60)
        assert run.busy
        others = [pool.submit(run, lambda n=n: seen.append(threading.get_ident()) or str(n)) for n in range(3)]
        time.sleep(0.2)  # the other calls wait for the first
        gate.set()
        assert [each.result(60) for each in [first, *others]] == ["slow", "0", "1", "2"]
    assert len(seen) == 4 and len({*seen}) == 1 and not run.busy


def test_without_memory_for_a_thread_a_render_is_refused_and_the_next_one_tries_again(monkeypatch):
    run, start = DeadlineRunner(0.3), threading.Thread.start

    def full(thread):
        raise RuntimeError("can't start new thread")

    with pytest.raises(ServeError, match="more than 0.3 seconds"):
        run(lambda: TOKENIZER.apply_chat_template(ASK, chat_template=LOOPS, tokenize=False))
    monkeypatch.setattr(threading.Thread, "start", full)
    for _ in range(2):
        with pytest.raises(ServeError, match="too little memory") as error:
            run(lambda: "text")
        assert error.value.status == 503
    monkeypatch.setattr(threading.Thread, "start", start)
    run.limit_s = 60
    assert run(lambda: "text") == "text"


def test_the_errors_of_the_work_itself_pass_a_deadline():
    def late():
        raise TimeoutError("its own")

    run = DeadlineRunner(60)
    with pytest.raises(TimeoutError, match="its own"):
        run(late)
    assert run(lambda: "fine") == "fine" and not run.overruns


REAL = [
    path
    for folder in sys.path
    for path in sorted(Path(folder or ".").glob("trl/chat_templates/*.jinja"))
    if "tool_calls" in path.read_text() and "{%- if tools" in path.read_text()
]


@pytest.mark.parametrize(("path", "n"), product(REAL, (1, 2)), ids=lambda value: getattr(value, "stem", value))
def test_the_templates_of_real_models(path, n):
    """Runs where TRL's wheel is on the path: `pip install --no-deps --target DIR trl==1.16.0`."""
    chat, warnings = warned(path.read_text())
    if "muse" in path.name:
        assert warnings == ["tool calls are not read"]
        return
    assert not warnings
    if n == 2 and chat._one_call:
        return
    assert read(chat, *printed(chat, n)) == [("get_weather", a) for a in ARGUMENTS[:n]]
