"""Sessions with real programs: other processes, clients that cancel, repeat and die, and a run that trains on them."""

import asyncio
import json
import os
import shutil
import sys
import threading
import time
from datetime import UTC, datetime

import numpy as np
import pytest
from openai import AsyncOpenAI, AuthenticationError, BadRequestError, NotFoundError, OpenAI
from support.registered import QUESTION, until

import art_nb as art
from art_nb.integrations import programs
from art_nb.integrations.gateway import GATEWAY
from art_nb.models.clients import httpx
from art_nb.rollouts.exchanges import events_of
from art_nb.tokens.rows import trajectory_rows

pytestmark = pytest.mark.timeout(300)

AGENT = """
import json, sys
from openai import OpenAI

scenario = json.loads(sys.stdin.readline())
messages, client = [{"role": "user", "content": scenario["question"]}], OpenAI(max_retries=0, timeout=120)
for turn in range(scenario.get("turns", 1)):
    reply = client.chat.completions.create(model="any", messages=messages, max_completion_tokens=6)
    reply = {"role": "assistant", "content": reply.choices[0].message.content}
    messages += [reply, {"role": "user", "content": "Go on."}]
print(json.dumps({"reward": len(set(messages[1]["content"])), "metrics": {"turns": scenario.get("turns", 1)}}))
"""


@pytest.fixture
async def model(local, named):
    registered = named()
    await registered.register(local)
    return registered


def client_of(session, **options):
    return AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0, timeout=120, **options)


async def test_the_key_is_valid_during_the_session(model):
    async with model.session() as session, client_of(session) as client:
        assert [card.id async for card in client.models.list()] == [session.model_name]
        await client.chat.completions.create(model="other", messages=QUESTION, max_tokens=2)
        with pytest.raises(AuthenticationError):
            await client.with_options(api_key="sk-art-guess").chat.completions.create(model="m", messages=QUESTION)
        with pytest.raises(NotFoundError, match="POST /v1/chat/completions"):
            await client.embeddings.create(model="m", input="x")
    async with client_of(session) as client:
        with pytest.raises(AuthenticationError, match="no open session"):
            await client.chat.completions.create(model="m", messages=QUESTION)
    assert len(session.trajectory.exchanges.chat_completions) == 1


async def chat_turn(client, messages, seed, stream):
    options = {"model": "m", "messages": messages, "max_completion_tokens": 6, "seed": seed}
    if not stream:
        return (await client.chat.completions.create(**options)).choices[0].message.content
    chunks = await client.chat.completions.create(**options, stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])


async def responses_turn(client, messages, seed, stream):
    options = {"model": "m", "input": messages, "max_output_tokens": 6, "extra_body": {"seed": seed}}
    if not stream:
        return (await client.responses.create(**options)).output_text
    events = [event async for event in await client.responses.create(**options, stream=True)]
    return events[-1].response.output_text


async def messages_turn(client, messages, seed, stream):
    body = {"model": "m", "messages": messages, "max_tokens": 6, "seed": seed, "stream": stream}
    address, headers = str(client.base_url) + "messages", {"x-api-key": client.api_key}
    async with httpx.AsyncClient(timeout=120) as http:
        reply = await http.post(address, json=body, headers=headers)
    if not stream:
        return reply.json()["content"][0]["text"]
    deltas = [event["delta"] for event in events_of(reply.content) if event["type"] == "content_block_delta"]
    return "".join(delta["text"] for delta in deltas)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("turn", [chat_turn, responses_turn, messages_turn])
async def test_turns_are_those_of_the_plain_client(model, turn, stream):
    """The same conversation gives the same rows, ID by ID, through every API."""
    messages = [*QUESTION]
    with art.Trajectory() as plain:
        for seed in range(3):
            reply = await model.openai_client().chat.completions.create(
                model=model.get_inference_name(), messages=messages, max_tokens=6, seed=seed
            )
            messages += [{"role": "assistant", "content": reply.choices[0].message.content}, *QUESTION]
    messages = [*QUESTION]
    async with model.session() as session, client_of(session) as client:
        for seed in range(3):
            messages += [{"role": "assistant", "content": await turn(client, messages, seed, stream)}, *QUESTION]
    (expected,), (row,) = trajectory_rows(plain), trajectory_rows(session.trajectory)
    assert np.array_equal(row.tokens, expected.tokens)
    assert np.array_equal(row.sampled, expected.sampled)
    assert np.array_equal(row.logprobs, expected.logprobs, equal_nan=True)


