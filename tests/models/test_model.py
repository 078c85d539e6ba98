"""Clients, copies, both generations of ART's loop, and a training that dies half way."""

import asyncio
import json
import shutil
import warnings

import pytest
from pydantic import BaseModel, ValidationError

from art_nb.core.types import StoreError, TrainConfig, TrainResult
from art_nb.models import clients
from art_nb.models.model import Model, TrainableModel
from art_nb.rollouts.trajectories import Trajectory, TrajectoryGroup

GROUP = TrajectoryGroup([Trajectory(reward=1, metrics={"won": True}), Trajectory(reward=0, metrics={"won": False})])


class Scripted:
    """A backend without weights: every train call saves an empty adapter, every request is answered "A1"."""

    def __init__(self, path):
        self.path, self.options, self.requests, self.told, self.fail = path, [], [], [], None

    async def register(self, model):
        if model.trainable:
            self.save(model, max(model.store.steps_saved(), default=0))

    def save(self, model, step):
        folder = model.store.checkpoint_dir(step)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")

    async def train(self, model, groups, **options):
        if self.fail:
            raise self.fail
        self.options.append(options)
        step = await self._get_step(model) + 1
        self.save(model, step)
        return TrainResult(step=step, metrics={"loss/train": 0.5, "odd": 1})

    async def _train_sft(self, model, trajectories, config, dev_config, verbose):
        return TrainResult(step=await self._get_step(model), metrics={"loss": float(len(list(trajectories)))})

    async def _get_step(self, model):
        return model.store.steps_saved()[-1]

    async def _delete_checkpoint_files(self, model, steps_to_keep):
        for step in set(model.store.steps_saved()) - set(steps_to_keep):
            shutil.rmtree(model.store.checkpoint_dir(step))

    async def _prepare_backend_for_training(self, model, config):
        return "http://here/v1", "key"

    def _model_inference_name(self, model, step=None):
        return model.name if step is None else f"{model.name}@{step}"

    def transport(self, model):
        return clients.httpx.ASGITransport(app=self.answer)

    def _log(self, model, groups, split, step, row):
        self.told.append((split, step, groups if groups is None else len(groups), row))

    async def answer(self, scope, receive, send):
        self.requests.append(json.loads((await receive())["body"]))
        message = {"role": "assistant", "content": "A1"}
        choice = {"index": 0, "finish_reason": "stop", "message": message, "prompt_token_ids": [1], "token_ids": [2]}
        body = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})


@pytest.fixture
def backend(tmp_path):
    return Scripted(tmp_path)


@pytest.fixture
async def model(backend):
    model = TrainableModel(name="ttt", project="p", base_model="smollm2-135m")
    await model.register(backend)
    return model


async def test_the_client_reaches_the_backend_in_this_process(model, backend):
    client = model.openai_client()
    messages = [{"role": "user", "content": "move"}]
    name = model.get_inference_name(step=3)
    completion = await client.chat.completions.create(model=name, messages=messages)
    assert completion.choices[0].model_extra["token_ids"] == [2]
    assert backend.requests[0]["model"] == "ttt@3"
    assert model.openai_client() is client
    assert model.get_inference_name() == model.inference_model_name == "ttt"
    assert model.litellm_completion_params(3)["model"] == "hosted_vllm/ttt@3"


def test_the_parameters_for_litellm_are_complete(model):
    there = {"base_url": "http://there/v1", "api_key": "k", "temperature": 1}
    judge = Model(
        name="judge",
        project="p",
        inference_model_name="gpt-4.1-mini",
        inference_base_url="http://there/v1",
        inference_api_key="k",
    )
    assert judge.get_inference_name() == "gpt-4.1-mini"
    assert judge.litellm_completion_params() == there | {"model": "gpt-4.1-mini"}
    assert model.litellm_completion_params() == {
        "model": "hosted_vllm/ttt",
        "base_url": "http://here/v1",
        "api_key": "key",
        "temperature": 1,
        "extra_body": {"return_token_ids": True},
    }


async def test_every_event_loop_has_its_own_client(model):
    async def use():
        completion = await model.openai_client().chat.completions.create(model="ttt", messages=[])
        return model.openai_client(), completion.choices[0].message.content

    here, _ = await use()
    there, said = await asyncio.to_thread(lambda: asyncio.run(use()))
    assert there is not here
    assert said == "A1"


async def test_registering_again_makes_a_new_client(model, backend):
    old = model.openai_client()
    await model.register(backend)
    assert model.openai_client() is not old


def test_no_client_before_there_is_an_endpoint(tmp_path):
    with pytest.raises(ValueError, match="register"):
        TrainableModel(name="a", project="p", base_model="b").openai_client()
    with pytest.raises(ValueError, match="inference_base_url"):
        Model(name="a", project="p").openai_client()
    with pytest.raises(ValueError, match="register"):
        Model(name="a", project="p").backend()


