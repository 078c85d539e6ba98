"""A script that knows nothing of art_nb plays a game against the endpoint."""

import subprocess

import pytest
from support.warm import warm_python

import art_nb as art

SCRIPT = """
import asyncio, os, random, re
from openai import AsyncOpenAI

async def ask(client, model, messages, stream, logprobs):
    answer = await client.chat.completions.create(model=model, messages=messages, max_tokens=12, seed=1, stream=stream,
                                                  logprobs=logprobs or None, top_logprobs=2 if logprobs else None)
    if not stream:
        choice = answer.choices[0]
        assert bool(choice.logprobs) == logprobs and answer.usage.completion_tokens > 0
        return choice.message.content
    chunks = [chunk async for chunk in answer]
    pieces = [c.choices[0] for c in chunks if c.choices]
    assert pieces[-1].finish_reason in ("stop", "length")
    assert any(p.logprobs and p.logprobs.content for p in pieces) == logprobs
    return "".join(p.delta.content or "" for p in pieces)

async def play(client, model, stream, logprobs):
    free, said = [r + c for r in "ABC" for c in "123"], []
    messages = [{"role": "system", "content": "You play tic-tac-toe. Answer with a free square."}]
    while free:
        messages.append({"role": "user", "content": "free: " + " ".join(free)})
        text = await ask(client, model, messages, stream, logprobs)
        said.append(text)
        messages.append({"role": "assistant", "content": text})
        named = re.search("[ABC][123]", text)
        free.remove(named[0] if named and named[0] in free else free[0])
        if free:
            free.remove(random.Random(len(free)).choice(free))
    return said

async def main():
    client = AsyncOpenAI(base_url=os.environ["URL"], api_key=os.environ["KEY"])
    model = (await client.models.list()).data[0].id
    games = [await play(client, model, s, l) for s in (False, True) for l in (False, True)]
    assert all(game == games[0] for game in games[1:]), games
    print(len(games[0]), "turns")

asyncio.run(main())
"""


async def test_a_plain_openai_script_plays_a_game(tmp_path, tiny_model_dir, monkeypatch):
    import asyncio

    model = art.TrainableModel(name="script", project="tests", base_model=str(tiny_model_dir))
    async with art.LocalBackend(path=tmp_path, verbose=False) as backend:
        await model.register(backend)
        monkeypatch.setenv("URL", model.inference_base_url)
        monkeypatch.setenv("KEY", model.inference_api_key)
        command = [warm_python(), "-c", SCRIPT]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "5 turns\n"


@pytest.mark.parametrize("text", ["A1", "What is your name?"])
async def test_in_process_and_socket_give_the_same_tokens(tmp_path, tiny_model_dir, text):
    from openai import AsyncOpenAI

    model = art.TrainableModel(name="both", project="tests", base_model=str(tiny_model_dir))
    async with art.LocalBackend(path=tmp_path, verbose=False) as backend:
        await model.register(backend)
        socket = AsyncOpenAI(base_url=model.inference_base_url, api_key=model.inference_api_key)
        ask = {
            "model": model.get_inference_name(),
            "messages": [{"role": "user", "content": text}],
            "seed": 7,
            "max_tokens": 20,
        }
        answers = [await client.chat.completions.create(**ask) for client in (model.openai_client(), socket)]
    ids = [answer.choices[0].model_extra["token_ids"] for answer in answers]
    assert ids[0] == ids[1]
    assert len(ids[0]) > 0
