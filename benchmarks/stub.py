"""An endpoint that returns the same response after a fixed time. It receives the time and reports its URL."""

import asyncio
import json

from talk import Talk

BODY = json.dumps(
    {
        "id": "stub",
        "object": "chat.completion",
        "created": 0,
        "model": "stub",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Very well."}}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13},
    }
).encode()
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY


class Stub(asyncio.Protocol):
    """A connection of the stub endpoint."""

    latency_s, answer = 1.0, ANSWER

    def connection_made(self, transport):
        self.transport, self.received = transport, b""

    def data_received(self, data):
        self.received += data
        head, gap, body = self.received.partition(b"\r\n\r\n")
        lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
        length = int(lengths[0]) if lengths else 0
        if gap and len(body) >= length:
            self.received = body[length:]
            asyncio.get_running_loop().call_later(self.latency_s, self.transport.write, self.answer)


async def main() -> None:
    talk, loop = Talk(), asyncio.get_running_loop()
    while (request := await asyncio.to_thread(talk.receive)) is not None:
        Stub.latency_s = request["latency_s"]
        server = await loop.create_server(Stub, "127.0.0.1", 0, backlog=4096)
        talk.reply(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")


if __name__ == "__main__":
    asyncio.run(main())