def test_run_name_follows_the_name_unless_it_is_given():
    model = TrainableModel(name="a", project="p", base_model="b")
    assert model.run_name == "a"
    model.name = "c"
    assert model.run_name == "c"
    assert model.model_copy(update={"name": "d"}).run_name == "d"
    model.run_name = "lineage"
    model.name = "e"
    assert model.run_name == model.model_copy(update={"name": "f"}, deep=True).run_name == "lineage"
    assert TrainableModel(name="a", run_name="r", project="p", base_model="b").run_name == "r"


async def test_a_deep_copy_shares_only_the_backend(model, backend):
    model._internal_config = {"init_args": {"max_seq_length": 8192}}
    client = model.openai_client()
    copy = model.model_copy(deep=True)
    copy._internal_config["init_args"]["max_seq_length"] = 1
    copy.name = "other"
    assert copy.backend() is backend
    assert copy.openai_client() is not client
    assert model._internal_config["init_args"]["max_seq_length"] == 8192
    assert copy.store.path != model.store.path


def test_typed_config_and_unknown_fields(tmp_path):
    class Setup(BaseModel):
        turns: int = 3

    fields = {"name": "a", "project": "p", "base_model": "b"}
    typed = TrainableModel[Setup](**fields, config=Setup(turns=4), _internal_config={"x": 1})
    assert typed.config.turns == 4
    assert typed.model_dump()["config"] == {"turns": 4}
    assert typed.model_dump()["_internal_config"] == {"x": 1}
    assert typed.safe_model_dump()["config"] is None
    assert TrainableModel(**fields, config=Setup()).model_dump()["config"] == {"turns": 3}
    assert TrainableModel[Setup](**fields, config={"turns": 5}).config == Setup(turns=5)
    with pytest.raises(ValueError, match="a dict needs a type"):
        TrainableModel(**fields, config={"turns": 5})
    with pytest.raises(ValidationError, match="base_mdl"):
        TrainableModel(name="a", project="p", base_mdl="b")


async def test_a_name_cannot_leave_the_root(tmp_path):
    for name in ("../../escape", "..", "org/model:v1", ""):
        model = Model(name=name, project="../p", base_path=str(tmp_path / "root"))
        await model.log(metrics={"x": 1})
        assert (tmp_path / "root") in model.store.path.resolve().parents
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


async def test_a_row_that_was_not_written_hides_no_other_row_of_its_step(tmp_path):
    model = Model(name="a", project="p", base_path=str(tmp_path))
    history = model.store.path / "history.jsonl"
    history.mkdir(parents=True)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"history\.jsonl"):
            await model.log(metrics={"x": 1}, step=3)
    history.rmdir()
    await model.log(metrics={"y": 2}, step=3)
    await model.log(metrics={"x": 1}, step=3)
    await model.log(metrics={"x": 5}, step=3)
    rows = model.store.history()
    assert [(row.get("val/x"), row.get("val/y")) for row in rows] == [(None, 2), (1, None), (5, None)]


async def test_model_json_holds_no_key_and_opens_again(backend):
    model = Model(name="a", project="p", inference_api_key="secret", inference_base_url="http://x")
    await model.register(backend)
    text = (model.store.path / "model.json").read_text()
    assert "secret" not in text
    assert json.loads(text)["name"] == "a"
    assert "secret" not in str(model.safe_model_dump())
    trained = TrainableModel(name="b", project="p", base_model="base")
    await trained.register(backend)
    assert TrainableModel.model_validate(trained.store.read_model()).run_name == "b"


@pytest.mark.parametrize(("kind", "more"), [(Model, {}), (TrainableModel, {"base_model": "b"})])
async def test_what_names_a_run_elsewhere_is_kept(backend, kind, more):
    told = {"name": "a", "project": "p", "entity": "team", "id": "m-1", "run_id": "r-1"} | more
    model = kind(**told)
    await model.register(backend)
    kept = model.store.read_model()
    for dump in (model.model_dump(), kept, kind.model_validate(kept).model_dump()):
        assert told.items() <= dump.items()


def test_the_older_name_of_the_state(tmp_path):
    model = Model(name="a", project="p", base_path=str(tmp_path))
    assert model.read_state() is None
    for state in ({"epoch": {"at": 2}}, {"other": 1}):
        model.write_state(state)
        assert Model(name="a", project="p", base_path=str(tmp_path)).read_state() == state


async def test_another_base_model_is_refused(model, backend):
    other = TrainableModel(name="ttt", project="p", base_model="gemma3-270m")
    with pytest.raises(StoreError, match="another `name`"):
        await other.register(backend)
    assert model.store.read_model()["base_model"] == "smollm2-135m"


