"""Twelve planted secrets appear nowhere in files, output, pages or errors."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from pydantic import BaseModel

import art_nb as art
from art_nb.backends.remote_client import Backend
from art_nb.core.types import ArtError
from art_nb.reports.report import report
from art_nb.reports.static_html import static_run

SECRETS = {
    name: f"PLANTED{i:02}x9{name[:3]}"
    for i, name in enumerate(
        (
            "nested",
            "config",
            "user",
            "password",
            "query",
            "header",
            "parameter",
            "judge",
            "endpoint",
            "remote",
            "wandb",
            "environment",
        )
    )
}


class Config(BaseModel):
    """What a user keeps in a model's config."""

    openai_api_key: str = SECRETS["config"]
    max_tokens: int = 100
    services: dict = {"search": [{"headers": {"X-Team": SECRETS["nested"]}, "url": "https://search.example"}]}


@pytest.fixture
def judge_server():
    """A judge that answers as the model "good"; as any other, it quotes the request's headers in an error."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            length = int(self.headers["content-length"])
            asked = json.loads(self.rfile.read(length))
            good = asked["model"] == "good"
            scores = [{"trajectory_id": str(i), "explanation": "so", "score": i / 4} for i in (1, 2)]
            content = json.dumps({"scores": scores})
            reply = {
                "id": "1",
                "object": "chat.completion",
                "created": 1,
                "model": "m",
                "choices": [
                    {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": content}}
                ],
            }
            body = reply if good else {"error": {"message": f"refused {self.path} {dict(self.headers)}"}}
            self.send_response(200 if good else 400)
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


async def train(named, folder, said):
    """A run whose config and whose failing rollouts hold secrets."""
    model = named(config=Config(), inference_api_key=SECRETS["endpoint"])

    async def rollout(model, scenario):
        client = model.openai_client()
        answer = await client.chat.completions.create(
            model=model.get_inference_name(), messages=[{"role": "user", "content": "go"}], max_tokens=2
        )
        if scenario["fails"]:
            raise RuntimeError(
                f"{{'Authorization': 'Bearer {SECRETS['header']}'}} was refused by "
                f"https://{SECRETS['user']}:{SECRETS['password']}@host/?api-key={SECRETS['query']}"
            )
        return art.Trajectory(
            messages_and_choices=[{"role": "user", "content": "go"}, answer.choices[0]],
            reward=len(answer.choices[0].message.content),
        )

    async with art.LocalBackend(path=folder, verbose=False) as backend:
        await model.register(backend)
        endpoint = model.inference_api_key
        run = art.train(
            model, rollout, [{"fails": 0}, {"fails": 1}], steps=1, groups_per_step=2, rollouts_per_group=2, show=False
        )
        await run
        said += [repr(model), repr(run), str(run.groups), static_run(run)]
    return model, endpoint


def group_of_two():
    talks = [
        art.Trajectory(
            messages_and_choices=[{"role": "user", "content": "go"}, {"role": "assistant", "content": str(i)}], reward=i
        )
        for i in (0, 1)
    ]
    return art.TrajectoryGroup(talks, metadata={"group_id": "g"})


async def judge(folder, address, said):
    """A judge at an address with a user, a password and a key, with secret headers and parameters."""
    params = {
        "extra_headers": {"X-Team": SECRETS["header"]},
        "extra_query": {"sig": SECRETS["query"]},
        "extra_body": {"service_token": SECRETS["parameter"]},
        "max_retries": 0,
    }
    group = group_of_two()
    for name, key in (("good", SECRETS["judge"]), ("bad", SECRETS["judge"]), ("bad", None)):
        place = f"{name}@http://{SECRETS['user']}:{SECRETS['password']}@{address}/v1?api-key={SECRETS['query']}"
        asked = params | ({"api_key": key} if key else {})
        panel = None
        try:
            panel = await art.judge(
                group,
                judge=place,
                params=asked,
                journal=folder / "judgements.jsonl",
                cache=folder / "tape.jsonl",
                show=False,
            )
            said += [repr(panel), panel.html()]
            await art.ruler_score_group(group, place, asked, cache=folder / "tape.jsonl", debug=True)
        except art.JudgeError as error:
            said.append(str(error))
        finally:
            if panel is not None:
                panel.close()


async def connect(named, folder, said):
    """A training server that does not answer, and an endpoint that is gone."""
    address = f"http://{SECRETS['user']}:{SECRETS['password']}@127.0.0.1:9/?api-key={SECRETS['query']}"
    with pytest.raises(ArtError) as raised:
        await named("far").register(Backend(base_url=address, api_key=SECRETS["remote"], path=folder, patience_s=0.1))
    said.append(str(raised.value))
    gone = art.Model(name="gone", project="tests", inference_base_url=address, inference_api_key=SECRETS["endpoint"])
    said.append(repr(gone))
    with pytest.raises(art.JudgeError) as raised:
        await art.ruler_score_group(group_of_two(), gone, {"max_retries": 0}, cache=None)
    said.append(str(raised.value))


async def test_twelve_secrets_appear_nowhere(named, tmp_path, judge_server, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ART_NB_JUDGE_KEY", SECRETS["environment"])
    said = []
    model, endpoint = await train(named, tmp_path / ".art", said)
    await judge(tmp_path, judge_server, said)
    await connect(named, tmp_path / "near", said)
    model.update_wandb_config({"service": {"api_key": SECRETS["wandb"]}})
    with pytest.raises(ValueError, match="is recorded as") as raised:
        model.update_wandb_config({"service": {"api_key": "another"}})
    said.append(str(raised.value))
    report(model, tmp_path / "report.html")
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {"model.json", "events.jsonl", "tape.jsonl", "report.html"} <= {path.name for path in files}
    printed = capfd.readouterr()
    for name, secret in {**SECRETS, "endpoint of the backend": endpoint}.items():
        assert not [path.name for path, content in files.items() if secret.encode() in content], name
        assert not [text for text in [*said, printed.out, printed.err] if secret in text], name
    for step in model.store.steps("train"):  # Parquet is compressed
        groups = model.store.read_groups("train", step)
        assert not [name for name, secret in SECRETS.items() if secret in str([group.model_dump() for group in groups])]