async def test_canceled_and_failed_requests_are_no_turns(model):
    async with model.session() as session, client_of(session) as client:
        stream = await client.chat.completions.create(model="m", messages=QUESTION, max_tokens=200, stream=True)
        await anext(aiter(stream))
        await stream.close()
        with pytest.raises(BadRequestError, match="temperature"):
            await client.chat.completions.create(model="m", messages=QUESTION, temperature=9)
        await until(lambda: not GATEWAY._tasks[session.api_key])
        assert not session.trajectory.exchanges
        endpoint = model.backend().runtime(model).endpoint
        await until(lambda: not endpoint.service.live)


async def test_a_repeated_request_is_one_turn(model):
    async with model.session() as session, client_of(session) as client:
        for count in ("0", "1", "2"):
            last = await client.chat.completions.create(
                model="m", messages=QUESTION, max_tokens=4, extra_headers={"x-stainless-retry-count": count}
            )
        other = [*QUESTION, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
        await client.chat.completions.create(
            model="m", messages=other, max_tokens=4, extra_headers={"x-stainless-retry-count": "1"}
        )
    turns = session.trajectory.exchanges.chat_completions
    assert len(turns) == 2
    assert turns[0].response.choices[0].token_ids == last.choices[0].token_ids


def record_turn(session, retry_count):
    """Give a session one complete exchange."""
    request = {"model": "m", "messages": QUESTION}
    choice = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
    reply = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
    body = json.dumps(request).encode()
    is_complete = session.record(
        "/v1/chat/completions", body, json.dumps(reply).encode(), datetime.now(UTC), retry_count
    )
    return is_complete, body


async def test_a_request_that_failed_before_has_no_turn_to_remove(model):
    """Two equal requests. The second one failed once and is repeated: both are turns."""
    session = model.session()
    _, body = record_turn(session, 0)
    session.record_failure("/v1/chat/completions", body)
    record_turn(session, 1)
    assert len(session.trajectory.exchanges.chat_completions) == 2
    record_turn(session, 1)  # the client missed the reply before
    assert len(session.trajectory.exchanges.chat_completions) == 2


async def test_a_turn_that_cannot_be_recorded_is_an_error_of_the_rollout(model, monkeypatch):
    async def rollout():
        async with model.session() as session, client_of(session) as client:
            monkeypatch.setattr(type(session.trajectory), "_record", lambda *_: 1 / 0)
            await client.chat.completions.create(model="m", messages=QUESTION, max_tokens=2)

    with pytest.raises(art.RolloutError, match="could not be recorded: division by zero"):
        await rollout()


async def test_a_client_that_leaves_after_the_last_event_has_a_turn(model):
    """Raw connections that are closed as soon as the end of the stream is there."""
    body = {"model": "m", "messages": QUESTION, "max_tokens": 2, "stream": True}
    async with model.session() as session:
        port = int(session.address.rpartition(":")[2])
        for _ in range(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(http_request(session, "/v1/chat/completions", json.dumps(body).encode()))
            await reader.readuntil(b"data: [DONE]")
            writer.transport.abort()
        await until(lambda: not GATEWAY._tasks[session.api_key])
    assert len(session.trajectory.exchanges.chat_completions) == 20


def http_request(session, path, body):
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: x",
        f"Authorization: Bearer {session.api_key}",
        f"Content-Length: {len(body)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def status_of(reader):
    return int((await reader.readline()).split()[1])


async def test_a_path_cannot_leave_the_api(model):
    async with model.session() as session:
        for path in ("/v1/completions/../../health", "/v1/models/../metrics", "/v1/messages/x", "/v1/embeddings"):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(session.address.rpartition(":")[2]))
            writer.write(http_request(session, path, b"{}"))
            assert await status_of(reader) == 404
            writer.close()


async def test_a_body_that_arrives_after_the_end_of_the_session(model):
    async with model.session() as session:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(session.address.rpartition(":")[2]))
        whole = http_request(session, "/v1/chat/completions", json.dumps({"model": "m", "messages": QUESTION}).encode())
        writer.write(whole[:-5])
        await asyncio.sleep(0.2)  # the key is accepted
    writer.write(whole[-5:])
    assert await status_of(reader) == 401
    writer.close()
    assert not session.trajectory.exchanges
    assert id(model) not in GATEWAY._clients


async def test_a_session_that_is_canceled_at_its_start_is_not_left_open(model):
    async def enter():
        async with model.session():
            await asyncio.sleep(60)

    for wait in range(30):
        tasks = [asyncio.ensure_future(enter()) for _ in range(4)]
        await asyncio.sleep(wait / 10_000)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    assert not GATEWAY._sessions


