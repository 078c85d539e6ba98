"""A run that trains nothing says so: in its state, its warnings, its saved output and its messages."""

from support.registered import at_home

import art_nb as art
from art_nb.panels.live_cell import static_form
from art_nb.panels.live_state import live_state
from art_nb.training.diagnostics import untrained
from art_nb.training.notifications import end_message
from art_nb.training.run import AttachedRun
from art_nb.training.run_display import as_html, phase_line


async def text_only(model, scenario):
    """A rollout that keeps the text of the reply instead of the Choice."""
    messages = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": scenario}]
    text_only.count += 1
    return art.Trajectory(messages_and_choices=messages, reward=float(text_only.count % 2))


async def run_of(model, rollout, **options):
    return await art.train(model, rollout, ["a", "b"], groups_per_step=2, rollouts_per_group=4, show=False, **options)


async def test_a_run_without_choices_ends_with_a_warning(tiny_model_dir, tmp_path):
    text_only.count = 0
    async with at_home(tiny_model_dir, tmp_path) as (model, _):
        run = await run_of(model, text_only, steps=2)
    assert run.status == "done" and run.step == 2, "the run is not stopped"
    state = live_state(run.progress)
    assert state["untrained"] and [warning["key"] for warning in state["warnings"]] == ["nothing_trained"]
    assert "no choice" in " ".join(state["notes"])
    for text in (static_form(run), as_html(run.progress), phase_line(run.progress), end_message(run), repr(run)):
        assert "nothing was trained" in text
    assert "how-to/debug" in static_form(run)
    row = run.history[-1]
    assert "train/truncated" not in row and "train/completion_tokens" not in row
    assert state["points"][-1][1:].count(None) >= 5, "what was not measured has no value"
    report = await art.doctor(model, text_only, ["a"], groups=1, show_progress=False)
    assert "0 tokens" not in str(report) and "no trajectory contains a Choice" in report["cost"].finding


async def test_a_run_that_trains_is_not_marked(tiny_model_dir, tmp_path):
    async def rollout(model, scenario):
        messages = [{"role": "user", "content": scenario}]
        reply = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=messages, max_tokens=4
        )
        choice = reply.choices[0]
        return art.Trajectory(messages_and_choices=[*messages, choice], reward=sum(choice.token_ids) % 7)

    async with at_home(tiny_model_dir, tmp_path) as (model, _):
        run = await run_of(model, rollout, steps=1)
    assert not untrained(run.progress.rows) and not live_state(run.progress)["untrained"]
    assert "nothing was trained" not in static_form(run) + end_message(run) + phase_line(run.progress)
    assert run.progress.past[-1].get("judging", 0) == 0, "there is no judge"


async def test_the_warning_about_failed_rollouts_names_the_error(tiny_model_dir, tmp_path):
    calls = []

    async def rollout(model, scenario):
        calls.append(scenario)
        if len(calls) % 2:
            raise ValueError(f"no move {len(calls)}")
        return await text_only(model, scenario)

    text_only.count = 0
    async with at_home(tiny_model_dir, tmp_path) as (model, _):
        run = await run_of(model, rollout, steps=2, max_exceptions=100)
        attached = AttachedRun(run.store)
    for view in (run, attached):
        found = {warning["key"]: warning for warning in live_state(view.progress)["warnings"]}
        assert "8 of the latest 8 errors: ValueError: no move" in found["failures"]["finding"]
        assert "art.failures(run)" in found["failures"]["advice"]
