"""The profile of a real run: its phases cover the step, and every way to read it shows the same."""

import pytest
from support.registered import QUESTION, a_group, ask, at_home

import art_nb as art
from art_nb.cli.main import main
from art_nb.reports.profile import PHASE_MEANINGS
from art_nb.training.run import Run


async def rollout(model, scenario):
    choice = await ask(model, max_tokens=4)
    return art.Trajectory(messages_and_choices=[*QUESTION, choice], reward=choice.model_extra["token_ids"][0] % 7)


async def test_the_phases_add_up_to_the_step(tiny_model_dir, tmp_path):
    async with at_home(tiny_model_dir, tmp_path) as (model, backend):
        for seed in (1, 2):
            metrics = (await backend.train(model, [await a_group(model, seed)])).metrics
    seconds = [value for name, value in metrics.items() if name in {f"profile/{phase}_s" for phase in PHASE_MEANINGS}]
    assert sum(seconds) == pytest.approx(metrics["time/step_wall_s"], rel=0.1, abs=0.05)


async def test_a_run_shows_its_profile_here_from_disk_and_in_a_terminal(tiny_model_dir, tmp_path, capsys):
    async with at_home(tiny_model_dir, tmp_path) as (model, _):
        run = await art.train(model, rollout, range(9), steps=3, groups_per_step=2, rollouts_per_group=3, show=False)
        profile = run.profile()
        assert profile.steps == [2, 3], "the first step contains what was done before the run"
        used = {"prefill", "decode", "draw", "deliver", "forward", "backward", "optimizer", "publish", "save", "idle"}
        assert used <= set(profile.phases) <= set(PHASE_MEANINGS)
        assert Run.attach(model.store.path).profile() == profile
        capsys.readouterr()
        assert main(["profile", str(model.store.path), "--out", str(tmp_path / "profile.html")]) == 0
        assert str(profile) in capsys.readouterr().out
        assert (tmp_path / "profile.html").read_text().count("<rect") == 2 * len(profile.phases)


async def test_a_run_without_a_profile_is_one_sentence(tmp_path, capsys):
    model = art.TrainableModel(name="none", project="tests", base_model="x", base_path=str(tmp_path))
    model.store.append_history({"step": 1, "train/reward": 1.0})
    assert main(["profile", str(model.store.path)]) == 1
    assert "has no profile. Profiles are recorded by LocalBackend" in capsys.readouterr().err