async def test_children_of_a_finished_program_do_not_delay_the_rollout():
    start = time.monotonic()
    output = await programs.run_program(["sh", "-c", "echo done; sleep 100 & exit 3"], "", os.environ)
    assert (output.exit_code, output.stdout) == (3, "done\n")
    assert time.monotonic() - start < 60


async def test_synchronous_agents_do_not_wait_for_each_other(model):
    """More functions than threads of the default executor run at the same time."""
    barrier = threading.Barrier(40)

    def agent(session, scenario):
        barrier.wait(timeout=60)
        client = OpenAI(base_url=session.base_url, api_key=session.api_key)
        return client.chat.completions.create(model="m", messages=QUESTION, max_tokens=1).usage.completion_tokens

    rollout = art.rollout_from(agent)
    trajectories = await asyncio.gather(*(rollout(model, i) for i in range(40)))
    assert [t.reward for t in trajectories] == [1.0] * 40


async def test_the_end_of_a_session_cancels_its_requests(model):
    async with model.session() as session:
        client = client_of(session)
        pending = asyncio.ensure_future(
            client.chat.completions.create(
                model="m", messages=QUESTION, max_tokens=400, extra_body={"ignore_eos": True}
            )
        )
        await until(lambda: GATEWAY._tasks[session.api_key])
    with pytest.raises(AuthenticationError, match="no open session"):
        await pending
    await client.close()
    assert not session.trajectory.exchanges


async def test_two_agents_are_two_histories(model):
    async with model.session() as session, client_of(session) as client:
        for content in ("Write.", "Review."):
            messages = [{"role": "system", "content": content}, *QUESTION]
            await client.chat.completions.create(model=content, messages=messages, max_tokens=4)
    assert len(session.trajectory.additional_histories) == 1


async def test_programs_of_many_sessions_do_not_mix(model):
    """Each program counts its own turns, and its trajectory has these and no others."""
    rollout = art.rollout_from([sys.executable, "-c", AGENT])
    scenarios = [{"question": f"Question {i}.", "turns": 1 + i % 3} for i in range(12)]
    trajectories = await asyncio.gather(*(rollout(model, scenario) for scenario in scenarios))
    for scenario, trajectory in zip(scenarios, trajectories, strict=True):
        assert trajectory.messages()[0]["content"] == scenario["question"]
        assert len(trajectory.messages_and_choices) == 2 * scenario["turns"]
        assert trajectory.metrics["turns"] == scenario["turns"]


async def test_500_sessions_at_once(model):
    """Threads of a synchronous client, one for each session; each asks for its own number."""

    def ask(session, number):
        with OpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=2, timeout=250) as client:
            question = [{"role": "user", "content": str(number)}]
            client.chat.completions.create(model="m", messages=question, max_tokens=1)
            return number

    async def rollout(number):
        async with model.session() as session:
            await asyncio.to_thread(ask, session, number)
        return session.trajectory

    trajectories = await asyncio.gather(*map(rollout, range(500)))
    assert [t.messages()[0]["content"] for t in trajectories] == [str(n) for n in range(500)]
    assert all(len(t.messages_and_choices) == 2 and not t.additional_histories for t in trajectories)
    assert not GATEWAY._sessions


async def test_a_killed_program_keeps_its_turns(model):
    agent = AGENT.replace("for turn", "import os, signal\nfor turn").replace(
        "print(json", "os.kill(os.getpid(), signal.SIGKILL)\nprint(json"
    )
    command = [sys.executable, "-c", agent]
    trajectory = await art.rollout_from(command, failure_reward=-1)(model, {"question": "Why?", "turns": 2})
    assert (trajectory.reward, trajectory.metrics["exit_code"]) == (-1, -9)
    assert len(trajectory.messages_and_choices) == 4
    with pytest.raises(art.RolloutError, match="ended with signal 9"):
        await art.rollout_from(command)(model, {"question": "Why?"})


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(not os.path.exists("/proc"), reason="reads /proc")
@pytest.mark.parametrize("stubborn", [False, True])
async def test_a_timeout_ends_the_program_and_its_children(model, tmp_path, stubborn, monkeypatch):
    monkeypatch.setattr(programs, "GRACE_S", 0.5)
    trap = "trap '' TERM; " if stubborn else ""
    script = f"{trap}(sleep 600 & echo $! >> {tmp_path}/pids; wait) & echo $$ >> {tmp_path}/pids; wait"
    pending = asyncio.ensure_future(art.rollout_from(["sh", "-c", script])(model, {}))
    await until(lambda: (tmp_path / "pids").exists() and len((tmp_path / "pids").read_text().split()) == 2)
    pending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pending
    await until(lambda: not any(map(is_running, map(int, (tmp_path / "pids").read_text().split()))))


