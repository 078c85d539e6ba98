"""`art.record` with real clients, and the clients in the form of OpenPipe's."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import tracemalloc
import zlib
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import aiohttp
import httpx
import pytest
import requests
from art_nb.openpipe import AsyncOpenPipe, OpenPipe
from openai import APIError, AsyncOpenAI, OpenAI
from support.provider_parts import expected, running_provider
from support.registered import until

import art_nb as art
from art_nb.core.files import append_lines
from art_nb.core.types import StoreError
from art_nb.integrations.record_writer import RecordWriter, secrets_of
from art_nb.integrations.recorder import Recorder
from art_nb.runs import recordings
from art_nb.runs.recordings import RawCall, count_matches, new_record, read_records, record_of, update_of

pytestmark = pytest.mark.timeout(300)
KEY = "sk-test-key-0123456789"
ROOT = Path(__file__).parents[2]
NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def provider():
    with running_provider() as provider:
        yield provider


def ask(client, text, **options):
    return client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": text}], **options)


def test_every_protocol_and_client(provider, tmp_path):
    path = tmp_path / "traffic.jsonl"
    with (
        art.record(path, session="visit", tags={"agent": "v2"}) as recorder,
        OpenAI(base_url=f"{provider.url}/v1", api_key=KEY) as client,
    ):
        assert isinstance(recorder, Recorder)
        ask(client, "one")
        list(ask(client, "two", stream=True))
        client.responses.create(model="gpt", input="three")
        list(client.responses.create(model="gpt", input="four", stream=True))
        body = {"model": "claude", "messages": [{"role": "user", "content": "five"}], "max_tokens": 9}
        requests.post(f"{provider.url}/v1/messages", json=body, headers={"x-api-key": KEY}, timeout=100)
        streamed = requests.post(f"{provider.url}/v1/messages", json=body | {"stream": True}, stream=True, timeout=100)
        assert b"message_stop" in b"".join(streamed.iter_content(20))
        client.models.with_raw_response.list()  # not a request to a model
    ask(OpenAI(base_url=f"{provider.url}/v1", api_key=KEY), "outside")
    records = read_records(path)
    assert [record["protocol"] for record in records] == ["chat_completions"] * 2 + ["responses"] * 2 + ["messages"] * 2
    assert all(record["complete"] and record["tags"] == {"agent": "v2"} for record in records)
    assert KEY.encode() not in path.read_bytes()
    (trajectory,) = art.read_recordings(path)
    histories = [trajectory.messages(), *(history.messages() for history in trajectory.additional_histories)]
    assert [messages[0]["content"] for messages in histories] == ["one", "two", "three", "four", "five", "five"]
    assert all(messages[-1]["content"].endswith("ünïcode") for messages in histories[2:])
    assert [len(ids) for ids in trajectory.metadata["records"]] == [1] * 6


def test_a_request_to_the_url_of_a_provider(provider, tmp_path):
    """Through an HTTP proxy, so the URL that the agent uses is the provider's."""
    content = json.dumps({"model": "gpt", "messages": [{"role": "user", "content": "Hi"}]}).encode()
    with art.record(tmp_path / "t.jsonl") as recorder, httpx.Client(proxy=provider.url) as client:
        reply = client.post("http://api.openai.com/v1/chat/completions", content=content)
    assert reply.content == b"".join(expected("/v1/chat/completions", content)[2])
    assert read_records(recorder.path)[0]["path"] == "/v1/chat/completions"


