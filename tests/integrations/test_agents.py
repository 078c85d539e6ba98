"""Existing agents with clients of their own: every client, threads and event loops, training, example conversations."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import aiohttp
import httpx
import openai
import pytest
import requests

import art_nb as art
from art_nb.core.types import RolloutError
from art_nb.models.tiny import save_tiny_model
from art_nb.rollouts.trajectories import choices
from art_nb.tokens.rows import trajectory_rows

pytestmark = pytest.mark.timeout(300)
SECRET = "sk-secret-of-the-agent"
FIND = {"name": "find", "parameters": {"type": "object", "properties": {"item": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": FIND}]
CALL = ("find", {"item": "bolt"})


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A tiny model with room for a conversation with tools."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", context=1024)


@pytest.fixture
async def model(local, named, weights):
    registered = named(base_model=str(weights))
    await registered.register(local)
    return registered


@pytest.fixture
def server():
    """The agent's own server. It records the requests that it gets, and answers none of them."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.server.requests.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
            self.send_error(500)

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.requests = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def url_of(server, path="/v1"):
    return f"http://127.0.0.1:{server.server_port}{path}"


BODY = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": "Where is the bolt?"}], "max_tokens": 4}


def by_openai(url):
    client = openai.OpenAI(base_url=url, api_key=SECRET, max_retries=0)
    return lambda: client.chat.completions.create(**BODY).choices[0].message.content


