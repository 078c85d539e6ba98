"Parts for the server's tests: a byte tokenizer, a chat format that is easily read, a sampler that follows a script."

import asyncio
import random

from art_nb.core.types import ServeError
from art_nb.samplers.base import SampledToken
from art_nb.serving.endpoint import Endpoint
from art_nb.tokens.reply_stream import ReplyStream
from art_nb.tokens.tool_calls import CALL_FORMATS, call_prefix

END = 256


class Bytes:
    "A tokenizer whose tokens are bytes; 256 ends a reply."

    def __len__(self):
        return 257

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(i for i in ids if i < END).decode("utf-8", "replace") + "<end>" * (END in ids)


class Tags:
    "A chat format: a tag before each message."

    calls, busy = CALL_FORMATS["hermes"], False

    def __init__(self):
        self.known = []

    def prompt_ids(self, messages, tools=None):
        content = [m.get("content") or "" for m in messages]
        texts = [c if isinstance(c, str) else "".join(part["text"] for part in c) for c in content]
        turns = [f"<{m['role']}>{t}" for m, t in zip(messages, texts, strict=True)]
        return list("".join([*turns, "<assistant>"]).encode())

    def with_template(self, template_kwargs):
        self.told = template_kwargs
        return self

    def stream(self, prompt_ids, tools=None, single_call=False):
        return ReplyStream(CALL_FORMATS["hermes"] if tools else None, single_call=single_call)

    def forced_call_start(self, prompt_ids, name):
        text = call_prefix(CALL_FORMATS["hermes"], name)
        return text, list(text.encode())

    def remember(self, messages, tools, prompt_ids, token_ids, reply):
        self.known.append((messages, tools, prompt_ids, token_ids, reply))


class Scripted:
    "A sampler that says `words`; the script can slow it down, hold it or make it fail."

    tokenizer, max_model_len, guides, exact_guides = Bytes(), 4096, frozenset(), frozenset()

    def __init__(self, words="Hello, world"):
        self.words, self.delay_s = words, 0.0
        self.error, self.error_after, self.error_call = None, 0, None  # raised at this token, of this call or of all
        self.gate = None  # (token number, threading.Event): wait there
        self.open, self.closed, self.calls = 0, 0, []

    async def generate(self, prompt_ids, params, adapter):
        self.calls.append((prompt_ids, params, adapter))
        self.open += 1
        try:
            fails = self.error and self.error_call in (None, len(self.calls))
            async for sampled in self._say(params, fails):
                yield sampled
        finally:
            self.open -= 1
            self.closed += 1

    async def _say(self, params, fails):
        draw = random.Random(params.seed)
        ids = [*self.words.encode(), END]
        for n, i in enumerate(ids[: params.max_tokens]):
            if fails and n == self.error_after:
                raise self.error
            if self.gate and n == self.gate[0]:
                while not self.gate[1].is_set():
                    await asyncio.sleep(0.005)
            await asyncio.sleep(self.delay_s)
            finish = "stop" if i == END else "length" if n + 1 == params.max_tokens else None
            text = "" if i == END else chr(i)
            yield SampledToken(i, -draw.random(), text, [(i, -0.1), (65, float("-inf"))][: params.top_logprobs], finish)

    def stats(self):
        return {"running": self.open, "waiting": 0, "how": "scripted"}


def resolve(name):
    "`base` is served without an adapter, `ttt@N` with one."
    if name == "base":
        return None
    if not name.startswith("ttt@"):
        raise ServeError(f"No model is served as {name[:80]!r}.", status=404)
    return name


def endpoint(sampler=None, chat=None):
    return Endpoint(sampler or Scripted(), chat or Tags(), resolve, lambda: ["base", "ttt@3"])