async def test_a_service_with_concurrent_sessions(provider, tmp_path):
    recorder = art.record(tmp_path / "t.jsonl").start()
    client = AsyncOpenAI(base_url=f"{provider.url}/v1", api_key=KEY)

    async def handle(name):
        messages = []
        for turn in range(3):
            async with recorder.session(name, tags={"turn": turn}):
                messages.append({"role": "user", "content": f"{name}, turn {turn}"})
                reply = await client.chat.completions.create(model="gpt", messages=messages)
                messages.append({"role": "assistant", "content": reply.choices[0].message.content})
        return messages

    def in_thread():
        ask(OpenAI(base_url=f"{provider.url}/v1", api_key=KEY), "in a thread")

    try:
        visits = await asyncio.gather(*(handle(f"visit-{n}") for n in range(8)))
        thread = threading.Thread(target=in_thread)
        thread.start()
        await asyncio.to_thread(thread.join)
        with art.no_capture():
            await asyncio.to_thread(in_thread)
        with art.Trajectory() as rollout:  # a rollout has its own record
            await client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": "rollout"}])
            assert art.current_trajectory() is rollout
        assert art.current_trajectory() is None
        async with recorder.session("judge"):
            assert art.current_trajectory() is None
    finally:
        recorder.close()
        await client.close()
    trajectories = art.read_recordings(recorder.path)
    named = {t.metadata["session"]: t for t in trajectories}
    assert len(trajectories) == 9 and named[""].messages()[0]["content"] == "in a thread"
    assert [named[f"visit-{n}"].messages() for n in range(8)] == visits
    assert named["visit-0"].metadata["tags"] == {"turn": 2} and named["visit-0"].metrics["requests"] == 3
    assert len(rollout.messages()) == 2


