"""The buttons of the live cell in real kernels: whatever the ipykernel, and whatever a cell does meanwhile."""

import time

import pytest
from support.jupyter_kernels import Front

VERSIONS = ("6.31.0", "7.3.0", "7.4.0")
SETUP = """
import asyncio, os, sys, time
import art_nb as art
import art_nb.panels.live_cell
from art_nb.core.events import GradientStep

async def rollout(model, scenario):
    messages = [{{"role": "user", "content": f"free: {{scenario}}"}}]
    reply = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_tokens=4, logprobs=True)
    reward = reply.choices[0].model_extra["token_ids"][0] % 7
    return art.Trajectory(messages_and_choices=[*messages, reply.choices[0]], reward=reward)

model = art.TrainableModel(name="tiny", project="tests", base_model={model!r})
await model.register(art.LocalBackend(path={path!r}, verbose=False))
batches = []
model.backend().bus.subscribe(lambda event: batches.append(time.monotonic()), GradientStep)
options = dict(steps=100_000, groups_per_step=2, rollouts_per_group=4)
"""
# ways in which a cell may go on while the run does, and whether buttons are heard then
RETURNED, AWAITING, JOINING = "run = art.train(model, rollout, range(9), **options)", "await run", "run.join()"
DEAF = {("7.4.0", JOINING)}  # nobody can be heard there: the cell says so, and the STOP file works


@pytest.fixture(scope="module", params=VERSIONS)
def kernel(request, root, tiny_model_dir, tmp_path_factory):
    """A kernel with a model at home in it."""
    made = Front(request.param, root, subshells=True)
    made.run(SETUP.format(model=str(tiny_model_dir), path=str(tmp_path_factory.mktemp("art"))))
    yield made
    made.close()


@pytest.fixture
def front(kernel):
    """The same, with nothing shown and nothing at work."""
    kernel.shown.clear()
    kernel.answers_pings = True
    yield kernel
    kernel.run("'run' in globals() and run.stop()")


def begin(front, waiting=""):
    """A run that trains, and a cell that waits for it in some way; it has begun, so an interrupt reaches it."""
    front.run(RETURNED)
    cell = front.execute(waiting) if waiting else ""
    begun = lambda tick: tick["rows"] >= 1 and bool(tick["button_stage"]) == bool(waiting)
    assert front.until(lambda: begun(front.tick())), front.stacks()
    return cell


def over(front):
    """The live cell has been replaced by its frozen form, and no comm is left of it."""
    views = [data for data in front.shown.values() if "application/vnd.jupyter.widget-view+json" in data]
    return not views and any("stopped" in str(data.get("text/html", "")) for data in front.shown.values())


@pytest.mark.parametrize("waiting", ["", AWAITING, JOINING], ids=["returned", "awaiting", "joining"])
def test_stop_is_heard_and_done(front, waiting, record_property):
    cell, version = begin(front, waiting), front.version
    if waiting:
        stage = "unavailable" if (version, waiting) in DEAF else "receiving"
        assert front.until(lambda: front.tick()["button_stage"] == stage), front.tick()
    pressed = time.monotonic()
    number = front.send("control", action="stop")  # of 100,000 steps: no other message could end the cell
    if (version, waiting) in DEAF:
        assert front.answer(number, 1) is None
        (stop_file(front)).touch()
    else:
        answer = front.answer(number)
        assert answer is not None and answer["ok"], answer
        record_property("acknowledged_s", answer["heard"] - pressed)  # 0.5 on an idle machine
    assert front.until(lambda: over(front))
    if waiting:
        assert front.until(lambda: cell in front.idle)
    assert front.text("print(run.status)") == "stopped"


def stop_file(front):
    """Where anybody may write, whatever the kernel hears."""
    from pathlib import Path

    return Path(front.tick()["where"]) / "STOP"


