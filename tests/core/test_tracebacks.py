"""Tracebacks of art_nb's errors in a notebook: the cell and the message, without the library's own frames."""

import re

import pytest

SETUP = """
import art_nb as art

async def rollout(model, scenario):
    return art.Trajectory(reward=0)

def caller():
    return art.view("nowhere")

model = art.TrainableModel(name="m", project="p", base_model="smollm2-135m")

async def fails(model, scenario):
    return 1 / 0

async def awaited():
    await art.evaluate(art.Model(name="m", project="p"), rollout, [], log=False)
"""


@pytest.fixture
def shell():
    from IPython.core.interactiveshell import InteractiveShell

    InteractiveShell.clear_instance()
    one = InteractiveShell.instance()
    one.run_cell(SETUP)
    yield one
    InteractiveShell.clear_instance()


@pytest.mark.parametrize(
    ("code", "error", "frames"),
    [
        ("caller()", "StoreError: There is no nowhere", ["caller()", "art.view("]),
        ("art.train(model, rollout, [1])", "NotRegisteredError: m has no backend yet.", ["art.train("]),
        ("art.gather_trajectory_groups(3).send(None)", "ArgumentError: gather_trajectory_groups takes a list", ["(3)"]),
        (
            "await art.gather_trajectories([fails(model, 1)], pbar_desc=None)",
            "ZeroDivisionError: division by zero",
            ["art.gather_trajectories(", "return 1 / 0"],
        ),
        ("await awaited()", "RolloutError: No rollout of the evaluation succeeded", ["awaited()", "art.evaluate("]),
    ],
)
def test_only_the_frames_of_the_caller_are_shown(shell, capsys, code, error, frames):
    result = shell.run_cell(code)
    text = re.sub(r"\x1b\[[\d;]*m", "", "".join(capsys.readouterr()))
    assert result.error_in_exec is not None
    assert error in text and all(frame in text for frame in frames)
    assert "/art_nb/" not in text and len(text.splitlines()) < 30
    names, tb = [], result.error_in_exec.__traceback__  # %debug and logs still have all frames
    while tb:
        names, tb = [*names, tb.tb_frame.f_globals["__name__"].split(".")[0]], tb.tb_next
    assert "art_nb" in names


def test_other_errors_keep_all_frames(shell, capsys):
    shell.run_cell("art.Model(name='m')")
    assert "Traceback" in "".join(capsys.readouterr())