def question(text):
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_that_fail_are_recorded_with_every_client(provider, tmp_path, stream):
    """The error of the provider repeats the key of the client, which is in no environment variable."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
    headers, path = {"authorization": f"Bearer {KEY}"}, "/chat/completions"
    body = {"model": "error-429", "messages": question("Hi"), "stream": stream}
    async with art.record(tmp_path / "t.jsonl", session="visit") as recorder, aiohttp.ClientSession() as session:
        for url in (f"{provider.url}/v1", nowhere):
            with OpenAI(base_url=url, api_key=KEY, max_retries=1) as client, pytest.raises(APIError):
                client.chat.completions.create(**body)
            async with AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
                with pytest.raises(APIError):
                    await client.chat.completions.create(**body)
            with pytest.raises(requests.RequestException):
                with requests.post(url + path, json=body, headers=headers, stream=stream, timeout=100) as reply:
                    reply.raise_for_status()
            with pytest.raises(aiohttp.ClientError):
                async with session.post(url + path, json=body, headers=headers) as reply:
                    assert await reply.text() and reply.raise_for_status()
    records = read_records(recorder.path)
    assert [record["status"] for record in records] == [429] * 5 + [0] * 5
    assert [record["retry_count"] for record in records] == [0, 1, 0, 0, 0] * 2
    assert not any(record["complete"] or record["reply"] for record in records)
    unread = [record["error"] for record in records[:5] if "Slow down, [redacted]" not in record["error"]]
    assert unread == ["HTTP status 429"] * 2 * stream  # before a retry, and in requests
    assert all("onnect" in record["error"] for record in records[5:])
    assert KEY.encode() not in recorder.path.read_bytes()


class Echo(BaseHTTPRequestHandler):
    """Refuses each request, and repeats its headers in the error."""

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        body = json.dumps({"error": {"message": "\n".join(f"{k} is {v}" for k, v in self.headers.items())}}).encode()
        self.send_response(401)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *values):
        pass


@pytest.fixture
def echo_url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/chat/completions"
    server.shutdown()
    server.server_close()
    thread.join()


async def test_credentials_that_the_client_adds_are_not_recorded(echo_url, tmp_path):
    """Clients add `auth=` and their cookies to the headers after the call."""
    body, user, login = {"model": "gpt", "messages": question("Hi")}, ("bob", "hunter2hunter2"), aiohttp.BasicAuth
    cookies, unsafe = {"first": "cookiesecret1", "sid": "cookiesecret2", "x": "1"}, aiohttp.CookieJar(unsafe=True)
    async with art.record(tmp_path / "t.jsonl") as recorder:
        for options in ({"auth": user}, {"cookies": cookies}):
            requests.post(echo_url, json=body, timeout=100, **options)
            with httpx.Client(**options) as client:
                assert client.post(echo_url, json=body).status_code == 401
            async with httpx.AsyncClient(**options) as client:
                assert (await client.post(echo_url, json=body)).status_code == 401
        for options in ({"auth": login(*user)}, {"cookies": cookies, "cookie_jar": unsafe}):
            async with aiohttp.ClientSession(**options) as session, session.post(echo_url, json=body) as reply:
                assert "is Basic" in await reply.text() or "cookiesecret" in await reply.text()
        async with aiohttp.ClientSession() as session:
            async with session.post(echo_url, json=body, auth=login(*user)) as reply:
                assert "is Basic" in await reply.text()
    errors = [record["error"] for record in read_records(recorder.path)]
    assert len(errors) == 9 and all("[redacted]" in error for error in errors)
    text = recorder.path.read_text()
    assert "Ym9iOmh1bnRlcj" not in text and "cookiesecret" not in text


def test_each_cookie_is_a_secret():
    """A provider can repeat one of them."""
    assert {"aaaaaaaa", "bbb=bbbb"} <= {*secrets_of([("Cookie", "one=aaaaaaaa; two=bbb=bbbb")])}


async def test_failures_of_a_rollout_are_no_exchanges(provider, tmp_path):
    recorder = art.record(tmp_path / "t.jsonl").start()
    client = AsyncOpenAI(base_url=f"{provider.url}/v1", api_key=KEY, max_retries=0)
    with art.Trajectory() as rollout, pytest.raises(APIError):
        await client.chat.completions.create(model="error-500", messages=question("Hi"))
    await asyncio.to_thread(recorder.close)
    await client.close()
    assert not rollout.exchanges and not recorder.path.exists()


def test_a_block_leaves_no_thread_and_can_be_opened_again(provider, tmp_path):
    def threads():
        return [thread for thread in threading.enumerate() if thread.name == "art_nb-recording"]

    before = threads()
    recorder = art.record(tmp_path / "t.jsonl")
    with OpenAI(base_url=f"{provider.url}/v1", api_key=KEY) as client:
        for number in range(3):
            with recorder:
                ask(client, str(number))
            for thread in set(threads()) - set(before):
                thread.join(timeout=100)
            assert set(threads()) <= set(before)
        with pytest.raises(RuntimeError, match="out of order"):
            recorder.__exit__(None, None, None)
    recorder.close()
    assert len(read_records(recorder.path)) == 3


async def test_concurrent_tasks_open_the_same_recorder(provider, tmp_path):
    recorder, second_is_in, first_is_out = art.record(tmp_path / "t.jsonl"), asyncio.Event(), asyncio.Event()
    async with AsyncOpenAI(base_url=f"{provider.url}/v1", api_key=KEY) as client:

        async def first():
            async with recorder:
                await second_is_in.wait()
                await client.chat.completions.create(model="gpt", messages=question("a"))
            first_is_out.set()

        async def second():
            async with recorder:
                second_is_in.set()
                await first_is_out.wait()
                await client.chat.completions.create(model="gpt", messages=question("b"))

        await asyncio.wait_for(asyncio.gather(first(), second()), 60)
    named = {t.metadata["session"]: t.messages()[0]["content"] for t in art.read_recordings(recorder.path)}
    assert sorted(named.values()) == ["a", "b"]


async def test_a_task_that_outlives_its_session_belongs_to_the_scope_around_it(provider, tmp_path):
    recorder = art.record(tmp_path / "t.jsonl").start()
    is_left = asyncio.Event()
    async with AsyncOpenAI(base_url=f"{provider.url}/v1", api_key=KEY) as client:

        async def later(text):
            await is_left.wait()
            await client.chat.completions.create(model="gpt", messages=question(text))

        async with recorder.session("visit"):
            alone = asyncio.create_task(later("alone"))
        with art.Trajectory() as rollout:
            async with recorder.session("judge"):
                inside = asyncio.create_task(later("inside"))
            with art.no_capture():
                async with recorder.session("hidden"):
                    hidden = asyncio.create_task(later("hidden"))
        is_left.set()
        await asyncio.gather(alone, inside, hidden)
    recorder.close()
    (trajectory,) = art.read_recordings(recorder.path)
    assert trajectory.metadata["session"] == "" and trajectory.messages()[0]["content"] == "alone"
    assert rollout.messages()[0]["content"] == "inside"


def test_recorders_of_the_process_do_not_stop_each_other(provider, tmp_path):
    first, second = art.record(tmp_path / "a.jsonl").start(), art.record(tmp_path / "b.jsonl")
    try:
        with pytest.raises(RuntimeError, match="Another recorder"):
            second.start()
        second.close()
        with OpenAI(base_url=f"{provider.url}/v1", api_key=KEY) as client:
            ask(client, "Hi")
    finally:
        first.start().close()
    assert len(read_records(first.path)) == 1 and not second.path.exists()
    art.record(tmp_path / "c.jsonl").start().close()


def test_the_viewer_and_the_curation_open_recordings(provider, tmp_path):
    with (
        art.record(tmp_path / "t.jsonl", max_bytes=2000) as recorder,
        OpenAI(base_url=f"{provider.url}/v1", api_key=KEY) as client,
    ):
        for n in range(6):
            with recorder.session(f"visit-{n % 2}"):
                ask(client, f"Question {n}")
    assert len([*tmp_path.glob("t*.jsonl")]) > 1  # rotated
    for path in (recorder.path, tmp_path):
        conversations = art.read_conversations(path)
        assert sorted(t.metadata["session"] for t in conversations) == ["visit-0", "visit-1"]
        assert all(len(t.additional_histories) == 2 for t in conversations)
    curation = art.curate(recorder.path, author="ann")
    curation.mark(0, "good")
    kept = art.curate(recorder.path).good().to_sft()
    assert [t.messages()[0]["content"] for t in kept] == ["Question 0", "Question 2", "Question 4"]
    index = art.view(recorder.path).rollout_index
    assert index.load(10) and len(index) == 2


def test_a_retry_that_missed_its_reply_counts_once(provider, tmp_path):
    with (
        art.record(tmp_path / "t.jsonl", session="s") as recorder,
        OpenAI(base_url=f"{provider.url}/v1", api_key=KEY) as client,
    ):
        ask(client, "Hi")
    (record,) = read_records(recorder.path)
    lines = [record, {**record, "id": "again", "retry_count": 1}]
    recorder.path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (trajectory,) = art.read_recordings(recorder.path)
    assert trajectory.metadata["records"] == [["again"]] and not trajectory.additional_histories


def record_about(messages, reply="Hi", **options):
    choice = {"index": 0, "message": {"role": "assistant", "content": reply}, "finish_reason": "stop"}
    answer = None if reply is None else {"id": "c1", "created": 0, "model": "m", "choices": [choice]}
    return new_record("/v1/chat/completions", {"model": "m", "messages": messages}, answer, NOW, NOW, **options)


@pytest.mark.parametrize("failure", [{"status": 429, "error": "slow down"}, {"reply": None}])
def test_a_retry_that_failed_does_not_replace_the_reply(tmp_path, failure):
    path = tmp_path / "t.jsonl"
    question = [{"role": "user", "content": "Hi"}]
    failed = record_about(question, retry_count=1, **failure) | {"complete": False}
    append_lines(path, record_about(question), failed)
    (trajectory,) = art.read_recordings(path)
    assert [message["content"] for message in trajectory.messages()] == ["Hi", "Hi"]
    append_lines(path, record_about(question, "Late", retry_count=2))
    (trajectory,) = art.read_recordings(path)
    assert trajectory.messages()[-1]["content"] == "Late" and not trajectory.additional_histories


@pytest.mark.parametrize("secret", ['pass"word-1', "C:\\keys\\one", "-----BEGIN KEY-----\nabcdef\n-----END KEY-----\n"])
def test_a_secret_with_escaped_characters_is_not_written(tmp_path, monkeypatch, secret):
    monkeypatch.setenv("SHOP_PASSWORD", secret)
    secret = secret.strip()  # a line break at its end is often lost
    writer = RecordWriter(tmp_path / "t.jsonl")
    call = {"name": "connect", "arguments": json.dumps({"with": secret})}
    message = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": call}]}
    messages = [{"role": "user", "content": f"It is {secret}!"}, message]
    writer.submit(lambda: record_about(messages, secret), 100)
    writer.close()
    (record,) = read_records(writer.path)
    first, second = record["request"]["messages"]
    assert (
        first["content"] == "It is [redacted]!" and record["reply"]["choices"][0]["message"]["content"] == "[redacted]"
    )
    assert second["tool_calls"][0]["function"]["arguments"] == '{"with": "[redacted]"}'


def test_short_keys_and_the_names_of_fields_stay(tmp_path):
    writer = RecordWriter(tmp_path / "t.jsonl")
    written = record_about([{"role": "user", "content": "This EMPTY test of ollama has 4 messages."}])
    writer.submit(lambda: written, 100, ["EMPTY", "test", "ollama", "messages"])
    writer.close()
    (record,) = read_records(writer.path)
    assert record["request"]["messages"][0]["content"] == "This EMPTY test of ollama has 4 [redacted]."
    assert record == written | {"request": record["request"]}


@pytest.mark.parametrize("name", ["traffic", "traffic.json", "traffic.0001"])
def test_a_path_that_could_not_be_rotated_is_an_error(tmp_path, name):
    with pytest.raises(ValueError, match="Invalid path"):
        art.record(tmp_path / name)


def test_redact_gets_records_and_no_updates(tmp_path):
    def redact(record):
        assert record["request"]["model"] == "m"
        return record | {"tags": {"redacted": True}}

    writer = RecordWriter(tmp_path / "t.jsonl", redact=redact)
    writer.submit(lambda: record_about([], session="s"), 100)
    update = update_of([{"field": "session", "equals": "s"}], {"note": "my key is sk-12345678"})
    writer.submit(lambda: update, 100, ["sk-12345678"])
    writer.close()
    (record,) = read_records(writer.path)
    assert record["tags"] == {"redacted": True, "note": "my key is [redacted]"} and not writer.counts["dropped"]


@pytest.mark.parametrize("field", ["request", "reply"])
def test_a_compressed_body_has_a_limit(monkeypatch, field):
    monkeypatch.setattr(recordings, "MAX_DECODED_BYTES", 2 << 20)
    request = json.dumps({"model": "m", "messages": question("Hi")}).encode()
    bodies = {"request": request, "reply": b"".join(expected("/v1/chat/completions", request)[2])}
    for size, is_kept in ((1 << 20, True), (200 << 20, False)):
        zipped = zlib.compressobj(wbits=31)
        packed = zipped.compress(bodies[field])
        packed += b"".join(zipped.compress(b" " * (1 << 20)) for _ in range(size >> 20)) + zipped.flush()
        tracemalloc.start()
        call = RawCall("/v1/chat/completions", **(bodies | {field: packed}), start_time=NOW, end_time=NOW)
        setattr(call, f"{field}_encoding", "gzip")
        record = record_of(call)
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
        tracemalloc.stop()
        assert (record[field] is not None) == is_kept
        assert is_kept or field == "request" or "too large" in record["error"]


def test_thousands_of_updates_are_read_in_one_pass(tmp_path):
    path = tmp_path / "t.jsonl"
    records = [record_about(question(str(n))) | {"id": f"r{n}"} for n in range(2000)]
    for n, record in enumerate(records):
        record["reply"]["id"] = f"c{n % 1000}"
    names = ("id", "r{}"), ("completionId", "c{}")
    updates = [
        update_of([{"field": name, "equals": form.format(n)}], {name: n}) for n in range(1000) for name, form in names
    ]
    append_lines(path, *records, *updates)
    append_lines(path, update_of([{"field": "model", "equals": "m"}], {"all": True}))
    compared = []
    original = recordings.matches
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recordings, "matches", lambda *args: compared.append(1) or original(*args))
        found = read_records(path)
    assert len(compared) == 1000 + 2000 + 2000
    assert found[7]["tags"] == {"id": 7, "completionId": 7, "all": True}
    assert found[1007]["tags"] == {"completionId": 7, "all": True}
    for field, value, count in (("id", "r7", 1), ("completionId", "c7", 2), ("model", "m", 2000), ("model", "ü", 0)):
        assert count_matches(path, [{"field": field, "equals": value}]) == count
    assert count_matches(tmp_path / "absent.jsonl", []) == 0


def test_damaged_and_newer_lines_are_skipped(tmp_path):
    path = tmp_path / "t.jsonl"
    good = art.runs.recordings.new_record
    now = art.Trajectory().start_time
    line = json.dumps(good("/v1/chat/completions", {"messages": []}, None, now, now))
    path.write_text(
        "\n".join([line, '{"v": 2}', '{"v": 1, "id": 3}', "[]", line.replace('"request": {', '"request": 7, "x": {')])
    )
    with pytest.warns(UserWarning, match="skipped"):
        assert len(read_records(path)) == 1
    assert art.read_recordings(path) == []
    with pytest.raises(StoreError, match="has no recordings"):
        art.read_recordings(tmp_path / "absent.jsonl")
    with pytest.raises(ValueError, match="conversation"):
        art.read_recordings(path, by="user")


def test_recorded_replies_are_never_rows(provider, tmp_path):
    from art_nb.tokens.rows import trajectory_rows

    with art.record(tmp_path / "t.jsonl") as recorder, OpenAI(base_url=f"{provider.url}/v1", api_key=KEY) as client:
        ask(client, "Hi")
    (trajectory,) = art.read_recordings(recorder.path)
    assert all(isinstance(entry, dict) for entry in trajectory.messages_and_choices)
    assert trajectory_rows(trajectory) == []


def test_the_file_is_complete_when_the_program_ends(provider, tmp_path):
    program = f"""
