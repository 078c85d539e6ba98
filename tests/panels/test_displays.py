"""In a kernel our objects show themselves, and nothing is loaded before the first of them does."""

from importlib import import_module

import nbformat
import pytest
from support.jupyter_kernels import run_notebook

from art_nb.panels.ipython import SHOWN_BY

WIDGET = "application/vnd.jupyter.widget-view+json"
CELLS = [
    """import sys
from IPython import get_ipython
import art_nb as art
from art_nb.panels.ipython import attach_displays
assert attach_displays(get_ipython())
print(sorted({"anywidget", "ipywidgets", "art_nb.panels.viewer", "torch", "pyarrow"} & set(sys.modules)))""",
    "[1, 2, 3]",
    "print(sorted({'anywidget', 'ipywidgets', 'art_nb.panels.viewer', 'torch'} & set(sys.modules)))",
    """group = art.TrajectoryGroup([art.Trajectory(messages_and_choices=[
    {"role": "user", "content": "<b>hello</b>"}], reward=r) for r in (0.0, 1.0)], metadata={"scenario_id": "greetings"})
group""",
    "group.trajectories[1]",
    "[group, group]",
    """class Mine(art.TrajectoryGroup):
    pass
Mine(group.trajectories)""",
    "[group, 1]",
    "print('torch' in sys.modules)",
    "art.ui = 'html'\ngroup",
]


@pytest.fixture(scope="module")
def outputs(root):
    """What each cell put out."""
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    run_notebook(nb, root, 120, kernel="python3")
    return [cell.outputs for cell in nb.cells]


def test_nothing_is_loaded_before_the_first_display(outputs):
    assert outputs[0][0]["text"].strip() == "[]"
    assert outputs[2][0]["text"].strip() == "[]"
    assert outputs[8][0]["text"].strip() == "False"


def test_other_lists_are_displayed_as_ever(outputs):
    assert outputs[1][0]["data"] == {"text/plain": "[1, 2, 3]"}
    assert WIDGET not in outputs[7][0]["data"]


@pytest.mark.parametrize("cell", [4, 5, 6])
def test_our_objects_show_themselves_live_and_frozen(outputs, cell):
    (shown,) = outputs[cell]
    assert WIDGET in shown["data"]
    assert "&lt;b&gt;hello&lt;/b&gt;" in shown["data"]["text/html"]
    assert "<script" not in shown["data"]["text/html"]


def test_shown_again_the_former_is_frozen_where_it_stands(outputs):
    (shown,) = outputs[3]
    assert WIDGET not in shown["data"]
    assert "&lt;b&gt;hello&lt;/b&gt;" in shown["data"]["text/html"]


def test_where_no_widget_is_wanted_only_the_frozen_form_is_shown(outputs):
    (shown,) = outputs[9]
    assert WIDGET not in shown["data"]
    assert "greetings" in shown["data"]["text/html"]


def test_every_class_and_function_of_the_table_is_there():
    for places in SHOWN_BY.items():
        for module, name in places:
            assert hasattr(import_module(module), name), f"{module} has no {name}"