async def test_a_program_that_sends_nothing(model):
    with pytest.raises(art.RolloutError, match="OPENAI_BASE_URL"):
        await art.rollout_from("echo 1")(model, {})
    with pytest.raises(art.RolloutError, match="does not start"):
        await art.rollout_from("no-such-program")(model, {})


async def test_a_function_with_a_synchronous_client(model):
    threads = set()

    def agent(session, scenario):
        threads.add(threading.get_ident())
        client = OpenAI(base_url=session.base_url, api_key=session.api_key)
        return client.chat.completions.create(model="m", messages=QUESTION, max_tokens=3).usage.completion_tokens

    async def half(trajectory, scenario, output):
        return {"reward": output / 2, "metrics": {"tokens": output}}

    trajectory = await art.rollout_from(agent, reward=half)(model, "scenario")
    assert trajectory.reward == trajectory.metrics["tokens"] / 2 == 1.5
    assert threading.get_ident() not in threads


PLAIN = """
import sys
from openai import OpenAI

OpenAI().chat.completions.create(model="m", messages=[{"role": "user", "content": sys.argv[1]}], max_tokens=2)
"""


async def test_a_program_that_takes_its_task_as_text(model):
    command = ["sh", "-c", f"{sys.executable} -c '{PLAIN}' \"$(cat)\""]

    def reward(trajectory, scenario, output):
        trajectory.reward = 0.25

    for stdin, sent in ((None, '"Say \\"yes\\"."'), (str, 'Say "yes".')):
        trajectory = await art.rollout_from(command, reward=reward, stdin=stdin)(model, 'Say "yes".')
        assert (trajectory.messages()[0]["content"], trajectory.reward) == (sent, 0.25)


async def test_a_reward_that_nobody_set(model):
    with pytest.raises(art.RolloutError, match="Not a reward: 'None'"):
        await art.rollout_from([sys.executable, "-c", PLAIN, "A1"], reward=lambda *_: None)(model, "A1")


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
async def test_a_shell_script_trains(model):
    """The reward of a script with curl: how many different characters its reply has."""
    script = """
read question
curl -sf $OPENAI_BASE_URL/chat/completions -H "Authorization: Bearer $OPENAI_API_KEY" -d @- << END
{"model": "m", "max_tokens": 6, "messages": [{"role": "user", "content": $question}]}
END
"""

    def different(trajectory, scenario, output):
        return len(set(json.loads(output.stdout)["choices"][0]["message"]["content"]))

    rollout = art.rollout_from(["sh", "-c", script], reward=different)
    run = art.train(
        model,
        rollout,
        ["One.", "Two."],
        steps=2,
        groups_per_step=2,
        rollouts_per_group=4,
        learning_rate=1e-3,
        show=False,
    )
    await run
    assert run.step == 2
    rows = model.store.history()
    assert rows[-1]["data/step_num_gradient_steps"] == 1
    assert rows[-1]["train/exception_rate"] == 0


async def test_the_seeds_of_a_step_reach_the_sessions(local, named):
    """Two runs with one seed sample the same tokens, although a program sends the requests."""
    sampled = []
    for name in ("first", "second"):
        model, rollout = named(name), art.rollout_from([sys.executable, "-c", AGENT])
        await model.register(local)
        scenarios = [{"question": f"Where is {place}?", "turns": 2} for place in "AB"]
        await art.train(model, rollout, scenarios, steps=1, groups_per_step=2, rollouts_per_group=2, seed=7, show=False)
        trajectories = [t for group in model.store.read_groups("train", 1) for t in group.trajectories]
        sampled.append([[choice.token_ids for choice in t.messages_and_choices[1::2]] for t in trajectories])
    assert sampled[0] == sampled[1]
    assert len({str(ids) for ids in sampled[0]}) == 4


async def test_a_model_without_an_endpoint(named):
    with pytest.raises(ValueError, match="has no endpoint yet"):
        named().session()


async def test_a_model_of_another_provider(model):
    """A prompted model: here, the endpoint of a trained one under its URL and key."""
    base_url, api_key = await model.backend()._prepare_backend_for_training(model)
    prompted = art.Model(
        name="judge",
        project="tests",
        inference_base_url=base_url,
        inference_api_key=api_key,
        inference_model_name="ttt",
    )
    async with prompted.session() as session, client_of(session) as client:
        await client.chat.completions.create(model="gpt", messages=QUESTION, max_tokens=2)
    assert session.trajectory.exchanges.chat_completions[0].request["model"] == "ttt"