import art_nb as art
from openai import OpenAI
recorder = art.record({str(tmp_path / "t.jsonl")!r}).start()
client = OpenAI(base_url={provider.url!r} + "/v1", api_key={KEY!r})
client.chat.completions.create(model="gpt", messages=[{{"role": "user", "content": "my key is {KEY}"}}])
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENAI_API_KEY": KEY}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=100)
    (record,) = read_records(tmp_path / "t.jsonl")
    assert record["complete"] and KEY not in json.dumps(record)


def report(**options):
    content = json.dumps({"model": "gpt", "messages": [{"role": "user", "content": "Hi"}]}).encode()
    completion = json.loads(b"".join(expected("/v1/chat/completions", content)[2]))
    times = {"requested_at": 1767225600000.0, "received_at": 1767225601500.0}
    return {**times, "req_payload": json.loads(content), "resp_payload": completion, "status_code": 200, **options}


async def test_openpipe_writes_a_file_without_a_server(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("OPENPIPE_BASE_URL", raising=False)
    monkeypatch.setenv("OPENPIPE_API_KEY", "opk-from-the-environment")
    client = AsyncOpenPipe(path=tmp_path / "openpipe.jsonl")
    assert client.api_key == "opk-from-the-environment" and client.base_url is None
    assert (await client.report(**report(tags={"session_id": "game"}))).status == "ok"
    assert (await client.report(**report(error_message="late", status_code=500, resp_payload=None))).status == "ok"
    updated = await client.update_log_metadata(
        filters=[{"field": "tags.session_id", "equals": "game"}], metadata={"reward": 1.0}
    )
    client.flush()
    assert updated.matched_logs == 1 and capsys.readouterr().out.count("recorded in") == 1
    first, second = read_records(tmp_path / "openpipe.jsonl")
    assert first["complete"] and first["session"] == "game" and first["tags"]["reward"] == 1.0
    assert (second["status"], second["error"], second["complete"]) == (500, "late", False)
    assert (await client.report(req_payload="no object")).status == "error"


def test_openpipe_reports_to_the_proxy(provider, tmp_path):
    from art_nb.integrations.recording_proxy import ProxyServer, RecordingProxy

    writer = RecordWriter(tmp_path / "traffic.jsonl")
    with ProxyServer(RecordingProxy(f"{provider.url}/v1", writer)) as server:
        client = OpenPipe(api_key="opk-secret-1234", base_url=f"{server.url}/api/v1")
        assert client.report(**report(tags={"note": "opk-secret-1234"})).status == "ok"
        asyncio.run(until(lambda: writer.counts["written"] == 1))
        done = client.update_log_metadata(filters=[{"field": "model", "equals": "served-gpt"}], metadata={"good": True})
        assert done.matched_logs == 1
    with pytest.warns(UserWarning, match="failed"):
        assert client.report(**report()).status == "error"  # the proxy has ended
    (record,) = read_records(writer.path)
    assert record["tags"] == {"note": "[redacted]", "good": True} and record["source"] == "openpipe"
