"""The callback of LiteLLM with the real LiteLLM: sync, async, streams, failures, and the name in a proxy's config."""

import asyncio
import os

import pytest
from support.agent_parts import NO_TELEMETRY
from support.provider_parts import running_provider
from support.registered import until

import art_nb as art
from art_nb.integrations import litellm_logger
from art_nb.runs.recordings import read_records

os.environ |= NO_TELEMETRY
litellm = pytest.importorskip("litellm", reason="make test-agents installs the frameworks")

pytestmark = pytest.mark.timeout(300)
KEY = "sk-test-key-0123456789"


@pytest.fixture
def provider():
    with running_provider() as provider:
        yield provider


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    recorder = litellm_logger.LiteLLMRecorder(tmp_path / "litellm.jsonl")
    monkeypatch.setattr(litellm, "callbacks", [recorder])
    return recorder


def options(provider, text="Hi", model="gpt", **fields):
    target = {"model": f"openai/{model}", "api_base": f"{provider.url}/v1", "api_key": KEY, "max_retries": 0}
    return {**target, "messages": [{"role": "user", "content": text}], **fields}


async def test_every_kind_of_call_is_recorded_once(provider, recorder):
    metadata = {"session_id": "visit-1", "customer": "ann"}
    reply = await litellm.acompletion(**options(provider, "one", metadata=metadata))
    stream = await litellm.acompletion(**options(provider, "two", metadata=metadata, stream=True))
    streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    sync = await asyncio.to_thread(litellm.completion, **options(provider, "three", metadata=metadata))
    chunks = await asyncio.to_thread(
        lambda: [*litellm.completion(**options(provider, "four", metadata=metadata, stream=True))]
    )
    with pytest.raises(litellm.InternalServerError):
        await litellm.acompletion(**options(provider, "five", "error-500", metadata=metadata))
    with pytest.raises(litellm.RateLimitError):
        await asyncio.to_thread(litellm.completion, **options(provider, "six", "error-429", metadata=metadata))
    await until(lambda: recorder.writer.counts["written"] >= 6, 30)
    await asyncio.sleep(1)  # a second event of the same call would come now
    recorder.writer.flush()
    records = {record["request"]["messages"][0]["content"]: record for record in read_records(recorder.writer.path)}
    assert recorder.writer.counts["written"] == len(records) == 6 and recorder.writer.counts["dropped"] == 0
    assert sorted(records) == ["five", "four", "one", "six", "three", "two"]
    texts = {
        text: records[text]["reply"]["choices"][0]["message"]["content"] for text in ("one", "two", "three", "four")
    }
    assert texts["one"] == reply.choices[0].message.content and texts["two"] == streamed
    assert texts["three"] == sync.choices[0].message.content
    assert texts["four"] == "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert all(records[text]["complete"] for text in texts) and records["one"]["usage"]["completion_tokens"] == 5
    assert all(record["session"] == "visit-1" and record["tags"]["customer"] == "ann" for record in records.values())
    assert (records["five"]["status"], records["six"]["status"]) == (500, 429) and not records["six"]["complete"]
    assert KEY.encode() not in recorder.writer.path.read_bytes()
    (trajectory,) = art.read_recordings(recorder.writer.path)
    assert len(trajectory.additional_histories) == 3 and trajectory.metrics["failed_requests"] == 2


async def test_a_second_recorder_with_another_file_records_too(provider, tmp_path, monkeypatch):
    recorders = [litellm_logger.LiteLLMRecorder(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    monkeypatch.setattr(litellm, "callbacks", recorders)
    await litellm.acompletion(**options(provider))
    await until(lambda: all(recorder.writer.counts["written"] for recorder in recorders), 30)


async def test_an_error_of_the_recorder_does_not_end_a_call(provider, recorder, monkeypatch):
    def fail(*args):
        raise RuntimeError("injected")

    monkeypatch.setattr(litellm_logger, "call_record", fail)

    async def complete():
        reply = await litellm.acompletion(**options(provider))
        await until(lambda: recorder.writer.counts["dropped"], 30)
        return reply

    with pytest.warns(UserWarning, match="injected"):
        reply = await complete()
    assert reply.choices and recorder.writer.counts["written"] == 0


def test_the_proxy_of_litellm_finds_the_recorder_by_its_name(tmp_path, monkeypatch):
    from litellm.proxy.types_utils.utils import get_instance_fn

    monkeypatch.setenv("ART_NB_RECORD", str(tmp_path / "proxy.jsonl"))
    litellm_logger.default_recorder.cache_clear()
    (tmp_path / "art_recorder.py").write_text("from art_nb.integrations.litellm_logger import recorder\n")
    found = get_instance_fn("art_recorder.recorder", str(tmp_path / "config.yaml"))
    assert isinstance(found, litellm.integrations.custom_logger.CustomLogger)
    assert found.writer.path == tmp_path / "proxy.jsonl"
    assert found is get_instance_fn("art_nb.integrations.litellm_logger.recorder")
    litellm_logger.default_recorder.cache_clear()
