"""Exact prompt ids over many turns, forgiving reading of messages, and text out of tokens in any cut."""

import json
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessage
from support.tiny import one_by_one, spelling_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from art_nb.core.types import ServeError
from art_nb.tokens.chat import ChatFormat, SampledTokenCache, TextStream

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMED = CHATML.replace("m.content", "(m.content | trim)")
FORGETFUL = (  # as Qwen3: thoughts only in what follows the last user message
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.index0 > ns.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls or [] %}\n<tool_call>\n"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALWAYS_FORGETFUL = FORGETFUL.replace("loop.index0 > ns.last", "false")
NEWLINE_FIRST = CHATML.replace("<|im_end|>", "\n<|im_end|>")
TOOLS = [{"type": "function", "function": {"name": "play", "parameters": {"type": "object", "properties": {}}}}]
CORPUS = ["the move is b2, the move is a1. system user assistant Stop here é 🙂"] * 3
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def sentencepiece(special):
    """As Llama 2: a space is put before the text, unknown characters fall back to bytes."""
    letters = sorted({*"".join(CORPUS), "▁", "\n"} - {" ", "é", "🙂"})
    pieces = [*special, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "▁m", "▁a"]
    vocab = {piece: place for place, piece in enumerate(pieces)}
    bpe = Tokenizer(models.BPE(vocab, [("▁", "m"), ("▁", "a")], unk_token="<unk>", byte_fallback=True))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bpe.add_special_tokens(special)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", chat_template=CHATML)


BYTES, PIECES = spelling_tokenizer(SPECIAL, "<|im_end|>", CHATML), sentencepiece(SPECIAL)
END = BYTES.eos_token_id
QUICK = settings(max_examples=60, derandomize=True)
TOKENIZERS = pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["byte level", "sentencepiece"])

words = st.text(st.one_of(st.sampled_from("a b2\n\t é"), st.characters(exclude_categories=["Cs"])), max_size=12)
spoken = words.filter(lambda text: "<" not in text)


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def spelt(tokenizer, text):
    """As the tokenizer would spell a text in the middle of a conversation."""
    return ids_of(tokenizer, "<|im_end|>" + text)[1:]


def say(chat, messages, sampled, text, tools=None):
    """One turn as the server does it; the reply goes through JSON as over HTTP."""
    prompt = chat.prompt_ids(messages, tools)
    reply = chat.reply(text, tools)
    chat.remember(messages, tools, prompt, sampled, reply)
    return prompt, json.loads(json.dumps(reply))


# -- prompts -----------------------------------------------------------------------------------------------------

turns = st.lists(st.tuples(spoken, spoken, st.booleans(), st.booleans()), min_size=1, max_size=4)


@QUICK
@given(turns=turns, template=st.sampled_from([CHATML, TRIMMED, NEWLINE_FIRST, FORGETFUL]))
def test_every_prompt_extends_the_exact_ids(turns, template):
    chat, messages, seen = ChatFormat(BYTES, chat_template=template), [], []
    for user, text, stopped, odd in turns:
        messages.append({"role": "user", "content": user})
        sampled = (one_by_one if odd else ids_of)(BYTES, text) + [END] * stopped
        prompt, reply = say(chat, messages, sampled, text)
        assert prompt[: len(seen)] == seen
        seen = prompt + sampled
        messages.append(reply)
    assert chat.prompt_ids(messages)[: len(seen)] == seen


@QUICK
@given(turns=turns)
@TOKENIZERS
def test_prompt_reads_like_the_template(tokenizer, turns):
    chat, messages = ChatFormat(tokenizer), []
    for user, text, stopped, odd in turns:
        messages.append({"role": "user", "content": user})
        sampled = (one_by_one if odd and tokenizer is BYTES else spelt)(tokenizer, text) + [END] * stopped
        prompt, reply = say(chat, messages, sampled, text)
        whole = ids_of(tokenizer, chat.render(messages))
        assert tokenizer.decode(prompt) == tokenizer.decode(whole)
        messages.append(reply)


def test_reply_cut_by_length_is_closed_as_context():
    chat, messages = ChatFormat(BYTES), [{"role": "user", "content": "go"}]
    sampled = ids_of(BYTES, "the mo")
    prompt, reply = say(chat, messages, sampled, "the mo")
    later = chat.prompt_ids([*messages, reply, {"role": "user", "content": "on"}])
    closing = "<|im_end|>\n<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\n"
    assert later == prompt + sampled + ids_of(BYTES, closing)