def test_stop_ends_training_within_a_micro_batch(front):
    front.run(
        "backend, before = model.backend(), await model.get_step()\n"
        "slow = lambda event: time.sleep(1)\n"
        "forget = backend.bus.subscribe(slow, GradientStep)"
    )  # each micro-batch takes as long
    front.run(RETURNED.replace("**options", "**options | dict(tokens_per_batch=24, groups_per_step=4)"))
    assert front.until(lambda: front.tick()["micro"][0] >= 1 and front.tick()["phase"] == "training")
    before = front.tick()
    assert before["micro"][1] > 4
    assert front.answer(front.send("control", action="stop"))["ok"]
    pressed = float(front.text("print(time.monotonic())"))
    assert front.until(lambda: over(front))
    later = "await asyncio.sleep(1.5); print(sum(t > %r for t in batches), run.status, await model.get_step() - before)"
    assert front.text(later % pressed).split() in (["0", "stopped", "0"], ["1", "stopped", "0"])
    front.run("forget()")


def test_pause_resume_and_stop_after_the_step(front):
    begin(front)
    assert front.answer(front.send("control", action="pause"))["reply"]["status"] in ("pausing", "paused")
    assert front.until(lambda: front.tick()["status"] == "paused")
    step = front.tick()["step"]
    time.sleep(0.5)
    front.until(lambda: False, 0.3)
    assert front.tick()["step"] == step
    assert front.answer(front.send("control", action="resume"))["reply"]["status"] == "running"
    assert front.until(lambda: front.tick()["step"] > step)
    assert front.answer(front.send("control", action="stop_after_step"))["ok"]
    assert front.until(lambda: over(front))
    assert front.text("print(run.status, run.step == max(model.store.steps_saved()))") == "stopped True"


def test_what_a_front_end_without_widgets_sees(front):
    front.answers_pings = False
    front.run(RETURNED)
    html = lambda: " ".join(str(data.get("text/html", "")) for data in front.shown.values())
    assert front.until(lambda: "No live view has responded" in html())
    assert front.until(lambda: not [state for state in front.comms.values() if "phase" in state.get("tick", {})])
    before = html()
    assert front.until(lambda: html() != before)  # it is kept current
    front.run("run.stop()")
    assert "stopped" in html()


def test_cells_that_wait_in_line_are_run(front):
    """As *Run all* does: the cell that awaits, and what was put in line behind it."""
    front.run(RETURNED.replace("**options", "**options | dict(steps=await model.get_step() + 3)"))
    front.outputs.clear()
    behind = ("print('then', run.step)", "run.join(); print('and then', run.step)")
    cells = [front.execute(code) for code in (AWAITING, *behind)]
    assert front.until(lambda: all(cell in front.idle for cell in cells)), front.stacks()
    said = "".join(out["content"]["text"] for out in front.outputs if out["type"] == "stream")
    assert said.index("then ") < said.index("and then ")


def test_interrupting_a_waiting_cell_pauses(front):
    cell = begin(front, AWAITING)
    assert front.until(lambda: front.tick()["button_stage"] == "receiving")  # no ping is being answered any more
    front.manager.interrupt_kernel()
    assert front.until(lambda: cell in front.idle), front.stacks()
    assert front.until(lambda: front.tick()["status"] == "paused")
    front.run("run.stop()")


def test_no_more_than_four_messages_a_second_and_no_comm_more(front):
    begin(front)
    comms = len(front.comms)
    front.until(lambda: False, 0.5)
    front.times.clear()
    start, step = time.time(), front.tick()["step"]
    passed = lambda: time.time() - start
    assert front.until(lambda: passed() > 5 and front.tick()["step"] > step + 3)
    assert len(front.comms) == comms
    assert (
        sum(sent > start for sent in front.times) <= 4 * passed() + 2
    )  # the rest were sent before `start` and arrived late
    front.run("run.stop()")


def test_messages_to_a_panel_fire_none_of_the_shells_events(front):
    """As a cell's end they would make matplotlib show, from another thread, what the running cell has half drawn."""
    front.run("fired = []; get_ipython().events.register('post_execute', lambda: fired.append(1))")
    front.run("art.TrajectoryGroup([art.Trajectory(messages_and_choices=[], reward=i) for i in range(2)])")
    views = [data.get("application/vnd.jupyter.widget-view+json") for data in front.shown.values()]
    comm = [view for view in views if view][-1]["model_id"]
    front.run("fired.clear()")
    for _ in range(3):
        assert front.answer(front.send("index", comm=comm, from_row=0))
    assert front.text("print(len(fired))") == "1", "of the cell that cleared them"
