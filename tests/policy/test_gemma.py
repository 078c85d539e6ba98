"""gemma3-270m: loads, samples, takes one training step."""

import pytest

import art_nb as art


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_gemma_samples_and_takes_a_step(tmp_path):
    model = art.TrainableModel(name="gemma", project="tests", base_model="gemma3-270m")

    async def rollout(model, question):
        messages = [{"role": "user", "content": question}]
        completion = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=messages, max_tokens=8
        )
        choice = completion.choices[0]
        return art.Trajectory(messages_and_choices=[*messages, choice], reward=len(choice.message.content))

    async with art.LocalBackend(path=tmp_path, verbose=False) as backend:
        await model.register(backend)
        groups = await art.gather_trajectory_groups(
            [art.TrajectoryGroup(rollout(model, q) for _ in range(4)) for q in ("Name a colour.", "Count to three.")],
            pbar_desc=None,
        )
        assert all(t.messages()[-1]["content"] for group in groups for t in group)
        result = await backend.train(model, groups, learning_rate=1e-4)
    assert result.step == 1
    assert result.metrics["loss/grad_norm"] > 0
    assert result.metrics["offpolicy/logprob_diff_mean"] < 0.1