def test_another_stop_token_stays_and_the_template_closes():
    chat, messages = ChatFormat(BYTES), [{"role": "user", "content": "go"}]
    sampled = [*ids_of(BYTES, "b2"), BYTES.convert_tokens_to_ids("<|endoftext|>")]
    prompt, reply = say(chat, messages, sampled, "b2")
    assert BYTES.decode(chat.prompt_ids([*messages, reply])[len(prompt) :]) == (
        "b2<|endoftext|><|im_end|>\n<|im_start|>assistant\n"
    )


def test_no_space_is_invented_after_the_stop_token():
    chat, messages = ChatFormat(PIECES), [{"role": "user", "content": "go"}]
    sampled = [*ids_of(PIECES, "a1"), END]
    prompt, reply = say(chat, messages, sampled, "a1")
    later = chat.prompt_ids([*messages, reply])
    assert PIECES.convert_ids_to_tokens(later[len(prompt + sampled) :])[:2] == ["\n", "<|im_start|>"]


def test_template_that_drops_thoughts_starts_afresh():
    chat, messages = ChatFormat(BYTES, chat_template=FORGETFUL), [{"role": "user", "content": "go"}]
    text = "<think>\nis b2 free?\n</think>\n\nb2"
    sampled = one_by_one(BYTES, text) + [END]
    prompt, reply = say(chat, messages, sampled, text)
    assert reply == {"role": "assistant", "content": "b2", "reasoning_content": "is b2 free?"}
    within = chat.prompt_ids([*messages, reply, {"role": "tool", "content": "taken"}])
    assert within[: len(prompt + sampled)] == prompt + sampled
    after = chat.prompt_ids([*messages, reply, {"role": "user", "content": "on"}])
    assert "free?" not in BYTES.decode(after)
    assert BYTES.decode(after).startswith("<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\nb2<|im_end|>")


def test_template_that_drops_the_last_thought_too_is_not_continued():
    chat, messages = ChatFormat(BYTES, chat_template=ALWAYS_FORGETFUL), [{"role": "user", "content": "go"}]
    text = "<think>\nis b2 free?\n</think>\n\nb2"
    _, reply = say(chat, messages, one_by_one(BYTES, text) + [END], text)
    for role in ("tool", "user"):
        assert "free?" not in BYTES.decode(chat.prompt_ids([*messages, reply, {"role": role, "content": "on"}]))


@pytest.mark.parametrize("text", ["the move", ""])
def test_template_that_opens_an_empty_thought_starts_afresh(text):
    opens = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n\n</think>\n\n{% endif")
    chat, messages = ChatFormat(BYTES, chat_template=opens), [{"role": "user", "content": "go"}]
    _, reply = say(chat, messages, one_by_one(BYTES, text) + [END], text)
    messages += [reply, {"role": "user", "content": "on"}]
    assert chat.prompt_ids(messages) == ids_of(BYTES, chat.render(messages))
    assert len(chat._memory) == 0


def test_tool_calls_keep_their_ids_over_turns():
    chat, messages = ChatFormat(BYTES, chat_template=FORGETFUL), [{"role": "user", "content": "go"}]
    text = '<tool_call>{"arguments":{"cell":"b2"},   "name":"play"}</tool_call>'
    sampled = one_by_one(BYTES, text) + [END]
    prompt, reply = say(chat, messages, sampled, text, TOOLS)
    assert reply["content"] is None
    answer = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "ok"}
    dumped = ChatCompletionMessage.model_validate(reply).model_dump()
    assert chat.prompt_ids([*messages, dumped, answer], TOOLS)[: len(prompt + sampled)] == prompt + sampled
    renamed = {**reply, "tool_calls": [{**reply["tool_calls"][0], "id": "other"}]}
    assert chat.prompt_ids([*messages, renamed, answer], TOOLS)[: len(prompt + sampled)] == prompt + sampled
    assert chat.prompt_ids([*messages, dumped, answer])[: len(prompt + sampled)] != prompt + sampled


@pytest.mark.parametrize(
    "spell",
    [
        lambda text: {"role": "assistant", "content": text},
        lambda text: ChatCompletionMessage(role="assistant", content=text).model_dump(),
        lambda text: {"role": "assistant", "content": [{"type": "text", "text": text}]},
        lambda text: {"content": text, "role": "assistant", "tool_calls": [], "refusal": None, "unheard_of": {"a": 1}},
    ],
)
def test_a_reply_is_known_in_every_spelling(spell):
    chat, messages = ChatFormat(BYTES), [{"role": "user", "content": "go"}]
    sampled = one_by_one(BYTES, "the move") + [END]
    prompt, _ = say(chat, messages, sampled, "the move")
    assert chat.prompt_ids([*messages, spell("the move")])[: len(prompt + sampled)] == prompt + sampled


