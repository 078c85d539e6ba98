"""Progress bars in a terminal and in a notebook that is saved."""

import io

import nbformat
from support.jupyter_kernels import run_notebook
from tqdm import tqdm

from art_nb.core.progress_bars import progress_bar

GATHER = """
import art_nb as art
import art_nb.core.progress_bars
from tqdm import tqdm

async def rollout():
    return art.Trajectory(messages_and_choices=[], reward=1)

await art.gather_trajectories([rollout() for _ in range(3)], pbar_desc="gather")
bar = art_nb.core.progress_bars.progress_bar(total=4, desc="half")
bar.update(2)
tqdm.write("above")
bar.close()
hidden = art_nb.core.progress_bars.progress_bar(total=4, desc="hidden", disable=True)
late = art_nb.core.progress_bars.progress_bar(total=4, desc="late", delay=60)
late.update()
late.close()
"""


def test_a_saved_notebook_shows_the_last_state_of_each_bar(tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(GATHER)])
    run_notebook(notebook, tmp_path, 120)
    outputs = notebook.cells[0].outputs
    bars = [output.data for output in outputs if output.output_type == "display_data"]
    assert [list(bar) for bar in bars] == [["text/plain"], ["text/plain"]]
    assert "gather: 100%" in bars[0]["text/plain"] and "3/3" in bars[0]["text/plain"]
    assert "half:  50%" in bars[1]["text/plain"]
    assert "widgets" not in notebook.metadata
    assert "".join(output.text for output in outputs if output.output_type == "stream") == "above\n"


def test_a_terminal_has_the_bar_of_tqdm():
    file = io.StringIO()
    with progress_bar(total=2, desc="here", file=file) as bar:
        bar.update(2)
    assert type(bar) is tqdm
    assert "here: 100%" in file.getvalue()
