"""A client with many requests next to a client with one."""

import asyncio

import httpx


async def replies_before(ask_one, ask_many, is_busy, many, running):
    """The number of replies to many requests that end while another client waits for one reply.

    `ask_one` and `ask_many` send a request with a number. The one request is sent when `is_busy` is true. The server
    samples `running` replies at the same time."""
    order = []

    async def ask_and_note(ask, number, name):
        await ask(number)
        order.append(name)

    requests = [asyncio.ensure_future(ask_and_note(ask_many, number, "many")) for number in range(many)]
    while not is_busy():
        await asyncio.sleep(0.01)
    before = len(order)
    assert before < many - 6 * running, "the greedy client is almost done: let it ask for more tokens"
    await ask_and_note(ask_one, 0, "single")
    replies = order.index("single") - before
    await asyncio.gather(*requests)
    return replies


def endpoint_client(model):
    """A client of the endpoint of a registered model."""
    headers, limits = {"authorization": f"Bearer {model.inference_api_key}"}, httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=model.inference_base_url, headers=headers, timeout=120, limits=limits)