def test_an_edited_reply_continues_from_the_one_before():
    chat, messages = ChatFormat(BYTES), [{"role": "user", "content": "go"}]
    first = one_by_one(BYTES, "the move") + [END]
    prompt, reply = say(chat, messages, first, "the move")
    messages += [reply, {"role": "user", "content": "on"}]
    say(chat, messages, one_by_one(BYTES, " the move ") + [END], " the move ")
    edited = [*messages, {"role": "assistant", "content": "the move"}]
    later = chat.prompt_ids(edited)
    assert later[: len(prompt + first)] == prompt + first
    assert later[len(prompt + first) :] == ids_of(BYTES, chat.render(edited).split("the move<|im_end|>", 1)[1])


def test_siblings_with_the_same_words():
    chat, messages = ChatFormat(BYTES), [{"role": "user", "content": "go"}]
    prompt, spellings = chat.prompt_ids(messages), [one_by_one(BYTES, "the move"), ids_of(BYTES, "the move")]
    assert spellings[0] != spellings[1]
    for sampled in spellings:
        say(chat, messages, [*sampled, END], "the move")
    reply = {"role": "assistant", "content": "the move"}
    assert chat.prompt_ids([*messages, reply])[len(prompt) :][: len(spellings[1])] == spellings[1]
    hinted = {**reply, "token_ids": [*spellings[0], END]}
    assert chat.prompt_ids([*messages, hinted])[len(prompt) :][: len(spellings[0])] == spellings[0]
    (kept,) = chat._memory._entries.values()
    assert chat._memory._size == sum(said.size for said in kept)


def test_a_request_tells_the_template_more():
    chat = ChatFormat(BYTES, "{{ style }}" + CHATML, {"style": "calm"})
    start = [{"role": "user", "content": "a"}]
    brisk = chat.with_template({"style": "brisk"})
    prompt, sampled = brisk.prompt_ids(start), [*ids_of(BYTES, "b"), *ids_of(BYTES, "2"), END]
    brisk.remember(start, None, prompt, sampled, brisk.reply("b2"))
    later = [*start, {"role": "assistant", "content": "b2"}, {"role": "user", "content": "c"}]
    assert chat.with_template({"style": "brisk"}).prompt_ids(later)[: len(prompt) + 3] == prompt + sampled
    assert BYTES.decode(prompt).startswith("brisk<|im_start|>")
    assert BYTES.decode(chat.prompt_ids(later)).startswith("calm<|im_start|>")
    for clash in ("messages", "tools", "chat_template", "tokenize"):
        with pytest.raises(ServeError, match="chat template refuses"):
            chat.with_template({clash: "mine"}).prompt_ids(start)


def test_memory_is_bounded_and_forgetting_is_safe():
    chat, messages = ChatFormat(BYTES, memory_bytes=2000), [{"role": "user", "content": "go"}]
    for turn in range(40):
        text = f"the move {turn}"
        _, reply = say(chat, messages, one_by_one(BYTES, text) + [END], text)
        messages += [reply, {"role": "user", "content": "on"}]
        assert BYTES.decode(chat.prompt_ids(messages)) == chat.render(messages)
    assert chat._memory._size <= 2000