def by_openai_stream(url):
    client = openai.OpenAI(base_url=url, api_key=SECRET, max_retries=0)

    def agent():
        chunks = client.chat.completions.create(**BODY, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    return agent


def by_async_openai(url):
    client = openai.AsyncOpenAI(base_url=url, api_key=SECRET, max_retries=0)

    async def agent():
        return (await client.chat.completions.create(**BODY)).choices[0].message.content

    return agent


def by_responses(url):
    client = openai.OpenAI(base_url=url, api_key=SECRET, max_retries=0)
    return lambda: client.responses.create(model="gpt-5", input="Where is the bolt?", max_output_tokens=4).output_text


def by_azure(url):
    client = openai.AzureOpenAI(azure_endpoint=url, api_key=SECRET, api_version="2024-06-01", max_retries=0)
    return lambda: client.chat.completions.create(**BODY).choices[0].message.content


def by_messages(url):
    headers = {"x-api-key": SECRET, "anthropic-version": "2023-06-01"}
    return lambda: httpx.post(f"{url}/messages", json=BODY, headers=headers, timeout=60).json()["content"][0]["text"]


def by_httpx_auth(url):
    headers = {"X-Team-Token": SECRET, "proxy-authorization": SECRET, "openai-organization": SECRET}
    client = httpx.Client(auth=("user", SECRET), headers=headers, cookies={"id": SECRET}, timeout=60)
    return lambda: client.post(f"{url}/chat/completions", json=BODY).json()["choices"][0]["message"]["content"]


def by_requests(url):
    session = requests.Session()
    session.headers["authorization"] = f"Bearer {SECRET}"
    send = lambda: session.post(f"{url}/chat/completions", json=BODY, params={"key": SECRET}, cookies={"id": SECRET})
    return lambda: send().json()["choices"][0]["message"]["content"]


def by_aiohttp(url):
    async def agent():
        async with aiohttp.ClientSession(headers={"x-api-key": SECRET}, cookies={"id": SECRET}) as session:
            options = {"json": BODY, "params": {"key": SECRET}, "auth": aiohttp.BasicAuth("user", SECRET)}
            async with session.post(f"{url}/chat/completions", **options) as reply:
                return (await reply.json())["choices"][0]["message"]["content"]

    return agent


CLIENTS = [
    by_openai,
    by_openai_stream,
    by_async_openai,
    by_responses,
    by_azure,
    by_messages,
    by_httpx_auth,
    by_requests,
    by_aiohttp,
]


@pytest.mark.parametrize("make", CLIENTS)
async def test_the_requests_of_every_client_go_to_the_model(model, server, make):
    trajectory, reply = await art.run_agent(model, make(url_of(server)))
    assert trajectory.messages()[-1]["content"] == reply and trajectory.messages()[0]["role"] == "user"
    assert trajectory_rows(trajectory)[0].tokens[-1] == choices(trajectory)[0].token_ids[-1]
    assert not server.requests
    (exchange,) = trajectory.exchanges.in_order()
    assert exchange.request["model"] == model.get_inference_name()
    assert SECRET not in exchange.model_dump_json()


async def test_no_credentials_are_sent_to_the_model(model, server, monkeypatch):
    monkeypatch.setattr(model, "inference_base_url", url_of(server, "/model/v1"))  # records what the model would get
    for make in CLIENTS:
        with pytest.raises(Exception, match="."):  # the server answers with status 500
            await art.run_agent(model, make("http://127.0.0.1:9/v1"))
    assert len(server.requests) == len(CLIENTS)
    for path, headers in server.requests:
        assert path.startswith("/model/v1/") and "?" not in path
        assert headers["authorization"] == f"Bearer {model.inference_api_key}"
        assert not [name for name, value in headers.items() if SECRET in value]


async def test_requests_inside_no_capture_go_to_their_own_server(model, server):
    ask, judge = by_openai(url_of(server)), by_openai(url_of(server, "/judge"))

    def agent():
        ask()
        with art.no_capture():
            return judge()

    with pytest.raises(openai.InternalServerError):
        await art.run_agent(model, agent)
    ((path, headers),) = server.requests
    assert path == "/judge/chat/completions" and headers["authorization"] == f"Bearer {SECRET}"
    with pytest.raises(openai.InternalServerError):  # after the rollout, nothing is redirected
        ask()


async def test_other_requests_of_a_tool_are_not_changed(model, server):
    """The paths of other services can end like those of the responses and messages APIs."""
    ask, chat = by_openai(url_of(server)), url_of(server, "/channels/7/messages")

    def agent():
        ask()
        httpx.post(chat, json={"content": "hello"}, timeout=60)
        requests.post(chat, data={"text": "hello"})
        return requests.get(chat).status_code

    trajectory, _ = await art.run_agent(model, agent)
    assert len(trajectory.exchanges.in_order()) == 1
    assert [path for path, _ in server.requests] == ["/channels/7/messages"] * 2


async def test_requests_of_a_redirected_client_do_not_use_the_proxy_of_its_server(model, server, monkeypatch):
    monkeypatch.setenv("http_proxy", url_of(server, ""))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for make in (by_openai, by_requests):
        await art.run_agent(model, make("http://api.example/v1"))
    assert not server.requests


async def test_an_agent_can_have_any_arguments(model, server):
    ask = by_openai(url_of(server))

    def agent(model, agent, function):
        return ask() and (model, agent, function)

    _, result = await art.run_agent(model, agent, model=1, agent=2, function=3)
    assert result == (1, 2, 3)


async def test_a_body_that_cannot_be_redirected_is_not_sent(model, server):
    def agent():
        return httpx.post(url_of(server, "/v1/chat/completions"), content=(part for part in (b"{", b"}")))

    with pytest.raises(RolloutError, match="cannot be sent to the model"):
        await art.run_agent(model, agent)
    with pytest.raises(RolloutError, match="cannot be sent to the model"):
        await art.run_agent(model, requests.post, url_of(server, "/v1/chat/completions"), data=b"not JSON")
    assert not server.requests


async def test_steps_and_agents_in_parallel(model, server):
    """One client serves rollouts of different steps and models at the same time."""
    ask = by_openai(url_of(server))
    await model.train_sft(
        [art.Trajectory(messages_and_choices=[*BODY["messages"], {"role": "assistant", "content": "a"}])]
    )

    async def rollout(model, scenario):
        trajectory, _ = await art.run_agent(model, ask)
        return trajectory

    first, second = await asyncio.gather(*(art.evaluate(model, rollout, range(4), step=step) for step in (0, 1)))
    steps = [
        {choices(trajectory)[0].policy_version for trajectory in result.trajectories} for result in (first, second)
    ]
    assert steps == [{0}, {1}] and not server.requests


async def test_training_with_an_async_client_of_another_loop(model, server):
    ask = by_async_openai(url_of(server))
    await art.run_agent(model, ask)  # the client's connection belongs to this loop

    async def rollout(model, scenario):
        trajectory, reply = await art.run_agent(model, ask)
        trajectory.reward = float(len(reply))
        return trajectory

    run = art.train(
        model, rollout, [0], steps=2, groups_per_step=1, rollouts_per_group=3, request_overrides={"temperature": 1}
    )
    await run
    assert len(run.history) == 2 and not run.history[-1].get("train/exceptions")


async def test_an_agent_without_requests(model):
    with pytest.raises(RolloutError, match="No reply of the model was recorded"):
        await art.run_agent(model, lambda: 1)
    with pytest.raises(ZeroDivisionError):
        await art.run_agent(model, lambda: 1 / 0)
    with pytest.raises(art.NotRegisteredError):
        await art.run_agent(art.TrainableModel(name="new", project="p", base_model="smollm2-135m"), lambda: 1)


def shop_agent(url, stream=False):
    """Return an agent that calls a tool until the model answers."""
    client = openai.OpenAI(base_url=url, api_key=SECRET, max_retries=0)

    def agent(question):
        messages = [{"role": "user", "content": question}]
        while True:
            message = (
                client.chat.completions.create(
                    model="gpt-4o", messages=messages, tools=TOOLS, tool_choice="required", max_tokens=200
                )
                .choices[0]
                .message
            )
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return message.content
            for call in message.tool_calls:
                shelf = json.loads(call.function.arguments)["item"].upper()
                messages.append({"role": "tool", "tool_call_id": call.id, "content": shelf})

    return agent


def rollout_of(agent):
    async def rollout(model, question):
        trajectory, answer = await art.run_agent(model, agent, question)
        trajectory.reward, trajectory.metrics["right"] = float("BOLT" in answer), True
        return trajectory

    return rollout


async def test_examples_contain_what_the_agent_sends(model, server):
    examples = await art.example_rollouts(
        model,
        rollout_of(shop_agent(url_of(server))),
        ["bolt?", "Where?"],
        lambda question: [CALL, [CALL, CALL], "BOLT"],
    )
    assert [example.messages()[0]["content"] for example in examples] == ["bolt?", "Where?"]
    for example in examples:
        roles = [message["role"] for message in example.messages()]
        assert roles == ["user", "assistant", "tool", "assistant", "tool", "tool", "assistant"]
        assert example.tools == TOOLS and example.reward == 1 and example.metrics["right"]
        assert not choices(example)  # nothing that a policy gradient could use
        call = example.messages()[1]["tool_calls"][0]["function"]
        assert call["name"] == "find" and json.loads(call["arguments"]) == {"item": "bolt"}
        assert example.messages()[2]["content"] == "BOLT"
    await model.train_sft(examples)
    assert await model.get_step() == 1


async def test_examples_over_a_stream_and_other_apis(model, server):
    async def rollout(model, make):
        trajectory, reply = await art.run_agent(model, make(url_of(server)))
        trajectory.metadata["reply"] = reply
        return trajectory

    makers = [by_openai_stream, by_async_openai, by_responses, by_messages, by_httpx_auth, by_requests, by_aiohttp]
    examples = await art.example_rollouts(model, rollout, makers, lambda make: ["ok"], show_progress=False)
    assert [example.metadata["reply"] for example in examples] == ["ok"] * len(makers)


@pytest.mark.parametrize(
    ("replies", "reason"),
    [
        ([CALL], "more requests than there are replies"),
        ([CALL, "BOLT", "BOLT"], "sent 2 requests to the model, but 3 replies"),
        (["BOLT " * 300], "permits only 200"),
        ([7], "Not a reply: '7'"),
        (CALL, "Give a list of replies"),
        ([("find", {"item": {1}})], "are not JSON"),
    ],
)
async def test_wrong_replies_are_errors(model, server, replies, reason):
    with pytest.raises(RolloutError, match=reason) as error:
        await art.example_rollouts(model, rollout_of(shop_agent(url_of(server))), ["bolt?"], lambda _: replies)
    assert "1 of 1 examples failed. The first is 'bolt?'" in str(error.value)


@pytest.mark.parametrize(
    "restriction",
    [
        {"extra_body": {"guided_regex": "[A-Z]+"}},
        {"extra_body": {"guided_choice": ["BOLT", "NUT"]}},
        {"extra_body": {"structured_outputs": {"regex": "[A-Z]{4}"}}},
    ],
    ids=lambda restriction: "-".join(restriction["extra_body"]),
)
async def test_examples_have_the_format_of_their_request(model, restriction):
    async def rollout(model, reply):
        request = BODY | {"model": model.get_inference_name(), "max_tokens": 50} | restriction
        completion = await model.openai_client().chat.completions.create(**request)
        return art.Trajectory(messages_and_choices=[*BODY["messages"], completion.choices[0]], reward=1)

    (example,) = await art.example_rollouts(model, rollout, ["BOLT"], lambda reply: [reply])
    assert example.messages()[-1]["content"] == "BOLT"
    for wrong in ("bolt", "BOLT.", " BOLT"):
        with pytest.raises(RolloutError, match=f"The given reply '{wrong}' does not have the format"):
            await art.example_rollouts(model, rollout, [wrong], lambda reply: [reply])


async def test_text_completions_have_no_given_replies(model, server):
    client = openai.OpenAI(base_url=url_of(server), api_key=SECRET, max_retries=0)

    async def rollout(model, prompt):
        agent = lambda: client.completions.create(model="m", prompt=prompt, max_tokens=4)
        return (await art.run_agent(model, agent))[0]

    with pytest.raises(RolloutError, match="need an API with messages"):
        await art.example_rollouts(model, rollout, ["bolt?"], lambda _: ["x"])


async def test_an_agent_that_hides_the_error_is_noticed(model, server):
    ask = shop_agent(url_of(server))

    def agent(question):
        try:
            return ask(question)
        except openai.BadRequestError:
            return "BOLT"

    with pytest.raises(RolloutError, match="sent 2 requests to the model, but 1 replies"):
        await art.example_rollouts(model, rollout_of(agent), ["bolt?"], lambda _: [CALL])


async def test_sampling_is_unchanged_after_examples(model, server):
    rollout = rollout_of(by_openai(url_of(server)))
    with pytest.raises(RolloutError):
        await art.example_rollouts(model, rollout, ["bolt?"], lambda _: ["x"])
    reply = await model.openai_client().chat.completions.create(**BODY | {"model": model.get_inference_name()})
    assert "given" not in reply.choices[0].model_extra and len(reply.choices[0].token_ids) <= 4
