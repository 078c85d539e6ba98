"""A run of RayBackend at a URL continues on another machine."""

import shutil

import pytest
from support.registered import QUESTION

import art_nb as art
from art_nb.runs.mirror import RunStorage, complete_steps, remote_folder


async def rollout(model, scenario):
    reply = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=QUESTION, max_tokens=6, logprobs=True
    )
    choice = reply.choices[0]
    return art.Trajectory(messages_and_choices=[*QUESTION, choice], reward=choice.model_extra["token_ids"][0] % 5)


@pytest.mark.slow
async def test_another_machine_continues(make_backend, make_model, tmp_path, monkeypatch):
    url, weights = f"file://{tmp_path}/bucket", {}
    for machine, steps in ((1, 1), (2, 2)):
        monkeypatch.setenv("ART_NB_CACHE", str(tmp_path / f"machine-{machine}"))
        model = make_model("stored")
        async with make_backend(samplers=1, path=url) as backend:
            backend.storage = RunStorage(url, backend.path, patience_s=0.2)
            await model.register(backend)
            begun = await model.get_step()
            await art.train(model, rollout, [0], steps=steps, groups_per_step=1, rollouts_per_group=4, show=False)
        weights[machine] = (model.store.checkpoint_dir(1) / "adapter_model.safetensors").read_bytes()
        assert begun == steps - 1
        shutil.rmtree(tmp_path / "machine-1", ignore_errors=True)
    assert weights[1] == weights[2]
    assert complete_steps(remote_folder(f"{url}/tests/models/stored").sizes()) == [0, 1, 2]