def test_many_threads_share_one_format():
    chat, wrong = ChatFormat(BYTES, memory_bytes=400_000), []  # nothing is forgotten

    def play(player):
        messages, seen = [], []
        for turn in range(12):
            messages.append({"role": "user", "content": f"player {player} turn {turn}"})
            text = "the move is " + "é🙂"[turn % 2] * (turn % 3)
            sampled = one_by_one(BYTES, text) + [END]
            prompt, reply = say(chat, messages, sampled, text)
            wrong.extend([(player, turn)] if prompt[: len(seen)] != seen else [])
            seen = prompt + sampled
            messages.append(reply)

    threads = [threading.Thread(target=play, args=(player,)) for player in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    entries = chat._memory._entries.values()
    assert chat._memory._size == sum(said.size for kept in entries for said in kept)


@QUICK
@given(user=spoken, text=spoken)
@TOKENIZERS
def test_a_written_reply_has_the_ids_the_template_would_give(tokenizer, user, text):
    chat = ChatFormat(tokenizer).with_empty_cache()
    messages, reply = [{"role": "user", "content": user}], {"role": "assistant", "content": text}
    written = chat.reply_ids(messages, reply)
    assert written[-1] == END
    assert tokenizer.decode(chat.prompt_ids(messages) + written) + "\n" == tokenizer.decode(
        ids_of(tokenizer, chat.render([*messages, reply], prompt=False))
    )
    assert "".join(pieces_of(BYTES, written)[1]) == text or tokenizer is PIECES


def test_a_reply_the_template_does_not_print_has_no_ids():
    thought = {"role": "assistant", "content": "b2", "reasoning_content": "free?"}
    with pytest.raises(ServeError, match="word for word"):
        ChatFormat(BYTES).reply_ids([{"role": "user", "content": "go"}], thought)


# -- messages that cannot be read --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "hi",
        [None],
        [{}],
        [{"role": "wizard", "content": "x"}],
        [{"role": ["user"], "content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": {"type": "text", "text": "x"}}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text", "text": None}]}],
        [{"role": "user", "content": "\ud800"}],
        [{"role": "assistant", "tool_calls": [{"id": "x"}]}],
        [{"role": "assistant", "tool_calls": "play"}],
    ],
)
def test_bad_messages_get_one_clear_sentence(messages):
    with pytest.raises(ServeError) as caught:
        ChatFormat(BYTES).prompt_ids(messages)
    assert caught.value.status == 400
    assert caught.value.param.startswith("messages")
    assert "\n" not in str(caught.value)


def test_what_a_template_refuses_is_the_clients_fault():
    refuses = ChatFormat(BYTES, chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ServeError, match="roles must alternate"):
        refuses.prompt_ids([{"role": "user", "content": "x"}])
    undefined = ChatFormat(BYTES, chat_template="{{ messages[7].content.upper() }}")
    with pytest.raises(ServeError, match="refuses"):
        undefined.prompt_ids([{"role": "user", "content": "x"}])
    undefined.remember([{"role": "user", "content": "x"}], None, [1], [2], {"role": "assistant", "content": "y"})


def test_no_template_is_said_at_once():
    bare = PreTrainedTokenizerFast(tokenizer_object=BYTES.backend_tokenizer)
    with pytest.raises(ServeError, match="chat template"):
        ChatFormat(bare)


# -- replies -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        ("b2", "b2", None, []),
        ("", "", None, []),
        (" \n b2 ", " \n b2 ", None, []),
        ("<think>a</think>b", "b", "a", []),
        ("a\n</think>\n\nb", "a\n</think>\n\nb", None, []),
        ("<think>\n\n</think>\n\nb", "b", None, []),
        ("<think>never closed", "", "never closed", []),
        ("well <think>a</think>b", "well <think>a</think>b", None, []),
        ('<tool_call>{"name": "play"}</tool_call>', None, None, [("play", {})]),
        ('<tool_call>{"name": "play", "arguments": {"c": "é"}}', None, None, [("play", {"c": "é"})]),
        ('<tool_call>{"name": "play", "arguments": "{\\"c\\": 1}"}</tool_call>', None, None, [("play", {"c": 1})]),
        (
            'x<tool_call>{"name": "a"}</tool_call>\n<tool_call>{"name": "b"}</tool_call>',
            "x",
            None,
            [("a", {}), ("b", {})],
        ),
        ("<tool_call>play</tool_call>", "<tool_call>play</tool_call>", None, []),
        ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', None, []),
        ('<tool_call>["name"]</tool_call>', '<tool_call>["name"]</tool_call>', None, []),
        ('<tool_call>{"name": "\\ud800"}</tool_call>', '<tool_call>{"name": "\\ud800"}</tool_call>', None, []),
        ("<tool_call>" + "[" * 100_000, "<tool_call>" + "[" * 100_000, None, []),
        ('<think>x</think><tool_call>{"name": "a"}</tool_call>', None, "x", [("a", {})]),
    ],
    ids=range(18),
)
def test_replies(text, content, reasoning, calls):
    message = ChatFormat(BYTES).reply(text, TOOLS)
    found = [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message.get("tool_calls", [])
    ]
    assert (message["content"], message.get("reasoning_content"), found) == (content, reasoning, calls)
    ChatCompletionMessage.model_validate_json(json.dumps(message))


def test_calls_are_text_where_no_tools_were_offered():
    text = '<tool_call>{"name": "play"}</tool_call>'
    assert ChatFormat(BYTES).reply(text) == {"role": "assistant", "content": text}


