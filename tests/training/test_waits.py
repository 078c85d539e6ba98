"""Evaluation and supervised training show a progress bar with the remaining time."""

import asyncio

import art_nb as art


async def answer(model, scenario):
    return art.Trajectory(messages_and_choices=[{"role": "user", "content": scenario}], reward=1.0)


async def test_an_evaluation_shows_a_bar(capsys):
    model = art.Model(name="prompted", project="tests", inference_model_name="m")
    await art.evaluate(model, answer, ["a", "b", "c"], log=False)
    assert "evaluate prompted, step 0: 100%" in capsys.readouterr().err
    await art.evaluate(model, answer, ["a"], log=False, show_progress=False)
    await asyncio.to_thread(asyncio.run, art.evaluate(model, answer, ["a"], log=False))  # as `on_step` of a run does
    assert capsys.readouterr().err == ""


async def test_supervised_training_shows_a_bar(named, tmp_path, capsys):
    talk = [{"role": "user", "content": "Say A1."}, {"role": "assistant", "content": "A1"}]
    talks = [art.Trajectory(messages_and_choices=talk) for _ in range(6)]
    config = art.TrainSFTConfig(learning_rate=1e-3, batch_size=2)
    for verbose in (True, False):
        model = named(f"sft-{verbose}")
        async with art.LocalBackend(path=tmp_path, verbose=verbose) as backend:
            await model.register(backend)
            capsys.readouterr()
            await model.train_sft(talks, config)
        assert (f"SFT sft-{verbose}: 100%" in capsys.readouterr().err) == verbose
