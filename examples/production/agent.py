"""The agent of the tutorial: it takes two numbers from each message of a customer. It reads the messages from stdin."""

import asyncio
import json
import os
import sys

import openai

PROMPT = 'You read messages to a shop. Reply with JSON only, for example {"customer": "12345", "order": "X1234"}.'
FIELDS = {name: {"type": "string", "maxLength": 8} for name in ("customer", "order")}
SCHEMA = {"type": "object", "properties": FIELDS, "required": [*FIELDS], "additionalProperties": False}
REQUEST = {
    "max_completion_tokens": 40,
    "response_format": {"type": "json_schema", "json_schema": {"name": "ticket", "schema": SCHEMA}},
}


async def answer(client: openai.AsyncOpenAI, session: str, message: str) -> str | None:
    messages = [{"role": "system", "content": PROMPT}, {"role": "user", "content": message}]
    reply = await client.chat.completions.create(
        model=os.environ["AGENT_MODEL"], messages=messages, extra_headers={"x-session-id": session}, **REQUEST
    )
    return reply.choices[0].message.content


async def main() -> None:
    waiting = asyncio.Semaphore(16)

    async def served(ticket):
        async with waiting:
            return await answer(client, ticket["session"], ticket["message"])

    async with openai.AsyncOpenAI() as client:  # OPENAI_BASE_URL and OPENAI_API_KEY
        await asyncio.gather(*map(served, json.load(sys.stdin)))


if __name__ == "__main__":
    asyncio.run(main())