async def test_both_spellings_write_the_same_history(model, backend):
    old_style = TrainConfig(learning_rate=3e-5, beta=0.1)
    experimental = {"logprob_calculation_chunk_size": 8, "ppo": True}
    for _ in range(2):
        await model.train([GROUP], config=old_style, _config=experimental)
    result = await backend.train(model, [GROUP])
    await model.log([GROUP], metrics=result.metrics, step=result.step, split="train")
    assert backend.options[0] == {"learning_rate": 3e-5, "beta": 0.1, **experimental}
    rows = model.store.history()
    assert [row.pop("step") for row in rows] == [1, 2, 3]
    drop = ("recorded_at", "training_step")
    assert [row["data/cum/num_trajectories"] for row in rows] == [2, 4, 6]
    first, second, third = ({k: v for k, v in row.items() if k not in drop and "/cum/" not in k} for row in rows)
    assert first == second == third
    assert third["loss/train"] == 0.5
    assert third["train/odd"] == 1
    assert third["train/won"] == 0.5
    assert third["data/step_num_groups_trainable"] == 1
    assert model.store.steps("train") == [1, 2, 3]


async def test_rollouts_survive_a_training_that_dies(model, backend):
    backend.fail = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="memory"):
        await model.train([GROUP])
    assert len(model.store.read_groups("train", 1)[0]) == 2
    assert model.store.history() == []
    backend.fail = None
    assert (await model.train([GROUP])).step == 1


async def test_log_takes_what_gather_gives(model, backend):
    await model.log([Trajectory(reward=1), ValueError("x")], split="val")
    assert (await model.log([], split="empty", step=4))["step"] == 4
    await model.log(metrics={"costs/judge": 1, "mine": 2, "nan": float("nan")}, split="val", step=7)
    first, empty, second = model.store.history()
    assert (first["val/reward"], first["val/exception_rate"], first["val/reward_std_dev"]) == (1, 0.5, 0)
    assert first["val/data/step_num_trajectories"] == 2
    assert "empty/reward" not in empty
    assert (second["costs/judge"], second["val/mine"], second["training_step"]) == (1, 2, 7)
    assert "val/nan" not in second
    assert [said[:3] for said in backend.told] == [("val", 0, 1), ("empty", 4, 0), ("val", 7, None)]
    assert [said[3]["recorded_at"] for said in backend.told] == [row["recorded_at"] for row in model.store.history()]
    with pytest.raises(TypeError, match="TrajectoryGroup"):
        await model.log([GROUP, Trajectory(reward=1)])


async def test_log_does_not_hold_the_loop(model):
    entries = [{"role": "user", "content": "x" * 400}] * 40
    groups = [TrajectoryGroup([Trajectory(messages_and_choices=entries)] * 8)] * 16
    loop, pauses = asyncio.get_running_loop(), []

    async def watch():
        while True:
            before = loop.time()
            await asyncio.sleep(0.001)
            pauses.append(loop.time() - before)

    watcher = asyncio.create_task(watch())
    await asyncio.sleep(0)
    await model.log(groups, split="train", step=1)
    watcher.cancel()
    assert len(pauses) > 3


async def test_the_best_and_the_latest_checkpoint_stay(model, backend):
    for step in range(1, 6):
        await backend.train(model, [])
        for reward in ([0.9, 0.1], [0.6, 0.8], [0.7, 0.7], [0.2], [0.1])[step - 1]:
            await model.log(metrics={"reward": reward}, split="val", step=step)
    await model.delete_checkpoints()
    assert model.store.steps_saved() == [3, 5]
    await model.delete_checkpoints()
    assert model.store.steps_saved() == [3, 5]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        await model.delete_checkpoints("test/reward")
        await model.delete_checkpoints("test/reward")
    assert model.store.steps_saved() == [5]
    assert len(caught) == 1


async def test_state_and_step_without_a_backend(model, backend):
    await model.train([GROUP])
    again = TrainableModel(name="ttt", project="p", base_model="smollm2-135m", base_path=str(backend.path))
    assert await again.get_step() == 1
    assert again.read_state() is None
    again.overwrite_state({"a": {"x": 1}})
    assert again.merge_state({"a": {"y": 2}}) == again.read_state() == {"a": {"x": 1, "y": 2}}
    assert await Model(name="m", project="p").get_step() == 0


async def test_options_of_sft_without_a_meaning_are_said_once(model, backend):
    await model.register(backend)
    with pytest.warns(UserWarning, match=r"_config of train_sft have no effect here: chunk, odd\.$"):
        await model.train_sft([], _config={"odd": 1, "chunk": 2, "none": None})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await model.train_sft([], _config={"odd": 3, "chunk": 4})
        await model.train_sft([], _config={"none": None})


async def test_sft_writes_its_own_section(model):
    result = await model.train_sft(iter([Trajectory(reward=0)] * 3))
    assert result.metrics == {"loss": 3.0}
    assert model.store.history()[-1]["sft/loss"] == 3.0
    count = len(model.store.history())
    await model.train_sft([], log_metrics=False)
    assert len(model.store.history()) == count