@QUICK
@given(text=st.text(st.sampled_from(list('<think></think><tool_call>{"name": "a"}\n')), max_size=60))
def test_any_text_makes_a_reply(text):
    message = ChatFormat(BYTES).reply(text, TOOLS)
    assert ChatCompletionMessage.model_validate(message).role == "assistant"


# -- text as it streams ------------------------------------------------------------------------------------------


def pieces_of(tokenizer, ids, stop=()):
    stream = TextStream(tokenizer, stop=stop)
    return stream, [*(stream.add(token) for token in ids), stream.flush()]


@QUICK
@given(text=st.text(max_size=40), odd=st.booleans())
@TOKENIZERS
def test_streamed_text_is_the_decoded_text(tokenizer, text, odd):
    ids = (one_by_one if odd and tokenizer is BYTES else ids_of)(tokenizer, text)
    assert "".join(pieces_of(tokenizer, ids)[1]) == tokenizer.decode(ids, skip_special_tokens=True)


def test_no_half_characters():
    text = "👩‍👩‍👧 e\u0301 Ж ह"
    _, pieces = pieces_of(BYTES, ids_of(BYTES, text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_special_tokens_are_no_text():
    ids = ids_of(BYTES, "<|im_start|>é<|im_end|>b2<|endoftext|>")
    assert "".join(pieces_of(BYTES, ids)[1]) == "éb2"
    middle = ids_of(BYTES, "é")
    middle.insert(1, END)
    assert "".join(pieces_of(BYTES, middle)[1]) == "é"


@QUICK
@given(ids=st.lists(st.integers(0, 319), max_size=80))
def test_any_ids_stream_in_bounded_memory(ids):
    stream = TextStream(BYTES, stop=("b2",))
    for token in ids:
        stream.add(token)
        assert len(stream._window) <= 2 * 8
    stream.flush()


def test_bytes_that_never_become_a_character_come_out():
    half = ids_of(BYTES, "🙂")[:1]
    stream = TextStream(BYTES)
    assert "\ufffd" in "".join(stream.add(half[0]) for _ in range(20))
    assert stream.add(ids_of(BYTES, "b")[0]).endswith("b")


def first_completed(text, stop):
    for end in range(len(text) + 1):
        starts = [end - len(one) for one in stop if text[:end].endswith(one)]
        if starts:
            return text[: min(starts)]
    return None


@QUICK
@given(
    text=st.text("abcé🙂", max_size=30),
    odd=st.booleans(),
    stop=st.lists(st.text("abcé🙂", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_do_not_depend_on_the_cut(text, odd, stop):
    stream, pieces = pieces_of(BYTES, (one_by_one if odd else ids_of)(BYTES, text), stop)
    expected = first_completed(text, stop)
    assert stream.stopped == (expected is not None)
    assert "".join(pieces) == (text if expected is None else expected)


def test_the_stop_string_that_is_completed_first_counts():
    stop, whole = ("move", "ov"), ids_of(BYTES, "move")
    assert len(whole) < 4
    for ids in (whole, one_by_one(BYTES, "move")):
        assert "".join(pieces_of(BYTES, ids, stop)[1]) == "m"


def test_stop_string_over_tokens_is_never_shown():
    ids = one_by_one(BYTES, "b2 Stop here, more")
    stream, pieces = pieces_of(BYTES, ids, ("Stop here",))
    assert stream.stopped
    assert "".join(pieces) == "b2 "
    assert stream.add(ids[0]) == ""


def test_stop_string_that_is_a_special_token():
    stream, pieces = pieces_of(BYTES, ids_of(BYTES, "b2<|im_end|>more"), ("<|im_end|>",))
    assert stream.stopped
    assert "".join(pieces) == "b2"


def test_a_long_reply_costs_no_more_a_token():
    stream, calls = TextStream(BYTES), []
    decode = stream._decode
    stream._decode = lambda ids: calls.append(len(ids)) or decode(ids)
    for token in one_by_one(BYTES, "é🙂b2 " * 300):
        stream.add(token)
    assert max(calls) < 10


def test_memory_keeps_what_was_used_last():
    chat = ChatFormat(BYTES)
    messages = [[{"role": "user", "content": f"go {n}"}] for n in range(3)]
    for one in messages[:2]:
        say(chat, one, one_by_one(BYTES, "the move") + [END], "the move")
    entries = list(chat._memory._entries.items())
    memory = SampledTokenCache(sum(said[0].size for _, said in entries))
    for key, said in entries:
        memory.add(key, said[0])
    memory.find(entries[0][0])
    memory.add(b"new", entries[0][1][0])
    assert memory.find(entries[0][0])
    assert not memory.find(entries[1][0])
