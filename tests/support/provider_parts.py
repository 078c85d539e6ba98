"""A provider for the tests of recordings: a small HTTP server whose replies follow from the request alone."""

import asyncio
import gzip
import hashlib
import json
import sys
import threading
from contextlib import contextmanager

DATE = "Thu, 01 Jan 2026 00:00:00 GMT"
ERRORS = {
    "error-429": (429, {"error": {"message": "Slow down, sk-test-key-0123456789", "type": "rate_limit"}}),
    "error-500": (500, {"error": {"message": "Ouch"}}),
}


def text_for(body):
    """The reply to a body: a few words that depend on all of it."""
    last = str((body.get("messages") or body.get("input") or [""])[-1])
    return f"Reply {hashlib.sha256(last.encode()).hexdigest()[:8]} ünïcode"


def sse(events, named=False):
    return [
        (f"event: {event['type']}\n" if named else "").encode() + b"data: " + json.dumps(event).encode() + b"\n\n"
        for event in events
    ]


def chat_reply(body):
    text = text_for(body)
    head = {"id": "chatcmpl-" + text[6:14], "created": 1, "model": "served-" + body["model"]}
    usage = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
    if not body.get("stream"):
        message = {"role": "assistant", "content": text}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        return [json.dumps({**head, "object": "chat.completion", "choices": choices, "usage": usage}).encode()]
    deltas = [{"role": "assistant"}, *({"content": part} for part in text.split(" "))]
    events = [{**head, "choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    events.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": usage})
    return [*sse(events), b"data: [DONE]\n\n"]


def responses_reply(body):
    item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text_for(body)}]}
    item |= {"id": "msg_1", "status": "completed"}
    whole = {"id": "resp_1", "object": "response", "status": "completed", "model": body["model"], "output": [item]}
    whole |= {"created_at": 1, "tools": [], "tool_choice": "auto", "parallel_tool_calls": False}
    if not body.get("stream"):
        return [json.dumps(whole).encode()]
    return sse([{"type": "response.completed", "sequence_number": 1, "response": whole}], named=True)


def messages_reply(body):
    text, usage = text_for(body), {"input_tokens": 7, "output_tokens": 5}
    head = {"id": "msg_1", "type": "message", "role": "assistant", "model": body["model"], "stop_sequence": None}
    if not body.get("stream"):
        content = [{"type": "text", "text": text}]
        return [json.dumps({**head, "content": content, "stop_reason": "end_turn", "usage": usage}).encode()]
    delta = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
    events = [
        {"type": "message_start", "message": {**head, "content": [], "stop_reason": None, "usage": usage}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        delta,
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 5}},
        {"type": "message_stop"},
    ]
    return sse(events, named=True)


REPLIES = {"/chat/completions": chat_reply, "/responses": responses_reply, "/messages": messages_reply}


def expected(path, content):
    """The status, the headers and the parts of the body of the reply."""
    headers = {"Date": DATE, "X-Request-Id": hashlib.sha256(content).hexdigest(), "Set-Cookie": "a=1"}
    reply = next((function for end, function in REPLIES.items() if path.partition("?")[0].endswith(end)), None)
    if reply is None:
        return 200, {**headers, "Content-Type": "text/plain"}, [b"path " + path.encode()]
    body = json.loads(content)
    if body["model"] in ERRORS:
        status, error = ERRORS[body["model"]]
        return status, {**headers, "Content-Type": "application/json", "Retry-After": "7"}, [json.dumps(error).encode()]
    parts = reply(body)
    if body["model"] == "big":
        parts = [b" " * (1 << 20)] * 24 + parts
    if body["model"] == "gzip":
        parts, headers["Content-Encoding"] = [gzip.compress(b"".join(parts), mtime=0)], "gzip"
    kind = "text/event-stream" if body.get("stream") else "application/json"
    return 200, {**headers, "Content-Type": kind}, parts


class Provider:
    """The server. `held` streams wait before their last part until `release` is set."""

    def __init__(self):
        self.headers, self.canceled, self.release = [], 0, threading.Event()

    async def handle(self, reader, writer):
        try:
            while True:
                await self.answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):  # the client or the server ends
            pass
        finally:
            writer.close()

    async def answer(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        path = head[0].split(" ")[1]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        self.headers.append(headers)
        content = await read_body(reader, headers)
        status, sent, parts = expected(path, content)
        if sent["Content-Type"] == "text/event-stream":
            model = json.loads(content)["model"]
            try:
                await self.stream(reader, writer, status, sent, parts, model)
            except ConnectionError:  # while it waits, or earlier
                self.canceled += model == "held"
                raise
        else:
            body = b"".join(parts)
            writer.write(head_bytes(status, {**sent, "Content-Length": len(body)}) + body)
            await writer.drain()

    async def stream(self, reader, writer, status, sent, parts, model):
        writer.write(head_bytes(status, {**sent, "Transfer-Encoding": "chunked"}))
        for n, part in enumerate(parts):
            if model == "cut" and n == 2:
                writer.transport.abort()
                raise ConnectionResetError
            while model == "held" and n == len(parts) - 2 and not self.release.is_set():
                await asyncio.sleep(0.01)
                if reader.at_eof():
                    raise ConnectionResetError
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")
        await writer.drain()


def head_bytes(status, headers):
    lines = [f"HTTP/1.1 {status} Reason", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


async def read_body(reader, headers):
    if headers.get("transfer-encoding") != "chunked":
        return await reader.readexactly(int(headers.get("content-length", 0)))
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)
    return body


@contextmanager
def running_provider():
    """A provider on a thread. Its address is `.url`."""
    provider, ready, stop = Provider(), threading.Event(), []

    async def serve():
        server = await asyncio.start_server(provider.handle, "127.0.0.1", 0, limit=1 << 20)
        provider.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(ended.set))
        ready.set()
        await ended.wait()
        server.close()

    thread = threading.Thread(target=asyncio.run, args=[serve()], daemon=True)
    thread.start()
    ready.wait()
    try:
        yield provider
    finally:
        provider.release.set()
        stop[0]()
        thread.join(timeout=5)


if __name__ == "__main__":  # in a process of its own: it prints its address and serves until its input ends
    with running_provider() as served:
        print(served.url, flush=True)
        sys.stdin.read()
